"""How long the next token takes: ours against Hugging Face's Transformer-XL, same weights, and a Llama, one run.

One row, one token at a time, memory full: read it, and find the likeliest next one. The peer computes in fp32; ours in fp32,
bf16 and int8, each eager and compiled, each in a process of its own that takes turns with the peer's while the other sleeps.
So does, in fp32 and bf16, a Llama of these sizes, with as many positions in its cache (`common/llama.py`). Before that,
log-probabilities after a full memory are compared with the peer's; in fp32 they must agree, or nothing is timed.

A token cannot be faster than what it touches can be read: its weights, and the keys and values that it sees. So the bandwidth
of this machine is measured in every round too, and the time stands beside that limit. Then: what decoding holds in memory, what
compiling takes, and what several rows read together gain over one.
"""

import argparse
import contextlib
import statistics
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from common.reading_shapes import READING_SHAPES, ReadingShape
from common.report import facts
from common.sides import Sides, checked, random_ids, ratios, reading_options, run, spread
from common.wire import Remote, WorkerError

from transformer_xl.console import say, table

PRECISIONS = ("fp32", "bf16", "int8")
WAYS = ("eager", "compiled")
PARTS = ("one", "sessions")
ROWS = (1, 2, 4, 8, 16)
SESSION_PRECISIONS = ("fp32", "bf16")
SESSION_TARGET = 6.0
TOLERANCE = 1e-4
HARMLESS_NATS = 0.01
MEMORY_ALLOWANCE = 1.15
LLAMA_TARGET = 1.0
N_COMPARED = 24


def parse_arguments() -> argparse.Namespace:
    parser = reading_options(__doc__, repeats=7)
    parser.add_argument("--precisions", choices=PRECISIONS, nargs="+", default=list(PRECISIONS), help="of ours")
    parser.add_argument("--ways", choices=WAYS, nargs="+", help="of ours (default: both; with --quick eager)")
    parser.add_argument("--parts", choices=PARTS, nargs="+", default=list(PARTS), help="one row against the peer; many rows")
    parser.add_argument("--tokens", type=int, default=20, help="that ours reads in a turn (default: %(default)s)")
    options = checked(parser)
    if options.tokens < 1:
        parser.error(f"--tokens ({options.tokens}) must be at least 1")
    options.ways = options.ways or (WAYS[:1] if options.quick else WAYS)
    return options


