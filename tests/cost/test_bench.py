"""What is timed is what users call, with full memory, and nothing else; and the arithmetic from there to what is shown.

The clock stands still except for what is timed.
"""

import ast
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.cost.clock import Clock
from tests.helpers import tiny_model
from transformer_xl import cost
from transformer_xl.cost.bench import measure_decoding, measure_scoring
from transformer_xl.cost.operations import flops_per_token
from transformer_xl.errors import ConfigError
from transformer_xl.generation.decoder import Decoder
from transformer_xl.generation.scores import Scores
from transformer_xl.inference.reader import Reader
from transformer_xl.reading.stream import KeptKeys

SLOTS = 80
TEXT = np.random.default_rng(0).integers(0, 13, 150).astype(np.uint16)


@pytest.fixture
def clock() -> Clock:
    return Clock()


def watch(monkeypatch: pytest.MonkeyPatch, owner: type, name: str, seen: Callable[..., object]) -> None:
    """Have `seen` called with what a method is called with, before it is."""
    method = getattr(owner, name)

    def watched(self: Any, *arguments: Any, **options: Any) -> Any:
        seen(self, *arguments, **options)
        return method(self, *arguments, **options)

    monkeypatch.setattr(owner, name, watched)


@pytest.mark.parametrize("rows", [1, 3])
def test_a_step_of_the_decoder_is_timed(monkeypatch: pytest.MonkeyPatch, clock: Clock, rows: int) -> None:
    takes = iter([0.0, 50.0, 60.0, 70.0, 4.0, 2.0, 5.0, 2.0])  # one to get ready, three to warm up, four that count
    steps, fills = [], []

    def step(decoder: Decoder, ids: torch.Tensor) -> None:
        assert isinstance(decoder._stream, KeptKeys)
        steps.append((ids, decoder._stream.memory.n_valid.clone(), decoder._stream.memory.end.clone()))
        clock.pass_(next(takes))

    def top(scores: Scores, n: int) -> None:
        assert (scores.batch_size, n) == (rows, 1)
        clock.pass_(0.5)

    watch(monkeypatch, Decoder, "__init__", lambda *_, **__: clock.pass_(7.0))
    watch(monkeypatch, Decoder, "step", step)
    watch(monkeypatch, Decoder, "feed", lambda _, ids: (fills.append(ids), clock.pass_(1000.0)))
    watch(monkeypatch, Scores, "top", top)
    measured = measure_decoding(tiny_model(), TEXT, n_row=rows, n_token=4, bandwidth=1e6, clock=clock)

    n_bytes = measured["bytes_per_step"]
    held = measured.pop("held_bytes")
    assert measured == {
        "precision": "fp32",
        "compiled": False,
        "rows": rows,
        "ready_seconds": 7.5,
        "step_seconds": {"median": 3.5, "min": 2.5, "max": 5.5},
        "tokens_per_second": rows / 3.5,
        "bytes_per_step": n_bytes,
        "limit_seconds": n_bytes / 1e6,
        "time_over_limit": pytest.approx(3.5e6 / n_bytes),
    }
    assert held["total"] == held["memory"] + held["positions"] + held["weights"]
    assert next(takes, None) is None
    (fill,) = fills
    read = torch.cat([fill, *(ids.unsqueeze(1) for ids, _, _ in steps[1:])], dim=1)  # the rows read on, one text after another
    np.testing.assert_array_equal(read.flatten().numpy(), np.resize(TEXT, rows * (SLOTS + 7)))
    for i, (_, n_valid, end) in enumerate(steps[1:]):
        assert n_valid.tolist() == [SLOTS] * rows  # full
        assert end.tolist() == [SLOTS + i] * rows


@pytest.mark.parametrize("compile", [False, True])
def test_the_decoder_is_made_as_asked(monkeypatch: pytest.MonkeyPatch, compile: bool) -> None:
    made: list[dict[str, Any]] = []
    make = Decoder.__init__

    def made_eager(self: Decoder, model: Any, **options: Any) -> None:
        made.append(dict(options))
        options |= {"compile": False}  # the compiler would take seconds
        make(self, model, **options)

    monkeypatch.setattr(Decoder, "__init__", made_eager)
    measure_decoding(tiny_model(), TEXT, precision="bf16", compile=compile, n_row=2, n_token=1)
    assert made == [{"batch_size": 2, "precision": "bf16", "compile": compile}]


