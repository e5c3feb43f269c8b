"""One model in several processes: a whole one in each (DDP), or a part of it in each (FSDP2)."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from transformer_xl.config.run import Parallelism
from transformer_xl.kernels.device import Precision, autocast
from transformer_xl.model.base import SequenceModel
from transformer_xl.model.call import ModelOutput
from transformer_xl.world import World


class _Loss(nn.Module):
    """A model's `loss` as a module's call, which is what DDP wraps."""

    def __init__(self, model: SequenceModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Any, **how: Any) -> ModelOutput:
        return self.model.loss(*args, **how)


class Parallel:
    """Calls a model so that a backward pass leaves the mean gradient of all processes in each.

    With `ddp`, each process holds all weights, gradients and optimizer states. With `fsdp`, each holds a part of every tensor
    and fetches the other parts layer by layer, so the model need not fit into one device's memory. `fsdp` changes the model in
    place, and moves it to the device layer by layer.

    Attributes:
        loss: what the model's `loss` is, for all processes.
    """

    def __init__(
        self, model: SequenceModel, world: World, *, how: Parallelism, precision: Precision, device: torch.device
    ) -> None:
        self.model = model
        self.loss: Callable[..., ModelOutput] = model.loss
        if how == "fsdp" and not world.alone:
            _shard(model, world, precision, device)
            return
        model.to(device)
        if not world.alone:
            self.loss = DistributedDataParallel(_Loss(model), gradient_as_bucket_view=True)
            self._order_buckets(precision)

    def _order_buckets(self, precision: Precision) -> None:
        """Run a backward pass, after which DDP packs and adds gradients in the order in which they came.

        Otherwise the first step would fix this order, and so would the first step of a resumed run. With three or more
        processes, the resumed run would then have other bits than a run that was not interrupted.
        """
        # without this list, fork_rng warns of many GPUs and touches all of them
        devices = [self.model.device] if self.model.device.type == "cuda" else []
        with torch.random.fork_rng(devices), autocast(self.model.device, precision):
            out = self.loss(self.model.smallest_batch(), mems=None)
            out.loss.backward()
        self.model.zero_grad()

    @contextmanager
    def group(self, *, last: bool) -> Iterator[None]:
        """Compute loss and gradients of one group of lanes; the processes exchange gradients only with the last group."""
        waits: Any = nullcontext()
        if isinstance(self.loss, DistributedDataParallel) and not last:
            waits = self.loss.no_sync()
        elif isinstance(self.model, FSDPModule):
            self.model.set_requires_gradient_sync(last)
        with waits:
            yield


def _shard(model: SequenceModel, world: World, precision: Precision, device: torch.device) -> None:
    """Divide each layer, then the rest of the model, over all processes. Each moves to the device just before."""
    mesh = init_device_mesh(device.type, (world.size,))
    # Layers are sent in the type of the matrix products; gradients are added in fp32. Embedding and softmax stay fp32, and so
    # do the states that layers add to. On a CPU, layer norm needs fp32 weights for fp32 states.
    narrow = precision == "bf16" and device.type == "cuda"
    sent = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if narrow else None, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    # losses and memories are views, but nothing changes them in place
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=sent)
    fully_shard(model, mesh=mesh)


def whole(tensors: dict[str, Tensor], world: World) -> dict[str, Tensor]:
    """Return whole tensors; divided ones are put together on the CPU.

    All processes call it. Only the first one gets the tensors, because a machine may have memory for only one copy.
    """
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        together = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if world.first:
            found[name] = together.cpu() if isinstance(tensor, DTensor) else together
    return found


def own_part(tensor: Tensor, like: Tensor) -> Tensor:
    """Return a whole tensor on the device of `like`, or the same part of it if `like` is divided."""
    if not isinstance(like, DTensor):
        return tensor.to(like.device)
    return distribute_tensor(tensor.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


def local(tensor: Tensor) -> Tensor:
    """Return the part of a tensor that this process holds."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
