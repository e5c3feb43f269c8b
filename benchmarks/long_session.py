"""One session of many tokens: resident memory and time per token while it goes on, and the bytes of its memory by the formula.

A decoder with random weights reads random tokens, one by one (compiled, where a C++ compiler is found) or in chunks. Neither
memory nor the time of a token may grow with what was read. Times are medians, so that a busy machine does not look like growth.
"""

import argparse
import statistics
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from common.harness import command, facts, parse, run
from common.machine import resident_mb

from transformer_xl.config.model import TransformerXLConfig
from transformer_xl.console import say, table
from transformer_xl.generation.decoder import Decoder
from transformer_xl.model.transformer_xl import TransformerXL

VOCAB_SIZE = 256
N_REPORT = 10


@dataclass(frozen=True)
class Sizes:
    """Sizes of the model."""

    n_layer: int
    d_model: int
    n_head: int
    mem_len: int


SIZES = {
    "middle": Sizes(n_layer=4, d_model=192, n_head=4, mem_len=512),
    "paper": Sizes(n_layer=12, d_model=512, n_head=8, mem_len=2100),
    "tiny": Sizes(n_layer=1, d_model=16, n_head=2, mem_len=8),
}


def measure(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Read a session; print a table with a row for every tenth of it, and return the figures."""
    torch.manual_seed(0)
    decoder = open_decoder(SIZES[name], options)
    print(facts(about(decoder, SIZES[name], options)))
    ids, points = torch.randint(VOCAB_SIZE, (1, options.tokens)), []
    for stretch in ids.chunk(N_REPORT, dim=1):
        seconds = []
        for piece in stretch.split(options.chunk, dim=1):
            begin = time.perf_counter()
            decoder.feed(piece)
            seconds.append((time.perf_counter() - begin) / piece.shape[1])
        n_read = stretch.shape[1] + (points[-1][0] if points else 0)
        points.append((n_read, resident_mb(), statistics.median(seconds)))
        say(f"{n_read:,} tokens")
    rows = [[f"{n_read:,}", f"{resident:,.1f}", f"{seconds * 1e6:,.0f}"] for n_read, resident, seconds in points]
    print(f"\n{table([['tokens read', 'resident MB', 'µs per token'], *rows])}")
    n_read, resident, seconds = np.array(points[1:]).T  # in the first stretch the allocator warms up
    print(f"\nresident memory after the first stretch: {np.polyfit(n_read, resident, 1)[0] * 1e6:+.2f} MB per million tokens")
    print(f"time per token, last stretch to second: {seconds[-1] / seconds[0]:.2f}")
    return {"points": points}


def make_model(sizes: Sizes) -> TransformerXL:
    """Return a model with random weights that reads bytes."""
    config = TransformerXLConfig(
        vocab_size=VOCAB_SIZE,
        n_layer=sizes.n_layer,
        d_model=sizes.d_model,
        n_head=sizes.n_head,
        d_head=sizes.d_model // sizes.n_head,
        d_inner=4 * sizes.d_model,
        mem_len=sizes.mem_len,
    )
    return TransformerXL(config)


def open_decoder(sizes: Sizes, options: argparse.Namespace) -> Decoder:
    compile = options.chunk == 1 and not options.no_compile
    return Decoder(
        make_model(sizes),
        precision=options.precision,
        compile="auto" if compile else False,
        expected_tokens=options.tokens,
    )


def about(decoder: Decoder, sizes: Sizes, options: argparse.Namespace) -> dict[str, str]:
    """Return what was read with, and the bytes of the memory: counted, and by the formula."""
    assert decoder.kept is not None
    state = decoder.kept.memory.state_dict()
    counted = sum(x.untyped_storage().nbytes() for x in state.values())
    n_head, B, C, d_head = state["keys.0"].shape
    formula = sizes.n_layer * B * C * 2 * n_head * d_head * state["keys.0"].itemsize + 16 * B
    return {
        "model": f"{sizes.n_layer} layers / {sizes.d_model}, mem_len {sizes.mem_len}",
        "read": f"{options.chunk} at once, {decoder.precision}, {'compiled' if decoder.compiled else 'interpreted'}",
        "memory": f"{counted:,} bytes of {C} slots; formula {formula:,} ({counted / formula - 1:+.2%})",
    }


if __name__ == "__main__":
    parser = command(__doc__)
    parser.add_argument("--tokens", type=int, default=100_000, help="to read (default: %(default)s)")
    parser.add_argument("--chunk", type=int, default=1, help="tokens fed at once (default: %(default)s)")
    parser.add_argument("--precision", choices=["fp32", "bf16", "int8"], default="fp32")
    parser.add_argument("--no-compile", action="store_true", help="read single tokens by interpreted code")
    parser.add_argument("--tiny", action="store_true", help="a model of no interest, to see whether this script works")
    options = parse(parser)
    run(options, measure, ["tiny" if options.tiny else "middle"])
