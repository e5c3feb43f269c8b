"""What settings ask for is compared with what is free before it is allotted."""

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
from transformer_xl.model.build import make_model
from transformer_xl.model.memory import Mems
from transformer_xl.model.room import check_room, free_bytes
from transformer_xl.model.transformer_xl import TransformerXL
from transformer_xl.reading.cache import Cache
from transformer_xl.reading.dynamic import Dynamic, LearningState
from transformer_xl.reading.evaluation import evaluate

IDS = torch.arange(12) % 13


@pytest.mark.parametrize(
    "use",
    [
        Decoder,
        lambda model: evaluate(model, torch.arange(10**7 + 1) % 13),
        lambda model: model(IDS.unsqueeze(0)),
        lambda model: model.with_context(clamp_len=3).init_mems(1),
    ],
)
def test_a_file_that_asks_for_a_huge_memory_is_refused_with_the_bytes(
    use: Callable[[TransformerXL], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_model().save_pretrained(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(values | {"mem_len": 10**7, "zero_first_memory": True}))
    monkeypatch.setattr(room, "free_bytes", lambda device: 5 * 10**8)
    greedy = TransformerXL.from_pretrained(tmp_path)
    monkeypatch.setattr(torch, "zeros", lambda *_, **__: pytest.fail("it was allotted"))
    with pytest.raises(ConfigError, match=r"mem_len 10,?000,?000.* takes [1-9].* [GM]B, and 500 MB are free; ask for less$"):
        use(greedy)


def test_what_does_not_fit_into_the_machine_is_refused_before_it_is_allotted(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model()
    monkeypatch.setattr(torch, "zeros", lambda *_, **__: pytest.fail("it was allotted"))
    message = r"takes [0-9.e+]+ [TP]B, and [0-9.]+ GB are free; ask for less$"
    for use in (lambda: Decoder(model, tgt_len=10**12), lambda: model.init_mems(10**12)):
        with pytest.raises(ConfigError, match=message):
            use()
    with pytest.raises(ConfigError, match=r"a model of n_layer 1,000,000,000 takes 50 TB, and .* are free"):
        make_model(LstmConfig(vocab_size=5, n_layer=10**9))


def test_limits_are_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "free_bytes", lambda device: 10**9)
    check_room(10**9, None, "x")
    with pytest.raises(ConfigError, match=r"^x takes 1.5 GB, and 1 GB are free; ask for less$"):
        check_room(1_500_000_000, "cpu", "x")
    monkeypatch.setattr(room, "free_bytes", lambda device: None)
    check_room(10**20, None, "x")


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


def test_a_cache_and_a_copy_of_the_weights_are_compared_too(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model()
    with pytest.raises(ConfigError, match=r"^a cache of size 1,000,000,000,000 and batch_size 1 takes [0-9.e+]+ [TP]B, and"):
        evaluate(model, IDS, cache=Cache(10**12))
    monkeypatch.setattr(room, "_SMALL", 0)
    n_bytes = 4 * sum(parameter.nbytes for parameter in model.parameters())
    monkeypatch.setattr(room, "free_bytes", lambda device: n_bytes - 1)
    with pytest.raises(ConfigError, match=r"^dynamic evaluation takes"):
        LearningState(model, Dynamic(), tgt_len=4, precision="fp32")
