"""How fast this machine reads memory, in a process of its own: `bandwidth.py`.

A large tensor is summed by all threads: nothing is written, and adding keeps up with reading. Neighbors on the same machine
take their share of it, so it is measured again in every round.
"""

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from common.wire import serve

BYTES = 1 << 29
TRIES = 4


class Bandwidth:
    def build(self, n_threads: int) -> None:
        """Allot and touch what will be read."""
        torch.set_num_threads(n_threads)
        self._numbers = torch.ones(BYTES // 4)

    def measure(self) -> float:
        """Return bytes per second, the best of several readings."""
        return BYTES / min(self._read() for _ in range(TRIES))

    def _read(self) -> float:
        begin = time.perf_counter()
        self._numbers.sum()
        return time.perf_counter() - begin


if __name__ == "__main__":
    serve(Bandwidth())
