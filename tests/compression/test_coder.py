"""The arithmetic coder, and the counts that give its probabilities."""

import math

import numpy as np
import pytest

from transformer_xl.compression.coder import ONE, Decoder, Encoder
from transformer_xl.compression.counting import BitMixer


def drawn(n: int, *, seed: int = 0) -> tuple[list[int], list[int]]:
    """Return probabilities, the extreme ones among them, and bits that come with them."""
    rng = np.random.default_rng(seed)
    p = rng.choice([1, ONE // 1000, ONE // 3, ONE // 2, ONE - ONE // 50, ONE - 1], n)
    return p.tolist(), (rng.random(n) < p / ONE).astype(int).tolist()


@pytest.mark.parametrize("n", [0, 1, 7, 20_000])
def test_bits_come_back_from_as_many_bytes_as_their_probabilities_say(n: int) -> None:
    p, bits = drawn(n)
    encoder = Encoder()
    encoder.code(p, bits)
    data = bytes(encoder.written) + encoder.end()
    assert Decoder(iter(data)).code(p) == bits
    nats = -sum(math.log(each / ONE if bit else 1 - each / ONE) for each, bit in zip(p, bits, strict=True))
    assert abs(len(data) - nats / math.log(256)) < 2


def test_bits_that_hardly_ever_come_are_coded_too() -> None:
    encoder = Encoder()
    bits = [1, 0] * 500
    p = [1, ONE - 1] * 500
    encoder.code(p, bits)
    data = bytes(encoder.written) + encoder.end()
    assert Decoder(iter(data)).code(p) == bits
    assert len(data) == pytest.approx(4 * 1000, abs=2)


def test_both_go_on_from_their_states() -> None:
    p, bits = drawn(3000)
    whole = Encoder()
    whole.code(p, bits)
    data = bytes(whole.written) + whole.end()
    first = Encoder()
    first.code(p[:1234], bits[:1234])
    second = Encoder(first.state)
    second.code(p[1234:], bits[1234:])
    assert bytes(first.written + second.written) + second.end() == data

    begun = Decoder(iter(data))
    assert begun.code(p[:1234]) == bits[:1234]
    assert Decoder(iter(data[begun.state[-1] :]), begun.state).code(p[1234:]) == bits[1234:]


def bits_of(text: bytes, model: np.ndarray | None = None) -> float:
    """Return how many bits a text takes in one lane, where the model says `model` (256,) of each byte."""
    mixer, total = BitMixer(1), 0.0
    for byte in text:
        mixer.begin(np.full((1, 256), 1 / 256) if model is None else model[None])
        for place in range(7, -1, -1):
            bit = byte >> place & 1
            p = int(mixer.probability()[0])
            assert 0 < p < ONE
            total -= math.log2(p / ONE if bit else 1 - p / ONE)
            mixer.learn(np.array([bit]))
        assert mixer.end().tolist() == [byte]
    return total


def test_counts_learn_what_comes_again() -> None:
    rng = np.random.default_rng(0)
    line = bytes(rng.integers(32, 127, 40).astype(np.uint8))
    first, all_lines = bits_of(line), bits_of(line * 20)
    assert first > 40 * 6
    assert (all_lines - first) / 19 < first / 8


def test_a_model_that_knows_is_believed() -> None:
    knows = np.full(256, 0.02 / 255)
    knows[ord("e")] = 0.98
    assert bits_of(b"e" * 30, knows) < bits_of(b"e" * 30) / 2


def test_what_a_context_is_worth_depends_on_how_often_it_was_seen() -> None:
    """Noise: contexts that were seen before say no more than those that were not, and weights learn that."""
    mixer = BitMixer(1)
    for byte in np.random.default_rng(0).integers(0, 4, 150):
        mixer.begin(np.full((1, 256), 1 / 256))
        for place in range(7, -1, -1):
            mixer.probability()
            mixer.learn(np.array([byte >> place & 1]))
        mixer.end()
    once, often = (float(mixer.state()["by_seen"][5, n]) for n in (1, 200))  # the last six bytes
    assert once < often == 0.15  # so often they were never seen


def test_lanes_learn_from_each_other() -> None:
    """What one lane has read is expected in another one, which alone knows nothing of it."""
    mixer, bits = BitMixer(2), 0.0
    texts = (b"abcdefghij" * 12, b"0123456789" * 11 + b"abcdefghij")
    for t in range(120):
        own = np.array([text[t] for text in texts])
        mixer.begin(np.full((2, 256), 1 / 256))
        for place in range(7, -1, -1):
            bit = own >> place & 1
            p = mixer.probability() / ONE
            bits -= math.log2(p[1] if bit[1] else 1 - p[1]) if t > 111 else 0
            mixer.learn(bit)
        mixer.end()
    assert bits < 8 * 3
