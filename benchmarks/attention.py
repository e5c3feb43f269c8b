"""How long attention takes by each backend, forward alone and with its gradients, and what memory it adds.

Attention alone, between the projections, with random numbers and a full memory. All backends take turns. First each is compared
with the equation; what cannot run here, or does not agree, is named and not timed.
"""

import argparse
import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent))

import torch
from common.harness import command, mb, parse, run, seconds_of, take_turns
from torch import Tensor

from transformer_xl.console import say, table
from transformer_xl.errors import ConfigError
from transformer_xl.kernels.choose import Attention, choose_backend
from transformer_xl.kernels.equation import Positions, relative_attention

BACKENDS = ("equation", "matmul", "sdpa", "triton")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
TOLERANCE = {"fp32": 1e-4, "bf16": 4e-2, "fp16": 1e-2}
"""Of the largest number of the equation's, which computes in fp32; TF32 is switched off."""
N_CALL = 10


class Shape(NamedTuple):
    """B rows, T queries, M positions of memory, N heads of width H."""

    B: int
    T: int
    M: int
    N: int
    H: int


SHAPES = {
    "512": Shape(8, 512, 512, 8, 64),
    "1024": Shape(4, 1024, 1024, 16, 64),
    "evaluate": Shape(4, 128, 3800, 8, 64),
    "E": Shape(32, 512, 512, 8, 64),
    "W": Shape(16, 384, 384, 16, 64),
    "N": Shape(32, 192, 192, 8, 64),
    "tiny": Shape(2, 9, 7, 2, 8),
}


class Inputs(NamedTuple):
    """What attention is given."""

    q: Tensor
    k: Tensor
    v: Tensor
    r: Tensor
    u: Tensor
    w: Tensor
    first: Tensor
    grad: Tensor

    @classmethod
    def draw(cls, shape: Shape, device: torch.device, dtype: torch.dtype) -> "Inputs":
        torch.manual_seed(0)
        B, T, M, N, H = shape
        sizes = ((B, T, N, H), (B, M + T, N, H), (B, M + T, N, H), (M + T, N, H), (N, H), (N, H))
        drawn = (torch.randn(size, device=device).to(dtype).requires_grad_() for size in sizes)
        grad = torch.randn(B, T, N, H, device=device).to(dtype)
        return cls(*drawn, first=torch.zeros(1, T, dtype=torch.int64, device=device), grad=grad)

    def leaves(self) -> list[Tensor]:
        return [self.q, self.k, self.v, self.r, self.u, self.w]

    def without_gradients(self) -> "Inputs":
        return Inputs(*(x.detach() for x in self))

    def run(self, attend: Attention) -> Tensor:
        return attend(self.q, self.k, self.v, Positions(self.u, self.w, self.r), first_BT=self.first)

    def run_back(self, attend: Attention) -> list[Tensor]:
        out = self.run(attend)
        return [out, *torch.autograd.grad(out, self.leaves(), self.grad)]


def measure(name: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure all backends at one shape in all types."""
    return [compare(name, dtype, torch.device(options.device), options) for dtype in options.dtypes]


def compare(shape_name: str, dtype_name: str, device: torch.device, options: argparse.Namespace) -> dict[str, Any]:
    """Measure all backends at one shape in one type, print a table, and return all figures."""
    shape, dtype = SHAPES[shape_name], DTYPES[dtype_name]
    inputs = Inputs.draw(shape, device, dtype)
    exact = Inputs(*(x.detach().float().requires_grad_(x.requires_grad) if x.is_floating_point() else x for x in inputs))
    expected = exact.run_back(relative_attention)
    found: dict[str, dict[str, Any]] = {}
    runs: dict[tuple[str, str], Any] = {}
    for name in options.backends:
        say(f"{shape_name}, {dtype_name}: {name} against the equation")
        found[name] = {}
        for way in ("forward", "with gradients"):
            run = prepare(name, inputs, device, dtype, expected, TOLERANCE[dtype_name], way)
            if isinstance(run, str):
                found[name][way] = run
            else:
                runs[name, way] = run
                found[name][way] = {"bytes": added_bytes(run, device)}
    runs = {key: captured(run, device) for key, run in runs.items()}
    n_call = N_CALL if device.type == "cuda" else 1  # that a captured run makes
    turns: dict[str, Callable[[int], float]] = {
        f"{name}, {way}": lambda _, run=run: seconds_of(run, 1, device) / n_call for (name, way), run in runs.items()
    }
    seconds = take_turns(turns, options.repeats, f"{shape_name}, {dtype_name}, seconds:")
    for name, way in runs:
        found[name][way]["seconds"] = seconds[f"{name}, {way}"]
    print(f"\n{shape_name}: {shape}, {dtype_name}\n")
    print(table([["", "forward ms", "MB", "with gradients ms", "MB"], *[line(name, own) for name, own in found.items()]]))
    for remark in dict.fromkeys(
        f"{name}: {why}" for name, own in found.items() for why in own.values() if isinstance(why, str)
    ):
        print(remark)
    return {"shape": shape_name, "dtype": dtype_name, "found": found}


def prepare(
    name: str, inputs: Inputs, device: torch.device, dtype: torch.dtype, expected: list[Tensor], tolerance: float, way: str
) -> Any:
    """Return a function that attends and was compared with the equation; or why there is none."""
    try:
        if way == "forward":
            with torch.no_grad():
                attend = choose_backend(name, device, dtype=dtype)
                plain = inputs.without_gradients()
                results = [plain.run(attend)]
            run = torch.no_grad()(lambda: plain.run(attend))
        else:
            attend = choose_backend(name, device, dtype=dtype)
            results = inputs.run_back(attend)
            run = partial(inputs.run_back, attend)
    except ConfigError as error:
        return str(error)
    except torch.OutOfMemoryError:
        return "no memory"
    for actual, right in zip(results, expected, strict=False):
        error = ((actual.float() - right).abs().max() / right.abs().max()).item()
        if not error <= tolerance:
            return f"differs from the equation by {error:.2g}"
    return run


def captured(run: Any, device: torch.device) -> Any:
    """Return what makes ten calls on a GPU without launching their kernels one by one, for these take longer than they run."""
    if device.type != "cuda":
        return run
    beside, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    beside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside):
        run()
    torch.cuda.current_stream().wait_stream(beside)
    try:
        with torch.cuda.graph(graph):
            for _ in range(N_CALL):
                run()
    except RuntimeError:  # it waits for the device
        return lambda: [run() for _ in range(N_CALL)]
    return graph.replay


def added_bytes(run: Any, device: torch.device) -> int | None:
    """Return the most that a call holds beside its inputs; a GPU tells."""
    if device.type != "cuda":
        return None
    run()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    run()
    return torch.cuda.max_memory_allocated(device) - before


def line(name: str, own: dict[str, Any]) -> list[str]:
    cells = [name]
    for way in ("forward", "with gradients"):
        if isinstance(own[way], str):
            cells += ["-", ""]
        else:
            cells += [f"{statistics.median(own[way]['seconds']) * 1e3:.2f}", mb(own[way]["bytes"])]
    return cells


if __name__ == "__main__":
    parser = command(__doc__, repeats=7, device="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--shape", choices=SHAPES, nargs="+", default=["512", "1024", "evaluate"], help="default: the first three"
    )
    parser.add_argument("--backends", choices=BACKENDS, nargs="+", default=list(BACKENDS), help="default: all")
    parser.add_argument("--dtypes", choices=DTYPES, nargs="+", default=["fp32", "bf16"])
    options = parse(parser)
    run(options, measure, options.shape)
