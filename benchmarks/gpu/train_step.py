"""How long a training step takes on an accelerator, by each backend, eager, compiled and as a CUDA graph.

A step is one of a `Trainer`: forward, backward and an update (clipping, Adam), with dropout and a full memory. Its operations
are compared with the rate of large matrix products, measured in each round; with --peer, NVIDIA's model takes steps at the same
shape in the same run. All take turns, in an order that alternates. First, gradients without dropout are compared; what cannot
run here, or does not agree, is named and not timed. Where there is no such device, this says so and ends.
"""

import argparse
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from common.harness import at_least, command, facts, mb, parse, ratios, run, seconds_of, spread, take_turns
from common.learner import (
    N_WARM_UP,
    Learner,
    OurLearner,
    OurStep,
    PeerStep,
    gradient_difference,
    gradients_of_one,
    make_ours,
)
from common.nvidia import PeerLearner, load_peer
from common.recipe_shapes import RECIPE_SHAPES, RecipeShape
from torch import nn

from transformer_xl.console import say, table
from transformer_xl.errors import ConfigError
from transformer_xl.kernels.device import Precision
from transformer_xl.model.transformer_xl import TransformerXL
from transformer_xl.tools.hardware import matmul_rate

Step = OurStep | PeerStep
BACKENDS = ("matmul", "sdpa", "triton")
WAYS = ("eager", "compiled", "graph", "compiled graph")
DTYPES: dict[Precision, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
PEER = "NVIDIA's, eager"
N_COMPARED_ROWS = 2  # in fp32 and by `matmul`, all of them may need more memory than there is
TOLERANCE: dict[Precision, float] = {"fp32": 1e-2, "bf16": 0.1, "fp16": 5e-2}
"""Of the norm of all gradients together, by `matmul` in fp32; TF32 is switched off."""


def sizes(options: argparse.Namespace) -> dict[str, int]:
    """Return the sizes that were asked for."""
    asked = {"rows": options.rows, "tgt_len": options.tgt_len, "mem_len": options.mem_len}
    return {name: size for name, size in asked.items() if size is not None}


def measure(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Measure one shape, print a table, and return all figures."""
    shape = replace(RECIPE_SHAPES[name], **sizes(options))
    ours = make_ours(shape.config(), torch.device(options.device))
    sides = Candidates(shape, ours, options.peer_kind, options)
    found = {precision: sides.measure(precision) for precision in options.precisions}
    print(summary(name, shape, found))
    return {"rows": shape.rows, "tgt_len": shape.T, "mem_len": ours.mem_len, "precisions": found}


class Candidates:
    """All that take steps at one shape.

    Args:
        shape: what is read.
        ours: our model.
        peer: class of the peer's; None: it takes no part.
        options: of the command line.
    """

    def __init__(
        self, shape: RecipeShape, ours: TransformerXL, peer: type[nn.Module] | None, options: argparse.Namespace
    ) -> None:
        self._shape, self._ours, self._options, self._device = shape, ours, options, ours.device
        self._segments = shape.segments(ours.device)
        self._compared = self._segments[0][:N_COMPARED_ROWS]
        self._exact = gradients_of_one(OurLearner(ours, len(self._compared), "matmul"), self._compared, "fp32")
        self._peer = None if peer is None else PeerLearner(peer, ours, shape.rows, shape.T)
        self._weights = {name: parameter.detach().clone() for name, parameter in ours.named_parameters()}

    def measure(self, precision: Precision) -> dict[str, Any]:
        """Compare, then time in one precision."""
        torch.compiler.reset()  # what was compiled for another precision counts towards a limit
        steps: dict[str, Step] = {}
        found: dict[str, dict[str, Any]] = {}
        for label, why_not, make in self._candidates(precision):
            say(f"{self._shape.recipe}, {precision}: preparing {label}")
            step, own = (why_not, {}) if why_not else self._prepared(make)
            if isinstance(step, str):
                found[label] = {"failure": step}
            else:
                found[label], steps[label] = own, step
        turns: dict[str, Callable[[int], float]] = {
            label: lambda _, step=step: seconds_of(step, self._options.steps, self._device) for label, step in steps.items()
        }
        turns["matmul"] = lambda _: matmul_rate(self._device, DTYPES[precision])
        rounds = take_turns(turns, self._options.repeats, f"{self._shape.recipe}, {precision}:")
        for label in steps:
            found[label]["seconds"] = rounds[label]
        return {"matmul_rate": rounds["matmul"], "flops": self._shape.flops(), "sides": found}

    def _candidates(self, precision: Precision) -> Iterator[tuple[str, str | None, Callable[[], Step]]]:
        """Yield a name, why it cannot be, and what makes it; the peer first, and graphs last, for they keep their memory."""
        if self._peer is not None:
            peer = self._peer
            yield PEER, self._differs(peer, precision), lambda: PeerStep(peer, precision, self._segments)
        differ = {b: self._differs(OurLearner(self._ours, len(self._compared), b), precision) for b in self._options.backends}
        for way in self._options.ways:
            for backend in self._options.backends:
                yield f"{backend}, {way}", differ[backend], lambda b=backend, w=way: self._our_step(b, w, precision)

    def _our_step(self, backend: str, way: str, precision: Precision) -> Step:
        how = {"compiled": way.startswith("compiled"), "graph": way.endswith("graph")}
        return OurStep(self._ours, self._segments, precision, backend=backend, **how)

    def _differs(self, learner: Learner, precision: Precision) -> str | None:
        """Say by how much gradients differ from those of the first weights, if it is too much, or why there are none."""
        with torch.no_grad():  # steps in another precision changed them
            for name, parameter in self._ours.named_parameters():
                parameter.copy_(self._weights[name])
        try:
            if isinstance(learner, PeerLearner):
                learner.begin(self._ours, len(self._compared))
            loss, gradients = gradients_of_one(learner, self._compared, precision)
            if isinstance(learner, PeerLearner):
                learner.begin(self._ours, self._shape.rows)
        except (ConfigError, RuntimeError) as error:
            return reason(error)
        difference = gradient_difference(gradients, self._exact[1])
        say(f"  loss {loss:.4f} (exact {self._exact[0]:.4f}), gradients differ by {difference:.1e} of their norm")
        return None if difference <= TOLERANCE[precision] else f"gradients differ by {difference:.2g} of their norm"

    def _prepared(self, make: Callable[[], Step]) -> tuple[Step | str, dict[str, Any]]:
        """Return what takes steps, warmed up, with the memory that it needs; or why it cannot."""
        on_gpu = self._device.type == "cuda"
        held = allocated(self._device)
        try:
            if on_gpu:
                torch.cuda.reset_peak_memory_stats(self._device)
            step = make()
            for _ in range(N_WARM_UP):
                step()
            peak = torch.cuda.max_memory_allocated(self._device) if on_gpu else None
            return step, {"bytes": None if peak is None else peak - held}
        except (ConfigError, RuntimeError) as error:
            why = reason(error)
        if on_gpu:
            torch.cuda.empty_cache()
        return why, {}


def reason(error: Exception) -> str:
    """Return one line."""
    if isinstance(error, torch.OutOfMemoryError):
        return "no memory"
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def summary(name: str, shape: RecipeShape, found: dict[str, Any]) -> str:
    """Lay out what was measured at one shape."""
    about = {
        f"shape {name}": str(shape),
        "step": "forward, backward, clipping, Adam; all alternate",
        "targets": f"of matmul {at_least(shape.flops_target) or '-'}, times NVIDIA's {at_least(shape.peer_target) or '-'}",
    } | {
        f"matmul {precision}": f"{statistics.median(own['matmul_rate']) / 1e12:.3g} TFLOP/s (median), "
        f"a step takes {own['flops'] / 1e12:.3g} TFLOP"
        for precision, own in found.items()
    }
    header = ["", "ms a step", "min-max ms", "tokens/s", "peak MB", "TFLOP/s", "of matmul", "times NVIDIA's", "min-max"]
    rows = [
        [f"{precision} {label}", *cells(side, own, shape)]
        for precision, own in found.items()
        for label, side in own["sides"].items()
    ]
    failures: dict[str, list[str]] = {}
    for precision, own in found.items():
        for label, side in own["sides"].items():
            if "failure" in side:
                failures.setdefault(side["failure"], []).append(f"{precision} {label}")
    remarks = [f"not timed: {'; '.join(labels)}: {why}" for why, labels in failures.items()]
    return "\n".join([f"\n{facts(about)}\n\n{table([header, *rows])}", *remarks])


def cells(side: dict[str, Any], own: dict[str, Any], shape: RecipeShape) -> list[str]:
    if "failure" in side:
        return ["-", *[""] * 7]
    median = statistics.median(side["seconds"])
    peer = own["sides"].get(PEER, {}).get("seconds")
    return [
        *spread([seconds * 1e3 for seconds in side["seconds"]]),
        f"{shape.n_token / median:,.0f}",
        mb(side["bytes"]),
        f"{own['flops'] / median / 1e12:.3g}",
        f"{own['flops'] / median / statistics.median(own['matmul_rate']):.0%}",
        *(spread(ratios(peer, side["seconds"])) if peer else ["", ""]),
    ]


if __name__ == "__main__":
    parser = command(__doc__, repeats=5, device="cuda")
    parser.add_argument("--shape", choices=RECIPE_SHAPES, nargs="+", default=["E", "W", "N"], help="default: E, W and N")
    parser.add_argument("--rows", type=int, help="B (default: the shape's)")
    parser.add_argument("--tgt-len", type=int, help="T (default: the shape's)")
    parser.add_argument("--mem-len", type=int, help="M (default: the shape's)")
    parser.add_argument("--backends", choices=BACKENDS, nargs="+", default=list(BACKENDS), help="default: all")
    parser.add_argument("--ways", choices=WAYS, nargs="+", default=list(WAYS), help="default: all")
    parser.add_argument("--precisions", choices=DTYPES, nargs="+", default=list(DTYPES), help="default: all")
    parser.add_argument("--peer", type=Path, metavar="FILE", help="mem_transformer.py of NVIDIA/DeepLearningExamples")
    parser.add_argument("--steps", type=int, default=10, help="in a turn (default: %(default)s)")
    options = parse(parser)
    try:
        options.peer_kind = load_peer(options.peer) if options.peer else None
    except (ImportError, OSError) as error:
        sys.exit(f"error: --peer {options.peer}: {error}; it is mem_transformer.py, with utils/ beside it")
    run(options, measure, options.shape, peer=f"{options.peer}, in the same process")
