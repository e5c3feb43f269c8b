"""A run on paper: the memory that it needs, what it computes and sends, its time, and what to change if it does not fit."""

import itertools
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from transformer_xl.config.model import TransformerXLConfig
from transformer_xl.config.run import RunConfig
from transformer_xl.cost.hardware import Hardware
from transformer_xl.cost.memory import StepMemory, count_memory
from transformer_xl.cost.operations import Flops, count_flops
from transformer_xl.cost.work import Backend, Work, build, with_vocabulary, zipf_shares
from transformer_xl.errors import ConfigError
from transformer_xl.model.attention.kinds import attention_kind
from transformer_xl.model.attention.relative import RelativeAttention

Division = Literal["ddp", "fsdp"]
"""ddp: every process has all weights. fsdp: each has its share of weights, gradients and optimizer (FSDP2, full sharding)."""

USABLE = 0.92
"""Share of a device's memory that a plan may use; libraries and gaps between tensors take the rest."""

_WIDE = 1024
_LESS_SENT = {"ddp": "more lanes a step (train.batch_size)", "fsdp": "a smaller train.accumulate, --divide ddp if it fits"}
_UPDATE_TOUCHES = 7  # numbers per weight: weights and two moments are read and written, gradients read


@dataclass(frozen=True)
class StepLayout:
    """How a step is divided."""

    gpus: int  # processes, one per device
    per_machine: int  # processes per machine
    division: Division
    accumulate: int  # groups of lanes, one after another
    checkpointing: bool  # layers are computed again in the backward pass

    @property
    def machines(self) -> int:
        """Number of machines."""
        return math.ceil(self.gpus / self.per_machine)


@dataclass(frozen=True)
class Traffic:
    """Bytes that one process sends in a step.

    Processes send in rings: each sends (n - 1)/n of what is gathered or summed. A ring enters and leaves every machine once, so
    a machine sends to others as much as one of its processes does.
    """

    reduced: float = 0.0  # gradients, summed over all processes
    gathered: float = 0.0  # weights, collected for the forward and for the backward pass of each group of lanes

    @property
    def total(self) -> float:
        """All of them."""
        return self.reduced + self.gathered


@dataclass(frozen=True)
class Timing:
    """Seconds of a step."""

    compute: float  # matrix products, at the efficiency of the hardware
    update: float  # updating weights, as fast as memory is read and written
    send: float  # sending between devices
    overlapped: float  # a step if sending hides behind computing
    serial: float  # a step if nothing overlaps


@dataclass(frozen=True)
class Budget:
    """Tokens, steps and seconds of the whole run; None if they depend on the length of the corpus."""

    tokens: float | None
    steps: float | None
    seconds: float | None


@dataclass(frozen=True)
class Plan:
    """A run on paper: bytes, seconds and operations of one device, unless a comment says otherwise."""

    recipe: str
    model: TransformerXLConfig  # its settings, with the vocabulary
    parameters: int
    layout: StepLayout
    backend: Backend
    precision: str  # of the products
    tokens_per_step: int  # of all devices
    memory: StepMemory
    flops: Flops  # per token
    traffic: Traffic
    timing: Timing
    tokens_per_second: float  # of all devices, if sending hides behind computing
    budget: Budget
    hardware: Hardware
    advice: tuple[str, ...]  # what to change, and warnings
    assumptions: tuple[str, ...]  # behind the figures

    @property
    def fits(self) -> bool:
        """Whether a device has enough memory."""
        return self.memory.total <= USABLE * self.hardware.memory

    def as_dict(self) -> dict[str, Any]:
        """Return everything as JSON values."""
        values = asdict(self)
        values["memory"]["total"], values["traffic"]["total"] = self.memory.total, self.traffic.total
        return values | {
            "model": self.model.model_dump(mode="json"),
            "flops_per_token": values.pop("flops") | {"needed": self.flops.needed},
            "machines": self.layout.machines,
            "fits": self.fits,
        }


