"""Building a model of any kind from its settings."""

from typing import TypeVar

from transformer_xl.config.model import ModelConfig, TransformerXLConfig
from transformer_xl.model.attention.kinds import attention_kind
from transformer_xl.model.base import SequenceModel
from transformer_xl.model.kinds import make_backbone
from transformer_xl.model.pretrained import blueprint
from transformer_xl.model.task_model import TaskModel

Config = TypeVar("Config", bound=ModelConfig)


def completed(config: Config, *, vocab_size: int, tgt_len: int) -> Config:
    """Return `config.completed(…)`, and where attention learns positions, as many of them as memory and segment have.

    Raises:
        ConfigError: no such kind of attention, or a value that cannot work.
    """
    config = config.completed(vocab_size=vocab_size, tgt_len=tgt_len)
    if not isinstance(config, TransformerXLConfig) or config.max_klen or not attention_kind(config.attention).learns_positions:
        return config
    return type(config)(**{**config.model_dump(), "max_klen": tgt_len + config.mem_len})


def make_model(config: ModelConfig) -> SequenceModel:
    """Build a model with random weights, of the kind of its settings; with a head, if they have one, a `TaskModel`.

    Raises:
        ConfigError: the kind of model or of attention cannot have these settings, those that only a run knows are missing
            (`completed`), or there is no room for so many layers.
    """
    return make_backbone(config) if config.head is None else TaskModel(config)


def make_blueprint(config: ModelConfig) -> SequenceModel:
    """Build a model without memory for its weights; see `blueprint`."""
    return blueprint(make_model, config)


def count_parameters(config: ModelConfig) -> int:
    """Count the parameters of a model of complete settings, without making weights.

    Example:
        >>> from transformer_xl.config.model import LstmConfig
        >>> count_parameters(LstmConfig(vocab_size=10, n_layer=1, d_model=4))
        210
    """
    return sum(parameter.numel() for parameter in make_blueprint(config).parameters())
