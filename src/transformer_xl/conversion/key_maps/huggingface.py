"""Hugging Face's TransfoXL models (transformers before 5): settings and names.

Their head has the tails in order, unlike the authors' PyTorch code. A stream begins after `mem_len` zero vectors that the model
attends to. Every layer has names for u and v: with `untie_r` its own tensors, otherwise other names of the model's tensors.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from transformer_xl.config.model import TransformerXLConfig
from transformer_xl.conversion.key_maps import pytorch
from transformer_xl.conversion.key_maps.entries import Entry, KeyMap, Part, Sizes
from transformer_xl.conversion.key_maps.pytorch import Names, PyTorchValues, shared_entries
from transformer_xl.conversion.values import Clusters, Flag
from transformer_xl.errors import ConfigError, shown

MODEL_TYPE = "transfo-xl"


class TransfoXLValues(PyTorchValues):
    """Settings that shape or initialize a model, and their values if they are missing in a `config.json`."""

    vocab_size: int = 267735
    cutoffs: Clusters = (20000, 40000, 200000)
    d_model: int = 1024
    d_embed: int = 1024
    n_head: int = 16
    d_head: int = 64
    d_inner: int = 4096
    div_val: int = 4
    pre_lnorm: Flag = False
    n_layer: int = 18
    mem_len: int = 1600
    clamp_len: int = 1000
    same_length: Flag = True
    proj_share_all_but_first: Flag = True
    tie_word_embeddings: Flag = True
    attn_type: Annotated[int, Field(ge=0, le=0)] = 0
    sample_softmax: Annotated[int, Field(le=0)] = -1
    dropout: float = 0.1
    dropatt: float = 0.0
    untie_r: Flag = True
    init: Literal["normal", "uniform"] = "normal"
    init_range: float = 0.01
    proj_init_std: float = 0.01
    init_std: float = 0.02
    layer_norm_epsilon: float = 1e-5


_SAME = ("vocab_size", "untie_r", "layer_norm_epsilon", "init", "init_range", "init_std", "proj_init_std")
"""More settings with our names and meanings, besides those of `SameValues`."""

OF_EVERY_MODEL = {
    # its type and names, its special tokens, and how it generates text
    *("eos_token_id", "bos_token_id", "pad_token_id", "unk_token_id"),
    *("model_type", "architectures", "transformers_version", "torch_dtype", "dtype", "_name_or_path", "name_or_path"),
    *("task_specific_params", "tokenizer_class", "prefix", "finetuning_task", "problem_type", "id2label", "label2id"),
    *("output_attentions", "output_hidden_states", "return_dict", "use_cache", "torchscript", "use_bfloat16", "tf_legacy_loss"),
    *("keys_to_ignore_at_inference", "is_encoder_decoder", "is_decoder", "decoder_start_token_id", "add_cross_attention"),
    *("cross_attention_hidden_size", "tie_encoder_decoder", "pruned_heads", "chunk_size_feed_forward", "_num_labels"),
    *("do_sample", "early_stopping", "max_length", "min_length", "num_beams", "num_beam_groups", "num_return_sequences"),
    *("temperature", "top_k", "top_p", "typical_p", "repetition_penalty", "length_penalty", "no_repeat_ngram_size"),
    *("encoder_no_repeat_ngram_size", "bad_words_ids", "diversity_penalty", "output_scores", "return_dict_in_generate"),
    *("num_labels", "forced_bos_token_id", "forced_eos_token_id", "remove_invalid_values", "exponential_decay_length_penalty"),
    *("suppress_tokens", "begin_suppress_tokens", "sep_token_id", "_commit_hash", "_attn_implementation_autoset"),
}
"""Settings of every model of Hugging Face that do not change what this library computes."""

_WITHOUT_EFFECT = OF_EVERY_MODEL | {"adaptive", "ext_len", "tgt_len", "trainer_compatible"}
"""The same and those of this model, which nothing reads, except training scripts of 2019."""

_OLD_NAMES = {"n_token": "vocab_size", "vocab_size_or_config_json_file": "vocab_size", "tie_weight": "tie_word_embeddings"}


def key_map(config: TransformerXLConfig) -> KeyMap:
    """Return the table of a model's tensors."""
    sizes = Sizes(config)
    entries = shared_entries(sizes, Names(prefix="transformer.", tails_reversed=False))
    for name in ("r_w_bias", "r_r_bias"):
        own = tuple(f"transformer.layers.{i}.dec_attn.{name}" for i in range(config.n_layer))
        parts = tuple(Part(each, sizes.shape("n d")) for each in own)
        entries.append(Entry((name,), parts if config.untie_r else (Part(f"transformer.{name}", sizes.shape("n d"), own),)))
    return KeyMap(tuple(entries), ignored=("transformer.pos_emb.inv_freq",))


def config_of(values: Mapping[str, Any]) -> TransformerXLConfig:
    """Translate a `config.json`; refuse other models and unknown settings."""
    if values.get("model_type", MODEL_TYPE) != MODEL_TYPE:
        raise ConfigError(
            f"model_type ({shown(values['model_type'])}) must be '{MODEL_TYPE}'; only Transformer-XL is converted"
        )
    given = TransfoXLValues.of_file(values, without_effect=_WITHOUT_EFFECT, old_names=_OLD_NAMES)
    if given.tie_projs is None:
        given = given.model_copy(update={"tie_projs": (False, *(given.proj_share_all_but_first for _ in given.cutoffs))})
    return TransformerXLConfig(
        **given.fields(),
        **{name: getattr(given, name) for name in _SAME},
        zero_first_memory=True,
        tie_weight=given.tie_word_embeddings,
    )


def values_of(config: TransformerXLConfig, *, tgt_len: int | None = None) -> dict[str, Any]:
    """Return a `config.json` for the same model, which Hugging Face's code must be able to express.

    `tgt_len` is the length of its training segments, if that is known. Their code keeps it, and nothing there reads it.
    """
    values = pytorch.values_of(config) | {name: getattr(config, name) for name in _SAME}
    values |= {"tie_word_embeddings": config.tie_weight, "attn_type": 0, "sample_softmax": -1}
    head = {"model_type": MODEL_TYPE, "architectures": ["TransfoXLLMHeadModel"]}
    return head | values | ({} if tgt_len is None else {"tgt_len": tgt_len})
