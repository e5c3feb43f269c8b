"""The model against the loops of `loops.py`: log-probabilities, losses, memory and the gradient of every parameter."""

import copy
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch import Tensor

from tests.helpers import assert_close, default_dtype, gradients, threads, tiny_model
from tests.reference.loops import read_row
from transformer_xl.kernels import cpu_attention as matmul
from transformer_xl.model.call import Execution
from transformer_xl.model.memory import Mems
from transformer_xl.model.transformer_xl import TransformerXL

VARIANTS = {
    "paper": {},
    "pre_lnorm": {"pre_lnorm": True},
    "pre_lnorm, final_norm, gelu": {"pre_lnorm": True, "final_norm": True, "activation": "gelu", "layer_norm_epsilon": 0.3},
    "untie_r": {"untie_r": True},
    "untied softmax": {"tie_weight": False},
    "d_embed": {"d_embed": 7},
    "d_embed, untied": {"d_embed": 7, "tie_weight": False},
    "clamp_len": {"clamp_len": 3},
    "same_length": {"same_length": True},
    "same_length, clamp_len": {"same_length": True, "clamp_len": 1},
    "no memory": {"mem_len": 0},
    "long memory": {"mem_len": 6},
    "one head, relu2": {"n_head": 1, "d_head": 5, "activation": "relu2"},
    "same_length besides self": {"same_length": True, "same_length_besides_self": True},
    "zero first memory": {"zero_first_memory": True},
    "zero first memory, same_length": {"zero_first_memory": True, "same_length": True, "clamp_len": 4},
    "cutoffs": {"cutoffs": (4, 9)},
    "cutoffs, untied": {"cutoffs": (4, 9), "tie_weight": False},
    "cutoffs, d_embed": {"cutoffs": (4, 9), "d_embed": 7, "tie_projs": (False, True, True)},
    "cutoffs, div_val 2": {"cutoffs": (4, 9), "div_val": 2},
    "cutoffs, div_val 2, shared": {"cutoffs": (4, 9), "div_val": 2, "proj_share_all_but_first": True},
    "cutoffs, div_val 2, tied": {"cutoffs": (4, 9), "div_val": 2, "tie_projs": (True, True, False), "d_embed": 8},
    "cutoffs, div_val 3, untied": {"cutoffs": (3,), "div_val": 3, "tie_weight": False},
    "div_val 2, same width": {"cutoffs": (4, 9), "div_val": 2, "proj_same_dim": False},
    "div_val 2 without cutoffs": {"div_val": 2},
    "d_embed, tied projection": {"d_embed": 7, "tie_projs": (True,)},
    "averages": {"shift": "averages", "d_model": 16},
    "averages, pre_lnorm, long memory": {"shift": "averages", "d_model": 16, "pre_lnorm": True, "mem_len": 10, "untie_r": True},
    "averages, same_length": {"shift": "averages", "d_model": 16, "same_length": True, "pre_lnorm": True},
    "averages, memory of 1": {"shift": "averages", "d_model": 16, "mem_len": 1},
    "averages, no memory": {"shift": "averages", "d_model": 16, "mem_len": 0},
    "pairs, d_embed": {"ngram_rows": (196,), "d_embed": 7},
    "pairs and triples that share rows": {"ngram_rows": (30, 7), "pre_lnorm": True, "same_length": True},
    "pairs to fours, no memory": {"ngram_rows": (30, 20, 10), "mem_len": 0},
    "triples, averages": {"ngram_rows": (9, 40), "shift": "averages", "d_model": 16, "mem_len": 1},
    "gru gate, averages": {"gate": "gru", "pre_lnorm": True, "shift": "averages", "d_model": 16, "final_norm": True},
    "gru gate": {"gate": "gru", "pre_lnorm": True, "same_length": True},
}
KINDS = {
    "shaw": {"attention": "shaw", "max_klen": 20},
    "shaw, short table": {"attention": "shaw", "max_klen": 4, "pre_lnorm": True},
    "shaw, clamp_len": {"attention": "shaw", "max_klen": 9, "clamp_len": 3, "same_length": True},
    "vaswani": {"attention": "vaswani"},
    "vaswani, no memory": {"attention": "vaswani", "mem_len": 0},
    "vaswani, clamp_len": {"attention": "vaswani", "clamp_len": 2, "pre_lnorm": True},
    "al_rfou": {"attention": "al_rfou", "max_klen": 20, "n_head": 2, "d_head": 5},
    "shaw, averages": {"attention": "shaw", "max_klen": 9, "shift": "averages", "d_model": 16, "pre_lnorm": True},
    "al_rfou, averages": {"attention": "al_rfou", "max_klen": 20, "n_head": 2, "d_head": 8, "shift": "averages", "d_model": 16},
    "al_rfou, short table": {"attention": "al_rfou", "max_klen": 6, "n_head": 2, "d_head": 5, "pre_lnorm": True},
    "al_rfou, no memory": {"attention": "al_rfou", "max_klen": 9, "n_head": 2, "d_head": 5, "mem_len": 0},
    "rotary, averages": {"attention": "rotary", "mem_len": 8, "pre_lnorm": True, "shift": "averages", "d_model": 16},
    "rotary": {"attention": "rotary"},
    "rotary, pre_lnorm, same_length": {"attention": "rotary", "pre_lnorm": True, "same_length": True, "d_head": 6},
    "rotary, no memory": {"attention": "rotary", "mem_len": 0},
    "rotary, zero first memory": {"attention": "rotary", "zero_first_memory": True, "pre_lnorm": True},
    "alibi": {"attention": "alibi"},
    "alibi, clamp_len": {"attention": "alibi", "clamp_len": 3, "pre_lnorm": True, "n_head": 2},
    "alibi, no memory": {"attention": "alibi", "mem_len": 0, "n_head": 5},
    "alibi, zero first memory, same_length": {"attention": "alibi", "zero_first_memory": True, "same_length": True},
    "al_rfou, zero first memory": {"attention": "al_rfou", "max_klen": 9, "n_head": 2, "d_head": 5, "zero_first_memory": True},
}
UNEQUAL_AGES = [
    "paper",
    "same_length, clamp_len",
    "long memory",
    "averages, pre_lnorm, long memory",
    "pairs and triples that share rows",
    *("shaw, clamp_len", "vaswani", "al_rfou, short table", "rotary", "rotary, averages", "alibi, clamp_len"),
]
"""What is read by rows of which one had read before; rows of all others begin together."""
MEM_LEN = 3
SEGMENTS = [2, 4, 1]  # shorter and longer than the memory, and a single token
BACKENDS = ["equation", "matmul", "matmul, one head at a time", "sdpa"]
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}


