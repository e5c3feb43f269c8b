"""The start of every run: settings, base, texts, model and machine are settled here, once.

What cannot work is refused before anything is written.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from transformer_xl.checkpoint.run_directory import RunDirectory, check_tokenizer, load
from transformer_xl.config.model import read_config
from transformer_xl.config.recipes import apply_overrides
from transformer_xl.config.run import RunConfig
from transformer_xl.console import in_bytes
from transformer_xl.data.text import undivided
from transformer_xl.errors import CheckpointError, ConfigError, TrainingError, counted, lacks_memory, no_memory, written
from transformer_xl.kernels.device import Precision, choose_device, choose_precision
from transformer_xl.model.adapters import add_adapters
from transformer_xl.model.base import LanguageModel, SequenceModel
from transformer_xl.model.build import completed, count_parameters, make_blueprint, make_model
from transformer_xl.model.growth import with_rows
from transformer_xl.model.pretrained import CONFIG_FILE, RUNS, resolve
from transformer_xl.model.room import check_room
from transformer_xl.model.task_model import TaskModel
from transformer_xl.process import restarts
from transformer_xl.reading.reading import Reading
from transformer_xl.tokenizers.base import Tokenizer
from transformer_xl.tokenizers.growth import origins
from transformer_xl.training.display import Display
from transformer_xl.training.environment import begun_by_this_launch, computing_with, last_threads, write_environment
from transformer_xl.training.feed import longest_segment
from transformer_xl.training.loop import Ending, Objective, Run, restore, save
from transformer_xl.training.record import Record, check_loggers
from transformer_xl.training.trainer import Trainer, check_settings, checkpoint_bytes
from transformer_xl.version import __version__
from transformer_xl.world import World, joined

_NOT_WEIGHTS = ("mem_len", "clamp_len", "same_length", "zero_first_memory", "locked_dropout")
"""Settings of a model, besides all of dropout, that may change: shapes of weights do not depend on them."""

_FIXED_IN_TRAINING = ("batch_size", "tgt_len", "accumulate", "seed", "reset_at_documents", "lora_rank", "lora_alpha")
_MAY_CHANGE = ("patience", "data", "valid", "test")  # of a task; the same texts may lie elsewhere
_FP32 = 4  # bytes


@contextmanager
def start(
    objective: Objective[Ending],
    *,
    out: str | Path | None,
    resume: bool,
    loggers: Sequence[str] = (),
    display: Display | None = None,
) -> Iterator[Run[Ending]]:
    """Begin a run or go on with one, in its directory, which is locked while the block runs.

    Args:
        objective: what it learns from.
        out: its directory; None: below `runs`.
        resume: go on with the run that is there, or begin one if there is none and the objective says what it would be.
        loggers: `tensorboard` or `wandb`, see `Record`.
        display: shows the progress, of the first process; None: on stderr.
    """
    with joined() as world, ExitStack() as held:
        display = (display or Display()) if world.first else Display(quiet=True, console=Console(quiet=True))
        with world.agreed():
            check_loggers(loggers)
            directory = RunDirectory(RUNS / objective.new_settings().name if out is None else out)
        # when torchrun restarts processes, it repeats the command, although the directory may hold another run
        resume = resume or (restarts() > 0 and begun_by_this_launch(directory.path))
        goes_on = world.from_first(resume and (directory.holds_run or (out is not None and not objective.begins)))
        with world.agreed():
            if world.first and not goes_on:
                directory.check_free()
            config = resumed_settings(objective, directory) if goes_on else objective.new_settings()
            held.enter_context(_mishaps(directory, config, display))
            if world.first:
                held.enter_context(directory.locked())
        held.enter_context(computing_with(config.train))
        if resume and not goes_on:
            display.say(f"no run in '{directory.path}' yet: starting '{config.name}' from the beginning")
        run = _build(objective, directory, config, loggers, world, display, fresh=not goes_on)
        if run.record:
            held.callback(run.record.close)
        if goes_on:
            restore(run)
            with world.agreed():
                _check_budget(run, directory.config())
            _compare_threads(run)
        with world.agreed():
            if world.first:
                if goes_on and run.config != directory.config():  # the next --resume uses these settings
                    directory.save_config(run.config, objective.tokenizer)
                trainer = run.trainer
                write_environment(directory.path, seed=config.train.seed, device=trainer.device, step=trainer.step)
        yield run


# --- settings -------------------------------------------------------------------------------------------------------------


def resumed_settings(objective: Objective[Any], directory: RunDirectory) -> RunConfig:
    """Return the settings of the run in a directory with what the objective changes, if its checkpoints fit them."""
    before, where = directory.config(), f"'{directory.path}'"
    if (before.task is not None) != (objective.command == "finetune"):
        what, command = ("fine-tuned", "finetune") if before.task else ("not fine-tuned", "train")
        raise CheckpointError(f"{where} is {what}; go on with txl {command} --resume --out {directory.path}")
    if (name := objective.recipe_name()) not in (None, before.name):
        raise CheckpointError(
            f"{where} is a run of {objective.noun} '{before.name}', not '{name}'; leave the {objective.noun} out, or choose "
            "another --out"
        )
    config = objective.changed(apply_overrides(before.model_dump(), objective.overrides))
    began, now = base_of(before), objective.base or base_of(config)
    if now != began:
        old, new = (f"'{base}'" if base else "random weights" for base in (began, now))
        raise CheckpointError(f"{where} began with {old}, not {new}; leave it out, or choose another --out")
    for section, key in _fixed(before, config):
        old, new = (getattr(getattr(each, section), key, None) for each in (before, config))
        if old != new:
            raise CheckpointError(
                f"{section}.{key} ({written(new)}) differs from that of the run in {where} ({written(old)}); "
                "resume without changing it, or start another run with another --out"
            )
    return config


def _check_budget(run: Run[Any], before: RunConfig) -> None:
    """Refuse a new budget that is less than what a run has done, before it replaces the old one."""
    for name, share in run.trainer.used.items():
        if share > 1 and (limit := getattr(run.config.train, name)) != getattr(before.train, name):
            raise ConfigError(
                f"train.{name} ({limit:,}) is less than what the run in '{run.directory.path}' has done "
                f"({round(share * limit, 1):,.12g}); give more, or leave it out"
            )


def _fixed(before: RunConfig, now: RunConfig) -> Iterator[tuple[str, str]]:
    """Yield section and name of each setting that a run's checkpoints depend on."""
    for section in ("model", "tokenizer", "data", *(("task",) if before.task and now.task else ())):
        for key in type(getattr(before, section)).model_fields:
            # the same text may lie elsewhere now
            if (section, key) != ("data", "directory") and not (section == "task" and key in _MAY_CHANGE):
                yield section, key
    yield "optim", "optimizer"
    for key in _FIXED_IN_TRAINING:
        yield "train", key


