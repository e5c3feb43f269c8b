"""The config of transformers holds our settings, checks them, and refuses keys that could make it load code."""

import pytest

from tests.huggingface.conftest import Saved, edit
from transformer_xl.errors import ConfigError

pytest.importorskip("transformers", reason="the extra 'hf' is not installed")

from transformers import AutoConfig, AutoModelForCausalLM

from transformer_xl.huggingface import TransformerXLPretrainedConfig


@pytest.mark.parametrize(
    "key",
    ["auto_map", "_attn_implementation_internal", "attn_implementation", "quantization_config", "d_modle", "name_or_path"],
)
def test_unknown_keys_of_a_config_file_are_refused(saved: Saved, key: str) -> None:
    edit(saved.path / "config.json", **{key: "someone/kernel"})
    with pytest.raises(ConfigError, match=f"unknown key '{key}'"):
        AutoConfig.from_pretrained(saved.path)
    with pytest.raises(ConfigError, match=f"unknown key '{key}'"):
        AutoModelForCausalLM.from_pretrained(saved.path)


def test_the_segment_of_an_exported_run_is_no_unknown_key(saved: Saved) -> None:
    edit(saved.path / "config.json", tgt_len=64)
    assert AutoConfig.from_pretrained(saved.path).native == saved.model.config


def test_a_config_survives_its_own_dictionary() -> None:
    config = TransformerXLPretrainedConfig(vocab_size=13, d_model=8, cutoffs=[4, 9], tie_projs=[True, False, True])
    again = TransformerXLPretrainedConfig.from_dict(config.to_dict())
    assert again.native == config.native
    assert (config.hidden_size, config.num_hidden_layers) == (8, 12)
    with pytest.raises(ConfigError, match="did you mean 'd_model'"):
        TransformerXLPretrainedConfig(d_modle=8)
