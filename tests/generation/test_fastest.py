"""`compile="auto"` takes what steps fastest, and tries compiled code where a text is long."""

import os
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from tests.helpers import tiny_model
from transformer_xl.errors import ConfigError
from transformer_xl.generation import fastest
from transformer_xl.generation.decoder import Decoder
from transformer_xl.generation.fastest import Found, captured_stream, keep_compiled_code
from transformer_xl.inference import reader as reader_module
from transformer_xl.kernels.device import choose_precision
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
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine = Machine()
    monkeypatch.setattr(fastest, "_seconds_per_step", machine.seconds)
    monkeypatch.setattr(fastest, "cannot_compile", lambda device: None)
    return machine


_TOO_SHORT = "too short to compile for"


def decoder(n_token: int, *, compile: Any = "auto", precision: Any = "fp32") -> Decoder:
    told: list[int] = []
    opened = Decoder(
        tiny_model(), compile=compile, precision=precision, expected_tokens=n_token, on_compile=lambda: told.append(1)
    )
    assert bool(told) == bool(compile is True or opened.compiled or "not compiled: that" in opened.reason)
    return opened


@pytest.mark.parametrize(("n_token", "compiled"), [(9_999, False), (10_001, True)])
def test_code_is_compiled_for_texts_that_take_long_without(machine: Machine, n_token: int, compiled: bool) -> None:
    opened = decoder(n_token)
    assert opened.compiled == compiled
    assert machine.timed == [("fp32", False), ("fp32", True)][: 1 + compiled]
    assert opened.reason == ("measured before: fp32 2 ms, fp32 compiled 1 ms per token" if compiled else _TOO_SHORT)


def test_what_is_slower_compiled_or_cannot_be_is_not_used(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.figures["fp32", True] = 0.003
    opened = decoder(10**6)
    assert not opened.compiled
    assert opened.reason == "measured before: fp32 2 ms, fp32 compiled 3 ms per token; not compiled: that is slower"
    monkeypatch.setattr(fastest, "cannot_compile", lambda device: "no C++ compiler is found")
    assert decoder(10**6).reason == "not compiled: no C++ compiler is found"  # `decoder` checks that nobody was told to wait


def test_auto_precision_takes_the_least_and_compiles_the_narrowest(machine: Machine) -> None:
    short, long = decoder(1000, precision="auto"), decoder(11_000, precision="auto")
    assert (short.precision, short.compiled) == ("fp32", False)
    assert short.reason == f"measured before: fp32 2 ms, bf16 4 ms per token; {_TOO_SHORT}"
    assert (long.precision, long.compiled) == ("bf16", True)
    machine.figures["bf16", True] = 0.003
    slow = decoder(11_000, precision="auto")
    assert (slow.precision, slow.compiled) == ("fp32", False)
    assert decoder(11_000, precision="auto", compile=False).reason == "measured before: fp32 2 ms, bf16 4 ms per token"


@pytest.mark.parametrize("compile", [False, True])
def test_what_is_asked_for_is_done_without_a_trial(machine: Machine, compile: bool) -> None:
    opened = decoder(10**6, compile=compile)
    assert (opened.compiled, opened.reason) == (compile, "as set")
    assert machine.timed == ([("fp32", True)] if compile else [])


def test_compiled_code_is_kept_in_the_cache_unless_a_place_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TXL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "elsewhere")
    keep_compiled_code()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "elsewhere"
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    keep_compiled_code()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "cache" / "compiled")
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    (tmp_path / "file").write_text("in place of the directory")
    monkeypatch.setenv("TXL_CACHE", str(tmp_path / "file"))
    keep_compiled_code()
    assert "TORCHINDUCTOR_CACHE_DIR" not in os.environ


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


def test_on_a_gpu_steps_are_a_graph_and_nothing_is_timed(machine: Machine) -> None:
    """Tried out on a CPU, where a graph is the function itself."""
    opened = on_a_gpu()
    reader = opened.stream.reader
    assert reader.captured and not reader.compiled
    assert opened.reason == f"{choose_precision('auto', reader.device)[1]}; each step is one graph"
    assert machine.timed == []
    for precision in ("fp32", "int8"):
        opened = on_a_gpu(precision, compile=False)
        assert (opened.stream.precision, opened.reason) == (precision, "as set; each step is one graph")


def test_on_a_gpu_code_is_compiled_only_when_asked_for(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = on_a_gpu("fp32", compile=True)
    assert opened.stream.reader.compiled and opened.stream.reader.captured
    monkeypatch.setattr(fastest, "cannot_compile", lambda device: "Triton is not installed")
    with pytest.raises(ConfigError, match=r"compile \(True\) cannot work here: Triton is not installed"):
        on_a_gpu("fp32", compile=True)


def test_without_a_graph_steps_go_on_and_the_reason_says_why(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing\nmore lines")

    monkeypatch.setattr(reader_module, "Captured", refuse)
    opened = on_a_gpu("fp32")
    assert opened.reason == "as set; no graph of steps (operation not permitted when stream is capturing)"
    assert not opened.stream.reader.captured
    opened.stream.step(torch.tensor([3]))
