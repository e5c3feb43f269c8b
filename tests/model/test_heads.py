"""Heads against loops over single numbers: scores, losses, what is not scored, beams."""

import itertools
import math
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn

from tests.helpers import assert_close, default_dtype, random_weights
from transformer_xl.config.model import HeadConfig
from transformer_xl.model.heads import SpanHead, TextHead, make_head

D = 6
SIZES: dict[str, Any] = {"d_model": D, "layer_norm_epsilon": 1e-12, "init_std": 0.02}

pytestmark = pytest.mark.usefixtures("double_precision")


def text_head(kind: str, **changes: Any) -> TextHead:
    labels = {"classification": ("a", "b", "c"), "multilabel": ("a", "b"), "tokens": ("a", "b", "c")}.get(kind, ())
    head = make_head(HeadConfig(**{"kind": kind, "labels": labels, "dropout": 0.0, **changes}), **SIZES)
    assert isinstance(head, TextHead)
    return random_weights(head)


def span_head(**changes: Any) -> SpanHead:
    head = make_head(HeadConfig(**{"kind": "span", "dropout": 0.0, **changes}), **SIZES)
    assert isinstance(head, SpanHead)
    return random_weights(head)


def affine(x: Tensor, layer: Any) -> list[float]:
    """W x + b of one vector, in loops."""
    bias = [0.0] * len(layer.weight) if layer.bias is None else layer.bias.tolist()
    return [
        b + sum(w * y for w, y in zip(row, x.tolist(), strict=True)) for row, b in zip(layer.weight.tolist(), bias, strict=True)
    ]


def normed(x: list[float], norm: nn.LayerNorm) -> Tensor:
    mean = sum(x) / len(x)
    variance = sum((y - mean) ** 2 for y in x) / len(x)
    return torch.tensor([(y - mean) / math.sqrt(variance + norm.eps) for y in x]) * norm.weight + norm.bias


def log_softmax(scores: list[float], allowed: list[bool]) -> list[float]:
    total = math.log(sum(math.exp(score) for score, is_allowed in zip(scores, allowed, strict=True) if is_allowed))
    return [score - total if is_allowed else -math.inf for score, is_allowed in zip(scores, allowed, strict=True)]


class SpanLoop:
    """What a span head says of one window, in loops."""

    def __init__(self, head: SpanHead, h: Tensor, may_answer: list[bool]) -> None:
        self.head, self.h = head, h
        self.allowed = [*may_answer[:-1], True]
        self.start = log_softmax([affine(x, head.start)[0] for x in h], self.allowed)

    def ends(self, start: int) -> list[float]:
        scores = []
        for x in self.h:
            inner = affine(torch.cat([x, self.h[start]]), self.head.end_inner)
            scores += affine(normed([math.tanh(y) for y in inner], self.head.end_norm), self.head.end)
        return log_softmax(scores, self.allowed)

    @property
    def no_answer(self) -> float:
        mean = sum((math.exp(p) * x for p, x in zip(self.start, self.h, strict=True)), torch.zeros(D))
        inner = affine(torch.cat([mean, self.h[-1]]), self.head.answerable_inner)
        return affine(torch.tensor([math.tanh(y) for y in inner]), self.head.answerable)[0]

    def nll(self, start: int, end: int, is_none: int) -> float:
        score = self.no_answer if is_none else -self.no_answer
        return -(self.start[start] + self.ends(start)[end]) / 2 + 0.5 * math.log1p(math.exp(-score))


@pytest.mark.parametrize("projection", [True, False])
@pytest.mark.parametrize("kind", ["classification", "multilabel", "regression", "choice"])
def test_scores_of_a_text_equal_loops(kind: str, projection: bool) -> None:
    head, states = text_head(kind, projection=projection), torch.randn(3, D)
    assert [name.partition(".")[0] for name in head.state_dict()] == ["summary"] * 2 * projection + ["scores"] * 2
    for state, scores in zip(states, head(states), strict=True):
        summary = torch.tensor(affine(state, head.summary)).tanh() if projection else state
        assert_close("scores", scores, torch.tensor(affine(summary, head.scores)), 1e-12)


