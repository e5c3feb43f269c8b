"""The state of a training run and its one step. Nothing here prints, evaluates or touches the disk.

A checkpoint holds every part of the state, bit by bit: weights, their average, optimizer moments, each lane's memory, random
generators, stream position, schedule and counters. So a resumed run equals the uninterrupted run.
"""

import math
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from transformer_xl.batch import Batch
from transformer_xl.checkpoint.store import AVERAGE_PREFIX, Checkpoint, averaged_weights
from transformer_xl.config.run import OptimConfig, TrainConfig
from transformer_xl.data.streams import EndlessStream
from transformer_xl.errors import ConfigError, TrainingError, shown
from transformer_xl.kernels.device import Precision, autocast, cannot_compile
from transformer_xl.kernels.graphs import Graphs, Readback
from transformer_xl.model.adaptive import AdaptiveSoftmax
from transformer_xl.model.base import LanguageModel, SequenceModel
from transformer_xl.model.call import Execution, Regularizers, run_layer
from transformer_xl.model.memory import Memory
from transformer_xl.model.pretrained import is_finite
from transformer_xl.model.softmax import TokenSoftmax
from transformer_xl.reading.stream import check_like, check_names
from transformer_xl.training.averages import Average
from transformer_xl.training.feed import Feed, Place
from transformer_xl.training.optim import Optimizers, Schedule, clipped, state_bytes
from transformer_xl.training.parallel import Parallel, local, own_part, whole
from transformer_xl.world import World

_GOOD, _BAD, _OVERFLOW = 0.0, 1.0, 2.0
"""How a step ended."""

_SAVED_NAME = re.compile(rf"optimizer\.|{re.escape(AVERAGE_PREFIX)}|mems\.|random\.([0-9]+\.)?(cpu|cuda)$")


@dataclass(frozen=True)
class StepResult:
    """What one step did, in all processes together. To look at its numbers is to wait for a device that still computes them."""

    step: int
    place: Place  # in the text, before it
    tokens: int  # read
    scored: int  # losses in the sum of nats; with train.loss="half" fewer than tokens were read
    rate: float  # factor on the learning rate
    readback: Readback  # see `Trainer._step`

    @property
    def nats(self) -> float:
        """Summed; NaN or infinite if the step was skipped for that."""
        return self.readback.numbers[0]

    @property
    def grad_norm(self) -> float:
        """Global, before clipping."""
        return self.readback.numbers[1]

    @property
    def skipped(self) -> bool:
        """No update was made, because loss or gradients were not finite."""
        return self.readback.numbers[2] != _GOOD

    @property
    def overflowed(self) -> bool:
        """It was skipped because of a loss scale above 1, which is no defect: that is how fp16 finds its scale."""
        return self.readback.numbers[2] == _OVERFLOW