@dataclass(frozen=True)
class _Case:
    """A run and a device, whatever way a step is divided."""

    config: RunConfig
    work: Work
    hardware: Hardware

    def work_of(self, layout: StepLayout) -> Work:
        rows = self.config.train.batch_size // (layout.gpus * layout.accumulate)
        return replace(self.work, rows=rows, checkpointing=layout.checkpointing)

    def memory_of(self, layout: StepLayout) -> StepMemory:
        n_share = layout.gpus if layout.division == "fsdp" else 1
        memory = count_memory(self.work_of(layout), self.config.optim, n_group=layout.accumulate, n_share=n_share)
        averaged = memory.weights if self.config.train.average != "none" else 0
        return replace(memory, optimizer=memory.optimizer + averaged)

    def fits(self, layout: StepLayout) -> bool:
        return self.memory_of(layout).total <= USABLE * self.hardware.memory


def make_plan(
    config: RunConfig, hardware: Hardware, *, gpus: int = 1, per_machine: int = 8, division: Division | None = None
) -> Plan:
    """Plan a run on at least one device; with `division` None every device has all weights if they fit, else a share.

    Raises:
        ConfigError: the lanes cannot be divided among the devices, or the size of the vocabulary is unknown without the text.
    """
    train = config.train
    _check_lanes(config, gpus)
    model_config, origin = with_vocabulary(config)
    case = _Case(config, _one_lane(config, model_config, hardware), hardware)
    layout = StepLayout(gpus, per_machine, division or "ddp", train.accumulate, train.checkpoint_layers)
    if division is None and gpus > 1 and not case.fits(layout):
        layout = replace(layout, division="fsdp")
    work, memory = case.work_of(layout), case.memory_of(layout)
    n_parameter = sum(p.numel() for p in work.model.parameters())
    of_pass, n_pass = count_flops(work), train.accumulate
    # divided layers are gathered and reduced anew for each segment
    n_segment = n_pass * train.tbptt_segments
    traffic = count_traffic(n_parameter, n_process=gpus, division=layout.division, n_pass=n_segment)
    # operations that kernels repeat are part of their efficiency; those that checkpointing repeats are not
    n_flop = n_pass * (of_pass.needed + (of_pass.forward if layout.checkpointing else 0.0))
    timing = _timing(n_flop, memory, traffic, layout, hardware, n_segment)
    tokens_per_step = train.batch_size * train.tgt_len * train.tbptt_segments
    rate = tokens_per_step / timing.overlapped
    return Plan(
        recipe=config.name,
        model=model_config,
        parameters=n_parameter,
        layout=layout,
        backend=work.backend,
        precision=hardware.precision,
        tokens_per_step=tokens_per_step,
        memory=memory,
        flops=of_pass / (work.n_token * work.segments),
        traffic=traffic,
        timing=timing,
        tokens_per_second=rate,
        budget=_budget(config, tokens_per_step, rate),
        hardware=hardware,
        advice=tuple(_advice(case, layout, memory, timing)),
        assumptions=tuple(_assumptions(config, model_config, origin, work.backend, layout, hardware)),
    )


def _check_lanes(config: RunConfig, gpus: int) -> None:
    train = config.train
    n_group = gpus * train.accumulate
    if train.batch_size % n_group:
        raise ConfigError(
            f"train.batch_size ({train.batch_size}) must be a multiple of --gpus ({gpus}) times train.accumulate "
            f"({train.accumulate}), such as {math.ceil(train.batch_size / n_group) * n_group}"
        )


def _one_lane(config: RunConfig, model: TransformerXLConfig, hardware: Hardware) -> Work:
    return Work(
        model=build(model),
        rows=1,
        tgt_len=config.train.tgt_len,
        precision=hardware.precision,
        backend="triton" if hardware.fuses and config.train.attention in ("auto", "triton") else "matmul",
        on_cpu=hardware.on_cpu,
        checkpointing=False,
        shares=zipf_shares(model.cutoffs, model.vocab_size or 1),
        segments=config.train.tbptt_segments,
    )


def count_traffic(n_parameter: int, *, n_process: int, division: Division, n_pass: int) -> Traffic:
    """Count what a process sends in a step of `n_pass` forward and backward passes; weights and gradients travel in fp32.

    DDP sums gradients after the last pass, FSDP after each.
    """
    ring = (n_process - 1) / n_process * 4 * n_parameter
    if division == "ddp":
        return Traffic(reduced=2 * ring)
    return Traffic(reduced=n_pass * ring, gathered=2 * n_pass * ring)


