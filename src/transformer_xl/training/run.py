"""Training a language model: what it learns from, how it is validated, and how the finished one is scored."""

import math
import signal
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np

from transformer_xl.checkpoint.run_directory import RunDirectory
from transformer_xl.config.recipes import apply_overrides, load_recipe
from transformer_xl.config.run import RunConfig, merge
from transformer_xl.console import clock
from transformer_xl.data.corpora import choose_corpus, switch_to_ids
from transformer_xl.data.named import SPLITS
from transformer_xl.data.prepare import PreparedCorpus, TokenSplit, prepare, texts_of
from transformer_xl.data.streams import EndlessStream, SegmentStream
from transformer_xl.data.text import not_scored
from transformer_xl.errors import ConfigError, CorpusError, TokenizerError, TrainingError, counted
from transformer_xl.generation.generate import generate
from transformer_xl.generation.sampling import Sampling
from transformer_xl.model.base import LanguageModel
from transformer_xl.model.build import count_parameters
from transformer_xl.model.growth import check_can_grow as check_model_can_grow
from transformer_xl.model.growth import why_it_cannot_grow
from transformer_xl.model.xlnet import XLNet
from transformer_xl.reading.evaluation import Score
from transformer_xl.reading.reading import Reading
from transformer_xl.reading.targets import filled_in, pair_stream, scored_stream
from transformer_xl.tokenizers.base import Tokenizer
from transformer_xl.tokenizers.growth import can_grow, check_can_grow, grown, in_words, lacking
from transformer_xl.tokenizers.ids import IdTokenizer
from transformer_xl.tokenizers.words import WordTokenizer
from transformer_xl.training.display import Display
from transformer_xl.training.loop import Objective, Run, RunOutcome, conduct
from transformer_xl.training.scoring import TextScores, as_entry, extent, final_scores, score_split
from transformer_xl.training.start import absolute_base, check_model, complete, settings_of_base, settings_with_base, start
from transformer_xl.world import World

_MOST_GAPS = 8  # in the sample of a validation
_BLOCK = 1 << 20  # tokens looked through at once
_OF_RECIPE = {"name", "description", "source", "data", "optim", "train", "eval", "task"}  # what `base` does not say


@dataclass(frozen=True)
class Outcome(RunOutcome):
    """How a call of `train` ended; see `RunOutcome` for the rest.

    Attributes:
        score: validation, with memory; None without such a split, and if the run did not finish.
        score_without_memory: None if the model has no memory.
        picture: the loss curve.
        score_of_average: averaged weights, with memory; None without `train.average`.
        predicts: what the scores count, see `RunConfig.predicts`.
    """

    score: Score | None = None
    score_without_memory: Score | None = None
    picture: Path | None = None
    score_of_average: Score | None = None
    predicts: str = "token"


