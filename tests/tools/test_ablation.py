"""One run of an ablation belongs to one process at a time."""

from pathlib import Path

from transformer_xl.config.run import RunConfig
from transformer_xl.tools.ablation import RESULTS, Ablation
from transformer_xl.tools.variants import AblationPlan, Variant

PLAN = AblationPlan((Variant("a", "a", {}, RunConfig()),), seeds=2)


def test_a_run_is_claimed_by_one_at_a_time(tmp_path: Path) -> None:
    mine, others = Ablation(tmp_path, PLAN), Ablation(tmp_path, PLAN)
    (tmp_path / RESULTS).mkdir()
    first, second = PLAN.trials
    with mine.claimed(first) as own, others.claimed(first) as same, others.claimed(second) as another:
        assert (own, same, another) == (True, False, True)
    with others.claimed(first) as later:
        assert later
