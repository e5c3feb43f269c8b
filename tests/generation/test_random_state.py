"""A generator goes on from its text, and whatever a text says is a generator or an error."""

import base64
import random

import pytest
import torch

from transformer_xl.generation.random_state import generator_from_text, generator_to_text


def darts(generator: torch.Generator, n: int) -> list[float]:
    return [float(torch.rand((), dtype=torch.float64, generator=generator)) for _ in range(n)]


@pytest.mark.parametrize("n_drawn", [0, 1, 311, 312, 313, 624, 1000])
@pytest.mark.parametrize("seed", [0, 7, 2**64 - 1])
def test_it_goes_on_at_every_place(seed: int, n_drawn: int) -> None:
    """The words are replaced after each 312 numbers."""
    generator = torch.Generator().manual_seed(seed)
    darts(generator, n_drawn)
    same = generator_from_text(generator_to_text(generator))
    assert generator_to_text(same) == generator_to_text(generator)
    assert darts(same, 700) == darts(generator, 700)


def test_an_odd_number_of_words_may_have_been_used() -> None:
    generator = torch.Generator().manual_seed(3)
    torch.rand((), generator=generator)
    assert darts(generator_from_text(generator_to_text(generator)), 400) == darts(generator, 400)


def test_whatever_a_text_says_draws_numbers_in_range() -> None:
    generator = random.Random(1)
    for used in [0, 1, 623, 624]:
        for words in (generator.randbytes(2496), bytes(2496), b"\xff" * 2496):
            forged = generator_from_text(base64.b64encode(words + used.to_bytes(2, "little")).decode())
            assert all(0 <= dart < 1 for dart in darts(forged, 700))


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("", "0 bytes are not the 2498"),
        (base64.b64encode(bytes(2497)).decode(), "2497 bytes are not the 2498"),
        (base64.b64encode(bytes(5056)).decode(), "5056 bytes are not the 2498"),
        (base64.b64encode(bytes(2496) + (625).to_bytes(2, "little")).decode(), "625 of 624 words cannot have been used"),
        (base64.b64encode(bytes(2496) + b"\xff\xff").decode(), "65535 of 624 words"),
        ("\x1b[31m", "base64"),
        ("ж" * 3332, "ASCII"),
    ],
)
def test_what_is_no_generator(text: str, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        generator_from_text(text)
