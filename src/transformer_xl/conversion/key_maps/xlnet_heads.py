"""Heads of fine-tuned XLNets: their tensors here, and under the names of another program."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from transformer_xl.config.model import HeadConfig, XLNetConfig
from transformer_xl.conversion.key_maps.entries import Entry, Part, Shape
from transformer_xl.conversion.values import Values
from transformer_xl.errors import ConfigError

MOST_LABELS = 100_000

Names = Mapping[str, str]
"""For each of our tensors in a head, "summary.weight" and so on, its name in another program."""


def shapes(head: HeadConfig, d_model: int) -> dict[str, Shape]:
    """Return the shapes of a head's tensors, by the names that follow `head.`."""
    D = d_model
    if head.kind == "span":
        return {
            **{"start.weight": (1, D), "start.bias": (1,)},
            **{"end_inner.weight": (D, 2 * D), "end_inner.bias": (D,), "end_norm.weight": (D,), "end_norm.bias": (D,)},
            **{"end.weight": (1, D), "end.bias": (1,)},
            **{"answerable_inner.weight": (D, 2 * D), "answerable_inner.bias": (D,), "answerable.weight": (1, D)},
        }
    summary: dict[str, Shape] = {"summary.weight": (D, D), "summary.bias": (D,)} if head.summarizes else {}
    return {**summary, "scores.weight": (head.n_score, D), "scores.bias": (head.n_score,)}


def with_head(config: XLNetConfig, entries: Iterable[Entry], names: Names, *, transposed: bool = False) -> list[Entry]:
    """Return the entries of a model with those of its head, if it has one: the model is its backbone then.

    Args:
        config: settings of the model.
        entries: of the model without a head.
        names: of the other program.
        transposed: matrices of the head are (in, out) there.
    """
    if config.head is None:
        return list(entries)
    whole = [replace(entry, native=tuple(f"backbone.{name}" for name in entry.native)) for entry in entries]
    for name, shape in shapes(config.head, config.d_model).items():
        turned = transposed and len(shape) > 1
        part = Part(names[name], shape[::-1] if turned else shape)
        whole.append(Entry((f"head.{name}",), (part,), "transposed" if turned else ""))
    return whole


def longest(mem_len: int) -> int | None:
    """Return how many tokens of a text are read: of a model without memory as many as one segment has; None: all."""
    return None if mem_len else HeadConfig.model_fields["tgt_len"].default


def numbered(stem: str, n_label: int) -> tuple[str, ...]:
    """Return names for labels that have none, such as label_0."""
    if n_label > MOST_LABELS:
        raise ConfigError(f"the number of labels ({n_label:,}) must be at most {MOST_LABELS:,}")
    return tuple(f"{stem}_{i}" for i in range(n_label))


class _LabelValues(Values):
    num_labels: int = 2
    id2label: dict[str, str] | None = None


def named(values: Mapping[str, Any], stem: str) -> tuple[str, ...]:
    """Return the labels of a `config.json`, where `id2label` names them and `num_labels` counts those without a name."""
    given = _LabelValues.of(values)
    if (names := given.id2label) is None:
        return numbered(stem, given.num_labels)
    labels = [names[number] for number in map(str, range(len(names))) if number in names]
    if len(set(labels)) != len(names):
        raise ConfigError(f"id2label must give each of its {len(names):,} labels, counted from 0, a name of its own")
    return tuple(labels)


def notes_of(config: XLNetConfig, stem: str) -> list[str]:
    """Return what users should know of a converted head, a line each."""
    head = config.head
    if head is None:
        return []
    notes = []
    if head.labels and head.labels == numbered(stem, len(head.labels)):
        notes.append(
            f"labels have no names, so they are {head.labels[0]} to {head.labels[-1]}; "
            "--set 'head.labels=[\"…\", …]' names them"
        )
    return notes
