"""What the table of an ablation compares, and what it leaves apart."""

from pathlib import Path
from typing import Any

import pytest

from transformer_xl.config.run import DataConfig, RunConfig
from transformer_xl.tools.ablation import Ablation
from transformer_xl.tools.table import as_text, make_table
from transformer_xl.tools.variants import AblationPlan, Variant


def variant(name: str, **data: Any) -> Variant:
    return Variant(name, name, {}, RunConfig(name=name, data=DataConfig(**data)))


def result(of: Variant, seed: int, loss: float, tokenizer: str = "a", **more: Any) -> dict[str, Any]:
    score = {"reading": {"length": 0}, "score": {"loss": loss, "bpc": 2 * loss}}
    facts = {
        "variant": of.name,
        "done": True,
        "text": "test split",
        "tokenizer": tokenizer,
        "unit": "byte",
        "parameters": 5,
        "loses": "",
    }
    return facts | more | {"run": f"{of.name}-seed{seed}", "steps": 1, "tokens": 1, "seconds": 1.0, "scores": [score]}


def table(directory: Path, variants: list[Variant], tokenizers: tuple[str, str] = ("a", "a"), **plan: Any) -> Any:
    ablation = Ablation(directory, AblationPlan(tuple(variants), seeds=2, **plan))
    ablation.begin()
    for trial in ablation.plan.trials:
        place = [own.name for own in variants].index(trial.variant.name)
        found = result(trial.variant, trial.seed, 1.0 + place + 0.2 * trial.seed, tokenizers[place])
        ablation.save_result(trial, found)
    return make_table(ablation)


def test_a_difference_has_the_error_of_both_means(tmp_path: Path) -> None:
    found = table(tmp_path, [variant("one"), variant("two")])
    assert found.compared == "loss"
    assert found.rows[1].difference == pytest.approx(1.0)
    assert found.rows[1].difference_error == pytest.approx((2 * 0.02 / 2) ** 0.5)  # variances of 0.02, two runs each


def test_the_best_length_is_that_of_the_least_mean(tmp_path: Path) -> None:
    table(tmp_path, [variant("one"), variant("two")])
    ablation = Ablation.open(tmp_path)
    for trial, losses in zip(ablation.plan.trials[::2], ({2: 3.0, 4: 1.0, 8: 2.0}, {2: 3.0, 4: 4.0, 8: 2.5}), strict=True):
        scores = [{"reading": {"length": n}, "score": {"loss": loss, "bpc": loss}} for n, loss in losses.items()]
        ablation.save_result(trial, result(trial.variant, trial.seed, 1.0) | {"scores": scores})
    first, second = make_table(ablation).rows
    assert first.loss and first.best_loss
    assert (first.loss.mean, first.best_length, first.best_loss.mean) == (3.0, 8, 2.25)
    assert second.best_length is None


def test_a_seed_that_failed_is_reported(tmp_path: Path) -> None:
    variants = [variant("one"), variant("two")]
    assert "Failed" not in as_text(table(tmp_path, variants))
    ablation = Ablation.open(tmp_path)
    ablation.save_result(ablation.plan.trials[3], {"run": "two-seed1", "variant": "two", "parameters": 5, "failed": "diverged"})
    found = make_table(ablation)
    assert (found.rows[1].loss.n, found.rows[1].failed) == (1, 1)  # pyright: ignore[reportOptionalMemberAccess]
    assert "Failed, and left out of the means: 1 of two." in as_text(found)


def test_other_tokens_are_compared_by_characters_of_the_whole_split_alone(tmp_path: Path) -> None:
    variants = [variant("one"), variant("two")]
    whole = table(tmp_path / "whole", variants, ("a", "b"))
    assert (whole.compared, whole.rows[1].difference) == ("bpc", pytest.approx(2.0))
    part = table(tmp_path / "part", variants, ("a", "b"), tokens=90)
    assert (part.compared, part.rows[1].difference) == (None, None)
    assert table(tmp_path / "same", variants, tokens=90).compared == "loss"


def test_other_tokens_are_not_compared_where_some_of_them_leave_text_out(tmp_path: Path) -> None:
    _, two = variants = [variant("one"), variant("two")]
    assert "difference: from the first variant" in as_text(table(tmp_path, variants, ("a", "b")))
    ablation = Ablation.open(tmp_path)
    ablation.save_result(ablation.plan.trials[3], result(two, 1, 1.0, "b", loses="Words outside."))
    found = make_table(ablation)
    assert (found.compared, found.rows[1].difference) == (None, None)
    assert "not given: vocabularies differ, and not all of the text is predicted by two, so that bits" in as_text(found)
    for trial in ablation.plan.trials:  # all with one vocabulary
        ablation.save_result(trial, result(trial.variant, trial.seed, 1.0, loses="Words outside."))
    assert make_table(ablation).compared == "loss"


def test_parts_that_are_cut_otherwise_are_not_compared(tmp_path: Path) -> None:
    found = table(tmp_path, [variant("one"), variant("two", split=(0.8, 0.1, 0.1))])
    assert (found.compared, found.rows[1].difference) == (None, None)
