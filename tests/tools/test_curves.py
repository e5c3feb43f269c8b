"""Loss by the length of memory, and texts that are no equal parts."""

from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from tests.training.helpers import MODEL
from transformer_xl.checkpoint.open_run import Opened
from transformer_xl.config.run import RunConfig
from transformer_xl.data.text import Text
from transformer_xl.errors import ConfigError
from transformer_xl.model.base import LanguageModel
from transformer_xl.model.build import make_model
from transformer_xl.tokenizers.kinds import ByteTokenizer, CharTokenizer
from transformer_xl.tools.comparison import ComparedRun
from transformer_xl.tools.curves import memory_line, open_texts

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
