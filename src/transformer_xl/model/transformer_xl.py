"""The Transformer-XL of Dai et al. 2019 (arXiv 1901.02860), section 3.

    h̃ = [SG(memory) ; h]                      memory before segment, along time
    q, k, v = h W_qᵀ, h̃ W_kEᵀ, h̃ W_vᵀ         queries only from the segment
    h ← LayerNorm(h + attention(q, k, v, R))    relative attention, see kernels/equation.py
    h ← LayerNorm(h + FFN(h))
    new memory = the last mem_len hidden states that entered each layer, detached

Reference: `MemTransformerLM` of the authors' `pytorch/mem_transformer.py`. Deviations: batch-first; None instead of -1; the
memory keeps only what is read again (the original also stores the output of the last layer) and is masked per row; with
`ext_len` the first segment, too, is remembered without its end (the original swaps two arguments there, and reads it twice).

Shapes: B batch, T tgt_len, M memory, S = M + T keys, N heads, H d_head, D d_model, V vocabulary.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn

from transformer_xl.config.model import TransformerXLConfig
from transformer_xl.errors import ConfigError
from transformer_xl.kernels.equation import first_keys
from transformer_xl.model.adaptive import make_softmax
from transformer_xl.model.attention.kinds import attention_kind
from transformer_xl.model.base import LanguageModel
from transformer_xl.model.call import Execution, Rows
from transformer_xl.model.gates import FIRST_BIAS
from transformer_xl.model.layers import make_layer
from transformer_xl.model.memory import Mems, remembered
from transformer_xl.model.ngrams import earlier_tokens, make_ngrams
from transformer_xl.model.shift import first_positions, without_oldest


class TransformerXL(LanguageModel):
    """A language model that reads a stream segment by segment, with a memory of fixed size.

    Args:
        config: sizes and options; `vocab_size` must be set.

    Attributes:
        config: its settings.

    Example:
        >>> model = TransformerXL(TransformerXLConfig(vocab_size=11, n_layer=2, d_model=8, n_head=2, d_head=4, d_inner=16))
        >>> out = model(torch.zeros(3, 5, dtype=torch.int64))
        >>> out.logits.shape, out.mems.length
        (torch.Size([3, 5, 11]), 5)
    """

    kind = TransformerXLConfig.kind
    config: TransformerXLConfig  # pyright: ignore[reportIncompatibleVariableOverride]  # of a frozen attribute, this is safe

    def __init__(self, config: TransformerXLConfig) -> None:
        super().__init__(config)
        self.clamp_len, self.same_length = config.clamp_len, config.same_length
        self.block_class = attention_kind(config.attention)
        self.block_class.check(config)
        self.check_context()
        self.ngrams = make_ngrams(config)
        self.layers = nn.ModuleList(make_layer(self.block_class, config) for _ in range(config.n_layer))
        shapes = self.block_class.shapes(config)
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(shape)))
        self._learned = tuple(shapes)
        norm = nn.LayerNorm(config.d_model, eps=config.layer_norm_epsilon)
        self.final_norm = norm if config.final_norm else nn.Identity()
        self.softmax = make_softmax(config)
        self.init_weights()

    def init_mems(self, batch_size: int, *, length: int | None = None) -> Mems:
        """Return an empty memory of hidden states."""
        return self.empty_mems(batch_size, length=length)

    @property
    def n_kept(self) -> int:
        """Positions that the memory keeps: `mem_len`, and as many as a shift needs before the oldest of these."""
        return self.mem_len + self.config.shift_reach if self.mem_len else 0

    def init_own(self, name: str, parameter: Tensor) -> bool:
        """Let the kind of attention set its own parameters; gates begin almost closed."""
        if name.endswith(".gate.bias"):
            parameter.fill_(FIRST_BIAS)
            return True
        return name in self._learned and self.block_class.init_own(name, parameter)

    @property
    def learned_positions(self) -> dict[str, Tensor]:
        """The parameters of the kind of attention that belong to the whole model, by name."""
        return {name: getattr(self, name) for name in self._learned}

    @property
    def keeps_keys(self) -> bool:
        """Whether a `Reader` reads as this model does: the kind of attention has a frozen form of its own.

        A subclass of this class may read otherwise, or remember more, so it has to say so.
        """
        return "frozen" in vars(self.block_class) and type(self) is TransformerXL

    @property
    def described(self) -> str:
        """What kind of model it is, for messages."""
        return f"{super().described} with attention '{self.config.attention}'"

    @property
    def learned_length(self) -> int | None:
        """Tokens of a segment that it has learned positions for; None: any number."""
        return max(0, (self.config.max_klen or 0) - self.config.mem_len) if self.block_class.learns_positions else None

    @property
    def trained_length(self) -> int | None:
        """Tokens of a segment, if learned positions count from its end."""
        return self.learned_length if self.block_class.counts_from_end else None

    @property
    def window(self) -> int | None:
        """How many keys a query sees, itself included, with `same_length`; None: memory and all of its segment before it."""
        return self.mem_len + self.config.same_length_besides_self if self.same_length else None

    def reach(self, tgt_len: int) -> int:
        """Return how far back memory goes, in whole segments: each layer adds that of the layer below, n-grams their tokens."""
        if not self.mem_len:
            return 0
        return (self.config.n_layer * math.ceil(self.n_kept / tgt_len) + math.ceil(self.config.n_earlier / tgt_len)) * tgt_len

    def check_context(self) -> None:
        """Refuse lengths that cannot work together."""
        if self.clamp_len is not None and self.clamp_len < 1:
            raise ConfigError(f"clamp_len ({self.clamp_len}) must be at least 1")
        if self.clamp_len is not None and not self.block_class.limits_distances:
            raise ConfigError(
                f"clamp_len ({self.clamp_len}) must be none: attention '{self.config.attention}' tells all distances apart"
            )
        if self.same_length and self.mem_len == 0:
            raise ConfigError("same_length (True) needs mem_len (0) of at least 1: a query sees mem_len keys")

    def check_backend(self, backend: str, device: torch.device) -> None:
        """Refuse an attention backend that cannot run on a device."""
        self.block_class.check_backend(backend, device, dtype=self.dtype, d_head=self.config.d_head)

    def read(  # pyright: ignore[reportIncompatibleMethodOverride]  # it gets its own memory back
        self,
        ids: Tensor,
        *,
        mems: Mems | None = None,
        rows: Rows = Rows(),
        execution: Execution = Execution(),
        keep_graph: bool = False,
    ) -> tuple[Tensor, Mems]:
        """Return the last states, (B, T, D), and the new memory; the arguments are those of `forward`."""
        (batch_size, T), n_pad = ids.shape[:2], rows.n_pad  # a body reads vectors
        if mems is None:
            mems = self.init_mems(batch_size, length=None if self.config.zero_first_memory else 0)
        M = mems.length
        first_BT, n_own, looking_back = self._seen(mems, rows, T)
        positions = self.block_class.positions(self, M - looking_back.get("n_before", 0) + T, backend=execution.backend)
        h_BTD, tokens = self.embed_after(mems, ids, rows)
        hidden = []
        for i, layer in enumerate(self.layers):
            mem_BMD, h_BTD = self.block_class.enter(self, i, mems.hidden[i], h_BTD, n_pad)
            # what enters the layer, before it runs; nothing would read the output of the last one
            hidden.append(remembered(mem_BMD, h_BTD, n_pad, mem_len=self.n_kept, ext_len=self.ext_len, keep_graph=keep_graph))
            seen = {"mem_BMD": mem_BMD, "first_BT": first_BT, "n_pad": n_pad, **looking_back, **positions[i]}
            h_BTD = execution.run(layer, h_BTD, **seen)
        n_valid = (n_own - self.ext_len).clamp(min=0, max=hidden[0].shape[1])
        return self.final_norm(h_BTD), self.mems_class(tuple(hidden), n_valid, tokens)

    def last_tokens(self, mems: Mems) -> Tensor:
        """Return the last tokens that a memory holds, int64 (B, K); a ValueError if these are not what n-grams need."""
        K = self.config.n_earlier
        if mems.tokens is None or mems.tokens.shape[1] != K:
            found = 0 if mems.tokens is None else mems.tokens.shape[1]
            raise ValueError(f"these mems hold {found} tokens, and n-grams begin with the last {K}; use model.init_mems")
        return mems.tokens

    def embed_after(self, mems: Mems, ids: Tensor, rows: Rows) -> tuple[Tensor, Tensor | None]:
        """Return the vectors of ids, (B, T, D), with those of their n-grams, and the last tokens for the next segment."""
        h_BTD = self.embedding(ids)
        if self.ngrams is None:
            return self.drop_words(h_BTD, ids), None
        earlier, last_BK = earlier_tokens(self.last_tokens(mems), ids, rows, ext_len=self.ext_len)
        h_BTD = self.drop_words(h_BTD + self.ngrams(earlier, ids), ids)
        return h_BTD, last_BK if self.mem_len else torch.zeros_like(last_BK)

    def _seen(self, mems: Mems, rows: Rows, tgt_len: int) -> tuple[Tensor, Tensor, dict[str, Any]]:
        """Return what `first_keys` does, and how far back shifts look: nothing without one."""
        sizes = {"tgt_len": tgt_len, "memory_length": mems.length}
        first_BT, n_own = first_keys(rows.document_starts, mems.n_valid, rows.n_pad, **sizes, window=self.window)
        if not self.config.shift_reach:
            return first_BT, n_own, {}
        n_before = min(self.config.shift_reach, max(mems.length - self.mem_len, 0))
        looking_back = {"n_before": n_before, "start_BL": first_positions(rows, mems.n_valid, **sizes)}
        if n_before:
            first_BT = without_oldest(first_BT, n_before, rows.n_pad, n_key=mems.length - n_before + tgt_len)
        return first_BT, n_own, looking_back