def base_of(config: RunConfig) -> str | None:
    """Return the run, directory or hub id whose weights a run begins with; None: with random ones."""
    return config.task.base if config.task else config.base


def absolute_base(base: str | Path) -> str:
    """Return what a run begins with; of a directory, the path by which it is found from anywhere."""
    path = RunDirectory(base).path.expanduser()
    return str(path.resolve()) if path.is_dir() else str(base)


def settings_of_base(base: str) -> dict[str, Any]:
    """Return the settings of a run, or the model's alone of an exported directory or a hub id."""
    run = RunDirectory(base)
    if run.holds_run:
        return run.config().model_dump()
    model = read_config(resolve(base) / CONFIG_FILE)
    return {"model": {"kind": model.kind, **model.model_dump()}}


def settings_with_base(base: str, values: Mapping[str, Any], overrides: Sequence[str]) -> RunConfig:
    """Return settings with overrides, whose [model] is that of `base`, if its weights fit them."""
    if wrong := next((each for each in overrides if each.strip().startswith("tokenizer.")), None):
        raise ConfigError(f"--set {wrong}: the tokenizer of '{base}' is used, whose ids its weights know; leave it out")
    config, theirs = apply_overrides(dict(values), list(overrides)), values["model"]
    if config.model.kind != theirs["kind"]:
        raise ConfigError(f"model.kind ({config.model.kind}) differs from that of '{base}' ({theirs['kind']}); leave it out")
    for key, old in theirs.items():
        if key in ("kind", "head", *_NOT_WEIGHTS) or key.startswith("drop"):
            continue
        if (new := getattr(config.model, key)) != old:
            raise ConfigError(
                f"model.{key} ({written(new)}) differs from that of '{base}' ({written(old)}), whose weights would not fit; "
                "leave it out"
            )
    return config


def complete(config: RunConfig, vocab_size: int) -> RunConfig:
    """Return the settings of a language model with those that depend on the vocabulary and on the length of segments."""
    model = completed(config.model, vocab_size=vocab_size, tgt_len=longest_segment(config.train))
    return config.changed(model=model.model_dump())


