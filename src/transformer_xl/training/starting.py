"""Start a run, or go on with one: build what it works with and restore its newest good checkpoint."""

from collections.abc import Sequence

import torch

from transformer_xl.checkpoint.run_directory import RunDirectory
from transformer_xl.checkpoint.store import Checkpoint
from transformer_xl.config import RunConfig, merge
from transformer_xl.data.prepare import PreparedCorpus
from transformer_xl.data.streams import SegmentStream
from transformer_xl.errors import CheckpointError, ConfigError
from transformer_xl.model.comparison import compare_parameters
from transformer_xl.model.kinds import make_model
from transformer_xl.model.language_model import LanguageModel
from transformer_xl.model.precision import Precision, choose_device, choose_precision
from transformer_xl.reading.how import Reading
from transformer_xl.training.display import Display
from transformer_xl.training.environment import write_environment
from transformer_xl.training.lengths import SegmentLengths
from transformer_xl.training.record import Record
from transformer_xl.training.run import Best, Interval, Run
from transformer_xl.training.silent import SilentRecord
from transformer_xl.training.trainer import Trainer, check_settings
from transformer_xl.world import World


def set_up(
    directory: RunDirectory,
    config: RunConfig,
    corpus: PreparedCorpus,
    display: Display,
    loggers: Sequence[str],
    world: World,
    *,
    fresh: bool,
) -> Run:
    """Build the model, its trainer and the run's files; restore the newest good checkpoint of an existing run."""
    with world.agreed():
        device = choose_device(config.train.device)
        world.check_device(device)
        precision, reason = choose_precision(config.train.precision, device)
    world.check_same(device=device.type, precision=precision)
    config = _completed(config, corpus, precision)
    with world.agreed():
        comparison = _comparison(config, display, fresh=fresh)
    torch.manual_seed(config.train.seed)
    model = make_model(config.model)
    with world.agreed():
        stream = _stream(config, corpus, world)
        check_settings(model, train=config.train, precision=precision, world=world, device=device)
        _check_reading(model, config)
    trainer = Trainer(model, stream, train=config.train, optim=config.optim, precision=precision, world=world, device=device)
    with world.agreed():
        if fresh and world.first:  # only now is it certain that the run can start; until here nothing was written
            directory.create(config, corpus.tokenizer)
        settings = config.model_dump(mode="json")
        opened = {"loggers": loggers, "settings": settings, "warn": display.warn}
        record = Record(directory.path, **opened) if world.first else SilentRecord()
    run = Run(directory, config, trainer, corpus.tokenizer, corpus, record, display, world)
    n_parameters = sum(p.numel() for p in model.parameters())
    display.say(
        f"{config.name}: {n_parameters:,} parameters, vocabulary {corpus.tokenizer.vocab_size:,} ({corpus.tokenizer.kind}), "
        f"{len(corpus.splits['train'].ids):,} training tokens of {config.data.corpus}"
    )
    if comparison:
        display.say(comparison)
    display.say(f"{precision} on {device}: {reason}; run directory {directory.path}")
    if not world.alone:
        what = "a part of the model each" if config.train.parallel == "fsdp" else "the whole model each"
        display.say(f"{world.size} processes, {what}, {config.train.batch_size // world.size} of the lanes each")
    if not fresh:
        _restore(run)
    with world.agreed():
        if world.first:
            if not fresh and config != directory.config():  # the next --resume goes on with these settings, not with older ones
                directory.save_config(config)
            write_environment(directory.path, seed=config.train.seed, device=device, step=trainer.step)
    return run


def check_start(config: RunConfig, corpus: PreparedCorpus) -> None:
    """Refuse what a new run that trains alone would fail at when it starts; no weights are made and nothing is written.

    Args:
        config: of the run.
        corpus: of the run, prepared.

    Raises:
        ConfigError: settings that cannot work together, with this vocabulary or on this machine.
        CorpusError: a text too short for one segment per lane.
    """
    device = choose_device(config.train.device)
    precision, _ = choose_precision(config.train.precision, device)
    config = _completed(config, corpus, precision)
    compare_parameters(config, config.model)
    with torch.device("meta"):
        model = make_model(config.model)
    _stream(config, corpus, World())
    check_settings(model, train=config.train, precision=precision, world=World(), device=device)
    _check_reading(model, config)


