"""Sessions: a decoder that loads one goes on bit by bit like the one that saved it; whatever is not one changes nothing."""

import copy
import errno
import json
import os
import pickle
import random
import re
import signal
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.checkpoint.test_damage import truncate
from tests.checkpoint.test_faults import Fault, fail_call, fail_writes
from tests.forked import run_forked
from tests.helpers import examples, tiny_model
from transformer_xl.errors import CheckpointError
from transformer_xl.generation import session_file
from transformer_xl.generation.decoder import Decoder
from transformer_xl.generation.session_file import describe_session, model_sha256
from transformer_xl.model.transformer_xl import TransformerXL
from transformer_xl.tensor_file import encode_tensors

B, VOCAB = 3, 13
KINDS: dict[str, dict[str, Any]] = {
    "transformer_xl": {},
    "same_length": {"same_length": True, "same_length_besides_self": True},
    "clamp_len and pre_lnorm": {"clamp_len": 3, "pre_lnorm": True},
    "zero_first_memory": {"zero_first_memory": True},
    "shaw": {"attention": "shaw", "max_klen": 9},
    "rotary": {"attention": "rotary"},
    "vaswani": {"attention": "vaswani"},
    "al_rfou": {"attention": "al_rfou", "max_klen": 9, "n_head": 2, "d_head": 5},
    "no memory": {"mem_len": 0},
}
READ_AGAIN = ("vaswani", "al_rfou", "no memory")
WAYS = ("transformer_xl", "shaw", "al_rfou", "no memory")
"""Kept keys, with two tables of positions, and two ways to read again."""

CASES = [*((kind, "fp32") for kind in KINDS), ("transformer_xl", "bf16"), ("al_rfou", "bf16"), ("shaw", "int8")]


@cache
def model_of(kind: str) -> TransformerXL:
    torch.manual_seed(len(kind))
    return tiny_model(**KINDS[kind])


def decoder_of(kind: str = "transformer_xl", precision: Any = "fp32", **options: Any) -> Decoder:
    return Decoder(model_of(kind), **{"batch_size": B, "tgt_len": 4, "precision": precision, **options})


def assert_same_bits(actual: Tensor, expected: Tensor) -> None:
    """NaN counts as itself, and -0 is not 0."""
    assert actual.dtype == expected.dtype
    assert torch.equal(actual.view(torch.int32), expected.view(torch.int32))


def assert_goes_on_alike(actual: Decoder, expected: Decoder) -> None:
    assert_same_bits(actual.scores.full(), expected.scores.full())
    for ids in (torch.tensor([[1], [2], [3]]), torch.arange(27).view(3, 9) % VOCAB):
        ids = ids[: actual.batch_size]
        assert_same_bits(actual.feed(ids), expected.feed(ids))


# --- going on ---------------------------------------------------------------------------------------------------------------

TOKENS = st.integers(0, VOCAB - 1)
BOOLS = st.lists(st.booleans(), min_size=B, max_size=B)
ACTIONS = st.one_of(
    st.tuples(st.just("feed rows"), st.lists(st.lists(TOKENS, max_size=24), min_size=B, max_size=B)),
    st.tuples(st.just("feed together"), st.integers(1, 9).flatmap(lambda T: st.lists(row(T), min_size=B, max_size=B))),
    st.tuples(st.just("step"), st.tuples(st.lists(TOKENS, min_size=B, max_size=B), BOOLS)),
    st.tuples(st.just("reset"), BOOLS),
)


def row(length: int) -> st.SearchStrategy[list[int]]:
    return st.lists(TOKENS, min_size=length, max_size=length)


def act(decoder: Decoder, action: tuple[str, Any]) -> Tensor:
    name, value = action
    if name == "reset":
        decoder.reset(torch.tensor(value))
    elif name == "step":
        decoder.step(torch.tensor(value[0]), active=torch.tensor(value[1]))
    elif name == "feed together":
        decoder.feed(torch.tensor(value))
    elif any(value):
        decoder.feed(value)
    return decoder.scores.full()


