"""What a run was made with is written down at each start, and cannot stop a run; deterministic mode lasts as long as a run."""

import json
import os
from pathlib import Path

import pytest
import torch

import transformer_xl
from tests.training.helpers import Lines
from transformer_xl.config.run import TrainConfig
from transformer_xl.training.environment import computing_with, last_threads, read_environment, write_environment
from transformer_xl.training.run import train

CPU = torch.device("cpu")


def write(directory: Path, *, step: int = 0) -> None:
    write_environment(directory, seed=5, device=CPU, step=step)


def test_one_entry_for_each_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.setenv("SECRET", "x")
    write(tmp_path)
    write(tmp_path, step=40)
    first, second = json.loads((tmp_path / "environment.json").read_text())
    assert (first["step"], second["step"], first["seed"]) == (0, 40, 5)
    assert torch.__version__.startswith(first["versions"]["torch"])  # an installed version may lack its "+cu128"
    assert first["versions"]["transformer_xl"] == transformer_xl.__version__
    assert first["machine"]["threads"] == torch.get_num_threads()
    assert first["machine"]["device"] == "cpu"
    assert first["command"]
    assert first["variables"]["OMP_NUM_THREADS"] == "7" and "SECRET" not in first["variables"]
    assert first["time"].endswith("+00:00")


@pytest.mark.parametrize(("content", "n_entry"), [(b"[", 0), (b"{}", 0), (b"\xff", 0), (b"[{}]", 1), (b'[{"machine": 3}]', 1)])
def test_a_damaged_file_begins_anew(tmp_path: Path, content: bytes, n_entry: int) -> None:
    (tmp_path / "environment.json").write_bytes(content)
    assert len(read_environment(tmp_path)) == n_entry
    assert last_threads(tmp_path) is None
    for _ in range(2):
        write(tmp_path)
    assert len(read_environment(tmp_path)) == n_entry + 2


def test_deterministic_mode_lasts_as_long_as_its_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    with pytest.raises(KeyError), computing_with(TrainConfig(max_steps=1, deterministic=True)):
        assert torch.are_deterministic_algorithms_enabled()
        raise KeyError("whatever happens")
    assert not torch.are_deterministic_algorithms_enabled()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"
    with computing_with(TrainConfig(max_steps=1)):
        assert not torch.are_deterministic_algorithms_enabled()


def test_a_run_computes_with_its_threads_and_says_where_their_number_changes(
    recipe: str, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Numbers alone: tiny tensors take long on two threads."""
    now, shown, used = [1], [], []
    monkeypatch.setattr(torch, "get_num_threads", lambda: now[-1])
    monkeypatch.setattr(torch, "set_num_threads", now.append)
    for threads, n_step, is_over in (("2", 1, False), ("none", 2, False), ("none", 3, False), ("2", 3, True)):
        settings = (f"train.threads={threads}", f"train.max_steps={n_step}", "train.sample_tokens=0", "eval.max_tokens=20")
        display = Lines({} if is_over else {n_step: lambda: used.append(torch.get_num_threads())})
        train(recipe, out=tmp_path, corpus=str(text), overrides=settings, display=display, resume=n_step > 1)
        shown.append([line for line in display.said if line.startswith("threads:")])
    assert (used, now[-1]) == ([2, 1, 1], 1)
    assert shown == [[], ["threads: 2 until here, 1 from now on; --set train.threads=2 rounds as before"], [], []]
