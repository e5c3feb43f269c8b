"""Seeds of texts; torch is not imported, so that the help of a command is quick."""

import secrets
from typing import TYPE_CHECKING

from transformer_xl.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np


def check_seed(seed: int) -> int:
    """Return the seed; ConfigError if it is outside 0 … 2^64 - 1."""
    if not 0 <= seed < 1 << 64:
        raise ConfigError(f"seed ({seed}) must be between 0 and 2^64 - 1; leave it out to get another text each time")
    return seed


def fresh_seed() -> int:
    """Return a random seed."""
    return secrets.randbits(32)


def seeded_generator(seed: int) -> "np.random.Generator":
    """Return the random numbers of a seed, the same on every machine and with every version of numpy.

    Example:
        >>> seeded_generator(7).random()
        0.625095466604667
    """
    import numpy as np

    return np.random.Generator(np.random.PCG64(check_seed(seed)))


def text_seed(seed: int, prompt: int, sample: int) -> int:
    """Return the seed of text number `sample` of prompt number `prompt`, from which it can be written again alone.

    The very first text has the seed itself. The others have the first 32 bits that numpy's
    `SeedSequence([seed, prompt, sample])` generates, so that neighboring seeds do not give the same texts in another order.

    Example:
        >>> text_seed(7, 0, 0), text_seed(7, 0, 1) == text_seed(8, 0, 0)
        (7, False)
    """
    import numpy as np

    check_seed(seed)
    if prompt == sample == 0:
        return seed
    return int(np.random.SeedSequence([seed, prompt, sample]).generate_state(1)[0])
