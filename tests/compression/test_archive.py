"""Files compressed and decompressed: the same bytes come back, or one line says why not."""

import hashlib
import math
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.helpers import TINY, tiny_model
from transformer_xl.compression import archive
from transformer_xl.compression.archive import Setup, compress, decompress
from transformer_xl.compression.coder import ONE, Encoder
from transformer_xl.console import Bar
from transformer_xl.errors import CheckpointError, ConfigError, CorpusError
from transformer_xl.model.lstm import Lstm
from transformer_xl.model_config import LstmConfig, TransformerXLConfig
from transformer_xl.seals import seal, unseal

HIDDEN, NEW = Bar(), Setup()
SIZES = {**TINY, "vocab_size": 256}
TEXT = (b"the cat sat on the mat; the dog sat on the log. " * 2)[:90]
computed_numbers, remembered_numbers = Setup.numbers, cache(Setup.numbers)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A tiny model that learns from short segments, counts in small tables, lanes of few bytes, and numbers computed once."""
    model = TransformerXLConfig(**{**SIZES, "d_model": 16, "n_layer": 1}, pre_lnorm=True, shift="averages", ngram_rows=(50, 70))
    for name, value in {"MODEL": model, "TGT_LEN": 3, "AGAIN": 5, "LANE_BYTES": 15, "MOST_LANES": 6}.items():
        monkeypatch.setattr(archive, name, value)
    monkeypatch.setattr("transformer_xl.compression.counting._SLOT_BITS", 12)
    monkeypatch.setattr(Setup, "numbers", remembered_numbers)
    monkeypatch.chdir(tmp_path)


def round_trip(text: bytes, setup: Setup = NEW) -> bytes:
    Path("text").write_bytes(text)
    n = compress(Path("text"), Path("packed"), setup, bar=HIDDEN)
    torch.manual_seed(5)  # as in another process
    assert decompress(Path("packed"), Path("back"), setup.model, bar=HIDDEN) == len(text)
    assert Path("back").read_bytes() == text
    assert n == Path("packed").stat().st_size
    assert names() == ["back", "packed", "text"]
    return Path("packed").read_bytes()


@cache
def packed_text() -> bytes:
    return round_trip(TEXT)


def after_round_trip() -> bytes:
    """Leave what `round_trip(TEXT)` leaves and return what it returns; it happens once."""
    packed = packed_text()
    for name, content in {"text": TEXT, "packed": packed, "back": TEXT}.items():
        Path(name).write_bytes(content)
    return packed


def names() -> list[str]:
    """Return what lies here."""
    return sorted(path.name for path in Path().iterdir())


def header_of(packed: bytes) -> tuple[dict[str, Any], bytes]:
    """Return the header, and what the coder wrote."""
    n = int.from_bytes(packed[4:8], "little")
    return unseal(packed[8 : 8 + n]), packed[8 + n : -32]


def rewritten(packed: bytes, **changes: Any) -> bytes:
    """Return a file with another header, whose checksums are right."""
    header, coded = header_of(packed)
    sealed = seal(header | changes)
    content = packed[:4] + len(sealed).to_bytes(4, "little") + sealed + coded
    return content + hashlib.sha256(content).digest()


@pytest.mark.parametrize(
    "text",
    [
        b"", b"x", b"xy", bytes(45), TEXT, TEXT[:61], TEXT[:89],
        np.random.default_rng(0).permutation(256).astype(np.uint8).tobytes(),
    ],
    ids=["empty", "a byte", "shorter than a segment", "one byte repeated", "text", "a byte more", "a byte less", "all bytes"],
)  # fmt: skip
def test_the_same_bytes_come_back(text: bytes) -> None:
    header, coded = header_of(round_trip(text))
    assert header["lanes"] == max(1, min(6, len(text) // 15))
    assert len(coded) < len(text) * 1.2 + 8


def test_lanes_that_are_shorter_than_others_or_empty_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive, "LANE_BYTES", 1)
    for n in (2, 5, 9, 10):
        round_trip(TEXT[:n])


def test_what_comes_again_is_learned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive, "MOST_LANES", 8)
    text = TEXT[:48] * 5
    assert len(header_of(round_trip(text))[1]) < len(text) / 2
    assert len(header_of(round_trip(bytes(150)))[1]) < 20


def test_the_result_is_as_long_as_the_probabilities_say(monkeypatch: pytest.MonkeyPatch) -> None:
    bits, code = [], Encoder.code

    def counted(self: Encoder, probabilities: list[int], known: list[int]) -> list[int]:
        bits.extend(-math.log2(p / ONE if bit else 1 - p / ONE) for p, bit in zip(probabilities, known, strict=True))
        return code(self, probabilities, known)

    Path("text").write_bytes(TEXT)
    NEW.numbers(6)  # which codes something, too
    monkeypatch.setattr(Encoder, "code", counted)
    compress(Path("text"), Path("packed"), NEW, bar=HIDDEN)
    assert len(bits) == 8 * len(TEXT)
    assert abs(len(header_of(Path("packed").read_bytes())[1]) - sum(bits) / 8) < 2


@pytest.mark.parametrize(("kind", "learns"), [("transformer_xl", False), ("lstm", True)])
def test_a_model_of_ones_own(kind: str, learns: bool) -> None:
    model = (
        tiny_model(vocab_size=256, n_layer=1)
        if kind == "transformer_xl"
        else Lstm(LstmConfig(vocab_size=256, n_layer=1, d_model=8)).eval()
    )
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    packed = round_trip(TEXT, Setup(model, learns))
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
    assert header_of(packed)[0]["learns"] is learns
    with pytest.raises(ConfigError, match=r"^'packed' was compressed with a model; name it by --model$"):
        decompress(Path("packed"), Path("other"), bar=HIDDEN)
    torch.manual_seed(5)
    with pytest.raises(ConfigError, match=r"other numbers are computed: first numbers is .* and 1 more; use the machine"):
        decompress(Path("packed"), Path("other"), tiny_model(vocab_size=256), bar=HIDDEN)
    after_round_trip()
    with pytest.raises(ConfigError, match=r"^'packed' needs no model; leave --model out$"):
        decompress(Path("packed"), Path("other"), model, bar=HIDDEN)
    assert not Path("other").exists()


def test_only_a_model_that_shall_learn_learns() -> None:
    Path("text").write_bytes(TEXT)
    model, coded = tiny_model(vocab_size=256, n_layer=1), []
    for learns in (True, False):
        compress(Path("text"), Path("packed"), Setup(model, learns), bar=HIDDEN)
        coded.append(header_of(Path("packed").read_bytes())[1])
    assert coded[0] != coded[1]


def test_one_thread_computes_however_many_there_are() -> None:
    before, seen = torch.get_num_threads(), list[int]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Setup, "numbers", lambda *own: seen.append(torch.get_num_threads()) or computed_numbers(*own))
        torch.set_num_threads(2)
        round_trip(TEXT[:20])
        after = torch.get_num_threads()
    torch.set_num_threads(before)
    assert (seen, after) == ([1, 1], 2)


def test_changed_files_are_refused_wherever_they_are_changed() -> None:
    packed = after_round_trip()
    Path("back").write_bytes(b"earlier")
    n_header = int.from_bytes(packed[4:8], "little")
    places = [0, 3, 4, 7, 8, 8 + n_header // 2, 8 + n_header, (8 + n_header + len(packed) - 32) // 2, len(packed) - 33]
    for place in [*places, len(packed) - 32, len(packed) - 1]:
        Path("packed").write_bytes(packed[:place] + bytes([packed[place] ^ 4]) + packed[place + 1 :])
        with pytest.raises(CheckpointError, match=r"^'packed' (was cut or altered|is no file that txl compress wrote)"):
            decompress(Path("packed"), Path("back"), bar=HIDDEN)
    for n in (0, 3, 8, 39, 40, 8 + n_header, len(packed) - 33, len(packed) - 1):
        Path("packed").write_bytes(packed[:n])
        with pytest.raises(CheckpointError, match=r"^'packed' (was cut or altered|is no file that txl compress wrote)"):
            decompress(Path("packed"), Path("back"), bar=HIDDEN)
    Path("packed").write_bytes(packed + b"\0")
    with pytest.raises(CheckpointError, match="was cut or altered"):
        decompress(Path("packed"), Path("back"), bar=HIDDEN)
    assert names() == ["back", "packed", "text"]
    assert Path("back").read_bytes() == b"earlier"


def test_other_numbers_are_refused_before_anything_is_written() -> None:
    packed = after_round_trip()
    Path("back").unlink()
    numbers = header_of(packed)[0]["numbers"]
    for name in ("torch", "numpy", "processor", "transformer_xl", "first numbers"):
        Path("packed").write_bytes(rewritten(packed, numbers=numbers | {name: "9.9"}))
        with pytest.raises(
            ConfigError, match=rf"^'packed' cannot be decompressed here.*: {name} is .* \(sealed: '9\.9'\); use the"
        ):
            decompress(Path("packed"), Path("back"), bar=HIDDEN)
        assert names() == ["packed", "text"]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"lanes": 0}, r"the header of 'packed' is not sound: lanes \(0\) must be"),
        ({"lanes": 10**6}, r"the header of 'packed' is not sound: lanes \(1000000\) must be"),
        ({"threads": 2}, r"the header of 'packed' is not sound: unknown key 'threads'"),
        ({"size": -1}, r"the header of 'packed' is not sound: size"),
        ({"path": "/etc/passwd"}, r"the header of 'packed' is not sound: unknown key 'path'"),
        ({"size": 2**62}, r"'packed' holds 4,611,686,018,427,387,904 bytes, and the disk has no room"),
        ({"size": 84}, r"other bytes come out of 'packed' than went in"),
    ],
)
def test_headers_that_lie_are_refused(changes: dict[str, Any], expected: str) -> None:
    Path("packed").write_bytes(rewritten(after_round_trip(), **changes))
    Path("back").write_bytes(b"earlier")
    with pytest.raises((CheckpointError, ConfigError), match=expected):
        decompress(Path("packed"), Path("back"), bar=HIDDEN)
    assert Path("back").read_bytes() == b"earlier"


def after(n: int) -> Callable[[], bool]:
    """Return what says yes when it is asked for the n-th time."""
    asked = iter([False] * (n - 1))
    return lambda: next(asked, True)


@pytest.mark.parametrize("model", [None, "own", "frozen"])
def test_what_was_stopped_goes_on_as_if_it_had_not_been(model: str | None) -> None:
    setup = Setup(None if model is None else tiny_model(vocab_size=256, n_layer=1), learns=model != "frozen")
    packed = round_trip(TEXT, setup)
    Path("back").write_bytes(b"earlier")
    for n in (1, 2):
        assert compress(Path("text"), Path("packed"), setup, bar=HIDDEN, stopped=after(n)) is None
        assert Path("packed.state").exists()
        assert Path("packed").read_bytes() == packed
    with Path("packed.part").open("ab") as part:
        part.write(b"what a killed process wrote after it had saved its state")
    assert compress(Path("text"), Path("packed"), setup, bar=HIDDEN) == len(packed)
    assert Path("packed").read_bytes() == packed
    for n in (2, 1):
        assert decompress(Path("packed"), Path("back"), setup.model, bar=HIDDEN, stopped=after(n)) is None
        assert Path("back").read_bytes() == b"earlier"
    assert decompress(Path("packed"), Path("back"), setup.model, bar=HIDDEN) == len(TEXT)
    assert Path("back").read_bytes() == TEXT
    assert names() == ["back", "packed", "text"]


def test_what_was_killed_goes_on_from_the_last_state(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = after_round_trip()
    Path("back").unlink()
    monkeypatch.setattr(archive, "SAVE_SECONDS", -1.0)  # after each segment

    def killed_after(n: int) -> Callable[[], bool]:
        asked = iter([False] * n)
        return lambda: next(asked)  # StopIteration: as good as a kill, because nothing is written afterwards

    with pytest.raises(StopIteration):
        compress(Path("text"), Path("packed"), NEW, bar=HIDDEN, stopped=killed_after(3))
    assert Path("packed").read_bytes() == packed
    assert compress(Path("text"), Path("packed"), NEW, bar=HIDDEN) == len(packed)
    assert Path("packed").read_bytes() == packed
    with pytest.raises(StopIteration):
        decompress(Path("packed"), Path("back"), bar=HIDDEN, stopped=killed_after(3))
    assert not Path("back").exists()
    decompress(Path("packed"), Path("back"), bar=HIDDEN)
    assert Path("back").read_bytes() == TEXT


def test_a_state_is_read_and_not_the_text_again(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = after_round_trip()
    assert compress(Path("text"), Path("packed"), NEW, bar=HIDDEN, stopped=after(3)) is None
    coded, code = [], Encoder.code
    monkeypatch.setattr(Encoder, "code", lambda self, p, bits: coded.extend(bits) or code(self, p, bits))
    compress(Path("text"), Path("packed"), NEW, bar=HIDDEN)
    assert len(coded) == 8 * (len(TEXT) - 3 * 3 * 6)
    assert Path("packed").read_bytes() == packed


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        ("cut", "impossible type, shape or place"),
        ("altered", "its bytes are not those that were written"),
        ("of another text", "it is of another text, model or version"),
        ("not a state", "ends 6 bytes too early"),
    ],
)
def test_a_state_of_no_use_is_named_and_not_used(damage: str, reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    packed = after_round_trip()
    text, state = Path("text"), Path("packed.state")
    if damage == "of another text":
        text.write_bytes(TEXT[::-1])
    compress(text, Path("packed"), NEW, bar=HIDDEN, stopped=after(2))
    text.write_bytes(TEXT)
    data = state.read_bytes()
    if damage in ("cut", "altered"):
        state.write_bytes(data[:-9] + (b"" if damage == "cut" else bytes(byte ^ 1 for byte in data[-9:])))
    elif damage == "not a state":
        state.write_bytes(b"{}")
    compress(text, Path("packed"), NEW, bar=HIDDEN)
    assert Path("packed").read_bytes() == packed
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("warning: 'packed.state' is of no use, so this begins anew: ")
    assert reason in line, line


def test_a_state_of_no_use_is_gone_before_its_output_is_overwritten() -> None:
    packed = after_round_trip()
    compress(Path("text"), Path("packed"), NEW, bar=HIDDEN, stopped=after(2))
    Path("other").write_bytes(np.random.default_rng(0).bytes(90))
    n_written = Path("packed.part").stat().st_size

    def killed() -> bool:
        if Path("packed.part").stat().st_size > n_written:
            raise StopIteration
        return False

    with pytest.raises(StopIteration):
        compress(Path("other"), Path("packed"), NEW, bar=HIDDEN, stopped=killed)
    compress(Path("text"), Path("packed"), NEW, bar=HIDDEN)
    assert Path("packed").read_bytes() == packed


def test_the_state_of_compressing_is_of_no_use_to_decompressing(capsys: pytest.CaptureFixture[str]) -> None:
    """Though both are of the same text, and go to the same place."""
    after_round_trip()
    Path("archive").write_bytes(Path("packed").read_bytes())
    compress(Path("text"), Path("out"), NEW, bar=HIDDEN, stopped=after(2))
    decompress(Path("archive"), Path("out"), bar=HIDDEN)
    assert Path("out").read_bytes() == TEXT
    assert "'out.state' is of no use, so this begins anew" in capsys.readouterr().err


def test_a_text_that_changes_meanwhile_is_refused() -> None:
    Path("text").write_bytes(TEXT)

    def changes() -> bool:
        Path("text").write_bytes(TEXT[:-1] + b"!")
        return False

    with pytest.raises(CorpusError, match=r"^'text' has changed while it was read; compress it again$"):
        compress(Path("text"), Path("packed"), NEW, bar=HIDDEN, stopped=changes)
    assert not Path("packed").exists()


def test_two_processes_do_not_write_the_same_file() -> None:
    Path("text").write_bytes(TEXT)
    begun, refused = threading.Event(), []

    def second() -> bool:
        if not begun.is_set():
            begun.set()
            with pytest.raises(ConfigError, match=r"^another process writes 'packed'; wait for it, or choose another place$"):
                compress(Path("text"), Path("packed"), NEW, bar=HIDDEN)
            refused.append(True)
        return False

    compress(Path("text"), Path("packed"), NEW, bar=HIDDEN, stopped=second)
    assert refused


def test_the_text_is_never_held_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """No piece that is read or written is longer than a segment, or than a chunk that is hashed."""
    longest, read_at = [0], archive.read_at
    monkeypatch.setattr(archive, "read_at", lambda *own: longest.append(own[3]) or read_at(*own))
    monkeypatch.setattr(archive, "_CHUNK", 64)
    round_trip(TEXT)
    header = len(seal(header_of(Path("packed").read_bytes())[0]))
    assert sorted({n for n in longest if n != header})[-1] == 32  # of the checksum
