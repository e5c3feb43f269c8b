"""How well a model in training predicts the validation split: in a validation, and when the run is finished."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

from transformer_xl.console import clock
from transformer_xl.data.prepare import TokenSplit
from transformer_xl.data.text import beginning
from transformer_xl.model.base import LanguageModel
from transformer_xl.model.xlnet import XLNet
from transformer_xl.reading.evaluation import Score, evaluate
from transformer_xl.reading.reading import Reading
from transformer_xl.reading.targets import score_targets, scored_stream
from transformer_xl.reading.texts import score_answers
from transformer_xl.training.loop import Run, StopError

_SCORING_SECONDS, _SCORING_SHARE = 120.0, 0.1  # the whole split is scored at the end in this time, or share of that of training


@dataclass(frozen=True)
class TextScores:
    """How well a model predicts the validation split, or its beginning."""

    plain: Score  # with memory
    average: Score | None = None  # of averaged weights, with memory
    without_memory: Score | None = None

    def in_words(self, predicts: str, unit: str, size: Mapping[str, int]) -> Iterator[str]:
        """Yield lines; `predicts` and `unit` say what is counted, and `size` is the `extent` of the scores."""
        plain, without, total = self.plain, self.without_memory, size["split_tokens"]
        about = "" if predicts == "token" else "about "
        which = f"{plain.tokens:,}" if plain.tokens == total else f"the first {plain.tokens:,} of {about}{total:,}"
        worth = ""
        if without and predicts == "token":
            worth = f"{without.bpc:.3f}: memory is worth {without.bpc - plain.bpc:.3f} bits per {unit}"
        elif without:
            worth = f"{without.loss:.4f}: memory is worth {without.loss - plain.loss:.4f} nats per {predicts}"
        worth = worth and f"; with its memory taken away {worth}"
        yield f"validation, {which} {predicts}s: {plain.in_words(predicts, unit)}{worth}"
        if self.average:
            yield f"averaged weights: {self.average.in_words(predicts, unit)}"


def score_split(
    run: Run[Any], split: TokenSplit, what: str, *, limit: int | None, received: list[int] | None = None
) -> TextScores:
    """Evaluate the weights and, if there are any, the averaged weights; see `_score`."""
    plain = _score(run, split, what=what, limit=limit, received=received)
    average = run.trainer.average
    if not average.count:
        return TextScores(plain)
    with average.in_place_of(run.trainer.model):
        return TextScores(plain, _score(run, split, what=f"{what} averaged weights", limit=limit, received=received))


def final_scores(run: Run[Any], split: TokenSplit, validated: TextScores | None, received: list[int]) -> TextScores:
    """Score the whole split, or if that takes too long what validations read of it, as was done if it is `validated` now."""
    _check(run, received)
    n_token, limit, say = len(split.ids) - 1, run.config.eval.max_tokens, run.display.say
    remembers = run.config.eval_mem_len > 0
    how = ", with memory and without" if remembers else ""
    scores = validated or score_split(run, split, "scoring", limit=limit, received=received)
    if run.config.predicts == "token":
        n_pass = 1 + remembers + bool(scores.average)
        seconds = run.world.from_first(n_pass * n_token / scores.plain.tokens_per_second)
        n_scored = scores.plain.tokens
        if n_scored == n_token or seconds <= max(_SCORING_SECONDS, _SCORING_SHARE * run.trainer.seconds):
            say(f"scoring all {n_token:,} tokens of the validation split{how}")
            limit = None
            if n_scored < n_token:
                scores = score_split(run, split, "scoring", limit=limit, received=received)
        else:
            say(
                f"scoring the first {n_scored:,} of {n_token:,} tokens of the validation split{how}, because all would take "
                f"{clock(seconds)}; txl eval {run.quoted_path} --split valid scores all"
            )
    if not remembers:
        return scores
    without = _score(run, split, what="scoring without memory", remembers=False, limit=limit, received=received)
    return replace(scores, without_memory=without)


def _score(
    run: Run[Any],
    split: TokenSplit,
    *,
    what: str,
    remembers: bool = True,
    limit: int | None,
    received: list[int] | None = None,
) -> Score:
    """Evaluate on a split or its beginning, with a memory of its own; training's memory does not change.

    Raises:
        StopError: one of the `received` signals ends it; None: no signal does.
    """
    n_token = len(split.ids) - 1 if limit is None else min(limit, len(split.ids) - 1)
    show = run.display.scoring(what, n_token // run.world.size)

    def on_tokens(n: int) -> None:
        show(n)
        if received is not None and run.world.alone:  # several processes must stop together
            _check(run, received)

    if received is not None:
        _check(run, received)
    model, tokenizer = run.trainer.model, run.objective.tokenizer
    reading = Reading.of_run(run.config, precision=run.trainer.precision)
    reading = reading if remembers else reading.without_memory()
    how: dict[str, Any] = {"on_tokens": on_tokens, "world": run.world}
    if isinstance(model, XLNet):
        stream = scored_stream(run.config, split.ids, tokenizer, document_starts=split.document_starts, world=run.world)
        return score_targets(model, stream, reading, limit=limit, execution=run.trainer.execution, **how)
    model = cast("LanguageModel", model)
    if run.config.train.loss == "answer":
        how |= {"separator": tokenizer.tab, "limit": limit}
        return score_answers(model, split.ids, split.document_starts, reading, **how)
    text = beginning(split, tokenizer, limit)
    sizes = {"n_characters": text.n_characters, "n_bytes": text.n_bytes}
    return evaluate(model, text.ids, reading, **sizes, **how, execution=run.trainer.execution)


def _check(run: Run[Any], received: list[int]) -> None:
    if number := run.stopped_by(received):
        raise StopError(number)


def extent(run: Run[Any], split: TokenSplit, score: Score) -> dict[str, int]:
    """Return how much of the validation split a score is of, and with how much memory, as the log keeps it."""
    total, mem_len = len(split.ids) - 1, run.config.eval_mem_len
    if run.config.predicts != "token":  # nobody knows exactly how many the rest has
        total = score.tokens if score.share == 1 else round(score.tokens / score.share)
    return {"scored": score.tokens, "split_tokens": total, "mem_len": mem_len}


def as_entry(run: Run[Any], scores: TextScores) -> dict[str, float | int | None]:
    """Return final scores as the log keeps them."""
    plain = scores.plain
    losses = {"loss": scores.plain, "loss_without_memory": scores.without_memory, "average_loss": scores.average}
    figures = plain.as_dict(run.objective.tokenizer.counts if run.config.predicts == "token" else "word")
    sizes = {"bpc": figures["bpc"], "characters": figures["n_characters"], "bytes": plain.n_bytes}
    return {name: score.loss for name, score in losses.items() if score} | sizes
