"""`txl eval`."""

import json
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from cyclopts import Parameter

from transformer_xl.cli.options import Flag, Json, Opening, Positive, ReadingChoice, TextChoice
from transformer_xl.console import Bar, printable, progress, table, warn
from transformer_xl.errors import ConfigError, TrainingError, counted
from transformer_xl.files import check_file

if TYPE_CHECKING:
    from torch import Tensor

    from transformer_xl.checkpoint.open_run import Opened
    from transformer_xl.data.text import Text
    from transformer_xl.reading.cache import Cache
    from transformer_xl.reading.dynamic import Dynamic
    from transformer_xl.reading.evaluation import Score
    from transformer_xl.reading.reading import Reading
    from transformer_xl.world import World

_TRAINING_TOKENS = 20_000
"""Tokens of training text from which the rms rule gathers squared gradients."""


@Parameter(name="*")
@dataclass(frozen=True)
class Adapting:
    """What adapts to the text while it is read.

    Args:
        dynamic: let a copy of the weights learn from each segment once it is scored; rms first reads training text.
        dynamic_lr: learning rate. Default: 0.05 with sgd, 0.0003 with rms.
        dynamic_decay: how far each step goes back towards the trained weights, 0 to 1. Default: 0.
        cache: places to keep; what followed similar ones is mixed into the prediction. 2000 suits most texts.
        cache_weight: share of the cache in the prediction. Default: 0.1.
        cache_theta: how much more similar places count than others. Default: 5.
    """

    dynamic: Literal["sgd", "rms"] | None = None
    dynamic_lr: float | None = None
    dynamic_decay: float | None = None
    cache: Positive | None = None
    cache_weight: float | None = None
    cache_theta: float | None = None

    def __post_init__(self) -> None:
        for what, add in (
            ("dynamic", "dynamic evaluation; add --dynamic rms or --dynamic sgd"),
            ("cache", "a cache; add --cache 2000"),
        ):
            of_it = [name for name, value in vars(self).items() if name.startswith(f"{what}_") and value is not None]
            if of_it and getattr(self, what) is None:
                raise ConfigError(f"--{of_it[0].replace('_', '-')} is for {add}")

    def __bool__(self) -> bool:
        return self.dynamic is not None or self.cache is not None

    @property
    def settings(self) -> dict[str, Any]:
        """The arguments of `evaluate`, dynamic evaluation without mean squares; empty if nothing adapts."""
        if not self:
            return {}
        from transformer_xl.reading.cache import Cache
        from transformer_xl.reading.dynamic import Dynamic

        shares = {"weight": self.cache_weight, "theta": self.cache_theta}
        given = {name: value for name, value in shares.items() if value is not None}
        return {
            "dynamic": Dynamic(self.dynamic_lr, self.dynamic_decay or 0.0) if self.dynamic else None,
            "cache": Cache(self.cache, **given) if self.cache else None,
        }

    @property
    def in_words(self) -> str:
        """What adapts."""
        return " and ".join([*["dynamic evaluation"] * bool(self.dynamic), *["the cache"] * bool(self.cache)])


