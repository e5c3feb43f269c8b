"""`Reader`: a model with frozen weights that reads streams into a `KeyValueMemory`.

What does not depend on the text is computed once: the keys of all distances, and the weights in the precision of inference.

Shapes: B rows, T tokens, C slots, P distances with a key of their own, N heads, H d_head, D d_model, V vocabulary.
"""

import inspect
import math
from collections.abc import Callable
from functools import cache, partial
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor, nn

from transformer_xl.errors import ConfigError
from transformer_xl.inference.buffer import KeyValueMemory
from transformer_xl.inference.frozen import (
    LayerOptions,
    Turns,
    freeze_layer,
    freeze_norm,
    normalize,
    read_segment,
    read_segment_in_order,
    read_token,
    streamed_product,
)
from transformer_xl.inference.softmax import FrozenSoftmax, HeadFunction, compute_head
from transformer_xl.kernels.device import InferencePrecision, activation_dtype, at_least_fp32, check_precision
from transformer_xl.kernels.equation import common_rows, hidden_keys
from transformer_xl.kernels.fused import fused_problem
from transformer_xl.kernels.graphs import Captured
from transformer_xl.kernels.rotation import turned, turns
from transformer_xl.model.attention.block import AttentionKind
from transformer_xl.model.call import Rows
from transformer_xl.model.layers import DecoderLayer, ShiftedLayer
from transformer_xl.model.memory import Mems
from transformer_xl.model.ngrams import earlier_tokens
from transformer_xl.model.transformer_xl import TransformerXL

_ALIGNED_SLOTS = 16
"""Slots are a multiple of this, so that the rows of values begin where vector loads like them to."""

_SCORES_AT_ONCE = 1 << 25
"""Attention scores held at once while a segment is read, 128 MB in fp32; more rows are read one group after another."""

_MOST_SHAPES = 64
"""For so many numbers of rows and slots a process compiles code."""

_COMPILER_OPTIONS: dict[str, Any] = {
    "dynamic": False,
    "fullgraph": True,
    "options": {"size_asserts": False, "alignment_asserts": False},
}
"""Code is compiled for each number of rows and slots and each precision, because known shapes make it faster. They are checked
before the code is entered; checking them again inside takes a fifth of what a layer costs besides its loops."""


@cache
def compiled_functions() -> tuple[Callable[..., Tensor], HeadFunction]:
    """Return `read_token` and `compute_head` for the compiler, which runs at the first call with tensors of a shape.

    One function serves all layers, and all readers of a process.
    """
    options = _COMPILER_OPTIONS
    if "recompile_limit" in inspect.signature(torch.compile).parameters:
        options = {**options, "recompile_limit": _MOST_SHAPES}
    else:  # older ones (torch 2.10) have one limit for everything that it compiles
        from torch._dynamo import config as everything

        everything.recompile_limit = max(everything.recompile_limit, _MOST_SHAPES)
    token = torch.compile(partial(read_token, streamed=True), **options)
    return token, torch.compile(partial(compute_head, product=streamed_product), **options)


