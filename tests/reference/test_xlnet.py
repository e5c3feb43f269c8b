"""XLNet against the loops of `xlnet_loops.py`: content, predictions, memory and the gradient of every parameter."""

import copy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.helpers import assert_close, default_dtype, gradients, tiny_xlnet
from tests.reference.xlnet_loops import read_row
from transformer_xl.batch import Order
from transformer_xl.model.memory import Mems
from transformer_xl.model.xlnet import XLNet

VARIANTS = {
    "paper": {},
    "shared u, v, s": {"untie_r": False},
    "reuse_len": {"reuse_len": 3},
    "clamp_len": {"clamp_len": 2},
    "no memory": {"mem_len": 0},
    "long memory, reuse_len": {"mem_len": 7, "reuse_len": 2},
    "zero first memory": {"zero_first_memory": True},
    "gelu": {"activation": "gelu"},
    "relu": {"activation": "relu", "layer_norm_epsilon": 0.3},
}
MEM_LEN = 3
SEGMENTS = [2, 5, 1]
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12}


@dataclass
class Segment:
    """What rows read together, and for each row the loops' results."""

    ids: Tensor
    order: Order
    texts: Tensor
    labels: Tensor
    content: list[Tensor]  # of each row (T, D)
    nll: list[Tensor]  # of each row (K,)
    memories: list[list[list[Tensor]]]


@dataclass
class Reading:
    """How many tokens rows had read before, how they read, the segments, and the gradient of every parameter."""

    past: list[Tensor]
    is_backward: Tensor
    segments: list[Segment]
    gradients: dict[str, Tensor]


def random_order(n_row: int, n_token: int) -> Order:
    """Draw any ranks: those of targets, and of others; a target does not see itself."""
    rank = torch.randint(-1, 4, (n_row, n_token))
    sees = torch.randint(0, 5, (n_row, n_token))
    targets = torch.stack([torch.randperm(n_token)[: max(1, n_token // 2)] for _ in range(n_row)])
    hidden = rank.gather(1, targets).clamp(min=0)  # what all may see cannot be a target
    rank = rank.scatter(1, targets, hidden)
    return Order(rank, sees.scatter(1, targets, (torch.rand(hidden.shape) * (hidden + 1)).long()), targets)


def read_by_loops(model: XLNet, *, ages: list[int]) -> Reading:
    """Read random segments with the loops in fp64, row by row; row b has read ages[b] tokens before."""
    n_row = len(ages)
    with default_dtype(torch.float64):
        config = model.config
        assert config.vocab_size is not None
        w = {name: p.detach().double().requires_grad_() for name, p in model.named_parameters()}
        is_backward = torch.arange(n_row) % 2 == 1
        zeros = [torch.zeros(config.d_model)] * config.mem_len if config.zero_first_memory else []
        memories = [[list(zeros) for _ in range(config.n_layer)] for _ in ages]
        past = [torch.randint(config.vocab_size, (1, age)) for age in ages]
        for b, ids in enumerate(past):
            if ids.numel():
                T = ids.shape[1]
                row = (ids[0].tolist(), all_see_all(T), [], [0] * T, bool(is_backward[b]), memories[b])
                with torch.no_grad():
                    memories[b] = read_row(*row, w, config)[2]
        segments, total = [], torch.zeros(())
        for T in SEGMENTS:
            ids, order, texts = (
                torch.randint(config.vocab_size, (n_row, T)),
                random_order(n_row, T),
                torch.randint(3, (n_row, T)),
            )
            labels, content, nll = ids.gather(1, order.targets), [], []
            for b in range(n_row):
                sees = [[bool(order.rank[b, j] < order.sees[b, i]) for j in range(T)] for i in range(T)]
                facts = (texts[b].tolist(), bool(is_backward[b]), memories[b], w, config)
                h, _, _ = read_row(ids[b].tolist(), all_see_all(T), [], *facts)
                _, log_probabilities, memory = read_row(ids[b].tolist(), sees, order.targets[b].tolist(), *facts)
                content.append(torch.stack(h))
                nll.append(torch.stack([-p[label] for p, label in zip(log_probabilities, labels[b], strict=True)]))
                memories[b] = without_gradient(memory)
            total = total + weighted(torch.stack(nll)) + weighted(torch.stack(content).mean(-1))
            found = ([h.detach() for h in content], [n.detach() for n in nll], list(memories))
            segments.append(Segment(ids, order, texts, labels, *found))
        total.backward()
    return Reading(past, is_backward, segments, {name: p.grad for name, p in w.items() if p.grad is not None})


def all_see_all(n_token: int) -> list[list[bool]]:
    return [[True] * n_token for _ in range(n_token)]


def without_gradient(memory: list[list[Tensor]]) -> list[list[Tensor]]:
    return [[x.detach() for x in layer] for layer in memory]


def compare(model: XLNet, reading: Reading, dtype: torch.dtype, what: str) -> None:
    """Read the same with the model, all rows in one batch."""
    tolerance, what = TOLERANCE[dtype], f"{what}, {dtype}"
    with default_dtype(dtype):
        model = copy.deepcopy(model).to(dtype)
        starts = []
        for ids, is_backward in zip(reading.past, reading.is_backward, strict=True):
            start, (_, T) = model.init_mems(1), ids.shape
            kept = model.with_context(ext_len=max(T - (model.config.reuse_len or T), 0))  # read keeps all, unless told
            starts.append(kept.read(ids, mems=start, is_backward=is_backward[None])[1] if T else start)
        mems, total = Mems.concatenate(starts), torch.zeros(())
        for segment in reading.segments:
            facts: dict[str, Any] = {"mems": mems, "segments": segment.texts, "is_backward": reading.is_backward}
            out = model(segment.ids, order=segment.order, labels=segment.labels, **facts)
            with torch.no_grad():
                logits = model(segment.ids, order=segment.order, **facts).logits
            content, _ = model.read(segment.ids, **facts)
            total = total + weighted(out.nll) + weighted(content.mean(-1))
            mems = out.mems
            by_logits = F.cross_entropy(logits.flatten(0, 1), segment.labels.flatten(), reduction="none")
            assert_close(f"{what}: logits", by_logits.view_as(out.nll), out.nll, tolerance)
            for b, memory in enumerate(segment.memories):
                assert_close(f"{what}: content", content[b].double(), segment.content[b], tolerance)
                assert_close(f"{what}: nll", out.nll[b].double(), segment.nll[b], tolerance)
                n_valid = int(mems.n_valid[b])
                assert n_valid == len(memory[0])
                for hidden, expected in zip(mems.hidden, memory, strict=True):
                    if n_valid:
                        assert_close(f"{what}: memory", hidden[b, -n_valid:].double(), torch.stack(expected), tolerance)
        total.backward()
    assert reading.gradients.keys() == dict(model.named_parameters()).keys()
    for name, gradient in gradients(model).items():
        assert_close(f"{what}: gradient of {name}", gradient.double(), reading.gradients[name], tolerance)


def weighted(values: Tensor) -> Tensor:
    """Sum values (rows, tokens) with a different weight for each, so that swapped values change the sum."""
    return (values * torch.arange(1.0, values.shape[1] + 1)).sum()


@pytest.mark.parametrize("variant", VARIANTS)
def test_xlnet_equals_loops(variant: str) -> None:
    model = tiny_xlnet(**{"mem_len": MEM_LEN, **VARIANTS[variant]})
    reading = read_by_loops(model, ages=[0, 5])
    for dtype in TOLERANCE:
        compare(model, reading, dtype, variant)
