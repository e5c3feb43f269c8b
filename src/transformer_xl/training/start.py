"""What a run starts from: its settings, model and text. What cannot work is refused before anything is written."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from transformer_xl.checkpoint.run_directory import RunDirectory
from transformer_xl.config.recipes import apply_overrides, load_recipe, load_task
from transformer_xl.config.run import RunConfig, TrainConfig, merge
from transformer_xl.console import in_bytes
from transformer_xl.data.corpora import choose_corpus, choose_tokenizer
from transformer_xl.data.prepare import PreparedCorpus
from transformer_xl.data.streams import SegmentStream
from transformer_xl.errors import CheckpointError, ConfigError, CorpusError, message_of, one_line
from transformer_xl.kernels.device import Precision, choose_device, choose_precision
from transformer_xl.model.adapters import add_adapters
from transformer_xl.model.base import LanguageModel, SequenceModel
from transformer_xl.model.build import completed, make_blueprint, make_model
from transformer_xl.model.pretrained import CONFIG_FILE, read_config, resolve
from transformer_xl.model.room import check_room
from transformer_xl.process import cores
from transformer_xl.reading.reading import Reading
from transformer_xl.reading.targets import pair_stream, scored_stream
from transformer_xl.training.comparison import Comparison, compare_parameters, count_parameters
from transformer_xl.training.feed import AnyStream, SegmentLengths
from transformer_xl.training.trainer import check_settings
from transformer_xl.version import __version__
from transformer_xl.world import World

_NOT_WEIGHTS = ("mem_len", "clamp_len", "same_length", "zero_first_memory", "locked_dropout")
"""Settings of a model, besides all of dropout, that may change: shapes of weights do not depend on them."""

_FIXED_IN_TRAINING = ("batch_size", "tgt_len", "accumulate", "seed", "reset_at_documents", "lora_rank", "lora_alpha")
_BLOCK = 1 << 20  # tokens looked through at once
_FP32 = 4  # bytes


# --- settings -------------------------------------------------------------------------------------------------------------


def new_settings(
    recipe: str | RunConfig | None, overrides: Sequence[str] = (), corpus: str | None = None, base: str | None = None
) -> RunConfig:
    """Return the settings of a new run; the arguments are those of `train`."""
    base = None if base is None else absolute_base(base)
    if base is not None:
        config = _settings_with_base(base, recipe, overrides)
    elif isinstance(recipe, RunConfig):
        config = apply_overrides(recipe.model_dump(), list(overrides))
    else:
        config = load_recipe("quickstart" if recipe is None else recipe, list(overrides))
    if config.base != base:
        raise ConfigError(f"base ({config.base}) is what --from sets (in Python base=…), which reads the model's settings, too")
    if config.task:
        raise ConfigError(f"'{config.name}' is a task, which a model is taught that has read much; use txl finetune --task")
    config = config.model_copy(update={"data": choose_corpus(config.data, corpus)})
    return config if base is not None or isinstance(recipe, RunConfig) else choose_tokenizer(config, overrides)


def absolute_base(base: str) -> str:
    """Return what a run begins with; of a directory, the path by which it is found from anywhere."""
    path = RunDirectory(base).path.expanduser()
    return str(path.resolve()) if path.is_dir() else base


def _settings_with_base(base: str, recipe: str | RunConfig | None, overrides: Sequence[str]) -> RunConfig:
    """Return the settings of a run that begins with a model: its [model] and [tokenizer], the recipe's rest."""
    theirs = _settings_of(base)
    if theirs["model"]["head"]:
        raise ConfigError(f"'{base}' is fine-tuned and predicts no tokens; begin with the model that it was made from")
    if recipe is None and "train" in theirs:  # a run: as it was trained itself, at the speed of this machine
        values = merge(theirs, {"train": {"threads": None, "precision": "auto"}})
    else:
        config = recipe if isinstance(recipe, RunConfig) else load_recipe("quickstart" if recipe is None else recipe)
        kept = {"name", "description", "source", "data", "optim", "train", "eval", "task"}
        values = {**config.model_dump(include=kept), **{key: theirs[key] for key in ("model", "tokenizer") if key in theirs}}
    if wrong := next((each for each in overrides if each.strip().startswith("tokenizer.")), None):
        raise ConfigError(f"--set {wrong}: the tokenizer of '{base}' is used, whose ids its weights know; leave it out")
    config = apply_overrides({**values, "base": base, "compared_with": None}, list(overrides))
    _check_weights_fit(base, theirs["model"], config)
    return config


