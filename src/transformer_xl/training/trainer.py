"""The state of a training run and its one step. Nothing here prints, evaluates or touches the disk.

Every part of the state goes into a checkpoint and comes back bit by bit: weights, optimizer moments, the memory of every lane,
the random generators, the stream position, the schedule and the counters. So a resumed run is the uninterrupted run.
"""

import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from transformer_xl.checkpoint.store import Checkpoint
from transformer_xl.config import OptimConfig, TrainConfig
from transformer_xl.data.streams import SegmentStream
from transformer_xl.errors import TrainingError
from transformer_xl.model.memory import Mems
from transformer_xl.model.precision import Precision, autocast
from transformer_xl.model.transformer_xl import TransformerXL
from transformer_xl.training.optim import Optimizers, Schedule, finite_norm


@dataclass(frozen=True)
class StepResult:
    """What one step did.

    Attributes:
        nats: summed over the tokens of the step; NaN or infinite if it was skipped for that.
        tokens: read in the step.
        grad_norm: global norm before clipping.
        rate: factor on the learning rate.
        skipped: no update, because loss or gradients were not finite.
    """

    nats: float
    tokens: int
    grad_norm: float
    rate: float
    skipped: bool


class Trainer:
    """A model in training.

    Args:
        model: on its device.
        stream: of the training split.
        train: budget, lanes, seed.
        optim: optimizer and schedule.
        precision: of the matrix products.
    """

    def __init__(
        self, model: TransformerXL, stream: SegmentStream, *, train: TrainConfig, optim: OptimConfig, precision: Precision
    ) -> None:
        self.model, self.stream, self.config = model, stream, train
        self.clip = optim.clip
        self.precision: Precision = precision
        self.device = model.device
        self.optimizers = Optimizers(model, optim)
        self.schedule = Schedule(optim)
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=precision == "fp16")
        self.mems = self._empty_mems()
        self.step = self.tokens = self.skipped = self.bad_in_a_row = 0
        self.seconds = 0.0

    @property
    def progress(self) -> float:
        """Share of the budget that is used up, by whichever limit is nearest."""
        config = self.config
        epochs = self.stream.epoch + self.stream.position / self.stream.segments_per_epoch
        used = ((self.step, config.max_steps), (self.tokens, config.max_tokens), (epochs, config.max_epochs))
        return max(
            self.seconds / 60 / config.max_minutes if config.max_minutes else 0.0,
            *(done / limit if limit else 0.0 for done, limit in used),
        )

    @property
    def finite(self) -> bool:
        """True if all weights are finite numbers: only then is the state worth keeping."""
        return all(bool(torch.isfinite(parameter).all()) for parameter in self.model.parameters())

    def train_step(self) -> StepResult:
        """Read one segment per lane and update the weights.

        If the loss or a gradient is not finite, the stream moves on and everything else stays as it was.

        Raises:
            TrainingError: that happened `max_bad_steps` times in a row.
        """
        begin = time.perf_counter()
        place = (self.stream.epoch, self.stream.position)
        if self.stream.starts_epoch:
            self.mems = self._empty_mems()
        segment = next(self.stream)
        random_state = self._random_state()
        rate = self.schedule.factor(self.step, self.progress)

        self.model.train()
        self.optimizers.zero_grad()
        nats, new_mems = self._forward_backward(segment.ids, segment.labels, segment.document_starts)
        for optimizer in self.optimizers.parts:
            self.scaler.unscale_(optimizer)
        norm, finite = finite_norm(self.model.parameters(), self.clip)
        finite_loss = bool(torch.isfinite(nats))
        finite = finite and finite_loss
        overflow = finite_loss and not finite and self.scaler.is_enabled() and self.scaler.get_scale() > 1
        if finite:
            self.optimizers.step(rate)
            self.mems = new_mems
        else:
            self._restore_random_state(random_state)
        if self.scaler.is_enabled():
            self.scaler.update(None if finite or overflow else self.scaler.get_scale())
        self._count(segment.ids.numel(), finite=finite, overflow=overflow, place=place)
        self.seconds += time.perf_counter() - begin
        return StepResult(float(nats), segment.ids.numel(), float(norm), rate, skipped=not finite)

    def _forward_backward(self, ids: Tensor, labels: Tensor, documents: Tensor) -> tuple[Tensor, list[Mems]]:
        """Accumulate gradients of the mean loss over groups of lanes; return summed nats and the memories."""
        n_group, total, new_mems = self.config.accumulate, torch.zeros((), dtype=torch.float64), []
        groups = zip(ids.chunk(n_group), labels.chunk(n_group), documents.chunk(n_group), self.mems, strict=True)
        for group_ids, group_labels, group_documents, mems in groups:
            with autocast(self.device, self.precision):
                out = self.model(
                    group_ids.to(self.device),
                    mems=mems,
                    labels=group_labels.to(self.device),
                    document_starts=group_documents.to(self.device) if self.config.reset_at_documents else None,
                )
            self.scaler.scale(out.nll.sum() / ids.numel()).backward()
            total += out.nll.detach().double().sum().cpu()
            new_mems.append(out.mems)
        return total, new_mems

    def _count(self, tokens: int, *, finite: bool, overflow: bool, place: tuple[int, int]) -> None:
        self.step += 1
        self.tokens += tokens
        self.skipped += not finite
        # an overflow at a loss scale above 1 is how fp16 finds its scale, not a defect of the run
        self.bad_in_a_row = 0 if finite else self.bad_in_a_row + (not overflow)
        if self.bad_in_a_row >= self.config.max_bad_steps:
            raise TrainingError(
                f"no finite loss and gradient in {self.bad_in_a_row} steps in a row (up to step {self.step}, epoch {place[0]}, "
                f"segment {place[1]}); no weights were changed by them; resume with a lower optim.lr or optim.clip, or "
                "train.precision=fp32"
            )

    def _empty_mems(self) -> list[Mems]:
        rows = self.config.batch_size // self.config.accumulate
        return [self.model.init_mems(rows) for _ in range(self.config.accumulate)]

    def _random_state(self) -> dict[str, Tensor]:
        state = {"cpu": torch.get_rng_state()}
        if self.device.type == "cuda":
            state["cuda"] = torch.cuda.get_rng_state(self.device)
        return state

    def _restore_random_state(self, state: dict[str, Tensor]) -> None:
        torch.set_rng_state(state["cpu"].cpu())
        if "cuda" in state and self.device.type == "cuda":
            torch.cuda.set_rng_state(state["cuda"].cpu(), self.device)

    def checkpoint(self, record: dict[str, Any]) -> Checkpoint:
        """Return the whole state, to be stored before the next step: the tensors are those in use, not copies.

        Args:
            record: JSON values of the caller's, kept with it.
        """
        training = {f"optimizer.{name}": tensor for name, tensor in self.optimizers.state_tensors().items()}
        for i, mems in enumerate(self.mems):
            training |= {f"mems.{i}.{name}": tensor for name, tensor in mems.state_dict().items()}
        training |= {f"random.{name}": tensor for name, tensor in self._random_state().items()}
        state = {
            "tokens": self.tokens,
            "seconds": self.seconds,
            "skipped": self.skipped,
            "bad_in_a_row": self.bad_in_a_row,
            "stream": self.stream.state_dict(),
            "schedule": self.schedule.state_dict(),
            "scaler": self.scaler.state_dict(),
            "record": record,
        }
        return Checkpoint(step=self.step, model=self.model.state_dict(), training=training, state=state)

    def restore(self, checkpoint: Checkpoint) -> dict[str, Any]:
        """Put a state back and return the caller's record."""
        state, training = checkpoint.state, checkpoint.training
        self.stream.load_state_dict(state["stream"])
        self.model.load_state_dict(checkpoint.model)
        self.optimizers.load_state_tensors(_under("optimizer.", training))
        self.mems = [
            Mems.from_state_dict(_under(f"mems.{i}.", training)).to(self.device) for i in range(self.config.accumulate)
        ]
        self._restore_random_state(_under("random.", training))
        self.schedule.load_state_dict(state["schedule"])
        if self.scaler.is_enabled() and state["scaler"]:
            self.scaler.load_state_dict(state["scaler"])
        self.step, self.tokens, self.seconds = checkpoint.step, state["tokens"], state["seconds"]
        self.skipped, self.bad_in_a_row = state["skipped"], state["bad_in_a_row"]
        return state["record"]


def _under(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
