"""A layer that keeps something of positions that leave its memory: `Beyond` says what, `BeyondLayer` reads and writes it.

A kind of your own is a subclass of `Beyond`, and a line in the table of kinds (`transformer_xl.kinds`) that says where the
class is. It defines `shape` and `write`, and one of two ways to be read: `before` (states that attention sees before the
memory) or `add` (something that is added to what attention gathers).

Shapes: B batch, T tgt_len, Y hidden states held, K keys before them, S = K + Y + T, N heads, H d_head, D d_model, n blocks
of C positions.
"""

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from transformer_xl.model.attention.block import AttentionBlock
from transformer_xl.model.beyond.memory import Leaving
from transformer_xl.model.layers import DecoderLayer, ShiftedLayer, shifted
from transformer_xl.model.memory import join
from transformer_xl.model_config import TransformerXLConfig


class Beyond(nn.Module, ABC):
    """What a layer keeps of positions that left its memory."""

    reads_waiting: ClassVar[bool] = False
    """Positions that wait to leave are read by `add`, in the graph, and no more by attention; the newest block always waits."""
    adds_loss: ClassVar[bool] = False
    """Its parameters learn from a loss of their own alone, `loss`."""

    def __init__(self, config: TransformerXLConfig) -> None:
        super().__init__()

    @staticmethod
    @abstractmethod
    def shape(config: TransformerXLConfig) -> tuple[int, ...]:
        """Return the shape of what a layer keeps of one row."""

    @staticmethod
    def reach(config: TransformerXLConfig) -> int:
        """Return how many tokens are behind what a layer keeps, or how many say enough if that has no limit."""
        return 0

    def init_own(self, name: str, parameter: Tensor) -> bool:
        """Set the initial values of a parameter and return True, or return False so that it is drawn like all others."""
        return False

    def before(self, beyond_B: Tensor, held_BYD: Tensor, n_valid_B: Tensor) -> Tensor:
        """Return what attention sees before the segment, (B, K + Y, D)."""
        return held_BYD

    @staticmethod
    def n_before(config: TransformerXLConfig, n_block_B: Tensor) -> tuple[int, Tensor | int]:
        """Return K, the keys that `before` puts before the held states, and how many of them each row has filled, (B,)."""
        return 0, 0

    def add(
        self,
        attended_BTNH: Tensor,
        q_BTNH: Tensor,
        k_BSNH: Tensor,
        v_BSNH: Tensor,
        beyond_B: Tensor,
        *,
        seen_BT: Tensor,
        leaving: Leaving,
        n_near: int,
    ) -> Tensor:
        """Return what attention gathered together with what is read of the positions before `seen_BT`.

        Args:
            attended_BTNH: what attention gathered.
            q_BTNH: queries of the segment.
            k_BSNH: keys of held states and segment, without positions.
            v_BSNH: their values.
            beyond_B: what the layer keeps.
            seen_BT: int64 (B or 1, T), the first key that attention sees.
            leaving: what else the queries may read.
            n_near: the keys before `seen_BT` are among the first so many.
        """
        return attended_BTNH

    @abstractmethod
    def write(self, beyond_B: Tensor, *, h_BSD: Tensor, k_BSNH: Tensor, v_BSNH: Tensor, leaving: Leaving) -> Tensor:
        """Return what is kept after some blocks have left: `leaving.blocks` finds them.

        Args:
            beyond_B: what was kept of the document before.
            h_BSD: hidden states, held ones and the segment; with a shift, what it made of them.
            k_BSNH: their keys.
            v_BSNH: their values.
            leaving: what leaves.
        """

    def loss(self, block: AttentionBlock, h_BTD: Tensor, h_BSD: Tensor, *, leaving: Leaving, n_pad: Tensor | None) -> Tensor:
        """Return what is added to the nats of the segment h_BTD, a scalar; the other arguments are those of `write`."""
        return h_BTD.new_zeros(())


class BeyondLayer(DecoderLayer):
    """A layer that returns what it keeps of positions that left, besides its output."""

    def __init__(self, layer: DecoderLayer, beyond: Beyond) -> None:
        super().__init__(layer.attention, layer.feed_forward)
        self.beyond = beyond
        if isinstance(layer, ShiftedLayer):
            self.attention_shift, self.feed_forward_shift = layer.shifts

    def _mixed(
        self, h_BTD: Tensor, inputs_BkD: Tensor, n_pad: Tensor | None, start_BT: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Return what `shifted` does, also of padded rows; of a layer without shifts its inputs, and None."""
        if not hasattr(self, "attention_shift"):
            return h_BTD, None
        before_BkD, h_BTD = join(inputs_BkD, h_BTD, n_pad).split([inputs_BkD.shape[1], h_BTD.shape[1]], dim=1)
        return shifted((self.attention_shift, self.feed_forward_shift), h_BTD, before_BkD, start_BT)

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]  # only a BeyondTransformerXL calls it
        self,
        h_BTD: Tensor,
        *,
        inputs_BkD: Tensor,
        start_BT: Tensor | None,
        held_BYD: Tensor,
        n_valid_B: Tensor,
        beyond_B: Tensor,
        first_BT: Tensor,
        leaving: Leaving,
        n_near: int,
        n_pad: Tensor | None,
        keep_graph: bool,
        **positions: Any,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Read a segment.

        Args:
            h_BTD: the segment.
            inputs_BkD: the layer's inputs at the positions before it, for its shift.
            start_BT: int64 (B, T), the first place of each token's document among these and the segment; None: all are of it.
            held_BYD: hidden states before it, or what the shift made of them.
            n_valid_B: int64 (B,), how many of them are real.
            beyond_B: what the layer keeps of earlier ones.
            first_BT: int64 (B or 1, T), the first key that attention sees.
            leaving: what leaves.
            n_near: see `Beyond.add`.
            n_pad: int64 (B,), padding tokens at the left of each row; None: none.
            keep_graph: whether what is kept keeps its gradients.
            **positions: what `positions` of the attention returned for the layer.

        Returns:
            The layer's output (B, T, D), what keys are made of (B, T, D), what it keeps afterwards, and in training a loss, or
            None.
        """
        block, beyond = self.attention, self.beyond
        read_BTD, past = self._mixed(h_BTD, inputs_BkD, n_pad, start_BT)
        q, k, v = block.project(read_BTD, beyond.before(beyond_B, held_BYD, n_valid_B), n_pad)
        attended = block.attend(q, k, v, first_BT=first_BT, **positions)
        attended = beyond.add(attended, q, k, v, beyond_B, seen_BT=first_BT, leaving=leaving, n_near=n_near)
        h_BSD = join(held_BYD, read_BTD, n_pad)
        k, v = (x[:, -h_BSD.shape[1] :] for x in (k, v))  # without those of what stands before the held states
        new = beyond.write(leaving.kept(beyond_B), h_BSD=h_BSD, k_BSNH=k, v_BSNH=v, leaving=leaving)
        loss = None
        if beyond.adds_loss and self.training and torch.is_grad_enabled():
            loss = beyond.loss(block, read_BTD.detach(), h_BSD.detach(), leaving=leaving, n_pad=n_pad)
        h_BTD = block.add(h_BTD, attended)
        source = None if past is None else self.feed_forward_shift.mix(h_BTD, past)
        return self.feed_forward(h_BTD, read_BTD=source), read_BTD, new if keep_graph else new.detach(), loss
