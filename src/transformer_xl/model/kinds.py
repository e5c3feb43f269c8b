"""The kinds of model: which class reads, by the class of its settings; `register_model` adds your own."""

from collections.abc import Callable
from typing import Any, TypeVar

from transformer_xl.config.model import KINDS, LstmConfig, ModelConfig, TransformerXLConfig, VanillaConfig, XLNetConfig
from transformer_xl.errors import ConfigError
from transformer_xl.model.base import SequenceModel
from transformer_xl.model.lstm import Lstm
from transformer_xl.model.transformer_xl import TransformerXL
from transformer_xl.model.vanilla import Vanilla
from transformer_xl.model.xlnet import XLNet

Config = TypeVar("Config", bound=ModelConfig)

MODELS: dict[type[ModelConfig], Callable[[Any], SequenceModel]] = {
    TransformerXLConfig: TransformerXL,
    VanillaConfig: Vanilla,
    LstmConfig: Lstm,
    XLNetConfig: XLNet,
}


def register_model(config: type[Config], model: Callable[[Config], SequenceModel]) -> None:
    """Add a kind of model, so that recipes and saved models may name it.

    Args:
        config: the class of its settings, whose `kind` is its name.
        model: its class, which is built from such settings.

    Raises:
        ConfigError: another kind has that name.
    """
    if KINDS.setdefault(config.kind, config) is not config:
        raise ConfigError(f"there is another kind of model '{config.kind}' already; choose another name")
    MODELS[config] = model


def make_backbone(config: ModelConfig) -> SequenceModel:
    """Build the model of settings, whatever their head, with random weights."""
    return MODELS[type(config)](config if config.head is None else config.model_copy(update={"head": None}))
