"""What figures belong to, on stdout above their tables."""

from collections.abc import Mapping

from transformer_xl.console import table


def facts(pairs: Mapping[str, str]) -> str:
    """Lay out names and values in two columns."""
    return table(list(pairs.items()), n_left=2)
