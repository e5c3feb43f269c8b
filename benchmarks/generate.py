"""How fast `txl generate` writes by default, call after call, as a share of the best that `txl bench decode` finds.

Each round is three commands in turn, so that whatever slows the machine slows all of them: `generate` as it is; `generate
--compile no`; and `bench decode`, whose faster code counts. The default begins without compiled code on the disk.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common.machine import describe
from common.report import facts

from transformer_xl.console import say, table

WROTE = re.compile(r"wrote [\d,]+ tokens? in ([\d.]+) s .*?; (.*); seed")


def main() -> None:
    options = parse_arguments()
    print(facts({**describe(), "run": options.run, "precision": options.precision, "tokens": str(options.tokens)}))
    rows = [["call", "chosen", "tokens/s", "eager", "bench decode", "of bench", "of eager", "seconds in all", "eager"]]
    with tempfile.TemporaryDirectory() as folder:
        for call in range(1, options.calls + 1):
            rate, chosen, seconds = generate(options, Path(folder) / "default")
            eager, _, eager_seconds = generate(options, Path(folder) / "default", "--compile", "no")
            best = bench(options, Path(folder) / "bench")
            figures = [f"{x:,.0f}" for x in (rate, eager, best)]
            shares = [f"{rate / best:.0%}", f"{rate / eager:.2f}"]
            rows.append([str(call), chosen, *figures, *shares, f"{seconds:.1f}", f"{eager_seconds:.1f}"])
            say("  ".join(rows[-1]))
    print(f"\n{table(rows, n_left=2)}")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", help="directory of a run")
    parser.add_argument("--tokens", type=int, default=2000, help="of each text (default: %(default)s)")
    parser.add_argument("--calls", type=int, default=5, help="of each command (default: %(default)s)")
    parser.add_argument("--precision", choices=["fp32", "bf16", "int8"], default="fp32")
    parser.add_argument("--no-compile", action="store_true", help="of bench decode")
    return parser.parse_args()


def generate(options: argparse.Namespace, cache: Path, *arguments: str) -> tuple[float, str, float]:
    """Write a text; return tokens per second, what was chosen, and the seconds of the whole command."""
    begin = time.perf_counter()
    done = txl(options, cache, "generate", "--tokens", str(options.tokens), "--seed", "1", *arguments)
    seconds = time.perf_counter() - begin
    found = WROTE.search(done.stderr)
    if not found:
        raise SystemExit(f"no figures in {done.stderr!r}")
    return options.tokens / max(float(found[1]), 0.005), found[2].partition(" (")[0], seconds


def bench(options: argparse.Namespace, cache: Path) -> float:
    """Return the best tokens per second of `txl bench decode`."""
    code = ["--no-compile"] if options.no_compile else []
    found: dict[str, Any] = json.loads(txl(options, cache, "bench", "decode", "--tokens", "300", "--json", *code).stdout)
    return max(figures["tokens_per_second"] for figures in found["figures"])


def txl(options: argparse.Namespace, cache: Path, command: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    parts = [command, *arguments[:1], options.run, *arguments[1:]] if command == "bench" else [command, options.run, *arguments]
    whole = [sys.executable, "-m", "transformer_xl", *parts, "--precision", options.precision]
    environment = os.environ | {"TXL_CACHE": str(cache), "TORCHINDUCTOR_CACHE_DIR": str(cache / "compiled")}
    done = subprocess.run(whole, capture_output=True, text=True, env=environment, stdin=subprocess.DEVNULL)
    if done.returncode:
        raise SystemExit(done.stderr)
    return done


if __name__ == "__main__":
    main()