def _completed(config: RunConfig, corpus: PreparedCorpus, precision: Precision) -> RunConfig:
    """Return the settings with what only text and machine say."""
    sizes = {"vocab_size": corpus.tokenizer.vocab_size, "tgt_len": SegmentLengths(config.train).longest}
    resolved = {"model": config.model.completed(**sizes).model_dump(), "train": {"precision": precision}}
    return RunConfig(**merge(config.model_dump(), resolved))


def _stream(config: RunConfig, corpus: PreparedCorpus, world: World) -> SegmentStream:
    training = corpus.splits["train"]
    return SegmentStream(
        training.ids,
        batch_size=config.train.batch_size,
        tgt_len=config.train.tgt_len,
        document_starts=training.document_starts,
        rank=world.rank,
        world_size=world.size,
        shuffle=config.data.shuffle,
        seed=config.train.seed,
    )


def _check_reading(model: LanguageModel, config: RunConfig) -> None:
    """Refuse now what the first segment or validation would fail at."""
    reading = Reading.of_run(config)
    reading.view(model)
    longest = config.model.longest_segment
    if longest is None:
        return
    lengths = {
        "train.tgt_len": SegmentLengths(config.train).longest,
        "eval.tgt_len and eval.ext_len together": reading.tgt_len + reading.ext_len,
    }
    for name, length in lengths.items():
        if length > longest:
            raise ConfigError(
                f"{name} ({length}) must be at most model.max_len ({longest}), the positions that a vanilla model learns"
            )


def _comparison(config: RunConfig, display: Display, *, fresh: bool) -> str | None:
    """Return how many parameters the compared recipe has; a run goes on even if that is gone by now."""
    try:
        comparison = compare_parameters(config, config.model)
    except ConfigError as error:
        if fresh:
            raise
        display.warn(str(error))
        return None
    return None if comparison is None else str(comparison)


def _restore(run: Run) -> None:
    world = run.world
    checkpoint: Checkpoint | None = None
    with world.agreed():
        if world.first:
            run.store.clean()
            checkpoint = run.store.load_newest(on_damaged=run.display.warn) if run.store.steps() else None
    step = world.from_first(checkpoint.step if checkpoint else None)
    if step is None:
        run.record.rewind(0)
        run.display.warn(f"no checkpoint in '{run.directory.path}' yet: starting from the beginning")
        return
    with world.agreed():
        checkpoint = checkpoint or run.store.load(step)
        try:
            record = run.trainer.restore(checkpoint)
        except (ConfigError, RuntimeError, KeyError) as error:
            reason = str(error).strip().splitlines()[-1].strip()
            raise CheckpointError(f"checkpoint {step} does not fit the run in '{run.directory.path}': {reason}") from None
        if record["training_text"] != run.corpus.training_sha256:
            raise CheckpointError(
                f"the text of '{run.config.data.corpus}' is not the one that the run in '{run.directory.path}' has read so "
                "far; restore it, or start another run with another --out"
            )
        run.interval = Interval(**{"scored": record["interval"]["tokens"], **record["interval"]})
        best = Best(**record["best"]) if record["best"] else None
        run.best = best if best and best.step in run.store.steps() else None
    with world.agreed():
        if world.first:
            run.store.rewind(step, best=run.best.step if run.best else None)
            run.record.rewind(step)
    saved_by = checkpoint.state.get("world_size", 1)
    if saved_by != world.size:
        run.display.say(
            f"number of processes: {saved_by} until here, {world.size} from now on; the same text in the same order, "
            "other random numbers in dropout"
        )
    run.display.say(f"resumed at step {checkpoint.step:,}, {100 * min(run.trainer.progress, 1):.0f}% of the budget")
