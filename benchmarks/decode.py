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
import random
import statistics
from collections.abc import Callable, Mapping
from typing import Any

import torch
from common.harness import Sides, command, facts, parse, ratios, run, spread, take_turns
from common.shapes import READING_SHAPES, ReadingShape, shapes_of
from common.wire import Remote, WorkerError

from transformer_xl.console import say, table
from transformer_xl.tools.hardware import memory_bandwidth

PRECISIONS = ("fp32", "bf16", "int8")
WAYS = ("eager", "compiled")
PARTS = ("one", "sessions")
ROWS = (1, 2, 4, 8, 16)
SESSION_TARGET = 6.0
TOLERANCE = 1e-4
HARMLESS_NATS = 0.01
N_COMPARED = 24


def compare(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Check and measure one shape, print tables, and return all figures."""
    shape = READING_SHAPES[name]
    found: dict[str, Any] = {}
    modes = [(precision, way) for precision in options.precisions for way in options.ways]
    with Sides(options) as sides, sides.start("peer", "peer.py", "read", config=shape.sizes.values()) as peer:
        if "one" in options.parts:
            found["modes"] = one_row(shape, sides, peer, options, modes)
            print(one_row_summary(name, shape, peer.ask("versions"), found["modes"]))
        if "sessions" in options.parts and shape.session_mem_lens:
            found["sessions"] = [
                sessions(shape, sides, options, mem_len, *mode)
                for mem_len in shape.session_mem_lens
                for mode in modes
                if mode[0] != "int8"
            ]
            print(sessions_summary(name, shape, found["sessions"]))
    return found


def one_row(
    shape: ReadingShape, sides: Sides, peer: Remote, options: argparse.Namespace, modes: list[tuple[str, str]]
) -> dict[str, Any]:
    """Compare the peer with each of ours in turn."""
    stream = random.Random(0).choices(range(shape.sizes.vocab_size), k=shape.sizes.mem_len + N_COMPARED)
    text = {"prefix": stream[:-N_COMPARED], "ids": stream[-N_COMPARED:], "path": sides.file("log_probs.safetensors")}
    say(f"the peer reads {len(stream):,} tokens, the last {N_COMPARED} one by one")
    peer.ask("read", **text)
    return {f"{precision} {way}": one_mode(shape, sides, peer, options, precision, way, text) for precision, way in modes}


def one_mode(
    shape: ReadingShape, sides: Sides, peer: Remote, options: argparse.Namespace, precision: str, way: str, text: dict[str, Any]
) -> dict[str, Any]:
    """Check one precision, eager or compiled, and time it in turn with the peer.

    Raises:
        WorkerError: it is fp32, and computes something else.
    """
    found: dict[str, Any] = {}
    arguments, config = ("read", precision, *([way] if way == "compiled" else [])), shape.sizes.values()
    if way == "compiled":
        with sides.start(f"ours {precision}, to compile it", "ours.py", *arguments, config=config) as ours:
            found["cold_s"] = ours.ask("open", rows=[1])
    with contextlib.ExitStack() as stack:
        ours = stack.enter_context(sides.start(f"ours {precision}", "ours.py", *arguments, config=config))
        found["open_s"] = ours.ask("open", rows=[1])
        found["versions"] = ours.ask("versions")
        parity = found["parity"] = ours.ask("compare", **text)
        if precision == "fp32" and not parity["log_prob"] <= TOLERANCE:
            raise WorkerError(f"ours in fp32, {way}, is not the peer's model: {parity}; nothing was timed")
        ids = random.Random(1).choices(range(shape.sizes.vocab_size), k=options.tokens)
        turns: dict[str, Callable[[int], float]] = {
            "peer": lambda _: peer.ask("tokens", ids=ids[: shape.peer_tokens]),
            "ours": lambda _: ours.ask("tokens", ids=ids),
            "bandwidth": lambda _: memory_bandwidth(torch.device("cpu")),
        }
        if precision != "int8":
            llama = stack.enter_context(sides.start(f"Llama {precision}", "llama.py", *arguments, config=config))
            turns["llama"] = lambda _: llama.ask("tokens", ids=ids)
        ours.ask("forget_peak")
        found["rounds"] = take_turns(turns, options.repeats, f"{precision} {way}, seconds a token:")
        found["memory_mb"] = ours.ask("memory") | {"model": ours.ask("model_mb")}
    return found


def one_row_summary(name: str, shape: ReadingShape, peer: dict[str, str], modes: dict[str, Any]) -> str:
    """Lay out what one row takes: time, parity, memory and compiling."""
    ours = next(iter(modes.values()))["versions"]
    rates = [rate / 1e9 for found in modes.values() for rate in found["rounds"]["bandwidth"]]
    about = {
        f"shape {name}": f"{shape.sizes}, B=1 T=1",
        "peer": "{name}, torch {torch}, {precision}".format(**peer),
        "ours": "{name}, torch {torch}".format(**ours),
        "bandwidth": "{} GB/s, {} over the rounds".format(*spread(rates, 0)),
        "limit": "bytes that a token touches, by the bandwidth in its round: weights, visible keys and values, and the keys of "
        "distances that clamp_len tells apart",
    }
    limits = ["MB a token", "limit ms", "times the limit", "min-max", "Llama ms", "of it", "min-max"]
    of_peer = [1e3 * seconds for found in modes.values() for seconds in found["rounds"]["peer"]]
    times = [["", "median ms", "min-max ms", "times faster", "min-max", *limits]]
    times += [["peer", *spread(of_peer, 0), "1.0", *[""] * 8]]
    times += [time_row(shape, mode, found["rounds"]) for mode, found in modes.items()]
    differences = [["against the peer", "log-probabilities", "nats lost per token", "same choice"]]
    for mode, found in modes.items():
        log_prob, nats, agree = (found["parity"][key] for key in ("log_prob", "nats", "agree"))
        differences.append([mode, f"{log_prob:.1e}", f"{nats:.1e}", f"{agree:.0%}"])
    megabytes = [["MB", "model", "copy of it", "keys, values", "together", "above idle", "of together", "whole life"]]
    megabytes += [memory_row(shape, mode, found["memory_mb"]) for mode, found in modes.items()]
    waits = [["seconds until it reads", "first time", "from then on"]]
    waits += [[m, f"{found.get('cold_s', found['open_s']):.1f}", f"{found['open_s']:.1f}"] for m, found in modes.items()]
    parts = [facts(about), table(times), facts(verdicts(shape, modes)), *map(table, (differences, megabytes, waits))]
    return "\n" + "\n\n".join(parts)


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
    faster = {mode: statistics.median(ratios(of["rounds"]["peer"], of["rounds"]["ours"])) for mode, of in modes.items()}
    exact = [mode for mode in modes if mode.startswith("fp32")]
    harmless = [mode for mode, found in modes.items() if found["parity"]["nats"] < HARMLESS_NATS]
    lines = {}
    for what, which, target in (("fp32", exact, "decode fp32"), (f"within {HARMLESS_NATS:g} nats", harmless, "decode fastest")):
        if which:
            best = max(which, key=faster.__getitem__)
            lines[f"fastest, {what}"] = f"{best}: {faster[best]:.1f} times the peer (target {shape.targets.get(target, '-')})"
            if which is exact:
                times = time_row(shape, best, modes[best]["rounds"])[7]
                lines[f"fastest, {what}"] += f", {times} times the limit (target {shape.targets.get('decode limit', '-')})"
    return lines or {"fastest": "no mode whose loss is the peer's"}


def memory_row(shape: ReadingShape, mode: str, memory: Mapping[str, float]) -> list[str]:
    precision = mode.split()[0]
    kept = shape.memory_bytes(precision) + shape.position_bytes(precision)
    held = [memory["model"], shape.copy_bytes(precision) / 1e6, kept / 1e6]
    together, above = sum(held), memory["peak"] - memory["idle"]
    cells = [f"{x:,.0f}" for x in (*held, together, above)]
    return [mode, *cells, f"{above / together:.2f}", f"{memory['life'] - memory['idle']:,.0f}"]


def sessions(
    shape: ReadingShape, sides: Sides, options: argparse.Namespace, mem_len: int, precision: str, way: str
) -> dict[str, Any]:
    """Time steps of several numbers of rows in turn."""
    mode = f"{precision} {way}, M={mem_len}"
    arguments = ("read", precision, *([way] if way == "compiled" else []))
    with sides.start(f"ours {precision} for several rows", "ours.py", *arguments, config=shape.sizes.values()) as ours:
        ours.ask("open", rows=ROWS, mem_len=mem_len)
        turns: dict[str, Callable[[int], float]] = {
            str(n): lambda _, n=n: ours.ask("steps", rows=n, n=options.tokens // 2 + 1) for n in ROWS
        }
        turns["bandwidth"] = lambda _: memory_bandwidth(torch.device("cpu"))
        rounds = take_turns(turns, options.repeats, f"{mode}, seconds a step of rows:")
    return {"precision": precision, "mode": mode, "mem_len": mem_len, "rounds": rounds}


def sessions_summary(name: str, shape: ReadingShape, measured: list[dict[str, Any]]) -> str:
    """Lay out what several rows read together gain."""
    header = ["rows", "ms a step", "tokens/s", "times one row", "min-max", "bytes allow", "times the limit", "target"]
    blocks = [f"\nshape {name}, several rows together, each a stream of its own; tokens/s of all rows"]
    blocks += [f"{found['mode']}\n\n{table([header, *[session_row(shape, n, found) for n in ROWS]])}" for found in measured]
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
    parser = command(__doc__, repeats=7, peer=True)
    parser.add_argument("--shape", choices=[*READING_SHAPES, "all"], default="all", help="E and W are those of docs/results.md")
    parser.add_argument("--precisions", choices=PRECISIONS, nargs="+", default=list(PRECISIONS), help="of ours")
    parser.add_argument("--ways", choices=WAYS, nargs="+", default=list(WAYS), help="of ours (default: both)")
    parser.add_argument("--parts", choices=PARTS, nargs="+", default=list(PARTS), help="one row against the peer; many rows")
    parser.add_argument("--tokens", type=int, default=20, help="that ours reads in a turn (default: %(default)s)")
    options = parse(parser)
    run(options, compare, shapes_of(options, READING_SHAPES))
