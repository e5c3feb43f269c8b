"""`txl eval`."""

import json
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from cyclopts import Parameter

from transformer_xl.cli.options import Flag, Json, Natural, Opening, Positive, Precision, TextChoice
from transformer_xl.console import printable, progress, table, warn
from transformer_xl.errors import ConfigError, TrainingError
from transformer_xl.files import check_file

if TYPE_CHECKING:
    from torch import Tensor

    from transformer_xl.checkpoint.open_run import Opened
    from transformer_xl.data.text import Text
    from transformer_xl.reading.cache import Cache
    from transformer_xl.reading.dynamic import Dynamic
    from transformer_xl.reading.evaluation import Reading, Score
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

    def __bool__(self) -> bool:
        return self.dynamic is not None or self.cache is not None

    @property
    def dynamic_settings(self) -> "Dynamic | None":
        """Dynamic evaluation, without mean squares; None: it is not asked for."""
        given = _given(lr=self.dynamic_lr, decay=self.dynamic_decay)
        if self.dynamic is None and given:
            raise ConfigError(f"--dynamic-{next(iter(given))} is for dynamic evaluation; add --dynamic rms or --dynamic sgd")
        if self.dynamic is None:
            return None
        from transformer_xl.reading.dynamic import Dynamic

        return Dynamic(**given)

    @property
    def cache_settings(self) -> "Cache | None":
        """The cache; None: it is not asked for."""
        given = _given(weight=self.cache_weight, theta=self.cache_theta)
        if self.cache is None and given:
            raise ConfigError(f"--cache-{next(iter(given))} is for a cache; add --cache 2000")
        if self.cache is None:
            return None
        from transformer_xl.reading.cache import Cache

        return Cache(self.cache, **given)

    @property
    def in_words(self) -> str:
        """What adapts."""
        return " and ".join([*["dynamic evaluation"] * bool(self.dynamic), *["the cache"] * bool(self.cache)])


