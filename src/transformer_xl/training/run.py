"""Training a language model from start to end; what it has in common with other runs is `loop.py`."""

import math
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import numpy as np
from rich.console import Console

from transformer_xl.checkpoint.run_directory import RunDirectory, check_tokenizer, load
from transformer_xl.config.run import RunConfig
from transformer_xl.data.prepare import PreparedCorpus, TokenSplit, prepare
from transformer_xl.errors import ConfigError
from transformer_xl.generation.generate import generate
from transformer_xl.generation.sampling import Sampling
from transformer_xl.model.base import LanguageModel, SequenceModel
from transformer_xl.model.pretrained import RUNS
from transformer_xl.model.xlnet import XLNet
from transformer_xl.process import restarts
from transformer_xl.reading.targets import filled_in, scored_stream
from transformer_xl.tokenizers.base import Tokenizer
from transformer_xl.training.display import Display
from transformer_xl.training.environment import begun_by_this_launch
from transformer_xl.training.loop import conduct, open_files, save
from transformer_xl.training.record import check_loggers
from transformer_xl.training.run_base import Best, Outcome, TextRun
from transformer_xl.training.scoring import conclude, extent, recorded, score_split
from transformer_xl.training.start import (
    adapt,
    begin,
    check_model,
    new_settings,
    resumed_settings,
    take_weights,
    what_all_share,
)
from transformer_xl.world import World, joined

_MOST_GAPS = 8  # in the sample of a validation


def train(
    recipe: str | RunConfig | None = None,
    *,
    out: str | Path | None = None,
    overrides: Sequence[str] = (),
    corpus: str | None = None,
    base: str | Path | None = None,
    resume: bool = False,
    loggers: Sequence[str] = (),
    display: Display | None = None,
) -> Outcome:
    """Train a model, or go on training one.

    If `torchrun` starts several processes, they train it together. Only the first one writes files and prints.

    Args:
        recipe: name or TOML file, or the settings themselves; None: those of the run that is resumed or, if `base` is a run, of
            that one; else `quickstart`.
        out: directory of the run; None: `runs/<recipe>`.
        overrides: `section.key=value`, which replace settings of the recipe.
        corpus: name, file, directory or glob; or a directory that holds the recipe's named corpus.
        base: a run, an exported directory or a hub id, whose model and vocabulary a new run begins with; the recipe says all
            else. None: random weights.
        resume: go on with the run in `out`, or start it if there is none and `recipe`, `corpus` or `base` says what it should
            be.
        loggers: `tensorboard` or `wandb`, besides `metrics.jsonl`; none: TensorBoard if it is installed.
        display: shows the progress; None: on stderr.

    Returns:
        How it ended.

    Raises:
        TxlError: any of the package's errors, each one line.
        OSError: a file cannot be read or written.
    """
    with joined() as world:
        display = (display or Display()) if world.first else Display(quiet=True, console=Console(quiet=True))
        base = None if base is None else str(base)
        with world.agreed():
            check_loggers(loggers)
            directory = RunDirectory(RUNS / new_settings(recipe, overrides, base=base).name if out is None else out)
        # when torchrun restarts processes, it repeats the command, although the directory may hold another run
        resume = resume or (restarts() > 0 and begun_by_this_launch(directory.path))
        only_named = out is not None and recipe is None and corpus is None and base is None  # nothing says what to begin
        goes_on = world.from_first(resume and (directory.holds_run or only_named))
        with world.agreed():
            if goes_on:
                config = resumed_settings(directory, recipe, overrides, corpus, base)
            else:
                if world.first:
                    directory.check_free()
                config = new_settings(recipe, overrides, corpus, base)
            check_model(config)
            tokenizer: Tokenizer | None = None
            bases: list[SequenceModel] = []  # what the set-up takes out, so that it is not held while the model learns
            if config.base is not None and not (goes_on and directory.store().steps()):
                model, tokenizer = load(config.base, on_damaged=display.warn)
                if not goes_on and not RunDirectory(config.base).holds_run:  # its settings do not say what read the text
                    kind = {"kind": tokenizer.kind, "vocab_size": None}
                    with suppress(ConfigError):  # those of other programs have kinds that nothing is trained with
                        config = config.changed(tokenizer=kind)
                bases.append(model)
                del model
            if goes_on:
                tokenizer = directory.tokenizer()
                check_tokenizer(tokenizer, config.model.vocab_size, str(directory.path))
            text = prepare(config.data, tokenizer or config.tokenizer)
            if config.tokenizer.kind == "ids" and not goes_on:
                display.say(f"{config.data.corpus} holds ids, which are read as they are (tokenizer.kind=ids)")
        world.check_same(**what_all_share(config, text))
        return conduct(
            directory,
            config,
            set_up=lambda: _set_up(directory, config, text, bases, display, loggers, world, fresh=not goes_on),
            end=lambda run, stopped_by, received: run.outcome(stopped_by=stopped_by) if stopped_by else conclude(run, received),
            world=world,
            display=display,
            resume=resume,
            goes_on=goes_on,
        )


