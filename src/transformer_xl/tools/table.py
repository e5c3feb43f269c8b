"""Forecast and outcome of an ablation as tables: on a screen, in Markdown, as JSON."""

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from transformer_xl import console
from transformer_xl.console import clock
from transformer_xl.data.text import text_difference
from transformer_xl.errors import counted
from transformer_xl.tools.ablation import Ablation
from transformer_xl.tools.variants import AblationPlan

Metric = Literal["loss", "bpc"]

METRICS: dict[Metric, str] = {"bpc": "bits per character", "loss": "nats per token"}


@dataclass(frozen=True)
class Mean:
    """The mean of a figure over several runs."""

    mean: float
    deviation: float | None  # standard deviation between runs; None for one run
    n: int

    @classmethod
    def of(cls, values: Sequence[float]) -> "Mean":
        """Return the mean of figures.

        Example:
            >>> Mean.of([1.0, 2.0, 3.0])
            Mean(mean=2.0, deviation=1.0, n=3)
        """
        deviation = statistics.stdev(values) if len(values) > 1 else None
        return cls(statistics.fmean(values), deviation, len(values))


@dataclass(frozen=True)
class VariantRow:
    """One variant. What is not known yet is None."""

    variant: str
    labels: dict[str, str]
    failed: int = 0  # runs that failed
    parameters: int | None = None
    more_parameters: float | None = None  # than the first variant, as a share of its parameters
    steps: float | None = None  # of a run, as are tokens and seconds
    tokens: float | None = None
    seconds: float | None = None
    loss: Mean | None = None  # nats per token, read as `txl eval` reads
    bpc: Mean | None = None
    ppl: float | None = None
    best_length: int | None = None  # the scored attention length with the least loss
    best_loss: Mean | None = None
    best_bpc: Mean | None = None
    difference: float | None = None  # from the first variant, in the metric `Table.compared`
    difference_error: float | None = None  # standard error; None with one seed


@dataclass(frozen=True)
class Table:
    """The outcome of an ablation."""

    rows: list[VariantRow]
    text: str  # what was scored
    unit: str  # bpc or ppl, whichever is usual for such tokens
    compared: Metric | None  # metric of the differences; None: nothing can be compared
    why_not: str  # empty if something can be compared
    n_run: int
    n_done: int


def make_table(ablation: Ablation) -> Table:
    """Gather what is known about each variant."""
    results = [ablation.results(variant) for variant in ablation.plan.variants]
    known = list(itertools.chain(*results))
    scored = [result for result in known if result.get("done")]
    texts = sorted({result["text"] for result in scored})
    compared, why_not = comparable(ablation.plan, scored)
    rows: list[VariantRow] = []
    for variant, own in zip(ablation.plan.variants, results, strict=True):
        row = _row(variant.name, variant.labels, own)
        rows.append(_compared(row, rows[0] if rows else row, compared))
    unit = "bpc" if all(result["unit"] in ("byte", "char", "bpe") for result in scored) else "ppl"
    done = sum(result.get("done", False) or "failed" in result for result in known)
    return Table(rows, "; ".join(texts), unit, compared, why_not, len(ablation.plan.trials), done)


def _row(name: str, labels: dict[str, str], results: list[dict[str, Any]]) -> VariantRow:
    failed = sum("failed" in result for result in results)
    scored = [result for result in results if result.get("done")]
    if not scored:
        return VariantRow(name, labels, failed, parameters=results[0]["parameters"] if results else None)
    used = {key: statistics.fmean(result[key] for result in scored) for key in ("steps", "tokens", "seconds")}
    readings = list(zip(*(result["scores"] for result in scored), strict=True))  # the first as txl eval reads
    best, loss = min(readings, key=lambda scores: _mean(scores, "loss").mean), _mean(readings[0], "loss")
    return VariantRow(
        name,
        labels,
        failed,
        parameters=scored[0]["parameters"],
        **used,
        loss=loss,
        bpc=_mean(readings[0], "bpc"),
        ppl=math.exp(loss.mean) if loss.mean < 709 else None,
        best_length=best[0]["reading"]["length"] if len(readings) > 1 else None,
        best_loss=_mean(best, "loss"),
        best_bpc=_mean(best, "bpc"),
    )


def _mean(scores: Sequence[dict[str, Any]], figure: str) -> Mean:
    return Mean.of([scored["score"][figure] for scored in scores])


def _compared(row: VariantRow, first: VariantRow, metric: Metric | None) -> VariantRow:
    """Return a row with its differences from the first."""
    is_first = row is first
    if row.parameters and first.parameters:
        row = replace(row, more_parameters=row.parameters / first.parameters - 1)
    own, its = (getattr(each, metric) if metric else None for each in (row, first))
    if is_first or not own or not its:
        return row
    error = None
    if own.deviation is not None and its.deviation is not None:
        error = math.sqrt(own.deviation**2 / own.n + its.deviation**2 / its.n)
    return replace(row, difference=own.mean - its.mean, difference_error=error)


