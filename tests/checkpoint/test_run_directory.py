"""One process at a time starts a run in a directory, whole or not at all; and runs go back in their checkpoints."""

import dataclasses
import io
import itertools
import json
import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint.helpers import never, numbered
from tests.helpers import TINY, tiny_model
from transformer_xl.checkpoint.run_directory import RunDirectory, check_tokenizer, copies, load
from transformer_xl.checkpoint.store import Checkpoint, CheckpointStore
from transformer_xl.config.run import RunConfig, TokenizerConfig
from transformer_xl.errors import CheckpointError
from transformer_xl.tokenizers.kinds import Tokenizer, train_tokenizer

CONFIG = RunConfig(name="mine", model=TINY)  # pyright: ignore[reportArgumentType]


@pytest.fixture
def tokenizer() -> Tokenizer:
    return train_tokenizer(TokenizerConfig(kind="char"), ["abcdefghijklm"])


@pytest.fixture
def run(tmp_path: Path, tokenizer: Tokenizer) -> RunDirectory:
    """A run with checkpoints of steps 1 (the best) and 2."""
    run = RunDirectory(tmp_path / "run")
    with run.locked():
        run.create(CONFIG, tokenizer)
    for step in (1, 2):
        torch.manual_seed(step)
        run.store().save(Checkpoint(step, tiny_model().state_dict(), {}, {}, copies(CONFIG, tokenizer)), best=step == 1)
    return run


def test_a_run_is_created_and_read_back(tmp_path: Path, tokenizer: Tokenizer) -> None:
    run = RunDirectory(str(tmp_path / "deep" / "down"))
    assert not run.holds_run
    run.check_free()
    assert not run.path.exists()
    with run.locked():
        run.create(CONFIG, tokenizer)
    assert run.holds_run
    assert run.config() == CONFIG
    assert run.tokenizer().fingerprint == tokenizer.fingerprint
    assert run.store().steps() == []
    assert sorted(path.name for path in run.path.iterdir()) == ["checkpoints", "config.json", "tokenizer.json"]


def test_what_a_killed_start_leaves_is_in_nobodys_way(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """It was killed before config.json got its name."""
    run = RunDirectory(tmp_path / "run")
    with run.locked():
        run.create(CONFIG, tokenizer)
    (run.path / "config.json").rename(run.path / "config.json.tmp")
    (run.path / "tokenizer.json.12.tmp.json").touch()
    assert not run.holds_run
    with run.locked():
        run.create(CONFIG, tokenizer)
    assert run.config() == CONFIG


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("thesis.txt", "is not empty and holds no run; choose another --out"),
        ("tokenizer.json", "is not empty and holds no run"),  # of another program, because a start makes checkpoints/ first
        ("config.json", "is not empty and holds no run"),
    ],
)
def test_a_directory_with_something_in_it_is_refused(tmp_path: Path, tokenizer: Tokenizer, name: str, match: str) -> None:
    (tmp_path / name).write_text("mine")
    with pytest.raises(CheckpointError, match=match):
        RunDirectory(tmp_path).create(CONFIG, tokenizer)
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert (tmp_path / name).read_text() == "mine"


def test_one_process_at_a_time(run: RunDirectory, tmp_path: Path) -> None:
    other = RunDirectory(run.path)
    with run.locked():
        with (
            pytest.raises(CheckpointError, match=r"another process is training in '.*run'; wait until it ends"),
            other.locked(),
        ):
            pytest.fail("both had it")
        assert run.holds_run
    with other.locked():
        pass


