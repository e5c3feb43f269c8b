"""How many parameters a run's model has, beside the model of the recipe that it is compared with."""

from dataclasses import dataclass

from transformer_xl.config.model import ModelConfig
from transformer_xl.config.recipes import load_recipe
from transformer_xl.config.run import RunConfig
from transformer_xl.errors import ConfigError
from transformer_xl.model.build import completed, make_blueprint


@dataclass(frozen=True)
class Comparison:
    """How many parameters a model has, and how many the model of another recipe with the same vocabulary."""

    recipe: str  # of the other model
    own: int
    other: int | None  # None: the other model cannot have that vocabulary
    problem: str = ""  # why it cannot

    def __str__(self) -> str:
        """Return the comparison in one line.

        Example:
            >>> print(Comparison("enwik8-base", own=42, other=40))
            compared with the recipe enwik8-base: 42 parameters to its 40 with the same vocabulary, +5.0 %
        """
        if self.other is None:
            return f"compared with the recipe {self.recipe}, which cannot have this vocabulary: {self.problem}"
        return (
            f"compared with the recipe {self.recipe}: {self.own:,} parameters to its {self.other:,} with the same vocabulary, "
            f"{100 * (self.own / self.other - 1):+.1f} %"
        )


def count_parameters(config: ModelConfig) -> int:
    """Count the parameters of a model, without making weights; its settings are complete (see `ModelConfig.completed`).

    Example:
        >>> from transformer_xl.config.model import LstmConfig
        >>> count_parameters(LstmConfig(vocab_size=10, n_layer=1, d_model=4))
        210
    """
    return sum(parameter.numel() for parameter in make_blueprint(config).parameters())


def compare_parameters(config: RunConfig, model: ModelConfig) -> Comparison | None:
    """Count the parameters of a run's completed `model` and of the recipe that `config.compared_with` names, if any."""
    if config.compared_with is None:
        return None
    try:
        other = load_recipe(config.compared_with)
    except ConfigError as error:
        raise ConfigError(f"compared_with: {error}") from None
    assert model.vocab_size is not None
    own = count_parameters(model)
    try:
        compared = completed(other.model, vocab_size=model.vocab_size, tgt_len=other.train.tgt_len)
    except ConfigError as error:  # clusters of a larger vocabulary
        return Comparison(other.name, own, None, str(error))
    return Comparison(other.name, own, count_parameters(compared))