def _given(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def evaluate(
    run: Path,
    /,
    *,
    choice: TextChoice = TextChoice(),
    tgt_len: Positive | None = None,
    mem_len: Natural | None = None,
    batch_size: Positive | None = None,
    same_length: bool | None = None,
    clamp_len: Positive | None = None,
    ext_len: Natural | None = None,
    precision: Precision = "auto",
    temperature: float | Literal["auto"] | None = None,
    adapting: Adapting = Adapting(),
    opening: Opening = Opening(),
    compare_memory: Flag = False,
    per_token: Path | None = None,
    quiet: Flag = False,
    json_: Json = False,
) -> None:
    """Score a run on a whole split, read as one stream; every token counts once.

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
    Default: the run's own test file, or else its validation file.

    Args:
        run: directory of a run; with --file or --corpus, also of an exported model.
        choice: what is scored.
        tgt_len: tokens per segment. Default: as in training.
        mem_len: positions of memory. Default: as in training.
        batch_size: lanes read side by side; 1 reads strictly from beginning to end. Default: the recipe's.
        same_length: give every query the same number of keys.
        clamp_len: largest distance; larger ones count as this one.
        ext_len: tokens before each segment that are read again with it instead of being remembered.
        precision: of the matrix products; auto: whichever the processor computes fast; int8 rounds the weights.
        temperature: divides the scores, as in txl generate; auto: the best one for the validation split.
        adapting: what adapts to the text while it is read; the run itself stays as it is.
        opening: how the run is opened.
        compare_memory: score once more without memory, and say what memory is worth.
        per_token: write position, id, nats and text of every token to this file; an array if it ends in .npy.
        quiet: show no progress, only warnings and the score.
        json_: print one JSON object.
    """
    dynamic, cache = adapting.dynamic_settings, adapting.cache_settings
    if dynamic:
        batch_size = 1 if batch_size is None else batch_size
        if batch_size > 1:
            raise ConfigError(f"--dynamic reads from beginning to end in one lane; leave --batch-size ({batch_size}) out")
    if temperature is not None and adapting:
        raise ConfigError(f"--temperature is for a model that stays as it is; leave it or {adapting.in_words} out")
    if isinstance(temperature, float) and not 0 < temperature < math.inf:
        raise ConfigError(f"--temperature ({temperature:g}) must be above 0 and finite; 1 leaves the scores as they are")
    from transformer_xl.data.text import not_scored
    from transformer_xl.kernels.device import precision_of_segments
    from transformer_xl.process import keep_freed_memory
    from transformer_xl.reading.dynamic import precision_of_learning
    from transformer_xl.reading.evaluation import TEMPERATURES, best_temperature, write_token_nats
    from transformer_xl.reading.evaluation import evaluate as score_stream
    from transformer_xl.world import joined

    with joined() as world:
        with world.agreed():
            if per_token is not None:
                check_file(per_token, option="per-token")
            opened = opening.open(run, on_damaged=lambda message: warn(message, quiet=not world.first), any_model=True)
        keep_freed_memory()
        if opened.any_model.config.head is not None:
            own = {"tgt-len": tgt_len, "mem-len": mem_len, "same-length": same_length, "clamp-len": clamp_len}
            own |= {"ext-len": ext_len, "per-token": per_token, "compare-memory": compare_memory or None}
            own |= {"dynamic": dynamic, "cache": cache, "temperature": temperature}
            _refuse(own, f"is for models that predict tokens; '{run}' is fine-tuned and reads whole texts")
            asked = {"batch_size": batch_size, "precision": precision, "quiet": quiet, "json_": json_}
            _evaluate_task(opened, choice, world, **asked)
            return
        if opened.any_model.config.predicts == "target":
            own = {"tgt-len": tgt_len, "same-length": same_length, "clamp-len": clamp_len, "ext-len": ext_len}
            own |= {"per-token": per_token, "dynamic": dynamic, "cache": cache, "temperature": temperature}
            _refuse(own, "is for models that read from left to right; an xlnet reads rows as in its training")
            asked = {"mem_len": mem_len, "batch_size": batch_size, "precision": precision, "compare_memory": compare_memory}
            _evaluate_targets(opened, choice, world, **asked, quiet=quiet, json_=json_)
            return
        with world.agreed():
            reading = opened.reading(
                tgt_len=tgt_len,
                mem_len=mem_len,
                batch_size=batch_size,
                same_length=same_length,
                clamp_len=clamp_len,
                ext_len=ext_len,
            )
            if compare_memory and not reading.mem_len:
                raise ConfigError(f"--compare-memory: '{run}' is read without memory (mem_len 0) already; leave it out")
            if dynamic and not world.alone:
                raise ConfigError(f"--dynamic reads in one process, not in {world.size}; start txl eval without torchrun")
            chosen = (precision_of_learning if dynamic else precision_of_segments)(precision, opened.device)
            text = choice.text(opened)
            training_text = _training_text(opened, choice) if adapting.dynamic == "rms" else None
            chosen_on = _validation_text(opened, choice) if temperature == "auto" else None
        if opened.config.predicts == "answer token":
            own = {"dynamic": dynamic, "cache": cache, "per-token": per_token, "ext-len": ext_len, "temperature": temperature}
            _refuse(own, f"is for streams; '{run}' has learned answers, and reads documents one by one")
            asked = {"compare_memory": compare_memory, "quiet": quiet, "json_": json_}
            _evaluate_answers(opened, text, reading, chosen, world, **asked)
            return
        if not world.alone:
            model = opened.model.config.model_dump(mode="json")
            texts = {"text": text.digest(), "validation": chosen_on and chosen_on.digest()}
            world.check_same(model=model, **texts, precision=chosen)

        def measure(reading: "Reading", what: str = "scoring", text: "Text" = text, **adapts: Any) -> "Score":
            with progress(what, (len(text.ids) - 1) // world.size, hidden=quiet or not world.first) as bar:
                return score_stream(
                    opened.model,
                    text.ids,
                    **vars(reading),
                    n_characters=text.n_characters,
                    n_bytes=text.n_bytes,
                    precision=chosen,
                    per_token=per_token is not None,
                    on_tokens=bar.advance,
                    world=world,
                    **adapts,
                )

        divisor = temperature
        if chosen_on is not None:
            tried = measure(reading, "choosing the temperature", chosen_on, temperature=TEMPERATURES)
            divisor = best_temperature(tried.nats_at)
        divides: dict[str, Any] = {} if divisor is None else {"temperature": (divisor, 1.0)}
        score = plain = measure(reading, **divides)
        _check_finite(score, opened, chosen, world)
        if adapting:
            begin = time.perf_counter()
            if dynamic and training_text:
                squares = _mean_squares(opened, training_text, reading, chosen, quiet=quiet)
                dynamic = replace(dynamic, mean_squares=squares)
            training_seconds = time.perf_counter() - begin
            score = measure(reading, f"scoring with {adapting.in_words}", dynamic=dynamic, cache=cache)
            score = replace(score, seconds=score.seconds + training_seconds)
        without = None
        if compare_memory:
            without = measure(reading.without_memory(), "scoring without memory", dynamic=dynamic, cache=cache, **divides)
    if not world.first:
        return
    if score.doubt:
        warn(score.doubt)
    if per_token is not None and score.token_nats is not None:
        write_token_nats(per_token, text.ids, score.token_nats, opened.tokenizer)
    if json_:
        figures = {"run": str(run), "text": text.what, "precision": chosen, "reading": vars(reading), **score.as_dict()}
        if divisor is not None:
            figures |= {"temperature": divisor, "temperature_chosen_on": chosen_on and chosen_on.what}
            figures |= {"plain": replace(score, nats=score.nats_at[1.0]).as_dict()}
        if adapting:
            figures |= {"dynamic": dynamic and dynamic.as_dict(), "cache": cache and cache.as_dict(), "plain": plain.as_dict()}
        print(json.dumps(figures | ({"without_memory": without.as_dict()} if without else {})))
        return
    settings = [f"dynamic evaluation ({_listed(dynamic.as_dict())})"] if dynamic else []
    settings += [f"cache ({_listed(cache.as_dict())})"] if cache else []
    settings += [] if divisor is None else [f"temperature {divisor:g}"]
    unit = opened.tokenizer.counts
    _print(score, ", ".join([text.what, reading.in_words(opened.model.config), *settings, chosen]), unit)
    if left_out := not_scored(opened.tokenizer):
        print(f"  {left_out}")
    if divisor is not None:
        undivided = score.nats_at[1.0] / score.tokens
        how = f"temperature {divisor:g}" + (f", the best on the {chosen_on.what}," if chosen_on else "")
        print(
            f"with {how} {score.loss:.4f} nats per token, without {undivided:.4f}: "
            f"worth {undivided - score.loss:z.4f} nats per token"
        )
    if adapting:
        print(
            f"without {adapting.in_words} {plain.loss:.4f} nats per token in {plain.seconds:.1f} s, with "
            f"{score.loss:.4f} in {score.seconds:.1f} s: worth {plain.loss - score.loss:z.4f} nats per token"
        )
    if without:
        print(
            f"without memory {without.bpc:.4f} bits per {unit}, with it {score.bpc:.4f}: "
            f"memory is worth {without.bpc - score.bpc:z.4f} bits per {unit} "
            f"({without.loss - score.loss:z.4f} nats per token)"
        )


def _listed(settings: Mapping[str, object]) -> str:
    return ", ".join(f"{value}" if name == "rule" else f"{name} {value}" for name, value in settings.items())


def _training_text(opened: "Opened", choice: TextChoice) -> "Text":
    if not opened.is_run and choice.corpus is None:
        raise ConfigError(f"--dynamic rms reads training text, and '{opened.source}' is a model without any; use --dynamic sgd")
    return opened.text(split="train", corpus=choice.corpus, limit=_TRAINING_TOKENS)


def _validation_text(opened: "Opened", choice: TextChoice) -> "Text":
    if not opened.is_run and choice.corpus is None:
        raise ConfigError(
            f"--temperature auto reads a validation split, and '{opened.source}' is a model without a corpus; give a number"
        )
    return opened.text(split="valid", corpus=choice.corpus)


def _mean_squares(opened: "Opened", text: "Text", reading: "Reading", precision: Any, *, quiet: bool) -> "dict[str, Tensor]":
    from transformer_xl.reading.dynamic import mean_squares

    how = {name: value for name, value in vars(reading).items() if name != "batch_size"}
    with progress("reading training text", len(text.ids) - 1, hidden=quiet) as bar:
        return mean_squares(opened.model, text.ids, **how, precision=precision, on_tokens=bar.advance)


def _evaluate_task(
    opened: "Opened",
    choice: TextChoice,
    world: "World",
    *,
    batch_size: int | None,
    precision: str,
    quiet: bool,
    json_: bool,
) -> None:
    """Print how often a fine-tuned model is right about the texts of a file with labels."""
    from transformer_xl.tasks.metrics import tally_of
    from transformer_xl.tasks.predict import head_of, precision_of_texts, predictions, read_texts

    if not world.alone:
        raise ConfigError(f"'{opened.source}' is fine-tuned, and is scored in one process; start txl eval without torchrun")
    model, head = opened.any_model, head_of(opened.any_model)
    chosen = precision_of_texts(precision, opened.device)
    file = choice.labelled_file(opened)
    begin, tally = time.perf_counter(), tally_of(head.kind, head.labels)
    examples = read_texts(file, opened, labelled=True)
    with progress("scoring", unit="texts", hidden=quiet) as bar:
        for each in predictions(model, opened.tokenizer, examples, batch_size=batch_size or 32, precision=chosen):
            tally.add(each)
            bar.advance()
    score, seconds = tally.score(), time.perf_counter() - begin
    if json_:
        facts = {"run": opened.source, "text": str(file), "precision": chosen, "seconds": seconds}
        print(json.dumps(facts | score.as_dict()))
        return
    print(f"{file}: {score.in_words()}, {chosen}, {seconds:.1f} s")
    if score.per_label:
        rows = [[f"{each[name]:.3f}" for name in ("precision", "recall", "f1")] for each in score.per_label.values()]
        counts = [f"{each['n']:,}" for each in score.per_label.values()]
        named = [[printable(name), *row, n] for name, row, n in zip(score.per_label, rows, counts, strict=True)]
        print(table([["label", "precision", "recall", "F1", "texts"], *named]))


def _refuse(options: Mapping[str, object], why: str) -> None:
    if given := next((name for name, value in options.items() if value is not None), None):
        raise ConfigError(f"--{given} {why}")


def _check_finite(score: "Score", opened: "Opened", precision: str, world: "World") -> None:
    with world.agreed():
        if not math.isfinite(score.loss):
            raise TrainingError(f"the loss of '{opened.source}' in {precision} is not a finite number; {score.doubt}")


def _evaluate_targets(
    opened: "Opened",
    choice: TextChoice,
    world: "World",
    *,
    mem_len: int | None,
    batch_size: int | None,
    precision: str,
    compare_memory: bool,
    quiet: bool,
    json_: bool,
) -> None:
    """Print how well an XLNet predicts the fixed targets of a text."""
    from transformer_xl.kernels.device import choose_precision
    from transformer_xl.model.xlnet import XLNet
    from transformer_xl.reading.evaluation import memory_in_words
    from transformer_xl.reading.targets import score_targets, scored_stream

    with world.agreed():
        model, config = opened.any_model, opened.config
        assert isinstance(model, XLNet)
        if precision == "int8":
            raise ConfigError("--precision int8 is for models that read from left to right; use auto, fp32 or bf16")
        if batch_size is not None:
            config = config.changed(eval={"batch_size": batch_size})
        chosen, _ = choose_precision(precision, opened.device)
        mem_len = config.eval_mem_len if mem_len is None else mem_len
        if compare_memory and not mem_len:
            raise ConfigError(f"--compare-memory: '{opened.source}' is read without memory (mem_len 0) already; leave it out")
        text = choice.text(opened)

    def measure(mem_len: int, what: str) -> "Score":
        with world.agreed():
            stream = scored_stream(config, text.ids, opened.tokenizer, world=world)
        n_token = stream.segments_per_epoch * stream.tokens_per_step // world.size
        with progress(what, n_token, hidden=quiet or not world.first) as bar:
            return score_targets(model, stream, mem_len=mem_len, precision=chosen, on_tokens=bar.advance, world=world)

    score = measure(mem_len, "scoring")
    _check_finite(score, opened, chosen, world)
    without = measure(0, "scoring without memory") if compare_memory else None
    if not world.first:
        return
    if json_:
        figures = [each and {"targets": each.tokens, "nats": each.nats, "loss": each.loss} for each in (score, without)]
        facts = {"run": opened.source, "text": text.what, "precision": chosen, "mem_len": mem_len, "seconds": score.seconds}
        print(json.dumps({**facts, **(figures[0] or {}), **({"without_memory": figures[1]} if without else {})}))
        return
    how = f"rows of {config.train.tgt_len:,}, {memory_in_words(model.config, mem_len)}, {chosen}"
    print(f"{text.what}, {how}: {score.tokens:,} targets in {score.seconds:.1f} s")
    print(f"  {score.in_words('target')}")
    if without:
        worth = f"{without.loss - score.loss:z.4f} nats per target"
        print(f"without memory {without.loss:.4f} nats per target, with it {score.loss:.4f}: memory is worth {worth}")


def _evaluate_answers(
    opened: "Opened",
    text: "Text",
    reading: "Reading",
    precision: Any,
    world: "World",
    *,
    compare_memory: bool,
    quiet: bool,
    json_: bool,
) -> None:
    """Print how well a model predicts what follows the first tab of each document."""
    from transformer_xl.reading.evaluation import memory_in_words
    from transformer_xl.reading.token_nats import score_answers

    starts = text.document_starts
    assert starts is not None  # no ids: these have no tab

    def measure(reading: "Reading", what: str) -> "Score":
        with progress(what, len(text.ids) // world.size, hidden=quiet or not world.first) as bar:
            how = {"separator": opened.tokenizer.tab, "precision": precision, "on_tokens": bar.advance, "world": world}
            return score_answers(opened.model, text.ids, starts, reading=reading, **how)

    score = measure(reading, "scoring")
    _check_finite(score, opened, precision, world)
    without = measure(reading.without_memory(), "scoring without questions") if compare_memory else None
    if not world.first:
        return
    if json_:
        figures = [each and {"answer_tokens": each.tokens, "nats": each.nats, "loss": each.loss} for each in (score, without)]
        facts = {"run": opened.source, "text": text.what, "precision": precision, "reading": vars(reading)}
        print(json.dumps({**facts, "seconds": score.seconds, **(figures[0] or {}), "without_memory": figures[1]}))
        return
    how = f"each document by itself, {memory_in_words(opened.model.config, reading.mem_len)}, {precision}"
    print(f"{text.what}, {how}: {score.tokens:,} answer tokens in {score.seconds:.1f} s")
    print(f"  {score.in_words('answer token')}, perplexity {score.ppl:.2f}")
    if without:
        worth = f"{without.loss - score.loss:z.4f} nats per answer token"
        print(f"without memory of the question {without.loss:.4f}, with it {score.loss:.4f}: memory is worth {worth}")


def _print(score: "Score", what: str, unit: str) -> None:
    print(f"{what}: {score.tokens:,} tokens in {score.seconds:.1f} s ({score.tokens_per_second:,.0f} tokens/s)")
    rows = [
        ("loss", f"{score.loss:.4f}", "nats per token"),
        ("ppl", f"{score.ppl:.2f}", "perplexity per token"),
        ("bits" if unit == "id" else "bpc", f"{score.bpc:.4f}", f"bits per {unit}"),
        *([] if score.bpb is None else [("bpb", f"{score.bpb:.4f}", "bits per UTF-8 byte")]),
        ("nats", f"{score.nats:,.1f}", "in total"),
    ]
    for name, value, unit in rows:
        print(f"  {name:5} {value:>14}  {unit}")
