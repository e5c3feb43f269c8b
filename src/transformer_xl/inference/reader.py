"""`Reader`: a model with frozen weights that reads streams into a `KeyValueMemory`.

What does not depend on the text is computed once: the keys of all distances, and the weights in the precision of inference.

Shapes: B rows, T tokens, C slots, P distances with a key of their own, N heads, H d_head, D d_model, V vocabulary.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, cast, get_args

import torch
from torch import Tensor, nn

from transformer_xl.batch import Rows
from transformer_xl.errors import ConfigError
from transformer_xl.inference.buffer import KeyValueMemory, Rings, count_slots, slot_of
from transformer_xl.inference.frozen import LayerOptions, freeze_layer, freeze_norm
from transformer_xl.inference.layer import SegmentPlaces, TokenPlaces, normalize, read_layer
from transformer_xl.inference.softmax import FrozenSoftmax
from transformer_xl.inference.ways import compiled_functions, segment_way, token_functions
from transformer_xl.kernels.device import InferencePrecision, activation_dtype, at_least_fp32, check_precision
from transformer_xl.kernels.equation import common_rows
from transformer_xl.kernels.graphs import Captured
from transformer_xl.kernels.rotation import Turns, turned
from transformer_xl.model.attention.block import AttentionKind
from transformer_xl.model.layers import DecoderLayer, ShiftedLayer
from transformer_xl.model.mask import Mask
from transformer_xl.model.memory import Mems
from transformer_xl.model.ngrams import earlier_tokens
from transformer_xl.model.transformer_xl import TransformerXL


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
        self.n_slot = count_slots(mem_len=self.mem_len, window=self.window, tgt_len=tgt_len)
        self.dtype = activation_dtype(precision, model.dtype)
        self.device = model.device
        self.options = LayerOptions(
            config.n_head, config.d_head, config.pre_lnorm, config.layer_norm_epsilon, config.activation
        )
        with torch.no_grad():
            positions = model.positions(model.told_apart(self.n_slot), drop=nn.Identity())
            self.layers = [
                freeze_layer(cast(DecoderLayer, layer), own, precision, n_slot=self.n_slot)
                for layer, own in zip(model.layers, positions, strict=True)
            ]
            self.softmax = FrozenSoftmax(model.softmax, model.embedding, precision)
        norm = model.final_norm
        self._final_norm = freeze_norm(norm) if isinstance(norm, nn.LayerNorm) else None
        self._model = model
        self.interpret()

    @property
    def compiled(self) -> bool:
        """Whether single tokens are read by compiled code."""
        return self._of_tokens.kind == "compiled"

    @property
    def captured(self) -> bool:
        """Whether single tokens are read by one graph."""
        return self._graph is not None

    def compile(self) -> None:
        """Compile the reading of single tokens; the compiler runs at the first `step`, for seconds, once per number of rows."""
        self._of_tokens, self._graph = compiled_functions(), None

    def interpret(self, *, fused: bool | None = None) -> None:
        """Undo `compile` and `capture`.

        Args:
            fused: read by kernels of our own, which Triton interprets elsewhere than on a GPU; None: on a GPU that can.
        """
        place, by_keys = (self.device, self.dtype, self.config.d_head), self._model.attention_kind.by_keys
        self.segment_way = segment_way(*place, by_keys=by_keys, fused=fused)
        self._of_tokens = token_functions(*place, fused=fused)
        self._graph: Captured | None = None

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

        @torch.no_grad()
        def step(ids: Tensor, active: Tensor, last_BD: Tensor) -> tuple[Tensor, ...]:
            h_BD = torch.where(active.unsqueeze(1), self._step(ids, memory, active), last_BD)
            return h_BD, *self.softmax.head(h_BD, compute=self._of_tokens.compute_head)

        no_row = torch.zeros_like(memory.end, dtype=torch.bool)  # so calls before the first step change nothing
        self._graph = Captured(step, self.device, [torch.zeros_like(memory.end), no_row, self._no_states(memory)])
        self._of_graph, self._scored = memory, ()

    def _no_states(self, memory: KeyValueMemory) -> Tensor:
        return at_least_fp32(torch.zeros(memory.batch_size, self.config.d_model, dtype=self.dtype, device=self.device))

    @property
    def n_bytes(self) -> int:
        """Bytes that a reader adds to the weights: n_layer x N x P x H numbers of position keys, n_layer x N x P of biases."""
        return sum(x.nbytes for layer in self.layers for x in (layer.position_keys, layer.distance_bias) if x is not None)

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
            position_C = end - 1 - (end - 1 - torch.arange(self.n_slot)) % self.n_slot
            blocks = self._model.attention_blocks(), self._turns(position_C.to(self.device))
            for block, turns, keys, values in zip(*blocks, memory.keys, memory.values, strict=True):
                keys[:, index], values[:, index] = self._project(block, zero, turns)
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
        turning = self._turns(torch.arange(kept, device=self.device))
        for i, (layer, hidden) in enumerate(zip(self._model.layers, mems.hidden, strict=True)):
            read_BMD, rings = hidden, memory.rings(i)
            if isinstance(layer, ShiftedLayer):
                memory.end.fill_(kept - M)  # where the oldest stands
                is_real = torch.arange(M, 0, -1, device=hidden.device) <= mems.n_valid.unsqueeze(1)
                memory.keep(memory.inputs[i], slice(None), torch.where(is_real.unsqueeze(-1), hidden, 0))
                read_BMD = layer.read_memory(hidden, 0, (M - mems.n_valid).unsqueeze(1).expand(-1, M))
            block, last_BMD = cast(AttentionKind, layer.attention), read_BMD[:, M - kept :]
            rings.keys[:, :, :kept], rings.values[..., :kept] = self._project(block, last_BMD, turning[i])
        if K := self.config.n_earlier:
            memory.end.fill_(kept - K)
            memory.keep(memory.tokens, slice(None), self._model.last_tokens(mems))
        memory.end.fill_(kept)
        memory.n_valid.copy_(mems.n_valid.clamp(max=kept))
        return memory

    @torch.no_grad()
    def read(self, ids: Tensor, memory: KeyValueMemory, *, rows: slice = slice(None)) -> Tensor:
        """Read a segment, and remember it; rows may stand at any slot, and are read fastest if they stand at the same.

        Args:
            ids: int64 (B, T), T at most `tgt_len`. They are not checked against the vocabulary; the caller does that.
            memory: of `empty_memory`; written in place.
            rows: the rows of the memory that read.

        Returns:
            The input of the softmax, (B, T, D).

        Raises:
            ValueError: a longer segment.
        """
        tgt_len, C = ids.shape[1], self.n_slot
        if tgt_len > self.tgt_len:
            raise ValueError(f"{tgt_len} tokens (at most {self.tgt_len}) cannot be read at once")
        end_B1 = memory.end[rows].unsqueeze(1)
        oldest = common_rows(slot_of(end_B1 + tgt_len, C))
        is_known = len(oldest) == 1 and self.device.type == "cpu"  # elsewhere, looking at values would mean waiting
        n_valid_B = memory.n_valid[rows].clamp(max=self.mem_len if self.window is None else C - tgt_len)
        mask = Mask.of(None, n_valid_B, None, tgt_len=tgt_len, memory_length=C - tgt_len, window=self.window)
        places = SegmentPlaces(oldest, C, common_rows(mask.first), int(oldest) if is_known else None, self.dtype)
        position_BT = common_rows(end_B1) + torch.arange(tgt_len, device=self.device)
        read = partial(read_layer, way=self.segment_way)
        h_BTD = self._run(read, self._embed(memory, rows, ids), memory, rows, position_BT, places)
        memory.advance(rows, tgt_len)
        return h_BTD

    def _run(
        self, read: Callable[..., Tensor], h: Tensor, memory: KeyValueMemory, rows: slice, position: Tensor, places: Any
    ) -> Tensor:
        """Return the last states of tokens (B, T, D), or one of each row (B, D), from their vectors."""
        for i, (weights, turns) in enumerate(zip(self.layers, self._turns(position), strict=True)):
            before_BkD = self._before(memory, i, rows, h)
            rings = memory.rings(i, rows)
            h = read(h, weights, rings, places=places, options=self.options, before_BkD=before_BkD, turns=turns)
        return h if self._final_norm is None else normalize(h, self._final_norm, self.options)

    def _before(self, memory: KeyValueMemory, layer: int, rows: slice, h: Tensor) -> Tensor | None:
        """Return a layer's inputs before those of `_run`, for its shift, and keep these; None without a shift."""
        if not self.n_before:
            return None
        before_BkD = memory.last(memory.inputs[layer], rows, self.n_before)
        memory.keep(memory.inputs[layer], rows, h.reshape(len(h), -1, h.shape[-1]))
        return before_BkD if self.mem_len else torch.zeros_like(before_BkD)

    def _embed(self, memory: KeyValueMemory, rows: slice, ids: Tensor) -> Tensor:
        """Return the vectors of a segment's ids (B, T), at least in fp32, and keep the ids for n-grams."""
        vectors_BTD = self.embedding(ids)
        if self.ngrams is None:
            return at_least_fp32(vectors_BTD)
        before_BK = memory.last(memory.tokens, rows, self.config.n_earlier)
        if self.mem_len:
            memory.keep(memory.tokens, rows, ids + 1)
        earlier, _ = earlier_tokens(before_BK, ids, Rows())
        return at_least_fp32(vectors_BTD + self.ngrams(earlier, ids))

    def step(self, ids: Tensor, memory: KeyValueMemory, *, active: Tensor | None = None, last: Tensor | None = None) -> Tensor:
        """Read one token of each row; rows may stand at any slot, and shapes are always the same.

        Args:
            ids: int64 (B,), not checked, as for `read`.
            memory: of `empty_memory`; written in place.
            active: bool (B,), rows that read; the others remember nothing. None: all.
            last: (B, D), what rows that do not read return, such as their states of before; None: zeros.

        Returns:
            The input of the softmax, (B, D).
        """
        if self._graph is not None:
            if self._of_graph is not memory:
                self.capture(memory)
            all_rows = torch.ones_like(ids, dtype=torch.bool)
            last = self._no_states(memory) if last is None else last
            self._scored = self._graph.run(ids, all_rows if active is None else active, last)
            return self._scored[0]
        # a tenth faster than no_grad where operations are small; the copy is an ordinary tensor again
        with torch.no_grad() if self.compiled else torch.inference_mode():
            h_BD = self._step(ids, memory, active)
        if active is None:
            return h_BD.clone()
        return torch.where(active.to(h_BD.device).unsqueeze(1), h_BD, self._no_states(memory) if last is None else last)

    def _step(self, ids: Tensor, memory: KeyValueMemory, active: Tensor | None) -> Tensor:
        places = memory.end, memory.n_valid.clamp(max=(self.window or self.mem_len + 1) - 1)
        if self._of_tokens.kind != "fused":  # our kernel finds out by itself what this lists for each slot
            places = TokenPlaces.of(*places, n_slot=self.n_slot, n_distance=self.layers[0].n_distance)
        every = slice(None)
        h_BD = self._embed(memory, every, ids.unsqueeze(1)).squeeze(1)
        h_BD = self._run(self._of_tokens.read_layer, h_BD, memory, every, memory.end, places)
        # the slot of a row that does not read is written, too; no query sees what was there before
        memory.advance(every, 1 if active is None else active.to(memory.end.device).long())
        return h_BD

    @torch.no_grad()
    def head(self, h_BD: Tensor) -> tuple[Tensor, Tensor]:
        """Return the scores of the softmax's head after a `step`; see `FrozenSoftmax.head`."""
        if self._graph is not None and self._scored and h_BD is self._scored[0]:
            _, own, tails = self._scored
            return own, tails
        return self.softmax.head(h_BD, compute=self._of_tokens.compute_head)

    def _turns(self, position: Tensor) -> list[Turns | None]:
        """Return what each layer turns queries and keys of positions (…) by, (…, 1, H / 2); None: it does not turn them."""
        return self._model.attention_kind.turns(self.config, position, self.dtype)

    def _project(self, block: AttentionKind, states_BMD: Tensor, turns: Turns | None) -> Rings:
        """Return keys and values of remembered states, as they are kept; `turns` are those of their positions."""
        _, k_BMNH, v_BMNH = block.project(states_BMD[:, :0], states_BMD, None)
        k_BMNH = k_BMNH if turns is None else turned(k_BMNH, *turns)
        return Rings(k_BMNH.permute(2, 0, 1, 3).to(self.dtype), v_BMNH.permute(2, 0, 3, 1).to(self.dtype))
