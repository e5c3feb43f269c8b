"""A Transformer-XL that keeps something of positions that leave its memory: `beyond` in its settings says what.

    memory = the last mem_len positions and those that wait to leave, as hidden states;  beyond = what is kept of earlier ones
    h ← layer(h, memory, beyond)        as without it, and what is kept is read, too
    beyond ← write(beyond, blocks)      of C positions each that no later query sees

With a `shift`, the memory holds what it made of each layer's inputs, and the last k of these.

Shapes: B batch, T tgt_len, Y hidden states held, D d_model.
"""

import math
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from transformer_xl.errors import ConfigError
from transformer_xl.kinds import import_class
from transformer_xl.model.attention.equation import first_keys
from transformer_xl.model.beyond.layer import Beyond, BeyondLayer
from transformer_xl.model.beyond.memory import BeyondMems, Leaving
from transformer_xl.model.call import Execution, Rows
from transformer_xl.model.memory import remembered
from transformer_xl.model.room import check_room, check_unasked
from transformer_xl.model.sequence_model import ModelOutput
from transformer_xl.model.transformer_xl import TransformerXL
from transformer_xl.model_config import TransformerXLConfig


class BeyondTransformerXL(TransformerXL):
    """A `TransformerXL` that keeps something of positions that leave its memory.

    Args:
        config: sizes and options; `vocab_size` and `beyond` must be set.

    Example:
        >>> sizes = {"vocab_size": 11, "n_layer": 2, "d_model": 8, "n_head": 2, "d_head": 4, "d_inner": 16}
        >>> model = BeyondTransformerXL(TransformerXLConfig(**sizes, mem_len=4, beyond="mean", compression=2))
        >>> out = model(torch.zeros(3, 9, dtype=torch.int64))
        >>> out.mems.n_valid.tolist(), out.mems.n_block.tolist()
        ([5, 5, 5], [2, 2, 2])
    """

    goes_beyond = True

    def __init__(self, config: TransformerXLConfig) -> None:
        if config.beyond_kind is None:
            raise ConfigError(
                "beyond (None) must say what becomes of positions that leave the memory; or build a TransformerXL"
            )
        self._kind: type[Beyond] = import_class(config.beyond_kind.layer)
        super().__init__(config)
        if self._kind.adds_loss:  # fine-tuning has no such loss
            own = tuple(name for name, _ in self.named_parameters() if ".beyond." in name)
            self.only_predicting = (*type(self).only_predicting, *own)  # pyright: ignore[reportAttributeAccessIssue]

    def make_layer(self) -> BeyondLayer:
        """Return one of its layers."""
        return BeyondLayer(super().make_layer(), self._kind(self.config))

    def init_own(self, name: str, parameter: Tensor) -> bool:
        """Let what is kept beyond the memory set its own parameters."""
        layer, is_beyond, own = name.partition(".beyond.")
        if not is_beyond:
            return super().init_own(name, parameter)
        return cast("BeyondLayer", self.get_submodule(layer)).beyond.init_own(own, parameter)

    @property
    def adds_losses(self) -> bool:
        """Whether a convolution learns from what it loses."""
        return self._kind.adds_loss

    @property
    def n_waiting(self) -> int:
        """How many positions of the newest block wait, although it may be whole."""
        return int(self._kind.reads_waiting)

    @property
    def n_kept(self) -> int:
        """Y, hidden states of a full memory: `mem_len`, and those that wait to leave."""
        return self.mem_len + self.config.compression - 1 + self.n_waiting if self.mem_len else 0

    @property
    def carries_state(self) -> bool:
        """Whether the memory holds all that the model knows of the text before, so that it can read on token by token."""
        return self.mem_len > 0

    def reach(self, tgt_len: int) -> int:
        """Return how far back it remembers, in whole segments; of a matrix, which reaches back without limit, enough."""
        if not self.mem_len:
            return 0
        held, kept = self.n_kept + self.config.shift_reach, self._kind.reach(self.config)
        kept += self.config.n_earlier
        if self._kind.reads_waiting:
            return self.config.n_layer * math.ceil(held / tgt_len) * tgt_len + math.ceil(kept / tgt_len) * tgt_len
        return self.config.n_layer * math.ceil((held + kept) / tgt_len) * tgt_len

    def check_context(self) -> None:
        """Refuse lengths that cannot work together."""
        super().check_context()
        try:
            self.config.check_window(self.same_length)
        except ValueError as error:
            raise ConfigError(str(error)) from None

    def check_memory(self, mem_len: int | None = None, *, what: str = "the model's file asks for") -> None:
        """Refuse a memory that nobody should allot because a file says so; see `SequenceModel.check_memory`."""
        super().check_memory(mem_len, what=what)
        self._check_kept(asked=mem_len is None and not self.mem_len_from_file, what=what)

    def _check_kept(self, *, asked: bool, what: str = "the model's file asks for") -> None:
        """Refuse to keep more beyond the memory than a file may ask for."""
        if not asked:
            config = self.config
            check_unasked(
                self._n_bytes(config.compression),
                sum(parameter.nbytes for parameter in self.parameters()),
                what=f"{what} what is kept beyond the memory (beyond '{config.beyond}', compression {config.compression}, "
                f"compressed_len {config.compressed_len}), which",
                remedy=f"if that is right, ask for it with --mem-len {self.mem_len} (in Python mem_len={self.mem_len})",
            )

    def _n_bytes(self, length: int) -> int:
        """Return the bytes of so many hidden states and of what is kept, in all layers, of one row."""
        kept = math.prod(self._kind.shape(self.config)) * self._kept_dtype.itemsize
        length += self.config.shift_reach
        return self.config.n_layer * (min(length, 2**63) * self.config.d_model * self.dtype.itemsize + kept)

    @property
    def _kept_dtype(self) -> torch.dtype:
        """Type of what is kept: sums over a long text need fp32 at least."""
        return torch.promote_types(self.dtype, torch.float32) if self._kind.reads_waiting else self.dtype

    def init_mems(self, batch_size: int, *, length: int | None = None) -> BeyondMems:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return an empty memory; `length` is the number of hidden states, None: `n_kept`."""
        if length is None:
            self.check_memory()
        self._check_kept(asked=not self.mem_len_from_file)
        length = self.n_kept if length is None else length
        check_room(
            batch_size * self._n_bytes(length),
            self.device,
            what=f"a memory of mem_len {self.mem_len}, beyond '{self.config.beyond}' and batch_size {batch_size}",
            remedy="lower mem_len (--mem-len), batch_size (--batch-size), model.compression or model.compressed_len",
        )
        n_layer, device = self.config.n_layer, self.device
        hidden = torch.zeros(batch_size, length, self.config.d_model, dtype=self.dtype, device=device)
        kept = torch.zeros(batch_size, *self._kind.shape(self.config), dtype=self._kept_dtype, device=device)
        count = torch.zeros(batch_size, dtype=torch.int64, device=device)
        inputs = torch.zeros(batch_size, self.config.shift_reach, self.config.d_model, dtype=self.dtype, device=device)
        K = self.config.n_earlier
        tokens = torch.zeros(batch_size, K, dtype=torch.int64, device=device) if K else None
        return BeyondMems((hidden,) * n_layer, count, (kept,) * n_layer, count, (inputs,) * n_layer, tokens)

    def with_own_losses(self, ids: Tensor, *, mems: Any, labels: Tensor, progress: float, **call: Any) -> ModelOutput:
        """Read one segment; the loss of a convolution is `auxiliary`."""
        h_BTD, new, loss = self._read(ids, mems=mems, **call)
        return ModelOutput(new, nll=self.softmax.nll(h_BTD, labels, self.embedding), auxiliary=loss)

    def read(self, ids: Tensor, *, mems: BeyondMems | None = None, **call: Any) -> tuple[Tensor, BeyondMems]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the input of the softmax, (B, T, D), and the new memory; the arguments are those of `forward`."""
        h_BTD, new, _ = self._read(ids, mems=mems, **call)
        return h_BTD, new

    def _read(
        self,
        ids: Tensor,
        *,
        mems: BeyondMems | None = None,
        rows: Rows = Rows(),
        execution: Execution = Execution(),
        keep_graph: bool = False,
    ) -> tuple[Tensor, BeyondMems, Tensor | None]:
        """Return the input of the softmax, the new memory, and the sum of the layers' losses or None."""
        (batch_size, T), n_pad, config = ids.shape[:2], rows.n_pad, self.config
        mems = self.init_mems(batch_size, length=0) if mems is None else mems
        if mems.length > self.n_kept:
            raise ValueError(f"mems of {mems.length} positions are longer than the model's ({self.n_kept}); use init_mems")
        lengths: dict[str, int] = {"mem_len": self.mem_len, "ext_len": self.ext_len}
        leaving = Leaving.of(rows, mems, tgt_len=T, size=config.compression, n_waiting=self.n_waiting, **lengths)
        n_seen = mems.n_valid.clamp(max=self.mem_len) if self._kind.reads_waiting else mems.n_valid
        n_before, n_filled = self._kind.n_before(config, mems.n_block)
        first_BT, _ = first_keys(
            rows.document_starts, n_seen + n_filled, n_pad, tgt_len=T, memory_length=n_before + mems.length, window=self.window
        )
        # what attention does not see any more is at the beginning: what waits, and behind padding or a window more of it
        n_near = max(mems.length - self.mem_len, 0) if n_pad is None and self.window is None else mems.length + T
        positions = self.block_class.positions(self, n_before + mems.length + T, backend=execution.backend)
        h_BTD, tokens = self.embed_after(mems, ids, rows)
        start_BT = leaving.first_of(config.shift_reach, mems.length)
        remember: dict[str, Any] = {"ext_len": self.ext_len, "keep_graph": keep_graph}
        hidden, beyond, inputs, losses = [], [], [], []
        for i, layer in enumerate(self.layers):
            held_BYD, h_BTD = self.block_class.enter(self, i, mems.hidden[i], h_BTD, n_pad)
            inputs.append(self._last_inputs(mems.inputs[i], h_BTD, n_pad, start_BT, **remember))
            run = cast("Any", execution.run)  # a layer of this model returns more than a tensor
            h_BTD, read_BTD, kept, loss = run(
                layer,
                h_BTD,
                inputs_BkD=mems.inputs[i],
                start_BT=start_BT,
                held_BYD=held_BYD,
                n_valid_B=mems.n_valid,
                beyond_B=mems.beyond[i],
                first_BT=first_BT,
                leaving=leaving,
                n_near=n_near,
                n_pad=n_pad,
                keep_graph=keep_graph,
                **positions[i],
            )
            hidden.append(remembered(held_BYD, read_BTD, n_pad, mem_len=self.n_kept, **remember))
            beyond.append(kept)
            losses += [] if loss is None else [loss]
        h_BTD = self.drop_output(self.final_norm(h_BTD))
        total = cast("Tensor", sum(losses)) if losses else None
        if not self.mem_len:
            return h_BTD, self.init_mems(batch_size), total
        n_block = leaving.kept(mems.n_block) + leaving.n_block
        return h_BTD, BeyondMems(tuple(hidden), leaving.n_valid, tuple(beyond), n_block, tuple(inputs), tokens), total

    def _last_inputs(
        self, inputs_BkD: Tensor, h_BTD: Tensor, n_pad: Tensor | None, start_BT: Tensor | None, **remember: Any
    ) -> Tensor:
        """Return the last k inputs of a layer, zeros for those of an earlier document and for those that nobody has any more.

        Such are lost where `ext_len` leaves out more tokens than a segment has; padding repeats others in their place.
        """
        k = self.config.shift_reach
        if not k:
            return inputs_BkD
        last_BkD = remembered(inputs_BkD, h_BTD, n_pad, mem_len=k, **remember)
        n_last = last_BkD.shape[1]
        if n_pad is not None or start_BT is not None:
            place = torch.arange(n_last, device=h_BTD.device) + k + h_BTD.shape[1] - self.ext_len - n_last
            for first_B in (n_pad, None if start_BT is None else start_BT[:, -1]):
                if first_B is not None:
                    last_BkD = last_BkD.where((place >= first_B[:, None]).unsqueeze(-1), 0.0)
        return F.pad(last_BkD, (0, 0, k - n_last, 0))
