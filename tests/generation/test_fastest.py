"""`compile="auto"` takes what is fastest in all by its own figures, tries what can win, and says what would be faster."""

from pathlib import Path
from typing import Any, cast

import pytest
import torch

from tests.helpers import tiny_model
from transformer_xl.errors import ConfigError
from transformer_xl.generation import fastest
from transformer_xl.generation.decoder import Decoder
from transformer_xl.generation.fastest import Found, captured_stream
from transformer_xl.generation.speeds import Speeds
from transformer_xl.model import reader as reader_module
from transformer_xl.model.precision import InferencePrecision, choose_precision
from transformer_xl.reading.stream import KeptKeys, open_stream

FIGURES: dict[tuple[str, bool], float] = {
    ("fp32", False): 0.002,
    ("fp32", True): 0.001,
    ("bf16", False): 0.004,
    ("bf16", True): 0.0005,
}


class Machine:
    """A machine of given speeds, and what was timed on it."""

    def __init__(self) -> None:
        self.figures = dict(FIGURES)
        self.timed: list[tuple[str, bool]] = []

    def seconds(self, streams: KeptKeys) -> float:
        self.timed.append((streams.reader.precision, streams.reader.compiled))
        return self.figures[self.timed[-1]]


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine = Machine()
    monkeypatch.setenv("TXL_CACHE", str(tmp_path))
    monkeypatch.setattr(fastest, "_seconds_per_step", machine.seconds)
    monkeypatch.setattr(fastest, "cannot_compile", lambda device: None)
    return machine


_BOTH = "measured before: fp32 2 ms, compiled 1 ms per token"


def decoder(n_token: int, *, compile: Any = "auto", precision: Any = "fp32") -> Decoder:
    told: list[int] = []
    opened = Decoder(
        tiny_model(), compile=compile, precision=precision, expected_tokens=n_token, on_compile=lambda: told.append(1)
    )
    assert bool(told) == bool(compile is True or opened.compiled or "compiled is slower" in opened.reason)
    return opened


def know(*, precision: InferencePrecision = "fp32", **seconds: float) -> None:
    decoder(1, compile=False).speeds_in(precision).keep(Speeds(**seconds))


@pytest.mark.parametrize(("n_token", "compiled"), [(1999, False), (2001, True)])
def test_known_figures_decide_without_a_trial(machine: Machine, n_token: int, compiled: bool) -> None:
    know(eager=0.002, compiled=0.001, ready=2.0)
    opened = decoder(n_token)
    assert opened.compiled == compiled
    assert machine.timed == ([("fp32", False), ("fp32", True)] if compiled else [])  # compared again where it is used


def test_what_is_compiled_and_slower_now_is_not_used(machine: Machine) -> None:
    know(eager=0.002, compiled=0.001, ready=2.0)
    machine.figures["fp32", True] = 0.003
    opened = decoder(10**6)
    assert not opened.compiled
    assert opened.reason == "measured before: fp32 2 ms, compiled 3 ms per token; not compiled: fp32 compiled is slower"
    assert opened.speeds_in("fp32").load().compiled == 0.003
    machine.timed.clear()
    assert not decoder(10**6).compiled and machine.timed == []  # and that is remembered


@pytest.mark.parametrize(("spent", "n_token", "compiled"), [(0, 9_000, False), (0, 11_000, True), (17.0, 2_000, True)])
def test_without_figures_compilation_is_tried_when_it_should_pay(
    machine: Machine, spent: float, n_token: int, compiled: bool
) -> None:
    know(spent=spent)
    opened = decoder(n_token)
    assert opened.compiled == compiled
    known = opened.speeds_in("fp32").load()
    assert (known.eager, known.compiled) == ((0.002, 0.001) if compiled else (None, None))
    assert opened.reason == (_BOTH if compiled else "--compile yes may be faster")


def test_auto_precision_takes_the_least_of_all_ways(machine: Machine) -> None:
    assert (decoder(1000, precision="auto").precision, machine.timed) == ("fp32", [("fp32", False), ("bf16", False)])
    know(eager=0.002, compiled=0.001, ready=2.0)
    know(precision="bf16", eager=0.004, compiled=0.0005, ready=2.0)
    for n_token, expected in ((1000, ("fp32", False)), (2000, ("bf16", True))):
        opened = decoder(n_token, precision="auto")
        assert (opened.precision, opened.compiled) == expected


