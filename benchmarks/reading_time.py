"""What reading time buys: nats and seconds of trained runs with dynamic evaluation, a neural cache and both.

Settings are chosen on the beginning of the validation split, by a small grid that is printed, and the test split is scored with
them, up to a number of tokens. Where a corpus has one split for both, what settings were chosen on is not scored.
"""

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
from common.machine import describe, n_cores
from common.report import facts

from transformer_xl.checkpoint.open_run import Opened, open_run
from transformer_xl.console import say, table
from transformer_xl.errors import TrainingError
from transformer_xl.kernels.device import Precision, choose_precision
from transformer_xl.reading.cache import Cache
from transformer_xl.reading.dynamic import Dynamic, mean_squares
from transformer_xl.reading.evaluation import Score, evaluate

SGD_RATES = (0.02, 0.05, 0.1)
RMS_RATES = (1e-4, 3e-4, 1e-3)
CACHE_WEIGHTS = (0.05, 0.1, 0.2)
CACHE_THETAS = (2.0, 5.0)


@dataclass(frozen=True)
class Way:
    """A way to read: what adapts, and the seconds that its preparation took."""

    name: str
    dynamic: Dynamic | None = None
    cache: Cache | None = None
    seconds: float = 0.0

    def __str__(self) -> str:
        settings = [each.as_dict() for each in (self.dynamic, self.cache) if each]
        return ", ".join(f"{name} {value}" for each in settings for name, value in each.items() if name != "rule")


@dataclass(frozen=True)
class Figures:
    """A row of the table."""

    run: str
    way: str
    settings: str
    tokens: int
    loss: float
    gained: float
    seconds: float
    plain_seconds: float


class RunReader:
    """Scores texts of one run, in one lane."""

    def __init__(self, run: Path) -> None:
        self.opened: Opened = open_run(run)
        self.precision: Precision = choose_precision("auto", self.opened.device)[0]
        self._reading = self.opened.reading(batch_size=1, precision=self.precision)

    def score(self, ids: np.ndarray, way: Way) -> Score:
        return evaluate(self.opened.model, ids, self._reading, dynamic=way.dynamic, cache=way.cache)

    def rms(self, n_token: int) -> Way:
        """Return the rms rule with squared gradients over the beginning of the training split."""
        ids, begin = self.opened.text(split="train", limit=n_token).ids, time.perf_counter()
        squares = mean_squares(self.opened.model, ids, self._reading)
        return Way("rms", Dynamic(mean_squares=squares), seconds=time.perf_counter() - begin)

    def texts(self, *, n_tune: int, n_token: int) -> tuple[np.ndarray, np.ndarray]:
        """Return what settings are chosen on, and what is scored; they share no predicted token."""
        tune = self.opened.text(split="valid", limit=n_tune).ids
        ids = self.opened.text(limit=n_tune + n_token).ids
        if np.array_equal(ids[: len(tune)], tune):  # one split for both
            ids = ids[len(tune) - 1 :]
        return tune, ids[: n_token + 1]

    def best(self, ids: np.ndarray, ways: list[Way]) -> Way:
        """Return the way with the lowest loss, and print all."""
        losses = []
        for way in ways:
            try:
                losses.append(self.score(ids, way).loss)
            except TrainingError:  # diverged
                losses.append(np.inf)
            say(f"  chosen from: {way.name} {way}: {losses[-1]:.4f}")
        return ways[int(np.argmin(losses))]


def measure(run: Path, *, n_tune: int, n_token: int, n_training: int) -> Iterator[Figures]:
    """Choose settings of each way, and yield what it gains."""
    reader = RunReader(run)
    tune, ids = reader.texts(n_tune=n_tune, n_token=n_token)
    rms = reader.rms(n_training)
    assert rms.dynamic is not None
    sgd = reader.best(tune, [Way("sgd", Dynamic(lr=rate)) for rate in SGD_RATES])
    rms = reader.best(tune, [replace(rms, dynamic=replace(rms.dynamic, lr=rate)) for rate in RMS_RATES])
    caches = [Way("cache", cache=Cache(weight=weight, theta=theta)) for weight in CACHE_WEIGHTS for theta in CACHE_THETAS]
    cache = reader.best(tune, caches)
    plain = reader.score(ids, Way("plain"))
    for way in (Way("plain"), sgd, rms, cache, replace(rms, name="rms and cache", cache=cache.cache)):
        score = plain if way.name == "plain" else reader.score(ids, way)
        seconds = score.seconds + way.seconds
        yield Figures(run.name, way.name, str(way), score.tokens, score.loss, plain.loss - score.loss, seconds, plain.seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, help="directories of trained runs")
    parser.add_argument("--tokens", type=int, default=30_000, help="tokens to score (default: %(default)s)")
    parser.add_argument("--tune-tokens", type=int, default=5_000, help="tokens to choose settings on (default: %(default)s)")
    parser.add_argument("--training-tokens", type=int, default=20_000, help="for squared gradients (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    arguments = parser.parse_args()
    say(facts(describe() | {"cores": str(n_cores())}))
    rows: list[Figures] = []
    sizes = {"n_tune": arguments.tune_tokens, "n_token": arguments.tokens, "n_training": arguments.training_tokens}
    for run in arguments.runs:
        for each in measure(run, **sizes):
            rows.append(each)
            say(f"{each.run}: {each.way}: {each.loss:.4f}, gained {each.gained:z.4f}, {each.seconds:.1f} s")
    head = ["run", "way", "settings", "tokens", "nats per token", "gained", "seconds"]
    cells = [[r.run, r.way, r.settings, f"{r.tokens:,}", f"{r.loss:.4f}", f"{r.gained:z.4f}", f"{r.seconds:.1f}"] for r in rows]
    say(table([head, *cells], n_left=3))
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(row) for row in rows], indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
