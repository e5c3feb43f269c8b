"""What a run starts from: complete settings, model and text. What cannot work is refused before anything is written."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from transformer_xl.config.model import ModelConfig
from transformer_xl.config.recipes import load_recipe
from transformer_xl.config.run import RunConfig, TrainConfig
from transformer_xl.console import in_bytes
from transformer_xl.data.prepare import PreparedCorpus
from transformer_xl.data.streams import SegmentStream
from transformer_xl.errors import ConfigError, CorpusError, one_line
from transformer_xl.model.adapters import add_adapters
from transformer_xl.model.build import make_blueprint, make_model
from transformer_xl.model.language_model import LanguageModel
from transformer_xl.model.precision import Precision, choose_device, choose_precision
from transformer_xl.model.room import check_room
from transformer_xl.model.sequence_model import SequenceModel
from transformer_xl.process import cores
from transformer_xl.reading.evaluation import Reading
from transformer_xl.reading.targets import pair_stream, scored_stream
from transformer_xl.training.feed import AnyStream, SegmentLengths
from transformer_xl.training.trainer import check_settings
from transformer_xl.version import __version__
from transformer_xl.world import World

_BLOCK = 1 << 20  # tokens looked through at once


def what_all_share(config: RunConfig, corpus: PreparedCorpus) -> dict[str, Any]:
    """Return what must be the same in all processes. Only the place of the corpus may differ."""
    settings = config.model_dump(mode="json", exclude={"data": {"directory"}})
    sizes = {name: len(split.ids) for name, split in corpus.splits.items()}
    text = {"text": corpus.training_sha256, "tokens": sizes, "vocabulary": corpus.tokenizer.fingerprint}
    return settings | text | {"version": __version__}


@dataclass(frozen=True)
class Comparison:
    """How many parameters a model has, and how many the model of another recipe with the same vocabulary."""

    recipe: str  # of the other model
    own: int
    other: int | None  # None: the other model cannot have that vocabulary
    problem: str = ""  # why it cannot

    def __str__(self) -> str:
        """Return the comparison in one line.

        Example:
            >>> print(Comparison("enwik8-base", own=42, other=40))
            compared with the recipe enwik8-base: 42 parameters to its 40 with the same vocabulary, +5.0 %
        """
        if self.other is None:
            return f"compared with the recipe {self.recipe}, which cannot have this vocabulary: {self.problem}"
        return (
            f"compared with the recipe {self.recipe}: {self.own:,} parameters to its {self.other:,} with the same vocabulary, "
            f"{100 * (self.own / self.other - 1):+.1f} %"
        )


def count_parameters(config: ModelConfig) -> int:
    """Count the parameters of a model, without making weights; its settings are complete (see `ModelConfig.completed`).

    Example:
        >>> from transformer_xl.config.model import LstmConfig
        >>> count_parameters(LstmConfig(vocab_size=10, n_layer=1, d_model=4))
        210
    """
    return sum(parameter.numel() for parameter in make_blueprint(config).parameters())


def compare_parameters(config: RunConfig, model: ModelConfig) -> Comparison | None:
    """Count the parameters of a run's completed `model` and of the recipe that `config.compared_with` names, if any."""
    if config.compared_with is None:
        return None
    try:
        other = load_recipe(config.compared_with)
    except ConfigError as error:
        raise ConfigError(f"compared_with: {error}") from None
    assert model.vocab_size is not None
    own = count_parameters(model)
    try:
        completed = other.model.completed(vocab_size=model.vocab_size, tgt_len=other.train.tgt_len)
    except ConfigError as error:  # clusters of a larger vocabulary
        return Comparison(other.name, own, None, str(error))
    return Comparison(other.name, own, count_parameters(completed))


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

    Raises:
        ConfigError: settings cannot work together, with this vocabulary or on this machine.
        CorpusError: the text is too short for one segment per lane, or has no answers to learn from.
    """
    device, precision, reason = check_machine(config, world, warn=warn)
    longest = SegmentLengths(config.train).longest
    model_config = config.model.completed(vocab_size=corpus.tokenizer.vocab_size, tgt_len=longest)
    config = config.changed(model=model_config.model_dump(), train={"precision": precision})
    comparison = None
    with world.agreed():
        if config.model.head is not None:
            raise ConfigError("model.head is what txl finetune sets; leave it out, a model is trained on text without one")
        try:
            comparison = compare_parameters(config, config.model)
        except ConfigError as error:
            if warn is None:
                raise
            warn(str(error))
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
    """Give a model low-rank adapters, if they are asked for.

    Raises:
        ConfigError: it has no linear maps that they could adapt.
    """
    if train.lora_rank is not None and not add_adapters(model, rank=train.lora_rank, scale=train.lora_alpha / train.lora_rank):
        raise ConfigError(f"train.lora_rank ({train.lora_rank}) adapts linear maps inside layers, and this model has none")


def check_machine(
    config: RunConfig, world: World, *, warn: Callable[[str], None] | None
) -> tuple[torch.device, Precision, str]:
    """Return where and how precisely a run computes, and why; a resumed run gives `warn`, see `begin`.

    Raises:
        ConfigError: this machine has no such device, or fewer cores than threads are asked for.
    """
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
    """Refuse settings that a run's model cannot have, before its text is prepared, which may take hours.

    Raises:
        ConfigError: it has no such kind of attention, backend or length, or is too large for this machine.
    """
    longest = SegmentLengths(config.train).longest
    vocab_size = config.model.vocab_size or max(config.model.cutoffs, default=0) + 1  # any will do
    model = make_blueprint(config.model.completed(vocab_size=vocab_size, tgt_len=longest))
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


_FP32 = 4


def check_start(config: RunConfig, corpus: PreparedCorpus) -> None:
    """Refuse what a new run in a single process would fail at, as `begin` does, without making weights."""
    check_model(config)
    begin(config, corpus, World(), with_weights=False)
