"""Several processes train as one does: same losses, same bits when resumed, in any number of processes."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.forked import run_forked, run_jobs
from tests.training import parallel_cases
from transformer_xl.files import locked

Cases = dict[str, dict[str, dict[str, Any]]]
Jobs = dict[str, list[Any]]

XLNET = {"kind": "xlnet", "reuse_len": 6, "dropatt": 0.0}
HEAD = {"kind": "classification", "labels": ("a", "b", "c"), "tgt_len": 5, "gradient_segments": 2, "dropout": 0.0}
SPAN = {"kind": "span", "tgt_len": 20, "dropout": 0.0}
LONG: Cases = {"ddp": {}, "fsdp": {"train": {"parallel": "fsdp"}}}
SHORT: Cases = {
    "groups of lanes, several segments": {"train": {"accumulate": 2, "tbptt_segments": 2}},
    "fsdp, groups of lanes, several segments": {"train": {"accumulate": 2, "tbptt_segments": 2, "parallel": "fsdp"}},
    "fsdp, layers computed twice, an average": {"train": {"checkpoint_layers": True, "parallel": "fsdp", "average": "ema"}},
    "clusters, which some processes see no token of": {
        "model": {"cutoffs": [4, 10], "div_val": 2, "d_embed": 6},
        "train": {"reset_at_documents": True},
    },
    "fsdp, a shift": {"model": {"shift": "averages", "d_model": 8}, "train": {"parallel": "fsdp"}},
    "n-grams, sgd, clipped": {
        "model": {"ngram_rows": [40, 50]},
        "train": {"reset_at_documents": True},
        "optim": {"optimizer": "sgd", "clip": 0.01},
    },
    "fsdp, n-grams, muon": {"model": {"ngram_rows": [40, 50]}, "train": {"parallel": "fsdp"}, "optim": {"optimizer": "muon"}},
    "fsdp, lamb": {
        "train": {"parallel": "fsdp", "reset_at_documents": True},
        "optim": {"optimizer": "lamb"},
    },
    "fsdp, bf16": {"train": {"parallel": "fsdp"}, "precision": {"name": "bf16"}},
    "xlnet": {"model": XLNET, "train": {"tgt_len": 12, "accumulate": 2}},
    "fsdp, xlnet": {"model": XLNET, "train": {"tgt_len": 12, "parallel": "fsdp"}},
    "texts": {"model": {"head": HEAD}, "train": {"accumulate": 2}},
    "rows of documents": {"model": {"head": {**HEAD, "in_documents": True}}, "train": {"accumulate": 2}},
    "fsdp, texts": {"model": {"head": HEAD}, "train": {"parallel": "fsdp"}},
    "fsdp, places, by an xlnet": {"model": {**XLNET, "head": SPAN}, "train": {"parallel": "fsdp"}},
}
# where matrices are multiplied, or orthogonalized, in bf16, what was a difference of the last bit in fp32 is one of 0.004
BF16 = {"fsdp, n-grams, muon": 1e-4, "fsdp, bf16": 1e-3}
N_LONG, N_SHORT = 11, 3  # the tenth step begins the second epoch
N_SAVED = 6  # steps before a stop; the first averages are of the sixth, and 4 more end in the second epoch

DROPPING = {"dropout": 0.2, "dropatt": 0.1}
RESUMED = [
    {"model": DROPPING, "train": {"average": "ema", "accumulate": 2}, "optim": {"optimizer": "muon"}},
    {"model": DROPPING, "train": {"parallel": "fsdp", "average": "ema"}},
    {"model": DROPPING, "train": {"average": "ema"}, "bad": {}},
    {"model": {**DROPPING, "head": {**HEAD, "dropout": 0.2}}, "train": {"average": "ema"}},
    {"model": {**DROPPING, "head": {**HEAD, "in_documents": True}}},
]
SAVED = {how: {"train": {"parallel": how, "average": "swa", "average_start": 0.1}} for how in ("ddp", "fsdp")}
AVERAGED = {how: {"train": {"parallel": how, "average": "ema"}} for how in ("ddp", "fsdp")}
SCORED = [
    {"train": {"batch_size": 12}},
    {"train": {"batch_size": 12, "parallel": "fsdp"}},
    {"train": {"batch_size": 12}, "model": {"attention": "vaswani"}},
]
READ = {
    "four lanes": {"batch_size": 4, "tgt_len": 7},
    "one lane": {"batch_size": 1, "tgt_len": 32},
    "no memory": {"batch_size": 3, "mem_len": 0},
}
MODULE = "tests.training.parallel_cases"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where checkpoints lie, and results, which the processes of the suite share: one may steal these tests from another."""
    own = tmp_path_factory.getbasetemp()
    folder = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "parallel"
    folder.mkdir(exist_ok=True)
    return folder


