"""A random generator as a line of text, from which it goes on.

torch hands out the state of its generator as bytes and takes them back nearly unseen: with a forged place it would read past
its words. So the text holds the words, and how many of them were used, and whatever a text of that length says is a generator.

Reference: Matsumoto and Nishimura 1998 (MT19937), whose 624 words are replaced together once all were used.
"""

import base64

import numpy as np
import torch

_N = 624
_TORCH = np.dtype([("seed", "u8"), ("left", "i4"), ("seeded", "i4"), ("used", "u8"), ("words", "u8", _N), ("normal", "V40")])
"""Of a generator on the CPU. `left` counts down to the draw that replaces the words: they last for left - 1 more."""

_STORED = np.dtype([("words", "<u4", _N), ("used", "<u2")])


def generator_to_text(generator: torch.Generator) -> str:
    """Return a generator on the CPU as text; its seed, and halves of pairs of normal numbers, are not kept."""
    state = generator.get_state().numpy().view(_TORCH)[0]
    stored = np.zeros((), _STORED)
    stored["words"], stored["used"] = state["words"], state["used"]
    return base64.b64encode(stored.tobytes()).decode("ascii")


def generator_from_text(text: str) -> torch.Generator:
    """Return the generator that a text holds.

    Raises:
        ValueError: it holds none.

    Example:
        >>> generator = torch.Generator().manual_seed(7)
        >>> same = generator_from_text(generator_to_text(generator))
        >>> torch.equal(torch.rand(3, generator=same), torch.rand(3, generator=generator))
        True
    """
    data = base64.b64decode(text, validate=True)
    if len(data) != _STORED.itemsize:
        raise ValueError(f"{len(data)} bytes are not the {_STORED.itemsize} of a generator")
    stored = np.frombuffer(data, _STORED)[0]
    used = int(stored["used"])
    if used > _N:
        raise ValueError(f"{used} of {_N} words cannot have been used")
    generator = torch.Generator()
    new = generator.get_state()
    state = new.numpy().view(_TORCH)
    state["words"], state["used"], state["left"] = stored["words"], used, _N + 1 - used if used else 1
    generator.set_state(new)
    return generator