def check_model(config: RunConfig) -> None:
    """Refuse settings that a run's model cannot have, before its text is prepared, which may take hours."""
    vocab_size = config.model.vocab_size or max(config.model.cutoffs, default=0) + 1  # any will do
    model = make_blueprint(complete(config, vocab_size).model)
    model.check_backend(config.train.attention, choose_device(config.train.device))
    if not isinstance(model, LanguageModel):
        return
    reading = Reading.of_run(config)
    reading.view(model)
    lengths = {
        "train.tgt_len": longest_segment(config.train),
        "eval.tgt_len and eval.ext_len together": reading.tgt_len + reading.ext_len,
    }
    most = model.config.longest_segment
    for name, length in lengths.items():
        if most is not None and length > most:
            raise ConfigError(f"{name} ({length}) must be at most model.max_len ({most}), the positions that the model learns")


# --- model and machine ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ReadyModel:
    """A model about to be trained."""

    config: RunConfig  # with the precision chosen
    model: SequenceModel  # with random weights
    device: torch.device
    precision: Precision
    why: str  # this precision was chosen


def ready_model(config: RunConfig, world: World) -> ReadyModel:
    """Choose the machine, and make the model of complete settings; refuse what there is no room for."""
    with world.agreed():
        device = choose_device(config.train.device)
        world.check_device(device)
        precision, why = choose_precision(config.train.precision, device)
    world.check_same(device=device.type, precision=precision)
    config = config.changed(train={"precision": precision})
    share = world.size if config.train.parallel == "fsdp" else 1
    weights = 2 * _FP32 * count_parameters(config.model) // share
    n_row = config.train.batch_size // world.size
    memory = n_row * config.model.mem_len * config.model.numbers_per_position * _FP32
    with world.agreed():
        parts = f"weights and gradients {in_bytes(weights)}, memory of {counted(n_row, 'lane')} {in_bytes(memory)}"
        check_room(weights + memory, device, f"training ({parts})")  # activations and optimizer come on top
    torch.manual_seed(config.train.seed)
    model = make_model(config.model)
    with world.agreed():
        check_settings(model, train=config.train, precision=precision, world=world, device=device)
    return ReadyModel(config, model, device, precision, why)


def _build(
    objective: Objective[Ending],
    directory: RunDirectory,
    config: RunConfig,
    loggers: Sequence[str],
    world: World,
    display: Display,
    *,
    fresh: bool,
) -> Run[Ending]:
    """Read the base and the texts, make the model and its trainer, and open the run's files, which are written only now."""
    with world.agreed():
        base, theirs = _base(directory, config, display)
        tokenizer = theirs
        if not fresh:
            tokenizer = directory.tokenizer()
            check_tokenizer(tokenizer, config.model.vocab_size, str(directory.path))
        config = objective.read(config, tokenizer, fresh=fresh)
        stream = objective.stream(config, world)
    world.check_same(
        **config.model_dump(mode="json", exclude={"data": {"directory"}}),  # only the place of the text may differ
        text=objective.checksum,
        sizes=objective.sizes,
        vocabulary=objective.tokenizer.fingerprint,
        version=__version__,
    )
    ready = ready_model(config, world)
    if not fresh and config.train.precision == directory.config().train.precision:
        ready = replace(ready, why="as before")
    config, model, device = ready.config, ready.model, ready.device
    if base is not None and theirs is not None and base.config.vocab_size != config.model.vocab_size:
        base = with_rows(base, torch.from_numpy(origins(theirs, objective.tokenizer)))
    has_head = base is not None and _take_weights(model, base)
    _adapt(model, config)
    size = checkpoint_bytes(model, train=config.train, optim=config.optim)
    settings: dict[str, Any] = {"train": config.train, "optim": config.optim, "precision": ready.precision}
    trainer = Trainer(model, stream, **settings, world=world, device=device)
    record = None
    with world.agreed():
        if world.first:
            if fresh:
                directory.store(keep=config.train.keep_checkpoints).check_room(size, warn=display.warn)
                directory.create(config, objective.tokenizer)
            record = Record(directory.path, loggers=loggers, settings=config.model_dump(mode="json"), warn=display.warn)
    run = Run(objective, directory, config, trainer, world, display, record, size)
    _introduce(run, ready, None if base is None else has_head)
    if base is not None:
        save(run, must=True)  # so that a resumed run needs nothing of its base
    return run