class _Training(TextRun):
    def validate(self) -> Best | None:
        split = self.corpus.splits["valid"]
        trainer, config = self.trainer, self.config
        if len(split.ids) < 2:
            return None
        self.validated = score_split(self, split, "validation", limit=config.eval.max_tokens)
        score, averaged = self.validated.plain, self.validated.average
        trainer.schedule.validated(score.loss)
        self.note(
            "valid",
            loss=score.loss,
            ppl=score.ppl,
            bpc=score.bpc if config.predicts == "token" else None,
            nats=score.nats,
            tokens=trainer.tokens,
            seconds=round(trainer.seconds, 3),
            **extent(self, score),
            **({"average_loss": averaged.loss} if averaged else {}),
        )
        of_average = f"; averaged weights {averaged.loss:.4f}" if averaged else ""
        predicts = config.predicts
        per_character = f", {score.bpc:.3f} bits per {self.corpus.tokenizer.counts}" if predicts == "token" else ""
        self.display.say(f"step {trainer.step:,}: validation {score.loss:.4f} nats per {predicts}{per_character}{of_average}")
        if config.train.sample_tokens and math.isfinite(score.loss) and self.world.first and not trainer.model.is_sharded:
            text = _sample(self, split)
            self.note("sample", text=text)
            self.display.show(
                text, title=f"{'gaps filled in' if predicts == 'target' else 'a sample'} at step {trainer.step:,}"
            )
        best = Best(score.loss, trainer.step)
        if averaged and (averaged.loss < score.loss or math.isnan(score.loss)):
            best = Best(averaged.loss, trainer.step, average=True)
        return best if best.loss < (self.best.loss if self.best else math.inf) else None

    def take_final(self, entry: dict[str, Any] | None) -> None:
        self.recorded = recorded(entry)


def _set_up(
    directory: RunDirectory,
    config: RunConfig,
    corpus: PreparedCorpus,
    bases: list[SequenceModel],
    display: Display,
    loggers: Sequence[str],
    world: World,
    *,
    fresh: bool,
) -> _Training:
    """Build the model and its trainer, and open the run's files."""
    start = begin(config, corpus, world, warn=None if fresh else display.warn)
    has_base = bool(bases)
    if has_base:
        take_weights(start.model, bases.pop())
    adapt(start.model, config.train)
    config = start.config
    trainer, record, size = open_files(
        directory,
        config,
        corpus.tokenizer,
        start.model,
        start.stream,
        precision=start.precision,
        device=start.device,
        world=world,
        display=display,
        loggers=loggers,
        fresh=fresh,
    )
    sizes = [(p.numel(), p.requires_grad) for p in start.model.parameters()]
    n_parameters, n_learn = sum(size for size, _ in sizes), sum(size for size, learns in sizes if learns)
    some = f" ({n_learn:,} learn)" if n_learn < n_parameters else ""
    vocabulary = f"vocabulary {corpus.tokenizer.vocab_size:,} ({corpus.tokenizer.kind})"
    display.say(
        f"{config.name}: {n_parameters:,} parameters{some}, {vocabulary}, "
        f"{len(corpus.splits['train'].ids):,} training tokens of {config.data.corpus}"
        f"{f', beginning with the weights of {config.base}' if has_base else ''}"
    )
    if start.comparison:
        display.say(str(start.comparison))
    display.say(f"{start.precision} on {start.device}: {start.why_precision}; run directory {directory.path}")
    if start.device.type == "cuda":
        why = trainer.why_no_graph
        display.say(f"kernels are launched one by one: {why}" if why else "the kernels of a step are launched as one graph")
    if not world.alone:
        what = "a part of the model each" if config.train.parallel == "fsdp" else "the whole model each"
        display.say(f"{world.size} processes, {what}, {config.train.batch_size // world.size} of the lanes each")
    text, sha256 = f"the text of '{config.data.corpus}'", corpus.training_sha256
    run = _Training(directory, config, corpus.tokenizer, text, sha256, trainer, world, display, record, size, corpus=corpus)
    if has_base:
        save(run, must=True)  # so that a resumed run needs nothing of its base
    return run


def _sample(run: TextRun, split: TokenSplit) -> str:
    """Continue the first tokens of the validation split, with separate random numbers; or fill the gaps of its first row."""
    model, tokenizer = run.trainer.model, run.corpus.tokenizer
    if isinstance(model, XLNet):
        segment = next(scored_stream(run.config, split.ids, tokenizer, document_starts=split.document_starts))
        return filled_in(model, segment, tokenizer, precision=run.trainer.precision, most=_MOST_GAPS)
    written = generate(
        cast("LanguageModel", model),
        np.asarray(split.ids[:32], dtype=np.int64).tolist(),
        Sampling(temperature=0.8),
        max_new_tokens=run.config.train.sample_tokens,
        seed=run.trainer.step,
        precision=run.trainer.precision,
    )
    return tokenizer.decode(list(written))
