"""What compilers make of the fused kernels: registers, spills and shared memory, for GPUs that need not be here.

Spilled registers are kept in memory and slow a kernel down; `flash_kernels.tiles_of` takes tiles that spill little. Needs
Triton.
"""

import argparse
import inspect
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from transformer_xl.console import say, table

COUNTS, STRIDES = ("T", "S", "C", "B", "part"), ("row", "head", "t", "s")
COLUMNS = ("kernel", "dtype", "tile", "registers", "spilled bytes", "shared bytes")


def main() -> None:
    options = parse_arguments()
    try:
        import triton  # noqa: F401
    except ImportError:
        print("skipped: Triton is not installed; pip install triton")
        return
    from transformer_xl.kernels import flash_kernels as fused_kernels
    from transformer_xl.kernels.flash_kernels import Tile, tiles_of

    named = [getattr(fused_kernels, name) for name in dir(fused_kernels) if name.endswith("_kernel")]
    kernels = [kernel for kernel in named if "Q" in kernel.arg_names]  # those that work in tiles of queries
    rows = []
    for dtype in options.dtypes:
        chosen = tiles_of(
            options.d_head, {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[dtype], drops=options.dropout
        )
        given = [Tile(*map(int, tile.split("x"))) for tile in options.tiles]
        for kernel in kernels:
            name = kernel.fn.__name__
            own = chosen.keys if "key" in name else chosen.queries
            own = chosen.forward if "forward" in name else own
            for tile in given or [own]:
                row = measure(kernel, dtype, options.d_head, tile, options.capability, drops=options.dropout)
                say(", ".join(row))
                rows.append(row)
    print(table([COLUMNS, *rows]))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtypes", nargs="+", choices=["fp32", "bf16", "fp16"], default=["bf16", "fp32"])
    parser.add_argument("--tiles", nargs="+", default=[], metavar="QxKxWARPSxSTAGES", help="(default: those of `tiles_of`)")
    parser.add_argument("--d-head", type=int, default=64, help="width of heads (default: %(default)s)")
    parser.add_argument(
        "--capability", type=int, default=90, help="of the GPU: 80 is an A100, 90 an H100 (default: %(default)s)"
    )
    parser.add_argument("--dropout", action="store_true", help="with dropout of attention weights")
    return parser.parse_args()


def measure(kernel: Any, dtype: str, d_head: int, tile: Any, capability: int, *, drops: bool) -> list[str]:
    """Compile a kernel, assemble it, and read what the assembler says."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import get_ptxas
    from triton.compiler import ASTSource

    constants = {"H": d_head, "P": max(16, triton.next_power_of_2(d_head)), "Q": tile.queries, "K": tile.keys}
    constants |= {"DROPS": drops, "PRECISION": "ieee"}
    constants = {k: v for k, v in constants.items() if k in inspect.signature(kernel.fn).parameters}
    signature = {name: kind_of(name, dtype, constants) for name in inspect.signature(kernel.fn).parameters}
    target = GPUTarget("cuda", capability, 32)
    # what Triton sees when it is called: tensors and strides of whole vectors, so that a load takes eight numbers at once
    aligned = [
        i for i, name in enumerate(signature) if name not in (*constants, "dropatt") and name.split("_")[-1] not in COUNTS
    ]
    attributes = {(i,): [["tt.divisibility", 16]] for i in aligned}
    source = ASTSource(kernel, signature, constexprs=constants, attrs=attributes)
    compiled = triton.compile(
        source, target=target, options={"num_warps": tile.warps, "num_stages": tile.stages, "maxnreg": tile.registers}
    )
    with tempfile.TemporaryDirectory() as folder:
        assembly = Path(folder, "kernel.ptx")
        assembly.write_text(compiled.asm["ptx"])
        architecture = re.search(r"\.target (\w+)", compiled.asm["ptx"])
        assert architecture is not None
        command = [get_ptxas(capability).path, "-v", f"-arch={architecture[1]}", assembly, "-o", Path(folder, "kernel.cubin")]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    registers, spilled = re.search(r"Used (\d+) registers", said), re.search(r"(\d+) bytes spill stores", said)
    assert registers is not None
    assert spilled is not None
    name = kernel.fn.__name__.removesuffix("_kernel")
    return [name, dtype, "x".join(map(str, tile)), registers[1], spilled[1], f"{compiled.metadata.shared:,}"]


def kind_of(name: str, dtype: str, constants: dict[str, Any]) -> str:
    """Return the type of a kernel's argument, as Triton writes it."""
    if name in constants:
        return "constexpr"
    kinds = {"seed_at": "*i64", "dropatt": "fp32"}
    kinds |= {"first": "*i32"} | dict.fromkeys(("log_sum", "mean", "grad_biases"), "*fp32")
    if name in kinds:
        return kinds[name]
    return "i32" if name.split("_")[-1] in (*COUNTS, *STRIDES) else f"*{dtype}"


if __name__ == "__main__":
    main()
