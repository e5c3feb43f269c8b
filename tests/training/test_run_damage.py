"""Damage to any file of a run or of an exported model is found and named, or changes nothing that is read.

TXL_SEED chooses other damages.
"""

import hashlib
import io
import json
import os
import random
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

import transformer_xl as txl
from tests.checkpoint.helpers import as_bytes, spelled
from tests.training.helpers import run_bits
from transformer_xl.checkpoint.checkpoint import MODEL_FILE, TRAINING_FILE
from transformer_xl.checkpoint.run_directory import RunDirectory
from transformer_xl.errors import CheckpointError, TxlError
from transformer_xl.manifest import MANIFEST_FILE
from transformer_xl.tensor_file import encode_tensors, load_tensors
from transformer_xl.training.display import Display
from transformer_xl.training.run import train

SEED = int(os.environ.get("TXL_SEED", "0"))
STEPS = 24
FULL_SIZE = [pytest.mark.faults, pytest.mark.long, pytest.mark.timeout(1200)]
SIZES = [pytest.param(30, id="30"), pytest.param(2000, id="2000", marks=FULL_SIZE)]
NEVER_READ = ("loss.png", ".lock")
UNGUARDED = ("log", "steps", "tokenizer", "copies")
"""Of what a run leaves, see `run_bits`: lines of the log have no checksum, and files beside the checkpoints are not read."""


# --- damage ----------------------------------------------------------------------------------------------------------------


def flip_bit(data: bytearray, draw: random.Random) -> None:
    data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)


def truncate(data: bytearray, draw: random.Random) -> None:
    del data[draw.randrange(len(data)) :]


def clear_block(data: bytearray, draw: random.Random) -> None:
    begin, n = draw.randrange(len(data)), draw.choice([1, 16, 512])
    data[begin : begin + n] = bytes(len(data[begin : begin + n]))


def change_digit(data: bytearray, draw: random.Random) -> None:
    digits = [i for i, byte in enumerate(data) if 48 <= byte < 58]
    if digits:
        data[draw.choice(digits)] = draw.randrange(48, 58)


def swap_letters(data: bytearray, draw: random.Random) -> None:
    letters = [i for i in range(len(data) - 1) if data[i : i + 2].isalpha()]
    if letters:
        i = draw.choice(letters)
        data[i], data[i + 1] = data[i + 1], data[i]


def repeat_block(data: bytearray, draw: random.Random) -> None:
    begin = draw.randrange(len(data))
    data[begin:begin] = data[begin : begin + draw.choice([1, 40, 4096])]


def append(data: bytearray, draw: random.Random) -> None:
    data.extend(draw.randbytes(draw.choice([1, 100])))


DAMAGES: list[Callable[[bytearray, random.Random], None]] = [
    *(flip_bit, flip_bit, flip_bit, truncate, clear_block, change_digit, swap_letters, repeat_block, append)
]


@contextmanager
def damaged(path: Path, draw: random.Random) -> Iterator[str]:
    """Damage a file, or delete it, while the block runs; yield what was done."""
    sound = path.read_bytes()
    damage = draw.choice([*DAMAGES, None])
    try:
        if damage is None:
            path.unlink()
        else:
            data = bytearray(sound)
            damage(data, draw)
            path.write_bytes(data)
        yield f"{damage.__name__ if damage else 'delete'} of {path.name}"
    finally:
        path.write_bytes(sound)


# --- what is read ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, recipe: str, text: Path) -> Path:
    """A run of words with several checkpoints, its best not the newest, that has been resumed once."""
    folder = tmp_path_factory.mktemp("damage") / "run"
    for steps in (STEPS - 8, STEPS):
        overrides = [f"train.max_steps={steps}", "tokenizer.kind=word", "train.average=ema"]
        train(recipe, corpus=str(text), out=folder, overrides=overrides, resume=True, display=Display(quiet=True))
    return folder


@pytest.fixture(scope="module")
def export(run: Path) -> Path:
    model, tokenizer = txl.load(run)
    folder = run.with_name("export")
    model.save_pretrained(folder, tokenizer=tokenizer)
    return folder