class Trainer:
    """A model in training, which is moved to `device`. `stream` reads only the lanes of this process."""

    def __init__(
        self,
        model: SequenceModel,
        stream: EndlessStream,
        *,
        train: TrainConfig,
        optim: OptimConfig,
        precision: Precision,
        world: World | None = None,
        device: torch.device | None = None,
    ) -> None:
        self.model, self.stream, self.config = model, stream, train
        self.world = world or World()
        device = device or model.device
        check_settings(model, train=train, precision=precision, world=self.world, device=device)
        self.clip = optim.clip
        self.precision: Precision = precision
        self.parallel = Parallel(model, self.world, how=train.parallel, precision=precision, device=device)
        self.device = model.device
        # All layers are alike, so the compiler compiles a layer once for all, when it first meets tensors of a shape. The whole
        # model would take n_layer times as long, and the compiler would trace the choice of a backend.
        layer = torch.compile(run_layer) if train.compile else run_layer
        self.execution = Execution(train.attention, train.checkpoint_layers, layer)
        facts: dict[str, Any] = {"train": train, "precision": precision, "world": self.world, "device": self.device}
        self.why_no_graph = why_no_graph(model, stream, **facts)
        self._graphs = None if self.why_no_graph else Graphs(self.device, must=train.graph == "on")
        self.waits = must_wait(self.device, self.world, precision)
        if self.world.rank:  # other processes have the same weights, but other random numbers
            torch.manual_seed(train.seed + self.world.rank)
        self.feed = Feed(stream, train, ahead=self.device.type == "cuda")
        self._regularizers = Regularizers(train.label_smoothing, train.activation_penalty, train.temporal_penalty)
        self.average = Average(train)
        self.optimizers = Optimizers(model, optim)
        self.schedule = Schedule(optim)
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=precision == "fp16")
        self.mems = self._in_places(self._empty_mems())
        self.step = self.tokens = self.skipped = self.bad_in_a_row = 0
        self.seconds = 0.0

    @property
    def graph_problem(self) -> str | None:
        """Why steps that should be graphs could not be captured, and are launched kernel by kernel; None: they were."""
        return None if self._graphs is None else self._graphs.problem

    @property
    def used(self) -> dict[str, float]:
        """The share of each budget that is used up, by the name of its setting."""
        done = {"max_steps": self.step, "max_tokens": self.tokens, "max_epochs": self.feed.place.epochs}
        done["max_minutes"] = self.seconds / 60
        return {name: amount / limit for name, amount in done.items() if (limit := getattr(self.config, name))}

    @property
    def progress(self) -> float:
        """The share of the budget that is used up, by the nearest limit."""
        return max(self.used.values())

    @property
    def last_good_step(self) -> int:
        """The last step that changed weights, of those that are settled; 0 if there was none."""
        return self.step - self.bad_in_a_row

    @property
    def finite(self) -> bool:
        """Whether all weights are finite numbers, in all processes."""
        return not self.world.any(not all(is_finite(local(parameter)) for parameter in self.model.parameters()))

    def train_step(self) -> StepResult:
        """Read one segment per lane, or `tbptt_segments` of them, and update the weights.

        If the loss or a gradient is not finite, the stream and the random numbers move on and everything else stays as it was.

        Returns:
            What it did, which `settle` counts. Unless the trainer `waits`, a device may still compute it.
        """
        begin = time.perf_counter()
        place, progress = self.feed.place, self.progress
        if place.starts_epoch:
            self._remember(self._empty_mems())
        segments = self.feed.read(self.step)
        n_token, n_scored = self._count(segments)
        rate = self._rate(segments, progress)
        if not self.model.training:  # to tell all modules takes longer than to launch the graph of a small model
            self.model.train()
        groups = [list(group) for group in zip(*(batch.split(self.config.accumulate) for batch in segments), strict=True)]
        tail_sizes = self._tail_sizes(groups)
        groups = [[batch.to(self.device) for batch in group] for group in groups]
        compute = partial(self._step, n_scored=n_scored, progress=progress, tail_sizes=tail_sizes)
        rate_there = rate if self.waits else torch.full((), rate, device=self.device)
        if self._graphs is None:
            numbers = compute(groups, rate_there)
        else:
            key = (n_scored, tail_sizes, self.average.is_due(progress))
            numbers = _launched(self._graphs, key, compute, groups, rate_there)
        self.feed.prefetch(self.step + 1)  # while the device computes, unless `_step` did so before it waited
        self.step += 1
        self.tokens += n_token
        # with a budget of time, all processes count the first one's time, so that they end at the same step
        seconds = time.perf_counter() - begin
        self.seconds += self.world.from_first(seconds) if self.config.max_minutes else seconds
        return StepResult(self.step, place, n_token, n_scored, rate, Readback(numbers))

    def _step(
        self,
        groups: list[list[Batch]],
        rate: float | Tensor,
        *,
        n_scored: int,
        progress: float,
        tail_sizes: tuple[int, ...] | None,
    ) -> Tensor:
        """Learn from the segments of each group of lanes, on the device.

        Args:
            groups: segments of each group, in turn.
            rate: factor on the learning rates; on the device if that decides how the step ends, so that nothing waits for it.
            n_scored: how many losses all processes learn from.
            progress: share of the budget that is used up.
            tail_sizes: see `Execution`.

        Returns:
            fp64 (3,): the sum of nats, the norm of the gradients, and how it ended, such as `_GOOD`.
        """
        self.optimizers.zero_grad()
        nats, new_mems = self._forward_backward(groups, n_scored, progress, tail_sizes)
        for optimizer in self.optimizers.parts:
            self.scaler.unscale_(optimizer)
        norm, found_inf = clipped(self.model.parameters(), self.clip), None
        if self.waits:
            self.feed.prefetch(self.step + 1)  # before the next line waits for the device
            numbers = self._decided(nats, norm)
            if numbers[2] != _GOOD:
                return numbers
        else:
            found_inf = 1 - (nats.isfinite() & norm.isfinite()).float()  # _BAD, or _GOOD
            numbers = torch.stack([nats, norm.double(), found_inf.double()])
        self.optimizers.step(rate, found_inf=found_inf)
        self.average.update(self.model, progress=progress, found_inf=found_inf)
        self._remember(new_mems, unless=found_inf)
        return numbers

    def _decided(self, nats: Tensor, norm: Tensor) -> Tensor:
        """Return what `_step` does, from the nats of this process, and let fp16 find its scale; see `must_wait`."""
        (total,), norm_here = self.world.sum(float(nats)), float(norm)
        finite = math.isfinite(total) and math.isfinite(norm_here)
        overflow = not finite and math.isfinite(total) and self.scaler.is_enabled() and self.scaler.get_scale() > 1
        if self.scaler.is_enabled():
            self.scaler.update(None if finite or overflow else self.scaler.get_scale())
        ending = _GOOD if finite else _OVERFLOW if overflow else _BAD
        return torch.tensor([total, norm_here, ending], dtype=torch.float64)

    def settle(self, result: StepResult) -> None:
        """Wait for a step, and count how it ended. Call it for each step in turn, before the state is saved.

        Raises:
            TrainingError: it was the last of `max_bad_steps` bad ones.
        """
        begin = time.perf_counter()
        skipped = result.skipped
        self.seconds += 0.0 if self.waits else time.perf_counter() - begin
        self.skipped += skipped
        self.bad_in_a_row = self.bad_in_a_row + (not result.overflowed) if skipped else 0
        if self.bad_in_a_row >= self.config.max_bad_steps:
            with self.world.agreed():  # all processes come here, and one reports it
                raise TrainingError(
                    f"diverged at step {result.step + 1 - self.bad_in_a_row}: no finite loss and gradient in "
                    f"{self.bad_in_a_row} steps in a row (up to step {result.step}, epoch {result.place.epoch}, segment "
                    f"{result.place.position}); no weights were changed by them; resume with a lower optim.lr or optim.clip, "
                    "or train.precision=fp32"
                )

    def _rate(self, segments: list[Batch], before: float) -> float:
        """Return the factor on the learning rates of a step that has read its segments; `before`: the progress without them.

        Reading has moved `feed.place`, and so `progress`; `step` and `tokens` count this step only after it.
        """
        share = max(self.progress - before, 1 / self.config.max_steps if self.config.max_steps else 0.0)  # 0: nobody knows
        rate = self.schedule.factor(self.step, before, share=share)
        if self.schedule.config.lr_by_length:  # of what it reads
            rate *= sum(batch.ids.shape[1] for batch in segments) / (self.config.tgt_len * self.config.tbptt_segments)
        return rate

    def _count(self, segments: list[Batch]) -> tuple[int, int]:
        """Return how many tokens are read, and from how many losses is learned, in all processes."""
        n_read, n_scored = sum(batch.n_read for batch in segments), sum(batch.n_scored for batch in segments)
        if self.stream.is_even:
            return n_read * self.world.size, n_scored * self.world.size
        n_read, n_scored = map(round, self.world.sum(n_read, n_scored))
        return n_read, max(n_scored, 1)  # short segments may hold nothing but questions

    def _forward_backward(
        self, groups: list[list[Batch]], n_scored: int, progress: float, tail_sizes: tuple[int, ...] | None
    ) -> tuple[Tensor, list[Memory]]:
        """Accumulate gradients of the mean loss over groups of lanes; return the sum of nats and the memories."""
        execution, regularizers = replace(self.execution, tail_sizes=tail_sizes), replace(self._regularizers, progress=progress)
        total, new_mems = torch.zeros((), dtype=torch.float64, device=self.device), []
        for i, (group, mems) in enumerate(zip(groups, self.mems, strict=True), start=1):
            losses = []
            with self.parallel.group(last=i == len(self.mems)):
                for batch in group:
                    with autocast(self.device, self.precision):
                        out = self.parallel.loss(
                            batch,
                            mems=mems,
                            execution=execution,
                            keep_graph=len(group) > 1,
                            regularizers=regularizers,
                        )
                    assert out.nll is not None
                    mems = out.mems
                    losses.append(out.loss)
                    total += out.nll.detach().double().sum()
                # the mean of the processes' gradients is that of all tokens
                self.scaler.scale(torch.stack(losses).sum() / (n_scored / self.world.size)).backward()
            new_mems.append(mems.detach())
        return total, new_mems

    def _tail_sizes(self, groups: list[list[Batch]]) -> tuple[int, ...] | None:
        """Return how many tokens of each tail of an adaptive softmax a call of the model has at most.

        None: it has no tails, or is on a CPU, which counts them when it comes to them.
        """
        softmax = getattr(self.model, "softmax", None)
        if not isinstance(softmax, AdaptiveSoftmax) or (self.device.type == "cpu" and self.waits):
            return None
        sizes = [softmax.tail_sizes(batch.labels) for group in groups for batch in group]
        return tuple(map(max, zip(*sizes, strict=True)))

    def _remember(self, mems: list[Memory], *, unless: Tensor | None = None) -> None:
        """Take new memories, unless a number on the device is 1. What a device decides, it writes where the old ones lie."""
        if self.waits:
            self.mems = mems
            return
        for old, new in zip(self.mems, mems, strict=True):
            theirs = new.state_dict()
            for name, tensor in old.state_dict().items():
                if unless is None:
                    tensor.copy_(theirs[name])
                else:
                    torch.where(unless > 0, tensor, theirs[name], out=tensor)

    def _empty_mems(self) -> list[Memory]:
        rows = self.config.batch_size // self.world.size // self.config.accumulate
        return [self.model.init_mems(rows) for _ in range(self.config.accumulate)]

    def _in_places(self, mems: list[Memory]) -> list[Memory]:
        """Return the memory where a device will find and change it, each tensor in a place of its own."""
        if self.waits:
            return mems
        clones = ({name: tensor.clone() for name, tensor in group.state_dict().items()} for group in mems)
        return [type(group).from_state_dict(own) for group, own in zip(mems, clones, strict=True)]

    def _own_lanes(self, training: dict[str, Tensor]) -> list[Memory]:
        """Return the memory of this process's lanes, one for each group of lanes."""
        lanes = type(self.mems[0]).from_state_dict(_under("mems.", training))
        n_group = lanes.batch_size // self.world.size // self.config.accumulate
        first = self.world.rank * n_group * self.config.accumulate
        groups = (slice(first + i * n_group, first + (i + 1) * n_group) for i in range(self.config.accumulate))
        return [lanes.select(rows).to(self.device) for rows in groups]

    def _check_tensors(self, training: dict[str, Tensor]) -> None:
        """Refuse random states and memories that are not of this run, and unknown names; optimizer and average check theirs."""
        if unknown := [name for name in training if not _SAVED_NAME.match(name)]:
            raise ValueError(f"tensor {shown(min(unknown))} is unknown")
        saved, own = _under("mems.", training), self.model.init_mems(1)
        check_names(saved, own.state_dict())
        for name, tensor in own.state_dict().items():
            x = saved[name]
            dtype = x.dtype if x.is_floating_point() and tensor.is_floating_point() else tensor.dtype  # a precision's own
            check_like(f"mems.{name}", x, dtype, (self.config.batch_size, *tensor.shape[1:]))
        type(own).from_state_dict(saved).check_values()
        cpu = torch.get_rng_state()
        check_like("random.cpu", training.get("random.cpu", torch.empty(0)), cpu.dtype, cpu.shape)

    def _random_state(self) -> dict[str, Tensor]:
        state = {"cpu": torch.get_rng_state()}
        if self.device.type == "cuda":
            state["cuda"] = torch.cuda.get_rng_state(self.device)
        return state

    def _restore_random_state(self, state: dict[str, Tensor]) -> None:
        torch.set_rng_state(state["cpu"].cpu())
        if "cuda" in state and self.device.type == "cuda":
            torch.cuda.set_rng_state(state["cuda"].cpu(), self.device)

    def checkpoint(self, record: dict[str, Any]) -> Checkpoint | None:
        """Return the whole state with the caller's `record` of JSON values. It is not a copy, so store it before the next step.

        All processes call it when they have settled all steps. The first one gets the state, which any number of processes can
        go on from; the others get None.
        """
        training = _named("optimizer.", whole(self.optimizers.state_tensors(), self.world))
        training |= _named(AVERAGE_PREFIX, whole(self.average.weights, self.world))
        lanes = self.mems[0] if len(self.mems) == 1 else type(self.mems[0]).concatenate(self.mems)
        gathered = {f"mems.{name}": self.world.rows(tensor) for name, tensor in lanes.state_dict().items()}
        for name, state in self._random_state().items():
            states = self.world.rows(state[None])
            for rank, own in enumerate([] if states is None else states):
                gathered[f"random.{rank}.{name}" if rank else f"random.{name}"] = own
        model = whole(self.model.state_dict(), self.world)
        if not self.world.first:
            return None
        training |= {name: tensor for name, tensor in gathered.items() if tensor is not None}
        state = {
            "tokens": self.tokens,
            "seconds": self.seconds,
            "skipped": self.skipped,
            "bad_in_a_row": self.bad_in_a_row,
            **self.feed.state_dict(),
            "average": self.average.state_dict(),
            "schedule": self.schedule.state_dict(),
            "scaler": self.scaler.state_dict(),
            "world_size": self.world.size,
            "record": record,
        }
        return Checkpoint(step=self.step, model=model, training=training, state=state)

    def restore(self, checkpoint: Checkpoint) -> None:
        """Restore a state that `checkpoint` returned.

        If another number of processes saved it, memory and text are divided anew, and only random numbers differ.

        Raises:
            ValueError: it is none that `checkpoint` returned for this model and these settings.
        """
        state, training = checkpoint.state, checkpoint.training
        self._check_tensors(training)
        self.feed.load_state_dict(state)
        own = self.model.state_dict()
        self.model.load_state_dict({name: own_part(t, own[name]) if name in own else t for name, t in checkpoint.model.items()})
        self.optimizers.load_state_tensors(_under("optimizer.", training))
        self.mems = self._in_places(self._own_lanes(training))
        if state["world_size"] == self.world.size:
            self._restore_random_state(_under(f"random.{self.world.rank}." if self.world.rank else "random.", training))
        else:
            torch.manual_seed(
                int(np.random.SeedSequence((self.config.seed, checkpoint.step, self.world.rank)).generate_state(1)[0])
            )
        self.average.load_state_dict(state["average"], averaged_weights(checkpoint), self.model)
        self.schedule.load_state_dict(state["schedule"])
        if self.scaler.is_enabled() and state["scaler"]:
            self.scaler.load_state_dict(state["scaler"])
        self.step, self.tokens, self.seconds = checkpoint.step, state["tokens"], state["seconds"]
        self.skipped, self.bad_in_a_row = state["skipped"], state["bad_in_a_row"]
        if self._graphs is not None:
            self._graphs.forget()


