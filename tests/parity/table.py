"""Print how far converted models are from their peers, per format and variant: `python -m tests.parity.table`.

The figures are those that the parity tests compare with their tolerances: the largest difference, relative to the largest
magnitude of a tensor (of gradients whatever it is, else at least 1), over all segments, layers and parameters. TensorFlow's
graph was computed in float64 only.
"""

import tempfile
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from unittest import mock

from torch import Tensor

from tests.parity import reading, test_pytorch, test_tensorflow

COLUMNS = {"nats": "nats", "log_probs": "log-probabilities", "memory": "memory", "gradient": "gradients"}
Largest = dict[str, float]


def main() -> None:
    rows: dict[tuple[str, str], dict[str, Largest]] = defaultdict(dict)
    for peer, path in test_pytorch.EXPECTED:
        precision = "fp64" if path.stem.endswith("64") else "fp32"
        check = partial(test_pytorch.test_converted_model_computes_the_same, peer, path)
        rows[peer, path.parent.name][precision] = largest_differences(check)
    for golden in test_tensorflow.GOLDENS:
        check = partial(test_tensorflow.test_converted_model_computes_what_the_original_does, golden, "auto")
        rows["tensorflow", golden.name]["fp64"] = largest_differences(check)
    print("| format | variant | fp32: " + " | ".join(COLUMNS.values()) + " | fp64: all |")
    print("|---|---|" + "---|" * (len(COLUMNS) + 1))
    for (peer, variant), found in rows.items():
        fp32 = [_cell(found.get("fp32", {}).get(column)) for column in COLUMNS.values()]
        fp64 = _cell(max(found["fp64"].values()) if "fp64" in found else None)
        print(f"| {peer} | {variant.replace('_', ' ')} | " + " | ".join([*fp32, fp64]) + " |")


def largest_differences(check: Callable[[Path], object]) -> Largest:
    """Run a parity test, and return the largest of the differences that it compares, by what they are of."""
    largest: Largest = defaultdict(float)

    def record(name: str, actual: Tensor, expected: Tensor, tolerance: float, *, least: float = 1.0) -> None:
        assert actual.shape == expected.shape, name
        scale = max(least, expected.abs().max().item()) if expected.numel() else 1.0
        difference = (actual - expected).abs().max().item() / scale if expected.numel() else 0.0
        column = COLUMNS[name.split()[0]]
        largest[column] = max(largest[column], difference)

    with (
        mock.patch.object(reading, "assert_close", record),
        mock.patch.object(test_tensorflow, "assert_close", record),
        tempfile.TemporaryDirectory() as folder,
    ):
        check(Path(folder))
    return largest


def _cell(value: float | None) -> str:
    return "" if value is None else f"{value:.0e}"


if __name__ == "__main__":
    main()
