"""A hundred damaged files of each format, or a thousand: an error of one line or a well-formed result, and nothing else."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(("n_child", "n_inside"), [(5, 100), pytest.param(20, 1000, marks=pytest.mark.slow)])
def test_damage_is_found_or_harmless(n_child, n_inside):
    result = subprocess.run(
        [sys.executable, "-m", "tests.conversion.readers.fuzz_child", str(n_child), str(n_inside)],
        env={"PYTHONPATH": f"{ROOT}:{ROOT / 'src'}", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    report = json.loads(result.stdout)
    assert len(report) == 8
    for kind, found in report.items():
        n = n_inside if kind.endswith("inside") else n_child
        assert not found["wrong"], (kind, found["wrong"][:5])
        # without checksums, numbers may change unnoticed
        assert found["accepted"] < n / 2, (kind, found["accepted"])
        assert found["accepted"] > 0 or n < 20, kind