def _launched(
    graphs: Graphs, key: tuple[Any, ...], compute: Callable[..., Tensor], groups: list[list[Batch]], rate: float | Tensor
) -> Tensor:
    """Run a step as a CUDA graph from the second time its shapes and `key` occur; `compute` takes batches and rate."""
    tensors = [tensor for group in groups for batch in group for tensor in batch.tensors]

    def of_tensors(inputs: Sequence[Tensor]) -> Tensor:
        factor, *rest = inputs
        places = iter(rest)
        return compute([[batch.map(lambda _: next(places)) for batch in group] for group in groups], factor)

    assert isinstance(rate, Tensor)
    return graphs.launch((*(tuple(tensor.shape) for tensor in tensors), *key), of_tensors, [rate, *tensors])


def must_wait(device: torch.device, world: World, precision: Precision) -> bool:
    """Say whether the host decides in each step how it ended, and waits for that.

    It does on a CPU, where nothing goes on meanwhile; for several processes, which add their nats there, and whose optimizers
    of parts (DTensors) cannot ask a device; and for fp16, whose next scale depends on it.
    """
    return device.type != "cuda" or not world.alone or precision == "fp16"


def why_no_graph(
    model: SequenceModel, stream: EndlessStream, *, train: TrainConfig, precision: Precision, world: World, device: torch.device
) -> str | None:
    """Say why steps of a run cannot be captured; None if they can."""
    reasons = {
        "train.graph is off": train.graph == "off",
        f"{device.type} has no CUDA graphs": device.type != "cuda",
        "several processes exchange gradients within a step": not world.alone,
        "fp16 scales its losses by what the host has seen": precision == "fp16",
        "layers that are computed again restore random numbers (train.checkpoint_layers)": train.checkpoint_layers,
        "how many losses a step has differs from step to step": not stream.is_even,
        f"{model.described} is not captured": not (isinstance(model, LanguageModel) and model.attention_blocks()),
        "losses besides that of the next token are not captured": isinstance(model, LanguageModel) and model.adds_losses,
        "it has a kind of your own, which may look at values": not _is_own(model),
    }
    reason = next((reason for reason, holds in reasons.items() if holds), None)
    if reason and train.graph == "on":
        raise ConfigError(f"train.graph (on) cannot be: {reason}; use auto")
    return reason