@pytest.mark.parametrize(("kind", "precision"), [case for case in CASES if case[0] in WAYS])
@settings(max_examples=examples(6))
@given(before=st.lists(ACTIONS, max_size=6), after=st.lists(ACTIONS, min_size=1, max_size=4))
def test_a_session_goes_on_to_the_last_bit(
    tmp_path_factory: pytest.TempPathFactory, kind: str, precision: str, before: list[Any], after: list[Any]
) -> None:
    path = tmp_path_factory.mktemp("session") / "a.safetensors"
    decoder, other = decoder_of(kind, precision), decoder_of(kind, precision)
    for action in before:
        act(decoder, action)
    decoder.save(path, note={"text": "Ωλ"})
    other.feed(torch.arange(63).view(3, 21) % VOCAB)  # nothing of this may be left
    assert other.load(path) == {"text": "Ωλ"}
    assert_same_bits(other.scores.full(), decoder.scores.full())
    for action in after:
        assert_same_bits(act(other, action), act(decoder, action))


@pytest.mark.parametrize(("kind", "precision"), CASES)
def test_rows_of_all_ages(tmp_path: Path, kind: str, precision: str) -> None:
    """One whose ring has wrapped, one that is younger than its memory, one that was never fed."""
    path = tmp_path / "a.safetensors"
    decoder, other = decoder_of(kind, precision), decoder_of(kind, precision)
    decoder.feed([list(range(13)) * 4, [5, 6], []])
    decoder.save(path)
    other.feed(torch.ones(B, 9, dtype=torch.int64))
    keys = other.kept.memory.keys[0] if other.kept is not None else torch.zeros(1, 3, 1)
    assert other.load(path) == {}
    assert not keys[:, 2].any() or kind == "zero_first_memory", "the memory is overwritten in place, and nothing is left in it"
    assert other.scores.full()[2].isnan().all()
    assert not other.scores.full()[:2].isnan().any()
    assert_goes_on_alike(other, decoder)


def test_after_a_reset_nothing_of_the_text_is_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    decoder = decoder_of()
    decoder.feed([[1, 2, 3], [4, 5], [6] * 9])
    decoder.reset(torch.tensor([True, False, True]))
    decoder.save(path)
    tensors = load_file(path)
    assert tensors["n_valid"].tolist() == [0, 2, 0]
    assert tensors["keys.0"].shape == (3, 2, 4)
    other = decoder_of()
    other.load(path)
    assert_goes_on_alike(other, decoder)


def test_what_was_read_before_is_wiped(tmp_path: Path) -> None:
    """A text that nobody reads any more does not stay in memory beside the one that takes its row."""
    path, (empty, other) = tmp_path / "a.safetensors", (decoder_of(), decoder_of())
    other.feed(torch.ones(B, 9, dtype=torch.int64))
    assert other.kept is not None and (keys := other.kept.memory.keys[0]).any()
    other.put(1, empty.take(0))
    assert keys.flatten(2).any(2).any(0).tolist() == [True, False, True]
    empty.save(path)
    other.load(path)
    assert not keys.any()


# --- the file ---------------------------------------------------------------------------------------------------------------


