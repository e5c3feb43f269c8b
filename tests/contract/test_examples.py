"""The examples run, say what they lack, and learn what they are there to show."""

import importlib
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("missing", ["transformers", "accelerate"])
def test_an_example_without_its_packages_ends_in_one_line(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(SystemExit, match=r"^this example needs transformers 5 and accelerate .*; in a clone: pip install -e "):
        runpy.run_path(str(ROOT / "examples" / "huggingface.py"))


@pytest.mark.parametrize(
    ("command", "told"),
    [
        ("agents.py", "CartPole needs gymnasium: pip install -e '.[agents]'"),
        ("agents.py --seeds 0", "--seeds must be at least 1"),
        ("delay.py --steps 0", "--steps must be at least 1"),
    ],
)
def test_an_example_that_cannot_begin_says_so_on_one_line(
    command: str, told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    monkeypatch.setattr(sys, "argv", command.split())
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(ROOT / "examples" / sys.argv[0]), run_name="__main__")
    assert told in f"{end.value} {capsys.readouterr().err}"


def test_the_example_of_agents_runs_with_each_memory(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["agents.py", "--task", "recall", "--steps", "2048"])
    runpy.run_path(str(ROOT / "examples" / "agents.py"), run_name="__main__")
    head, *told = capsys.readouterr().out.splitlines()
    assert head.startswith("mean return in each tenth") and len(told) == 3
    for line, memory in zip(told, ("transformer-xl", "gru", "none"), strict=True):
        assert re.fullmatch(rf"recall, {memory:14}, seed 0:( +(0\.\d|-)){{2}}  \(\d+ s\)", line), line  # of two windows


@pytest.mark.parametrize("ends", [False, True])
def test_an_agent_whose_episode_is_cut_counts_on_what_would_have_followed(ends: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step gives 1; every third is the last of its episode, which ended, or was cut by a time limit."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    agents, learned = importlib.import_module("agents"), []
    last = np.full((agents.N_ENV, 1), 0.5)

    class Clock:
        n_action, width, first, at = 2, 1, np.zeros((agents.N_ENV, 1)), 0

        def step(self, actions: np.ndarray) -> Any:
            self.at += 1
            over, no = np.full(agents.N_ENV, self.at % 3 == 0), np.zeros(agents.N_ENV, bool)
            return self.first, np.ones(agents.N_ENV), over if ends else no, no if ends else over, last

    def loss(value: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        learned.append((value.detach(), target))
        return (value - target).square().mean()

    class Watched(agents.Agent):
        def forward(self, seen: torch.Tensor, *rest: Any) -> Any:
            if seen.any():
                beyond.append(super().forward(seen, *rest)[1][0, 0].item())
            return super().forward(seen, *rest)

    beyond: list[float] = []
    for name, value in {"GAMMA": 0.5, "LAMBDA": 1.0, "Agent": Watched}.items():
        monkeypatch.setattr(agents, name, value)
    monkeypatch.setattr(agents.F, "mse_loss", loss)
    agents.train("none", lambda seed: Clock(), seed=0, n_step=1024)
    (value, target), n_left = learned[0], [3 - t % 3 for t in range(agents.WINDOW - 1)]
    after = 0.0 if ends else beyond[0]
    assert len(beyond) == (0 if ends else 21) and after != float(value[0, 0])
    expected = [2 - 0.5 ** (n - 1) + 0.5**n * after for n in n_left] + [1 + 0.5 * float(value[0, 0])]  # of the window's end
    torch.testing.assert_close(target, torch.tensor([expected] * len(target)), rtol=1e-5, atol=1e-5)
    del sys.modules["agents"]


def test_the_example_of_a_supervised_stream_needs_its_memory(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["delay.py", "--steps", "400"])
    runpy.run_path(str(ROOT / "examples" / "delay.py"), run_name="__main__")
    said = re.search(r"with memory (0\.\d+), without (0\.\d+)", capsys.readouterr().out)
    assert said and float(said[1]) < 0.005 and float(said[2]) > 0.3
