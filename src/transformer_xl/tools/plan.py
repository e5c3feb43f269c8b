"""A run on paper: the memory that it needs, what it computes and sends, and its time."""

import textwrap
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Literal

from transformer_xl.config.model import KINDS, ModelConfig
from transformer_xl.config.run import RunConfig
from transformer_xl.console import in_bytes, printable, short
from transformer_xl.data.named import NAMED
from transformer_xl.errors import ConfigError, counted
from transformer_xl.model.base import LanguageModel
from transformer_xl.model.build import completed
from transformer_xl.model.kinds import MODELS
from transformer_xl.model.transformer_xl import TransformerXL
from transformer_xl.tools.flops import PassCost, blueprint_of, count_pass
from transformer_xl.tools.hardware import Hardware
from transformer_xl.training.optim import state_bytes

Division = Literal["ddp", "fsdp"]
"""ddp: every process has all weights. fsdp: each has its share of weights, gradients and optimizer (FSDP2, full sharding)."""

USABLE = 0.92
"""Share of a device's memory that a plan may use; libraries and gaps between tensors take the rest."""

_EFFICIENCY = {
    False: (0.3, "trainings of others reach 0.12 (NVIDIA's Transformer-XL on A100) to 0.41 (MosaicML's 1.3B on H100)"),
    True: (0.5, "training steps on a CPU were measured at 0.47 to 0.66 of the rate of large products"),
}
"""Assumed share of the rate of products, on a GPU and on a CPU, and why."""

_NARROW = 0.6  # of the fp32 bytes that a pass keeps are left if products are of 16 bits: norms and sums stay in fp32
_UPDATE_TOUCHES = 7  # numbers per weight: weights and two moments are read and written, gradients read
_PER_MACHINE, _NETWORK = 8, 50e9  # devices of a machine, and bytes per second that leave it: one link of 400 Gb/s
_PIECES = 8192
_WIDTH = 100


@dataclass(frozen=True)
class StepLayout:
    """How a step is divided."""

    division: Division
    accumulate: int  # groups of lanes, one after another
    checkpointing: bool  # layers are computed again in the backward pass


@dataclass(frozen=True)
class StepMemory:
    """Bytes of one process at the fullest moment of a step."""

    weights: int  # in fp32
    gradients: int  # in fp32
    optimizer: int  # moments, counters and averaged weights
    mems: int  # hidden states that all lanes remember, before the step and after it
    activations: int  # kept for the backward pass, and the gradients of the largest of them
    rounded: int  # copies of the weights in the precision of the products

    @property
    def total(self) -> int:
        """All of it."""
        return sum(vars(self).values())


@dataclass(frozen=True)
class Plan:
    """A run on paper: bytes, seconds and operations of one device, unless a comment says otherwise."""

    recipe: str
    model: ModelConfig  # its settings, with the vocabulary
    parameters: int
    gpus: int
    layout: StepLayout
    tokens_per_step: int  # of all devices
    memory: StepMemory
    flops: PassCost  # per token
    sent: dict[Division, float]  # a step, however weights are divided
    compute_seconds: float  # of a step, as are the others
    update_seconds: float
    send_seconds: float
    step_seconds: float  # whose sending hides behind computing
    tokens: float | None  # of the whole run, by all devices; None if the length of the corpus decides
    hardware: Hardware
    assumptions: tuple[str, ...]  # behind the figures

    @property
    def fits(self) -> bool:
        """Whether a device has enough memory."""
        return self.memory.total <= USABLE * self.hardware.memory

    @property
    def tokens_per_second(self) -> float:
        """Of all devices."""
        return self.tokens_per_step / self.step_seconds

    def as_dict(self) -> dict[str, Any]:
        """Return everything as JSON values."""
        values = asdict(self)
        del values["flops"]
        values["memory"]["total"] = self.memory.total
        derived = {name: getattr(self, name) for name in ("fits", "tokens_per_second")}
        flops = {"forward": self.flops.forward, "backward": self.flops.backward, "needed": self.flops.flops}
        model = self.model.model_dump(mode="json")
        return values | derived | {"model": model, "flops_per_token": flops}


