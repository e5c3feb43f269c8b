"""Dynamic evaluation: after each segment has been scored, the weights take a step on its loss, so they learn from the text.

    SGD    θ ← θ - η g + λ (θ0 - θ)
    RMS    θ ← θ - η g / (√MS + ε √mean(MS)) + min(λ √MS / mean(√MS), 1) (θ0 - θ)

g is the gradient of the mean nats of the segment, θ0 the trained weights, MS the mean of g² over segments of training text;
mean(…) is over all weights. A weight with large gradients on training text takes smaller steps for each, and goes back faster.

Reference: Krause et al. 2018, arXiv 1709.07432, section 4, and 2019, arXiv 1904.08378. Known deviation: ε is a multiple of
√mean(MS), so that it suits gradients of any size.
"""

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from transformer_xl.batch import NOT_SCORED, Rows
from transformer_xl.errors import ConfigError, TrainingError
from transformer_xl.kernels.device import Precision, autocast, check_precision, choose_precision
from transformer_xl.model.base import LanguageModel, check_reads_on
from transformer_xl.model.call import Execution
from transformer_xl.model.room import check_room
from transformer_xl.reading.reading import Reading
from transformer_xl.reading.segments import Lanes
from transformer_xl.reading.stream import CarriedState, check_alike, scoring, stream_ids

DynamicRule = Literal["sgd", "rms"]
"""How the weights take a step."""

DEFAULT_LR: dict[DynamicRule, float] = {"sgd": 0.05, "rms": 3e-4}
"""Learning rates that suit small models; see docs/results.md."""


@dataclass(frozen=True)
class Dynamic:
    """Settings of the dynamic evaluation of `evaluate`.

    Attributes:
        lr: η; None: a value that suits the rule.
        decay: λ, how far each step goes back towards the trained weights, 0 to 1.
        epsilon: ε of the RMS rule.
        mean_squares: MS of every parameter by name, see `mean_squares`; None: the SGD rule.

    Raises:
        ConfigError: values out of their range.

    Example:
        >>> Dynamic(decay=0.01).as_dict()
        {'rule': 'sgd', 'lr': 0.05, 'decay': 0.01}
    """

    lr: float | None = None
    decay: float = 0.0
    epsilon: float = 1.0
    mean_squares: Mapping[str, Tensor] | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not 0 < self.rate < math.inf or not 0 < self.epsilon < math.inf:
            raise ConfigError(
                f"lr ({self.rate:g}) and epsilon ({self.epsilon:g}) of dynamic evaluation must be numbers above 0"
            )
        if not 0 <= self.decay <= 1:
            raise ConfigError(f"decay ({self.decay:g}) of dynamic evaluation must be from 0 to 1")

    @property
    def rule(self) -> DynamicRule:
        """The rule: `rms` with mean squares, else `sgd`."""
        return "sgd" if self.mean_squares is None else "rms"

    @property
    def rate(self) -> float:
        """The learning rate η, whether it was given or not."""
        return DEFAULT_LR[self.rule] if self.lr is None else self.lr

    def as_dict(self) -> dict[str, str | float]:
        """Return the settings for JSON."""
        own: dict[str, str | float] = {"rule": self.rule, "lr": self.rate, "decay": self.decay}
        return own if self.mean_squares is None else own | {"epsilon": self.epsilon}


