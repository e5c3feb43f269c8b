"""What the suite leaves out as too slow is run all the same, all of it."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_marker_is_left_out_of_the_suite_and_run_with_the_slow_tests() -> None:
    options = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    markers = {marker.partition(":")[0] for marker in options["markers"]}
    markers.remove("long")  # of tests that have another marker, too
    (slow,) = re.findall(r"-m '.*\(([^)]+)\)' tests$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert set(slow.split(" or ")) == markers | {"hypothesis"}  # which Hypothesis marks its tests with
    assert set(re.findall(r"not (\w+)", options["addopts"])) == markers
    assert "make test-slow" in (ROOT / ".ci" / "run").read_text()