def train(
    recipe: str | RunConfig | None = None,
    *,
    out: str | Path | None = None,
    overrides: Sequence[str] = (),
    corpus: str | None = None,
    base: str | Path | None = None,
    grow: bool = False,
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
        grow: add the characters or words of the text that the vocabulary of `base` lacks; their rows in the model's tables
            begin as the mean of the others.
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
    objective = Pretraining(recipe, list(overrides), corpus, None if base is None else str(base), grow=grow)
    with start(objective, out=out, resume=resume, loggers=loggers, display=display) as run:
        return conduct(run)


@dataclass
class Pretraining(Objective[Outcome]):
    """To predict the tokens of a text; its fields are arguments of `train`."""

    recipe: str | RunConfig | None = None
    overrides: list[str] = field(default_factory=list)
    corpus: str | None = None
    base: str | None = None
    grow: bool = False
    vocabulary_note: str = field(default="", init=False)  # what the text has that the vocabulary of the base lacked
    prepared: PreparedCorpus = field(init=False)
    validated: TextScores | None = None  # by the last validation of this process

    command = "train"
    noun = "recipe"
    scoring_command = "eval"

    def __post_init__(self) -> None:
        self.base = None if self.base is None else absolute_base(self.base)

    @property
    def begins(self) -> bool:
        return (self.recipe, self.corpus, self.base) != (None, None, None)

    def recipe_name(self) -> str | None:
        return self.recipe.name if isinstance(self.recipe, RunConfig) else self.recipe and load_recipe(self.recipe).name

    def new_settings(self) -> RunConfig:
        recipe, base = self.recipe, self.base
        if self.grow and base is None:
            raise ConfigError("--grow adds to the vocabulary of a model that has one; name it with --from")
        if base is not None:
            config = self._settings_with(base)
        elif isinstance(recipe, RunConfig):
            config = apply_overrides(recipe.model_dump(), self.overrides)
        else:
            config = load_recipe(recipe or "quickstart", self.overrides)
        if config.base != base:
            raise ConfigError(f"base ({config.base}) is what --from sets (in Python base=…), which reads the model's settings")
        if config.task:
            raise ConfigError(f"'{config.name}' is a task, which a model is taught that has read much; use txl finetune --task")
        if config.model.head is not None:
            raise ConfigError("model.head is what txl finetune sets; leave it out, a model is trained on text without one")
        config = self.changed(config)
        return config if base is not None or isinstance(recipe, RunConfig) else switch_to_ids(config, self.overrides)

    def _settings_with(self, base: str) -> RunConfig:
        """Return the settings of a run that begins with a model: its [model] and [tokenizer], the recipe's rest."""
        recipe, theirs = self.recipe, settings_of_base(base)
        if theirs["model"]["head"]:
            raise ConfigError(f"'{base}' is fine-tuned and predicts no tokens; begin with the model that it was made from")
        if recipe is None and "train" in theirs:  # a run: as it was trained itself, at the speed of this machine
            values = merge(theirs, {"train": {"threads": None, "precision": "auto"}})
        else:
            config = recipe if isinstance(recipe, RunConfig) else load_recipe(recipe or "quickstart")
            known = {key: theirs[key] for key in ("model", "tokenizer") if key in theirs}
            values = {**config.model_dump(include=_OF_RECIPE), **known}
        return settings_with_base(base, {**values, "base": base, "compared_with": None}, self.overrides)

    def changed(self, config: RunConfig) -> RunConfig:
        return config.model_copy(update={"data": choose_corpus(config.data, self.corpus)})

    def read(self, config: RunConfig, tokenizer: Tokenizer | None, *, fresh: bool) -> RunConfig:
        check_model(config)
        if fresh and config.base and tokenizer and not RunDirectory(config.base).holds_run:
            with suppress(ConfigError):  # those of other programs have kinds that nothing is trained with
                config = config.changed(tokenizer={"kind": tokenizer.kind, "vocab_size": None})
        if fresh and tokenizer:
            tokenizer = self.vocabulary_for(config, tokenizer)
        self.prepared = prepare(config.data, tokenizer or config.tokenizer)
        self.tokenizer, self.checksum = self.prepared.tokenizer, self.prepared.training_sha256
        self.text = f"the text of '{config.data.corpus}'"
        self.sizes = {name: len(split.ids) for name, split in self.prepared.splits.items()}
        config = complete(config, self.tokenizer.vocab_size)
        self.compared = comparison(config) if fresh else None
        return config

    def vocabulary_for(self, config: RunConfig, tokenizer: Tokenizer) -> Tokenizer:
        """Return the base's vocabulary, grown if that was asked for; refuse or note what it lacks of the text."""
        if self.grow:
            check_can_grow(tokenizer)
            check_model_can_grow(config.model)
            if config.train.lora_rank is not None:
                raise ConfigError(f"--grow adds rows, which train.lora_rank ({config.train.lora_rank}) keeps from learning")
        has_words = isinstance(tokenizer, WordTokenizer)
        if (has_words and not self.grow) or tokenizer.reads_bytes or tokenizer.kind in ("bpe", "ids"):
            return tokenizer  # unknown words are usual, and the others have all there is
        counts = lacking(tokenizer, texts_of(config.data, ("train",) if has_words else SPLITS))
        if not counts:
            return tokenizer
        larger = grown(tokenizer, counts) if self.grow else tokenizer
        what = f"the vocabulary of '{config.base}' lacks {in_words(tokenizer, counts)}"
        why_not = why_it_cannot_grow(config.model)
        remedy = "add them by --grow, or " if can_grow(tokenizer) and not why_not else ""
        if larger.vocab_size > tokenizer.vocab_size:
            self.vocabulary_note = f"{what}; it grows by {larger.vocab_size - tokenizer.vocab_size:,}"
        elif tokenizer.unknown_id is not None or getattr(tokenizer, "byte_fallback", False):
            read_as = "bytes" if tokenizer.unknown_id is None else "unknown"
            self.vocabulary_note = f"{what}; {remedy}they are read as {read_as}"
        else:
            why = f", and it cannot grow: {why_not}" if why_not and can_grow(tokenizer) else ""
            raise TokenizerError(f"{what}, which '{config.data.corpus}' has{why}; {remedy}leave them out of the text")
        return larger

    def stream(self, config: RunConfig, world: World) -> EndlessStream:
        return text_stream(config, self.prepared, world)

    def contents(self, config: RunConfig) -> str:
        vocabulary = f"vocabulary {self.tokenizer.vocab_size:,} ({self.tokenizer.kind})"
        return f"{vocabulary}, {self.sizes['train']:,} training tokens of {config.data.corpus}"

    def notes(self, config: RunConfig) -> Iterator[str]:
        if self.compared:
            yield self.compared
        if self.vocabulary_note:
            yield self.vocabulary_note
        if isinstance(self.tokenizer, IdTokenizer):
            pad = self.tokenizer.pad_id
            less = f", but for {pad} at the ends of rows (tokenizer.pad_id)" if isinstance(pad, int) else ""
            yield f"{config.data.corpus} holds ids, which are read as they are (tokenizer.kind=ids){less}"
        if config.eval.tgt_len not in (None, config.train.tgt_len) and config.model.remembers != "state":
            reading, model = Reading.of_run(config), config.model
            trained = Reading(config.train.tgt_len, model.mem_len).context(model)
            seen = f"tokens see up to {reading.context(model):,} tokens, in training up to {trained:,}"
            yield f"validation reads {reading.in_words(model)}: {seen}"

    def validate(self, run: Run[Outcome]) -> list[tuple[float, float]]:
        split, config, predicts = self.prepared.splits["valid"], run.config, run.config.predicts
        if len(split.ids) < 2:
            return []
        self.validated = score_split(run, split, "validation", limit=config.eval.max_tokens)
        score, averaged = self.validated.plain, self.validated.average
        has_bpc = predicts == "token" and self.tokenizer.counts != "word"
        figures: dict[str, Any] = {"bpc": score.bpc if has_bpc else None, "nats": score.nats}
        figures |= extent(run, split, score) | ({"average_loss": averaged.loss} if averaged else {})
        run.note("valid", loss=score.loss, ppl=score.ppl, **figures)
        of_average = f"; averaged weights {averaged.loss:.4f}" if averaged else ""
        per_character = f", {score.bpc:.3f} bits per {self.tokenizer.counts}" if has_bpc else ""
        where = f"step {run.trainer.step:,}"
        run.display.say(f"{where}: validation {score.loss:.4f} nats per {predicts}{per_character}{of_average}")
        if config.train.sample_tokens and math.isfinite(score.loss) and run.world.first and not run.trainer.model.is_sharded:
            text = _sample(run, split)
            run.note("sample", text=text)
            run.display.show(text, title=f"{'gaps filled in' if predicts == 'target' else 'a sample'} at {where}")
        return [(each.loss, 0.0) for each in (score, averaged) if each]

    def conclude(self, run: Run[Outcome], received: list[int]) -> Outcome:
        """Score the finished model with and without memory, and report the difference."""
        split, trainer, say = self.prepared.splits["valid"], run.trainer, run.display.say
        did = f"{counted(trainer.step, 'step')}, {counted(trainer.tokens, 'token')} in {clock(trainer.seconds)} of training"
        if trainer.step == run.began:
            say(f"finished already: {did}; to train longer: {run.resume_command}")
        else:
            say(f"finished: {did}")
        if len(split.ids) < 2:
            return self.outcome(run)
        scores = final_scores(run, split, self.validated, received)
        size = extent(run, split, scores.plain)
        run.note("final", **as_entry(run, scores), **size)
        with run.world.agreed():
            if not math.isfinite(scores.plain.loss):
                raise TrainingError(
                    f"diverged at step {trainer.last_good_step + 1}: losses of the trained model are not finite numbers; train "
                    f"again with a lower optim.lr ({run.config.optim.lr:g})"
                )
        for line in scores.in_words(run.config.predicts, self.tokenizer.counts, size):
            say(line)
        if run.config.predicts == "token" and (left_out := not_scored(self.tokenizer)):
            say(left_out)
        if scores.plain.doubt:
            run.display.warn(scores.plain.doubt)
        return self.outcome(run, scores=scores)

    def outcome(self, run: Run[Outcome], stopped_by: signal.Signals | None = None, scores: TextScores | None = None) -> Outcome:
        return Outcome(
            **run.facts(stopped_by),
            score=scores and scores.plain,
            score_without_memory=scores and scores.without_memory,
            score_of_average=scores and scores.average,
            picture=run.curve(),
            predicts=run.config.predicts,
        )


def text_stream(config: RunConfig, corpus: PreparedCorpus, world: World) -> EndlessStream:
    """Return the segments of a corpus that a process trains on, or the rows of an XLNet; refuse a text too short for them."""
    training, tokenizer = corpus.splits["train"], corpus.tokenizer
    lanes: dict[str, Any] = {"batch_size": config.train.batch_size, "document_starts": training.document_starts}
    if config.model.predicts == "target":
        stream = pair_stream(config, training.ids, tokenizer, world=world, **lanes)
        valid = corpus.splits["valid"].ids
        if len(valid) > 1:
            try:
                scored_stream(config, valid, tokenizer, world=world)
            except CorpusError as error:
                raise CorpusError(f"validation split: {error}") from None
        return stream
    return SegmentStream(
        training.ids,
        tgt_len=config.train.tgt_len,
        rank=world.rank,
        world_size=world.size,
        shuffle=config.data.shuffle,
        seed=config.train.seed,
        separator=_separator(training.ids, tokenizer) if config.train.loss == "answer" else None,
        later_half=config.train.loss == "half",
        resets=config.train.reset_at_documents,
        **lanes,
    )


def _separator(ids: np.ndarray, tokenizer: Tokenizer) -> int:
    """Return the id after which answers begin; refuse a text that has none, before it is learned from for nothing."""
    tab = tokenizer.tab
    if not any((np.asarray(ids[at : at + _BLOCK]) == tab).any() for at in range(0, len(ids), _BLOCK)):
        raise CorpusError("no line of the training split has a tab, after which answers begin; write question, tab, answer")
    return tab


def comparison(config: RunConfig) -> str | None:
    """Return how many parameters a model has beside that of the recipe `compared_with`; None: there is none.

    Raises:
        ConfigError: no such recipe.
    """
    if config.compared_with is None:
        return None
    try:
        other = load_recipe(config.compared_with)
    except ConfigError as error:
        raise ConfigError(f"compared_with: {error}") from None
    assert config.model.vocab_size is not None
    own, name = count_parameters(config.model), f"compared with the recipe {other.name}"
    try:
        theirs = count_parameters(complete(other, config.model.vocab_size).model)
    except ConfigError as error:  # clusters of a larger vocabulary
        return f"{name}, which cannot have this vocabulary: {error}"
    return f"{name}: {own:,} parameters to its {theirs:,} with the same vocabulary, {100 * (own / theirs - 1):+.1f} %"


def _sample(run: Run[Outcome], split: TokenSplit) -> str:
    """Continue the first tokens of the validation split, with separate random numbers; or fill the gaps of its first row."""
    model, tokenizer = run.trainer.model, run.objective.tokenizer
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
