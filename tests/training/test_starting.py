"""What a run that cannot start says, before anything of it is made."""

from pathlib import Path

import pytest

from tests.training.helpers import write_recipe, write_text
from transformer_xl.config import RunConfig, load_recipe
from transformer_xl.data.prepare import prepare
from transformer_xl.errors import TxlError
from transformer_xl.training.run import train
from transformer_xl.training.starting import check_start


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
def test_a_check_says_what_training_would(overrides: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TXL_CACHE", str(tmp_path / "cache"))
    recipe, text = str(write_recipe(tmp_path / "tiny.toml")), str(write_text(tmp_path / "text.txt"))
    config = load_recipe(recipe, [f"data.corpus={text}", *overrides])
    check_says_what_training_would(config, tmp_path)


def test_a_check_finds_that_the_recipe_for_comparison_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TXL_CACHE", str(tmp_path / "cache"))
    recipe, text = str(write_recipe(tmp_path / "tiny.toml")), str(write_text(tmp_path / "text.txt"))
    config = load_recipe(recipe, [f"data.corpus={text}"]).model_copy(update={"compared_with": "nothing"})
    check_says_what_training_would(config, tmp_path)


def test_a_check_lets_pass_what_can_be_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TXL_CACHE", str(tmp_path / "cache"))
    recipe, text = str(write_recipe(tmp_path / "tiny.toml")), str(write_text(tmp_path / "text.txt"))
    config = load_recipe(recipe, [f"data.corpus={text}"])
    check_start(config, prepare(config.data, config.tokenizer))