def test_a_class_or_a_token_costs_its_nats() -> None:
    head, states = text_head("tokens"), torch.randn(2, 4, D)
    assert [name.partition(".")[0] for name in head.state_dict()] == ["scores"] * 2
    scores = head(states)
    labels = torch.tensor([[-100, 2, 0, -100], [1, 1, -100, 2]])
    nll = head.nll(scores, labels)
    for b, t in itertools.product(range(2), range(4)):
        assert_close("scores", scores[b, t], torch.tensor(affine(states[b, t], head.scores)), 1e-12)
        label = int(labels[b, t])
        cost = -log_softmax(scores[b, t].tolist(), [True] * 3)[label] if label >= 0 else 0.0
        assert_close("nll", nll[b, t], torch.tensor(cost), 1e-12)
    for kind in ("classification", "choice"):
        assert_close(kind, text_head(kind).nll(scores[1], labels[1]), nll[1], 1e-12)


def test_labels_cost_the_mean_of_their_nats_and_what_is_not_known_nothing() -> None:
    scores = torch.randn(3, 2, requires_grad=True)
    labels = torch.tensor([[0.0, 1.0], [math.nan, 1.0], [math.nan, math.nan]], dtype=torch.float32)
    nll = text_head("multilabel").nll(scores, labels)
    cost = [[math.log1p(math.exp(score)) for score in row] for row in scores.tolist()]  # of a label that is not there
    first = (cost[0][0] + cost[0][1] - scores[0, 1].item()) / 2
    assert_close("nll", nll, torch.tensor([first, cost[1][1] - scores[1, 1].item(), 0.0]), 1e-12)
    nll.sum().backward()
    assert scores.grad is not None
    assert scores.grad.isfinite().all()
    assert (scores.grad[labels.isnan()] == 0).all()


def test_a_number_costs_the_square_of_the_error() -> None:
    scores = torch.tensor([[3.0], [-1.0]], requires_grad=True)
    nll = text_head("regression").nll(scores, torch.tensor([1.5, math.nan], dtype=torch.float32))
    assert nll.tolist() == [2.25, 0.0]
    nll.sum().backward()
    assert scores.grad is not None
    assert scores.grad.tolist() == [[3.0], [0.0]]


def test_places_equal_loops() -> None:
    """Start, end and whether there is an answer, also where there is none: the last token may always be chosen."""
    head, h = span_head(), torch.randn(4, 7, D)
    may_answer = torch.tensor([[True, True, True, False, True, False, False]] * 4)
    labels = torch.tensor([[0, 2, 0], [6, 6, 1], [4, 4, 0], [-100, -100, -100]])
    nll = head.nll(h, may_answer, labels)
    expected = [SpanLoop(head, h[b], may_answer[b].tolist()).nll(*labels[b].tolist()) for b in range(3)]
    assert_close("nll", nll, torch.tensor([*expected, 0.0]), 1e-12)
    best = head.best(h, may_answer, n_start=3, n_end=2)
    assert best.ends.shape == (4, 3, 2)
    for b in range(4):
        loop = SpanLoop(head, h[b], may_answer[b].tolist())
        order = sorted(range(7), key=lambda i: -loop.start[i])[:3]
        assert best.starts[b].tolist() == order
        assert_close("start", best.start_log_probs[b], torch.tensor([loop.start[i] for i in order]), 1e-12)
        assert_close("none", best.no_answer[b], torch.tensor(loop.no_answer), 1e-12)
        for k, start in enumerate(order):
            ends = loop.ends(start)
            assert best.ends[b, k].tolist() == sorted(range(7), key=lambda i: -ends[i])[:2]
            assert_close("end", best.end_log_probs[b, k], torch.tensor(sorted(ends, reverse=True)[:2]), 1e-12)


