"""Which class is which kind of model."""

from transformer_xl.model.language_model import LanguageModel
from transformer_xl.model.lstm import Lstm
from transformer_xl.model.transformer_xl import TransformerXL
from transformer_xl.model.vanilla import Vanilla
from transformer_xl.model_config import ModelConfig

_CLASSES: dict[str, type[LanguageModel]] = {kind.kind: kind for kind in (TransformerXL, Vanilla, Lstm)}


def make_model(config: ModelConfig) -> LanguageModel:
    """Build a model of the kind that its settings are of, with random weights.

    Raises:
        ConfigError: settings that only a run knows are missing, see `ModelConfig.completed`.
    """
    return _CLASSES[config.kind](config)
