"""The models that benchmarks/race.py trains are their libraries' own: logits, states, gradients.

Not part of the suite: `make rivals` builds their environment and runs this. Each is a run of pytest there, on peer_rivals.py.
"""

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


@pytest.mark.parametrize("rival", ["x-transformers", "x-transformers-shift", "xlstm", "mistral"])
def test_a_rival_is_its_library(rival: str) -> None:
    options = ["--noconftest", "-c", os.devnull, "--rootdir", str(ROOT), "-p", "no:cacheprovider", "-q", "-k", f"[{rival}]"]
    command = [str(PYTHON), "-m", "pytest", *options, str(Path(__file__).with_name("peer_rivals.py"))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout[-6000:]
    assert "9 passed" in done.stdout or "8 passed, 1 skipped" in done.stdout, done.stdout
