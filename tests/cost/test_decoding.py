"""Bytes of decoding, counted by hand."""

import pytest

from tests.helpers import tiny_model
from transformer_xl.cost.decoding import (
    DecoderBytes,
    count_bytes,
)
from transformer_xl.generation.decoder import Decoder

# of a tiny model: 13 tokens, 2 layers, d_model 10, 3 heads of 4, d_inner 14, 5 positions of memory
MATRICES = 36 * 10 + 10 * 12 + 14 * 10 + 10 * 14  # of a layer
OUTPUTS = 36 + 10 + 14 + 10
VECTORS = 14 + 10 + 4 * 10 + 2 * 12  # biases, two layer norms, u and v
SLOTS = 80  # 6 keys in sight and pieces of 64, in multiples of 16
KEYS = 3 * SLOTS * 4  # of a layer, or of all distances
ADAPTIVE = {"cutoffs": (4, 8), "div_val": 2}


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(
    ("precision", "weights", "size"),
    [
        ("fp32", 2 * (MATRICES + VECTORS) * 4 + (130 + 13) * 4, 4),
        ("bf16", 2 * (MATRICES * 2 + VECTORS * 4) + 130 * 2 + 13 * 4, 2),
        ("int8", 2 * (MATRICES + OUTPUTS * 4 + VECTORS * 4) + 130 + 13 * 4 + 13 * 4, 2),
    ],
)
def test_bytes_of_a_token(precision, weights: int, size: int, rows: int) -> None:
    decoder = Decoder(tiny_model(), batch_size=rows, precision=precision)
    counted = count_bytes(decoder)
    assert counted is not None
    assert (counted.weights, counted.tails) == (weights, ())
    assert (counted.positions, counted.memory, counted.embedding) == (2 * KEYS * size, 2 * 2 * KEYS * size, 10 * 4)


@pytest.mark.parametrize(
    ("precision", "weights", "size"),
    [("fp32", 0, 4), ("bf16", 2 * MATRICES * 2 + 130 * 2, 2), ("int8", 2 * (MATRICES + OUTPUTS * 4) + 130 + 13 * 4, 2)],
)
def test_bytes_of_a_session(precision, weights: int, size: int) -> None:
    counted = count_bytes(Decoder(tiny_model(), batch_size=3, precision=precision))
    memory, positions = 3 * 2 * 2 * KEYS * size + 3 * 16, 2 * KEYS * size
    assert counted is not None
    total = memory + positions + weights
    assert counted.held == {"total": total, "memory": memory, "positions": positions, "weights": weights}


def test_a_projected_embedding_is_looked_up_narrow_and_multiplied() -> None:
    narrow, wide = (count_bytes(Decoder(tiny_model(d_embed=d_embed))) for d_embed in (6, 10))
    assert narrow is not None
    assert wide is not None
    assert narrow.embedding == 6 * 4
    assert narrow.weights - wide.weights == (13 * 6 - 13 * 10 + 2 * 6 * 10) * 4  # projected on the way in and on the way out


def test_tails_are_counted_apart() -> None:
    decoder = Decoder(tiny_model(**ADAPTIVE))
    counted, plain = count_bytes(decoder), count_bytes(Decoder(tiny_model()))
    assert counted is not None
    assert plain is not None
    tails = ((4 * 5 + 4 + 10 * 5) * 4, (5 * 2 + 5 + 10 * 2) * 4)
    head = (4 * 10 + 4 + 10 * 10) + (2 * 10 + 2) + (100 + 50 + 20)  # of the softmax, its classes, projections of the embedding
    assert counted.tails == tails
    assert counted.weights == plain.weights - (130 + 13) * 4 + head * 4
    assert counted.embedding == (10 + 5 + 2) * 4  # looked up in every cluster


def test_shaw_adds_a_bias_for_each_distance() -> None:
    shaw = count_bytes(Decoder(tiny_model(attention="shaw", max_klen=9), precision="bf16"))
    plain = count_bytes(Decoder(tiny_model(), precision="bf16"))
    assert shaw is not None
    assert plain is not None
    assert plain.positions == 2 * KEYS * 2
    assert shaw.positions == 2 * 3 * 9 * (4 * 2 + 4)  # the table tells nine distances apart; heads of 4 in bf16, biases in fp32


def test_rows_share_weights_and_positions() -> None:
    counted = DecoderBytes(weights=1000, copies=7, positions=100, memory=10, embedding=1, held_memory=50, tails=(400, 8000))
    assert counted.of_step(1, [0.0, 0.0]) == 1111
    assert counted.of_step(4, [0.0, 0.0]) == 1144
    assert counted.of_step(4, [1.0, 0.25]) == 1144 + 400 + 2000


@pytest.mark.parametrize("changes", [{"mem_len": 0}, {"attention": "vaswani"}])
def test_where_tokens_are_read_again_nothing_is_counted(changes) -> None:
    decoder = Decoder(tiny_model(**changes))
    assert count_bytes(decoder) is None
