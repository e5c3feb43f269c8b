"""The benchmarks run. What they measure is not looked at: that would be a test of the machine."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
PEER_PYTHON = Path(os.environ.get("TXL_PEER_PYTHON", ROOT / ".venv-peer" / "bin" / "python"))


def run(script: str, *arguments: object, status: int = 0) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCHMARKS / script), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == status, done.stderr
    return done


@pytest.mark.parametrize("script", ["train_step.py", "memory.py", "prepare_memory.py", "convert.py", "large_vocabulary.py"])
def test_help(script):
    assert "usage" in run(script, "--help").stdout


def test_readme_names_every_benchmark():
    readme = (BENCHMARKS / "README.md").read_text(encoding="utf-8")
    for script in BENCHMARKS.glob("*.py"):
        assert f"## {script.name}" in readme


def test_memory(tmp_path):
    picture = tmp_path / "memory.png"
    done = run("memory.py", "--tiny", "--segments", 1, "--mem-lens", 0, 8, "--lengths", 2, "--plot", picture)
    assert done.stdout.count("above idle MB") == 4
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_prepare_memory(tmp_path):
    done = run("prepare_memory.py", "--mb", 1, "--kind", "byte", "word", "--directory", tmp_path)
    kinds = [line.split()[0] for line in done.stdout.splitlines()[-2:]]
    assert kinds == ["byte", "word"]
    assert not list(tmp_path.iterdir()), "the temporary directory is left"


def test_convert(tmp_path):
    done = run("convert.py", "--tiny", "--format", "bin", "safetensors", "--directory", tmp_path)
    assert [line.split()[0] for line in done.stdout.splitlines()[-2:]] == ["bin", "safetensors"]
    assert not list(tmp_path.iterdir()), "the temporary directory is left"


def test_large_vocabulary():
    point = json.loads(run("large_vocabulary.py", "--point", "adaptive, div_val 4", "score", 64, "chunks").stdout)
    assert point.keys() == {"seconds", "above_mb"}


def test_train_step_without_peer_says_how_to_get_it(tmp_path):
    done = run("train_step.py", "--peer-python", tmp_path / "python", status=2)
    last = done.stderr.splitlines()[-1]
    assert str(tmp_path / "python") in last
    assert "make bench" in last


def test_train_step_has_parity_and_times(tmp_path):
    if not PEER_PYTHON.exists():
        pytest.skip(f"the peer's environment '{PEER_PYTHON}' does not exist; `make bench` sets it up")
    figures = tmp_path / "figures.json"
    run("train_step.py", "--shape", "tiny", "--repeats", 2, "--peer-python", PEER_PYTHON, "--json", figures)
    result = json.loads(figures.read_text())["shapes"]["tiny"]
    assert set(result["seconds"]) == set(result["memory_mb"]) == {"peer", "ours fp32", "ours auto"}
    assert all(len(times) == 2 and min(times) > 0 for times in result["seconds"].values())
    assert result["parity"]["ours fp32"]["loss"] < 1e-5
    assert result["parity"]["ours fp32"]["gradient"] < 1e-4
