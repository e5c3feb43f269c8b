"""Frozen, validated settings whose errors are one line each. Unknown keys fail with the nearest known name."""

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from transformer_xl.errors import ConfigError, did_you_mean, shown, written

Probability = Annotated[float, Field(ge=0, lt=1)]
Positive = Annotated[int, Field(ge=1, lt=2**63)]
Natural = Annotated[int, Field(ge=0, lt=2**63)]

REMOVED: dict[str, Any] = {
    "beyond": None,
    "mask_alpha": 6,
    "mask_beta": 1,
    "max_gram": 5,
    "mem_lens": None,
    "perm_size": None,
    "plateau_factor": 0.5,
    "plateau_patience": 2,
    "second_segment": "lane",
    "tgt_len_start": None,
    "valid_share": 0.1,
}
"""Settings of 0.2 that are gone, with the value that they have now, if any; files of 0.2 name them all."""

REMOVED_DETAILS = {"compressed_len", "compression", "conv_width", "tgt_len_increment", "tgt_len_warmup"}
"""Settings of 0.2 that did something only together with one that is refused."""

REMOVED_VALUES: dict[str, tuple[str, ...]] = {"gate": ("output",), "shift": ("token", "conv"), "shuffle": ("shards",)}
"""Values of 0.2 that are gone, by the setting that had them."""


class Settings(BaseModel):
    """A frozen settings class whose construction errors are one line each.

    Values are not converted: "2", 2.0 and true are not integers. A field for a tuple says `strict=False` and takes a list, too,
    because files have no tuples.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, strict=True)

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise ConfigError("; ".join(_problem(type(self), problem) for problem in error.errors()[:3])) from None


class Section(Settings):
    """A section of a run's settings, which files of 0.2 hold, too."""

    @model_validator(mode="before")
    @classmethod
    def _without_removed(cls, values: Any) -> Any:
        """Drop settings of 0.2 that did nothing, and refuse those that did something."""
        if not isinstance(values, dict):
            return values
        gone = (REMOVED.keys() | REMOVED_DETAILS) & values.keys() - cls.model_fields.keys()
        now = REMOVED | {"perm_size": values.get("reuse_len")}
        used = {name: values[name] for name in now if name in gone and values[name] not in (None, now[name])}
        if cls.__module__.startswith("transformer_xl."):  # not a kind of the user's own
            used |= {name: values[name] for name, removed in REMOVED_VALUES.items() if values.get(name) in removed}
        if used:
            name, value = next(iter(used.items()))
            raise ValueError(f"{name} ({shown(value)}) is a setting of 0.2 that 0.3 does not have; use 0.2, or leave it out")
        return {name: value for name, value in values.items() if name not in gone}


def _problem(settings: type[BaseModel], problem: Any) -> str:
    """Return one problem in words: its key, its value and what would be right."""
    key = shown(".".join(map(str, problem["loc"])))[1:-1]
    if problem["type"] == "extra_forbidden":
        return f"unknown key '{key}'; {did_you_mean(key[:100], settings.model_fields, listed_by='txl settings')}"
    message = problem["msg"].removeprefix("Value error, ").replace("Input should be", "must be")
    value = problem["input"]
    if isinstance(value, dict | BaseModel):  # a section, whose own message names the key, or a rule about several keys
        return f"{key}: {message}" if key else message
    return f"{key} ({written(value) if isinstance(value, bool) else shown(value)}) {message}"
