"""The example that compresses: what goes in comes out, and nothing else does."""

import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

EXAMPLE = Path(__file__).parents[2] / "examples" / "compress.py"
TEXT = "Es war einmal ein Müller, der war arm, aber er hatte eine schöne Tochter. ".encode() * 3


@pytest.fixture(autouse=True)
def not_for_others() -> Iterator[None]:
    """The example makes PyTorch deterministic for as long as its program runs, which here runs on."""
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="module")
def example() -> dict[str, Any]:
    return runpy.run_path(str(EXAMPLE))


@pytest.mark.parametrize("text", [b"", b"\0", np.random.default_rng(0).bytes(30)], ids=["empty", "zero", "noise"])
def test_what_goes_in_comes_out(text: bytes, example: dict[str, Any]) -> None:
    data = example["compress"](text)
    assert example["decompress"](data) == text
    assert len(data) <= 8 + 32 + len(text) + 8


def test_lanes_are_read_side_by_side_and_learned_from(example: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(example["lanes"].__globals__, "LANE_BYTES", 100)
    text = TEXT + b"x"
    assert example["lanes"](text).shape == (2, 1 + 115)
    data = example["compress"](text)
    assert example["decompress"](data) == text
    assert len(data) < 8 + 32 + 0.9 * len(text)


def test_the_coder_takes_as_many_bytes_as_the_probabilities_say(example: dict[str, Any]) -> None:
    p, bits = 2**32 // 10, (np.random.default_rng(0).random(4000) < 0.1).astype(int).tolist()
    coder = example["Coder"]()
    for bit in bits:
        coder.code(p, bit)
    n_bit = -sum(np.log2(0.1 if bit else 0.9) for bit in bits)
    assert len(coder.end()) == pytest.approx(n_bit / 8, abs=3)
    reader = example["Coder"](coder.end())
    assert [reader.code(p, 0) for _ in bits] == bits
    borders = [example["Coder"](number.to_bytes(8)).code(2**31, 0) for number in (2**63 - 1, 2**63)]
    assert borders == [1, 0]  # the last number of a 1, and the first of a 0


def test_another_text_is_never_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def call(name: str, source: str, out: str) -> None:
        monkeypatch.setattr(sys, "argv", ["compress.py", name, str(tmp_path / source), str(tmp_path / out)])
        runpy.run_path(str(EXAMPLE), run_name="__main__")

    (tmp_path / "text").write_bytes(TEXT[:16])
    call("compress", "text", "small")
    assert capsys.readouterr().out.startswith("\n16 bytes -> ")
    call("decompress", "small", "back")
    assert (tmp_path / "back").read_bytes() == TEXT[:16]
    whole = (tmp_path / "small").read_bytes()
    for damaged, why in (
        (whole[:9] + bytes([whole[9] ^ 1]) + whole[10:], "another text comes out"),
        (whole[:39], "no file that this program wrote"),
        (b"\xff" * 8 + whole[8:], "no file that this program wrote"),
    ):
        (tmp_path / "damaged").write_bytes(damaged)
        with pytest.raises(SystemExit, match=why):
            call("decompress", "damaged", "back")
    with pytest.raises(SystemExit, match="No such file or directory"):
        call("decompress", "nowhere", "back")
    assert (tmp_path / "back").read_bytes() == TEXT[:16]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["back", "damaged", "small", "text"]
