"""What is drawn of an ablation, in which unit, and what is not."""

import json
from pathlib import Path
from typing import Any

import pytest

from transformer_xl import pictures
from transformer_xl.config.run import DataConfig, RunConfig
from transformer_xl.tools.ablation import Ablation
from transformer_xl.tools.ablation_pictures import draw_curves, draw_lengths
from transformer_xl.tools.budget import Pace
from transformer_xl.tools.variants import AblationPlan, Variant


class Drawn:
    """An ablation of two runs, and the axes of the picture that was made last."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.directory = directory
        self.axes: list[Any] = []

        def saved(figure: Any, path: Path, **_: Any) -> Path:
            self.axes = figure.axes
            path.touch()
            return path

        monkeypatch.setattr(pictures, "save_picture", saved)

    def ablation(self, *results: dict[str, Any], corpora: tuple[str, str] = ("text", "text"), **plan: Any) -> Ablation:
        """Two runs; of each its result, and one validation."""
        variants = [Variant(n, n, {}, RunConfig(name=n, data=DataConfig(corpus=c))) for n, c in zip("ab", corpora, strict=True)]
        ablation = Ablation(self.directory, AblationPlan(tuple(variants), **plan))
        ablation.begin()
        for place, (trial, more) in enumerate(zip(ablation.plan.trials, results, strict=True)):
            loss = 1.0 + place
            scores = [{"reading": {"length": n}, "score": {"loss": loss, "bpc": 2 * loss}} for n in (0, 4)]
            facts = {"run": trial.name, "variant": trial.variant.name, "done": True, "text": "test split", "scores": scores}
            used = {"parameters": 5, "steps": 9, "tokens": 9, "seconds": 1.0, "tokenizer": "a", "unit": "byte", "loses": ""}
            ablation.save_result(trial, facts | used | more)
            ablation.path_of(trial).mkdir(exist_ok=True)
            valid = {"kind": "valid", "step": 5, "loss": loss, "bpc": 2 * loss, "tokens": 9, "seconds": 1.0}
            (ablation.path_of(trial) / "metrics.jsonl").write_text(json.dumps(valid) + "\n")
        return ablation

    def losses(self) -> list[float]:
        """First loss of each line."""
        return [float(line.get_ydata()[0]) for line in self.axes[0].get_lines()]

    @property
    def unit(self) -> str:
        """What the axis says."""
        return self.axes[0].get_ylabel()


@pytest.fixture
def drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Drawn:
    return Drawn(tmp_path / "a", monkeypatch)


WORDS, BYTES = {"tokenizer": "w", "unit": "word", "loses": ""}, {"tokenizer": "b", "unit": "byte", "loses": ""}
LOSSY = WORDS | {"loses": "Words outside."}


def test_losses_of_one_vocabulary_are_per_token(drawn: Drawn) -> None:
    ablation = drawn.ablation(LOSSY, LOSSY)
    assert draw_lengths(ablation)
    assert (drawn.unit, drawn.losses()) == ("loss (nats per token)", [1.0, 2.0])
    assert draw_curves(ablation)
    assert (drawn.unit, drawn.losses()) == ("loss (nats per token)", [1.0, 2.0])


def test_losses_of_two_vocabularies_are_all_per_character(drawn: Drawn) -> None:
    ablation = drawn.ablation(WORDS, BYTES)
    assert draw_lengths(ablation)
    assert (drawn.unit, drawn.losses()) == ("loss (bits per character)", [2.0, 4.0])
    assert draw_curves(ablation)
    assert (drawn.unit, drawn.losses()) == ("loss (bits per character)", [2.0, 4.0])


def test_what_cannot_be_compared_is_not_drawn_and_what_was_drawn_of_it_goes(drawn: Drawn) -> None:
    ablation = drawn.ablation(WORDS, BYTES)
    made = [draw_lengths(ablation), draw_curves(ablation)]
    assert all(path and path.exists() for path in made)
    ablation = drawn.ablation(LOSSY, BYTES)
    assert (draw_lengths(ablation), draw_curves(ablation)) == (None, None)
    assert not any(path and path.exists() for path in made)


def test_curves_are_means_over_seeds_against_time_at_the_measured_pace_or_tokens(drawn: Drawn) -> None:
    ablation = drawn.ablation(BYTES, BYTES, BYTES, BYTES, seeds=2)
    assert draw_curves(ablation)
    assert drawn.losses() == [2.0, 3.0]  # of 1 and 3, and of 2 and 4
    (low, high) = drawn.axes[0].collections[0].get_paths()[0].get_extents().intervaly
    assert (low, high) == pytest.approx((2 - 2**0.5, 2 + 2**0.5))
    assert [list(line.get_xdata()) for line in drawn.axes[0].get_lines()] == [[9e-6], [9e-6]]
    ablation.save_paces({"a": Pace(6.0, 6.0), "b": Pace(12.0, 12.0)})
    assert draw_curves(ablation)
    assert [list(line.get_xdata()) for line in drawn.axes[0].get_lines()] == [[0.5], [1.0]]
    assert drawn.axes[0].get_xlabel() == "training time (minutes, at the measured pace)"


def test_a_variant_of_one_length_has_no_line(drawn: Drawn) -> None:
    once = {"scores": [{"reading": {"length": 4}, "score": {"loss": 9.0, "bpc": 9.0}}]}
    assert draw_lengths(drawn.ablation(BYTES, BYTES | once))
    assert drawn.losses() == [1.0]
