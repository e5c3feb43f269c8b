"""`AttentionKind`: what every kind of attention is made of, and attention by content alone.

A kind is a way for a query to know where a key stands: `positions` says what that adds to the scores of one formula,

    A_ij = ((q_i + u)·k_j + (q_i + v)·r_{i-j} + b_{i-j}) / √H

A kind of your own is a subclass with a name, which `register_attention` adds to the table of kinds. Every method has a default.
Override `positions`, `shapes` for learned ones, `init_own` for their first values, and `check` to refuse settings; or `turns`,
if queries and keys are turned by their places. Reading with frozen weights needs nothing more, unless a kind changes how scores
are computed.

Shapes: B batch, T tgt_len, M memory, S = M + T keys, N heads, H d_head, D d_model.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from transformer_xl.config.model import GateKind, TransformerXLConfig
from transformer_xl.kernels.choose import Attention
from transformer_xl.kernels.cpu_linear import linear
from transformer_xl.kernels.device import narrowed
from transformer_xl.kernels.equation import Positions, key_distances, relative_attention, relative_weights
from transformer_xl.kernels.fused import halves, is_fused
from transformer_xl.kernels.rotation import Turns, turned
from transformer_xl.model.dropout import DropConnectLinear, Dropout, dropped_pair
from transformer_xl.model.gates import block_output, make_gate
from transformer_xl.model.mask import Mask
from transformer_xl.model.memory import join


class Distances(NamedTuple):
    """The distances of a segment's last query to all keys, and where and how their encodings are computed.

    Attributes:
        n_key: S.
        clamp_len: the largest distance told apart; None: all are.
        dtype: of the model's weights.
        device: where the model is.
        drop: dropout of encodings.
    """

    n_key: int
    clamp_len: int | None
    dtype: torch.dtype
    device: torch.device
    drop: Callable[[Tensor], Tensor]

    @property
    def tokens(self) -> Tensor:
        """The distances S-1, …, 0, int64 (S,)."""
        return key_distances(self.n_key, clamp_len=None, device=self.device)

    @property
    def limited(self) -> Tensor:
        """The same, at most `clamp_len`."""
        return key_distances(self.n_key, clamp_len=self.clamp_len, device=self.device)


class AttentionKind(nn.Module):
    """A kind of attention; an instance is the block of one layer.

    This class itself is multi-head scaled dot-product attention by content, with residual connection and layer norm.

    Args:
        d_model: D.
        n_head: N.
        d_head: H.
        dropout: on the output.
        dropatt: on attention weights.
        dropqkv: on queries, keys and values.
        dropweight: on the weights of the projections.
        locked_dropout: dropout of the output and of queries, keys and values is the same at all positions of a row.
        pre_lnorm: layer norm before the block instead of after it.
        layer_norm_epsilon: added to the variance.
        gate: how the result and the segment's states are joined.
    """

    name: ClassVar[str]
    """What settings call the kind."""
    counts_from_end: ClassVar[bool] = False
    """Whether positions count from the end of the segment that is read."""
    learns_positions: ClassVar[bool] = False
    """Whether the model has a learned table of positions, of `max_klen` rows."""
    limits_distances: ClassVar[bool] = True
    """Whether `clamp_len` may limit the distances that are told apart."""
    normalizes_queries: ClassVar[bool] = True
    """With `pre_lnorm`: whether queries, too, are projected from normalized states."""
    drops_positions: ClassVar[bool] = False
    """Whether dropout of what enters the first layer covers the positions that were added to it."""
    by_keys: ClassVar[bool] = False
    """Whether positions are u, v and r and nothing else, which is what fused kernels compute."""

    def __init__(
        self,
        d_model: int,
        *,
        n_head: int,
        d_head: int,
        dropout: float = 0.0,
        dropatt: float = 0.0,
        dropqkv: float = 0.0,
        dropweight: float = 0.0,
        locked_dropout: bool = False,
        pre_lnorm: bool = False,
        layer_norm_epsilon: float = 1e-5,
        gate: GateKind = "sum",
    ) -> None:
        super().__init__()
        self.n_head, self.d_head = n_head, d_head
        self.dropatt, self.pre_lnorm = dropatt, pre_lnorm
        self.qkv_net = DropConnectLinear(d_model, 3 * n_head * d_head, bias=False, dropweight=dropweight)
        self.o_net = DropConnectLinear(n_head * d_head, d_model, bias=False, dropweight=dropweight)
        self.layer_norm = nn.LayerNorm(d_model, eps=layer_norm_epsilon)
        self.drop = Dropout(dropout, locked=locked_dropout)
        self.drop_qkv = Dropout(dropqkv, locked=locked_dropout)
        self.gate = make_gate(gate, d_model, dropweight=dropweight)

    @classmethod
    def shapes(cls, config: TransformerXLConfig) -> dict[str, tuple[int, ...]]:
        """Return names and shapes of the parameters of positions that belong to the whole model.

        They are drawn like all other weights unless `init_own` sets them. Constants, such as ALiBi's slopes, are not
        parameters: compute them in `positions`.

        Args:
            config: of the model.

        Raises:
            ConfigError: settings that only a run knows are missing.
        """
        return {}

    @classmethod
    def check(cls, config: TransformerXLConfig) -> None:
        """Refuse settings that this kind cannot have.

        Args:
            config: of the model.

        Raises:
            ConfigError: they cannot work.
        """

    @staticmethod
    def init_own(name: str, parameter: Tensor) -> bool:
        """Set the initial values of a parameter of `shapes` and return True, or return False so that it is drawn."""
        return False

    @classmethod
    def positions(cls, config: TransformerXLConfig, learned: Mapping[str, Tensor], distances: Distances) -> list[Positions]:
        """Return what each layer's scores are made of besides queries and keys, without turns.

        Args:
            config: of the model.
            learned: the parameters of `shapes`, by name.
            distances: those of the keys.
        """
        return [Positions()] * config.n_layer

    @classmethod
    def turns(cls, config: TransformerXLConfig, position: Tensor, dtype: torch.dtype) -> list[Turns | None]:
        """Return the angles by which each layer turns queries and keys; None: it turns none.

        Positions are counted from anywhere, so scores must depend on differences alone. Angles are constants and get no
        gradient.

        Args:
            config: of the model.
            position: int64 (…), counted from the first key, or for kept keys from the beginning of the stream.
            dtype: of the model's weights, or of kept keys.

        Returns:
            For each layer, cosines and sines, at least in fp32, (…, 1, H / 2).
        """
        return [None] * config.n_layer

    def complete(self, positions: Positions) -> Positions:
        """Return a layer's positions with what this block's own parameters make of them."""
        return positions

    @classmethod
    def complete_together(cls, blocks: Sequence["AttentionKind"], positions: list[Positions]) -> list[Positions]:
        """Return the positions of all layers, where a device completes them faster at once; here they stay as they are."""
        return positions

    @classmethod
    def keeps_keys(cls) -> bool:
        """Whether keys and values of a position stay the same while the text goes on, and scores are those of the formula."""
        ways = ("forward", "project", "attend", "add")
        is_usual = all(getattr(cls, way) is getattr(AttentionKind, way) for way in ways) and cls.normalizes_queries
        return is_usual and not cls.counts_from_end

    def forward(
        self,
        h_BTD: Tensor,
        *,
        read_BTD: Tensor | None = None,
        mem_BMD: Tensor | None = None,
        mask: Mask | None = None,
        positions: Positions = Positions(),
        backend: Attention = relative_attention,
    ) -> Tensor:
        """Attend from the segment to memory and segment, and add the result to the segment.

        Args:
            h_BTD: the segment.
            read_BTD: what is projected instead of it, if a `Shift` changed it.
            mem_BMD: what the layer remembers; None: it has no memory.
            mask: what each query sees; None: all before it.
            positions: of the layer, see `positions`.
            backend: computes `relative_attention`.

        Returns:
            The block's output, (B, T, D).
        """
        q, k, v = self.project(h_BTD if read_BTD is None else read_BTD, mem_BMD, None if mask is None else mask.n_pad)
        return self.add(h_BTD, self.attend(q, k, v, mask=mask, positions=self.complete(positions), backend=backend))

    def attend(
        self, q_BTNH: Tensor, k_BSNH: Tensor, v_BSNH: Tensor, *, mask: Mask | None, positions: Positions, backend: Attention
    ) -> Tensor:
        """Return what each query gathers from the values, (B, T, N, H), with dropout of attention weights in training.

        Args:
            q_BTNH: queries of the segment.
            k_BSNH: keys of memory and segment.
            v_BSNH: values.
            mask: see `forward`.
            positions: complete.
            backend: see `forward`.
        """
        dropatt = self.dropatt if self.training else 0.0
        if mask is None:
            q, k, v = (x.transpose(1, 2) for x in (q_BTNH, k_BSNH, v_BSNH))
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropatt).transpose(1, 2)
        q_BTNH, k_BSNH = self._turned(q_BTNH, k_BSNH, positions)
        return backend(q_BTNH, k_BSNH, v_BSNH, positions, first_BT=mask.first, dropatt=dropatt)

    @staticmethod
    def _turned(q_BTNH: Tensor, k_BSNH: Tensor, positions: Positions) -> tuple[Tensor, Tensor]:
        """Return queries and keys as rotary positions turn them."""
        if positions.turns is None:
            return q_BTNH, k_BSNH
        cos_S1F, sin_S1F = positions.turns
        T = q_BTNH.shape[1]
        return turned(q_BTNH, cos_S1F[-T:], sin_S1F[-T:]), turned(k_BSNH, cos_S1F, sin_S1F)

    def weights(
        self,
        h_BTD: Tensor,
        *,
        read_BTD: Tensor | None = None,
        mem_BMD: Tensor | None = None,
        mask: Mask | None = None,
        positions: Positions = Positions(),
        **_: object,
    ) -> Tensor:
        """Return how much each query attends to each key, (B, N, T, S), in evaluation; the arguments are those of `forward`."""
        q, k, _v = self.project(h_BTD if read_BTD is None else read_BTD, mem_BMD, None if mask is None else mask.n_pad)
        first_BT = torch.zeros(1, q.shape[1], dtype=torch.int64, device=q.device) if mask is None else mask.first
        return relative_weights(*self._turned(q, k, positions), self.complete(positions), first_BT=first_BT)

    def position_weights(self) -> list[Tensor]:
        """Return the matrices of this block that multiply distances instead of tokens."""
        return []

    def project(self, h_BTD: Tensor, mem_BMD: Tensor | None, n_pad: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries (B, T, N, H) of the segment, and keys and values (B, S, N, H) of memory and segment."""
        heads = (self.n_head, self.d_head)
        h = self.layer_norm(h_BTD) if self.pre_lnorm else h_BTD
        if mem_BMD is None:
            q, k, v = self.drop_qkv(linear(h, self.qkv_net.drawn_weight())).unflatten(-1, (3, *heads)).unbind(2)
            return q, k, v
        mem = self.layer_norm(mem_BMD) if self.pre_lnorm else mem_BMD
        weight, n_query = self.qkv_net.drawn_weight(), self.n_head * self.d_head
        joins = is_fused(h) and n_pad is None  # a GPU takes one large product rather than two
        if joins:
            h, mem, weight = narrowed(h), narrowed(mem), narrowed(weight)
        w_q, w_kv = weight.split([n_query, 2 * n_query])
        # a CPU multiplies them apart, so that no gradient is computed for the hidden states of the memory
        kv = linear(torch.cat([mem, h], 1), w_kv) if joins else join(linear(mem, w_kv), linear(h, w_kv), n_pad)
        q = linear(h if self.normalizes_queries else h_BTD, w_q)
        kv, q = dropped_pair(self.drop_qkv, kv, q)
        k, v = halves(kv.unflatten(-1, (2, *heads)))
        return q.unflatten(-1, heads), k, v

    def add(self, h_BTD: Tensor, attended_BTNH: Tensor) -> Tensor:
        """Project the output of the heads and add it to the segment's states, or join them by a gate."""
        norm = None if self.pre_lnorm else self.layer_norm
        return block_output(h_BTD, attended_BTNH.flatten(-2), net=self.o_net, drop=self.drop, gate=self.gate, norm=norm)
