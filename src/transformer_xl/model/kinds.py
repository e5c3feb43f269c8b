"""Models by their kinds."""

from transformer_xl.kinds import import_class
from transformer_xl.model.language_model import LanguageModel
from transformer_xl.model_config import ModelConfig


def make_model(config: ModelConfig) -> LanguageModel:
    """Build a model of the kind that its settings are of, with random weights.

    Raises:
        ConfigError: settings that only a run knows are missing, see `ModelConfig.completed`.
    """
    return import_class(config.model_class)(config)
