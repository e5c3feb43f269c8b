"""What a person reads of relative effective context lengths: a table, and where it misleads."""

from collections.abc import Mapping, Sequence

from transformer_xl.analysis.recl.measure import Recl


def misleading_lengths(found: Recl) -> list[str]:
    """Return a line for each model that predicts no better at its length: it gains on some tokens and loses on others.

    Args:
        found: what was measured.
    """
    lines = []
    for name, lengths in found.lengths.items():
        first, *others = sorted(found.losses[name])
        longest = max(length.context for length in lengths.values())
        reached = next((context for context in others if context >= longest), first)
        before, after = found.losses[name][first], found.losses[name][reached]
        if longest > first and after >= before:
            lines.append(
                f"{name} has a mean loss of {before:.4f} nats after {first:,} tokens and of {after:.4f} after {longest:,}: "
                "what it gains on some tokens it loses on others, which the measure does not count"
            )
    return lines


def recl_table(found: Recl, parameters: Mapping[str, int], *, title: str) -> str:
    """Return a group as a table: a row for each model, a column for each r.

    Args:
        found: what was measured.
        parameters: how many each model has.
        title: above the names.
    """
    shares = list(next(iter(found.lengths.values())))
    rows: list[Sequence[str]] = [(title, "parameters", *(f"r = {share:g}" for share in shares))]
    for name, lengths in found.lengths.items():
        rows.append((name, f"{parameters[name]:,}", *(str(lengths[share]) for share in shares)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for first, *others in rows:
        cells = (cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True))
        lines.append("  ".join([first.ljust(widths[0]), *cells]))
    return "\n".join(lines)