def _once(path: Path, compute: Callable[[], Jobs]) -> Jobs:
    with locked(path.with_suffix(".lock"), on_busy=lambda: None):
        if not path.exists():
            path.write_text(json.dumps(compute()))
    return json.loads(path.read_text())


@pytest.fixture(scope="module")
def alone(folder: Path) -> Jobs:
    """What one process does."""
    return _once(folder / "alone.json", lambda: _alone(folder))


def _alone(folder: Path) -> Jobs:
    for how, changes in SAVED.items():
        parallel_cases.saved(str(folder / f"{how}, by one"), changes, N_SAVED)
    return {
        "long": parallel_cases.losses(list(LONG.values()), N_LONG),
        "short": parallel_cases.losses(list(SHORT.values()), N_SHORT),
        "averaged": parallel_cases.averaged(AVERAGED["ddp"], 5),
        "saved": parallel_cases.losses(list(SAVED.values()), N_SAVED + 4),
        **{read: parallel_cases.scores(SCORED, settings) for read, settings in READ.items()},
    }


@pytest.fixture(scope="module")
def by_two(folder: Path, alone: Jobs) -> Jobs:
    """What each of two processes returns."""
    jobs: dict[str, tuple[Any, ...]] = {
        "long": (f"{MODULE}:losses", list(LONG.values()), N_LONG),
        "short": (f"{MODULE}:losses", list(SHORT.values()), N_SHORT),
        "resumed": (f"{MODULE}:resumed", RESUMED, 2, 1),
        "groups": (f"{MODULE}:losses", [{"train": {"accumulate": 8}}], 1),
        "clocks": (f"{MODULE}:clocks", 4),
        "gathered": (f"{MODULE}:gathered", LONG["fsdp"]),
        **{f"{how}, averaged": (f"{MODULE}:averaged", changes, 5) for how, changes in AVERAGED.items()},
    }
    for how, changes in SAVED.items():
        jobs[f"{how}, after one"] = (f"{MODULE}:gone_on", str(folder / f"{how}, by one"), changes, 2, str(folder / how))
        jobs[f"{how}, saved"] = (f"{MODULE}:saved", str(folder / f"{how}, by two"), changes, N_SAVED)
    return _once(folder / "by_two.json", lambda: run_jobs(jobs | _scores(SCORED), 2))


@pytest.fixture(scope="module")
def by_four(folder: Path, by_two: Jobs) -> Jobs:
    """What each of four processes returns."""
    jobs: dict[str, tuple[Any, ...]] = {
        "long": (f"{MODULE}:losses", list(LONG.values()), N_SHORT),
        "resumed": (f"{MODULE}:resumed", RESUMED[:1], 1, 1),
    }
    for how, changes in SAVED.items():
        jobs[f"{how}, after two"] = (f"{MODULE}:gone_on", str(folder / f"{how}, by two"), changes, 4)
    return _once(folder / "by_four.json", lambda: run_jobs(jobs, 4))


@pytest.fixture(scope="module")
def by_three(folder: Path) -> Jobs:
    """What each of three processes returns, a number that divides no lanes of the trainer's."""
    jobs = {"losses": (f"{MODULE}:losses", [{}], 1), **_scores([SCORED[0], SCORED[2]])}
    return _once(folder / "by_three.json", lambda: run_jobs(jobs, 3))


def _scores(cases: list[Any]) -> dict[str, tuple[Any, ...]]:
    return {read: (f"{MODULE}:scores", cases, settings) for read, settings in READ.items()}