def loaded(folder: Path, warn: Callable[[str], None], **options: Any) -> str:
    model, tokenizer = txl.load(folder, on_damaged=warn, **options)
    weights = {name: as_bytes(tensor).hex() for name, tensor in model.state_dict().items()}
    return spelled([weights, model.config.model_dump(mode="json"), tokenizer.to_dict()])


def readings(folder: Path) -> dict[str, Callable[[Callable[[str], None]], Any]]:
    """Return what reads a run or an export, by name."""
    if not RunDirectory(folder).holds_run and not (folder / "checkpoints").exists():
        return {"load": lambda warn: loaded(folder, warn)}
    return {
        **{which: lambda warn, which=which: loaded(folder, warn, which=which) for which in ("best", "last", "average")},
        "settings": lambda warn: RunDirectory(folder).config(),
    }


def verdict(read: Callable[[Callable[[str], None]], Any], sound: Any, file: Path) -> str:
    """Return "named", "harmless" or "silent"."""
    said: list[str] = []
    try:
        same = read(said.append) == sound
    except (TxlError, OSError) as error:  # a file that is gone
        said.append(str(error))
        same = False
    assert all("\n" not in message and len(message) < 900 for message in said), said
    if same:
        return "harmless"
    places = [file.name, *(part for part in file.parts if part.startswith("step-"))]
    return "named" if any(place in message for place in places for message in said) else f"silent {said}"


@pytest.mark.parametrize("n_damages", SIZES)
@pytest.mark.parametrize("what", ["run", "export"])
def test_damage_is_named_or_harmless(what: str, n_damages: int, request: pytest.FixtureRequest) -> None:
    folder: Path = request.getfixturevalue(what)
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size)
    if what == "export":  # people change its settings; the manifest covers weights and tokenizer
        files.remove(folder / "config.json")
    sound = {name: read(pytest.fail) for name, read in readings(folder).items()}
    draw = random.Random(SEED)
    found = Counter[str]()
    for i in range(n_damages):
        file = files[i % len(files)]
        with damaged(file, draw) as how:
            verdicts = {name: verdict(read, sound[name], file) for name, read in readings(folder).items()}
        silent = {name: each for name, each in verdicts.items() if each.startswith("silent")}
        assert not silent, (how, silent)
        found["named" if "named" in verdicts.values() else "harmless"] += 1
    print(
        f"{n_damages} damages to {len(files)} files of {what}: {found['named']} named, {found['harmless']} harmless, 0 silent"
    )
    assert found["named"] > n_damages / 3
    assert {name: read(pytest.fail) for name, read in readings(folder).items()} == sound


@pytest.mark.parametrize(
    "n_damages",
    [4, pytest.param(25, marks=pytest.mark.faults), pytest.param(100, marks=FULL_SIZE)],
)
def test_a_damaged_run_goes_on_alike_or_says_why_not(run: Path, n_damages: int, tmp_path: Path) -> None:
    draw = random.Random(SEED)
    files = [path for path in sorted(run.rglob("*")) if path.is_file() and path.stat().st_size and path.name not in NEVER_READ]
    whole = bits_when_resumed(run, tmp_path / "whole")
    assert isinstance(whole, dict)
    found = Counter[str]()
    for i in range(n_damages):
        copy = shutil.copytree(run, tmp_path / str(i))
        file = copy / draw.choice(files).relative_to(run)
        with damaged(file, draw) as how:
            damaged_copy = shutil.copytree(copy, tmp_path / f"{i}-damaged")
        said = io.StringIO()
        after = bits_when_resumed(damaged_copy, damaged_copy, said)
        messages = re.sub(r"\s+", " ", f"{said.getvalue()} {after if isinstance(after, str) else ''}")
        places = [file.name, *(part for part in file.parts if part.startswith("step-"))]
        same = isinstance(after, dict) and all(after[name] == whole[name] for name in whole if name not in UNGUARDED)
        assert same or any(place in messages for place in places), (how, messages)
        found["goes on alike" if same else "named"] += 1
        shutil.rmtree(copy)
        shutil.rmtree(damaged_copy)
    print(f"{n_damages} damaged runs resumed: {dict(found)}")