def make_plan(config: RunConfig, hardware: Hardware, *, gpus: int = 1) -> Plan:
    """Plan a run on at least one device.

    Every device has all weights, or a share if they do not fit or `train.parallel` says so.

    Raises:
        ConfigError: the lanes cannot be divided among the devices, no such model can be planned, or the size of the vocabulary
            is unknown without the text.
    """
    train, n_group = config.train, gpus * config.train.accumulate
    if train.batch_size % n_group:
        raise ConfigError(
            f"train.batch_size ({train.batch_size}) must be a multiple of --gpus ({gpus}) times train.accumulate "
            f"({train.accumulate}), such as {-(-train.batch_size // n_group) * n_group}"
        )
    settings, origin = with_vocabulary(config)
    model = blueprint_of(settings)
    n_parameter = sum(p.numel() for p in model.parameters())
    cost = count_pass(model, rows=train.batch_size // n_group, tgt_len=train.tgt_len, segments=train.tbptt_segments)
    memory_of = partial(_memory, config, model, cost, hardware, gpus)
    division: Division = "fsdp" if train.parallel == "fsdp" else "ddp"
    if gpus > 1 and memory_of(division).total > USABLE * hardware.memory:
        division = "fsdp"
    memory = memory_of(division)
    tokens_per_step = train.batch_size * train.tgt_len * train.tbptt_segments
    efficiency, _ = _EFFICIENCY[hardware.on_cpu]
    compute = tokens_per_step / gpus * (cost.flops + train.checkpoint_layers * cost.forward) / (hardware.flops * efficiency)
    update = _UPDATE_TOUCHES * memory.weights / hardware.bandwidth
    ring = (gpus - 1) / gpus * 4 * n_parameter  # what a process sends if fp32 numbers of all weights go around
    # DDP sums gradients after the last pass; FSDP after each, and gathers weights for each forward and backward pass
    sent: dict[Division, float] = {"ddp": 2 * ring, "fsdp": 3 * train.accumulate * train.tbptt_segments * ring}
    send = sent[division] / (hardware.link if gpus <= _PER_MACHINE else min(hardware.link, _NETWORK))
    step_seconds = max(compute, send) + update
    limits = [train.max_steps * tokens_per_step] if train.max_steps else []
    limits += [train.max_tokens] if train.max_tokens else []
    limits += [60 * train.max_minutes * tokens_per_step / step_seconds] if train.max_minutes else []
    return Plan(
        recipe=config.name,
        model=settings,
        parameters=n_parameter,
        gpus=gpus,
        layout=StepLayout(division, train.accumulate, train.checkpoint_layers),
        tokens_per_step=tokens_per_step,
        memory=memory,
        flops=cost,
        sent=sent,
        compute_seconds=compute,
        update_seconds=update,
        send_seconds=send,
        step_seconds=step_seconds,
        tokens=min(limits, default=None),
        hardware=hardware,
        assumptions=tuple(_assumptions(config, model, origin, hardware, gpus)),
    )


def _memory(
    config: RunConfig, model: LanguageModel, cost: PassCost, hardware: Hardware, gpus: int, division: Division
) -> StepMemory:
    """Return the memory of a process."""
    train, settings = config.train, model.config
    rows = train.batch_size // (gpus * train.accumulate)
    weights = 4 * sum(p.numel() for p in model.parameters())
    is_narrow = hardware.precision != "fp32"
    kept = cost.kept * (_NARROW if is_narrow else 1)
    if isinstance(model, TransformerXL) and (is_narrow if hardware.on_cpu else not model.attention_kind.by_keys):
        # attention keeps its weights, or a bias as large
        n_weight = rows * train.tgt_len * (model.mem_len + train.tgt_len) * model.config.n_head * settings.n_layer
        kept += train.tbptt_segments * n_weight * (2 if is_narrow else 4)
    if train.checkpoint_layers:  # the input of each layer, and what one layer keeps
        inputs = settings.n_layer * rows * train.tgt_len * settings.d_model * 4 * train.tbptt_segments
        kept = min(kept, inputs + kept / (settings.n_layer * train.tbptt_segments))
    n_share = gpus if division == "fsdp" else 1
    averaged = weights if train.average != "none" else 0
    return StepMemory(
        weights=-(-weights // n_share),
        gradients=-(-weights // n_share),
        optimizer=-(-(state_bytes(model, config.optim) + averaged) // n_share),
        mems=round(2 * train.accumulate * cost.memory),
        activations=round(kept + 2 * cost.largest * (_NARROW if is_narrow else 1)),
        rounded=weights // 2 if is_narrow else 0,
    )


def _assumptions(config: RunConfig, model: LanguageModel, origin: str, hardware: Hardware, gpus: int) -> Iterator[str]:
    yield f"vocabulary of {model.config.vocab_size:,}: {origin}"
    yield f"{hardware.name}: {hardware.flops / 1e12:,.4g} TFLOP/s {hardware.precision}, {hardware.origin}"
    efficiency, why = _EFFICIENCY[hardware.on_cpu]
    yield f"{efficiency:g} of that rate: {why}"
    yield "activations within a fifth: no masks of dropout, and other kernels than this count keep other tensors"
    yield "no time for launching kernels: a step below 1 ms will take milliseconds"
    if gpus > 1:
        between = f"{_NETWORK / 1e9:g} GB/s between machines of {_PER_MACHINE}" if gpus > _PER_MACHINE else "one machine"
        yield f"{between}; rings; fp32 gradients and weights"
    if getattr(model.config, "cutoffs", ()):
        yield "rare tokens as by Zipf's law, for the clusters of the softmax"
    if config.train.varlen:
        yield "all segments of tgt_len"


def plan_table(plan: Plan) -> str:
    """Return a plan on one screen: lines of a name, a figure and its parts, then assumptions."""
    rows = list(_rows(plan))
    left, middle = (max(len(row[i]) for row in rows) for i in (0, 1))
    lines = [f"{name:{left}}  {figure:>{middle}}  {note}".rstrip() for name, figure, note in rows]
    notes = (f"assumed: {text}" for text in plan.assumptions)
    wrapped = [line for note in notes for line in textwrap.wrap(note, _WIDTH, subsequent_indent="  ")]
    model = plan.model
    where = plan.hardware.name if plan.gpus == 1 else f"{plan.gpus} × {plan.hardware.name}"
    shape = f"{model.kind}, {counted(model.n_layer, 'layer')}, width {model.d_model}, memory {model.mem_len:,}"
    return "\n".join([printable(f"{plan.recipe}: {shape}; {where}, {plan.hardware.precision}"), *lines, "", *wrapped])


def _rows(plan: Plan) -> Iterator[tuple[str, str, str]]:
    layout, memory, flops = plan.layout, plan.memory, partial(short, units=("FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP"))
    groups = f"in {layout.accumulate} groups of lanes, one after another" if layout.accumulate > 1 else ""
    again = "layers computed again backward" if layout.checkpointing else ""
    yield "parameters", f"{plan.parameters:,}", ""
    yield "tokens of a step", f"{plan.tokens_per_step:,}", ", ".join(filter(None, (groups, again)))
    usable = f"the {in_bytes(USABLE * plan.hardware.memory)} that may be used"
    yield "memory of a device", in_bytes(memory.total), f"{'fits into' if plan.fits else 'DOES NOT FIT into'} {usable}"
    for name, n_byte in vars(memory).items():
        if n_byte:
            yield f"  {name}", in_bytes(n_byte), ""
    parts = f"forward {flops(plan.flops.forward)}, backward {flops(plan.flops.backward)}"
    yield "operations of a token", flops(plan.flops.flops), parts
    for division, n_byte in plan.sent.items() if plan.gpus > 1 else ():
        chosen = ", as planned" if division == layout.division else ""
        yield f"{division} sends", in_bytes(n_byte), f"a device and step{chosen}"
    sending = f", sending {_duration(plan.send_seconds)} meanwhile" if plan.gpus > 1 else ""
    parts = f"computing {_duration(plan.compute_seconds)}, updating weights {_duration(plan.update_seconds)}{sending}"
    yield "time of a step", _duration(plan.step_seconds), parts
    yield "tokens per second", f"{plan.tokens_per_second:,.0f}", ""
    if plan.tokens is None:
        yield "budget", "?", "in epochs: the length of the corpus tells"
    else:
        amount = f"{plan.tokens:,.0f} tokens, {plan.tokens / plan.tokens_per_step:,.0f} steps"
        yield "budget", _duration(plan.tokens / plan.tokens_per_second), amount


def _duration(s: float) -> str:
    """Return a duration.

    Example:
        >>> _duration(0.0123), _duration(90), _duration(7200), _duration(864_000)
        ('12.3 ms', '1.5 min', '2.0 h', '10.0 days')
    """
    if s < 60:
        return f"{s:.3g} s" if s >= 1 else f"{1000 * s:.3g} ms"
    if s < 5400:
        return f"{s / 60:.1f} min"
    return f"{s / 3600:.1f} h" if s < 2 * 86400 else f"{s / 86400:,.1f} days"


def can_plan(settings: ModelConfig) -> bool:
    """Return whether the runs of such a model can be planned: whether it is a language model."""
    model = MODELS.get(type(settings))
    return settings.head is None and isinstance(model, type) and issubclass(model, LanguageModel)


def with_vocabulary(config: RunConfig) -> tuple[ModelConfig, str]:
    """Return a run's model settings with the size of the vocabulary, and where that size comes from."""
    if not can_plan(config.model):
        named = ", ".join(name for name, settings in KINDS.items() if can_plan(settings()))
        raise ConfigError(f"only models of kinds {named} can be planned, and '{config.name}' is of kind '{config.model.kind}'")
    size, origin = vocabulary(config)
    return completed(config.model, vocab_size=size, tgt_len=config.train.tgt_len), origin


def vocabulary(config: RunConfig) -> tuple[int, str]:
    """Return the size that a run's vocabulary will have, and where that size comes from."""
    model, tokenizer, corpus = config.model, config.tokenizer, config.data.corpus
    if model.vocab_size:
        return model.vocab_size, "as set"
    if tokenizer.kind == "byte":
        return 256, "bytes"
    if tokenizer.kind in ("bpe", "unigram"):
        return tokenizer.vocab_size or _PIECES, f"{tokenizer.kind}, {'as set' if tokenizer.vocab_size else 'the default'}"
    if tokenizer.kind == "ids" and tokenizer.vocab_size:
        return tokenizer.vocab_size, "ids, as set"
    if corpus in NAMED and tokenizer.kind in NAMED[corpus].vocabularies:
        return NAMED[corpus].vocabularies[tokenizer.kind], f"{tokenizer.kind}s of {corpus}"
    raise ConfigError(
        f"how many {tokenizer.kind.removesuffix('s')}s '{corpus}' has is known only after preparing it (txl corpus prepare); "
        "for a plan say it with --set model.vocab_size=N"
    )