@pytest.mark.parametrize("failing", ["config", "tokenizer"])
def test_a_start_that_fails_can_be_made_again(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    run = RunDirectory(tmp_path / "run")
    with monkeypatch.context() as patch:
        patch.setattr(*((type(tokenizer), "save", full) if failing == "tokenizer" else (os, "replace", full)))
        with pytest.raises(OSError, match="No space left on device"), run.locked():
            run.create(CONFIG, tokenizer)
    assert not run.holds_run
    with run.locked():
        run.create(CONFIG, tokenizer)
    assert run.config() == CONFIG


def test_an_empty_directory_does_not_stay(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="x"), RunDirectory(tmp_path / "run").locked():
        raise RuntimeError("x")
    assert list(tmp_path.iterdir()) == []


def test_best_and_last_are_loaded(run: RunDirectory) -> None:
    for which, seed in (("best", 1), ("last", 2)):
        model, tokenizer = load(run.path, which=which)  # pyright: ignore[reportArgumentType]
        torch.manual_seed(seed)
        assert torch.equal(model.get_parameter("embedding.weight"), tiny_model().get_parameter("embedding.weight"))
        assert tokenizer.vocab_size == 13
        assert not model.training


def test_a_damaged_best_is_warned_of_and_the_newest_loaded(run: RunDirectory) -> None:
    (run.path / "checkpoints" / "step-00000001" / "model.safetensors").write_bytes(b"")
    with pytest.warns(UserWarning, match="step-00000001/model.safetensors' is no sound safetensors file"):
        load(run.path)
    messages: list[str] = []
    load(str(run.path), on_damaged=messages.append)
    assert len(messages) == 1


@pytest.mark.parametrize(
    ("content", "match"),
    [
        ("[]", "config.json': .*must be a mapping"),
        ('{"nmae": 3}', "unknown key 'nmae'; did you mean 'name'"),
    ],
)
def test_settings_that_cannot_work_are_named_even_if_a_checkpoint_has_them(run: RunDirectory, content: str, match: str) -> None:
    run.store().change_copies({"config.json": content.encode()})
    with pytest.raises(CheckpointError, match=match):
        run.config()


@pytest.mark.parametrize("name", ["nothing", "file"])
def test_no_run(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(
        CheckpointError, match=f"{name}' holds no run: config.json is missing; train one with txl train or txl finetune"
    ):
        RunDirectory(tmp_path / name).config()
    with pytest.raises(CheckpointError, match=f"{name}' is (a file, and )?not a directory of a model"):
        load(tmp_path / name)


def test_only_runs_are_proposed_where_a_run_is_needed(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    (run.path.parent / "empty").mkdir()
    monkeypatch.chdir(run.path.parent / "empty")  # where this is developed, there may be runs, and they are proposed, too
    exported = run.path.with_name("exported")
    exported.mkdir()
    (exported / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=f"txl finetune; known: {run.path}$"):
        RunDirectory(run.path.with_name("exporte")).config()


def test_tokenizers_that_do_not_fit(run: RunDirectory) -> None:
    other = train_tokenizer(TokenizerConfig(kind="char"), ["ab"])
    with pytest.raises(CheckpointError, match=r"of 'x' has 2 tokens, its config.json 13; they do not belong together"):
        check_tokenizer(other, 13, "x")
    run.store().change_copies(copies(CONFIG, other))
    with pytest.raises(CheckpointError, match=r"run' has 2 tokens, its config.json 13; they do not belong together"):
        load(run.path)


def test_weights_that_do_not_fit_the_config(run: RunDirectory) -> None:
    run.save_config(CONFIG.changed(model={"d_inner": 15}), run.tokenizer())
    with pytest.raises(CheckpointError, match=r"checkpoints': tensor '.*' has shape .*, its config asks for .*; not the same"):
        load(run.path)


# settings


def test_loading_takes_what_the_checkpoint_has_and_not_what_lies_beside_it(run: RunDirectory) -> None:
    """Whoever wants another memory says so when loading; an edited file would only look as if the run had been trained so."""
    before = load(run.path)
    values = json.loads((run.path / "config.json").read_text())
    (run.path / "config.json").write_text(json.dumps(values | {"name": "yours", "model": values["model"] | {"mem_len": 9}}))
    train_tokenizer(TokenizerConfig(kind="char"), ["bcdefghijklmn"]).save(run.path / "tokenizer.json")
    model, tokenizer = load(run.path)
    assert (model.config, tokenizer.fingerprint) == (before[0].config, before[1].fingerprint)
    assert run.config() == CONFIG
    assert run.tokenizer().fingerprint == tokenizer.fingerprint


def test_each_checkpoint_is_loaded_with_its_own_settings(run: RunDirectory) -> None:
    changed = CONFIG.changed(model={"clamp_len": 4})
    run.store().save(dataclasses.replace(run.store().load(2), copies=copies(changed, run.tokenizer())))
    assert [load(run.path, which=which)[0].config.model_dump()["clamp_len"] for which in ("best", "last")] == [
        CONFIG.model.model_dump()["clamp_len"],
        4,
    ]
    assert run.config() == changed


def test_a_run_of_version_0_2_is_loaded_with_the_settings_beside_its_checkpoints(run: RunDirectory) -> None:
    """Its manifests have a checksum of themselves and no settings, and so has the record of the best."""
    for step in (1, 2):
        folder = run.path / "checkpoints" / f"step-{step:08d}"
        for name in ("config.json", "tokenizer.json"):
            (folder / name).unlink()
        manifest = json.loads((folder / "manifest.json").read_bytes())
        files = {name: record for name, record in manifest["files"].items() if "safetensors" in name or name == "state.json"}
        old = {"checksum": "0" * 64, "format": 1, "step": step, "files": files}
        (folder / "manifest.json").write_text(json.dumps(old))
    (run.path / "checkpoints" / "best.json").write_text(json.dumps({"checksum": "0" * 64, "format": 1, "step": 1}))
    values = json.loads((run.path / "tokenizer.json").read_text())
    (run.path / "tokenizer.json").write_text(json.dumps({**values, "checksum": "0" * 64}))
    (run.path / "seal.json").write_text("{}")
    model, tokenizer = load(run.path, on_damaged=never)
    torch.manual_seed(1)
    assert torch.equal(model.get_parameter("embedding.weight"), tiny_model().get_parameter("embedding.weight"))
    assert tokenizer.to_dict() == values
    assert run.config() == CONFIG


class KilledError(BaseException):
    """Stands for SIGKILL: nothing between the call that raises it and the test cleans up."""


def test_new_settings_are_the_old_or_the_new_ones_after_any_kill(
    run: RunDirectory, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Settings are saved three times. The first two are killed before any call to the file system, in many combinations."""
    monkeypatch.setattr(os, "fsync", bool)  # takes most of the time
    kinds = [CONFIG.changed(model={"clamp_len": n}) for n in (2, 3, 4)]
    n_killed = 0
    for events in itertools.product(range(0, 40, 5), range(0, 40, 13)):
        copy = RunDirectory(shutil.copytree(run.path, run.path.with_name("copy")))
        possible = [CONFIG]
        for config, event in zip(kinds, events, strict=False):
            n_killed += killed_before(event, partial(copy.save_config, config, tokenizer))
            possible.append(config)
            assert copy.config() in possible
            for which in ("best", "last"):
                model, own = load(copy.path, which=which, on_damaged=never)  # pyright: ignore[reportArgumentType]
                assert model.config in [each.model for each in possible]
                assert own.fingerprint == tokenizer.fingerprint
            copy.store().clean()
        copy.save_config(kinds[2], tokenizer)
        assert copy.config() == kinds[2]
        assert [load(copy.path, which=which)[0].config for which in ("best", "last")] == [kinds[2].model] * 2  # pyright: ignore[reportArgumentType]
        shutil.rmtree(copy.path)
    assert n_killed > 50


def killed_before(event: int, action: Callable[[], object]) -> bool:
    """Run something that dies before a call to the file system, counted from 0; return whether it did."""
    n_calls = 0

    def guard(function: Any) -> Any:
        def guarded(*args: Any, **kwargs: Any) -> Any:
            nonlocal n_calls
            n_calls += 1
            if n_calls > event:
                raise KilledError
            return function(*args, **kwargs)

        return guarded

    with pytest.MonkeyPatch.context() as patch:
        for module, name, function in ((os, "fsync", bool), (os, "replace", os.replace), (io, "open", io.open)):
            patch.setattr(module, name, guard(function))
        try:
            action()
        except KilledError:
            return True
    return False


# CheckpointStore.rewind


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    store = CheckpointStore(tmp_path, keep=5)
    for step in (10, 20, 30, 40):
        store.save(numbered(step), best=step in (10, 30))
    return store


def test_later_checkpoints_are_set_aside(store: CheckpointStore) -> None:
    store.rewind(20, best=10)
    assert (store.steps(), store.best_step) == ([10, 20], 10)
    assert sorted(path.name for path in store.directory.glob("*.abandoned")) == [
        "step-00000030.abandoned",
        "step-00000040.abandoned",
    ]
    store.clean()
    store.save(numbered(30))
    store.rewind(20, best=None)  # the same step is abandoned twice
    assert (store.steps(), store.best_step) == ([10, 20], None)
    assert store.load_newest(on_damaged=never).step == 20


def test_going_back_to_the_newest_changes_nothing(store: CheckpointStore) -> None:
    before = {path: path.stat().st_mtime_ns for path in store.directory.rglob("*")}
    store.rewind(40, best=30)
    assert {path: path.stat().st_mtime_ns for path in store.directory.rglob("*")} == before