def comparable(plan: AblationPlan, results: Sequence[dict[str, Any]]) -> tuple[Metric | None, str]:
    """Return the metric in which runs can be compared, or None and the reason as a clause."""
    first, *others = (variant.config.data for variant in plan.variants)
    if len({result["text"] for result in results}) > 1 or any(text_difference(first, other) for other in others):
        return None, "the variants were not scored on the same text"
    if len({result["tokenizer"] for result in results}) < 2:
        return "loss", ""
    lossy = dict.fromkeys(result["variant"] for result in results if result["loses"])
    if lossy:
        why = f"vocabularies differ, and not all of the text is predicted by {', '.join(lossy)}"
        return None, f"{why}, so that bits per character differ, too"
    if plan.tokens is not None:
        return None, f"vocabularies differ, so that {plan.tokens:,} tokens are not the same text"
    return "bpc", ""


def as_text(table: Table) -> str:
    """Return the table for a screen."""
    return "\n".join([console.table(_cells(table)), "", *_notes(table)])


def as_markdown(table: Table) -> str:
    """Return the table in Markdown."""
    return "\n".join([console.markdown(_cells(table)), "", *_notes(table)]) + "\n"


def lengths_text(lengths: Mapping[str, Mapping[float, int]], *, most: int) -> str:
    """Return a table of effective context lengths, at most `most`, by variant and share of the tokens."""
    rows = [["context used", *(f"r = {share:g}" for share in next(iter(lengths.values()), {}))]]
    rows += [[name, *(f"≥ {own:,}" if own == most else f"{own:,}" for own in each.values())] for name, each in lengths.items()]
    return f"{console.table(rows)}\n\nIn tokens, of the share r of tokens that are hardest for all."


def forecast_text(ablation: Ablation, forecast: list[dict[str, Any]]) -> str:
    """Return the rows of `Worker.forecast` as a table for a screen."""
    rows = [["variant", "parameters", "", "ms/step", "steps", "time"]]
    for row in forecast:
        budget = ["?", "?"] if row["steps"] is None else [f"{row['steps']:,}", clock(row["seconds"])]
        sizes = [f"{row['parameters']:,}", _share(row["more_parameters"]), f"{1e3 * row['step_seconds']:,.1f}"]
        rows.append([row["variant"], *sizes, *budget])
    n_run, total = len(ablation.plan.trials), sum(row["seconds"] or 0 for row in forecast) * ablation.plan.seeds
    note = f"{counted(n_run, 'run')}, {clock(total)} of training in all; validation and scoring come on top."
    return "\n".join([console.table(rows), "", note, f"They go to {ablation.directory}."])


def _cells(table: Table) -> list[list[str]]:
    unit = table.unit
    head = ["variant", "parameters", "", "steps", "tokens", "time", "nats/token", unit, "best at", unit, "difference"]
    lines = [head]
    for row in table.rows:
        length = "-" if row.best_length is None else f"{row.best_length:,}"
        line = [row.variant, "-" if row.parameters is None else f"{row.parameters:,}", _share(row.more_parameters)]
        if row.loss is None or row.seconds is None:
            lines.append([*line, *["-"] * 3, "failed" if row.failed else "-", *["-"] * 4])
            continue
        line += [f"{row.steps:,.0f}", f"{row.tokens:,.0f}", clock(row.seconds), _with_spread(row.loss)]
        best = "-" if row.best_length is None else _in_unit(row.best_loss, row.best_bpc, unit)
        difference = "" if row.difference is None else f"{row.difference:+.4f}"
        difference += "" if row.difference_error is None else f" ± {row.difference_error:.4f}"
        lines.append([*line, _in_unit(row.loss, row.bpc, unit), length, best, difference])
    return lines


def _share(more: float | None) -> str:
    return "" if not more else f"{more:+.1%}"


def _with_spread(value: Mean) -> str:
    return f"{value.mean:.4f}" + ("" if value.deviation is None else f" ± {value.deviation:.4f}")


def _in_unit(loss: Mean | None, bpc: Mean | None, unit: str) -> str:
    if loss is None or bpc is None:
        return "-"
    if unit == "bpc":
        return _with_spread(bpc)
    return f"{math.exp(loss.mean):,.2f}" if loss.mean < 709 else "inf"


def _notes(table: Table) -> list[str]:
    unit = {"bpc": "bits per character", "ppl": "perplexity per token"}[table.unit]
    notes = []
    if table.text:
        notes.append(f"Scored on the {table.text}; {table.unit}: {unit}; best at: the attention length with the least loss.")
    if any(row.loss and row.loss.deviation is not None for row in table.rows):
        notes.append("±: standard deviation between seeds; of a difference its standard error.")
    if table.compared is None:
        notes.append(f"Differences are not given: {table.why_not}.")
    elif len(table.rows) > 1:
        why = ", because tokens are not the same" if table.compared == "bpc" else ""
        notes.append(f"difference: from the first variant, in {METRICS[table.compared]}{why}.")
    if failed := [f"{row.failed} of {row.variant}" for row in table.rows if row.failed]:
        notes.append(f"Failed, and left out of the means: {', '.join(failed)}.")
    if table.n_done < table.n_run:
        notes.append(f"{table.n_done} of {table.n_run} runs are done.")
    return notes
