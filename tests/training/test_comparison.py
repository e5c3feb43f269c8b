"""Numbers of parameters side by side."""

import pytest
import torch

from tests.helpers import TINY
from transformer_xl.config.model import LstmConfig, TransformerXLConfig, VanillaConfig
from transformer_xl.config.recipes import load_recipe
from transformer_xl.config.run import RunConfig
from transformer_xl.errors import ConfigError
from transformer_xl.model.build import make_model
from transformer_xl.training.comparison import Comparison, compare_parameters, count_parameters

LSTM = LstmConfig(vocab_size=256, n_layer=1, d_model=8)


def run(compared_with: str | None) -> RunConfig:
    return RunConfig(name="mine", compared_with=compared_with, model=LSTM)


@pytest.mark.parametrize("config", [TransformerXLConfig(**TINY), VanillaConfig(vocab_size=9, max_len=7, n_layer=2), LSTM])
def test_counted_are_the_parameters(config: TransformerXLConfig | VanillaConfig | LstmConfig) -> None:
    assert count_parameters(config) == sum(p.numel() for p in make_model(config).parameters())


def test_both_have_the_same_vocabulary() -> None:
    comparison = compare_parameters(run("enwik8-base"), LSTM)
    own, other = count_parameters(LSTM), 41_055_436 + (256 - 204) * (512 + 1)
    assert comparison == Comparison("enwik8-base", own=own, other=other)
    assert str(comparison) == (
        f"compared with the recipe enwik8-base: {own:,} parameters to its {other:,} with the same vocabulary, -100.0 %"
    )
    assert "+25.0 %" in str(Comparison("other", own=50, other=40))


def test_counting_draws_no_random_numbers() -> None:
    before = torch.get_rng_state()
    compare_parameters(run("enwik8-base"), LSTM)
    assert torch.equal(before, torch.get_rng_state())


def test_nothing_is_compared_unless_it_is_asked_for() -> None:
    assert compare_parameters(run(None), LSTM) is None
    assert load_recipe("quickstart").compared_with is None


def test_clusters_of_a_larger_vocabulary() -> None:
    comparison = compare_parameters(run("wt103-base"), LSTM)
    assert comparison is not None
    assert comparison.other is None
    assert str(comparison).startswith("compared with the recipe wt103-base, which cannot have this vocabulary: cutoffs (20000,")


def test_a_name_that_no_recipe_has() -> None:
    with pytest.raises(ConfigError, match=r"^compared_with: unknown recipe 'enwik8-bas'; did you mean 'enwik8-base'\?$"):
        compare_parameters(run("enwik8-bas"), LSTM)