def evaluate(
    run: Path,
    /,
    *,
    choice: TextChoice = TextChoice(),
    reading: ReadingChoice = ReadingChoice(),
    temperature: float | Literal["auto"] | None = None,
    adapting: Adapting = Adapting(),
    opening: Opening = Opening(),
    compare_memory: Flag = False,
    per_token: Path | None = None,
    quiet: Flag = False,
    json_: Json = False,
) -> None:
    """Score a run: a whole split as one stream, or what a fine-tuned run predicts.

    Common uses:
        txl eval runs/mine
        txl eval runs/mine --compare-memory
        txl eval runs/mine --mem-len 1024 --same-length
        txl eval runs/mine --file other.txt --json
        txl eval runs/mine --dynamic rms
        txl eval runs/mine --cache 2000
        txl eval runs/mine --temperature auto
        txl eval runs/mine --per-token nats.tsv
        txl eval runs/mood --file test.tsv

    For a run that learned answers (train.loss=answer), only the answers are scored,
    each document by itself; without memory, they are read without questions.

    For a fine-tuned run, its predictions for a file with labels are scored.
    Default: the run's own test file, or else its validation file. Without one,
    --split valid and train are what was held out of its texts and what was not.

    Args:
        run: directory of a run; with --file or --corpus, also of an exported model.
        choice: what is scored.
        reading: how it is read.
        temperature: divides the scores, as in txl generate; auto: the best one for the validation split.
        adapting: what adapts to the text while it is read; the run itself stays as it is.
        opening: how the run is opened.
        compare_memory: score once more without memory, and say what memory is worth.
        per_token: write position, id, nats and text of every token to this file; an array if it ends in .npy.
        quiet: show no progress, only warnings and the score.
        json_: print one JSON object.
    """
    from transformer_xl.process import keep_freed_memory
    from transformer_xl.world import joined

    with joined() as world:
        with world.agreed():
            if per_token is not None:
                check_file(per_token, option="per-token")
            opened = opening.open(run, on_damaged=lambda message: warn(message, quiet=not world.first), any_model=True)
        keep_freed_memory()
        config = opened.any_model.config
        predicts = config.predicts if config.predicts == "target" else opened.config.predicts
        score, accepted, why = _KINDS["task" if config.head else predicts]
        how = {**vars(reading), **vars(adapting), "compare_memory": compare_memory or None}
        how |= {"per_token": per_token, "temperature": temperature}
        with world.agreed():
            for name, value in how.items():
                if accepted is not None and value is not None and name not in {*accepted, "batch_size", "precision"}:
                    raise ConfigError(f"--{name.replace('_', '-')} {why.format(run=run)}")
        score(_Job(opened, world, choice, reading, temperature, adapting, compare_memory, per_token, quiet, json_))


