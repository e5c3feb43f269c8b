"""Loss by the length of memory and by position, against a model that is scored token by token."""

from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from tests.training.helpers import MODEL
from transformer_xl.checkpoint.open_run import Opened
from transformer_xl.config.run import RunConfig
from transformer_xl.data.text import Text
from transformer_xl.errors import ConfigError, CorpusError
from transformer_xl.model.base import LanguageModel
from transformer_xl.model.build import make_model
from transformer_xl.reading.evaluation import Score, evaluate
from transformer_xl.tokenizers.kinds import ByteTokenizer, CharTokenizer
from transformer_xl.tools import comparison
from transformer_xl.tools.comparison import ComparedRun
from transformer_xl.tools.curves import by_position, memory_line, open_texts, position_lines, segment_readings

IDS = np.random.default_rng(0).integers(0, 11, 131)
HEADS = {name: MODEL[name] for name in ("vocab_size", "n_layer", "d_model", "n_head", "d_head", "d_inner")}
VANILLA = {"kind": "vanilla", "max_len": 8, **HEADS}
LSTM = {"kind": "lstm", "vocab_size": 11, "n_layer": 1, "d_model": 6}


def config(model: dict[str, Any], **evaluation: int) -> RunConfig:
    train = {"tgt_len": 5, "max_steps": 1, "device": "cpu"}
    values: dict[str, Any] = {"model": model, "train": train, "eval": {"batch_size": 3, **evaluation}}
    return RunConfig(**values)


def made(model: dict[str, Any], **evaluation: int) -> tuple[ComparedRun, Opened]:
    own, tokenizer = config(model, **evaluation), ByteTokenizer()
    torch.manual_seed(0)
    built = cast("LanguageModel", make_model(own.model))
    return ComparedRun("it", Path("it"), own, tokenizer), Opened("it", built, tokenizer, own, is_run=True)


@pytest.fixture
def fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Score in fp32, whatever the processor multiplies fast."""

    def exact(*arguments: Any, **options: Any) -> Score:
        return evaluate(*arguments, **options | {"precision": "fp32"})

    monkeypatch.setattr(comparison, "evaluate", exact)


def test_lines_are_means_over_consecutive_segments(fp32: None) -> None:
    run, opened = made(MODEL, ext_len=2)
    text = Text("it", IDS, n_characters=65, n_bytes=130)
    with_memory, without = position_lines(run, opened, text, span=10, unit="nats")
    assert (with_memory.name, without.name, without.look) == ("it, memory of 7", "it, no memory", "dashed")
    for line, mem_len in ((with_memory, 7), (without, 0)):
        nats = evaluate(opened.model, IDS, tgt_len=5, mem_len=mem_len, per_token=True).token_nats
        assert nats is not None
        expected = [np.mean(nats[i::10].astype(np.float64)) for i in range(10)]
        np.testing.assert_allclose(line.y, expected, atol=1e-6)
        assert line.low is not None
        assert line.high is not None
        deviation = np.array([np.std(nats[i::10], ddof=1) for i in range(10)])
        np.testing.assert_allclose(np.subtract(line.high, line.low) / 2, 1.96 * deviation / 13**0.5, atol=1e-6)
    bits = position_lines(run, opened, text, span=10, unit="bpc")[0]
    np.testing.assert_allclose(bits.y, np.array(with_memory.y) * 2 / np.log(2))


def test_a_vanilla_model_reads_its_longest_segments(fp32: None) -> None:
    run, opened = made(VANILLA, ext_len=2)
    (line,) = position_lines(run, opened, Text("it", IDS, 130, 130), span=10, unit="nats")
    nats = evaluate(opened.model, IDS, tgt_len=8, per_token=True).token_nats
    assert nats is not None
    stretches = nats[:128].reshape(8, 16)  # whole segments, of which ten positions are shown
    np.testing.assert_allclose(line.y, stretches.mean(axis=0)[:10], atol=1e-6)


def test_what_has_no_memory_has_one_line() -> None:
    (one,) = segment_readings(config(MODEL | {"mem_len": 0}, ext_len=2))
    assert (one[0], one[1].mem_len, one[1].ext_len) == ("separate segments", 0, 0)
    assert one[1].tgt_len == 7  # five are scored after two that are read again
    assert [name for name, _ in segment_readings(config(LSTM))] == ["a state carried on", "no memory"]


def test_too_short_a_text() -> None:
    with pytest.raises(CorpusError, match="7 tokens are too few for means over stretches of 4; score a longer text"):
        by_position(np.ones(7), period=4)


def test_what_has_no_length_is_level_and_what_cannot_be_read_is_refused() -> None:
    text = Text("it", IDS[:60], 59, 59)
    assert memory_line(*made(LSTM), text, unit="nats", lengths=[9]).look == "level"
    run, opened = made(VANILLA)
    assert list(memory_line(run, opened, text, unit="nats", lengths=[3, 9]).x) == [3]
    with pytest.raises(ConfigError, match="'it' can be read with none of --lengths 8,9, because it has no memory"):
        memory_line(run, opened, text, unit="nats", lengths=[8, 9])


def test_parts_of_a_text_in_unlike_tokens_are_warned_of_once(monkeypatch: pytest.MonkeyPatch) -> None:
    class Parts(Opened):
        def text(self, *, limit: int | None = None, **_: Any) -> Text:
            return Text("it", IDS, 130, 130, is_whole=limit is None or limit > 99)

    run, opened = made(LSTM)
    tokenizers = (ByteTokenizer(), CharTokenizer("ab"), CharTokenizer("abc"))
    runs = [ComparedRun(str(i), Path("it"), run.config, tokenizer) for i, tokenizer in enumerate(tokenizers)]
    monkeypatch.setattr(ComparedRun, "open", lambda run: Parts(**vars(opened)))
    for limit, chosen, n_warning in ((30, runs, 1), (30, runs[:1] * 2, 0), (100, runs, 0)):
        warnings: list[str] = []
        assert [own.name for own, *_ in open_texts(chosen, limit=limit, warn=warnings.append)] == [own.name for own in chosen]
        assert len(warnings) == n_warning
        assert all(line.startswith("30 tokens of one vocabulary are not as much text as of another; ") for line in warnings)
