"""The models that benchmarks/race.py trains are their libraries' own: logits, states, gradients.

Not part of the suite: `make rivals` builds their environment and runs this; pytest runs there, too, on peer_rivals.py.
"""

import json
import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PYTHON = Path(os.environ.get("TXL_RIVALS_PYTHON", ROOT / ".venv-rivals" / "bin" / "python"))

pytestmark = [
    pytest.mark.parity,
    pytest.mark.skipif(not PYTHON.exists(), reason=f"{PYTHON} is missing; `make rivals` makes this environment"),
]


def test_each_rival_is_its_library() -> None:
    options = ["--noconftest", "-c", os.devnull, "--rootdir", str(ROOT), "-p", "no:cacheprovider", "-q"]
    command = [str(PYTHON), "-m", "pytest", *options, str(Path(__file__).with_name("peer_rivals.py"))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout[-6000:]
    # nine each for xLSTM and Mistral; x-transformers (twice), like ours, sees a text as it is cut, so one is not about it; one
    # for the LSTM, which is our own
    assert "35 passed, 2 skipped" in done.stdout, done.stdout


def test_all_of_them_race(tmp_path: Path) -> None:
    """Whatever their speed: a step or two each, at full size."""
    (tmp_path / "text.txt").write_text("".join(f"{i} is {i * i}; " for i in range(3000)))
    sides = ["ours", "lstm", "lstm-ngrams", "x-transformers", "xlstm", "mistral"]
    choices = tmp_path / "choices.json"
    choices.write_text(json.dumps({"shakespeare": {"0.002": {side: {} for side in sides}}}))
    text = f"shakespeare={tmp_path / 'text.txt'}"
    what = ["--out", str(tmp_path / "out"), "--text", "shakespeare", "--corpus", text, "--minutes", "0.002"]
    how = ["--parts", "race", "table", "--choices", str(choices), "--seeds", "1", "--rounds", "1", "--tokens", "300", "--set"]
    how += ["train.batch_size=2", "eval.max_tokens=100", "eval.batch_size=2"]
    command = [str(PYTHON), str(ROOT / "benchmarks" / "race.py"), *what, *how]
    done = subprocess.run(command, capture_output=True, text=True, timeout=290, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr[-4000:]
    assert "this is no race at equal size" not in done.stderr
    rows = json.loads((tmp_path / "out" / "race.json").read_text())["rows"]
    assert {row["side"] for row in rows} == set(sides)
    assert max(row["parameters"] for row in rows) < 1.02 * min(row["parameters"] for row in rows)