class LearningState(CarriedState):
    """One row whose weights, a copy of the model's, take a step on the loss of each segment after it has been scored.

    Args:
        model: which stays as it is; in evaluation mode.
        dynamic: settings; None: no step is taken.
        tgt_len: tokens of a segment.
        precision: of the matrix products.
        execution: how the model computes.

    Raises:
        ConfigError: a model that cannot learn, or no room for the copy.
    """

    def __init__(
        self,
        model: LanguageModel,
        dynamic: Dynamic | None,
        *,
        tgt_len: int,
        precision: Precision,
        execution: Execution = Execution(),
    ) -> None:
        if model.is_sharded:
            raise ConfigError("dynamic evaluation needs all weights in one process; do not shard the model")
        n_bytes = 4 * sum(parameter.nbytes for parameter in model.parameters())
        check_room(n_bytes, model.device, "dynamic evaluation")
        learner = copy.deepcopy(model).requires_grad_(True)
        if model.dtype in (torch.bfloat16, torch.float16):  # small steps would be lost
            learner = learner.float()
        super().__init__(learner, 1, tgt_len=tgt_len, precision=precision, execution=execution)
        self.weights = dict(learner.named_parameters())
        self._trained = {name: parameter.detach().clone() for name, parameter in self.weights.items()}
        self._dynamic = dynamic
        self._rates = {} if dynamic is None else _rates(dynamic, self.weights)

    def read_and_score(self, ids: Tensor, labels: Tensor, *, n_pad: Tensor | None = None) -> tuple[Tensor, Tensor]:
        h_BTD, nll, gradients = self.gradients(ids, labels, n_pad=n_pad)
        self._step(gradients)
        return h_BTD, nll

    def score(self, ids: Tensor, labels: Tensor, *, n_pad: Tensor | None = None) -> Tensor:
        return self.read_and_score(ids, labels, n_pad=n_pad)[1]

    def gradients(
        self, ids: Tensor, labels: Tensor, *, n_pad: Tensor | None = None
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Read one segment, and return its states, its nats and the gradient of their mean by name of the weight.

        Raises:
            TrainingError: the loss is not finite.
        """
        device = self.model.device
        ids, labels, n_pad = ids.to(device), labels.to(device), None if n_pad is None else n_pad.to(device)
        with torch.enable_grad(), autocast(device, self.precision):
            h_BTD, mems = self.model.read(ids, mems=self.mems, rows=Rows(n_pad=n_pad), execution=self.execution)
            nll = self.model.softmax.nll(h_BTD, labels, self.model.embedding)
            loss = nll.sum() / (labels != NOT_SCORED).sum()
        if not loss.isfinite():
            lr = "" if self._dynamic is None else f"; lower lr ({self._dynamic.rate:g}, --dynamic-lr)"
            raise TrainingError(f"dynamic evaluation diverged: the loss of a segment is {loss.item()}{lr}")
        found = torch.autograd.grad(loss, list(self.weights.values()), allow_unused=True, materialize_grads=True)
        self.mems = mems
        return h_BTD.detach(), nll.detach(), dict(zip(self.weights, found, strict=True))

    @torch.no_grad()
    def _step(self, gradients: Mapping[str, Tensor]) -> None:
        for name, weight in self.weights.items():
            rate, pull = self._rates[name]
            weight.lerp_(self._trained[name], pull).sub_(gradients[name] * rate)


def _rates(dynamic: Dynamic, weights: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    """Return by name what multiplies the gradient, and the share of the way back to the trained weights."""
    if dynamic.mean_squares is None:
        rate, pull = (torch.tensor(x, device=next(iter(weights.values())).device) for x in (dynamic.rate, dynamic.decay))
        return dict.fromkeys(weights, (rate, pull))
    check_alike(dynamic.mean_squares, weights)
    roots = {name: x.to(weights[name].device).sqrt() for name, x in dynamic.mean_squares.items()}
    n = sum(x.numel() for x in roots.values())
    mean = sum(float(x.double().sum()) for x in roots.values()) / n
    if not 0 < mean < math.inf:
        raise ConfigError(f"mean squares must be numbers that are not all 0 (mean root {mean}); use mean_squares(model, …)")
    floor = dynamic.epsilon * math.sqrt(sum(float(x.double().square().sum()) for x in roots.values()) / n)
    return {name: (dynamic.rate / (x + floor), (dynamic.decay / mean * x).clamp(max=1)) for name, x in roots.items()}


def precision_of_learning(name: str, device: torch.device) -> Precision:
    """Return the precision in which a text is read to learn from it; `auto` takes bf16 where it is native, else fp32.

    Raises:
        ConfigError: an unknown name, or one in which nothing is learned.
    """
    check_precision(name)
    chosen = "fp32" if name == "auto" and choose_precision(name, device)[0] == "fp16" else name
    if chosen == "int8" or chosen == "fp16":
        why = "weights are frozen" if chosen == "int8" else "gradients vanish"
        raise ConfigError(f"dynamic evaluation needs bf16 or fp32, and precision is {chosen}, in which {why}")
    return choose_precision(chosen, device)[0]


def mean_squares(
    model: LanguageModel,
    token_ids: np.ndarray | Tensor,
    reading: Reading = Reading(),
    *,
    on_tokens: Callable[[int], object] = lambda n: None,
    execution: Execution = Execution(),
    **options: Any,
) -> dict[str, Tensor]:
    """Return the mean squared gradient of each weight on a training text, which the RMS rule of `Dynamic` needs.

    Args:
        model: stays as it is.
        token_ids: of the text, integers (N,), N ≥ 2; some 20,000 tokens are enough.
        reading: as the text to score will be read, in one lane; its precision is not int8 or fp16.
        on_tokens: called with the number of tokens just read, for progress bars.
        execution: how the model computes.
        options: attributes of `Reading` that replace those of `reading`, such as `tgt_len=64`.

    Returns:
        A tensor for each parameter, by name.

    Raises:
        CorpusError: fewer than two tokens.
        TokenizerError: ids outside the model's vocabulary.
        ConfigError: a model or a precision that cannot learn.

    Example:
        >>> from transformer_xl import TransformerXL, TransformerXLConfig
        >>> model = TransformerXL(TransformerXLConfig(vocab_size=4, n_layer=1, d_model=8, n_head=1, d_head=8, d_inner=8))
        >>> Dynamic(mean_squares=mean_squares(model, np.array([0, 1, 2, 3]))).rule
        'rms'
    """
    check_reads_on(model)
    ids, reading = stream_ids(token_ids, model, "training text"), replace(reading, **options)
    tgt_len, chosen = min(reading.tgt_len, len(ids) - 1), precision_of_learning(reading.precision, model.device)
    with scoring(model):
        view = reading.view(model).for_text(len(ids))
        stream = LearningState(view, None, tgt_len=tgt_len, precision=chosen, execution=execution)
        total = {name: torch.zeros_like(weight) for name, weight in stream.weights.items()}
        n = 0
        for segment in Lanes(ids, 1, tgt_len=tgt_len, ext_len=reading.ext_len).segments(pad_left=True):
            for name, gradient in stream.gradients(segment.ids, segment.labels, n_pad=segment.n_pad)[2].items():
                total[name].addcmul_(gradient, gradient)
            n += 1
            on_tokens(int(segment.is_scored.sum()))
        return {name: x / n for name, x in total.items()}