def _settings_of(base: str) -> dict[str, Any]:
    """Return the settings of a run, or the model's alone of an exported directory or a hub id."""
    run = RunDirectory(base)
    if run.holds_run:
        return run.config().model_dump()
    model = read_config(resolve(base) / CONFIG_FILE)
    return {"model": {"kind": model.kind, **model.model_dump()}}


def _check_weights_fit(base: str, theirs: Mapping[str, Any], config: RunConfig) -> None:
    """Refuse settings of a model that do not fit the weights of `base`, whose settings `theirs` are."""
    if config.model.kind != theirs["kind"]:
        raise ConfigError(f"model.kind ({config.model.kind}) differs from that of '{base}' ({theirs['kind']}); leave it out")
    for key, old in theirs.items():
        if key in ("kind", "head", *_NOT_WEIGHTS) or key.startswith("drop"):
            continue
        if (new := getattr(config.model, key)) != old:
            raise ConfigError(
                f"model.{key} ({new!r}) differs from that of '{base}' ({old!r}), whose weights would not fit; leave it out"
            )


def resumed_settings(
    directory: RunDirectory,
    recipe: str | RunConfig | None,
    overrides: Sequence[str],
    corpus: str | None,
    base: str | None = None,
) -> RunConfig:
    """Return a run's settings with overrides."""
    before = directory.config()
    if before.task:
        raise CheckpointError(f"'{directory.path}' is fine-tuned; go on with txl finetune --resume --out {directory.path}")
    if recipe is not None and (name := new_settings(recipe).name) != before.name:
        raise CheckpointError(
            f"'{directory.path}' is a run of recipe '{before.name}', not '{recipe if isinstance(recipe, str) else name}'; "
            "leave the recipe out, or choose another --out"
        )
    config = apply_overrides(before.model_dump(), list(overrides))
    _check_same_base(directory, before.base, config.base if base is None else absolute_base(base))
    config = config.model_copy(update={"data": choose_corpus(config.data, corpus)})
    _check_unchanged(directory, before, config)
    return config


def _check_same_base(directory: RunDirectory, before: str | None, now: str | None) -> None:
    if now != before:
        began, other = (f"'{base}'" if base else "random weights" for base in (before, now))
        raise CheckpointError(f"'{directory.path}' began with {began}, not {other}; leave it out, or choose another --out")


def _check_unchanged(directory: RunDirectory, before: RunConfig, now: RunConfig) -> None:
    """Refuse settings of a run that goes on, which its checkpoints do not fit."""
    fixed = [
        (section, key) for section in ("model", "tokenizer", "data") for key in type(getattr(before, section)).model_fields
    ]
    fixed.remove(("data", "directory"))  # the same text may lie elsewhere now
    fixed += [("optim", "optimizer"), *(("train", key) for key in _FIXED_IN_TRAINING)]
    if before.task and now.task:
        may_change = ("patience", "data", "valid", "test")  # the same texts may lie elsewhere, too
        fixed += [("task", key) for key in type(before.task).model_fields if key not in may_change]
    for section, key in fixed:
        old, new = getattr(getattr(before, section), key), getattr(getattr(now, section), key)
        if old != new:
            raise CheckpointError(
                f"{section}.{key} ({new!r}) differs from that of the run in '{directory.path}' ({old!r}); "
                "resume without changing it, or start another run with another --out"
            )


# --- settings of a task ---------------------------------------------------------------------------------------------------


def new_task_settings(
    base: str, task: str, overrides: Sequence[str], columns: Mapping[str, Any], seed: int | None = None
) -> RunConfig:
    """Return the settings of a new run of `finetune`; `columns` are settings of its task, which count more than overrides."""
    theirs = _settings_of(base)
    kept = {key: theirs[key] for key in ("model", "tokenizer", "data") if key in theirs}
    values = merge(merge(kept, {"model": {"head": None}}), load_task(task))
    config = _of_task(apply_overrides(merge(values, {"task": {"base": base}}), list(overrides)), columns, seed)
    _check_weights_fit(base, theirs["model"], config)
    return config


