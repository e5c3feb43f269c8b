"""What a run that cannot start says, before anything of it is made."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers import TINY
from tests.training.helpers import write_recipe
from transformer_xl.checkpoint.run_directory import RunDirectory
from transformer_xl.config.model import LstmConfig, TransformerXLConfig, VanillaConfig
from transformer_xl.config.run import DataConfig, RunConfig, TokenizerConfig
from transformer_xl.data.prepare import prepare
from transformer_xl.errors import ConfigError
from transformer_xl.model.build import count_parameters, make_model
from transformer_xl.training.display import Display
from transformer_xl.training.run import comparison, train

LSTM = LstmConfig(vocab_size=256, n_layer=1, d_model=8)


def test_a_recipe_with_a_head_is_refused(text: Path, tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path / "tiny.toml")
    recipe.write_text(recipe.read_text() + '[model.head]\nkind = "regression"\n')
    with pytest.raises(ConfigError, match=r"^model.head is what txl finetune sets; leave it out, a model is trained on text w"):
        train(str(recipe), out=tmp_path / "run", corpus=str(text), display=Display(quiet=True))
    assert not (tmp_path / "run" / "config.json").exists()


@pytest.mark.parametrize(
    ("override", "match"),
    [
        (
            "model.mem_len=1000000000000",
            r"memory of 4 lanes [0-9.]+ TB\) takes .* are free; ask for less$",
        ),
        ("model.d_inner=1000000000000", r"^training \(weights and gradients [0-9.]+ TB, .* are free"),
        ("model.n_layer=1000000000", r"a model of n_layer 1,000,000,000 takes 50 TB, and .* are free"),
        ("model.d_inner=1000000000000000000", r"a model of these sizes cannot be built \(.*\); lower them"),
        ("model.d_inner=9000000000000000000", r"a model of these sizes cannot be built \(.*\); lower them"),
    ],
)
def test_sizes_beyond_the_machine_are_refused_before_anything_is_written(
    override: str, match: str, recipe: str, text: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=match):
        train(recipe, out=tmp_path / "run", corpus=str(text), overrides=[override])
    assert not (tmp_path / "run").exists()


def test_processes_compare_what_they_read(recipe: str, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And every setting; only the place of the text may differ."""
    shared: dict[str, Any] = {}
    monkeypatch.setattr("transformer_xl.world.World.check_same", lambda _, **values: shared.update(values))
    overrides = ["train.max_steps=1", f"data.directory={tmp_path}"]
    train(recipe, out=tmp_path / "run", corpus=str(text), overrides=overrides, display=Display(quiet=True))
    assert shared.keys() == {*RunConfig.model_fields, "text", "sizes", "vocabulary", "version", "device", "precision"}
    assert shared["data"].keys() == DataConfig.model_fields.keys() - {"directory"}
    prepared = prepare(RunDirectory(tmp_path / "run").config().data, TokenizerConfig())
    assert (shared["text"], shared["vocabulary"]) == (prepared.training_sha256, prepared.tokenizer.fingerprint)
    assert shared["sizes"] == {name: len(split.ids) for name, split in prepared.splits.items()}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.attention=shav"], r"^attention 'shav' is not registered \(did you mean 'shaw'\?\)"),
        (["model.attention=rotary", "train.attention=triton"], r"^attention backend 'triton' cannot run here: it computes"),
        (["model.kind=vanilla", "eval.ext_len=1"], r"together \(6\) must be at most model.max_len \(5\)"),
        (["model.kind=lstm", "eval.clamp_len=9"], r"^clamp_len \(9\) needs a memory of positions"),
    ],
)
def test_what_a_model_cannot_be_is_refused_before_a_text_is_prepared(
    overrides: list[str], message: str, recipe: str, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformer_xl.training.run.prepare", lambda *_: pytest.fail("the text is prepared"))
    with pytest.raises(ConfigError, match=message):
        train(recipe, out=tmp_path / "run", corpus=str(text), overrides=overrides, display=Display(quiet=True))
    assert not (tmp_path / "run").exists()


def comparison_with(recipe: str | None) -> str | None:
    return comparison(RunConfig(name="mine", compared_with=recipe, model=LSTM))


def test_what_is_compared_has_the_same_vocabulary() -> None:
    before, own, other = torch.get_rng_state(), count_parameters(LSTM), 41_055_436 + (256 - 204) * (512 + 1)
    assert comparison_with("enwik8-base") == (
        f"compared with the recipe enwik8-base: {own:,} parameters to its {other:,} with the same vocabulary, -100.0 %"
    )
    assert torch.equal(before, torch.get_rng_state())
    clusters = comparison_with("wt103-base")
    assert clusters and "recipe wt103-base, which cannot have this vocabulary: cutoffs (20000," in clusters
    assert comparison_with(None) is None


@pytest.mark.parametrize("config", [TransformerXLConfig(**TINY), VanillaConfig(vocab_size=9, max_len=7, n_layer=2), LSTM])
def test_counted_are_the_parameters(config: TransformerXLConfig | VanillaConfig | LstmConfig) -> None:
    assert count_parameters(config) == sum(p.numel() for p in make_model(config).parameters())