def _base(directory: RunDirectory, config: RunConfig, display: Display) -> tuple[SequenceModel | None, Tokenizer | None]:
    """Return the model that a run begins with, unless it has saved its own, and that model's tokenizer."""
    base = base_of(config)
    if base is None or (directory.holds_run and directory.store().steps()):
        return None, None
    return load(base, on_damaged=display.warn)


def _take_weights(model: SequenceModel, base: SequenceModel) -> bool:
    """Give a model the weights of another, with those of its head if it is for the same; return whether it is."""
    inner, theirs = (each.backbone if isinstance(each, TaskModel) else each for each in (model, base))
    inner.load_state_dict(theirs.state_dict())
    if not (isinstance(model, TaskModel) and isinstance(base, TaskModel)):
        return False
    names = ("kind", "labels", "projection")
    is_same = all(getattr(model.config.head, name) == getattr(base.config.head, name) for name in names)
    if is_same:
        model.head.load_state_dict(base.head.state_dict())
    return is_same


def _adapt(model: SequenceModel, config: RunConfig) -> None:
    """Give a model low-rank adapters, if they are asked for."""
    rank, alpha = config.train.lora_rank, config.train.lora_alpha
    inner = model.backbone if isinstance(model, TaskModel) else model
    if rank is not None and not add_adapters(inner, rank=rank, scale=alpha / rank):
        raise ConfigError(f"train.lora_rank ({rank}) adapts linear maps inside layers, and this model has none")


# --- what a person is told ------------------------------------------------------------------------------------------------


def _introduce(run: Run[Any], ready: ReadyModel, has_head: bool | None) -> None:
    """Say what learns from what, and where; `has_head`: whether the base's head was taken, None if there is no base."""
    config, model, trainer, say = run.config, ready.model, run.trainer, run.display.say
    sizes = [(p.numel(), p.requires_grad) for p in model.parameters()]
    n_parameters, n_learn = sum(size for size, _ in sizes), sum(size for size, learns in sizes if learns)
    some = f" ({n_learn:,} learn)" if n_learn < n_parameters else ""
    head = f", with {'its own' if has_head else 'a new'} head" if isinstance(model, TaskModel) else ""
    beginning = "" if has_head is None else f", beginning with the weights of {base_of(config)}{head}"
    say(f"{config.name}: {n_parameters:,} parameters{some}, {run.objective.contents(config)}{beginning}")
    for note in run.objective.notes(config):
        say(note)
    if warning := undivided(run.objective.tokenizer):
        run.display.warn(warning)
    say(f"{ready.precision} on {ready.device}: {ready.why}; run directory {run.directory.path}")
    if ready.device.type == "cuda":
        why = trainer.why_no_graph
        say(f"kernels are launched one by one: {why}" if why else "the kernels of a step are launched as one graph")
    if not run.world.alone:
        what = "a part of the model each" if config.train.parallel == "fsdp" else "the whole model each"
        say(f"{run.world.size} processes, {what}, {config.train.batch_size // run.world.size} of the lanes each")


def _compare_threads(run: Run[Any]) -> None:
    """Say whether a resumed run goes on with another number of threads, which rounds sums otherwise."""
    before, now = last_threads(run.directory.path), torch.get_num_threads()
    if run.trainer.device.type == "cpu" and not run.is_over and before not in (None, now):
        run.display.say(f"threads: {before} until here, {now} from now on; --set train.threads={before} rounds as before")


@contextmanager
def _mishaps(directory: RunDirectory, config: RunConfig, display: Display) -> Iterator[None]:
    """Turn a lack of memory into an error that says what to change; say what an early interrupt costs."""
    try:
        yield
    except KeyboardInterrupt:
        if display.has_begun or display.quiet:  # which does not know
            raise
        raise KeyboardInterrupt("before the first step; nothing was learned") from None
    except (MemoryError, RuntimeError) as error:
        if not lacks_memory(error):
            raise
        steps = directory.store().steps() if directory.holds_run else ()
        goes_on = f"; step {max(steps):,} is saved, and --resume goes on from it" if steps else ""
        lanes = (
            f"{counted(config.train.batch_size // config.train.accumulate, 'lane')} of {config.train.tgt_len:,} tokens at once"
        )
        remedy = "raise train.accumulate, set train.checkpoint_layers=true, or lower train.batch_size or train.tgt_len"
        said = no_memory(error)
        remedy += ", or set train.graph=off" if " on GPU" in said else ""  # a graph keeps its memory between steps
        raise TrainingError(f"{said} for {lanes}; {remedy}{goes_on}") from None
