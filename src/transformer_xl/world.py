"""Processes that work together, and how they exchange data. A single process works with the same interface.

`torchrun` starts the processes. They exchange tensors and JSON through PyTorch's collectives, never pickles. Every wait has a
limit, so that no process waits forever for one that died.
"""

import atexit
import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, TypeVar, cast
from uuid import uuid4

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from transformer_xl.errors import (
    ConfigError,
    LostContactError,
    ToldElsewhereError,
    TrainingError,
    TxlError,
    counted,
    message_of,
    one_line,
)
from transformer_xl.process import note_meeting

TIMEOUT_VARIABLE = "TXL_TIMEOUT_SECONDS"
_groups: list[Any] = []

Items = TypeVar("Items", bound=Sequence[Any])


class World:
    """All processes that work together, as seen from one of them."""

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank, self.size = rank, size

    @property
    def first(self) -> bool:
        """True in the process that prints and writes files for all."""
        return self.rank == 0

    @property
    def alone(self) -> bool:
        """True if there is no other process."""
        return self.size == 1

    def sum(self, *values: float) -> tuple[float, ...]:
        """Return the sums of the values over all processes, computed in float64; the same bits in all processes."""
        if self.alone:
            return tuple(map(float, values))
        total = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(total)
        return tuple(total.tolist())

    def add_(self, tensor: Tensor) -> None:
        """Replace the numbers of a CPU tensor by their sums over all processes."""
        if not self.alone:
            dist.all_reduce(tensor)

    def any(self, value: object) -> bool:
        """Return whether the value is true in any process."""
        return self.sum(bool(value))[0] > 0

    def exchange(self, value: Any) -> list[Any]:
        """Return the JSON values of all processes, by rank."""
        if self.alone:
            return [value]
        data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(sizes, torch.tensor([len(data)]))
        longest = max(int(size) for size in sizes)
        received = [torch.zeros(longest, dtype=torch.uint8) for _ in range(self.size)]
        dist.all_gather(received, torch.cat([data, data.new_zeros(longest - len(data))]))
        return [json.loads(part[: int(size)].numpy().tobytes()) for part, size in zip(received, sizes, strict=True)]

    def from_first(self, value: Any) -> Any:
        """Return the value of the first process; the values of the others are ignored."""
        return self.exchange(value if self.first else None)[0]

    def rows(self, tensor: Tensor) -> Tensor | None:
        """Return the rows of all processes by rank, on the CPU, in the first process; None in the others.

        `tensor` has the same shape (rows, …) and type in all processes. A single process gets it back unchanged.
        """
        if self.alone:
            return tensor
        own = tensor.detach().cpu().contiguous()
        received = [torch.zeros_like(own) for _ in range(self.size)] if self.first else None
        dist.gather(own, received)
        return torch.cat(received) if received else None

    @contextmanager
    def agreed(self) -> Iterator[None]:
        """Make a block that all processes run fail in all of them if it fails in any.

        Raises:
            TxlError: in the first process, the error of the lowest rank; in the others, `ToldElsewhereError`.
            OSError: it is the first process's error.
        """
        if self.alone:
            yield
            return
        own: TxlError | OSError | None = None
        try:
            yield
        except ToldElsewhereError:
            raise
        except (TxlError, OSError) as error:
            own = error
        messages = self.exchange(own and message_of(own))
        failed = [rank for rank, message in enumerate(messages) if message is not None]
        if not failed:
            return
        if not self.first:
            raise ToldElsewhereError(f"rank {failed[0]}: {messages[failed[0]]}") from own
        raise own or TrainingError(f"rank {failed[0]} of {self.size}: {messages[failed[0]]}")

    def check_device(self, device: torch.device) -> None:
        """Refuse a GPU that belongs to another process, because two processes on one GPU would wait for each other forever."""
        n_gpu, own = torch.cuda.device_count(), int(os.environ.get("LOCAL_RANK", "0"))
        if self.alone or device.type != "cuda" or (own < n_gpu and device.index in (None, own)):
            return
        raise ConfigError(
            f"process {own} cannot use {device}: this machine has {counted(n_gpu, 'GPU')}, and each process needs one of "
            "its own; use train.device=cuda and --nproc-per-node of as many at most, or train.device=cpu"
        )

    def check_same(self, **values: Any) -> None:
        """Raise an error if JSON values differ between processes, dicts key by key. Pass hashes of large values."""
        everyone = [_flat(each) for each in self.exchange(values)]
        with self.agreed():
            for rank, theirs in enumerate(everyone):
                for name in sorted({*everyone[0], *theirs}):
                    ours, other = everyone[0].get(name), theirs.get(name)
                    if ours != other:
                        raise ConfigError(
                            f"{name} is {other!r} in rank {rank} and {ours!r} in rank 0; "
                            "start all processes with the same command, settings, files and version"
                        )


