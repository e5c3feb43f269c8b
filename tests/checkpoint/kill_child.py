"""Kills a saving process many times, for `tests.forked`.

All kills share one directory, as the restarts of one long run do. Each victim is a fork of a process that has imported torch
already and has a single thread: a fresh interpreter per kill would spend its time importing.
"""

import os
import random
import signal
import time
from pathlib import Path
from typing import Any

from tests.checkpoint.helpers import assert_same, never, numbered
from transformer_xl.checkpoint.store import CheckpointStore

N_VALUES = 40_000  # 320 kB a checkpoint
MAX_DELAY = 0.08  # seconds after the fork: time to resume, then for several saves, each with its rotation
KEEP = 2


def save_through_kills(folder: str, n_kills: int, seed: int) -> list[dict[str, Any]]:
    """Return what each kill left."""
    directory, generator = Path(folder), random.Random(seed)
    CheckpointStore(directory).save(numbered(0, n_values=N_VALUES))
    reported, left = {"step": 0, "best": 0}, []
    for _ in range(n_kills):
        reported |= kill_one(directory, delay=generator.uniform(0, MAX_DELAY))
        left.append(examine(directory, reported))
    return left


def kill_one(directory: Path, *, delay: float) -> dict[str, int]:
    """Fork a saver, kill it after `delay` seconds, and return its last reports."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            save_without_end(directory, writer)
        finally:
            os._exit(1)  # only after an exception; the parent then finds the child dead before the kill
    os.close(writer)
    with os.fdopen(reader) as pipe:
        time.sleep(delay)
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status), "the saving process failed by itself"
        reports = pipe.read().splitlines()
    # A report is one write to a pipe, so it arrives whole or not at all.
    return {kind: int(step) for kind, step in (report.split() for report in reports)}


def save_without_end(directory: Path, writer: int) -> None:
    """Resume and save like a run; save every third step twice, like a run that repeats steps; some steps are the best."""
    store = CheckpointStore(directory, keep=KEEP)
    store.clean()
    step = store.load_newest(on_damaged=never).step
    store.rewind(step, best=store.best_step)
    while True:
        step += 1
        best = step % 5 == 0
        for _ in range(2 if step % 3 == 0 else 1):
            store.save(numbered(step, n_values=N_VALUES), best=best)
            os.write(writer, report(step, best))


def report(step: int, best: bool) -> bytes:
    return f"step {step}\n".encode() + (f"best {step}\n".encode() if best else b"")


def examine(directory: Path, reported: dict[str, int]) -> dict[str, Any]:
    """Load what the kill left, before and after cleaning; every defect is an entry in "defects"."""
    store = CheckpointStore(directory, keep=KEEP)
    strays = stray_names(directory)
    defects: list[str] = []
    steps = []
    for phase in ("before", "after"):
        newest = store.load_newest(on_damaged=defects.append)
        steps.append(newest.step)
        defects += content_defects(newest, phase)
        if newest.step < reported["step"]:
            defects.append(f"{phase} cleaning, step {reported['step']} was reported and {newest.step} loaded")
        if reported["best"] > 0:
            best = store.load_best(on_damaged=defects.append)
            defects += content_defects(best, phase)
            if best.step < reported["best"]:
                defects.append(f"{phase} cleaning, best {reported['best']} was reported and {best.step} loaded")
        store.clean()
    defects += [f"{name} after cleaning" for name in stray_names(directory)]
    if steps[0] != steps[1]:
        defects.append(f"cleaning changed the newest step from {steps[0]} to {steps[1]}")
    if len(store.steps()) > KEEP + 2:  # the newest few, the best, and the one just published
        defects.append(f"steps {store.steps()} are kept")
    store.rewind(steps[1], best=store.best_step)
    if set(store.steps()) - {*store.steps()[-KEEP:], store.best_step}:
        defects.append(f"after resuming, steps {store.steps()} are kept")
    return {"reported": reported["step"], "loaded": steps[0], "strays": strays, "defects": defects}


def content_defects(checkpoint: Any, phase: str) -> list[str]:
    try:
        assert_same(checkpoint, numbered(checkpoint.step, n_values=N_VALUES))
    except AssertionError as error:
        return [f"{phase} cleaning, step {checkpoint.step} is inconsistent: {error}"]
    return []


def stray_names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir() if path.suffix in (".tmp", ".old"))
