"""`AttentionKind`: what every kind of attention is made of, and attention by content alone.

A kind of your own is a subclass with a name, which `register_attention` adds to the table of kinds. Every method has a default.
Override `check` to refuse settings, `shapes` for parameters of positions, `init_own` for their initial values, `positions` for
what a layer needs to know of them, `enter` to add positions to the states, `attend` and `attention_weights` for the scores, and
`frozen` for inference with kept keys.

Shapes: B batch, T tgt_len, M memory, S = M + T keys, N heads, H d_head, D d_model, P distances with a key of their own.
"""

from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from transformer_xl.config.model import GateKind, TransformerXLConfig
from transformer_xl.kernels.choose import check_no_backend, is_fused
from transformer_xl.kernels.cpu_linear import halves, linear, narrowed
from transformer_xl.kernels.equation import hidden_keys, masked_softmax
from transformer_xl.model.dropout import DropConnectLinear, Dropout, dropped_pair
from transformer_xl.model.gates import block_output, make_gate
from transformer_xl.model.memory import join

if TYPE_CHECKING:
    from transformer_xl.model.transformer_xl import TransformerXL  # which builds its layers of these blocks


class FrozenPositions(NamedTuple):
    """What one layer's scores are made of besides queries and keys, when weights no longer change.

    A_ij = (q_i + content_bias)·k_j + (q_i + position_bias)·r_{i-j} + b_{i-j}, all divided by √H

    What is None is left out.
    """

    content_bias: Tensor | None = None
    """u, (N, H)."""
    position_bias: Tensor | None = None
    """v, (N, H)."""
    position_keys: Tensor | None = None
    """r of the distances P - 1, …, 0; (P, N, H). Farther ones have the key of P - 1."""
    distance_bias: Tensor | None = None
    """b, what a distance adds to a score whatever the query, (P, N); farther ones add what P - 1 adds."""
    turned: bool = False
    """Whether queries and keys are turned by their positions, as `rotary.turned` does; the same in all layers."""


class AttentionKind(nn.Module):
    """A kind of attention, which is a way for a query to know where a key stands; an instance is the block of one layer.

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

    @staticmethod
    def shapes(config: TransformerXLConfig) -> dict[str, tuple[int, ...]]:
        """Return names and shapes of the parameters of positions that belong to the whole model.

        They are drawn like all other weights unless `init_own` sets them. Constants, such as ALiBi's slopes, are not
        parameters: compute them in `positions` and `frozen`.

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

    @classmethod
    def check_backend(cls, backend: str, device: torch.device, *, dtype: torch.dtype, d_head: int) -> None:
        """Refuse an attention backend that cannot compute this kind.

        Args:
            backend: its name, see `choose_backend`.
            device: where the model shall run.
            dtype: of the weights.
            d_head: width of a head.

        Raises:
            ConfigError: no such backend, or it cannot run there.
        """
        check_no_backend(backend, f"attention '{cls.name}'")

    @staticmethod
    def init_own(name: str, parameter: Tensor) -> bool:
        """Set the initial values of a parameter of `shapes` and return True, or return False so that it is drawn."""
        return False

    @staticmethod
    def positions(model: "TransformerXL", n_key: int, *, backend: str) -> list[dict[str, Any]]:
        """Return for each layer the keyword arguments of `attend` and `attention_weights` besides `first_BT`.

        Args:
            model: whose layers they are.
            n_key: S.
            backend: name of the attention backend, for kinds that have a choice.
        """
        return [{} for _ in model.layers]

    @staticmethod
    def enter(
        model: "TransformerXL", layer: int, mem_BMD: Tensor, h_BTD: Tensor, n_pad: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return memory and segment as they enter a layer: layer 0 applies dropout, and some kinds add positions."""
        return mem_BMD, model.drop_input(h_BTD) if layer == 0 else h_BTD

    @staticmethod
    def frozen(model: "TransformerXL", n_slot: int) -> list[FrozenPositions]:
        """Return what a `Reader` computes with, layer by layer.

        Args:
            model: whose layers they are.
            n_slot: the most distances that are told apart.

        A kind whose class itself defines this is read so: keys and values of a position must stay the same while the text goes
        on. A subclass that reads otherwise than its parent does not inherit that.
        """
        raise NotImplementedError("this kind of attention does not keep keys")

    def forward(
        self,
        h_BTD: Tensor,
        *,
        read_BTD: Tensor | None = None,
        mem_BMD: Tensor | None = None,
        first_BT: Tensor | None = None,
        n_pad: Tensor | None = None,
        **positions: Any,
    ) -> Tensor:
        """Attend from the segment to memory and segment, and add the result to the segment.

        Args:
            h_BTD: the segment.
            read_BTD: what is projected instead of it, if a `Shift` changed it.
            mem_BMD: what the layer remembers; None: it has no memory.
            first_BT: int64 (B or 1, T), the first key that each query sees, see `first_keys`; None: each sees all before it.
            n_pad: int64 (B,), padding tokens at the left of each row; None: none.
            **positions: what `positions` returned for the layer.

        Returns:
            The block's output, (B, T, D).
        """
        q, k, v = self.project(h_BTD if read_BTD is None else read_BTD, mem_BMD, n_pad)
        return self.add(h_BTD, self.attend(q, k, v, first_BT=first_BT, **positions))

    def weights(
        self,
        h_BTD: Tensor,
        *,
        read_BTD: Tensor | None = None,
        mem_BMD: Tensor | None = None,
        first_BT: Tensor | None = None,
        n_pad: Tensor | None = None,
        **positions: Any,
    ) -> Tensor:
        """Return how much each query attends to each key, (B, N, T, S), in evaluation; the arguments are those of `forward`."""
        q, k, _ = self.project(h_BTD if read_BTD is None else read_BTD, mem_BMD, n_pad)
        if first_BT is None:
            first_BT = torch.zeros(1, q.shape[1], dtype=torch.int64, device=q.device)
        return self.attention_weights(q, k, first_BT=first_BT, **positions)

    def attend(self, q_BTNH: Tensor, k_BSNH: Tensor, v_BSNH: Tensor, *_: Any, first_BT: Any, **positions: Any) -> Tensor:
        """Return what each query gathers from the values, (B, T, N, H), with dropout of attention weights in training.

        Args:
            q_BTNH: queries of the segment.
            k_BSNH: keys of memory and segment.
            v_BSNH: values.
            *_: nothing; kinds may name what they get from `positions`.
            first_BT: int64 (B or 1, T), the first key that each query sees; None: all before it.
            **positions: what `positions` returned for the layer.
        """
        q, k, v = (x.transpose(1, 2) for x in (q_BTNH, k_BSNH, v_BSNH))
        attended = F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=None if first_BT is None else ~hidden_keys(first_BT, k.shape[2]).unsqueeze(1),
            is_causal=first_BT is None,
            dropout_p=self.dropatt if self.training else 0.0,
        )
        return attended.transpose(1, 2)

    def attention_weights(self, q_BTNH: Tensor, k_BSNH: Tensor, *_: Any, first_BT: Tensor, **positions: Any) -> Tensor:
        """Return how much each query attends to each key, (B, N, T, S), without dropout."""
        return masked_softmax(torch.einsum("btnh,bsnh->bnts", q_BTNH, k_BSNH) * self.d_head**-0.5, first_BT)

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
