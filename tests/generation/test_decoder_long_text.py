"""However long a stream, a decoder keeps as much of it as at the beginning, and what it says is as right."""

import gc
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from tests.helpers import assert_close, tiny_model
from transformer_xl.generation.decoder import Decoder
from transformer_xl.reading.stream import KeptKeys

NOISE_MB = 1.0
"""What resident memory may differ by at the end of a steady stretch: pages that the allocator gets and does not give back."""


def memory_bytes(decoder: Decoder) -> int:
    assert isinstance(decoder._stream, KeptKeys)
    return sum(x.untyped_storage().nbytes() for x in decoder._stream.memory.state_dict().values())


def anonymous_bytes() -> int:
    """Resident memory; on Linux without pages of libraries, which the system takes away and brings back as it likes."""
    status = Path("/proc/self/status")
    found = re.search(r"RssAnon:\s+(\d+)", status.read_text()) if status.exists() else None
    return int(found[1]) * 1024 if found else psutil.Process().memory_info().rss


def read_long(decoder: Decoder, n_token: int, every: int) -> Iterator[tuple[int, float, int]]:
    """Read by steps and now and then by pieces; yield tokens read, resident MB and objects alive, at equal distances."""
    n_read, generator = 0, torch.Generator().manual_seed(1)
    ids = torch.randint(0, 13, (decoder.batch_size, n_token), generator=generator)
    while n_read < n_token:
        length = 7 if n_read % 50 == 0 else 1
        piece = ids[:, n_read : n_read + length]
        decoder.feed(piece) if length > 1 else decoder.step(piece[:, 0])
        n_read += piece.shape[1]
        if n_read % every < piece.shape[1]:
            gc.collect()
            yield n_read, anonymous_bytes() / 1e6, len(gc.get_objects())


def check_constant(n_token: int, every: int) -> list[tuple[int, float, int]]:
    """Read a long text and compare memory after the first fifth with memory at the end."""
    torch.manual_seed(0)
    decoder = Decoder(tiny_model(cutoffs=(4, 9)), batch_size=2, tgt_len=8)
    before = memory_bytes(decoder)
    gc.freeze()  # objects of other tests are not looked at again and again
    try:
        points = list(read_long(decoder, n_token, every))
    finally:
        gc.unfreeze()
    steady = points[len(points) // 5 :]
    n_read, resident, n_object = (np.array(column, dtype=float) for column in zip(*steady, strict=True))
    slope = np.polyfit(n_read, resident, 1)[0]
    assert slope * (n_read[-1] - n_read[0]) <= NOISE_MB, f"{slope * 1e6:.3g} bytes per token of {resident}"
    assert n_object[-1] <= n_object[0] + 100, f"{n_object[-1] - n_object[0]:.0f} objects more"
    assert memory_bytes(decoder) == before
    return points


def test_memory_does_not_grow_with_the_text() -> None:
    check_constant(800, every=80)


@pytest.mark.faults
@pytest.mark.long
@pytest.mark.timeout(1200)
def test_memory_does_not_grow_with_a_long_text() -> None:
    for n_read, resident, n_object in check_constant(100_000, every=5_000):
        print(f"{n_read:>7} tokens: {resident:.1f} MB, {n_object} objects")


@pytest.mark.parametrize(("precision", "itemsize"), [("fp32", 4), ("bf16", 2), ("int8", 2)])
@pytest.mark.parametrize("options", [{}, {"mem_len": 70}, {"same_length": True, "same_length_besides_self": True}])
def test_bytes_are_those_of_the_formula(options: dict[str, Any], precision: Any, itemsize: int) -> None:
    """n_layer x B x C x 2 x N x H numbers and two counters per row; C is the window and a piece, rounded up to pieces or 16."""
    model, B = tiny_model(**options), 3
    decoder = Decoder(model, batch_size=B, precision=precision)
    assert isinstance(decoder._stream, KeptKeys)
    C = decoder._stream.memory.n_slot
    seen = (model.window or model.mem_len + 1) + decoder.tgt_len
    assert seen <= C < seen + max(decoder.tgt_len, 16)
    config = model.config
    assert memory_bytes(decoder) == config.n_layer * B * C * 2 * config.n_head * config.d_head * itemsize + 16 * B
    assert decoder._stream.memory.n_bytes == memory_bytes(decoder)


@pytest.mark.parametrize("options", [{}, {"same_length": True}, {"attention": "shaw", "max_klen": 4}, {"attention": "rotary"}])
def test_the_last_token_of_a_long_text_is_as_right_as_the_first(options: dict[str, Any]) -> None:
    """What a score depends on lies at most n_layer x mem_len back; read by a new decoder, that much says the same."""
    model = tiny_model(**options)
    ids = torch.randint(0, 13, (1, 700), generator=torch.Generator().manual_seed(2))
    decoder = Decoder(model, tgt_len=13)
    for piece in ids.split(41, dim=1):
        decoder.feed(piece)
    n_seen = model.config.n_layer * model.mem_len + 1
    assert_close("scores", decoder.scores.full(), Decoder(model).feed(ids[:, -n_seen:]), 1e-5)
    for token in ids[:, :30].split(1, dim=1):
        decoder.feed(token)
    assert_close("scores", decoder.scores.full(), Decoder(model).feed(ids[:, 30 - n_seen : 30]), 1e-5)


def test_counters_do_not_run_out() -> None:
    """After 2^62 tokens a row goes on as ever, to the last bit."""
    model = tiny_model()
    decoder, old = (Decoder(model, batch_size=2, tgt_len=4) for _ in range(2))
    ids = torch.randint(0, 13, (2, 60))
    for each in (decoder, old):
        each.feed(ids[:, :20])
    assert isinstance(old._stream, KeptKeys)
    n_slot = old._stream.memory.n_slot
    old._stream.memory.end.add_(2**62 // n_slot * n_slot)
    for at in range(20, 60, 4):
        assert torch.equal(old.step(ids[:, at]).full(), decoder.step(ids[:, at]).full())
        assert torch.equal(old.feed(ids[:, at + 1 : at + 4]), decoder.feed(ids[:, at + 1 : at + 4]))
