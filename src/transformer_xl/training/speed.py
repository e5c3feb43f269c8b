"""How fast a run computes: with how many threads on a CPU, and whether it has become slow."""

import os
import time
from collections.abc import Callable

import torch

from transformer_xl.process import busy, cores
from transformer_xl.training.trainer import Trainer

_SETTING = "--set train.threads"

_TRY_SECONDS = 1.0  # for each number of threads, and at least one step
_HOPELESS = 1.5  # where fewer threads took this many times the time of the best number, still fewer are not tried
_GAIN = 0.9  # fewer threads are taken if they need at most this share of the time

_SPAN = 20.0  # seconds of steps whose mean is a speed
_SLOW, _RECOVERED = 1 / 3, 1 / 2  # of the best speed
_REPEAT = 300.0  # seconds of steps between two warnings


def choose_threads(
    trainer: Trainer, *, warn: Callable[[str], object], clock: Callable[[], float] = time.perf_counter
) -> int | None:
    """Name busy cores, and try whether a new run is faster with fewer threads than there are; the state does not change.

    Nothing is tried on a GPU, where cores are free, and where somebody has decided: by settings, by `OMP_NUM_THREADS`, by
    wanting the same bits each time, or by starting several processes. Layers would be compiled for each number of threads.

    Args:
        trainer: before its first step.
        warn: shows a line.
        clock: seconds.

    Returns:
        The number of threads that the run computes with from now on; None: it stays as it was.
    """
    config, most = trainer.config, torch.get_num_threads()
    problem = busy(most) if trainer.device.type == "cpu" else None
    if not problem:
        return None
    is_decided = config.threads or config.deterministic or config.compile or not trainer.world.alone
    if is_decided or most == 1 or os.environ.keys() & {"OMP_NUM_THREADS", "MKL_NUM_THREADS"}:
        warn(f"{problem}, so this run will be slow; {problem.remedy(most, _SETTING)}")
        return None
    trainer.rehearse()  # not timed, because memory is allotted
    seconds: dict[int, float] = {}
    for n in sorted({most, min(problem.free, most), *(max(1, most >> i) for i in range(most.bit_length()))}, reverse=True):
        torch.set_num_threads(n)
        seconds[n] = _seconds(trainer.rehearse, clock)
        if seconds[n] > _HOPELESS * min(seconds.values()):
            break
    best = min(seconds, key=lambda n: seconds[n])
    if seconds[best] > _GAIN * seconds[most]:
        torch.set_num_threads(most)
        warn(f"{problem}, so this run will be slow, and fewer threads are not faster; wait until they have ended")
        return None
    torch.set_num_threads(best)
    warn(
        f"{problem}, so this run computes with train.threads={best}: a step takes {seconds[best]:.2f} s instead of "
        f"{seconds[most]:.2f} s with {most}; when the other programs have ended, resume it with {_SETTING}={most}"
    )
    return best


def _seconds(step: Callable[[], None], clock: Callable[[], float]) -> float:
    """Return the mean time of a step, of as many as a moment has room for."""
    begin, n = clock(), 0
    while True:
        step()
        n += 1
        if (passed := clock() - begin) >= _TRY_SECONDS:
            return passed / n


def check_threads(trainer: Trainer, before: int | None, *, say: Callable[[str], object], warn: Callable[[str], object]) -> None:
    """Name busy cores, and say whether a resumed run goes on with other threads than before, or with fewer than could compute.

    Nothing is tried, because a run that was stopped and resumed has the bits of one that was not.

    Args:
        trainer: of the resumed run.
        before: threads of its last start; None: unknown.
        say: shows a line.
        warn: shows a warning.
    """
    now, recorded = torch.get_num_threads(), trainer.config.threads
    if trainer.device.type != "cpu" or trainer.progress >= 1:
        return
    if problem := busy(now):
        warn(f"{problem}, so this run will be slow; {problem.remedy(now, _SETTING)}")
    if before not in (None, now):
        say(f"threads: {before} until here, {now} from now on; {_SETTING}={before} rounds as before")
    elif recorded and recorded < cores() and not busy(cores()):
        say(
            f"this run computes with train.threads={recorded}, and {cores()} cores are free; {_SETTING}=none uses what PyTorch "
            "finds best, and rounds differently"
        )


class Pace:
    """Notices when training has become several times slower than it was in this process, and when it has recovered.

    Example:
        >>> pace = Pace()
        >>> said = [pace.add(100, seconds, length=5) for seconds in [1.0] * 20 + [5.0] * 4]
        >>> said[-1].partition(";")[0]
        'training is 5.0 times slower than before: 20 tokens/s instead of 100'
    """

    def __init__(self) -> None:
        self._length = 0
        self._best = self._tokens = self._seconds = 0.0  # best speed; of the present span
        self._since: float | None = None  # seconds of steps since the last warning; None: it is not slow

    def add(self, tokens: int, seconds: float, *, length: int) -> str | None:
        """Count a step, and return a line to show, if there is one.

        Args:
            tokens: that the step read.
            seconds: that it took.
            length: to which segments have grown. Speeds of other lengths are not compared.
        """
        if length != self._length:
            self._length, self._best, self._tokens, self._seconds = length, 0.0, 0.0, 0.0
        self._tokens += tokens
        self._seconds += seconds
        if self._seconds < _SPAN:
            return None
        speed, span = self._tokens / self._seconds, self._seconds
        self._tokens = self._seconds = 0.0
        self._best = max(speed, self._best)
        if speed < _SLOW * self._best:
            self._since = _REPEAT if self._since is None else self._since + span
            if self._since < _REPEAT:
                return None
            self._since = 0.0
            return (
                f"training is {self._best / max(speed, 1e-9):.1f} times slower than before: {speed:,.0f} tokens/s instead of "
                f"{self._best:,.0f}; {_reason()}"
            )
        if self._since is not None and speed > _RECOVERED * self._best:
            self._since = None
            return f"training has recovered: {speed:,.0f} tokens/s"
        return None


def _reason() -> str:
    threads = torch.get_num_threads()
    if problem := busy(threads, since_long=True):
        return f"{problem}; {problem.remedy(threads, f'--resume {_SETTING}')}"
    return "no other program seems to be the reason, so see whether the machine is hot, saves power or lacks memory (swapping)"
