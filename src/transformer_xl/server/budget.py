"""How much an owner of sessions may ask for in a minute."""

import time
from collections.abc import Callable

_SECONDS = 60.0


class Budget:
    """A bucket for each owner, which fills by so much in a minute and holds no more than that.

    Whoever has something left may ask for more than that; then the bucket is empty for longer.

    Args:
        per_minute: of requests or tokens; None: as much as anybody likes.
        clock: seconds.

    Example:
        >>> now = [0.0]
        >>> budget = Budget(60, clock=lambda: now[0])
        >>> budget.spend("me", 61)
        >>> budget.wait("me"), budget.wait("you")
        (2.0, 0.0)
        >>> now[0] = 2.0
        >>> budget.wait("me")
        0.0
    """

    def __init__(self, per_minute: float | None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._most, self._clock = per_minute, clock
        self._left: dict[str, tuple[float, float]] = {}  # what was left, and when

    def wait(self, owner: str) -> float:
        """Return after how many seconds the owner may ask again; 0: now."""
        if self._most is None:
            return 0.0
        return max(0.0, (1 - self._level(owner)) / self._most * _SECONDS)

    def spend(self, owner: str, n: int) -> None:
        """Take from the bucket."""
        if self._most is not None:
            self._left[owner] = self._level(owner) - n, self._clock()

    def _level(self, owner: str) -> float:
        assert self._most is not None
        now = self._clock()
        level, since = self._left.get(owner, (self._most, now))
        return min(self._most, level + (now - since) * self._most / _SECONDS)