def test_hidden_places_and_windows_that_are_not_scored_leave_gradients_finite() -> None:
    head, h = span_head(), torch.randn(2, 5, D, requires_grad=True)
    may_answer = torch.zeros(2, 5, dtype=torch.bool)
    head.nll(h, may_answer, torch.tensor([[4, 4, 1], [-100, -100, -100]])).sum().backward()
    assert h.grad is not None
    assert h.grad.isfinite().all()
    assert h.grad[0].any()
    assert not h.grad[1].any()
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in head.parameters())


def test_a_window_has_no_more_places_than_tokens() -> None:
    best = span_head().best(torch.randn(1, 3, D), torch.ones(1, 3, dtype=torch.bool), n_start=5, n_end=9)
    assert best.ends.shape == (1, 3, 3)
    assert sorted(best.starts[0].tolist()) == [0, 1, 2]


def test_dropout_stands_before_the_scores() -> None:
    head = text_head("classification", dropout=0.5).train()
    with torch.no_grad():
        head.scores.weight.copy_(torch.eye(3, D))
        head.scores.bias.zero_()
    summary = torch.randn(1, D)
    expected = head.summary(summary).tanh()[:, :3]  # pyright: ignore[reportOptionalCall]
    rows = head(summary.expand(400, D))
    assert 0.4 < (rows == 0).double().mean() < 0.6
    assert_close("the others", rows, torch.where(rows == 0, 0.0, 2 * expected), 1e-12)
    spans = span_head(dropout=0.5).train()
    with torch.no_grad():
        h, may_answer = torch.randn(1, 4, D).expand(50, 4, D), torch.ones(50, 4, dtype=torch.bool)
        best = spans.best(h, may_answer, n_start=1, n_end=1)
    assert len(best.no_answer.unique()) > 20
    assert len(best.start_log_probs.unique()) == len(best.end_log_probs.unique()) == 1


def test_heads_compute_in_the_type_of_their_weights_under_autocast() -> None:
    with default_dtype(torch.float32):
        texts, spans = text_head("classification"), span_head()
        h = torch.randn(2, 5, D)
        expected = texts(h[:, 0]), spans.nll(h, torch.ones(2, 5).bool(), torch.tensor([[0, 1, 0], [4, 4, 1]]))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found = texts(h[:, 0]), spans.nll(h, torch.ones(2, 5).bool(), torch.tensor([[0, 1, 0], [4, 4, 1]]))
        assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))
        assert texts.bfloat16()(h[:, 0].bfloat16()).dtype == torch.float32
        assert spans.bfloat16().best(h.bfloat16(), torch.ones(2, 5).bool(), n_start=2, n_end=2).no_answer.dtype == torch.float32


def test_large_products_in_parts_equal_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights of the end are used in two parts, views of which oneDNN multiplies."""
    monkeypatch.setattr("transformer_xl.kernels.cpu_linear._prefers_onednn", lambda: True)
    with default_dtype(torch.float32):
        head = SpanHead(HeadConfig(kind="span", dropout=0.0), d_model=128, layer_norm_epsilon=1e-12)
        h, starts = torch.randn(2, 150, 128), torch.tensor([[3], [140]])
        found = head._ends(h, starts, torch.ones(2, 150, dtype=torch.bool))
        start = h[torch.arange(2)[:, None], starts].expand(-1, 150, -1)
        scores = head.end(head.end_norm(head.end_inner(torch.cat([h, start], dim=-1)).tanh()))
        assert_close("ends", found.squeeze(1), scores.squeeze(-1), 1e-6)


@pytest.mark.parametrize("kind", get_args(HeadConfig.model_fields["kind"].annotation))
def test_first_weights_are_normal_norms_one_and_biases_zero(kind: Any) -> None:
    labels = tuple(map(str, range(40))) if kind in ("classification", "multilabel", "tokens") else ()
    head = make_head(HeadConfig(kind=kind, labels=labels), d_model=200, layer_norm_epsilon=1e-12, init_std=0.05)
    for name, parameter in head.named_parameters():
        if name == "end_norm.weight":
            assert (parameter == 1).all()
        elif name.endswith("bias"):
            assert (parameter == 0).all(), name
        else:
            assert abs(parameter.std().item() / 0.05 - 1) < 0.2, name
