"""`Decoder`: a model with the memory of what it has read, fed token by token or text by text."""

import torch
from torch import Tensor

from transformer_xl.config import TransformerXLConfig
from transformer_xl.model.precision import Precision, autocast
from transformer_xl.model.transformer_xl import TransformerXL


class Decoder:
    """Read streams with a memory of fixed size; the cost of a token does not grow with what was read.

    Args:
        model: put in evaluation mode.
        batch_size: rows, each a stream of its own.
        mem_len: positions of memory; None: the model's.
        tgt_len: longest piece read at once; longer input is read in pieces. None: 128, with al_rfou the training's.
        precision: of the matrix products.

    Example:
        >>> from transformer_xl.config import TransformerXLConfig
        >>> model = TransformerXL(TransformerXLConfig(vocab_size=4, n_layer=1, d_model=8, n_head=1, d_head=8, d_inner=8))
        >>> Decoder(model, batch_size=2).feed(torch.tensor([[0, 1, 2], [3, 2, 1]])).shape
        torch.Size([2, 4])
    """

    def __init__(
        self,
        model: TransformerXL,
        *,
        batch_size: int = 1,
        mem_len: int | None = None,
        tgt_len: int | None = None,
        precision: Precision = "fp32",
    ) -> None:
        self.model = model.eval().with_context(mem_len=mem_len)
        self.tgt_len = tgt_len or _segment_length(model.config)
        self.precision: Precision = precision
        self.mems = self.model.init_mems(batch_size)
        # Without a memory, and where positions count from a segment's end, tokens cannot be read one by one: the segment that
        # they belong to is kept, and read again with each of them.
        self._rereads = self.model.mem_len == 0 or model.config.counts_from_end
        self._open = torch.zeros(batch_size, 0, dtype=torch.int64, device=self.model.device)
        self._n_foreign = torch.zeros(batch_size, dtype=torch.int64, device=self.model.device)

    @torch.no_grad()
    def feed(self, ids: Tensor) -> Tensor:
        """Read on, and score what may come next.

        Args:
            ids: int64 (B, T), the next T ≥ 1 tokens of each row.

        Returns:
            Scores (B, V) of the token after the last one, fp32.
        """
        device = self.model.device
        logits = None
        with autocast(device, self.precision):
            for piece in ids.to(device).split(self.tgt_len, dim=1):
                if self._rereads:
                    logits = self._reread(piece)
                else:
                    out = self.model(piece, mems=self.mems)
                    self.mems, logits = out.mems, out.logits
        assert logits is not None  # an empty text is one empty piece, which the model refuses
        return logits[:, -1].float()

    def _reread(self, ids: Tensor) -> Tensor | None:
        """Read the open segment with what follows; what it closes by that goes to memory, or without one is forgotten."""
        self._open = torch.cat([self._open, ids], dim=1)
        n_closed = max(self._open.shape[1] - self.tgt_len, 0)
        if n_closed and self.model.mem_len:
            n_closed = self.tgt_len
            self.mems = self.model(self._open[:, :n_closed], mems=self.mems, n_pad=self._n_foreign.clamp(max=n_closed)).mems
        self._open = self._open[:, n_closed:]
        self._n_foreign = (self._n_foreign - n_closed).clamp(min=0)
        return self.model(self._open, mems=self.mems, n_pad=self._n_foreign).logits

    def reset(self, rows: Tensor | None = None) -> None:
        """Forget what was read.

        Args:
            rows: bool (B,), True for rows that forget; None: all.
        """
        forget = torch.ones(self.mems.batch_size, dtype=torch.bool) if rows is None else rows
        self.mems = self.mems.reset(forget, valid=self.model.config.zero_first_memory)
        self._n_foreign = torch.where(forget.to(self._n_foreign.device), self._open.shape[1], self._n_foreign)


def _segment_length(config: TransformerXLConfig) -> int:
    """Return how much to read at once; a table of positions tells how long the segments were in training."""
    trained = (config.max_klen or 0) - config.mem_len
    return trained if config.counts_from_end and trained > 0 else 128
