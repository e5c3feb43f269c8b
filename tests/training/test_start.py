"""What a run that cannot start says, before anything of it is made."""

from pathlib import Path

import pytest

from tests.training.helpers import Lines, write_recipe
from transformer_xl.config.recipes import load_recipe
from transformer_xl.config.run import RunConfig
from transformer_xl.data.prepare import prepare
from transformer_xl.errors import ConfigError, TxlError
from transformer_xl.training import start
from transformer_xl.training.display import Display
from transformer_xl.training.run import train
from transformer_xl.training.start import check_start


def check_says_what_training_would(config: RunConfig, tmp_path: Path) -> None:
    with pytest.raises(TxlError) as checked:
        check_start(config, prepare(config.data, config.tokenizer))
    with pytest.raises(TxlError) as trained:
        train(config, out=tmp_path / "run")
    assert (type(checked.value), str(checked.value)) == (type(trained.value), str(trained.value))


@pytest.mark.parametrize(
    "overrides",
    [
        ("model.kind=vanilla", "eval.ext_len=1"),
        ("eval.clamp_len=3", "model.kind=lstm"),
        ("train.batch_size=4000", "train.tgt_len=50"),
        ("model.kind=lstm", "train.compile=true"),
        ("model.cutoffs=[300]",),
    ],
)
def test_a_check_says_what_training_would(overrides: tuple[str, ...], recipe: str, text: Path, tmp_path: Path) -> None:
    config = load_recipe(recipe, [f"data.corpus={text}", *overrides])
    check_says_what_training_would(config, tmp_path)


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


def test_a_check_finds_that_the_recipe_for_comparison_is_missing(recipe: str, text: Path, tmp_path: Path) -> None:
    config = load_recipe(recipe, [f"data.corpus={text}"]).model_copy(update={"compared_with": "nothing"})
    check_says_what_training_would(config, tmp_path)


def test_a_check_lets_pass_what_can_be_trained(recipe: str, text: Path) -> None:
    config = load_recipe(recipe, [f"data.corpus={text}"])
    check_start(config, prepare(config.data, config.tokenizer))


def test_a_new_run_has_no_more_threads_than_cores_and_a_resumed_one_may(
    recipe: str, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start, "cores", lambda: 2)
    config = load_recipe(recipe, [f"data.corpus={text}", "train.threads=3", "train.max_steps=1"])
    check_says_what_training_would(config, tmp_path)
    with pytest.raises(
        ConfigError, match=r"^train.threads \(3\) is more than the 2 cores .*; use train.threads=2, or leave it out$"
    ):
        train(config, out=tmp_path / "run")
    monkeypatch.setattr(start, "cores", lambda: 3)  # on a larger machine
    train(config, out=tmp_path / "run", display=Display(quiet=True))
    monkeypatch.setattr(start, "cores", lambda: 2)
    display = Lines()
    assert train(out=tmp_path / "run", resume=True, overrides=["train.max_steps=2"], display=display).step == 2
    assert any(line.startswith("train.threads (3) is more than the 2 cores") for line in display.warned)


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
