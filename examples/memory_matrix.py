"""A kind of memory from outside the package: what leaves it is written into a matrix per head, by the delta rule.

    python examples/memory_matrix.py         # how far back it recalls, and how far a plain memory of as many bytes
    txl train TEXT --import examples/memory_matrix.py --set model.kind=memory_matrix --set model.shift=none

    read     what attention gathered + g ⊙ norm(φ(q) S / (φ(q)·z))         φ = ELU + 1; norm: to a mean square of 1
    write    S ← S + Σ φ(k)ᵀ (v - φ(k) S / (φ(k)·z))   z ← z + Σ φ(k)      over what no later segment sees

Sources: Munkhdalai et al. 2024 (arXiv 2404.07143), section 2.1; the norm is from RAttention (arXiv 2506.15545). Keys have no
positions. z is kept as one more column of S.

Shapes: B batch, T tgt_len, M memory, S = M + T keys, N heads, H d_head, Z = H + 1, D d_model.
"""

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import transformer_xl as txl
from transformer_xl.batch import Rows
from transformer_xl.errors import ConfigError
from transformer_xl.kernels.device import at_least_fp32
from transformer_xl.model.base import SequenceModel
from transformer_xl.model.build import make_model
from transformer_xl.model.call import Execution
from transformer_xl.model.layers import DecoderLayer
from transformer_xl.model.mask import Mask
from transformer_xl.model.memory import remembered


class MatrixConfig(txl.TransformerXLConfig):
    kind: ClassVar[str] = "memory_matrix"


@dataclass(frozen=True, repr=False)
class MatrixMems(txl.Mems):
    """The hidden states that a Transformer-XL keeps, and for each layer a matrix (B, N, H, Z) of what left them."""

    matrices: tuple[Tensor, ...] = ()

    def state_dict(self) -> dict[str, Tensor]:
        return {**super().state_dict(), **{f"matrices.{i}": x for i, x in enumerate(self.matrices)}}

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Tensor]) -> Self:
        own = txl.Mems.from_state_dict(state)
        return cls(own.hidden, own.n_valid, own.tokens, tuple(state[f"matrices.{i}"] for i in range(len(own.hidden))))


class MatrixLayer(DecoderLayer):
    """A layer that reads its matrix, too, and returns the matrix with what leaves the memory after the segment."""

    def __init__(self, layer: Any) -> None:
        super().__init__(layer.attention, layer.feed_forward)
        self.scale = nn.Parameter(torch.ones(layer.attention.n_head * layer.attention.d_head))

    def forward(self, h_BTD: Tensor, *, mem_BMD: Tensor, matrix_BNHZ: Tensor, rows: tuple[Tensor, Tensor], **seen: Any) -> Any:
        block: Any = self.attention
        goes_on_BT, leaves_BS = rows
        q, k, v = block.project(h_BTD, mem_BMD, seen["mask"].n_pad)
        attended = block.attend(q, k, v, **seen | {"positions": block.complete(seen["positions"])})
        with torch.autocast(h_BTD.device.type, enabled=False):
            read = mean(F.elu(at_least_fp32(q)) + 1, matrix_BNHZ).where(goes_on_BT[..., None, None], 0.0)
            added = F.rms_norm(read, read.shape[-1:], eps=1e-6) * self.scale.view(read.shape[2:])
            matrix_BNHZ = matrix_BNHZ.where(goes_on_BT[:, -1, None, None, None], 0.0)  # of another document
            weight = (F.elu(at_least_fp32(k)) + 1).where(leaves_BS[..., None, None], 0.0)
            news = F.pad(at_least_fp32(v) - mean(weight, matrix_BNHZ), (0, 1), value=1.0)
            matrix_BNHZ = matrix_BNHZ + torch.einsum("bsnh,bsnz->bnhz", weight, news)
        return self.feed_forward(block.add(h_BTD, attended + added.to(attended.dtype))), matrix_BNHZ


