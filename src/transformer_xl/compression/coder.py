"""An arithmetic coder of bits: it takes as many bytes as the probabilities say.

An interval of 64-bit numbers is divided in proportion to the probability of a 1, and the part of the bit that came is the next
interval. A leading byte that all its numbers share is written. All are integers, so every machine rounds them alike.

Reference: Witten, Neal and Cleary 1987, Arithmetic coding for data compression. Known deviation: bytes, not bits, are written,
and no carry is waited for, which costs nothing that one can measure with 64 bits.
"""

from collections.abc import Iterator, Sequence

ONE = 2**32
"""Probabilities are integers p / ONE, more than 0 and less than 1."""

_MOST = 2**64 - 1


class Encoder:
    """Turns bits into bytes.

    Args:
        state: interval of an encoder that has stopped.

    Attributes:
        state: the interval.
        written: bytes that are certain; the caller takes them away.

    Example:
        >>> encoder = Encoder()
        >>> _ = encoder.code([ONE // 2] * 12, [0, 1, 0, 0, 0, 0, 0, 1, 0, 1, 0, 0])  # as likely as not: a bit takes a bit
        >>> (bytes(encoder.written) + encoder.end()).hex()
        'beb1'
    """

    def __init__(self, state: Sequence[int] | None = None) -> None:
        self.state = list(state or (0, _MOST))
        self.written = bytearray()

    def code(self, probabilities: list[int], bits: list[int] | None, /) -> list[int]:
        """Write bits, each with the probability that it is a 1, and return them."""
        assert bits is not None
        low, high = self.state
        for p, bit in zip(probabilities, bits, strict=True):
            middle = low + (high - low) * p // ONE
            low, high = (low, middle) if bit else (middle + 1, high)
            while not (low ^ high) >> 56:
                self.written.append(high >> 56)
                low, high = low << 8 & _MOST, (high << 8 & _MOST) | 255
        self.state = [low, high]
        return bits

    def end(self) -> bytes:
        """Return the last byte; a decoder reads zeros after it."""
        return bytes([(self.state[0] >> 56) + 1]) if self.state[0] else b""


class Decoder:
    """Turns the bytes of an `Encoder` back into bits.

    Args:
        data: the bytes, after those that `state` has read.
        state: of a decoder that has stopped.

    Attributes:
        state: the interval, the number in it, and how many bytes were read.
    """

    def __init__(self, data: Iterator[int], state: Sequence[int] | None = None) -> None:
        self._data = data
        self.state = list(state or (0, _MOST, int.from_bytes(bytes(next(data, 0) for _ in range(8))), 8))

    def code(self, probabilities: list[int], bits: list[int] | None = None, /) -> list[int]:
        """Read as many bits as there are probabilities."""
        (low, high, value, n_read), found = self.state, []
        for p in probabilities:
            middle = low + (high - low) * p // ONE
            found.append(bit := int(value <= middle))
            low, high = (low, middle) if bit else (middle + 1, high)
            while not (low ^ high) >> 56:
                low, high = low << 8 & _MOST, (high << 8 & _MOST) | 255
                value, n_read = (value << 8 & _MOST) | next(self._data, 0), n_read + 1
        self.state = [low, high, value, n_read]
        return found
