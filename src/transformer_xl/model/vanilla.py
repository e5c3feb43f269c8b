"""The Transformer of Al-Rfou et al. 2018 (arXiv 1808.04444), which the paper calls vanilla: segments without a memory.

    h ← h + P_l                            learned positions, added before every layer
    h ← layer(h), attention causal         inside the segment; nothing before it is seen
    loss: the last layer's; the auxiliary losses are those of other layers and of later tokens (their section 2.1)

Their code is not published. Deviations: one softmax serves all layers; there are options such as pre-norm and GELU.

They score each token after a whole segment that is read anew; `evaluate(…, tgt_len=1, ext_len=max_len - 1)` does the same.

Shapes: B batch, T tgt_len, N heads, H d_head, D d_model.
"""

from typing import cast

import torch
from torch import Tensor, nn

from transformer_xl.batch import Rows
from transformer_xl.config.model import VanillaConfig
from transformer_xl.errors import ConfigError
from transformer_xl.kernels.sdpa import sdpa_attention
from transformer_xl.model.adaptive import make_softmax
from transformer_xl.model.attention.block import AttentionKind
from transformer_xl.model.base import LanguageModel
from transformer_xl.model.call import Execution, ModelOutput, Regularizers
from transformer_xl.model.layers import make_layer
from transformer_xl.model.mask import Mask
from transformer_xl.model.memory import Memory, Mems
from transformer_xl.model.softmax import TokenSoftmax

_LATER_TARGETS = 0.5
"""Weight of the tokens after the next one."""


class Vanilla(LanguageModel):
    """A language model that reads separate segments and has no memory.

    Args:
        config: sizes and options; `vocab_size` and `max_len` must be set.

    Example:
        >>> sizes = {"n_layer": 2, "d_model": 8, "n_head": 2, "d_head": 4, "d_inner": 16}
        >>> model = Vanilla(VanillaConfig(vocab_size=11, max_len=5, **sizes))
        >>> model(torch.zeros(3, 5, dtype=torch.int64)).logits.shape
        torch.Size([3, 5, 11])
    """

    kind = VanillaConfig.kind
    only_predicting = ("softmax.", "later_targets.")
    config: VanillaConfig  # pyright: ignore[reportIncompatibleVariableOverride]  # of a frozen attribute, this is safe

    def __init__(self, config: VanillaConfig) -> None:
        super().__init__(config)
        self.check_context()
        if config.max_len is None:
            raise ConfigError("max_len (None) must say how many positions are told apart, such as train.tgt_len")
        self.layers = nn.ModuleList(make_layer(AttentionKind, config) for _ in range(config.n_layer))
        self.positions = nn.Parameter(torch.zeros(config.n_layer, config.max_len, config.d_model))
        norm = nn.LayerNorm(config.d_model, eps=config.layer_norm_epsilon)
        self.final_norm = norm if config.final_norm else nn.Identity()
        self.softmax = make_softmax(config)
        self.later_targets = nn.ModuleList(make_softmax(config) for _ in range(config.n_target - 1))
        self.init_weights()

    def reach(self, tgt_len: int) -> int:
        return 0  # nothing before a segment matters

    def check_context(self) -> None:
        super().check_context()
        if self.mem_len:
            raise ConfigError(f"mem_len ({self.mem_len}) must be 0: a vanilla model has no memory; ext_len reads text again")

    @property
    def learned_length(self) -> int | None:
        return self.config.max_len

    @property
    def trained_length(self) -> int | None:
        return self.learned_length

    @property
    def adds_losses(self) -> bool:
        return self.config.intermediate_losses or self.config.n_target > 1

    def forward(
        self,
        ids: Tensor,
        *,
        mems: Memory | None = None,
        labels: Tensor | None = None,
        rows: Rows = Rows(),
        execution: Execution = Execution(),
        keep_graph: bool = False,
        regularizers: Regularizers = Regularizers(),
    ) -> ModelOutput:
        if labels is None or not (self.training and self.adds_losses):
            return super().forward(
                ids, mems=mems, labels=labels, rows=rows, execution=execution, keep_graph=keep_graph, regularizers=regularizers
            )
        self.check_segment(ids, mems, labels)
        states = [self.drop_output(self.final_norm(h_BTD)) for h_BTD in self._layers(ids, rows, execution)]
        n, early = self.config.n_layer, self.config.intermediate_losses
        # layer l of n predicts in the first l / 2n of training, and the last one always
        predicting = [i for i in range(n) if i == n - 1 or (early and regularizers.progress < (i + 1) / (2 * n))]
        losses = [self._losses(states[i], labels) for i in predicting]
        nll = losses[-1][0]
        zero = torch.zeros((), device=nll.device)
        others = sum((early_nll.sum() for early_nll, _ in losses[:-1]), zero) + sum((later for _, later in losses), zero)
        return ModelOutput(self.init_mems(len(ids)), nll=nll, auxiliary=others)

    def read(
        self,
        ids: Tensor,
        *,
        mems: Memory | None = None,
        rows: Rows = Rows(),
        execution: Execution = Execution(),
        keep_graph: bool = False,
    ) -> tuple[Tensor, Mems]:
        *_, h_BTD = self._layers(ids, rows, execution)
        return self.final_norm(h_BTD), self.init_mems(len(ids))

    def _layers(self, ids: Tensor, rows: Rows, execution: Execution) -> list[Tensor]:
        """Return the output of every layer."""
        (batch_size, T), n_pad = ids.shape, rows.n_pad
        if self.positions.shape[1] < T:
            raise ConfigError(
                f"a segment of {T} tokens is longer than the {self.positions.shape[1]} positions that this vanilla model "
                "learned; read at most that many at once (tgt_len and ext_len together)"
            )
        mask, place = None, torch.arange(T, device=ids.device)
        if n_pad is not None or rows.document_starts is not None:
            nothing = torch.zeros(batch_size, dtype=torch.int64, device=ids.device)
            mask = Mask.of(rows.document_starts, nothing, n_pad, tgt_len=T, memory_length=0)
        if n_pad is not None:
            place = (place - n_pad.unsqueeze(1)).clamp(min=0)
        h_BTD = self.drop_input(self.embed(ids))
        outputs = []
        for layer, table in zip(self.layers, self.positions, strict=True):
            h_BTD = execution.run(layer, h_BTD + table[place], mask=mask, backend=sdpa_attention)
            outputs.append(h_BTD)
        return outputs

    def _losses(self, h_BTD: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return nats of the next token (B, T), and the weighted sum of the nats of later tokens."""
        nll = self.softmax.nll(h_BTD, labels, self.embedding)
        later = torch.zeros((), device=nll.device)
        for i, softmax in enumerate(self.later_targets, start=1):
            if i < labels.shape[1]:
                target = cast("TokenSoftmax", softmax).nll(h_BTD[:, :-i], labels[:, i:], self.embedding)
                later = later + _LATER_TARGETS * target.sum()
            else:  # a segment too short for this target; processes that share gradients still expect all of them
                later = later + sum(0.0 * parameter.sum() for parameter in softmax.parameters())
        return nll, later
