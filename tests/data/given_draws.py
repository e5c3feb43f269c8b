"""Numbers that a golden was made with, in the place of random ones."""

import numpy as np

from transformer_xl.data.targets import Draws


class GivenDraws(Draws):
    """Hands out the numbers of a list; those not yet taken are `left`."""

    def __init__(self, numbers: list[float]) -> None:
        self.left = list(numbers)

    def take(self, n: int) -> np.ndarray:
        assert n <= len(self.left), "more numbers are drawn than by the original"
        taken, self.left = self.left[:n], self.left[n:]
        return np.array(taken)
