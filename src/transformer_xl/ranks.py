"""Which of several processes this one is. `torchrun` says so in the environment; `world.py` lets them talk."""

import os

_met = False


def rank() -> int:
    """Return the number of this process among all, 0 for the first or the only one."""
    return _number("RANK")


def local_rank() -> int:
    """Return the number of this process among those of its machine."""
    return _number("LOCAL_RANK")


def is_reporter() -> bool:
    """Say whether this process shows things to people: the only one, or the first of those that `torchrun` started."""
    return rank() == 0


def restarts() -> int:
    """Return how many times `torchrun` has started the processes anew after one of them failed."""
    return _number("TORCHELASTIC_RESTART_COUNT")


def note_meeting() -> None:
    """Remember that this process has met others."""
    global _met
    _met = True


def have_met() -> bool:
    """Say whether this process has met others, so that one can report what goes wrong in another."""
    return _met


def _number(name: str) -> int:
    text = os.environ.get(name, "0")
    return int(text) if text.isdecimal() else 0
