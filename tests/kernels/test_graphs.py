"""A step in fixed places, as a CUDA graph needs it: the bits of any other step, and nothing that waits or depends on data."""

from collections import Counter
from collections.abc import Iterable
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.inference.test_reader import clone, model_of, tokens
from transformer_xl.generation.decoder import Decoder
from transformer_xl.inference import reader as reader_module
from transformer_xl.inference.buffer import KeyValueMemory
from transformer_xl.inference.reader import Reader
from transformer_xl.inference.softmax import FrozenSoftmax
from transformer_xl.kernels import graphs as graphs_module
from transformer_xl.kernels.device import InferencePrecision
from transformer_xl.kernels.graphs import Captured, Graphs

WAITS = {
    "_local_scalar_dense", "nonzero", "nonzero_static", "masked_select", "_unique2", "unique_dim", "unique_consecutive",
    "equal", "is_nonzero", "repeat_interleave", "lift_fresh", "lift_fresh_copy", "bincount",
}  # fmt: skip
"""Operations that read a value on the host, or make a tensor of the host's values."""

NAMES = ("paper", "cutoffs, div_val 2", "shaw", "rotary", "alibi", "averages", "gru gate, averages")
WATCHED = (*NAMES, "pairs, averages", "shaw, zero first memory", "gelu, untie_r, same_length besides self")