def test_weights_of_another_checkpoint_are_refused(run: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(run, tmp_path / "copy")
    *_, older, newest = sorted((copy / "checkpoints").glob("step-????????"))
    sound = as_bytes(next(iter(txl.load(copy, which="last")[0].parameters())))
    shutil.copy(older / MODEL_FILE, newest / MODEL_FILE)
    said: list[str] = []
    model, _ = txl.load(copy, which="last", on_damaged=said.append)
    assert as_bytes(next(iter(model.parameters()))) != sound
    (line,) = said
    assert line.startswith(f"'{newest / MODEL_FILE}' is damaged: its sha256 is ")


def forge(folder: Path, name: str, content: bytes) -> None:
    """Replace a file of a checkpoint, and make its manifest say so, as an attacker would."""
    (folder / name).write_bytes(content)
    manifest = json.loads((folder / MANIFEST_FILE).read_bytes())
    manifest["files"][name] = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (folder / MANIFEST_FILE).write_text(json.dumps(manifest))


def kept(run: Path) -> dict[Path, bytes]:
    """The files of a run that a refused start must leave as they are."""
    passing = (*NEVER_READ, "environment.json", "loggers.json")
    return {path: path.read_bytes() for path in run.rglob("*") if path.is_file() and path.name not in passing}


def forged_tensors(sound: dict[str, torch.Tensor]) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
    """Yield what differs and the tensors of a checkpoint, one of each part missing, of another shape or type, or unknown."""
    for part in ("optimizer.", "average.", "mems.hidden", "mems.n_valid", "random.cpu"):
        name = next(name for name in sound if name.startswith(part) and (sound[name].dim() or part != "optimizer."))
        tensor = sound[name]
        yield f"{name} missing", {other: each for other, each in sound.items() if other != name}
        yield f"{name} longer", sound | {name: torch.cat([tensor, tensor])}
        yield f"{name} flat", sound | {name: tensor.flatten()[:, None]}
        yield f"{name} empty", sound | {name: tensor[:0]}
        yield f"{name} of another type", sound | {name: tensor.to(torch.int16)}
        yield f"{part} unknown", sound | {f"{part}../../escape": tensor}
    yield "an unknown part", sound | {"escape": torch.ones(1)}
    yield "impossible lengths", sound | {"mems.n_valid": torch.full_like(sound["mems.n_valid"], 10**9)}
    yield "nothing", {}


@pytest.mark.parametrize("every", [pytest.param(5, id="some"), pytest.param(1, id="all", marks=pytest.mark.faults)])
def test_forged_tensors_are_refused_in_one_line(every: int, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They showed only in the first step, as another program's message."""
    monkeypatch.setattr("transformer_xl.training.loop.learn", lambda *_: pytest.fail("it trains"))
    newest = max((run / "checkpoints").glob("step-????????")).relative_to(run)
    copy = tmp_path / "copy"
    forged = list(forged_tensors(load_tensors(run / newest / TRAINING_FILE)))
    for how, tensors in forged[::-every]:  # of five parts, each in another way
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(run, copy)
        forge(copy / newest, TRAINING_FILE, b"".join(encode_tensors(tensors)))
        before = kept(copy)
        with pytest.raises(CheckpointError) as refused:
            train(out=copy, overrides=[f"train.max_steps={STEPS + 8}"], resume=True, display=Display(quiet=True))
        message = str(refused.value)
        assert message.startswith(f"checkpoint {STEPS} does not fit the run in '{copy}': "), how
        assert message.endswith("; restore it from a copy, or delete its directory to go on from the one before"), how
        assert "\n" not in message and len(message) < 500, how
        assert kept(copy) == before, how


def bits_when_resumed(run: Path, folder: Path, said: Any = None) -> dict[str, Any] | str:
    """Train a run, or its copy, for 8 more steps; return its bits, or why it was refused."""
    if folder != run:
        shutil.copytree(run, folder)
    console = Console(file=said, width=10_000) if said else None
    try:
        train(out=folder, overrides=[f"train.max_steps={STEPS + 8}"], resume=True, display=Display(quiet=True, console=console))
    except TxlError as error:
        return str(error)
    return run_bits(folder)
