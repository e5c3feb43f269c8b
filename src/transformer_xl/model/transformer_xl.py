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
from collections.abc import Callable

import torch
from torch import Tensor, nn

from transformer_xl.batch import Rows
from transformer_xl.config.model import TransformerXLConfig
from transformer_xl.errors import ConfigError
from transformer_xl.kernels.choose import Attention, choose_backend
from transformer_xl.kernels.equation import Positions
from transformer_xl.model.adaptive import make_softmax
from transformer_xl.model.attention.block import Distances
from transformer_xl.model.attention.kinds import attention_kind
from transformer_xl.model.base import LanguageModel
from transformer_xl.model.call import Execution
from transformer_xl.model.gates import FIRST_BIAS
from transformer_xl.model.layers import make_layer
from transformer_xl.model.mask import Mask
from transformer_xl.model.memory import Mems, remembered
from transformer_xl.model.ngrams import earlier_tokens, make_ngrams


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
        self.attention_kind = attention_kind(config.attention)
        self.attention_kind.check(config)
        self.check_context()
        self.ngrams = make_ngrams(config)
        self.layers = nn.ModuleList(make_layer(self.attention_kind, config) for _ in range(config.n_layer))
        self._learned = self.attention_kind.shapes(config)
        for name, shape in self._learned.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(shape)))
        norm = nn.LayerNorm(config.d_model, eps=config.layer_norm_epsilon)
        self.final_norm = norm if config.final_norm else nn.Identity()
        self.softmax = make_softmax(config)
        self.init_weights()

    @property
    def n_kept(self) -> int:
        return self.mem_len + self.config.shift_reach if self.mem_len else 0  # a shift reads what is before the oldest key

    def init_own(self, name: str, parameter: Tensor) -> bool:
        if name.endswith(".gate.bias"):
            parameter.fill_(FIRST_BIAS)  # almost closed
            return True
        return name in self._learned and self.attention_kind.init_own(name, parameter)

    @property
    def learned_positions(self) -> dict[str, Tensor]:
        """The parameters of the kind of attention that belong to the whole model, by name."""
        return {name: getattr(self, name) for name in self._learned}

    @property
    def keeps_keys(self) -> bool:
        # a subclass may read otherwise, or remember more, so it has to say so
        return self.attention_kind.keeps_keys() and type(self) is TransformerXL

    @property
    def described(self) -> str:
        return f"{super().described} with attention '{self.config.attention}'"

    @property
    def learned_length(self) -> int | None:
        return max(0, (self.config.max_klen or 0) - self.config.mem_len) if self.attention_kind.learns_positions else None

    @property
    def trained_length(self) -> int | None:
        return self.learned_length if self.attention_kind.counts_from_end else None

    @property
    def window(self) -> int | None:
        return self.mem_len + self.config.same_length_besides_self if self.same_length else None

    def reach(self, tgt_len: int) -> int:
        if not self.mem_len:
            return 0
        # what a layer remembers reaches as far back as the layer below; n-grams read tokens before
        return (self.config.n_layer * math.ceil(self.n_kept / tgt_len) + math.ceil(self.config.n_earlier / tgt_len)) * tgt_len

    def check_context(self) -> None:
        if self.clamp_len is not None and not self.attention_kind.limits_distances:
            raise ConfigError(
                f"clamp_len ({self.clamp_len}) must be none: attention '{self.config.attention}' tells all distances apart"
            )
        if self.same_length and self.mem_len == 0:
            raise ConfigError("same_length (True) needs mem_len (0) of at least 1: a query sees mem_len keys")

    def check_backend(self, backend: str, device: torch.device) -> None:
        self.backend(backend, device)

    def backend(self, name: str, device: torch.device) -> Attention:
        """Return the function that computes attention; arguments and errors are those of `check_backend`."""
        kind = self.attention_kind
        return choose_backend(name, device, dtype=self.dtype, d_head=self.config.d_head, by_keys=kind.by_keys)

    def positions(self, n_key: int, *, drop: Callable[[Tensor], Tensor] | None = None) -> list[Positions]:
        """Return what each layer's scores are made of besides queries and keys.

        Args:
            n_key: S.
            drop: dropout of encoded distances; None: that of what enters the first layer.

        Raises:
            ConfigError: the kind of attention turns queries and keys where a `Reader` would not know of it.
        """
        distances = Distances(n_key, self.clamp_len, self.dtype, self.device, drop or self.drop_input)
        positions = self.attention_kind.positions(self.config, self.learned_positions, distances)
        if any(of_layer.turns is not None for of_layer in positions):
            raise ConfigError(f"attention '{self.config.attention}' must give turns by its method `turns`, not by `positions`")
        turns = self.attention_kind.turns(self.config, torch.arange(n_key, device=self.device), self.dtype)
        return [of_layer._replace(turns=own) for of_layer, own in zip(positions, turns, strict=True)]

    def told_apart(self, n_key: int) -> int:
        """Return how many of the distances 0, …, `n_key` - 1 are told apart; all farther ones count as the last of them."""
        table = self.config.max_klen if self.attention_kind.learns_positions else None
        return min(n_key, table or n_key, n_key if self.clamp_len is None else self.clamp_len + 1)

    def read(  # pyright: ignore[reportIncompatibleMethodOverride]  # it gets its own memory back
        self,
        ids: Tensor,
        *,
        mems: Mems | None = None,
        rows: Rows = Rows(),
        execution: Execution = Execution(),
        keep_graph: bool = False,
    ) -> tuple[Tensor, Mems]:
        """Return the last states, (B, T, D), and the new memory; the arguments are those of `forward`, see `embed_after`."""
        B, T = ids.shape[:2]
        past: Mems = self.init_mems(B, length=None if self.config.zero_first_memory else 0) if mems is None else mems
        mask = self._mask(past, rows, T)
        h_BTD, tokens = self.embed_after(past, ids, rows)
        n_before = 0 if self.attention_kind.counts_from_end else mask.n_before  # which are no keys, but states
        positions = self.positions(past.length - n_before + T)
        positions = self.attention_kind.complete_together(self.attention_blocks(), positions)
        backend = self.backend(execution.backend, self.device)
        hidden = []
        for i, layer in enumerate(self.layers):
            mem_BMD, h_BTD = self.enter(i, past.hidden[i], h_BTD, positions[i], mask.n_pad)
            # a layer's memory is made of what enters it; the output of the last layer enters none and is not kept
            kept = remembered(mem_BMD, h_BTD, mask.n_pad, mem_len=self.n_kept, ext_len=self.ext_len, keep_graph=keep_graph)
            hidden.append(kept)
            h_BTD = execution.run(layer, h_BTD, mem_BMD=mem_BMD, mask=mask, positions=positions[i], backend=backend)
        n_valid = (mask.n_own - self.ext_len).clamp(min=0, max=hidden[0].shape[1])
        return self.final_norm(h_BTD), self.mems_class(tuple(hidden), n_valid, tokens)

    def enter(
        self, layer: int, mem_BMD: Tensor, h_BTD: Tensor, positions: Positions, n_pad: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return memory and segment as they enter a layer: with absolute positions, and before the first with dropout."""
        drops_all = self.attention_kind.drops_positions
        if layer == 0 and not drops_all:
            h_BTD = self.drop_input(h_BTD)
        if positions.states is not None:
            mem_BMD, h_BTD = add_positions(positions.states, mem_BMD, h_BTD, n_pad)
        return mem_BMD, self.drop_input(h_BTD) if layer == 0 and drops_all else h_BTD

    def last_tokens(self, mems: Mems) -> Tensor:
        """Return the last tokens that a memory holds, int64 (B, K); a ValueError if these are not what n-grams need."""
        K = self.config.n_earlier
        if mems.tokens is None or mems.tokens.shape[1] != K:
            found = 0 if mems.tokens is None else mems.tokens.shape[1]
            raise ValueError(f"these mems hold {found} tokens, and n-grams begin with the last {K}; use model.init_mems")
        return mems.tokens

    def embed_after(self, mems: Mems, ids: Tensor, rows: Rows) -> tuple[Tensor, Tensor | None]:
        """Return the vectors of ids, (B, T, D), with those of their n-grams, and the last tokens for the next segment."""
        # `ids` may be vectors (B, T, D), of a body or of the caller; then neither n-grams nor dropped words need ids
        h_BTD = ids if ids.is_floating_point() else self.embedding(ids)
        if self.ngrams is None:
            return self.drop_words(h_BTD, ids), None
        earlier, last_BK = earlier_tokens(self.last_tokens(mems), ids, rows, ext_len=self.ext_len)
        h_BTD = self.drop_words(h_BTD + self.ngrams(earlier, ids), ids)
        return h_BTD, last_BK if self.mem_len else torch.zeros_like(last_BK)

    def _mask(self, mems: Mems, rows: Rows, tgt_len: int) -> Mask:
        """Return what each token of a segment sees."""
        M, reach = mems.length, self.config.shift_reach
        return Mask.of(
            rows.document_starts,
            mems.n_valid,
            rows.n_pad,
            tgt_len=tgt_len,
            memory_length=M,
            window=self.window,
            n_before=min(reach, max(M - self.mem_len, 0)) if reach else None,
        )


def add_positions(states_SD: Tensor, mem_BMD: Tensor, h_BTD: Tensor, n_pad: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Add positions to the states of memory and segment; padding (`n_pad`) at the left of a row moves its memory up."""
    M = mem_BMD.shape[1]
    of_memory = states_SD[:M]
    if n_pad is not None:
        of_memory = states_SD[torch.arange(M, device=n_pad.device) + n_pad.unsqueeze(1)]
    return mem_BMD + of_memory.to(mem_BMD.dtype), h_BTD + states_SD[M:].to(h_BTD.dtype)
