"""What is timed is what users call, with full memory, and nothing else; and the arithmetic from there to what is shown.

The clock stands still except for what is timed.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from tests.helpers import tiny_model
from tests.tools.clock import Clock
from transformer_xl.generation.decoder import Decoder
from transformer_xl.generation.scores import Scores
from transformer_xl.reading.stream import KeptKeys
from transformer_xl.tools.bench import measure_decoding

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


def test_bytes_are_weights_and_the_memory_of_all_rows() -> None:
    one, two = (measure_decoding(tiny_model(), TEXT, n_row=n, n_token=1)["bytes_per_step"] for n in (1, 2))
    rounded = measure_decoding(tiny_model(), TEXT, precision="int8", n_row=2, n_token=1)["bytes_per_step"]
    memory = 2 * 2 * 3 * SLOTS * 4 * 4  # keys and values of two layers with three heads of four numbers
    assert two - one == memory
    assert rounded < two / 2
