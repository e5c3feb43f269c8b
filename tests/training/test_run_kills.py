"""A run that was killed again and again, at random instants, ends as the run that was left alone."""

from pathlib import Path

import pytest

from tests.forked import run_forked
from tests.training.helpers import differing, run_bits, write_recipe, write_text
from tests.training.kill_child import WARNINGS
from transformer_xl.checkpoint.run_directory import RunDirectory

SETTINGS = {
    "adamw, several segments per update": ["optim.optimizer=adamw", "train.tbptt_segments=2", "optim.schedule=inv_sqrt"],
    "adam, averages of all steps": ["optim.optimizer=adam", "train.average=ema", "model.pre_lnorm=true"],
    "sgd, a plateau, averages of the last steps": ["optim.optimizer=sgd", "optim.schedule=plateau", "train.average=swa"],
    "lamb, groups of lanes": ["optim.optimizer=lamb", "train.accumulate=2", "model.untie_r=true"],
    "muon, bf16": ["train.precision=bf16", "train.checkpoint_layers=true"],
    "every dropout, locked": [
        *("model.locked_dropout=true", "model.dropemb=0.2", "model.dropweight=0.1", "model.dropatt=0.1", "model.dropqkv=0.1")
    ],
    "segments of random length": ["train.varlen=true", "train.deterministic=true"],
    "documents shuffled, memory reset": ["data.documents=lines", "data.shuffle=documents", "train.reset_at_documents=true"],
    "vanilla, intermediate losses": ["model.kind=vanilla", "model.intermediate_losses=true", "model.n_target=2"],
    "lstm": ["model.kind=lstm", "model.n_layer=2", "model.dropweight=0.2"],
}


def train_through_kills(folder: Path, n_steps: int, n_kills: int, overrides: list[str]) -> list[int]:
    """Check that a run ends with the same bits after kills; return the step that each kill found."""
    write_text(folder / "text.txt")
    write_recipe(folder / "tiny.toml")
    child = "tests.training.kill_child:train_through_kills"
    (steps,) = run_forked(child, 1, str(folder), n_steps, n_kills, 0, overrides, timeout=1200)
    assert isinstance(steps, list), steps
    warned = (folder / WARNINGS).read_text().splitlines()
    assert all(line.endswith("yet: starting from the beginning") for line in warned), warned  # killed before the first one
    assert len(steps) == n_kills
    assert steps == sorted(steps), "a kill lost what had been saved"
    print(f"{n_kills} kills, {len(set(steps))} of them at another step; {sum(step < n_steps for step in steps)} before the end")
    assert len(set(steps)) > n_kills // 3, "few kills fell where anything had been saved"
    assert sum(step < n_steps for step in steps) >= n_kills // 2, "the run had ended before most of the kills"
    assert differing(run_bits(folder / "killed"), run_bits(folder / "whole")) == []
    strays = [path.name for path in (folder / "killed").rglob("*") if path.suffix in (".tmp", ".old", ".abandoned")]
    assert strays == []
    store = RunDirectory(folder / "killed").store()
    assert set(store.steps()) == {*store.steps()[-2:], store.best_step}
    return steps


FULL_SIZE = pytest.param(4000, 200, id="200", marks=[pytest.mark.faults, pytest.mark.long, pytest.mark.timeout(1200)])


@pytest.mark.parametrize(("n_steps", "n_kills"), [pytest.param(200, 4, id="4"), FULL_SIZE])
def test_a_killed_run_ends_as_one_left_alone(n_steps: int, n_kills: int, tmp_path: Path) -> None:
    train_through_kills(tmp_path, n_steps, n_kills, [])


@pytest.mark.faults
@pytest.mark.timeout(300)
@pytest.mark.parametrize("settings", SETTINGS)
def test_in_ten_settings(settings: str, tmp_path: Path) -> None:
    train_through_kills(tmp_path, 120, 6, SETTINGS[settings])