@pytest.mark.parametrize(("number", "case"), list(enumerate(LONG)))
def test_any_number_of_processes_has_the_losses_of_one(
    number: int, case: str, alone: Jobs, by_two: Jobs, by_four: Jobs
) -> None:
    expected = alone["long"][number]
    assert len(set(expected)) == N_LONG
    for own in by_two["long"]:
        assert own[number] == pytest.approx(expected, abs=1e-6, rel=0)
    for own in by_four["long"]:
        assert own[number] == pytest.approx(expected[:N_SHORT], abs=1e-6, rel=0)


@pytest.mark.parametrize(("number", "case"), list(enumerate(SHORT)))
def test_two_processes_have_the_losses_of_one(number: int, case: str, alone: Jobs, by_two: Jobs) -> None:
    first, second = (own[number] for own in by_two["short"])
    assert first == second
    assert first == pytest.approx(alone["short"][number], abs=BF16.get(case, 1e-6), rel=0)


@pytest.mark.parametrize(("world_size", "number"), [(2, 0), (2, 1), (2, 2), (2, 3), (4, 0)])
def test_a_resumed_run_has_the_bits_of_one_that_went_on(world_size: int, number: int, by_two: Jobs, by_four: Jobs) -> None:
    first, *others = (by_two if world_size == 2 else by_four)["resumed"]
    in_one_go, cut = first[number]
    assert f"random.{world_size - 1}.cpu" in in_one_go
    assert in_one_go["random.1.cpu"] != in_one_go["random.cpu"], "all drop the same"
    assert any(name.startswith("average.") for name in in_one_go)
    assert [name for name in in_one_go if in_one_go[name] != cut.get(name)] == []
    assert all(own[number] == [None, None] for own in others), "only the first process is given the state"


@pytest.mark.parametrize(("number", "how"), list(enumerate(SAVED)))
def test_any_number_of_processes_goes_on_with_what_another_saved(
    number: int, how: str, folder: Path, alone: Jobs, by_two: Jobs, by_four: Jobs
) -> None:
    expected = alone["saved"][number]
    by_one = parallel_cases.gone_on(str(folder / how), SAVED[how], 2)
    assert by_two[f"{how}, after one"][0] + by_one == pytest.approx(expected[N_SAVED:], abs=1e-6, rel=0)
    assert by_two[f"{how}, saved"][0] + by_four[f"{how}, after two"][0] == pytest.approx(expected, abs=1e-6, rel=0)


@pytest.mark.parametrize("read", READ)
def test_processes_score_together_what_one_scores_alone(read: str, alone: Jobs, by_two: Jobs, by_three: Jobs) -> None:
    for own in by_two[read]:
        for ours, theirs in zip(own, alone[read], strict=True):
            assert ours == pytest.approx(theirs, abs=2e-5, rel=1e-6)
    for own in by_three[read]:
        for ours, theirs in zip(own, [alone[read][0], alone[read][2]], strict=True):
            assert ours == pytest.approx(theirs, abs=2e-5, rel=1e-6)


def test_lanes_that_cannot_be_divided_are_refused(by_two: Jobs, by_three: Jobs) -> None:
    assert all("world_size (3) must divide train.batch_size (8)" in own["error"] for own in by_three["losses"])
    assert all("train.accumulate (8) must divide the 4 lanes of each of the 2" in own["error"] for own in by_two["groups"])


def test_all_count_the_seconds_of_the_first(by_two: Jobs) -> None:
    first, second = by_two["clocks"]
    assert first == second > 0


def test_only_the_first_holds_weights_in_parts_whole_for_a_checkpoint(by_two: Jobs) -> None:
    first, second = by_two["gathered"]
    assert len(first) > 10 and second == []


def test_a_death_is_noticed_by_an_optimizer_that_waits() -> None:
    muon_in_parts = {"train": {"parallel": "fsdp"}, "optim": {"optimizer": "muon"}}
    awake, dead = run_forked(f"{MODULE}:die_before_an_update", 2, 1, muon_in_parts)
    assert dead == {"error": None, "status": 7 << 8}
    assert awake["type"] == "LostContactError"


@pytest.mark.parametrize("how", AVERAGED)
def test_the_average_of_weights_in_parts_is_scored_too(how: str, alone: Jobs, by_two: Jobs) -> None:
    average, before, after = alone["averaged"]
    assert before == after and abs(average - before) > 0.1
    for own in by_two[f"{how}, averaged"]:
        assert own[1] == own[2]
        assert own == pytest.approx(alone["averaged"], rel=1e-6)
