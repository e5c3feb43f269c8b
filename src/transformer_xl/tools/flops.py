"""What a training pass computes and keeps: the model itself reads segments without numbers, and is watched.

The pass runs on the meta device, in fp32 and without dropout. `torch.utils.flop_counter` counts its matrix products, a
multiplication and an addition as two; sums, norms and softmaxes are left out. Autograd's hooks show what the backward pass
reads.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from transformer_xl.batch import Batch
from transformer_xl.config.model import ModelConfig
from transformer_xl.model.base import LanguageModel
from transformer_xl.model.build import make_blueprint
from transformer_xl.model.call import Execution
from transformer_xl.model.transformer_xl import TransformerXL


@dataclass(frozen=True)
class PassCost:
    """A forward and backward pass over segments of several lanes, whose memory is full."""

    forward: float  # FLOPs of a token
    backward: float
    kept: int  # bytes that the backward pass reads besides weights and memory
    largest: int  # of one tensor among them
    memory: int  # bytes of the memory before the pass

    @property
    def flops(self) -> float:
        """FLOPs of a token, without any that are repeated to save memory."""
        return self.forward + self.backward


def count_pass(model: LanguageModel, *, rows: int, tgt_len: int, segments: int = 1) -> PassCost:
    """Count a pass of a model on the meta device over `segments` of `tgt_len` tokens in each of `rows` lanes.

    Example:
        >>> from transformer_xl.config.model import LstmConfig
        >>> count_pass(blueprint_of(LstmConfig(vocab_size=16, n_layer=1, d_model=4)), rows=2, tgt_len=8).flops
        1136.0
    """
    # Of few rows, because the products of many are split and their scores computed twice. The layers project what does not
    # depend on rows, such as the keys of distances, once for all of them.
    one, two = (_watch(model, n, tgt_len, segments, "equation") for n in (1, 2))
    n_token = rows * tgt_len * segments
    forward, backward = ((a + (rows - 1) * (b - a)) / n_token for a, b in zip(one[:2], two[:2], strict=True))
    _, _, sizes = _watch(model, rows, tgt_len, segments, "matmul")  # keeps no attention weights, as fused kernels do not
    memory = sum(x.nbytes for x in model.init_mems(rows).state_dict().values())
    return PassCost(forward, backward, sum(sizes), max(sizes, default=0), memory)


def blueprint_of(config: ModelConfig) -> LanguageModel:
    """Return a language model of complete settings on the meta device."""
    return cast(LanguageModel, make_blueprint(config)).eval()


def _watch(model: LanguageModel, rows: int, tgt_len: int, segments: int, backend: str) -> tuple[int, int, list[int]]:
    """Return the FLOPs of the forward and the backward pass, and the sizes of what is kept between them."""
    ids = torch.zeros(rows, tgt_len, dtype=torch.int64, device="meta")
    mems: Any = model.init_mems(rows)
    known = {_storage_of(x) for x in (*model.parameters(), *mems.state_dict().values())}
    kept: dict[int, torch.UntypedStorage] = {}  # holding a storage keeps its place from being used again

    def keep(x: Tensor) -> Tensor:
        if _storage_of(x) not in known:
            kept[_storage_of(x)] = x.untyped_storage()
        return x

    config = model.config
    shares = zipf_shares(getattr(config, "cutoffs", ()), config.vocab_size or 1)
    sizes = tuple(math.ceil(rows * tgt_len * share) for share in shares[1:]) or None
    execution = Execution(backend if isinstance(model, TransformerXL) else "auto", tail_sizes=sizes)
    losses = []
    with FlopCounterMode(display=False) as counter, torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        for _ in range(segments):
            out = model.loss(Batch(ids, ids), mems=mems, execution=execution, keep_graph=segments > 1)
            assert out.nll is not None
            mems = out.mems
            losses.append(out.nll.sum())
        forward = counter.get_total_flops()
        torch.stack(losses).sum().backward()
    model.zero_grad()
    return forward, counter.get_total_flops() - forward, [storage.nbytes() for storage in kept.values()]


def _storage_of(x: Tensor) -> int:
    return x.untyped_storage()._cdata  # of the meta device, all of which begin at address 0


def zipf_shares(cutoffs: Sequence[int], vocab_size: int) -> tuple[float, ...]:
    """Return the share of tokens in each cluster if the k-th most frequent token has a frequency proportional to 1/k.

    Example:
        >>> [round(share, 2) for share in zipf_shares((20_000, 40_000, 200_000), 267_735)]
        [0.8, 0.05, 0.12, 0.02]
    """
    borders = [*cutoffs, vocab_size]
    sums = [math.log(border) + 0.5772 + 0.5 / border for border in borders]  # of 1/k, up to each border
    return tuple((high - low) / sums[-1] for low, high in zip([0.0, *sums[:-1]], sums, strict=True))