class Reader:
    """A model with frozen weights, prepared for reading.

    Weights must not change while it is in use; in fp32 they are shared with the model.

    Args:
        model: whose keys can be kept, see `LanguageModel.keeps_keys`.
        tgt_len: longest segment read at once.
        precision: of weights, keys and values; fp32 means the type of the model's weights.
        window: how many keys each token sees, itself included. None: as many as in training: with `same_length` the model's
            window, else the memory and all of its segment before it.

    Raises:
        ConfigError: the model's keys cannot be kept, see `LanguageModel.keeps_keys`.
    """

    def __init__(
        self, model: TransformerXL, *, tgt_len: int, precision: InferencePrecision = "fp32", window: int | None = None
    ) -> None:
        check_precision(precision, get_args(InferencePrecision))
        if not model.keeps_keys:
            raise ConfigError(
                f"keys of {model.described} cannot be kept: they change with the segment, or it reads in a way of its own; "
                "read with the model itself"
            )
        self.config = config = model.config
        self.mem_len, self.embedding, self.ngrams = model.mem_len, model.embedding, model.ngrams
        self.window = model.window if window is None else window
        self.tgt_len, self.n_before = tgt_len, config.shift_reach
        self.precision: InferencePrecision = precision
        n_slot = max(self.mem_len, self.window or 0) + tgt_len
        self.n_slot = math.ceil(n_slot / _ALIGNED_SLOTS) * _ALIGNED_SLOTS
        self.dtype = activation_dtype(precision, model.dtype)
        self.device = model.device
        self.options = LayerOptions(
            config.n_head, config.d_head, config.pre_lnorm, config.layer_norm_epsilon, config.activation
        )
        with torch.no_grad():
            positions = model.positions(model.told_apart(self.n_slot), drop=nn.Identity())
            self.layers = [
                freeze_layer(cast(DecoderLayer, layer), own, precision)
                for layer, own in zip(model.layers, positions, strict=True)
            ]
            self.softmax = FrozenSoftmax(model.softmax, model.embedding, precision)
        self._turned = positions[0].turns is not None
        norm = model.final_norm
        self._final_norm = freeze_norm(norm) if isinstance(norm, nn.LayerNorm) else None
        self._model = model
        self._graph: _StepGraph | None = None
        self._segments: Literal["slots", "ordered", "fused"] = "slots"
        self._by_distance: list[Tensor] = []
        if self.device.type == "cuda":
            is_narrow = self.dtype in (torch.bfloat16, torch.float16)  # kernels multiply fp32 more slowly than the library does
            self.read_in_order(fused=is_narrow and self._fuses_segments)
        self._read_token: Callable[..., Tensor]
        self._compute_head: HeadFunction | None
        self.interpret()

    @property
    def compiled(self) -> bool:
        """Whether single tokens are read by compiled code."""
        return self._way == "compiled"

    @property
    def captured(self) -> bool:
        """Whether single tokens are read by one graph."""
        return self._graph is not None

    def compile(self) -> None:
        """Compile the reading of single tokens; the compiler runs at the first `step`, for seconds, once per number of rows."""
        self._way, self._graph = "compiled", None
        self._read_token, self._compute_head = compiled_functions()

    def interpret(self) -> None:
        """Undo `compile`: read single tokens by the library's functions, or on a GPU by kernels of our own."""
        self.use_library()
        if self.device.type == "cuda" and fused_problem(self.device, self.dtype, self.config.d_head) is None:
            self.fuse()

    def use_library(self) -> None:
        """Read single tokens by the library's functions, on any device."""
        self._way, self._graph = "library", None
        self._read_token, self._compute_head = read_token, None

    def fuse(self) -> None:
        """Read single tokens by fused kernels, as a GPU does by itself; elsewhere Triton interprets them, for tests."""
        from transformer_xl.inference.token_kernels import fused_product, fused_read_token

        self._way, self._graph = "fused", None
        self._read_token, self._compute_head = fused_read_token, partial(compute_head, product=fused_product)

    @property
    def _fuses_segments(self) -> bool:
        """Whether fused kernels can read segments here: what they score by distance is a product with a key."""
        own = self.layers[0]
        has_all = all(x is not None for x in (own.content_bias, own.position_bias, own.position_keys))
        by_keys = has_all and own.distance_bias is None and not self._turned
        return by_keys and fused_problem(self.device, self.dtype, self.config.d_head) is None

    @torch.no_grad()
    def read_in_order(self, *, fused: bool = False) -> None:
        """Read segments in the order of time, as a GPU does by itself, wherever rings stand and without waiting for a value.

        Args:
            fused: by kernels that hold no scores by content; elsewhere than on a GPU Triton interprets them, for tests.
        """
        self._segments, self._by_distance = "fused" if fused else "ordered", []
        if fused:
            column_C = torch.arange(-self.n_slot, 0, device=self.device)
            for weights in self.layers:
                assert weights.position_keys is not None
                columns = (weights.n_distance + column_C).clamp(min=0)
                self._by_distance.append(weights.position_keys[:, columns].transpose(0, 1).contiguous())

    def capture(self, memory: KeyValueMemory) -> None:
        """Let each `step` with a memory be one CUDA graph from now on, with the head's scores.

        The bits are those of other steps. With a memory of other tensors a graph is captured anew. On a CPU, steps take the
        same way without a graph, for tests.

        Args:
            memory: of `empty_memory`; what its rows remember stays.

        Raises:
            RuntimeError: the device cannot capture it; steps are then as before.
        """
        self._graph = None  # a graph's memory is free before the next is captured
        self._graph = _StepGraph(self, memory)

    def release(self) -> None:
        """Undo `capture`."""
        self._graph = None

    @property
    def n_bytes(self) -> int:
        """Bytes that a reader adds to the weights: n_layer x N x P x H numbers of position keys, n_layer x N x P of biases.

        For fused reading of segments also n_layer x N x C x H position keys, one for each slot.
        """
        kept = [x for layer in self.layers for x in (layer.position_keys, layer.distance_bias) if x is not None]
        return sum(x.nbytes for x in (*kept, *self._by_distance))

    def empty_memory(self, batch_size: int, *, end: int = 0) -> KeyValueMemory:
        """Allot a memory for B rows that have read nothing, and whose first token will have the position `end`."""
        memory = self._allot(batch_size)
        self.reset(memory, torch.ones(batch_size, dtype=torch.bool), end=end)
        return memory

    def _allot(self, batch_size: int) -> KeyValueMemory:
        N, C, H = self.config.n_head, self.n_slot, self.config.d_head
        # as far back as a row can be rewound, and the tokens before, and one that a step of an inactive row overwrites
        n_input, n_token = (C - self.mem_len + k + 1 if k else 0 for k in (self.n_before, self.config.n_earlier))
        layers, place = range(self.config.n_layer), {"dtype": self.dtype, "device": self.device}
        return KeyValueMemory(
            keys=tuple(torch.zeros(N, batch_size, C, H, **place) for _ in layers),
            values=tuple(torch.zeros(N, batch_size, H, C, **place) for _ in layers),
            inputs=tuple(at_least_fp32(torch.zeros(batch_size, n_input, self.config.d_model, **place)) for _ in layers),
            tokens=torch.zeros(batch_size, n_token, dtype=torch.int64, device=self.device),
            end=torch.zeros(batch_size, dtype=torch.int64, device=self.device),
            n_valid=torch.zeros(batch_size, dtype=torch.int64, device=self.device),
        )

    @torch.no_grad()
    def reset(self, memory: KeyValueMemory, rows: Tensor, *, end: int = 0) -> None:
        """Empty some rows of a memory in place; with `zero_first_memory` they then hold the keys and values of zeros.

        Args:
            memory: of `empty_memory`.
            rows: bool (B,), True where a row is emptied.
            end: position of the first token of what these rows read next.
        """
        memory.reset(rows)
        memory.end.masked_fill_(rows.to(memory.end.device), end)
        if self.config.zero_first_memory:
            index = rows.to(memory.end.device).nonzero().squeeze(1)
            zero = torch.zeros(1, 1, self.config.d_model, dtype=self._model.dtype, device=self.device)
            for layer, keys, values in zip(self._model.attention_blocks(), memory.keys, memory.values, strict=True):
                key_N11H, value_N1H1 = _keys_and_values(layer, zero)
                key_N1CH = self._kept(key_N11H, end - 1 - (end - 1 - torch.arange(self.n_slot)) % self.n_slot)
                keys[:, index], values[:, index] = key_N1CH.to(self.dtype), value_N1H1.to(self.dtype)
            memory.n_valid[index] = self.mem_len

    @torch.no_grad()
    def from_mems(self, mems: Mems) -> KeyValueMemory:
        """Project remembered hidden states to keys and values.

        Args:
            mems: the model's memory; of more than `n_slot` positions, the last ones are kept.

        Returns:
            A memory after which this reader computes the same numbers.
        """
        M = mems.length
        kept = min(M, self.n_slot)
        memory = self._allot(mems.batch_size)
        for i, (layer, hidden) in enumerate(zip(self._model.layers, mems.hidden, strict=True)):
            read_BMD = hidden
            if isinstance(layer, ShiftedLayer):
                memory.end.fill_(kept - M)  # where the oldest stands
                is_real = torch.arange(M, 0, -1, device=hidden.device) <= mems.n_valid.unsqueeze(1)
                memory.keep(memory.inputs[i], slice(None), torch.where(is_real.unsqueeze(-1), hidden, 0))
                read_BMD = layer.read_memory(hidden, 0, (M - mems.n_valid).unsqueeze(1).expand(-1, M))
            block = cast(AttentionKind, layer.attention)
            keys_NBMH, memory.values[i][..., :kept] = _keys_and_values(block, read_BMD[:, M - kept :])
            memory.keys[i][:, :, :kept] = self._kept(keys_NBMH, torch.arange(kept))
        if K := self.config.n_earlier:
            memory.end.fill_(kept - K)
            memory.keep(memory.tokens, slice(None), self._model.last_tokens(mems))
        memory.end.fill_(kept)
        memory.n_valid.copy_(mems.n_valid.clamp(max=kept))
        return memory

    @torch.no_grad()
    def read(self, ids: Tensor, memory: KeyValueMemory, *, rows: slice = slice(None)) -> Tensor:
        """Read a segment of rows whose rings stand at the same slot, and remember it; a GPU reads them wherever they stand.

        Args:
            ids: int64 (B, T), T at most `tgt_len`. They are not checked against the vocabulary; the caller does that.
            memory: of `empty_memory`; written in place.
            rows: the rows of the memory that read.

        Returns:
            The input of the softmax, (B, T, D).

        Raises:
            ValueError: a longer segment, or, elsewhere than on a GPU, rows at different slots.
        """
        n_row, tgt_len = ids.shape
        if tgt_len > self.tgt_len or self._segments == "slots":
            self._check_together(memory, rows, tgt_len)
        turning = self._turns(common_rows(memory.end[rows].unsqueeze(1) + torch.arange(tgt_len, device=self.device)))
        n_score = self.config.n_head * tgt_len * self.n_slot
        at_once = n_row if self._segments == "fused" else min(n_row, max(1, _SCORES_AT_ONCE // n_score))
        read_layer, places = self._segment_places(memory, rows, tgt_len, n_score=at_once * n_score)
        h_BTD = at_least_fp32(self._embed(memory, rows, ids))
        parts = [slice(first, first + at_once) for first in range(0, n_row, at_once)]
        for i, weights in enumerate(self.layers):
            own_keys, own_values = memory.keys[i][:, rows], memory.values[i][:, rows]
            before_BkD = self._before(memory, i, rows, h_BTD)
            read = [
                read_layer(
                    h_BTD[part],
                    weights,
                    own_keys[:, part],
                    own_values[:, part],
                    **places(i, part),
                    options=self.options,
                    before_BkD=None if before_BkD is None else before_BkD[part],
                    turns=turning and cast(Turns, tuple(x if len(x) == 1 else x[part] for x in turning)),
                )
                for part in parts
            ]
            h_BTD = read[0] if len(read) == 1 else torch.cat(read)
        _advance(memory, rows, tgt_len)
        return self._normalize_last(h_BTD)

    def _check_together(self, memory: KeyValueMemory, rows: slice, tgt_len: int) -> None:
        places = (memory.end[rows] % self.n_slot).unique().tolist()
        if tgt_len > self.tgt_len or len(places) != 1:
            raise ValueError(f"{tgt_len} tokens (at most {self.tgt_len}) cannot be read at ring positions {places} at once")

    def _segment_places(
        self, memory: KeyValueMemory, rows: slice, tgt_len: int, *, n_score: int
    ) -> tuple[Callable[..., Tensor], Callable[[int, slice], dict[str, Any]]]:
        """Return what reads a layer, and its arguments for some of the rows: where the segment stands and what it sees."""
        end_B, n_valid_B, C = memory.end[rows], memory.n_valid[rows], self.n_slot
        if self._segments == "fused":
            from transformer_xl.inference.segment_kernels import fused_read_segment

            first_BT = self._first_keys(n_valid_B, tgt_len)
            return fused_read_segment, lambda i, part: {
                "end_B": end_B[part],
                "first_BT": first_BT[part],
                "position_keys_CNH": self._by_distance[i],
            }
        # once for all layers: the system allots so large a piece page by page, which is slower than the product
        scratch = torch.empty(n_score, dtype=self.dtype, device=self.device)
        if self._segments == "ordered":
            slot_BC = (end_B.unsqueeze(1) + tgt_len + torch.arange(C, device=self.device)) % C
            first_BT = self._first_keys(n_valid_B, tgt_len)
            return read_segment_in_order, lambda _, part: {
                "slot_BC": slot_BC[part],
                "hidden_BTC": self._bias(hidden_keys(first_BT[part], C)),  # large, so for some rows at a time
                "scratch": scratch,
            }
        at = int(end_B[0]) % C
        hidden = self._hidden_slots(n_valid_B, at, tgt_len)
        return read_segment, lambda _, part: {
            "at": at,
            "hidden": [(slots, bias if len(bias) == 1 else bias[part]) for slots, bias in hidden],
            "scratch": scratch,
        }

    def _first_keys(self, n_valid_B: Tensor, tgt_len: int) -> Tensor:
        """Return the first key that each query of a segment sees, (B, T), counted in the order of time from the oldest slot."""
        query_T = torch.arange(tgt_len, device=n_valid_B.device)
        farthest_T = self.mem_len + query_T if self.window is None else torch.full_like(query_T, self.window - 1)
        return self.n_slot - tgt_len + query_T - torch.minimum(n_valid_B.unsqueeze(1) + query_T, farthest_T)

    def _before(self, memory: KeyValueMemory, layer: int, rows: slice, h_BTD: Tensor) -> Tensor | None:
        """Return a layer's inputs before a segment, for its shift, and keep those of the segment; None without a shift."""
        if not self.n_before:
            return None
        before_BkD = memory.last(memory.inputs[layer], rows, self.n_before)
        memory.keep(memory.inputs[layer], rows, h_BTD)
        return before_BkD if self.mem_len else torch.zeros_like(before_BkD)

    def _embed(self, memory: KeyValueMemory, rows: slice, ids: Tensor) -> Tensor:
        """Return the vectors of a segment's ids (B, T), and keep the ids for n-grams."""
        vectors_BTD = self.embedding(ids)
        if self.ngrams is None:
            return vectors_BTD
        before_BK = memory.last(memory.tokens, rows, self.config.n_earlier)
        if self.mem_len:
            memory.keep(memory.tokens, rows, ids + 1)
        earlier, _ = earlier_tokens(before_BK, ids, Rows())
        return vectors_BTD + self.ngrams(earlier, ids)

    def _normalize_last(self, h: Tensor) -> Tensor:
        return h if self._final_norm is None else normalize(h, self._final_norm, self.options)

    def step(self, ids: Tensor, memory: KeyValueMemory, *, active: Tensor | None = None) -> Tensor:
        """Read one token of each row; rows may stand at any slot, and shapes are always the same.

        Args:
            ids: int64 (B,), not checked, as for `read`.
            memory: of `empty_memory`; written in place.
            active: bool (B,), rows that read; the results of the others mean nothing, and they remember nothing. None: all.

        Returns:
            The input of the softmax, (B, D).
        """
        if self._graph is not None:
            if self._graph.memory is not memory:
                self.capture(memory)
            return self._graph.step(ids, active)
        # a tenth faster than no_grad where operations are small; the copy is an ordinary tensor again
        with torch.no_grad() if self.compiled else torch.inference_mode():
            h_BD = self._step(ids, memory, active)
        return h_BD.clone()

    def _step(self, ids: Tensor, memory: KeyValueMemory, active: Tensor | None) -> Tensor:
        places = self._places(memory)
        turning = self._turns(memory.end)
        h_BD = at_least_fp32(self._embed(memory, slice(None), ids.unsqueeze(1))).squeeze(1)
        for i, weights in enumerate(self.layers):
            before_BkD = self._before(memory, i, slice(None), h_BD.unsqueeze(1))
            h_BD = self._read_token(
                h_BD,
                weights,
                memory.keys[i],
                memory.values[i],
                **places,
                options=self.options,
                before_BkD=before_BkD,
                turns=turning,
            )
        # The slot of a row that does not read is written, too; no query sees what was there before.
        _advance(memory, slice(None), 1 if active is None else active.to(memory.end.device).long())
        return self._normalize_last(h_BD)

    @torch.no_grad()
    def head(self, h_BD: Tensor) -> tuple[Tensor, Tensor]:
        """Return the scores of the softmax's head after a `step`; see `FrozenSoftmax.head`."""
        known = None if self._graph is None else self._graph.scores_of(h_BD)
        return known or self.softmax.head(h_BD, compute=self._compute_head)

    def _places(self, memory: KeyValueMemory) -> dict[str, Tensor]:
        """Return where each row's token stands and what it sees, as `read_token` wants to know it."""
        farthest_B = torch.clamp(memory.n_valid, max=(self.window or self.mem_len + 1) - 1)
        if self._way == "fused":
            return {"end_B": memory.end, "farthest_B": farthest_B}
        slot_B = memory.end % self.n_slot
        distance_BC = (slot_B.unsqueeze(1) - torch.arange(self.n_slot, device=slot_B.device)) % self.n_slot
        column_BC = (self.layers[0].n_distance - 1 - distance_BC).clamp(min=0)
        bias_BC = torch.zeros((), device=slot_B.device).where(distance_BC <= farthest_B.unsqueeze(1), float("-inf"))
        return {"slot_B": slot_B, "column_BC": column_BC, "bias_BC": bias_BC}

    def _turns(self, position: Tensor) -> Turns | None:
        """Return what queries and keys of positions (…) are turned by, (…, 1, H / 2); None: they are not turned."""
        if not self._turned:
            return None
        cos, sin = turns(position, self.config.d_head, self.dtype)
        return cos.unsqueeze(-2), sin.unsqueeze(-2)

    def _kept(self, keys_NBMH: Tensor, position: Tensor) -> Tensor:
        """Return keys of positions (M) as they are kept."""
        if not self._turned:
            return keys_NBMH
        cos, sin = turns(position.to(keys_NBMH.device), self.config.d_head, keys_NBMH.dtype)
        return turned(keys_NBMH, cos, sin)

    def _hidden_slots(self, n_valid: Tensor, at: int, tgt_len: int) -> list[tuple[slice, Tensor]]:
        """Return runs of slots that some query must not see, each with a bias (B or 1, T, slots): -inf where hidden, else 0."""
        C, T, device = self.n_slot, tgt_len, n_valid.device
        if (n_valid == n_valid[0]).all():
            n_valid = n_valid[:1]
        query_T1 = torch.arange(T, device=device).unsqueeze(1)
        # the position that each slot holds, counted from the segment's first token
        key_C = T - 1 - (at + T - 1 - torch.arange(C, device=device)) % C
        farthest_T1 = self.mem_len + query_T1 if self.window is None else self.window - 1
        hidden_TC = (key_C > query_T1) | (query_T1 - key_C > farthest_T1)
        hidden_BTC = hidden_TC | (key_C < -n_valid[:, None, None])
        bias_BTC = self._bias(hidden_BTC)
        # with a full memory most slots are not hidden from any query
        borders = torch.nn.functional.pad(hidden_BTC.any(dim=0).any(dim=0).int(), (1, 1)).diff().nonzero().flatten().tolist()
        return [(slice(*run), bias_BTC[..., slice(*run)]) for run in zip(borders[::2], borders[1::2], strict=True)]

    def _bias(self, hidden: Tensor) -> Tensor:
        return torch.zeros(hidden.shape, dtype=self.dtype, device=hidden.device).masked_fill_(hidden, float("-inf"))


class _StepGraph:
    """A step of a reader with one memory, in fixed places: the id of each row and whether it reads."""

    def __init__(self, reader: Reader, memory: KeyValueMemory) -> None:
        self.memory = memory
        self._ids = torch.zeros_like(memory.end)
        self._active = torch.zeros_like(memory.end, dtype=torch.bool)  # so calls before the first step change nothing
        self._scored: tuple[Tensor, ...] = ()

        @torch.no_grad()
        def step() -> tuple[Tensor, ...]:
            h_BD = reader._step(self._ids, memory, self._active)
            return h_BD, *reader.softmax.head(h_BD, compute=reader._compute_head)

        self._step = Captured(step, reader.device)

    def step(self, ids: Tensor, active: Tensor | None) -> Tensor:
        """See `Reader.step`."""
        self._ids.copy_(ids)
        self._active.fill_(True) if active is None else self._active.copy_(active)
        self._scored = self._step.run()
        return self._scored[0]

    def scores_of(self, h_BD: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return the scores of the head if these are the states of the last step."""
        if not self._scored or h_BD is not self._scored[0]:
            return None
        _, own, tails = self._scored
        return own, tails


def _keys_and_values(block: AttentionKind, hidden_BMD: Tensor) -> tuple[Tensor, Tensor]:
    """Return keys (N, B, M, H) and values (N, B, H, M) of remembered states."""
    _, k_BMNH, v_BMNH = block.project(hidden_BMD[:, :0], hidden_BMD, None)
    return k_BMNH.permute(2, 0, 1, 3), v_BMNH.permute(2, 0, 3, 1)


def _advance(memory: KeyValueMemory, rows: slice, n_new: Tensor | int) -> None:
    memory.end[rows].add_(n_new)
    memory.n_valid[rows].add_(n_new).clamp_(max=memory.n_slot)
