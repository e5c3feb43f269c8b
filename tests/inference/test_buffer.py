"""`KeyValueMemory`: what its ring buffers hold, how many bytes that is, and that a reset leaves nothing of the old text."""

import pytest
import torch
from torch import Tensor

from transformer_xl.inference.buffer import KeyValueMemory


def filled(batch_size: int = 4, dtype: torch.dtype = torch.float32) -> KeyValueMemory:
    """A memory of two layers whose numbers are all different from zero."""
    end = torch.arange(batch_size) * 7 + 1
    return KeyValueMemory(
        keys=tuple(torch.randn(3, batch_size, 16, 5, dtype=dtype) for _ in range(2)),
        values=tuple(torch.randn(3, batch_size, 5, 16, dtype=dtype) for _ in range(2)),
        inputs=tuple(torch.zeros(batch_size, 0, 0) for _ in range(2)),
        tokens=torch.zeros(batch_size, 0, dtype=torch.int64),
        end=end,
        n_valid=end.clamp(max=16),
    )


def copies(memory: KeyValueMemory) -> dict[str, Tensor]:
    return {name: x.clone() for name, x in memory.state_dict().items()}


def of_row(name: str, x: Tensor, row: int) -> Tensor:
    return x[row] if name in ("end", "n_valid") else x[:, row]


@pytest.mark.parametrize(("dtype", "size"), [(torch.float32, 4), (torch.bfloat16, 2), (torch.float64, 8)])
def test_bytes_are_those_of_the_formula(dtype: torch.dtype, size: int) -> None:
    memory = filled(4, dtype)
    assert memory.n_bytes == 2 * 4 * 16 * 2 * 3 * 5 * size + 16 * 4
    assert memory.n_bytes == sum(x.untyped_storage().nbytes() for x in memory.state_dict().values())


@pytest.mark.parametrize("forget", [[False] * 4, [True] * 4, [False, True, True, False], [True, False, False, False]])
def test_rows_that_are_reset_hold_zeros_and_others_what_they_held(forget: list[bool]) -> None:
    memory = filled()
    memory.keys[0][:, 1] = float("nan")
    memory.values[1][:, 1] = float("inf")
    before, places = copies(memory), [x.data_ptr() for x in memory.state_dict().values()]
    memory.reset(torch.tensor(forget))
    assert [x.data_ptr() for x in memory.state_dict().values()] == places, "in place"
    for name, x in memory.state_dict().items():
        for row, forgets in enumerate(forget):
            now, then = of_row(name, x, row), of_row(name, before[name], row)
            assert now.count_nonzero() == 0 if forgets else torch.equal(now.nan_to_num(9.0), then.nan_to_num(9.0)), name


def test_rows_of_several_memories_stand_one_after_another() -> None:
    parts = [filled(1), filled(2)]
    joined = KeyValueMemory.concatenate(parts)
    assert joined.batch_size == 3
    for name, x in joined.state_dict().items():
        for row, (part, own) in enumerate(((parts[0], 0), (parts[1], 0), (parts[1], 1))):
            assert torch.equal(of_row(name, x, row), of_row(name, part.state_dict()[name], own))
    joined.reset(torch.ones(3, dtype=torch.bool))
    assert int(parts[1].end[1]) == 8, "a copy: the parts live on"


@pytest.mark.parametrize("n", [1, 4, 9])
def test_a_ring_keeps_the_last_of_more_positions_than_it_holds(n: int) -> None:
    memory, ring = filled(2), torch.zeros(2, 4)
    x = torch.arange(1.0, 2 * n + 1).view(2, n)
    memory.keep(ring, slice(None), x)
    memory.advance(slice(None), n)
    k = min(n, 3)
    assert torch.equal(memory.last(ring, slice(None), k), x[:, -k:])