@pytest.mark.parametrize("variant", VARIANTS)
def test_model_equals_loops(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the equation, and in fp32 as a CPU computes; where ages are unequal, by each backend."""
    model, is_unequal = tiny_model(**{"mem_len": MEM_LEN, **VARIANTS[variant]}), variant in UNEQUAL_AGES
    reading = read_by_loops(model, ages=[0, 5] if is_unequal else [0, 0])
    for backend in BACKENDS if is_unequal else BACKENDS[:1]:
        with monkeypatch.context() as patch:
            if "one head" in backend:
                patch.setattr(matmul, "_CACHED_BYTES", 1)
            compare(model, reading, torch.float64, variant, backend)
    compare(model, reading, torch.float32, variant, "matmul")


def test_two_threads_equal_loops() -> None:
    model = tiny_model(mem_len=MEM_LEN)
    reading = read_by_loops(model, ages=[0, 2])
    with threads(2):
        compare(model, reading, torch.float64, "two threads", "matmul")


@pytest.mark.parametrize("kind", KINDS)
def test_other_kinds_of_attention_equal_loops(kind: str) -> None:
    model = tiny_model(**{"mem_len": MEM_LEN, **KINDS[kind]})
    reading = read_by_loops(model, ages=[0, 5] if kind in UNEQUAL_AGES else [0, 0])
    for dtype in TOLERANCE:
        compare(model, reading, dtype, kind)


@dataclass
class Segment:
    """The ids read, (rows, tokens), and for each row the loops' results: (tokens, V), (tokens,) and each layer's memory."""

    ids: Tensor
    labels: Tensor
    log_probabilities: list[Tensor]
    nll: list[Tensor]
    memories: list[list[list[Tensor]]]


@dataclass
class Reading:
    """What rows read before, the segments that they read together, and the gradient of every parameter."""

    past: list[Tensor]
    segments: list[Segment]
    gradients: dict[str, Tensor]


def read_by_loops(model: TransformerXL, *, ages: list[int]) -> Reading:
    """Read random segments with the loops in fp64, row by row; row b has read ages[b] tokens before."""
    with default_dtype(torch.float64):
        config = model.config
        assert config.vocab_size is not None
        w = {name: p.detach().double().requires_grad_() for name, p in model.named_parameters()}
        past = [torch.randint(config.vocab_size, (1, age)) for age in ages]
        memories = []
        for ids in past:
            zeros = [torch.zeros(config.d_model)] * config.mem_len if config.zero_first_memory else []
            memory = [list(zeros) for _ in range(config.n_layer)]
            with torch.no_grad():
                memories.append(read_row(ids[0].tolist(), memory, w, config)[1] if ids.numel() else memory)
        segments, total, before = [], torch.zeros(()), [ids[0].tolist() for ids in past]
        for T in SEGMENTS:
            ids, labels = torch.randint(config.vocab_size, (2, len(ages), T))
            rows = [read_row(*row, w, config, known) for *row, known in zip(ids.tolist(), memories, before, strict=True)]
            memories = [memory for _, memory in rows]
            before = [[*known, *row] for known, row in zip(before, ids.tolist(), strict=True)]
            nll = [-expected.gather(1, labels[b][:, None])[:, 0] for b, (expected, _) in enumerate(rows)]
            total = total + weighted(torch.stack(nll))
            segments.append(Segment(ids, labels, [row.detach() for row, _ in rows], [n.detach() for n in nll], memories))
        total.backward()
    return Reading(past, segments, {name: p.grad for name, p in w.items() if p.grad is not None})


def compare(model: TransformerXL, reading: Reading, dtype: torch.dtype, what: str, backend: str = "auto") -> None:
    """Read the same with the model, all rows in one batch."""
    tolerance, what = TOLERANCE[dtype], f"{what}, {backend}, {dtype}"
    with default_dtype(dtype):
        model = copy.deepcopy(model).to(dtype)
        read = partial(model, execution=Execution(backend.partition(",")[0]))
        starts = [model.init_mems(1) for _ in reading.past]
        mems = Mems.concatenate(
            [read(ids, mems=start).mems if ids.numel() else start for ids, start in zip(reading.past, starts, strict=True)]
        )
        total = torch.zeros(())
        for segment in reading.segments:
            out = read(segment.ids, mems=mems, labels=segment.labels)
            with torch.no_grad():
                logits = read(segment.ids, mems=mems).logits.log_softmax(-1)
            mems, total = out.mems, total + weighted(out.nll)
            for b, memory in enumerate(segment.memories):
                assert_close(f"{what}: log-probabilities", logits[b].double(), segment.log_probabilities[b], tolerance)
                assert_close(f"{what}: nll", out.nll[b].double(), segment.nll[b], tolerance)
                n_valid = int(mems.n_valid[b])
                assert n_valid == max(map(len, memory))
                for hidden, expected in zip(mems.hidden, memory, strict=True):
                    if n_valid:
                        own = hidden[b, -min(n_valid, hidden.shape[1]) :].double()
                        assert_close(f"{what}: memory", own, torch.stack(expected), tolerance)
        total.backward()
    assert reading.gradients.keys() == dict(model.named_parameters()).keys()
    for name, gradient in gradients(model).items():
        assert_close(f"{what}: gradient of {name}", gradient.double(), reading.gradients[name], tolerance)


def weighted(nll: Tensor) -> Tensor:
    """Sum losses (rows, tokens) with a different weight for each, so that swapped losses change the sum."""
    return (nll * torch.arange(1.0, nll.shape[1] + 1)).sum()
