"""Our LSTM, with the tables of n-grams that our recipes of the race have."""

from dataclasses import replace

import torch
from torch import Tensor

from rivals.settings import LstmNgramsConfig
from transformer_xl.batch import Rows
from transformer_xl.model.call import Execution
from transformer_xl.model.lstm import Lstm
from transformer_xl.model.memory import Mems
from transformer_xl.model.ngrams import NgramEmbedding, earlier_tokens


class LstmNgrams(Lstm):
    """An LSTM that adds vectors of n-grams to those of tokens; its memory holds the last tokens, too."""

    config: LstmNgramsConfig  # pyright: ignore[reportIncompatibleVariableOverride]  # of a frozen attribute, this is safe

    def __init__(self, config: LstmNgramsConfig) -> None:
        super().__init__(config)
        assert config.vocab_size is not None
        self.ngrams = NgramEmbedding(config.vocab_size, config.ngram_rows, d_model=config.d_model, scale=config.embedding_scale)
        self.init_weights()

    def init_mems(self, batch_size: int, *, length: int | None = None) -> Mems:
        """Return the state of streams that begin: zeros, and no tokens."""
        tokens = torch.zeros(batch_size, len(self.config.ngram_rows), dtype=torch.int64, device=self.device)
        return replace(super().init_mems(batch_size, length=length), tokens=tokens)

    def read(
        self,
        ids: Tensor,
        *,
        mems: Mems | None = None,
        rows: Rows = Rows(),
        execution: Execution = Execution(),
        keep_graph: bool = False,
    ) -> tuple[Tensor, Mems]:
        """Return the input of the softmax, (B, T, D), the new state and the last tokens."""
        mems = self.init_mems(len(ids)) if mems is None else mems
        assert mems.tokens is not None
        earlier, last = earlier_tokens(mems.tokens, ids, rows, ext_len=self.ext_len)
        x_BTD = self.embed(ids) + self.ngrams(earlier, ids)
        h_BTD, new = self.read_vectors(x_BTD, mems=mems, rows=rows, execution=execution, keep_graph=keep_graph)
        return h_BTD, replace(new, tokens=last if self.mem_len else torch.zeros_like(last))
