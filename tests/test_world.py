"""Processes exchange data, and none waits forever."""

import itertools
import time
from contextlib import nullcontext

import pytest
import torch

from tests import world_cases
from tests.forked import run_forked
from transformer_xl.errors import ConfigError
from transformer_xl.world import World, joined, parts


def test_all_hear_the_same() -> None:
    first, *others = run_forked("tests.world_cases:talk", 3)
    assert first["sum"] == pytest.approx([0.3, 3.0], rel=1e-15)
    assert first["any"] == [True, False]
    assert first["exchange"] == [{"rank": 0, "text": ""}, {"rank": 1, "text": "é"}, {"rank": 2, "text": "éé"}]
    assert first["from_first"] == 10
    assert first["rows"] == [[0.0] * 3] * 2 + [[1.0] * 3] * 2 + [[2.0] * 3] * 2
    assert first["added"] == [3.0, 3.0]
    for other in others:
        assert other == first | {"rows": None}


@pytest.mark.parametrize(
    ("rank", "kind", "told"),
    [
        (0, "ConfigError", ["ConfigError", "this is wrong here"]),
        (2, "ConfigError", ["TrainingError", "rank 2 of 3: this is wrong here"]),
        (0, "FileNotFoundError", ["FileNotFoundError", "[Errno 2] gone: 'x/y'"]),
        (2, "FileNotFoundError", ["TrainingError", "rank 2 of 3: 'x/y': gone; there is no directory 'x'"]),
    ],
)
def test_what_fails_in_one_process_fails_in_all_and_is_told_by_the_first(rank: int, kind: str, told: list[str]) -> None:
    first, *others = run_forked("tests.world_cases:fail_in", 3, rank, kind)
    assert first == [told, 3.0]
    assert [other[0][0] for other in others] == ["ToldElsewhereError"] * 2
    assert [other[1] for other in others] == [3.0] * 2


def test_processes_that_disagree_are_refused_by_name() -> None:
    first, other = run_forked("tests.world_cases:disagree", 2)
    assert first["type"] == "ConfigError" and first["error"].startswith("train.tgt_len is 5 in rank 1 and 4 in rank 0")
    assert other["type"] == "ToldElsewhereError"


@pytest.mark.parametrize("rank", [0, 1])
def test_a_dead_process_is_noticed(rank: int) -> None:
    outcomes = run_forked("tests.world_cases:die", 2, rank)
    assert outcomes[rank] == {"error": None, "status": 7 << 8}
    assert outcomes[1 - rank]["type"] == "LostContactError" and "--resume" in outcomes[1 - rank]["error"]


def test_a_silent_process_is_not_waited_for_for_ever() -> None:
    begin = time.monotonic()
    awake, _ = run_forked("tests.world_cases:silent", 2, 1, environment={"TXL_TIMEOUT_SECONDS": "3"})
    assert awake["type"] == "LostContactError"
    assert time.monotonic() - begin < 120


def test_one_alone_joins_nothing() -> None:
    world = world_cases.alone()
    assert world.alone and world.first and world.exchange([1]) == [[1]]
    with pytest.raises(ConfigError, match="wrong"), world.agreed():
        raise ConfigError("wrong")


def test_an_environment_without_numbers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "many")
    with pytest.raises(ConfigError, match="many"), joined():
        pass


@pytest.mark.parametrize(
    ("variables", "complaint"),
    [
        ({}, "WORLD_SIZE is 2 without RANK, MASTER_ADDR, MASTER_PORT; use torchrun"),
        ({"RANK": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}, "WORLD_SIZE is 2 and RANK 2"),
    ],
)
def test_half_an_environment_is_refused(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], complaint: str) -> None:
    for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"WORLD_SIZE": "2", **variables}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=complaint), joined():
        pass


@pytest.mark.parametrize(
    ("rank", "device", "fits"),
    [(1, "cuda", True), (1, "cuda:1", True), (1, "cuda:0", False), (2, "cuda", False), (2, "cpu", True)],
)
def test_each_process_has_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch, rank: int, device: str, fits: bool) -> None:
    monkeypatch.setenv("LOCAL_RANK", str(rank))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with nullcontext() if fits else pytest.raises(ConfigError, match=f"process {rank} cannot use .* has 2 GPUs"):
        World(rank, 3).check_device(torch.device(device))
    World().check_device(torch.device("cuda:1"))


@pytest.mark.parametrize(("n", "size"), [(0, 3), (2, 3), (7, 3), (9, 3), (5, 1)])
def test_parts_follow_each_other(n: int, size: int) -> None:
    found = [list(parts(range(n), World(rank, size))) for rank in range(size)]
    assert list(itertools.chain(*found)) == list(range(n))
    assert max(map(len, found)) - min(map(len, found)) <= 1