def resumed_task_settings(
    directory: RunDirectory,
    base: str | None,
    task: str | None,
    overrides: Sequence[str],
    columns: Mapping[str, Any],
    seed: int | None = None,
) -> RunConfig:
    """Return the settings of a run of `finetune` with overrides; see `resumed_settings`."""
    before = directory.config()
    if before.task is None:
        raise CheckpointError(f"'{directory.path}' is not fine-tuned; go on with txl train --resume --out {directory.path}")
    if base is not None:
        _check_same_base(directory, before.task.base, base)
    if task is not None and (name := load_task(task)["name"]) != before.name:
        raise CheckpointError(
            f"'{directory.path}' learns the task '{before.name}', not '{name}'; leave --task out, or choose another --out"
        )
    config = _of_task(apply_overrides(before.model_dump(), list(overrides)), columns, seed)
    _check_unchanged(directory, before, config)
    return config


def _of_task(config: RunConfig, columns: Mapping[str, Any], seed: int | None) -> RunConfig:
    config = config.changed(task=dict(columns), train={} if seed is None else {"seed": seed})
    if config.task and not config.task.data:
        raise ConfigError("--data is missing: a file of texts with labels, or a directory of such files")
    return config


# --- model and text -------------------------------------------------------------------------------------------------------


def what_all_share(config: RunConfig, corpus: PreparedCorpus) -> dict[str, Any]:
    """Return what must be the same in all processes. Only the place of the corpus may differ."""
    settings = config.model_dump(mode="json", exclude={"data": {"directory"}})
    sizes = {name: len(split.ids) for name, split in corpus.splits.items()}
    text = {"text": corpus.training_sha256, "tokens": sizes, "vocabulary": corpus.tokenizer.fingerprint}
    return settings | text | {"version": __version__}


@dataclass(frozen=True)
class Start:
    """The start of a training."""

    config: RunConfig  # with the settings that depend on text and machine filled in
    model: SequenceModel
    stream: AnyStream
    device: torch.device
    precision: Precision
    why_precision: str
    comparison: Comparison | None  # None: there is no recipe to compare with, or it is gone


def begin(
    config: RunConfig,
    corpus: PreparedCorpus,
    world: World,
    *,
    with_weights: bool = True,
    warn: Callable[[str], None] | None = None,
) -> Start:
    """Prepare the start of a training, and refuse settings that it would fail at.

    Without `with_weights` it only checks. A resumed run gives `warn`; a missing recipe to compare with, and more threads than
    this machine has cores, are then only warnings.
    """
    device, precision, reason = check_machine(config, world, warn=warn)
    longest = SegmentLengths(config.train).longest
    model_config = completed(config.model, vocab_size=corpus.tokenizer.vocab_size, tgt_len=longest)
    config = config.changed(model=model_config.model_dump(), train={"precision": precision})
    comparison = None
    with world.agreed():
        if config.model.head is not None:
            raise ConfigError("model.head is what txl finetune sets; leave it out, a model is trained on text without one")
        try:
            comparison = compare_parameters(config, config.model)
        except (ConfigError, OSError) as error:
            if warn is None:
                raise
            warn(message_of(error))
    check_weights(config, world, device)
    if with_weights:
        torch.manual_seed(config.train.seed)
    with nullcontext() if with_weights else torch.device("meta"):
        model = make_model(config.model)
    with world.agreed():
        training = corpus.splits["train"]
        lanes: dict[str, Any] = {"batch_size": config.train.batch_size, "document_starts": training.document_starts}
        if config.model.predicts == "target":
            stream = pair_stream(config, training.ids, corpus.tokenizer, world=world, **lanes)
        else:
            stream = SegmentStream(
                training.ids,
                tgt_len=config.train.tgt_len,
                rank=world.rank,
                world_size=world.size,
                shuffle=config.data.shuffle,
                seed=config.train.seed,
                separator=_separator(corpus) if config.train.loss == "answer" else None,
                **lanes,
            )
        check_settings(model, train=config.train, precision=precision, world=world, device=device)
        if not isinstance(model, LanguageModel):
            _check_validation(config, corpus, world)
    return Start(config, model, stream, device, precision, reason, comparison)


