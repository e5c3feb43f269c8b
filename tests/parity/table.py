"""Print how far converted models are from their peers, per format and variant: `python -m tests.parity.table`.

The figures are those that the parity tests compare with their tolerances: the largest difference, relative to the largest
magnitude of a tensor (of gradients whatever it is, else at least 1), over all segments, layers and parameters. TensorFlow's
graph was computed in float64 only. XLNet's peers computed in float64, and both precisions are compared with that.
"""

import tempfile
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor

from tests.parity import reading, test_pytorch, test_tensorflow, test_xlnet
from tests.parity.reading import Convert

COLUMNS = {"nats": "nats", "log_probs": "scores", "logits": "scores", "memory": "memory", "gradient": "gradients"}
XLNETS = {
    "xlnet": test_xlnet.test_models_of_hugging_face,
    "xlnet_heads": test_xlnet.test_fine_tuned_models_of_hugging_face,
    "xlnet_tensorflow": test_xlnet.test_models_of_the_authors,
}
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
    for peer, test in XLNETS.items():
        for folder in reading.goldens(peer):
            for precision, dtype in {"fp32": torch.float32, "fp64": torch.float64}.items():
                rows[peer.replace("_", ", "), folder.name][precision] = largest_differences(partial(test, folder, dtype))
    columns = list(dict.fromkeys(COLUMNS.values()))
    print("| format | variant | fp32: " + " | ".join(columns) + " | fp64: all |")
    print("|---|---|" + "---|" * (len(columns) + 1))
    for (peer, variant), found in rows.items():
        fp32 = [_cell(found.get("fp32", {}).get(column)) for column in columns]
        fp64 = _cell(max(found["fp64"].values()) if "fp64" in found else None)
        print(f"| {peer} | {variant.replace('_', ' ')} | " + " | ".join([*fp32, fp64]) + " |")


def largest_differences(check: Callable[[Convert], object]) -> Largest:
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
        check(reading.converting(Path(folder)))
    return largest


def _cell(value: float | None) -> str:
    return "" if value is None else f"{value:.0e}"


if __name__ == "__main__":
    main()