def mean(weight_BTNH: Tensor, matrix_BNHZ: Tensor) -> Tensor:
    """Return what a matrix says of keys, (B, T, N, H); 0 where it knows nothing."""
    total = torch.einsum("btnh,bnhz->btnz", weight_BTNH, matrix_BNHZ)
    return total[..., :-1] / total[..., -1:].where(total[..., -1:] > 0, 1.0)


class MatrixTransformerXL(txl.TransformerXL):
    kind = MatrixConfig.kind

    def __init__(self, config: MatrixConfig) -> None:
        super().__init__(config)
        wrong = {"shift": config.shift != "none", "same_length": config.same_length, "mem_len": not config.mem_len}
        wrong |= {"zero_first_memory": config.zero_first_memory, "attention": self.attention_kind.counts_from_end}
        if faults := [f"model.{name}={getattr(config, name)}" for name, is_wrong in wrong.items() if is_wrong]:
            raise ConfigError(f"model.kind={self.kind} cannot work with {', '.join(faults)}")
        self.layers = nn.ModuleList(map(MatrixLayer, self.layers))

    @property
    def carries_state(self) -> bool:
        return self.mem_len > 0  # so that a token is read after its state alone

    def reach(self, tgt_len: int) -> int:
        return super().reach(tgt_len) + -(-4096 // tgt_len) * tgt_len  # it has no end; so many tokens say enough

    def init_mems(self, batch_size: int, *, length: int | None = None) -> MatrixMems:
        own, H = super().init_mems(batch_size, length=length), self.config.d_head
        empty = at_least_fp32(torch.zeros(batch_size, self.config.n_head, H, H + 1, dtype=self.dtype, device=self.device))
        return MatrixMems(own.hidden, own.n_valid, own.tokens, (empty,) * self.config.n_layer)

    def read(  # pyright: ignore[reportIncompatibleMethodOverride]  # it gets its own memory back
        self,
        ids: Tensor,
        *,
        mems: MatrixMems | None = None,
        rows: Rows = Rows(),
        execution: Execution = Execution(),
        keep_graph: bool = False,
    ) -> tuple[Tensor, MatrixMems]:
        mems = self.init_mems(len(ids), length=0) if mems is None else mems
        S, n_pad, starts = mems.length + ids.shape[1], rows.n_pad, rows.document_starts
        mask = Mask.of(starts, mems.n_valid, n_pad, tgt_len=ids.shape[1], memory_length=mems.length)
        age_S = torch.arange(S, 0, -1, device=ids.device)
        leaves_BS = (age_S <= mask.n_own[:, None]) & (age_S > self.ext_len + self.mem_len)
        goes_on_BT = torch.ones_like(ids, dtype=torch.bool) if starts is None else starts.cumsum(1) == 0
        positions, backend = self.positions(S), self.backend(execution.backend, self.device)
        h_BTD, tokens = self.embed_after(mems, ids, rows)
        kept: dict[str, Any] = {"mem_len": self.mem_len, "ext_len": self.ext_len, "keep_graph": keep_graph}
        hidden, matrices, run = [], [], cast(Any, execution.run)  # these layers return more than a tensor
        for i, layer in enumerate(self.layers):
            mem_BMD, h_BTD = self.enter(i, mems.hidden[i], h_BTD, positions[i], n_pad)
            hidden.append(remembered(mem_BMD, h_BTD, n_pad, **kept))
            seen = {"mem_BMD": mem_BMD, "matrix_BNHZ": mems.matrices[i], "rows": (goes_on_BT, leaves_BS)}
            h_BTD, matrix = run(layer, h_BTD, **seen, mask=mask, positions=positions[i], backend=backend)
            matrices.append(matrix if keep_graph else matrix.detach())
        n_valid = (mask.n_own - self.ext_len).clamp(min=0, max=hidden[0].shape[1])
        new = MatrixMems(tuple(hidden), n_valid, tokens, tuple(matrices)) if self.mem_len else self.init_mems(len(ids))
        return self.final_norm(h_BTD), new


txl.register_model(MatrixConfig, MatrixTransformerXL)

# the task: pairs of a key and a value, then other tokens, then the keys in another order

N_KEY, N_VALUE, N_OTHER, N_PAIR, WINDOW = 16, 16, 8, 8, 16  # WINDOW: positions of memory, and tokens of a segment
SIZES: dict[str, Any] = {"vocab_size": 40, "n_layer": 2, "d_model": 64, "n_head": 2, "d_head": 32, "d_inner": 128}
SIZES |= {"dropout": 0.0, "pre_lnorm": True, "final_norm": True, "ngram_rows": (41**2,)}  # a row for every pair of tokens


def texts(n: int, distance: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return ids (n, L) of texts with `distance` tokens between pairs and questions, and labels: what follows each key."""
    keys, order = (torch.rand(n, size, generator=generator).argsort(dim=1)[:, :N_PAIR] for size in (N_KEY, N_PAIR))
    values = N_KEY + torch.randint(N_VALUE, (n, N_PAIR), generator=generator)
    between = N_KEY + N_VALUE + torch.randint(N_OTHER, (n, distance), generator=generator)
    asked = torch.stack([keys.gather(1, order), values.gather(1, order)], dim=2).flatten(1)
    ids = torch.cat([torch.stack([keys, values], dim=2).flatten(1), between, asked], dim=1)
    labels = torch.full_like(ids, -100)
    labels[:, -2 * N_PAIR :: 2] = ids[:, 1 - 2 * N_PAIR :: 2]
    return ids, labels


def read(model: SequenceModel, ids: Tensor, labels: Tensor, *, keep_graph: bool) -> tuple[Tensor, Tensor]:
    """Read texts segment by segment; return the nats of all answers, and which of them are right."""
    mems, nats, right = None, [], []
    for piece, answers in zip(ids.split(WINDOW, dim=1), labels.split(WINDOW, dim=1), strict=True):
        out = model(piece, mems=mems, keep_graph=keep_graph)
        mems, asked = out.mems, answers >= 0
        nats.append(F.cross_entropy(out.logits[asked], answers[asked], reduction="none"))
        right.append(out.logits[asked].argmax(dim=1) == answers[asked])
    return torch.cat(nats), torch.cat(right)


def train(model: SequenceModel, n_step: int, generator: torch.Generator) -> None:
    """Train on texts with at most 96 tokens between, near ones first."""
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.01)
    for step in range(n_step):
        optimizer.param_groups[0]["lr"] = 5e-3 * min(1, (step + 1) / 50) * (1 - step / n_step)
        distance = int(torch.randint(min(8 + step // 8, 96) + 1, (), generator=generator))
        nats, _ = read(model.train(), *texts(32, distance, generator), keep_graph=True)
        nats.mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2_000, help="of 32 texts (default: %(default)s)")
    parser.add_argument("--distances", type=int, nargs="+", default=[32, 100, 320, 1_000, 3_200], help="default: 32 to 3,200")
    options = parser.parse_args()
    as_large = make_model(MatrixConfig(**SIZES, mem_len=WINDOW)).init_mems(1).n_bytes // (4 * 2 * 64)  # in positions
    for config in (MatrixConfig(**SIZES, mem_len=WINDOW), txl.TransformerXLConfig(**SIZES, mem_len=as_large)):
        torch.manual_seed(0)
        generator, model = torch.Generator().manual_seed(1), make_model(config)
        train(model, options.steps, generator)
        with torch.no_grad():
            right = {n: read(model.eval(), *texts(64, n, generator), keep_graph=False)[1] for n in options.distances}
        shares = ", ".join(f"{n:,} tokens: {own.float().mean():.2f}" for n, own in right.items())
        print(f"{config.kind}, {model.init_mems(1).n_bytes:,} bytes of memory; recalled after {shares}", flush=True)


if __name__ == "__main__":
    main()