def test_the_reason_says_what_would_be_faster(machine: Machine) -> None:
    know(eager=0.002, compiled=0.001, ready=2.5)
    assert decoder(10).reason == f"{_BOTH}; --compile yes, 2.5 s later, would be 2.0 times as fast"
    know(precision="bf16", eager=0.004, compiled=0.0005)
    assert decoder(10).reason.endswith("; --precision bf16 --compile yes would be 4.0 times as fast")
    assert decoder(10**6).reason.endswith("compiled 1 ms per token; --precision bf16 --compile yes would be 2.0 times as fast")
    know(precision="bf16", eager=0.00095)
    assert decoder(10**6).reason == _BOTH  # a twentieth is not worth a word


def test_fp32_is_timed_beside_a_narrow_precision_that_may_be_slower(machine: Machine) -> None:
    opened = decoder(1000, precision="bf16")
    assert opened.reason == "--precision fp32 would be 2.0 times as fast"
    assert (opened.precision, opened.compiled) == ("bf16", False)
    machine.timed.clear()
    assert decoder(10, precision="bf16").reason == "compiling takes longer than this text"
    assert machine.timed == [("bf16", False)]  # not for so few tokens


def test_written_texts_are_learned_from_if_auto_chose(machine: Machine) -> None:
    opened = decoder(1000)
    opened.learn_speed(100, 0.9)
    opened.learn_speed(0, 9.0)
    assert opened.speeds_in("fp32").load() == Speeds()
    opened.learn_speed(1000, 5.0)
    assert opened.speeds_in("fp32").load() == Speeds(eager=0.005, spent=5.0)
    for compile in (False, True):
        decoder(1000, compile=compile).learn_speed(1000, 50.0)
    assert opened.speeds_in("fp32").load() == Speeds(eager=0.005, spent=5.0)


@pytest.mark.parametrize("compile", [False, True])
def test_without_auto_nothing_is_read_or_written(machine: Machine, tmp_path: Path, compile: bool) -> None:
    opened = decoder(10**6, compile=compile)
    assert (opened.compiled, opened.reason) == (compile, "as set")
    assert list(tmp_path.iterdir()) == []


def test_no_room_for_a_comparison_is_no_error(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    open_one = Decoder._open

    def refuse(self: Decoder, precision: Any) -> Any:
        if precision == "fp32":
            raise ConfigError("no room")
        return open_one(self, precision)

    monkeypatch.setattr(Decoder, "_open", refuse)
    assert decoder(1000, precision="bf16").reason == "compiling takes longer than this text"


def on_a_gpu(precision: Any = "auto", compile: Any = "auto") -> Found:
    model, told = tiny_model(), []
    opened = captured_stream(
        lambda chosen: cast(KeptKeys, open_stream(model, 1, tgt_len=4, precision=chosen, token_by_token=True)),
        precision,
        model.device,
        compile=compile,
        on_compile=lambda: told.append(1),
    )
    assert bool(told) == (compile is True)
    return opened


def test_on_a_gpu_steps_are_a_graph_and_nothing_is_timed(machine: Machine, tmp_path: Path) -> None:
    """Tried out on a CPU, where a graph is the function itself."""
    opened = on_a_gpu()
    reader = opened.streams.reader
    assert reader.captured and not reader.compiled
    assert opened.reason == f"{choose_precision('auto', reader.device)[1]}; each step is one graph"
    assert machine.timed == [] and list(tmp_path.iterdir()) == []
    for precision in ("fp32", "int8"):
        opened = on_a_gpu(precision, compile=False)
        assert (opened.streams.precision, opened.reason) == (precision, "as set; each step is one graph")
    with pytest.raises(ConfigError, match=r"compile \('no'\) must be True, False or 'auto'"):
        on_a_gpu(compile="no")


def test_on_a_gpu_code_is_compiled_only_when_asked_for(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = on_a_gpu("fp32", compile=True)
    assert opened.streams.reader.compiled and opened.streams.reader.captured
    monkeypatch.setattr(fastest, "cannot_compile", lambda device: "Triton is not installed")
    with pytest.raises(ConfigError, match=r"compile \(True\) cannot work here: Triton is not installed"):
        on_a_gpu("fp32", compile=True)


def test_without_a_graph_steps_go_on_and_the_reason_says_why(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(function: Any, device: Any) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing\nmore lines")

    monkeypatch.setattr(reader_module, "Captured", refuse)
    opened = on_a_gpu("fp32")
    assert opened.reason == "as set; no graph of steps (operation not permitted when stream is capturing)"
    assert not opened.streams.reader.captured
    opened.streams.step(torch.tensor([3]))