@dataclass(frozen=True)
class _Job:
    """What is scored, and what the command line asks for."""

    opened: "Opened"
    world: "World"
    choice: TextChoice
    options: ReadingChoice
    temperature: float | Literal["auto"] | None
    adapting: Adapting
    compare_memory: bool
    per_token: Path | None
    quiet: bool
    json: bool

    @property
    def run(self) -> str:
        return self.opened.source

    def reading(self, precision: Any) -> "Reading":
        """Return how the run is read."""
        lanes = 1 if self.adapting.dynamic and self.options.batch_size is None else self.options.batch_size
        reading = self.opened.reading(**{**vars(self.options), "precision": precision, "batch_size": lanes})
        if self.compare_memory and not reading.mem_len:
            raise ConfigError(f"--compare-memory: '{self.run}' is read without memory (mem_len 0) already; leave it out")
        return reading

    def bar(self, what: str, n_token: int) -> AbstractContextManager[Bar]:
        """Show how far all processes are, together."""
        return progress(what, n_token // self.world.size, hidden=self.quiet or not self.world.first)

    def check_finite(self, score: "Score", reading: "Reading") -> None:
        """Refuse a loss that is no number."""
        with self.world.agreed():
            if not math.isfinite(score.loss):
                raise TrainingError(f"the loss of '{self.run}' in {reading.precision} is not a finite number; {score.doubt}")

    def print_json(self, text: str, reading: "Reading", **figures: Any) -> None:
        """Print what was scored, how, and figures."""
        facts = {"run": self.run, "text": text, "precision": reading.precision}
        unit = self.opened.tokenizer.counts
        print(json.dumps({**facts, "reading": vars(reading), **figures}, default=lambda score: score.as_dict(unit)))


def _score_task(job: _Job) -> None:
    """Print how often a fine-tuned model is right about the texts of a file with labels."""
    from transformer_xl.tasks.metrics import tally_of
    from transformer_xl.tasks.predict import head_of, precision_of_texts, predictions

    opened = job.opened
    if not job.world.alone:
        raise ConfigError(f"'{job.run}' is fine-tuned, and is scored in one process; start txl eval without torchrun")
    model, head = opened.any_model, head_of(opened.any_model)
    chosen = precision_of_texts(job.options.precision, opened.device)
    what, texts = job.choice.labelled(opened)
    begin, tally = time.perf_counter(), tally_of(head.kind, head.labels)
    how: dict[str, Any] = {"batch_size": job.options.batch_size or 32, "precision": chosen}
    with progress("scoring", unit="texts", hidden=job.quiet) as bar:
        for each in predictions(model, opened.tokenizer, texts, **how):
            tally.add(each)
            bar.advance()
    score, seconds = tally.score(), time.perf_counter() - begin
    if job.json:
        facts = {"run": job.run, "text": what, "precision": chosen, "seconds": seconds}
        print(json.dumps(facts | score.as_dict()))
        return
    if score.remark:
        warn(score.remark)
    print(f"{what}: {score.in_words()}, {chosen}, {seconds:.1f} s")
    if score.per_label:
        rows = [[f"{each[name]:.3f}" for name in ("precision", "recall", "f1")] for each in score.per_label.values()]
        counts = [f"{each['n']:,}" for each in score.per_label.values()]
        named = [[printable(name), *row, n] for name, row, n in zip(score.per_label, rows, counts, strict=True)]
        unit = "texts" if head.kind != "tokens" else "entities" if "f1" in score.metrics else "words"
        print(table([["label", "precision", "recall", "F1", unit], *named]))


def _score_targets(job: _Job) -> None:
    """Print how well an XLNet predicts the fixed targets of a text."""
    from transformer_xl.model.xlnet import XLNet
    from transformer_xl.reading.targets import precision_of_targets, score_targets, scored_stream

    with job.world.agreed():
        model, config = job.opened.any_model, job.opened.config
        assert isinstance(model, XLNet)
        if job.options.batch_size is not None:
            config = config.changed(eval={"batch_size": job.options.batch_size})
        precision = precision_of_targets(job.options.precision, job.opened.device)
        reading, text = replace(job.reading(precision), tgt_len=config.train.tgt_len), job.choice.text(job.opened)

    def measure(reading: "Reading", what: str) -> "Score":
        with job.world.agreed():
            stream = scored_stream(config, text.ids, job.opened.tokenizer, world=job.world)
        with job.bar(what, stream.segments_per_epoch * stream.tokens_per_step) as bar:
            return score_targets(model, stream, reading, on_tokens=bar.advance, world=job.world)

    _score_parts(job, text, reading, measure, f"rows of {reading.tgt_len:,}", "target")


def _score_answers(job: _Job) -> None:
    """Print how well a model predicts what follows the first tab of each document; without memory, it has no questions."""
    from transformer_xl.kernels.device import precision_of_segments
    from transformer_xl.reading.texts import score_answers

    with job.world.agreed():
        reading = job.reading(precision_of_segments(job.options.precision, job.opened.device))
        text = job.choice.text(job.opened)
    starts = text.document_starts
    assert starts is not None  # no ids: these have no tab

    def measure(reading: "Reading", what: str) -> "Score":
        with job.bar(what, len(text.ids)) as bar:
            how: dict[str, Any] = {"separator": job.opened.tokenizer.tab, "on_tokens": bar.advance, "world": job.world}
            return score_answers(job.opened.model, text.ids, starts, reading, **how)

    _score_parts(job, text, reading, measure, "each document by itself", "answer token")


def _score_parts(
    job: _Job, text: "Text", reading: "Reading", measure: "Callable[[Reading, str], Score]", how: str, unit: str
) -> None:
    """Print a score of only some tokens, as nats of each."""
    from transformer_xl.reading.reading import memory_in_words

    score = measure(reading, "scoring")
    job.check_finite(score, reading)
    without = measure(reading.without_memory(), "scoring without memory") if job.compare_memory else None
    if not job.world.first:
        return
    if job.json:
        counted = f"{unit}s".replace(" ", "_")
        figures, alone = (
            {counted: each.tokens, "nats": each.nats, "loss": each.loss} if each else None for each in (score, without)
        )
        job.print_json(text.what, reading, seconds=score.seconds, **(figures or {}), without_memory=alone)
        return
    memory = memory_in_words(job.opened.any_model.config, reading.mem_len)
    print(f"{text.what}, {how}, {memory}, {reading.precision}: {score.tokens:,} {unit}s in {score.seconds:.1f} s")
    print(f"  {score.in_words(unit)}, perplexity {score.ppl:.2f}")
    if without:
        worth = f"{without.loss - score.loss:z.4f} nats per {unit}"
        print(f"without memory {without.loss:.4f} nats per {unit}, with it {score.loss:.4f}: memory is worth {worth}")


def _score_stream(job: _Job) -> None:
    """Print the score of a text that is read as one stream."""
    from transformer_xl.kernels.device import precision_of_segments
    from transformer_xl.reading.dynamic import precision_of_learning
    from transformer_xl.reading.evaluation import TEMPERATURES, best_temperature, write_token_nats
    from transformer_xl.reading.evaluation import evaluate as score_stream

    opened, world, adapting, divisor = job.opened, job.world, job.adapting, job.temperature
    with world.agreed():
        precision = precision_of_learning if adapting.dynamic else precision_of_segments
        reading, how = job.reading(precision(job.options.precision, opened.device)), adapting.settings
        text = job.choice.text(opened)
        training_text = _other_text(job, "train", _TRAINING_TOKENS) if adapting.dynamic == "rms" else None
        chosen_on = _other_text(job, "valid") if divisor == "auto" else None
    if not world.alone:
        texts = {"text": text.digest(), "validation": chosen_on and chosen_on.digest()}
        world.check_same(model=opened.model.config.model_dump(mode="json"), **texts, precision=reading.precision)

    def measure(reading: "Reading", what: str = "scoring", text: "Text" = text, **how: Any) -> "Score":
        sizes = {"n_characters": text.n_characters, "n_bytes": text.n_bytes}
        with job.bar(what, len(text.ids) - 1) as bar:
            how |= {"per_token": job.per_token is not None, "on_tokens": bar.advance, "world": world}
            return score_stream(opened.model, text.ids, reading, **sizes, **how)

    if chosen_on is not None:
        tried = measure(reading, "choosing the temperature", chosen_on, temperature=TEMPERATURES, **how)
        divisor = best_temperature(tried.nats_at)
    if divisor is not None:
        how["temperature"] = (divisor, 1.0)
    begin = time.perf_counter()
    if training_text is not None:
        how["dynamic"] = replace(how["dynamic"], mean_squares=_mean_squares(job, training_text, reading))
    score = measure(reading, f"scoring with {adapting.in_words}" if adapting else "scoring", **how)
    score = replace(score, seconds=time.perf_counter() - begin) if adapting else score
    plain = measure(reading) if adapting else score
    job.check_finite(plain, reading)
    without = measure(reading.without_memory(), "scoring without memory", **how) if job.compare_memory else None
    if not world.first:
        return
    if job.per_token is not None and score.token_nats is not None:
        write_token_nats(job.per_token, text.ids, score.token_nats, opened.tokenizer)
    comparisons = [_worth_of_adapting(adapting, score, plain, **how)] if adapting else []
    comparisons += [_worth_of_temperature(score, divisor, chosen_on)] if isinstance(divisor, float) else []
    comparisons += [_worth_of_memory(score, without, opened.tokenizer.counts)] if without else []
    _print_stream(job, text, reading, score, comparisons)


def _other_text(job: _Job, split: Literal["train", "valid"], limit: int | None = None) -> "Text":
    """Return another split of the run's corpus, for what is learned or chosen there."""
    if not job.opened.is_run and job.choice.corpus is None:
        what = "--dynamic rms and --temperature auto read other splits of a corpus"
        raise ConfigError(f"{what}, and '{job.run}' is a model without one; use --dynamic sgd, or give a number")
    return job.opened.text(split=split, corpus=job.choice.corpus, limit=limit)


def _mean_squares(job: _Job, text: "Text", reading: "Reading") -> "dict[str, Tensor]":
    from transformer_xl.reading.dynamic import mean_squares

    with job.bar("reading training text", len(text.ids) - 1) as bar:
        return mean_squares(job.opened.model, text.ids, reading, on_tokens=bar.advance)


class _Comparison(NamedTuple):
    """Two scores compared: figures for JSON, a sentence, and what the heading says of it."""

    figures: dict[str, Any]
    sentence: str
    heading: Sequence[str] = ()


def _worth_of_memory(score: "Score", without: "Score", unit: str) -> _Comparison:
    worth = f"{without.bpc - score.bpc:z.4f} bits per {unit} ({without.loss - score.loss:z.4f} nats per token)"
    sentence = f"without memory {without.bpc:.4f} bits per {unit}, with it {score.bpc:.4f}: memory is worth {worth}"
    return _Comparison({"without_memory": without}, sentence)


def _worth_of_temperature(score: "Score", divisor: float, chosen_on: "Text | None") -> _Comparison:
    plain = replace(score, nats=score.nats_at[1.0])
    figures = {"temperature": divisor, "temperature_chosen_on": chosen_on and chosen_on.what, "plain": plain}
    how = f"temperature {divisor:g}" + (f", the best on the {chosen_on.what}" if chosen_on else "")
    worth = f"worth {plain.loss - score.loss:z.4f} nats per token"
    sentence = f"with {how}: {score.loss:.4f} nats per token, without it {plain.loss:.4f}, {worth}"
    return _Comparison(figures, sentence, [f"temperature {divisor:g}"])


def _worth_of_adapting(
    adapting: Adapting, score: "Score", plain: "Score", dynamic: "Dynamic | None", cache: "Cache | None"
) -> _Comparison:
    figures = {"dynamic": dynamic and dynamic.as_dict(), "cache": cache and cache.as_dict(), "plain": plain}
    sentence = (
        f"without {adapting.in_words} {plain.loss:.4f} nats per token in {plain.seconds:.1f} s, with "
        f"{score.loss:.4f} in {score.seconds:.1f} s: worth {plain.loss - score.loss:z.4f} nats per token"
    )
    settings = {"dynamic evaluation": figures["dynamic"], "cache": figures["cache"]}
    return _Comparison(figures, sentence, [f"{name} ({_listed(values)})" for name, values in settings.items() if values])


def _print_stream(job: _Job, text: "Text", reading: "Reading", score: "Score", comparisons: Sequence[_Comparison]) -> None:
    from transformer_xl.data.text import not_scored

    unit = job.opened.tokenizer.counts
    if score.doubt:
        warn(score.doubt)
    if job.json:
        job.print_json(text.what, reading, **score.as_dict(unit), **{k: v for it in comparisons for k, v in it.figures.items()})
        return
    heading = [line for each in comparisons for line in each.heading]
    what = ", ".join([text.what, reading.in_words(job.opened.model.config), *heading, reading.precision])
    print(f"{what}: {counted(score.tokens, 'token')} in {score.seconds:.1f} s ({score.tokens_per_second:,.0f} tokens/s)")
    rows = [
        ("loss", f"{score.loss:.4f}", "nats per token"),
        ("ppl", f"{score.ppl:.2f}", "perplexity per token"),
        ("bpc" if unit == "character" else "bits", f"{score.bpc:.4f}", f"bits per {unit}"),
        *([] if score.bpb is None else [("bpb", f"{score.bpb:.4f}", "bits per UTF-8 byte")]),
        ("nats", f"{score.nats:,.1f}", "in total"),
    ]
    for name, value, of in rows:
        print(f"  {name:5} {value:>14}  {of}")
    if left_out := not_scored(job.opened.tokenizer):
        print(f"  {left_out}")
    for each in comparisons:
        print(each.sentence)


def _listed(settings: Mapping[str, object]) -> str:
    return ", ".join(f"{value}" if name == "rule" else f"{name} {value}" for name, value in settings.items())


_LENGTHS = ("tgt_len", "mem_len", "same_length", "clamp_len")
_KINDS: dict[str, tuple[Callable[[_Job], None], Collection[str] | None, str]] = {
    "token": (_score_stream, None, ""),
    "answer token": (
        _score_answers,
        [*_LENGTHS, "compare_memory"],
        "is for streams; '{run}' has learned answers, and reads documents one by one",
    ),
    "target": (
        _score_targets,
        ["mem_len", "compare_memory"],
        "is for models that read from left to right; an xlnet reads rows as in its training",
    ),
    "task": (_score_task, [], "is for models that predict tokens; '{run}' is fine-tuned and reads whole texts"),
}
"""By what is predicted: what scores such a run; its options beside rows and precision, None for all; and why no others."""
