"""`KeyValueMemory`: what its ring buffers hold, how many bytes that is, and that a reset leaves nothing of the old text."""

import pytest
import torch
from torch import Tensor

from transformer_xl.model.key_value_memory import KeyValueMemory


def empty(batch_size: int, dtype: torch.dtype = torch.float32) -> KeyValueMemory:
    return KeyValueMemory.empty(batch_size, n_layer=2, n_head=3, d_head=5, n_slot=16, dtype=dtype)


def filled(batch_size: int = 4, dtype: torch.dtype = torch.float32) -> KeyValueMemory:
    """A memory whose numbers are all different from zero."""
    memory = empty(batch_size, dtype)
    for x in (*memory.keys, *memory.values):
        x.normal_()
    memory.end.copy_(torch.arange(batch_size) * 7 + 1)
    memory.n_valid.copy_(memory.end.clamp(max=16))
    return memory


def copies(memory: KeyValueMemory) -> dict[str, Tensor]:
    return {name: x.clone() for name, x in memory.state_dict().items()}


def of_row(name: str, x: Tensor, row: int) -> Tensor:
    return x[row] if name in ("end", "n_valid") else x[:, row]


def test_an_empty_memory_is_zeros_of_the_shape_asked_for() -> None:
    memory = empty(4, torch.bfloat16)
    assert [x.shape for x in memory.keys] == [(3, 4, 16, 5)] * 2
    assert [x.shape for x in memory.values] == [(3, 4, 5, 16)] * 2
    assert {x.dtype for x in (*memory.keys, *memory.values)} == {torch.bfloat16}
    assert memory.end.dtype == memory.n_valid.dtype == torch.int64
    assert (memory.batch_size, memory.n_slot) == (4, 16)
    assert all(x.count_nonzero() == 0 for x in memory.state_dict().values())
    buffers = [x.untyped_storage().data_ptr() for x in memory.state_dict().values()]
    assert len(set(buffers)) == len(buffers), "layers share nothing"


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


def test_a_state_comes_back_in_place() -> None:
    memory, other = filled(), filled()
    state, places = copies(memory), [x.data_ptr() for x in other.state_dict().values()]
    other.load_state_dict(state)
    assert [x.data_ptr() for x in other.state_dict().values()] == places
    assert all(torch.equal(x, state[name]) for name, x in other.state_dict().items())
    memory.reset(torch.ones(4, dtype=torch.bool))
    assert int(other.end[3]) == 22 and other.keys[0].count_nonzero() > 0


@pytest.mark.parametrize("fault", ["missing", "surplus", "shape", "type", "rows"])
def test_a_state_of_another_shape_is_refused_and_nothing_taken_over(fault: str) -> None:
    memory = filled()
    state, before = copies(filled(4)), copies(memory)
    if fault == "missing":
        del state["values.1"]
    elif fault == "surplus":
        state["keys.2"] = state["keys.1"]
    elif fault == "shape":
        state["values.1"] = state["values.1"].transpose(2, 3)
    elif fault == "type":
        state["n_valid"] = state["n_valid"].int()
    else:
        state = copies(filled(3))
    with pytest.raises(ValueError, match="not those of a memory of this shape"):
        memory.load_state_dict(state)
    assert all(torch.equal(x, before[name]) for name, x in memory.state_dict().items())