def _separator(corpus: PreparedCorpus) -> int:
    """Return the id after which answers begin; refuse a text that has none, before it is learned from for nothing."""
    ids, tab = corpus.splits["train"].ids, corpus.tokenizer.tab
    if not any((np.asarray(ids[at : at + _BLOCK]) == tab).any() for at in range(0, len(ids), _BLOCK)):
        raise CorpusError("no line of the training split has a tab, after which answers begin; write question, tab, answer")
    return tab


def take_weights(model: SequenceModel, base: SequenceModel) -> None:
    """Give a model the weights of another one of the same sizes."""
    try:
        model.load_state_dict(base.state_dict())
    except RuntimeError as error:
        raise ConfigError(f"the weights do not fit the settings of [model]: {one_line(error)[:200]}; leave them out") from None


def adapt(model: nn.Module, train: TrainConfig) -> None:
    """Give a model low-rank adapters, if they are asked for."""
    if train.lora_rank is not None and not add_adapters(model, rank=train.lora_rank, scale=train.lora_alpha / train.lora_rank):
        raise ConfigError(f"train.lora_rank ({train.lora_rank}) adapts linear maps inside layers, and this model has none")


def check_machine(
    config: RunConfig, world: World, *, warn: Callable[[str], None] | None
) -> tuple[torch.device, Precision, str]:
    """Return where and how precisely a run computes, and why; a resumed run gives `warn`, see `begin`."""
    with world.agreed():
        _check_threads(config.train.threads, warn)
        device = choose_device(config.train.device)
        world.check_device(device)
        precision, reason = choose_precision(config.train.precision, device)
    world.check_same(device=device.type, precision=precision)
    return device, precision, reason


def _check_threads(threads: int | None, warn: Callable[[str], None] | None) -> None:
    """Refuse more threads than cores, because they wait for each other; a run from a larger machine goes on with them."""
    n_core = cores()
    if threads is None or threads <= n_core:
        return
    problem = f"train.threads ({threads}) is more than the {n_core} cores that this process may use"
    if warn is None:
        raise ConfigError(f"{problem}; use train.threads={n_core}, or leave it out")
    warn(f"{problem}, so this run will be slow; --set train.threads={n_core} uses the cores there are, and rounds differently")


def check_model(config: RunConfig) -> None:
    """Refuse settings that a run's model cannot have, before its text is prepared, which may take hours."""
    longest = SegmentLengths(config.train).longest
    vocab_size = config.model.vocab_size or max(config.model.cutoffs, default=0) + 1  # any will do
    model = make_blueprint(completed(config.model, vocab_size=vocab_size, tgt_len=longest))
    model.check_backend(config.train.attention, choose_device(config.train.device))
    if not isinstance(model, LanguageModel):
        return
    reading = Reading.of_run(config)
    reading.view(model)
    most, read = model.config.longest_segment, reading.tgt_len + reading.ext_len
    for name, length in {"train.tgt_len": longest, "eval.tgt_len and eval.ext_len together": read}.items():
        if most is not None and length > most:
            raise ConfigError(f"{name} ({length}) must be at most model.max_len ({most}), the positions that the model learns")


def _check_validation(config: RunConfig, corpus: PreparedCorpus, world: World) -> None:
    """Refuse a validation split that is too short for a row of targets, before the training."""
    split = corpus.splits["valid"]
    if len(split.ids) > 1:
        try:
            scored_stream(config, split.ids, corpus.tokenizer, world=world)
        except CorpusError as error:
            raise CorpusError(f"validation split: {error}") from None


def check_weights(config: RunConfig, world: World, device: torch.device) -> None:
    """Refuse weights, gradients and memory that a device has no room for; activations and optimizer come on top of them."""
    share = world.size if config.train.parallel == "fsdp" else 1
    weights = 2 * _FP32 * count_parameters(config.model) // share
    n_row = config.train.batch_size // world.size
    memory = n_row * config.model.mem_len * config.model.numbers_per_position * _FP32
    with world.agreed():
        check_room(
            weights + memory,
            device,
            f"training (weights and gradients {in_bytes(weights)}, memory of {n_row:,} lanes {in_bytes(memory)})",
        )


def check_start(config: RunConfig, corpus: PreparedCorpus) -> None:
    """Refuse what a new run in a single process would fail at, as `begin` does, without making weights."""
    check_model(config)
    begin(config, corpus, World(), with_weights=False)