class Strict(TorchDispatchMode):
    """Refuses what a graph cannot hold, and notes what there was."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        assert name not in WAITS, f"{name} waits for the device"
        if name.startswith("index"):
            flat = [x for arg in args for x in (arg if isinstance(arg, list | tuple) else [arg]) if isinstance(x, Tensor)]
            assert all(x.dtype != torch.bool for x in flat[1:]), f"{name} by a mask has as many results as it has ones"
        self.names.append(name)
        return func(*args, **(kwargs or {}))


def pair(name: str, **options: Any) -> tuple[Reader, Reader]:
    return Reader(model_of(name, torch.float32), **options), Reader(model_of(name, torch.float32), **options)


def same(one: KeyValueMemory, other: KeyValueMemory) -> bool:
    own, others = one.state_dict(), other.state_dict()
    return all(torch.equal(x, others[name]) for name, x in own.items())


@pytest.mark.parametrize(
    ("name", "precision"),
    [*((name, "fp32") for name in NAMES), *((name, narrow) for name in ("paper", "rotary") for narrow in ("bf16", "int8"))],
)
def test_steps_in_fixed_places_have_the_bits_of_others(name: str, precision: InferencePrecision) -> None:
    """All rows and some, segments and resets in between, and a memory in other places in the middle."""
    eager, fixed = pair(name, tgt_len=4, precision=precision)
    memories = [reader.empty_memory(3) for reader in (eager, fixed)]
    fixed.capture(memories[1])
    assert fixed.captured and not eager.captured
    kept: list[tuple[Tensor, ...]] = []
    for i in range(16):
        ids, active = tokens(3), torch.rand(3) < 0.6
        states = [
            reader.step(ids, memory, active=active if i % 3 else None)
            for reader, memory in zip((eager, fixed), memories, strict=True)
        ]
        both = [(h, *reader.head(h)) for reader, h in zip((eager, fixed), states, strict=True)]
        assert all(torch.equal(right, found) for right, found in zip(*both, strict=True))
        assert same(*memories)
        kept += both
        if i % 5 == 4:
            for reader, memory in zip((eager, fixed), memories, strict=True):
                reader.reset(memory, torch.tensor([False, True, False]))
                reader.read(ids[:2].unsqueeze(0), memory, rows=slice(1, 2))
        if i == 10:
            memories = [clone(memory) for memory in memories]
    for right, found in zip(kept[::2], kept[1::2], strict=True):
        assert all(map(torch.equal, right, found)), "results are copies, which later steps leave alone"


@pytest.mark.parametrize("name", ["paper", "cutoffs, div_val 2"])
def test_a_decoder_takes_scores_from_the_graph_if_some_rows_wait(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The head is computed once for each step, and the rows that wait keep their scores."""
    eager, fixed = (Decoder(model_of(name, torch.float32), batch_size=3, tgt_len=4) for _ in range(2))
    assert fixed.kept
    fixed.kept.reader.capture(fixed.kept.memory)
    for decoder in (eager, fixed):
        decoder.feed([[1, 2], [3], []])
    head, calls = FrozenSoftmax.head, list[object]()
    for active in ([True, False, False], [False, True, True], [True, True, True]):
        ids, rows = tokens(3), torch.tensor(active)
        expected = eager.step(ids, active=rows).full()
        calls.clear()
        with monkeypatch.context() as patch:
            patch.setattr(FrozenSoftmax, "head", lambda self, *args, **more: (calls.append(0), head(self, *args, **more))[1])
            scores = fixed.step(ids, active=rows)
        assert len(calls) == 1
        assert torch.equal(scores.full().nan_to_num(7.0), expected.nan_to_num(7.0))


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("name", WATCHED)
def test_a_step_asks_for_no_value(name: str, fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if fused:
        pytest.importorskip("triton", reason="the fused kernels are written in Triton, which is not installed")
        monkeypatch.setattr("transformer_xl.inference.token_kernels.launch", lambda *_, **__: None)
    reader = Reader(model_of(name, torch.float32), tgt_len=4)
    if fused:
        reader.interpret(fused=True)
    memory = reader.empty_memory(2)
    strict = Strict()
    ran: list[int] = []

    class Watched(Captured):
        def __init__(self, function: Any, device: torch.device, inputs: Any) -> None:
            def watched(*places: Tensor) -> tuple[Tensor, ...]:
                with strict:
                    ran.append(1)
                    return function(*places)

            super().__init__(watched, device, inputs)

    monkeypatch.setattr(reader_module, "Captured", Watched)
    reader.capture(memory)
    reader.step(tokens(2), memory, active=torch.tensor([True, False]))
    assert ran and "add_" in strict.names, "it has been watched"


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("name", WATCHED)
def test_a_segment_asks_for_no_value(name: str, fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever rows stand; a CPU, for which nothing waits, looks whether they stand at one slot."""
    reader = Reader(model_of(name, torch.float32), tgt_len=4)
    if fused:
        pytest.importorskip("triton", reason="the fused kernels are written in Triton, which is not installed")
        if not reader._model.attention_kind.by_keys:
            pytest.skip("what it scores by distance is no product with a key")
        monkeypatch.setattr("transformer_xl.kernels.flash.Launcher.__call__", lambda *_: None)
    reader.interpret(fused=fused)
    monkeypatch.setattr(reader_module, "common_rows", lambda x: x)  # which only a CPU compares
    memory, ids, labels = reader.empty_memory(2), tokens(2, 4), tokens(2, 4)
    reader.softmax.check(labels)
    strict = Strict()
    with torch.no_grad(), strict:
        h_BTD = reader.read(ids, memory)
        reader.softmax.nll_at(h_BTD.flatten(0, 1), labels.flatten(), (1.0, 0.8), checked=True)
        if not reader.softmax.has_tails:
            reader.softmax.nll(h_BTD.flatten(0, 1), labels.flatten(), checked=True)
    assert "add_" in strict.names, "it has been watched"


def test_compiling_and_interpreting_end_a_graph() -> None:
    reader, _ = pair("paper", tgt_len=4)
    reader.capture(reader.empty_memory(1))
    reader.interpret()
    assert not reader.captured
    reader.capture(reader.empty_memory(1))
    reader.compile()
    assert not reader.captured and reader.compiled


def test_what_watches_steps_sees_waiting() -> None:
    for wait in (lambda x: x.item(), lambda x: x.nonzero(), lambda x: x[x > 0], lambda x: torch.tensor([1.0]) + x):
        with pytest.raises(AssertionError), Strict():
            wait(torch.ones(1))


class Kept(Graphs):
    """Graphs that are only counted."""

    def __init__(self) -> None:
        self._must, self.problem, self._times, self._captured = False, None, Counter(), {}
        self.captures: list[int] = []

    def _capture(self, compute: Any, inputs: Any) -> Any:
        self.captures.append(inputs)
        return lambda _: torch.zeros(())

    def launched(self, keys: Iterable[int]) -> list[int]:
        """Launch work, and return what was captured for it."""
        del self.captures[:]
        for key in keys:
            self._graph_of(key, lambda _: torch.zeros(()), cast("Any", key))
        return list(self.captures)


def test_graphs_make_room_for_work_that_comes_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs_module, "_MOST_GRAPHS", 4)
    graphs = Kept()
    assert graphs.launched(range(4)) == []
    assert graphs.launched([0, 1, 2, 3, 0, 1, 2, 3]) == [0, 1, 2, 3], "the second time"
    assert graphs.launched([0, 9] * 8) == [], "there is no room"
    assert graphs.launched([9]) == [9]
    assert list(graphs._captured) == [2, 3, 0, 9], "the one used longest ago made it"
    assert graphs.launched([1] * 8) == []
    assert graphs.launched([1]) == [1]
    assert len(graphs) == 4


def test_more_shapes_than_there_is_room_for_are_hardly_ever_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """If each were captured whenever it comes, every step would wait for a capture."""
    monkeypatch.setattr(graphs_module, "_MOST_GRAPHS", 4)
    graphs = Kept()
    graphs.launched([*range(10)] * 20)
    assert len(graphs.launched([*range(10)] * 20)) <= 200 / 8
