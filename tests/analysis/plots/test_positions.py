"""Loss by position, against a model that is scored token by token."""

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.training.helpers import MODEL
from transformer_xl.analysis.plots.opened import OpenRun
from transformer_xl.analysis.plots.positions import by_position, position_lines, segment_readings
from transformer_xl.config import RunConfig
from transformer_xl.data.tokenizers import ByteTokenizer
from transformer_xl.errors import CorpusError
from transformer_xl.model.kinds import make_model
from transformer_xl.reading.evaluation import evaluate
from transformer_xl.texts import Text

IDS = np.random.default_rng(0).integers(0, 11, 131)


def open_run(model: dict[str, object]) -> OpenRun:
    config = RunConfig(model=model, train={"tgt_len": 5, "max_steps": 1, "device": "cpu"}, eval={"batch_size": 3, "ext_len": 2})
    return OpenRun("it", Path("it"), config, ByteTokenizer())


@pytest.fixture
def fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformer_xl.analysis.reading.scoring.precision_of_segments", lambda name, device: "fp32")


def test_lines_are_means_over_consecutive_segments(fp32: None) -> None:
    run = open_run(MODEL)
    torch.manual_seed(0)
    model = make_model(run.config.model)
    text = Text("it", IDS, n_characters=65, n_bytes=130)
    with_memory, without = position_lines(run, model, text, span=10, unit="nats")
    assert (with_memory.name, without.name, without.look) == ("it, with memory", "it, without memory", "dashed")
    for line, mem_len in ((with_memory, 7), (without, 0)):
        nats = evaluate(model, IDS, tgt_len=5, mem_len=mem_len, per_token=True).token_nats
        assert nats is not None
        expected = [np.mean(nats[i::10].astype(np.float64)) for i in range(10)]
        np.testing.assert_allclose(line.y, expected, atol=1e-6)
        assert line.low is not None
        assert line.high is not None
        deviation = np.array([np.std(nats[i::10], ddof=1) for i in range(10)])
        np.testing.assert_allclose(np.subtract(line.high, line.low) / 2, 1.96 * deviation / 13**0.5, atol=1e-6)
    bits = position_lines(run, model, text, span=10, unit="bpc")[0]
    np.testing.assert_allclose(bits.y, np.array(with_memory.y) * 2 / np.log(2))


def test_a_vanilla_model_reads_its_longest_segments(fp32: None) -> None:
    sizes = {name: MODEL[name] for name in ("vocab_size", "n_layer", "d_model", "n_head", "d_head", "d_inner")}
    run = open_run({"kind": "vanilla", "max_len": 8, **sizes})
    model = make_model(run.config.model)
    (line,) = position_lines(run, model, Text("it", IDS, 130, 130), span=10, unit="nats")
    nats = evaluate(model, IDS, tgt_len=8, per_token=True).token_nats
    assert nats is not None
    stretches = nats[:128].reshape(8, 16)  # whole segments, of which ten positions are shown
    np.testing.assert_allclose(line.y, stretches.mean(axis=0)[:10], atol=1e-6)


def test_what_has_no_memory_has_one_line() -> None:
    (one,) = segment_readings(open_run(MODEL | {"mem_len": 0}))
    assert (one[0], one[1].mem_len, one[1].ext_len) == ("separate segments", 0, 0)
    assert one[1].tgt_len == 7  # five are scored after two that are read again
    names = [name for name, _ in segment_readings(open_run({"kind": "lstm", "vocab_size": 11}))]
    assert names == ["with memory", "without memory"]


def test_too_short_a_text() -> None:
    with pytest.raises(CorpusError, match="7 tokens are too few for means over stretches of 4; score a longer text"):
        by_position(np.ones(7), period=4)