def _is_own(model: SequenceModel) -> bool:
    kinds = [type(model), *(type(block) for block in model.attention_blocks())]
    return all(kind.__module__.startswith("transformer_xl.") for kind in kinds)


def check_settings(
    model: SequenceModel, *, train: TrainConfig, precision: Precision, world: World, device: torch.device
) -> None:
    """Refuse settings that cannot work together, before processes wait for each other; see `Trainer`."""
    n_lanes = train.batch_size // world.size
    if n_lanes % train.accumulate:
        raise ConfigError(
            f"train.accumulate ({train.accumulate}) must divide the {n_lanes} lanes of each of the {world.size} processes; "
            f"change it or train.batch_size ({train.batch_size})"
        )
    if train.parallel == "fsdp" and precision == "fp16" and not world.alone:
        raise ConfigError("train.precision (fp16) scales losses, which train.parallel (fsdp) cannot; use bf16 or fp32")
    model.check_backend(train.attention, device)
    is_plain = isinstance(model, LanguageModel) and not model.adds_losses
    if train.label_smoothing and not (is_plain and isinstance(model.softmax, TokenSoftmax)):
        raise ConfigError(
            f"train.label_smoothing ({train.label_smoothing:g}) needs a model with a plain softmax (no model.cutoffs) and "
            "without losses besides that of the next token; leave it out, or those"
        )
    penalties = {"activation_penalty": train.activation_penalty, "temporal_penalty": train.temporal_penalty}
    if (asked := next((name for name, factor in penalties.items() if factor), None)) and not is_plain:
        raise ConfigError(
            f"train.{asked} ({penalties[asked]:g}) needs a model without losses besides that of the next token; leave it "
            "out, or what adds them (model.intermediate_losses, model.n_target)"
        )
    if train.compile:
        if problem := cannot_compile(device):
            raise ConfigError(f"train.compile (True) cannot work here: {problem}; install it, or use train.compile=false")
        if not model.attention_blocks():
            raise ConfigError(
                f"train.compile (True) compiles layers that attend, and {model.described} has none; use train.compile=false"
            )


def checkpoint_bytes(model: SequenceModel, *, train: TrainConfig, optim: OptimConfig) -> int:
    """Return the bytes of a checkpoint's tensors, without allocating them; random states, a few kB, are left out."""
    weights = sum(tensor.nbytes for tensor in model.state_dict().values())
    averaged = sum(parameter.to("meta", torch.float32).nbytes for parameter in model.parameters())
    lanes = train.batch_size * sum(tensor.nbytes for tensor in model.init_mems(1).state_dict().values())
    return weights + (0 if train.average == "none" else averaged) + lanes + state_bytes(model, optim)


def _named(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"{prefix}{name}": tensor for name, tensor in tensors.items()}


def _under(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