def test_the_file_is_a_safetensors_file_of_the_promised_size(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    decoder = decoder_of(precision="bf16")
    decoder.feed([list(range(13)) * 2, [5, 6], []])
    decoder.save(path, note={"tokenizer": "bytes"})
    with safe_open(path, "pt") as file:
        names = set(file.keys())
        about = json.loads(file.metadata()["transformer_xl.session"])
    assert names == {"keys.0", "keys.1", "values.0", "values.1", "end", "n_valid", "last"}
    assert about["note"] == {"tokenizer": "bytes"}
    assert about["decoder"]["precision"] == "bf16"
    config, stored = model_of("transformer_xl").config, 5 + 2
    memory = config.n_layer * stored * 2 * config.n_head * config.d_head * 2
    rows = B * (4 * config.d_model + 16)
    data = path.read_bytes()
    header = 8 + int.from_bytes(data[:8], "little")
    assert len(data) == header + memory + rows


def test_the_hash_of_a_model_tells_weights_and_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model()
    same, nudged, other = copy.deepcopy(model), copy.deepcopy(model), tiny_model(dropout=0.1)
    other.load_state_dict(model.state_dict())
    with torch.no_grad():
        weight = nudged.get_parameter("layers.1.attention.qkv_net.weight")
        weight[3, 2] = torch.nextafter(weight[3, 2], torch.tensor(9.0))
    assert model_sha256(model) == model_sha256(same)
    assert len({model_sha256(m) for m in (model, nudged, other, copy.deepcopy(model).double())}) == 4
    monkeypatch.setattr(session_file, "encode_tensors", None)
    model_sha256(model)  # a second time, without reading the weights again


# --- what is refused --------------------------------------------------------------------------------------------------------


def reader_in_use(**options: Any) -> tuple[Decoder, Decoder]:
    """Return two decoders that have read the same."""
    pair = decoder_of(**options), decoder_of(**options)
    for decoder in pair:
        decoder.feed([list(range(decoder_row + 3)) for decoder_row in range(decoder.batch_size)])
    return pair


def assert_refused(path: Path, message: str, **options: Any) -> str:
    """Loading fails in one line that names the file, and the decoder goes on as one that never tried."""
    decoder, twin = reader_in_use(**options)
    with pytest.raises(CheckpointError, match=message) as caught:
        decoder.load(path)
    assert "\n" not in str(caught.value)
    assert repr(str(path)) in str(caught.value)
    assert_goes_on_alike(decoder, twin)
    return str(caught.value)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A session of 3 rows."""
    path = tmp_path / "a.safetensors"
    decoder = decoder_of()
    decoder.feed([[1, 2, 3, 4, 5, 6, 7], [8, 9], [10]])
    decoder.save(path)
    return path


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 2}, r"has 3 rows, more than this decoder \(2\); open it with Decoder\(model, batch_size=3\)"),
        ({"mem_len": 7, "tgt_len": 40}, r"mem_len \(5 there, 7 here\), tgt_len \(4 there, 40 here\), n_slot .*; open another"),
        ({"kind": "shaw"}, r"was read by another model \('[0-9a-f]{12}' there, '[0-9a-f]{12}' here: SHA-256"),
    ],
)
def test_a_session_of_another_decoder(path: Path, options: dict[str, Any], message: str) -> None:
    assert_refused(path, message, **options)


@pytest.mark.parametrize("context", [{"clamp_len": 2}, {"same_length": True}])
def test_a_session_of_a_model_that_is_read_otherwise(tmp_path: Path, context: dict[str, Any]) -> None:
    path, model = tmp_path / "a.safetensors", model_of("vaswani")
    Decoder(model.with_context(**context)).save(path)
    [(name, value)] = context.items()
    with pytest.raises(CheckpointError, match=rf"{name} \({value} there, .* here\)"):
        Decoder(model).load(path)


def test_a_file_that_is_cut_is_always_found(path: Path) -> None:
    decoder, twin = reader_in_use()
    sound, generator = path.read_bytes(), random.Random(1)
    for _ in range(60):
        path.write_bytes(sound)
        truncate(path, generator)
        with pytest.raises(CheckpointError, match=r"^'.*a\.safetensors' is no sound safetensors file"):
            decoder.load(path)
    assert_goes_on_alike(decoder, twin)
    path.write_bytes(sound)
    decoder.load(path)


def test_a_damaged_header_is_refused_in_one_line_or_harmless(path: Path) -> None:
    """The numbers have no checksum any more; what says to which model and decoder they belong is compared."""
    decoder, sound = decoder_of(), path.read_bytes()
    n_refused = 0
    for bit in range(0, 8 * (8 + int.from_bytes(sound[:8], "little")), 29):
        damaged = bytearray(sound)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        try:
            decoder.load(path)
        except CheckpointError as error:
            assert "\n" not in str(error)
            n_refused += 1
    assert n_refused > 190


def unpacked(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a file, and what it says as one of them."""
    with safe_open(path, "pt") as file:
        return {**load_file(path), "about": about_tensor(file.metadata()["transformer_xl.session"])}


def packed(tensors: dict[str, Tensor]) -> bytes:
    """Return the file of what `unpacked` returned."""
    tensors = dict(tensors)
    about = tensors.pop("about", None)
    metadata = {} if about is None else {"transformer_xl.session": about.numpy().tobytes().decode()}
    return b"".join(encode_tensors(tensors, metadata))


def about_tensor(text: str) -> Tensor:
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


def with_about(**changes: Any) -> Callable[[dict[str, Tensor]], None]:
    def change(tensors: dict[str, Tensor]) -> None:
        about = json.loads(tensors["about"].numpy().tobytes())
        tensors["about"] = about_tensor(json.dumps(about | changes))

    return change


def with_tensors(**changes: Any) -> Callable[[dict[str, Tensor]], None]:
    def change(tensors: dict[str, Tensor]) -> None:
        for name, value in changes.items():
            name = name.replace("_0", ".0")
            tensors[name] = value if isinstance(value, Tensor) else value(tensors[name])

    return change


NASTY = "\x1b[31m\nbad\u202e\x00" + "x" * 10**5
"""Would color a terminal, begin a line, turn the text around, and not end."""


NASTY = "\x1b[31m\nbad\u202e\x00" + "x" * 10**5
"""Would color a terminal, begin a line, turn the text around, and not end."""

FORGERIES: list[tuple[Callable[[dict[str, Tensor]], Any], str]] = [
    (with_about(version=4), r"has version 4 and this program reads 3; upgrade"),
    *((with_about(version=version), "has version .* and this program reads 3") for version in (NASTY, [[NASTY] * 9] * 9)),
    (with_about(format="other"), "is not a session file; give a file that decoder.save wrote"),
    (lambda t: t.pop("about"), "is not a session file"),
    *((with_tensors(about=about_tensor(text)), "is not a session file") for text in ("{", "[" * 100_000)),
    *((with_about(**about), "does not say what it belongs to") for about in ({"note": {"a": 1}}, {"model": None})),
    (with_about(model=NASTY), "was read by another model"),
    (with_about(decoder={}), r"mem_len \(None there, 5 here\)"),
    (with_about(decoder={"precision": NASTY, "mem_len": 10**4000}), r"mem_len \(1000"),
    (lambda t: t.pop("keys.1"), r"tensors \['keys.1'\] are missing or unknown"),
    (lambda t: t.update({NASTY: torch.ones(1)}), "are missing or unknown"),
    (with_tensors(keys_0=lambda x: x[:, 1:].clone()), "tensor 'keys.0' is torch.float32 .* and should be"),
    (with_tensors(keys_0=lambda x: x.reshape(*x.shape, *[1] * 9)), "tensor 'keys.0' is torch.float32 .* and should be"),
    (with_tensors(n_valid=torch.tensor([-1, 2, 1])), "its rows have impossible lengths"),
    (with_tensors(end=torch.tensor([9, -2, 1])), "its rows have impossible lengths"),
    (with_tensors(n_valid=torch.tensor([5, 2, 2]), end=torch.tensor([9, 9, 9])), "tensor 'keys.0'"),  # longer than stored
    (with_tensors(end=lambda x: x.double()), "tensor 'end' is torch.float64"),
]


def test_a_forged_file_is_refused_in_a_short_line(path: Path) -> None:
    """What describes a file refuses it in the words of loading; but for what only a decoder can tell, which it does not ask."""
    sound = path.read_bytes()
    assert packed(unpacked(path)) == sound
    for change, message in FORGERIES:
        path.write_bytes(sound)
        tensors = unpacked(path)
        change(tensors)
        path.write_bytes(packed(tensors))
        said = assert_refused(path, message)
        assert len(said) < 600 and said.isprintable()
        if "does not fit" in said:
            assert set(describe_session(path)) == {"format", "version", "model", "decoder", "note"}
        else:
            with pytest.raises(CheckpointError) as refused:
                describe_session(path)
            assert str(refused.value) == said


def test_forged_ids_of_an_open_segment(path: Path) -> None:
    decoder_of("vaswani").save(path)
    for forged in (-2, VOCAB):
        tensors = unpacked(path)
        tensors["open"][1, 2] = forged
        path.write_bytes(packed(tensors))
        assert_refused(path, "it has token ids outside the vocabulary", kind="vaswani")


class Bomb:
    def __reduce__(self) -> Any:
        return os.system, ("touch executed",)


def test_what_is_no_session_is_refused_and_not_executed(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(path.parent)
    foreign = path.with_name("foreign")
    torch.save({"x": torch.ones(9), "y": Bomb()}, foreign)
    for content in (b"", b"once upon a time" * 10, pickle.dumps(Bomb()), foreign.read_bytes()):
        foreign.write_bytes(content)
        assert_refused(foreign, "is no sound safetensors file")
    save_file({"w": torch.ones(99)}, foreign)
    assert_refused(foreign, "is not a session file; give")
    assert not Path("executed").exists()


@pytest.mark.parametrize("note", [{"a": 1}, {2: "b"}])
def test_a_note_is_text(path: Path, note: Any) -> None:
    before = path.read_bytes()
    with pytest.raises(CheckpointError, match="must map text to text"):
        decoder_of().save(path, note=note)
    assert path.read_bytes() == before


# --- killed while saving ----------------------------------------------------------------------------------------------------


@cache
def two_sessions() -> tuple[Decoder, Decoder]:
    """Return an older and a newer state of 100 kB."""
    old, new = decoder_of(mem_len=600), decoder_of(mem_len=600)
    old.feed(torch.arange(1200).view(3, 400) % VOCAB)
    new.feed(torch.arange(1500).view(3, 500) % VOCAB)
    return old, new


def test_a_file_is_its_owners_alone_and_on_the_disk_before_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, events, (old, new) = tmp_path / "a.safetensors", list[str](), two_sessions()
    with monkeypatch.context() as patch:
        for name in ("fsync", "replace"):
            real = getattr(os, name)
            patch.setattr(os, name, lambda *args, name=name, real=real: (events.append(name), real(*args))[1])
        old.save(path)
    assert events == ["fsync", "replace", "fsync"], "the second one is of the directory"
    assert path.stat().st_mode & 0o777 == 0o600
    before = path.read_bytes()
    for install, code in ((fail_writes, errno.ENOSPC), (fail_call("fsync"), errno.EDQUOT), (fail_call("replace"), errno.EIO)):
        with monkeypatch.context() as patch:
            install(patch, Fault(code, at=0, for_good=False))
            with pytest.raises(OSError, match=re.escape(os.strerror(code))):
                new.save(path)
        assert [each.read_bytes() for each in tmp_path.iterdir()] == [before]


class Kill(Fault):
    """Ends the process at a call, as a power cut would."""

    def strike(self, path: object = None) -> None:
        self.n_calls += 1
        if self.fired:
            os.kill(os.getpid(), signal.SIGKILL)


def save_under_kills(where: str) -> list[str]:
    """Overwrite a session under a kill at the first call, at the second, …, and say what is there after each."""
    path = Path(where)
    old, new = two_sessions()
    new.save(path)
    after = path.read_bytes()
    old.save(path)
    before = path.read_bytes()
    found, n_kills = [], 0
    while killed_at(n_kills, new, path):
        n_kills += 1
        found.append("old" if path.read_bytes() == before else "new" if path.read_bytes() == after else "neither")
        other = decoder_of(mem_len=600)
        other.load(path)
        old.save(path)
        assert [entry.name for entry in path.parent.iterdir()] == [path.name], "a stray"
    assert path.read_bytes() == after
    return found


def killed_at(call: int, decoder: Decoder, path: Path) -> bool:
    child = os.fork()
    if child == 0:
        fault = Kill(errno.EIO, at=call, for_good=True)
        with pytest.MonkeyPatch.context() as patch:
            for install in (fail_writes, *(fail_call(name) for name in ("fsync", "replace", "unlink"))):
                install(patch, fault)
            decoder.save(path)
        os._exit(0)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


def test_a_kill_at_any_call_keeps_the_old_file_or_the_new_one(tmp_path: Path) -> None:
    run = "tests.generation.test_session_file:save_under_kills"  # in a process of a single thread
    (found,) = run_forked(run, 1, str(tmp_path / "a.safetensors"))
    assert set(found) == {"old", "new"}
    assert found == sorted(found, reverse=True), "a kill after the name is there loses nothing"
    assert len(found) >= 6
