"""What `txl plan` says about loss, for the runs that the law is about."""

import pytest

from tests.cost.test_plan import ROUND
from transformer_xl.config import load_recipe
from transformer_xl.cost.display import plan_table
from transformer_xl.cost.law import ENWIK8, expected
from transformer_xl.cost.plan import make_plan

BUDGET = "train.max_tokens=3_000_000"


def test_more_of_anything_helps_ever_less() -> None:
    for what in range(3):
        losses = []
        for factor in (1, 2, 4):
            numbers = [300_000, 1_000_000, 50]
            numbers[what] *= factor
            losses.append(ENWIK8.loss(*numbers))
        assert losses[0] > losses[1] > losses[2]
        assert losses[0] - losses[1] > losses[1] - losses[2]


def test_the_law_is_near_models_that_were_trained() -> None:
    """Losses that benchmarks/law.py found: the largest model of its grid, and one that the fit did not see.

    Twice what it is off by, as a rule.
    """
    assert ENWIK8.loss(906_000, 3_201_024, 64) == pytest.approx(1.5559, abs=0.02)
    assert ENWIK8.loss(906_000, 3_201_024, 0) == pytest.approx(1.6445, abs=0.02)
    assert ENWIK8.loss(223_296, 2_301_952, 32) == pytest.approx(1.6552, abs=0.02)


def test_a_plan_says_what_memory_pays() -> None:
    plan = make_plan(load_recipe("enwik8-byte", ["train.max_minutes=none", BUDGET]), ROUND)
    found = plan.expected
    assert found is not None and not found.is_far
    n_of_layers = 906_000
    assert found.loss == pytest.approx(ENWIK8.loss(n_of_layers, 3e6, 64), abs=0.01)
    assert found.loss < found.without_memory_in_as_much_time < found.without_memory
    share = plan.flops.memory / plan.flops.needed
    assert found.without_memory_in_as_much_time == pytest.approx(ENWIK8.loss(n_of_layers, 3e6 / (1 - share), 0), abs=0.01)
    assert "expected loss" in plan_table(plan) and f"{found.without_memory:.2f} nats" in plan_table(plan)
    assert plan.as_dict()["expected"]["loss"] == found.loss


@pytest.mark.parametrize(
    "changes",
    [
        ["data.corpus=text8"],
        ["tokenizer.kind=bpe"],
        ["model.shift=none"],
        ["model.ngram_rows=[]"],
        ["model.ngram_rows=[4096]"],
        ["model.n_layer=2"],
        ["model.mem_len=[16,16,64]"],
        ["model.mem_len=2000"],
        ["optim.optimizer=adamw"],
        ["train.max_tokens=100_000"],
        ["model.d_inner=20_000"],
    ],
)
def test_of_other_runs_it_says_nothing(changes: list[str]) -> None:
    config = load_recipe("enwik8-byte", ["train.max_minutes=none", BUDGET, *changes])
    assert expected(config, 906_000, 3e6, 0.1) is None or changes[0].startswith(("train.", "model.d_inner"))
    if not getattr(config.model, "mem_lens", None):  # such a model has no plan
        plan = make_plan(config, ROUND)
        assert plan.expected is None and plan.as_dict()["expected"] is None
        assert "expected" not in plan_table(plan)


def test_without_memory_there_is_one_loss() -> None:
    plan = make_plan(load_recipe("enwik8-byte", ["train.max_minutes=none", BUDGET, "model.mem_len=0"]), ROUND)
    assert plan.expected is not None
    assert plan.expected.loss == plan.expected.without_memory == plan.expected.without_memory_in_as_much_time
    assert "expected loss" in plan_table(plan) and "  without memory" not in plan_table(plan)


def test_a_budget_in_epochs_has_no_loss() -> None:
    config = load_recipe("enwik8-byte", [BUDGET])
    assert expected(config, 906_000, None, 0.1) is None
    assert expected(config, 906_000, 3e6, 0.1) is not None
