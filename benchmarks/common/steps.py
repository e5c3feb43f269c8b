"""A comparison of training steps: ours against a peer with the same weights, in processes that take turns."""

import argparse
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from common.harness import Sides, at_least, facts, ratios, spread, take_turns
from common.wire import Remote, WorkerError
from transformer_xl.console import say, table

LOSS_TOLERANCE = 1e-4
GRADIENT_TOLERANCE = 1e-2
N_WARM_UP = 3

Batch = dict[str, Any]


def compare_steps(
    label: str,
    about: Mapping[str, str],
    commands: Mapping[str, tuple[str, ...]],
    options: argparse.Namespace,
    *,
    config: dict[str, Any],
    batches: Iterator[Batch],
    n_compared: int,
    failure_of: tuple[str, str],
    speed_targets: Mapping[str, float | None],
    memory_target: float,
) -> dict[str, Any]:
    """Check and time training steps, print tables, and return all figures.

    Args:
        label: of the messages.
        about: what the head of the tables says.
        commands: script of `common` and its arguments for each side: "peer", "peer ...", "ours ..." and others.
        options: of the command line.
        config: settings, as the peer names them.
        batches: what all read, without end.
        n_compared: batches whose losses are compared.
        failure_of: a side, and the method that says why a bf16 step of it fails.
        speed_targets: how many times faster than the peer a side shall be.
        memory_target: the most of the peer's peak.
    """
    with Sides(options) as processes:
        sides = {
            name: processes.enter_context(processes.start(name, *command, config=config)) for name, command in commands.items()
        }
        versions = {name: side.ask("versions") for name, side in sides.items()}
        first = list(itertools.islice(batches, n_compared))
        failing, method = failure_of
        failure = sides[failing].ask(method, batch=first[0])
        if failure and failing != "peer":
            del sides[failing]
        parity = check_parity(sides, first, processes.file("gradients.safetensors"))
        warm_up, timed = list(itertools.islice(batches, N_WARM_UP)), list(itertools.islice(batches, options.repeats))
        for name, side in sides.items():
            say(f"{label}: warming up {name}")
            side.ask("start", batches=warm_up)
        turns: dict[str, Callable[[int], float]] = {
            name: lambda i, side=side: side.ask("step", batch=timed[i]) for name, side in sides.items()
        }
        seconds = take_turns(turns, options.repeats, f"{label}, seconds a step:")
        memory = {name: side.ask("memory") for name, side in sides.items()}
    head = {
        **about,
        **{name: "{name}, torch {torch}, {precision}".format(**said) for name, said in versions.items()},
        "peer in bf16": f"autocast: {failure or 'works'}",
        "step": "forward, backward, gradients cleared; no optimizer; memory full; steps alternate",
        **{f"parity of {name}": "loss {loss:.1e} nats, gradients {gradient:.1e} of their norm".format(**found)
           for name, found in parity.items()},
    }  # fmt: skip
    print(f"\n{facts(head)}\n\n{time_table(seconds, speed_targets)}\n\n{memory_table(memory, memory_target)}")
    return {"versions": versions, "peer_bf16": failure or "works", "parity": parity, "seconds": seconds, "memory_mb": memory}


def check_parity(sides: Mapping[str, Remote], batches: list[Batch], gradients: str) -> dict[str, dict[str, float]]:
    """Compare losses and gradients of ours with the peer's, without dropout.

    Raises:
        WorkerError: ours in fp32 computes something else.
    """
    say("comparing losses and gradients")
    losses = sides["peer"].ask("read", batches=batches)
    sides["peer"].ask("write_gradients", path=gradients)
    parity = {}
    for name, side in sides.items():
        if name.startswith("ours"):
            loss = max(abs(a - b) for a, b in zip(side.ask("read", batches=batches), losses, strict=True))
            parity[name] = {"loss": loss, "gradient": side.ask("gradient_difference", path=gradients)}
    found = parity["ours fp32"]
    if not (found["loss"] <= LOSS_TOLERANCE and found["gradient"] <= GRADIENT_TOLERANCE):
        raise WorkerError(f"ours in fp32 is not the peer's model: {found}; nothing was timed")
    return parity


def time_table(seconds: Mapping[str, list[float]], targets: Mapping[str, float | None]) -> str:
    """Lay out times, against the peer's and those of a Llama of the same precision, where there is one."""
    rows = [["", "median s", "min-max s", "times faster", "min-max", "target", "of Llama's", "min-max"]]
    for name, times in seconds.items():
        llama = seconds.get(name.replace("ours", "Llama")) if name.startswith("ours") else None
        beside = spread(ratios(times, llama)) if llama else ["", ""]
        rows.append([name, *spread(times, 3), *spread(ratios(seconds["peer"], times)), at_least(targets.get(name)), *beside])
    return table(rows)


def memory_table(memory: Mapping[str, Mapping[str, float]], target: float) -> str:
    """Lay out peaks, of whole processes and above what they held before they had a model."""
    rows, peer = [["", "peak MB", "of the peer's", "target", "above idle MB", "of the peer's"]], memory["peer"]
    for name, own in memory.items():
        above, share = own["peak"] - own["idle"], own["peak"] / peer["peak"]
        goal = f"<= {target:g}" if name.startswith("ours") else ""
        of_peer = above / (peer["peak"] - peer["idle"])
        rows.append([name, f"{own['peak']:,.0f}", f"{share:.2f}", goal, f"{above:,.0f}", f"{of_peer:.2f}"])
    return table(rows)