def test_bytes_are_those_of_the_precision() -> None:
    exact, rounded = (
        measure_decoding(tiny_model(), TEXT, precision=precision, n_row=2, n_token=1) for precision in ("fp32", "int8")
    )
    assert rounded["bytes_per_step"] < exact["bytes_per_step"]
    memory = 2 * 2 * 2 * 3 * SLOTS * 4 * 4 + 2 * 16
    assert (exact["held_bytes"]["memory"], rounded["held_bytes"]["memory"]) == (memory, (memory - 32) // 2 + 32)


@pytest.mark.parametrize(("bias", "needed"), [(-30.0, 0), (30.0, 1)])
def test_tails_count_where_they_were_needed(bias: float, needed: int) -> None:
    model = tiny_model(cutoffs=(4, 8), div_val=2)
    with torch.no_grad():
        model.get_parameter("softmax.cluster_bias").copy_(torch.tensor([bias, -60.0]))  # of the rarer tail never anything
    measured = measure_decoding(model, TEXT, n_token=5)
    head = (4 * 10 + 4 + 100) + 22 + 170
    layers = 2 * (760 + 14 + 10 + 40 + 24)
    rest = 2 * 3 * SLOTS * 4 + 2 * 2 * 3 * SLOTS * 4 + 10 + 5 + 2
    assert measured["bytes_per_step"] == 4 * (head + layers + rest + needed * (4 * 5 + 4 + 50))


@pytest.mark.parametrize("changes", [{"mem_len": 0}, {"attention": "vaswani"}])
def test_models_that_read_again_are_timed_too(changes: dict[str, Any]) -> None:
    measured = measure_decoding(tiny_model(**changes), TEXT, n_token=2)
    unknown = {"bytes_per_step", "limit_seconds", "time_over_limit", "held_bytes"}
    assert {name for name, value in measured.items() if value is None} == unknown
    assert json.loads(json.dumps(measured, allow_nan=False)) == measured


@pytest.mark.parametrize("lanes", [1, 3])
def test_segments_of_evaluate_are_timed(monkeypatch: pytest.MonkeyPatch, clock: Clock, lanes: int) -> None:
    reads = []

    def read(_: Reader, ids: torch.Tensor, *__: object, **___: object) -> None:
        reads.append(tuple(ids.shape))
        clock.pass_(100.0 if len(reads) < warming + 3 else 0.25 * len(ids))

    warming = 4 if lanes > 1 else 0  # 2 layers reach 2 x 8 tokens back, 4 segments
    watch(monkeypatch, Reader, "read", read)
    measured = measure_scoring(tiny_model(), TEXT, tgt_len=4, batch_size=lanes, n_token=60, rate=2e6, clock=clock)
    n_step = 60 // (4 * lanes)
    assert reads == [(lanes - 1, 4)] * warming + [(lanes, 4)] * (3 + n_step)  # and not the rest of the text
    flops = flops_per_token(tiny_model(), TEXT, tgt_len=4)
    assert measured == {
        "precision": "fp32",
        "tgt_len": 4,
        "batch_size": lanes,
        "tokens_per_second": 4 / 0.25,
        "flops_per_token": flops,
        "limit_tokens_per_second": 2e6 / flops,
        "reached": pytest.approx(16 * flops / 2e6),
    }


def test_a_text_that_memory_has_no_room_for_is_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(np, "resize", lambda *_: pytest.fail("it was made"))
    model = tiny_model().with_context(mem_len=10**12)
    with pytest.raises(ConfigError, match=r"mem_len 1,000,000,000,000 .* batch_size 2 takes 32 TB, and .* free"):
        measure_scoring(model, TEXT, tgt_len=4, batch_size=2)


def test_scoring_leaves_the_model_as_it_was() -> None:
    model = tiny_model().train()
    assert measure_scoring(model, TEXT, tgt_len=4, n_token=1)["batch_size"] == 1
    assert model.training


@pytest.mark.parametrize(("tgt_len", "lanes"), [(1, 2), (3, 2), (7, 4), (64, 8)])
def test_as_many_lanes_as_asked_for(tgt_len: int, lanes: int) -> None:
    """However short the text: lanes that were too short to warm up the next would be fewer."""
    measured = measure_scoring(tiny_model(), TEXT[:10], tgt_len=tgt_len, batch_size=lanes, precision="int8", n_token=1)
    assert measured["batch_size"] == lanes


def test_what_is_measured_is_measured_from_outside() -> None:
    """Nothing private of other classes is looked at, which may change without notice."""
    public = {"_asdict"}  # of named tuples
    for path in sorted(Path(cost.__path__[0]).glob("*.py")):
        nodes = [node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.Attribute)]
        others = [node for node in nodes if not (isinstance(node.value, ast.Name) and node.value.id == "self")]
        private = {node.attr for node in others if node.attr.startswith("_") and not node.attr.startswith("__")}
        assert private <= public, path.name
