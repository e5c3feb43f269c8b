"""The Transformer-XL of Dai et al. 2019 (arXiv 1901.02860), section 3.

    h̃ = [SG(memory) ; h]                      memory before segment, along time
    q, k, v = h W_qᵀ, h̃ W_kEᵀ, h̃ W_vᵀ         queries only from the segment
    h ← LayerNorm(h + attention(q, k, v, R))    relative attention, see attention/equation.py
    h ← LayerNorm(h + FFN(h))
    new memory = the last mem_len hidden states that entered each layer, detached

Reference: `MemTransformerLM` of the authors' `pytorch/mem_transformer.py`. Deviations: batch-first; None instead of -1; the
memory keeps only what is read again (the original also stores the output of the last layer) and is masked per row; with
`ext_len` the first segment, too, is remembered without its end (the original swaps two arguments there, and reads it twice).

Shapes: B batch, T tgt_len, M memory, S = M + T keys, N heads, H d_head, D d_model, V vocabulary.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from transformer_xl.errors import ConfigError
from transformer_xl.kinds import import_class
from transformer_xl.model.attention.block import AttentionBlock
from transformer_xl.model.attention.equation import first_keys
from transformer_xl.model.backends import choose_backend
from transformer_xl.model.call import Execution, Rows
from transformer_xl.model.gates import FIRST_BIAS
from transformer_xl.model.language_model import LanguageModel
from transformer_xl.model.layers import make_layer
from transformer_xl.model.memory import Mems, remembered
from transformer_xl.model.ngrams import earlier_tokens, make_ngrams
from transformer_xl.model.sequence_model import make_softmax
from transformer_xl.model.shift import first_positions, without_oldest
from transformer_xl.model_config import TransformerXLConfig


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
        self.block_class: type[AttentionBlock] = import_class(config.attention_kind.block)
        if config.keeps_keys and self.block_class.frozen is AttentionBlock.frozen:
            raise ConfigError(
                f"attention '{config.attention}' keeps keys (keeps_keys=True), but {self.block_class.__name__} has no method "
                "'frozen'; define it, or register the kind with keeps_keys=False"
            )
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
        if length is None and self.config.mem_lens:
            self.check_memory()
            return self.empty_mems(batch_size, length=[self.n_kept_of(n) for n in self.memory_lengths])
        return self.empty_mems(batch_size, length=length)

    @property
    def n_kept(self) -> int:
        """Positions that the memory keeps: `mem_len`, and as many as a shift needs before the oldest of these."""
        return self.n_kept_of(self.mem_len)

    def n_kept_of(self, mem_len: int) -> int:
        """Return the positions that a layer keeps which sees `mem_len` of them."""
        return mem_len + self.config.shift_reach if mem_len else 0

    @property
    def memory_lengths(self) -> list[int]:
        """Positions of memory that each layer sees: `mem_len` at most."""
        return [min(n, self.mem_len) for n in self.config.mem_lens or [self.mem_len] * self.config.n_layer]

    def init_own(self, name: str, parameter: Tensor) -> bool:
        """Let the kind of attention set its own parameters; convolutions begin at 0, gates almost closed."""
        if name.endswith((".taps", ".gate.bias")):
            parameter.fill_(FIRST_BIAS if name.endswith(".gate.bias") else 0.0)
            return True
        return name in self._learned and self.block_class.init_own(name, parameter)

    @property
    def learned_positions(self) -> dict[str, Tensor]:
        """The parameters of the kind of attention that belong to the whole model, by name."""
        return {name: getattr(self, name) for name in self._learned}

    @property
    def keeps_keys(self) -> bool:
        """Whether a `Reader` reads as this model does. A subclass may read otherwise, or remember more, so it has to say so."""
        return self.config.keeps_keys and type(self) is TransformerXL

    @property
    def window(self) -> int | None:
        """How many keys a query sees, itself included, with `same_length`; None: memory and all of its segment before it."""
        return self.mem_len + self.config.same_length_besides_self if self.same_length else None

    def reach(self, tgt_len: int) -> int:
        """Return how far back memory goes, in whole segments: each layer adds that of the layer below, n-grams their tokens."""
        if not self.mem_len:
            return 0
        kept = map(self.n_kept_of, self.memory_lengths)
        return sum(math.ceil(n / tgt_len) for n in (*kept, self.config.n_earlier)) * tgt_len

    def check_context(self) -> None:
        """Refuse lengths that cannot work together."""
        if self.clamp_len is not None and self.clamp_len < 1:
            raise ConfigError(f"clamp_len ({self.clamp_len}) must be at least 1")
        self.config.check_clamp_len(self.clamp_len)
        if self.config.mem_lens and (self.mem_len > self.config.mem_len or self.same_length):
            what = "same_length (True) has to be False"
            if self.mem_len > self.config.mem_len:
                what = f"mem_len ({self.mem_len}) can be at most {self.config.mem_len}"
            raise ConfigError(f"layers of this model remember {list(self.config.mem_lens)} positions, so {what}")
        if self.same_length and self.mem_len == 0:
            raise ConfigError("same_length (True) needs mem_len (0) of at least 1: a query sees mem_len keys")

    def check_backend(self, backend: str, device: torch.device) -> None:
        """Refuse an attention backend that cannot run on a device."""
        if self.config.has_backends:
            choose_backend(backend, device, dtype=self.dtype, d_head=self.config.d_head)

    def read(  # pyright: ignore[reportIncompatibleMethodOverride]  # it gets its own memory back
        self,
        ids: Tensor,
        *,
        mems: Mems | None = None,
        rows: Rows = Rows(),
        execution: Execution = Execution(),
        keep_graph: bool = False,
    ) -> tuple[Tensor, Mems]:
        """Return the input of the softmax, (B, T, D), and the new memory; the arguments are those of `forward`."""
        (batch_size, T), n_pad = ids.shape[:2], rows.n_pad  # a body reads vectors
        if mems is None:
            mems = self.init_mems(batch_size, length=None if self.config.zero_first_memory else 0)
        views = self._views(mems, rows, T, execution.backend)
        h_BTD, tokens = self.embed_after(mems, ids, rows)
        kept: dict[str, Any] = {"ext_len": self.ext_len, "keep_graph": keep_graph}
        hidden = []
        for i, (layer, mem_len) in enumerate(zip(self.layers, self.memory_lengths, strict=True)):
            view = views[mem_len]
            mem_BMD, h_BTD = self.block_class.enter(self, i, mems.hidden[i], h_BTD, n_pad)
            # what enters the layer, before it runs; nothing would read the output of the last one
            hidden.append(remembered(mem_BMD, h_BTD, n_pad, mem_len=self.n_kept_of(mem_len), **kept))
            seen = {"mem_BMD": mem_BMD, "first_BT": view.first, "n_pad": n_pad, **view.looking_back}
            h_BTD = execution.run(layer, h_BTD, **seen, **view.positions[i])
        h_BTD = self.drop_output(self.final_norm(h_BTD))
        longest = views[self.mem_len]
        n_valid = (longest.n_own - self.ext_len).clamp(min=0, max=hidden[longest.layer].shape[1])
        return h_BTD, self.mems_class(tuple(hidden), n_valid, tokens)

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

    def _views(self, mems: Mems, rows: Rows, tgt_len: int, backend: str) -> "dict[int, _View]":
        """Return what layers with each length of memory see."""
        views: dict[int, _View] = {}
        for i, mem_len in enumerate(self.memory_lengths):
            length = mems.hidden[i].shape[1]
            if mem_len in views and length != views[mem_len].length:
                raise ValueError(
                    "these mems are longer than those of this view of a model with a memory per layer; begin with its init_mems"
                )
            if mem_len not in views:
                n_valid = mems.n_valid if self.config.mem_lens is None else mems.n_valid.clamp(max=length)
                views[mem_len] = self._view(i, mem_len, length, n_valid, rows, tgt_len, backend)
        return views

    def _view(self, layer: int, mem_len: int, length: int, n_valid: Tensor, rows: Rows, tgt_len: int, backend: str) -> "_View":
        """Return the view of a layer whose memory holds `length` states, of which `n_valid` are real in each row."""
        sizes = {"tgt_len": tgt_len, "memory_length": length}
        first_BT, n_own = first_keys(rows.document_starts, n_valid, rows.n_pad, **sizes, window=self.window)
        n_before, looking_back = 0, {}
        if reach := self.config.shift_reach:
            n_before = min(reach, max(length - mem_len, 0))
            looking_back = {"n_before": n_before, "start_BL": first_positions(rows, n_valid, **sizes)}
        if n_before:
            first_BT = without_oldest(first_BT, n_before, rows.n_pad, n_key=length - n_before + tgt_len)
        positions = self.block_class.positions(self, length - n_before + tgt_len, backend=backend)
        return _View(layer, length, first_BT, n_own, looking_back, positions)


class _View(NamedTuple):
    """What layers with equally long memories see of memory and segment."""

    layer: int  # the first of them
    length: int  # positions that their memories hold
    first: Tensor  # see `first_keys`, as `n_own`
    n_own: Tensor
    looking_back: dict[str, Any]  # how far a shift looks back; nothing without one
    positions: list[dict[str, Any]]  # of each layer