def _timing(n_flop: float, memory: StepMemory, traffic: Traffic, layout: StepLayout, hardware: Hardware, n_pass: int) -> Timing:
    compute = n_flop / (hardware.flops * hardware.efficiency)
    update = _UPDATE_TOUCHES * memory.weights / hardware.bandwidth
    send = traffic.total / (hardware.network if layout.machines > 1 else hardware.link)
    # DDP sends during the last backward pass alone, which is two thirds of a pass; FSDP all the time
    behind = compute if layout.division == "fsdp" else compute * 2 / 3 / n_pass
    return Timing(compute, update, send, compute + max(send - behind, 0.0) + update, compute + send + update)


def _budget(config: RunConfig, tokens_per_step: int, rate: float) -> Budget:
    train = config.train
    limits = [train.max_steps * tokens_per_step] if train.max_steps else []
    limits += [train.max_tokens] if train.max_tokens else []
    limits += [60 * train.max_minutes * rate] if train.max_minutes else []
    if not limits:
        return Budget(None, None, None)
    tokens = min(limits)
    return Budget(tokens, tokens / tokens_per_step, tokens / rate)


def _advice(case: _Case, layout: StepLayout, memory: StepMemory, timing: Timing) -> Iterator[str]:
    usable = USABLE * case.hardware.memory
    if memory.total > usable:
        problem = f"does not fit: {memory.total / 1e9:,.1f} GB of {usable / 1e9:,.1f} usable"
        remedy = next((other for other in _remedies(case, layout) if case.fits(other)), None)
        if remedy is None:
            held = memory.weights + memory.gradients + memory.optimizer
            yield f"{problem}, {held / 1e9:,.1f} of them weights, gradients and optimizer; take more GPUs or a smaller model"
        else:
            yield f"{problem}; with {', '.join(_changes(layout, remedy))} it takes {case.memory_of(remedy).total / 1e9:,.1f} GB"
    elif layout.checkpointing and case.fits(replace(layout, checkpointing=False)):
        yield "fits without train.checkpoint_layers, which costs a third more time"
    if timing.send > timing.compute:
        yield (
            f"sending takes longer ({timing.send:.2f} s) than computing ({timing.compute:.2f} s): "
            f"take {_LESS_SENT[layout.division]}, fewer GPUs or a faster network (--network)"
        )


def _remedies(case: _Case, layout: StepLayout) -> Iterator[StepLayout]:
    """Yield other ways to divide a step, the cheapest first."""
    lanes = case.config.train.batch_size // layout.gpus
    groups = [n for n in range(layout.accumulate, lanes + 1) if lanes % n == 0]
    divisions: list[Division] = ["ddp", "fsdp"] if layout.gpus > 1 and layout.division == "ddp" else [layout.division]
    for division, checkpointing, n_group in itertools.product(divisions, (layout.checkpointing, True), groups):
        yield replace(layout, division=division, checkpointing=checkpointing, accumulate=n_group)


def _changes(layout: StepLayout, other: StepLayout) -> Iterator[str]:
    if other.division != layout.division:
        yield f"--divide {other.division}"
    if other.checkpointing != layout.checkpointing:
        yield "train.checkpoint_layers=true"
    if other.accumulate != layout.accumulate:
        yield f"train.accumulate={other.accumulate}"


def _assumptions(
    config: RunConfig, model: TransformerXLConfig, origin: str, backend: Backend, layout: StepLayout, hardware: Hardware
) -> Iterator[str]:
    yield f"vocabulary of {model.vocab_size:,}: {origin}"
    yield f"{hardware.name}: {hardware.flops / 1e12:,.4g} TFLOP/s {hardware.precision}, {hardware.origin}"
    yield f"efficiency {hardware.efficiency:g}: {hardware.efficiency_origin}"
    if model.cutoffs:
        yield "rare tokens as by Zipf's law, for the clusters of the softmax"
    if layout.gpus > 1:
        between = f"{hardware.network / 1e9:g} GB/s between machines" if layout.machines > 1 else "links of one machine"
        yield f"{between}; rings; fp32 gradients and weights; lanes of all machines alike"
    if issubclass(attention_kind(model.attention), RelativeAttention):
        how = "the fused kernels" if backend == "triton" else "batched products (matmul)"
        yield f"attention by {how}"
    if not hardware.on_cpu and model.d_model < _WIDE:
        yield f"matrices of width {model.d_model} are too narrow for such a rate: expect less of it"
    if config.train.varlen:
        yield "all segments of tgt_len"
    if any((model.locked_dropout, model.dropqkv, model.dropemb, model.dropweight)):
        yield "the masks of dropout on queries, keys, words and weights not counted"
