"""Settings of other programs, read strictly: each value has the type that it must have."""

from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Annotated, Any, Self

from pydantic import BeforeValidator, Field

from transformer_xl.config.settings import Settings
from transformer_xl.errors import ConfigError, shown

Flag = Annotated[bool, BeforeValidator(lambda value: value == 1 if type(value) is int and value in (0, 1) else value)]
"""True or false, which some programs write as 1 or 0."""

Clusters = Annotated[tuple[int, ...], Field(strict=False, max_length=100)]
"""The first ids of the tails of an adaptive softmax."""


class Values(Settings):
    """Settings of another program that matter here, under its names."""

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Self:
        """Return those of some values; others are left out."""
        return cls(**{name: values[name] for name in cls.model_fields if name in values})

    @classmethod
    def of_file(
        cls,
        values: Mapping[str, Any],
        *,
        without_effect: Collection[str] = (),
        old_names: Mapping[str, str] = MappingProxyType({}),
    ) -> Self:
        """Return all that a file holds, except those without effect; others are refused. Old names become the newest ones."""
        renamed: dict[str, Any] = {}
        for old, value in values.items():
            name = old_names.get(old, old)
            if name in renamed and renamed[name] != value:
                raise ConfigError(f"{name} is {shown(renamed[name])} and, under another name, {shown(value)}; keep one of them")
            if name not in without_effect:
                renamed[name] = value
        return cls(**renamed)
