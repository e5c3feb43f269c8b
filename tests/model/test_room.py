"""What settings ask for is compared with two limits before it is allotted."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.helpers import tiny_model
from transformer_xl.config.model import LstmConfig
from transformer_xl.errors import ConfigError
from transformer_xl.generation.decoder import Decoder
from transformer_xl.model import room
from transformer_xl.model.memory import Mems
from transformer_xl.model.room import check_room, check_unasked, free_bytes, shared
from transformer_xl.model.sequence_model import make_model
from transformer_xl.model.transformer_xl import TransformerXL
from transformer_xl.reading.evaluation import evaluate

IDS = torch.arange(12) % 13
LONG = 100_000_000


@pytest.fixture
def greedy(tmp_path: Path) -> TransformerXL:
    """A small model whose file asks for a long memory."""
    tiny_model().save_pretrained(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(values | {"mem_len": LONG, "zero_first_memory": True}))
    return TransformerXL.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    "use",
    [
        Decoder,
        lambda model: evaluate(model, IDS),
        lambda model: model(IDS.unsqueeze(0)),
        lambda model: model.init_mems(1),
        lambda model: model.with_context(clamp_len=3).init_mems(1),
    ],
)
def test_a_small_file_cannot_ask_for_a_huge_memory(greedy: TransformerXL, use: Callable[[TransformerXL], object]) -> None:
    message = (
        r"the model's file asks for a memory of 100000000 positions, which takes 28.8 GB for each text, and a file may ask for "
        r"268 MB at most; if that is right, ask for it yourself with --mem-len 100000000 \(in Python mem_len=100000000\)$"
    )
    with pytest.raises(ConfigError, match=message):
        use(greedy)


def test_whoever_asks_for_it_gets_it(greedy: TransformerXL, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "UNASKED_BYTES", 100)
    n_weight = sum(parameter.nbytes for parameter in greedy.parameters())
    longest = 2 * n_weight // (4 * greedy.config.numbers_per_position)
    greedy.check_memory(longest)
    with pytest.raises(ConfigError, match="may ask for"):
        greedy.check_memory(longest + 1)
    assert Decoder(greedy, mem_len=longest + 1).mem_len == longest + 1
    assert greedy.with_context(mem_len=longest + 1).init_mems(1).length == longest + 1
    assert evaluate(greedy, IDS, mem_len=3).tokens == 11
    assert tiny_model(mem_len=longest + 1).init_mems(1).length == longest + 1  # no file asks for it


def test_what_does_not_fit_into_the_machine_is_refused_before_it_is_allotted(monkeypatch: pytest.MonkeyPatch) -> None:
    model, other = tiny_model(), tiny_model().with_context(mem_len=10**12)
    monkeypatch.setattr(torch, "zeros", lambda *_, **__: pytest.fail("it was allotted"))
    message = r"takes [0-9.e+]+ [TP]B, and [0-9.]+ GB are free; lower mem_len"
    for use in (
        lambda: Decoder(model, mem_len=10**12),
        lambda: Decoder(model, tgt_len=10**12),
        lambda: model.init_mems(10**12),
        lambda: other.init_mems(1),
    ):
        with pytest.raises(ConfigError, match=message):
            use()
    with pytest.raises(ConfigError, match=r"a model of 1,000,000,000 layers takes 50 TB, and .* are free; lower model.n_layer"):
        make_model(LstmConfig(vocab_size=5, n_layer=10**9))


def test_limits_are_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "free_bytes", lambda device: 10**9)
    check_room(10**9, None, what="x", remedy="y")
    with pytest.raises(ConfigError, match=r"^x takes 1.5 GB, and 1 GB are free; y$"):
        check_room(1_500_000_000, "cpu", what="x", remedy="y")
    check_unasked(4 * 10**9, 2 * 10**9, what="x", remedy="y")
    with pytest.raises(ConfigError, match=r"^x takes 4 GB for each text, and a file may ask for 2 GB at most; y$"):
        check_unasked(4 * 10**9, 10**9, what="x", remedy="y")
    monkeypatch.setattr(room, "free_bytes", lambda device: None)
    check_room(10**20, None, what="x", remedy="y")


def test_the_least_of_what_is_known_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "most").write_text("5000000\n")
    (tmp_path / "used").write_text("2000000\n")
    monkeypatch.setattr(room, "_held", lambda: 7)
    monkeypatch.setattr(room, "_CGROUPS", ((str(tmp_path), "most", "used"), (str(tmp_path), "gone", "gone")))
    assert free_bytes(torch.device("cpu")) == 3_000_007
    (tmp_path / "most").write_text("max\n")
    assert (free_bytes(torch.device("cpu")) or 0) > 10**8
    assert free_bytes(torch.device("meta")) is None


def test_a_memory_is_no_longer_than_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model()
    expected = evaluate(model, IDS, tgt_len=4, mem_len=len(IDS), batch_size=3)
    for tgt_len in (4, 10**12):
        score = evaluate(model, IDS, batch_size=3, mem_len=10**12, tgt_len=tgt_len)
        assert score.nats == pytest.approx(expected.nats, rel=1e-6)
    carried = tiny_model(attention="vaswani", d_model=12)
    assert evaluate(carried, IDS, tgt_len=4, mem_len=10**12).nats == evaluate(carried, IDS, tgt_len=4, mem_len=12).nats


def test_what_is_counted_is_at_least_what_is_allotted() -> None:
    kinds = ({}, {"attention": "shaw", "max_klen": 20}, {"attention": "vaswani", "d_model": 12})
    for model in (tiny_model(**changes) for changes in kinds):
        decoder = Decoder(model, batch_size=3)
        counted = (model.mem_len + decoder.tgt_len + 64) * 3 * model.config.numbers_per_position * 4
        assert decoder.n_bytes <= counted
        mems = model.init_mems(3)
        assert isinstance(mems, Mems)
        assert 2 * sum(x.nbytes for x in mems.hidden) <= 3 * model.mem_len * model.config.numbers_per_position * 4


@pytest.mark.parametrize(
    ("free", "own", "is_told"), [(79, 0, False), (61, 0, False), (19, 60, False), (59, 0, True), (1, 20, True)]
)
def test_a_gpu_that_others_fill_is_told(free: int, own: int, is_told: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In GB of 80; what this process holds is no reason."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free * 10**9, 80 * 10**9))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: own * 10**9)
    told = shared(torch.device("cuda:0"))
    assert (told is not None) == is_told
    if told:
        assert told == (
            f"other processes hold {80 - free - own} GB of the 80 GB of cuda:0, and {free} GB are free, so this may be slow "
            "or run out of memory"
        )
    assert shared(torch.device("cpu")) is None
