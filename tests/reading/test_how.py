"""How a run is read."""

import pytest

from transformer_xl.config import load_recipe
from transformer_xl.errors import ConfigError
from transformer_xl.model.transformer_xl import TransformerXL
from transformer_xl.reading.how import Reading


def test_a_run_is_read_as_its_settings_say_but_for_what_is_changed() -> None:
    config = load_recipe("quickstart", ["eval.tgt_len=32", "eval.ext_len=3", "eval.same_length=true", "eval.clamp_len=9"])
    own = Reading.of_run(config)
    assert own == Reading(32, config.eval_mem_len, 3, config.eval.batch_size, same_length=True, clamp_len=9)
    changed = Reading.of_run(config, tgt_len=None, ext_len=0, same_length=False)
    assert changed == Reading(32, config.eval_mem_len, 0, config.eval.batch_size, same_length=False, clamp_len=9)
    assert own.length == config.eval_mem_len + 3


def test_without_memory_there_is_no_number_of_keys_to_keep() -> None:
    own = Reading(tgt_len=4, mem_len=8, ext_len=2, same_length=True)
    assert own.without_memory() == Reading(tgt_len=4, mem_len=0, ext_len=2, same_length=False)


def test_a_view_reads_so() -> None:
    sizes = {"n_layer": 1, "d_model": 8, "n_head": 1, "d_head": 8, "d_inner": 8, "vocab_size": 5}
    model = TransformerXL(load_recipe("quickstart").model.model_copy(update=sizes))
    view = Reading(tgt_len=4, mem_len=8, ext_len=2, same_length=True, clamp_len=5).view(model)
    assert (view.mem_len, view.ext_len, view.same_length, view.clamp_len) == (8, 2, True, 5)
    with pytest.raises(ConfigError, match=r"tgt_len \(0\) must be at least 1"):
        Reading(tgt_len=0, mem_len=8).view(model)
