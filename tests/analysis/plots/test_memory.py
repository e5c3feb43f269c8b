"""Loss by the length of memory, of runs that have one and of others."""

from pathlib import Path

import numpy as np
import pytest

from tests.training.helpers import MODEL
from transformer_xl.analysis.plots.memory import memory_line
from transformer_xl.analysis.plots.opened import OpenRun
from transformer_xl.config import RunConfig
from transformer_xl.data.tokenizers import ByteTokenizer
from transformer_xl.errors import ConfigError
from transformer_xl.model.kinds import make_model
from transformer_xl.texts import Text

TEXT = Text("it", np.random.default_rng(0).integers(0, 11, 60), 59, 59)


def open_run(model: dict[str, object]) -> OpenRun:
    config = RunConfig(model=model, train={"tgt_len": 5, "max_steps": 1, "device": "cpu"}, eval={"batch_size": 3})
    return OpenRun("it", Path("it"), config, ByteTokenizer())


def test_what_has_no_length_is_level_and_what_cannot_be_read_is_refused() -> None:
    run = open_run({"kind": "lstm", "vocab_size": 11, "n_layer": 1, "d_model": 6})
    assert memory_line(run, make_model(run.config.model), TEXT, unit="nats", lengths=[9]).look == "level"
    sizes = {name: MODEL[name] for name in ("vocab_size", "n_layer", "d_model", "n_head", "d_head", "d_inner")}
    run = open_run({"kind": "vanilla", "max_len": 8, **sizes})
    model = make_model(run.config.model)
    assert list(memory_line(run, model, TEXT, unit="nats", lengths=[3, 9]).x) == [3]
    with pytest.raises(ConfigError, match="--lengths '8,9' are none that 'it' can be read with"):
        memory_line(run, model, TEXT, unit="nats", lengths=[8, 9])