@contextmanager
def joined() -> Iterator[World]:
    """Connect to the processes that `torchrun` started, while the block runs; without `torchrun`, work alone.

    A wait for other processes ends after half an hour, or after `TXL_TIMEOUT_SECONDS` (an environment variable).
    """
    try:
        rank, size, local_rank = (
            int(os.environ.get(name, default)) for name, default in (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0"))
        )
        seconds = float(os.environ.get(TIMEOUT_VARIABLE, "1800"))
    except ValueError as error:
        raise ConfigError(
            f"RANK, WORLD_SIZE, LOCAL_RANK and {TIMEOUT_VARIABLE} must be numbers ({error}); use torchrun"
        ) from None
    if size == 1:
        yield World()
        return
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
    if missing or not 0 <= rank < size:
        wrong = f"without {', '.join(missing)}" if missing else f"and RANK {rank}"
        raise ConfigError(f"WORLD_SIZE is {size} {wrong}; use torchrun, or unset WORLD_SIZE to work alone")
    world = World(rank, size)
    with _contact():
        if not dist.is_initialized():
            _initialize(world, local_rank, seconds)
        yield world
        world.exchange("done")  # so that no process ends before the others have received what it sent


@contextmanager
def _contact() -> Iterator[None]:
    """Turn PyTorch's errors about dead or late processes into a `LostContactError`; even an optimizer may raise one."""
    try:
        yield
    except RuntimeError as error:
        text = one_line(error)
        signs = ("gloo", "nccl", "connection", "timed out", "timeout", "broken pipe", "socket", "process group")
        if not (isinstance(error, dist.DistError) or any(sign in text.lower() for sign in signs)):
            raise
        raise LostContactError(
            f"lost contact with another process ({text[:200]}); its own message, if it left one, says why. "
            "A run that was being trained continues from its last checkpoint with --resume"
        ) from error


def _initialize(world: World, local_rank: int, seconds: float) -> None:
    """Connect to the other processes, once in the life of this one."""
    backend = "gloo"
    if local_rank < torch.cuda.device_count():
        torch.cuda.set_device(local_rank)
        backend = "cpu:gloo,cuda:nccl"
    limit = timedelta(seconds=seconds)
    store, _, _ = next(rendezvous("env://", world.rank, world.size, timeout=limit))
    place = _meeting_place(store, world, seconds)
    dist.init_process_group(backend, store=PrefixStore(place, store), rank=world.rank, world_size=world.size, timeout=limit)
    # Freeing a group holds the interpreter's lock and waits for the group's thread, which may be waiting for that lock. So this
    # list keeps the group until the interpreter has ended, when its thread has long been idle.
    _groups.append(dist.group.WORLD)
    note_meeting()
    atexit.register(_leave)


def _meeting_place(store: Store, world: World, seconds: float) -> str:
    """Agree on a new name in the store.

    When `torchrun` restarts processes it keeps its store, which still has the addresses of the dead ones. So each process asks
    the first one under a new name, and the first one answers until all processes have the answer.
    """
    if not world.first:
        own = uuid4().hex
        store.set(f"txl/asks/{world.rank}", own)
        place = store.get(f"txl/answer/{own}").decode()
        store.set(f"{place}/heard/{world.rank}", "")
        return place
    place, missing, end = f"txl/{uuid4().hex}", set(range(1, world.size)), time.monotonic() + seconds
    while missing:
        for rank in [rank for rank in missing if store.check([f"txl/asks/{rank}"])]:
            store.set(f"txl/answer/{store.get(f'txl/asks/{rank}').decode()}", place)
        missing -= {rank for rank in missing if store.check([f"{place}/heard/{rank}"])}
        if time.monotonic() > end:
            absent = ", ".join(map(str, sorted(missing)[:8]))
            raise LostContactError(f"of {world.size} processes, rank {absent} did not come within {seconds:g} seconds")
        time.sleep(0.01)
    return place


def _leave() -> None:
    with suppress(RuntimeError, ValueError):  # other processes may have died
        dist.destroy_process_group()


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested values under dotted names."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


def parts(items: Items, world: World) -> Items:
    """Return this process's part of a sequence. Parts are consecutive by rank; their lengths differ by at most one.

    Example:
        >>> [parts("abcdefg", World(rank, 3)) for rank in range(3)]
        ['abc', 'de', 'fg']
    """
    size, more = divmod(len(items), world.size)
    begin = world.rank * size + min(world.rank, more)
    return cast("Items", items[begin : begin + size + (world.rank < more)])
