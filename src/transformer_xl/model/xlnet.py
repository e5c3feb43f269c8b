"""XLNet (Yang et al. 2019, arXiv 1906.08237): Transformer-XL that fills gaps in a random order, with both sides in sight.

    h, g = embedded tokens, one learned vector at every target
    h ← LayerNorm(h + attention of h to [memory ; h])      sees itself and what comes before it in the order
    g ← LayerNorm(g + attention of g to [memory ; h])      stands where its target is, and does not see it
    both ← LayerNorm(both + FFN(both))
    targets are predicted from g; the new memory is what entered each layer at the first reuse_len positions

Without an order every token sees every other, and h is what fine-tuned heads read.

Reference: `transformer_xl` of the authors' `modeling.py`. Deviations: those of `attention/two_streams.py`; memory is
masked per row; a call says which rows are read backward (theirs: the second half of each device's batch).

Shapes: B batch, T tokens, K targets, M memory, S = M + T keys, P = S + T distances, D d_model, V vocabulary.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from transformer_xl.batch import Batch, Order, Pairs
from transformer_xl.config.model import XLNetConfig
from transformer_xl.errors import ConfigError
from transformer_xl.kernels.equation import sinusoids
from transformer_xl.model.adaptive import make_softmax
from transformer_xl.model.attention.two_streams import Biases, Sight, TwoStreamAttention, hidden_by_rank
from transformer_xl.model.base import SequenceModel
from transformer_xl.model.call import Execution, ModelOutput, Regularizers, check_tokens
from transformer_xl.model.layers import make_layer
from transformer_xl.model.memory import Mems, remembered

_UNSEEN = torch.iinfo(torch.int64).max
"""Rank of keys that nobody sees: padding, and memory that is not used yet."""


class XLNet(SequenceModel):
    """A model that reads segments with memory and with both sides in sight, and predicts targets that it does not see.

    Args:
        config: sizes and options; `vocab_size` must be set.

    Attributes:
        config: its settings.

    Example:
        >>> model = XLNet(XLNetConfig(vocab_size=11, n_layer=2, d_model=8, n_head=2, d_head=4, d_inner=16)).eval()
        >>> ids = torch.tensor([[3, 1, 4, 1, 5]])
        >>> h, mems = model.read(ids)  # as for fine-tuning
        >>> h.shape, mems.length
        (torch.Size([1, 5, 8]), 5)
        >>> rank, sees = torch.tensor([[-1, 1, -1, 0, -1]]), torch.tensor([[0, 1, 0, 0, 0]])
        >>> order = Order(rank, sees, targets=torch.tensor([[3, 1]]))
        >>> model(ids, order=order, labels=torch.tensor([[1, 1]])).nll.shape  # token 3 first, then token 1, which sees it
        torch.Size([1, 2])
    """

    kind = XLNetConfig.kind
    only_predicting = ("softmax.", "mask_emb")
    config: XLNetConfig  # pyright: ignore[reportIncompatibleVariableOverride]  # of a frozen attribute, this is safe

    def __init__(self, config: XLNetConfig) -> None:
        super().__init__(config)
        self.clamp_len = config.clamp_len
        self.layers = nn.ModuleList(make_layer(TwoStreamAttention, config) for _ in range(config.n_layer))
        heads = (config.n_head, config.d_head)
        n_own = config.n_layer if config.untie_r else 1
        self.r_w_bias, self.r_r_bias, self.r_s_bias = (nn.Parameter(torch.zeros(n_own, *heads)) for _ in range(3))
        self.seg_embed = nn.Parameter(torch.zeros(config.n_layer, 2, *heads))
        self.mask_emb = nn.Parameter(torch.zeros(config.d_model))
        norm = nn.LayerNorm(config.d_model, eps=config.layer_norm_epsilon)
        self.final_norm = norm if config.final_norm else nn.Identity()
        self.softmax = make_softmax(config)
        self.init_weights()

    def init_own(self, name: str, parameter: Tensor) -> bool:
        if name.endswith("norm.weight"):
            parameter.fill_(1.0)
            return True
        if name == "mask_emb":
            limit = math.sqrt(6 / (1 + self.config.d_model))  # as TensorFlow draws what has no initializer (Glorot, uniform)
            parameter.uniform_(-limit, limit)
            return True
        return False

    def smallest_batch(self) -> Batch:
        ids = torch.zeros(1, 2, dtype=torch.int64, device=self.device)
        places, no = torch.arange(2, device=self.device).unsqueeze(0), ids[:, 0] > 0
        order = Order(rank=places - 1, sees=ids, targets=places[:, 1:])  # one target, which sees another text
        return Batch(ids, ids[:, 1:], extra=Pairs(order, segments=places, backward=no, is_random=no))

    def check_context(self) -> None:
        if self.clamp_len is not None and self.clamp_len < 1:
            raise ConfigError(f"clamp_len ({self.clamp_len}) must be at least 1")
        if self.same_length:
            raise ConfigError("same_length (True) is for models that read from left to right; an xlnet sees both sides")

    def loss(
        self,
        batch: Batch,
        *,
        mems: Any,
        execution: Execution = Execution(),
        keep_graph: bool = False,
        regularizers: Regularizers = Regularizers(),
    ) -> ModelOutput:
        return self(
            batch.ids,
            order=batch.pairs.order,
            labels=batch.labels,
            mems=mems,
            segments=batch.pairs.segments,
            is_backward=batch.pairs.backward,
            execution=execution,
            keep_graph=keep_graph,
        )

    def forward(
        self,
        ids: Tensor,
        *,
        order: Order,
        labels: Tensor | None = None,
        mems: Mems | None = None,
        segments: Tensor | None = None,
        is_backward: Tensor | None = None,
        n_pad: Tensor | None = None,
        execution: Execution = Execution(),
        keep_graph: bool = False,
    ) -> ModelOutput:
        """Predict the targets of a segment, after the memory of those before it.

        Args:
            ids: int64 (B, T), token ids; those of targets, too, because later targets see earlier ones.
            order: which tokens are targets, and who sees whom.
            labels: int64 (B, K), the tokens at the targets; -100 is not scored.
            mems: memory returned by the last call, or `init_mems`; None: empty.
            segments: int64 (B, T), the text that each token belongs to; None: all to the same. Memory belongs to text 0.
            is_backward: bool (B,), rows whose tokens stand in reverse, so that distances change sign; None: none, or with
                `backward_half` the last B // 2.
            n_pad: int64 (B,), padding tokens at the left of each row, neither seen nor remembered; None: none.
                `reuse_len` counts them, as in the peers, so less of a padded row is remembered.
            execution: how to compute; the result is the same.
            keep_graph: the new memory keeps its gradients; the caller detaches it (`Memory.detach`) to end that.

        Returns:
            logits (B, K, V), or with labels nats per target (B, K), and the new memory.

        Raises:
            ValueError: shapes that do not fit together.
        """
        if labels is not None and labels.shape != order.targets.shape:
            raise ValueError(f"labels {tuple(labels.shape)} must have the shape of targets {tuple(order.targets.shape)}")
        x_BQD, new_mems = self.read(
            ids, order=order, mems=mems, segments=segments, is_backward=is_backward, n_pad=n_pad,
            execution=execution, keep_graph=keep_graph,
        )  # fmt: skip
        g_BKD = self.drop_output(x_BQD)[:, ids.shape[1] :]
        if labels is None:
            return ModelOutput(new_mems, logits=self.softmax.logits(g_BKD, self.embedding))
        return ModelOutput(new_mems, nll=self.softmax.nll(g_BKD, labels, self.embedding))

    def read(
        self,
        ids: Tensor,
        *,
        order: Order | None = None,
        mems: Mems | None = None,
        segments: Tensor | None = None,
        is_backward: Tensor | None = None,
        n_pad: Tensor | None = None,
        execution: Execution = Execution(),
        keep_graph: bool = False,
    ) -> tuple[Tensor, Mems]:
        """Read a segment, as fine-tuned heads do without an order.

        Args:
            ids: int64 (B, T), token ids.
            order: which tokens are targets, and who sees whom; None: no targets and everything in sight, and all of the segment
                is remembered, whatever `reuse_len` is.
            mems: memory returned by the last call, or `init_mems`; None: empty.
            segments: int64 (B, T), the text that each token belongs to; None: all to the same. Memory belongs to text 0.
            is_backward: bool (B,), rows whose tokens stand in reverse; None: none, or with `backward_half` the last B // 2.
            n_pad: int64 (B,), padding tokens at the left of each row; None: none.
            execution: how to compute; the result is the same.
            keep_graph: the new memory keeps its gradients.

        Returns:
            The last states, (B, T, D), with an order also those of its targets after them, (B, T + K, D), and the new memory.

        Raises:
            ValueError: shapes that do not fit together.
        """
        B, T = _checked(ids, order=order, segments=segments)
        past: Mems = self.init_mems(B, length=None if self.config.zero_first_memory else 0) if mems is None else mems
        self.check_memory(past, B)
        ext_len, reuse_len = self.ext_len, self.config.reuse_len
        if order is not None and reuse_len is not None and reuse_len < T:
            ext_len = max(T - reuse_len, ext_len)
        if is_backward is None and self.config.backward_half:
            is_backward = torch.arange(B, device=ids.device) >= B - B // 2
        sight, n_own = _sight(ids, order, past, segments, is_backward, n_pad)
        r_XPD = self._positions(past.length + T, T, both=is_backward is not None)
        x_BQD = self.drop_input(self._enter(ids, order))
        hidden = []
        for i, layer in enumerate(self.layers):
            kept = remembered(past.hidden[i], x_BQD[:, :T], n_pad, mem_len=self.mem_len, ext_len=ext_len, keep_graph=keep_graph)
            hidden.append(kept)
            x_BQD = execution.run(layer, x_BQD, mem_BMD=past.hidden[i], r_XPD=r_XPD, sight=sight, biases=self._biases(i))
        n_valid = (n_own - ext_len).clamp(min=0, max=hidden[0].shape[1])
        return self.final_norm(x_BQD), self.mems_class(tuple(hidden), n_valid)

    def read_text(
        self, ids: Tensor, *, mems: Any, n_pad: Tensor | None, segments: Tensor | None, execution: Execution, keep_graph: bool
    ) -> tuple[Tensor, Mems]:
        if mems is None:  # as in the authors' fine-tuning, no zeros stand before a text
            mems = self.init_mems(len(ids), length=0)
        segments = torch.zeros_like(ids) if segments is None else segments
        return self.read(ids, mems=mems, segments=segments, n_pad=n_pad, execution=execution, keep_graph=keep_graph)

    def _enter(self, ids: Tensor, order: Order | None) -> Tensor:
        """Return what enters the first layer: embedded tokens, and `mask_emb` for each target."""
        h_BTD = self.embed(ids)
        if order is None:
            return h_BTD
        return torch.cat([h_BTD, self.mask_emb.to(h_BTD.dtype).expand(*order.targets.shape, -1)], dim=1)

    def _positions(self, n_key: int, tgt_len: int, *, both: bool) -> Tensor:
        """Return R of the distances S, …, -(T-1), (1, P, D), or (2, P, D) with those of rows that are read backward.

        No key lies S before a query; one distance more than there are makes the shift a view, see `at_keys`.
        """
        distance_P = torch.arange(n_key, -tgt_len, -1, device=self.device)
        if self.clamp_len is not None:
            distance_P = distance_P.clamp(-self.clamp_len, self.clamp_len)
        signed = [distance_P, -distance_P] if both else [distance_P]
        return self.drop_input(torch.stack([sinusoids(d, self.config.d_model, self.dtype) for d in signed]))

    def _biases(self, layer: int) -> Biases:
        u, v, s = (x[layer % len(x)] for x in (self.r_w_bias, self.r_r_bias, self.r_s_bias))
        return Biases(u, v, s, self.seg_embed[layer])


def _checked(ids: Tensor, *, order: Order | None, segments: Tensor | None) -> tuple[int, int]:
    """Return B and T, or refuse shapes that do not fit together."""
    check_tokens(ids, "batch", "tgt_len")
    given = {"segments": segments, "order.rank": order and order.rank, "order.sees": order and order.sees}
    for name, value in given.items():
        if value is not None and value.shape != ids.shape:
            raise ValueError(f"{name} {tuple(value.shape)} must have the shape of ids {tuple(ids.shape)}")
    if order is not None and (order.targets.dim() != 2 or len(order.targets) != len(ids)):
        raise ValueError(f"order.targets {tuple(order.targets.shape)} must have a row for each of the {len(ids)} rows of ids")
    return ids.shape[0], ids.shape[1]


def _sight(
    ids: Tensor, order: Order | None, mems: Mems, segments: Tensor | None, is_backward: Tensor | None, n_pad: Tensor | None
) -> tuple[Sight, Tensor]:
    """Return what the queries of both streams see, and int64 (B,), how many of the last keys are no padding."""
    T, M, device = ids.shape[1], mems.length, ids.device
    if order is None:
        order = Order(rank=torch.full_like(ids, -1), sees=torch.zeros_like(ids), targets=ids[:, :0])
    begin_B = torch.zeros_like(mems.n_valid) if n_pad is None else n_pad
    first_B = M + begin_B - mems.n_valid
    own_BT = torch.arange(T, device=device) >= begin_B.unsqueeze(1)
    # memory ends where a row's padding does, see `join`
    rank_BS = F.pad(order.rank.where(own_BT, -1), (M, 0), value=-1)
    rank_BS = rank_BS.where(torch.arange(M + T, device=device) >= first_B.unsqueeze(1), _UNSEEN)
    sees_BQ = torch.cat([order.sees, order.sees.gather(1, order.targets)], dim=1)
    differs = None
    if segments is not None:
        segment_BQ = torch.cat([segments, segments.gather(1, order.targets)], dim=1)
        differs = segment_BQ.unsqueeze(2) != F.pad(segments.where(own_BT, 0), (M, 0)).unsqueeze(1)
    is_backward = torch.zeros_like(own_BT[:, 0]) if is_backward is None else is_backward
    sight = Sight(order.targets, hidden_by_rank(rank_BS, sees_BQ, T), is_backward, differs, n_pad)
    return sight, M + T - first_B
