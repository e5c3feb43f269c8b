"""`TransformerXLPretrainedConfig` and `XLNetPretrainedConfig`: our settings in the form that transformers needs."""

from collections.abc import Generator
from typing import Any, ClassVar, Self

import transformers
from transformers import PreTrainedConfig

from transformer_xl.config.model import SEGMENT, AttentionConfig, TransformerXLConfig, XLNetConfig, is_native
from transformer_xl.conversion.key_maps.xlnet_huggingface import PROBLEMS
from transformer_xl.errors import ConfigError, did_you_mean

_WRITTEN_BY_TRANSFORMERS = frozenset({
    "_commit_hash", "_name_or_path", "architectures", "bos_token_id", "chunk_size_feed_forward", "dtype", "eos_token_id",
    "id2label", "is_encoder_decoder", "label2id", "model_type", "num_labels", "output_attentions", "output_hidden_states",
    "pad_token_id", "problem_type", "return_dict", "tie_word_embeddings", "torch_dtype", "transformers_version", "use_cache",
})  # fmt: skip
"""Keys of a `config.json` that transformers writes itself, and that cannot make it load or run anything."""

_ARGUMENTS = frozenset({"name_or_path", "attn_implementation", "experts_implementation"})
"""What `from_pretrained` of transformers adds from its arguments, not from a file."""


class TransformerXLPretrainedConfig(PreTrainedConfig):
    """The fields of `TransformerXLConfig`, with the same names and checks; saved as our own `config.json`.

    Raises:
        ConfigError: any other key (because a `config.json` must not make transformers load code), or a value that cannot work.

    Example:
        >>> TransformerXLPretrainedConfig(vocab_size=11, d_model=8).num_hidden_layers
        12
    """

    model_type: ClassVar[str] = TransformerXLConfig.kind
    native_class: ClassVar[type[AttentionConfig]] = TransformerXLConfig
    attribute_map: ClassVar[dict[str, str]] = {
        "hidden_size": "d_model",
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
    }
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["mems", "cache"]
    # libraries expect these in every config; our texts have no special tokens
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | None = None

    def __init__(self, **values: Any) -> None:
        own = {key: value for key, value in values.items() if key in self.native_class.model_fields}
        self._refuse_unknown(values.keys(), _WRITTEN_BY_TRANSFORMERS | _ARGUMENTS)
        native = self.native_class(**own)
        others = values.keys() - own.keys() - {"model_type", "_name_or_path", "_commit_hash"}
        super().__init__(**{**{key: values[key] for key in others}, **_of_head(native)})
        for key, value in native.model_dump(mode="json").items():
            setattr(self, key, value)

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Self:
        values = {key: value for key, value in config_dict.items() if key != SEGMENT}
        cls._refuse_unknown(values.keys(), _WRITTEN_BY_TRANSFORMERS)
        return super().from_dict(values, **kwargs)

    @property
    def native(self) -> AttentionConfig:
        """The settings as they are now, checked again."""
        return self.native_class(**{key: getattr(self, key) for key in self.native_class.model_fields})

    def to_diff_dict(self) -> dict[str, Any]:  # exactly our `config.json`, which `txl.load` reads too
        return {"model_type": self.model_type, **self.native.model_dump(mode="json")}

    def __iter__(self) -> Generator[str]:
        # transformers warns of token ids outside the vocabulary, where our tokenizer puts padding on purpose
        yield from (key for key in super().__iter__() if key != "pad_token_id")

    @classmethod
    def _refuse_unknown(cls, keys: Any, others: frozenset[str]) -> None:
        for key in sorted(keys - cls.native_class.model_fields.keys() - others):
            raise ConfigError(f"unknown key '{key}'; {did_you_mean(key, cls.native_class.model_fields)}")


class XLNetPretrainedConfig(TransformerXLPretrainedConfig):
    """The same of `XLNetConfig`."""

    model_type: ClassVar[str] = XLNetConfig.kind
    native_class: ClassVar[type[AttentionConfig]] = XLNetConfig

    def __init__(self, **values: Any) -> None:  # transformers makes one of its own for a class that has none
        super().__init__(**values)


class AnyXLNetConfig(PreTrainedConfig):
    """What `AutoConfig` finds under "xlnet", a name that transformers uses, too: a file becomes a config of its own program."""

    model_type: ClassVar[str] = XLNetConfig.kind

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        return transformers.XLNetConfig(*args, **kwargs)

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        owner = XLNetPretrainedConfig if is_native(config_dict) else transformers.XLNetConfig
        return owner.from_dict(config_dict, **kwargs)


def _of_head(config: AttentionConfig) -> dict[str, Any]:
    """Return what pipelines of transformers look up of a fine-tuned model."""
    head = config.head
    if head is None:
        return {}
    labels = dict(enumerate(head.labels or ("LABEL_0",)))
    return {
        "id2label": labels,
        "label2id": {label: i for i, label in labels.items()},
        "problem_type": PROBLEMS.get(head.kind),
    }