def compare(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Check and measure one shape, print tables, and return all figures."""
    shape = READING_SHAPES[name]
    result: dict[str, Any] = {"shape": asdict(shape)}
    with contextlib.ExitStack() as stack:
        sides = Sides(name, options, Path(stack.enter_context(tempfile.TemporaryDirectory())))
        bandwidth = stack.enter_context(sides.bandwidth())
        say(f"shape {name}: building the peer")
        with sides.peer() as peer:  # it writes the weights that the others read
            result["peer"] = peer.ask("versions")
            if "one" in options.parts:
                result |= one_row(shape, sides, peer, bandwidth)
                print(one_row_summary(name, result, options))
        if "sessions" in options.parts and shape.session_mem_lens:
            result["sessions"] = [
                sessions(shape, sides, bandwidth, mem_len, precision, way)
                for mem_len in shape.session_mem_lens
                for precision in SESSION_PRECISIONS
                if precision in options.precisions
                for way in options.ways
            ]
            print(sessions_summary(name, shape, result["sessions"]))
    return result


def one_row(shape: ReadingShape, sides: Sides, peer: Remote, bandwidth: Remote) -> dict[str, Any]:
    """Compare the peer with each of ours in turn."""
    stream = random_ids(shape.mem_len + N_COMPARED, shape.vocab_size, seed=0)
    text = {"prefix": stream[:-N_COMPARED], "ids": stream[-N_COMPARED:], "path": sides.file("log_probs.safetensors")}
    say(f"the peer reads {len(stream):,} tokens, the last {N_COMPARED} one by one")
    peer.ask("read", **text)
    modes = [(precision, way) for precision in sides.options.precisions for way in sides.options.ways]
    return {"modes": {f"{p} {way}": one_mode(shape, sides, peer, bandwidth, p, way, text) for p, way in modes}}


def one_mode(
    shape: ReadingShape, sides: Sides, peer: Remote, bandwidth: Remote, precision: str, way: str, text: dict[str, Any]
) -> dict[str, Any]:
    """Check one precision, eager or compiled, and time it in turn with the peer.

    Raises:
        WorkerError: it is fp32, and computes something else.
    """
    compiled, found = way == "compiled", {}
    if compiled:
        say(f"compiling {precision}")
        with sides.ours(precision, compiled=True) as worker:
            found["cold_s"] = worker.ask("open", rows=[1])
    with contextlib.ExitStack() as stack:
        worker = stack.enter_context(sides.ours(precision, compiled=compiled))
        workers = {"ours": worker}
        if precision != "int8":
            workers["llama"] = stack.enter_context(sides.llama(precision, compiled=compiled))
            found["llama"] = workers["llama"].ask("versions")
        found["open_s"] = worker.ask("open", rows=[1])
        found["versions"] = worker.ask("versions")
        say(f"{precision} {way} reads the same")
        parity = found["parity"] = worker.ask("compare", **text)
        if precision == "fp32" and not parity["log_prob"] <= TOLERANCE:
            raise WorkerError(f"ours in fp32, {way}, is not the peer's model: {parity}; nothing was timed")
        worker.ask("forget_peak")
        found["rounds"] = take_turns(shape, sides.options, peer, workers, bandwidth, f"{precision} {way}")
        found["memory_mb"] = worker.ask("memory") | {"model": worker.ask("model_mb")}
    return found


def take_turns(
    shape: ReadingShape, options: argparse.Namespace, peer: Remote, workers: dict[str, Remote], bandwidth: Remote, mode: str
) -> dict[str, list[float]]:
    """Let all read some tokens in turn, and return seconds per token, and bytes per second of the machine, of each round."""
    rounds: dict[str, list[float]] = {who: [] for who in ("peer", *workers, "bandwidth")}
    ids = random_ids(options.tokens, shape.vocab_size, seed=1)
    for i in range(options.repeats):
        rounds["peer"].append(statistics.fmean(peer.ask("tokens", ids=ids[: shape.peer_tokens])))
        for who, worker in workers.items():
            rounds[who].append(statistics.fmean(worker.ask("tokens", ids=ids)))
        rounds["bandwidth"].append(bandwidth.ask("measure"))
        times = f"peer {rounds['peer'][-1] * 1e3:.0f} ms, ours {rounds['ours'][-1] * 1e3:.2f} ms"
        say(f"{mode}, round {i + 1} of {options.repeats}: {times}, {rounds['bandwidth'][-1] / 1e9:.0f} GB/s")
    return rounds


def one_row_summary(name: str, result: dict[str, Any], options: argparse.Namespace) -> str:
    """Lay out what one row takes: time, parity, memory and compiling."""
    shape, modes = READING_SHAPES[name], result["modes"]
    peer = [seconds * 1e3 for found in modes.values() for seconds in found["rounds"]["peer"]]
    first = ["peer", *spread(peer, 0), "1.0", *[""] * 8]
    limits = ["MB a token", "limit ms", "times the limit", "min-max", "Llama ms", f"of it (<= {LLAMA_TARGET:g})", "min-max"]
    times = table(
        [
            ["", "median ms", "min-max ms", "times faster", "min-max", *limits],
            first,
            *(time_row(shape, mode, found["rounds"]) for mode, found in modes.items()),
        ],
    )
    differences = table(
        [
            ["against the peer", "log-probabilities", "nats lost per token", "same choice"],
            *[parity_row(mode, found["parity"]) for mode, found in modes.items()],
        ],
    )
    megabytes = table(
        [
            ["MB", "model", "copy of it", "keys, values", "together", "above idle", "of together", "whole life"],
            *[memory_row(shape, mode, found["memory_mb"]) for mode, found in modes.items()],
        ],
    )
    compiling = table(
        [
            ["seconds until it reads", "first time", "from then on"],
            *[[mode, f"{found.get('cold_s', found['open_s']):.1f}", f"{found['open_s']:.1f}"] for mode, found in modes.items()],
        ],
    )
    tables = "\n\n".join([times, facts(verdicts(shape, modes)), differences, megabytes, compiling])
    return f"\n{facts(context(name, result, options))}\n\n{tables}"


def context(name: str, result: dict[str, Any], options: argparse.Namespace) -> dict[str, str]:
    """Say what was compared, and that it is comparable."""
    shape, modes = READING_SHAPES[name], result["modes"]
    ours = next(iter(modes.values()))["versions"]
    seen = [rate / 1e9 for found in modes.values() for rate in found["rounds"]["bandwidth"]]
    return {
        f"shape {name}": f"{shape}, B=1 T=1",
        "threads": str(options.threads),
        "peer": "{name}, torch {torch}, Python {python}, fp32".format(**result["peer"]),
        "ours": "{name}, torch {torch}, Python {python}".format(**ours),
        "token": f"read, and the likeliest next one found; memory full; mean of {options.tokens} in a round (of the peer "
        f"{shape.peer_tokens}); rounds alternate",
        "bandwidth": "{} GB/s, {} over the rounds".format(*spread(seen, 0)),
        "limit": "bytes that a token touches, by the bandwidth in its round: weights, visible keys and values, and the keys of "
        "distances that clamp_len tells apart",
    }


def time_row(shape: ReadingShape, mode: str, rounds: Mapping[str, list[float]]) -> list[str]:
    n_byte = shape.token_bytes(mode.split()[0])
    limits = [n_byte / rate for rate in rounds["bandwidth"]]
    llama = rounds.get("llama")
    return [
        mode,
        *spread([seconds * 1e3 for seconds in rounds["ours"]]),
        *spread(ratios(rounds["peer"], rounds["ours"]), 1),
        f"{n_byte / 1e6:,.0f}",
        f"{statistics.median(limits) * 1e3:.2f}",
        *spread(ratios(rounds["ours"], limits)),
        *([f"{statistics.median(llama) * 1e3:.2f}", *spread(ratios(rounds["ours"], llama))] if llama else [""] * 3),
    ]


def verdicts(shape: ReadingShape, modes: Mapping[str, dict[str, Any]]) -> dict[str, str]:
    """Hold the fastest of ours against the targets: the fastest in fp32, and of those whose loss is the peer's."""
    rounds = {mode: found["rounds"] for mode, found in modes.items()}
    faster = {mode: statistics.median(ratios(of["peer"], of["ours"])) for mode, of in rounds.items()}
    exact = [mode for mode in modes if mode.startswith("fp32")]
    harmless = [mode for mode, found in modes.items() if found["parity"]["nats"] < HARMLESS_NATS]
    lines = {}
    for what, which, target in (
        ("fastest in fp32", exact, shape.targets.decode_fp32),
        (f"fastest within {HARMLESS_NATS:g} nats", harmless, shape.targets.decode_fastest),
    ):
        if which:
            best = max(which, key=faster.__getitem__)
            lines[what] = f"{best}: {faster[best]:.1f} times the peer" + (f" (target >= {target:g})" if target else "")
            if which is exact and shape.targets.decode_limit:
                times = float(time_row(shape, best, rounds[best])[7])
                lines[what] += f", {times:.2f} times the limit (target <= {shape.targets.decode_limit:g})"
    return lines or {"fastest": "no mode whose loss is the peer's"}


def parity_row(mode: str, parity: Mapping[str, float]) -> list[str]:
    return [mode, f"{parity['log_prob']:.1e}", f"{parity['nats']:.1e}", f"{parity['agree']:.0%}"]


def memory_row(shape: ReadingShape, mode: str, memory: Mapping[str, float]) -> list[str]:
    precision = mode.split()[0]
    kept = shape.memory_bytes(precision) + shape.position_bytes(precision)
    held = [memory["model"], shape.copy_bytes(precision) / 1e6, kept / 1e6]
    target = f" (<= {MEMORY_ALLOWANCE:g})" if mode.endswith("eager") else ""  # a compiler stays in memory
    together, above = sum(held), memory["peak"] - memory["idle"]
    cells = [f"{x:,.0f}" for x in (*held, together, above)]
    return [mode, *cells, f"{above / together:.2f}{target}", f"{memory['life'] - memory['idle']:,.0f}"]


def sessions(shape: ReadingShape, sides: Sides, bandwidth: Remote, mem_len: int, precision: str, way: str) -> dict[str, Any]:
    """Time steps of several numbers of rows in turn."""
    mode = f"{precision} {way}, M={mem_len}"
    rounds: dict[str, list[float]] = {str(rows): [] for rows in ROWS} | {"bandwidth": []}
    with sides.ours(precision, compiled=way == "compiled") as worker:
        say(f"{mode}: decoders of {', '.join(map(str, ROWS))} rows")
        worker.ask("open", rows=ROWS, mem_len=mem_len)
        for i in range(sides.options.repeats):
            for rows in ROWS:
                rounds[str(rows)].append(statistics.fmean(worker.ask("steps", rows=rows, n=sides.options.tokens // 2 + 1)))
            rounds["bandwidth"].append(bandwidth.ask("measure"))
            say(f"{mode}, round {i + 1} of {sides.options.repeats}")
    return {"precision": precision, "way": way, "mem_len": mem_len, "rounds": rounds}


def sessions_summary(name: str, shape: ReadingShape, measured: list[dict[str, Any]]) -> str:
    """Lay out what several rows read together gain."""
    header = ["rows", "ms a step", "tokens/s", "times one row", "min-max", "bytes allow", "times the limit", "target"]
    blocks = [f"\nshape {name}, several rows together, each a stream of its own; tokens/s of all rows"]
    for found in measured:
        rows = [session_row(shape, n, found) for n in ROWS]
        blocks.append(f"{found['precision']} {found['way']}, M={found['mem_len']}\n\n{table([header, *rows])}")
    blocks.append(
        '"bytes allow" is the gain if each step took what its bytes take to read: weights once, keys and values of each row. '
        "Where that is below the target, one row alone must be far from its limit for the target to be reached."
    )
    return "\n\n".join(blocks)


def session_row(shape: ReadingShape, rows: int, found: Mapping[str, Any]) -> list[str]:
    rounds, precision, mem_len = found["rounds"], found["precision"], found["mem_len"]
    own, one = rounds[str(rows)], rounds["1"]
    n_byte, n_byte_one = (shape.token_bytes(precision, rows=n, mem_len=mem_len) for n in (rows, 1))
    limits = [n_byte / rate for rate in rounds["bandwidth"]]
    return [
        str(rows),
        spread([seconds * 1e3 for seconds in own])[0],
        f"{rows / statistics.median(own):,.0f}",
        *spread([rows * ratio for ratio in ratios(one, own)]),
        f"{rows * n_byte_one / n_byte:.2f}",
        spread(ratios(own, limits))[0],
        f">= {SESSION_TARGET:g}" if rows == ROWS[-1] else "",
    ]


if __name__ == "__main__":
    run(compare, parse_arguments())
