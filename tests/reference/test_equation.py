"""The model against the loops of `loops.py`: log-probabilities, losses, memory and the gradient of every parameter."""

import pytest
import torch

from tests.helpers import assert_close, tiny_model
from tests.reference.loops import read_row
from transformer_xl.model.backends import matmul
from transformer_xl.model.memory import Mems

VARIANTS = {
    "paper": {},
    "pre_lnorm": {"pre_lnorm": True},
    "pre_lnorm, final_norm, gelu": {"pre_lnorm": True, "final_norm": True, "activation": "gelu"},
    "relu2": {"activation": "relu2"},
    "untie_r": {"untie_r": True},
    "untied softmax": {"tie_weight": False},
    "d_embed": {"d_embed": 7},
    "d_embed, untied": {"d_embed": 7, "tie_weight": False},
    "clamp_len": {"clamp_len": 3},
    "clamp_len 1": {"clamp_len": 1},
    "same_length": {"same_length": True},
    "same_length, clamp_len": {"same_length": True, "clamp_len": 2},
    "no memory": {"mem_len": 0},
    "long memory": {"mem_len": 11},
    "one head": {"n_head": 1, "d_head": 5},
    "same_length besides self": {"same_length": True, "same_length_besides_self": True},
    "zero first memory": {"zero_first_memory": True},
    "zero first memory, same_length": {"zero_first_memory": True, "same_length": True, "clamp_len": 4},
    "layer_norm_epsilon": {"layer_norm_epsilon": 0.3, "pre_lnorm": True, "final_norm": True},
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
}
KINDS = {
    "shaw": {"attention": "shaw", "max_klen": 20},
    "shaw, short table": {"attention": "shaw", "max_klen": 4, "pre_lnorm": True},
    "shaw, clamp_len": {"attention": "shaw", "max_klen": 9, "clamp_len": 3, "same_length": True},
    "vaswani": {"attention": "vaswani"},
    "vaswani, no memory": {"attention": "vaswani", "mem_len": 0},
    "vaswani, clamp_len": {"attention": "vaswani", "clamp_len": 2, "pre_lnorm": True},
    "al_rfou": {"attention": "al_rfou", "max_klen": 20, "n_head": 2, "d_head": 5},
    "al_rfou, short table": {"attention": "al_rfou", "max_klen": 6, "n_head": 2, "d_head": 5, "pre_lnorm": True},
    "al_rfou, no memory": {"attention": "al_rfou", "max_klen": 9, "n_head": 2, "d_head": 5, "mem_len": 0},
    "al_rfou, zero first memory": {"attention": "al_rfou", "max_klen": 9, "n_head": 2, "d_head": 5, "zero_first_memory": True},
}
SEGMENTS = [3, 7, 1, 4]  # shorter and longer than the memory, and a single token


@pytest.mark.parametrize("backend", ["equation", "matmul", "matmul, one head at a time", "sdpa"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-10)])
@pytest.mark.parametrize("variant", VARIANTS)
def test_model_equals_loops(variant, dtype, tolerance, backend, monkeypatch):
    torch.set_default_dtype(dtype)
    try:
        model = tiny_model(**VARIANTS[variant])
        model.backend = backend.partition(",")[0]
        if "one head" in backend:
            monkeypatch.setattr(matmul, "_CACHED_BYTES", 1)
        compare(model, SEGMENTS, ages=[0, 0, 0], tolerance=tolerance)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-10)])
@pytest.mark.parametrize("kind", KINDS)
def test_other_kinds_of_attention_equal_loops(kind, dtype, tolerance):
    torch.set_default_dtype(dtype)
    try:
        compare(tiny_model(**KINDS[kind]), SEGMENTS, ages=[0, 0, 0], tolerance=tolerance)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("kind", ["shaw", "shaw, clamp_len", "vaswani", "al_rfou", "al_rfou, short table"])
def test_rows_of_unequal_age_equal_loops_for_other_kinds(kind):
    torch.set_default_dtype(torch.float64)
    try:
        compare(tiny_model(**KINDS[kind]), SEGMENTS, ages=[0, 4, 9, 1], tolerance=1e-10)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("backend", ["equation", "matmul", "sdpa"])
@pytest.mark.parametrize("variant", ["paper", "pre_lnorm", "same_length, clamp_len", "long memory", "untie_r"])
def test_rows_of_unequal_age_equal_loops(variant, backend):
    torch.set_default_dtype(torch.float64)
    try:
        model = tiny_model(**VARIANTS[variant])
        model.backend = backend
        compare(model, SEGMENTS, ages=[0, 4, 9, 1], tolerance=1e-10)
    finally:
        torch.set_default_dtype(torch.float32)


def compare(model, segments, *, ages, tolerance):
    """Read segments with the model in one batch and with the loops row by row; row b has read ages[b] tokens before."""
    config = model.config
    w = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    rows, memories = [], []
    for age in ages:
        zeros = [torch.zeros(config.d_model)] * config.mem_len if config.zero_first_memory else []
        memory, mems = [list(zeros) for _ in range(config.n_layer)], model.init_mems(1)
        if age:
            past = torch.randint(config.vocab_size, (1, age))
            _, memory = read_row(past[0].tolist(), memory, w, config)
            mems = model(past, mems=mems).mems
        rows.append(mems)
        memories.append(memory)
    mems = Mems.concatenate(rows)

    total, expected_total = 0.0, 0.0
    for T in segments:
        ids = torch.randint(config.vocab_size, (len(ages), T))
        labels = torch.randint(config.vocab_size, (len(ages), T))
        out = model(ids, mems=mems, labels=labels)
        logits = model(ids, mems=mems).logits.log_softmax(-1)
        mems = out.mems
        total = total + (out.nll * torch.arange(1.0, T + 1)).sum()
        for row in range(len(ages)):
            expected, memories[row] = read_row(ids[row].tolist(), memories[row], w, config)
            nll = -expected.gather(1, labels[row][:, None])[:, 0]
            expected_total = expected_total + (nll * torch.arange(1.0, T + 1)).sum()
            assert_close("log-probabilities", logits[row], expected, tolerance)
            assert_close("nll", out.nll[row], nll, tolerance)
            n_valid = int(mems.n_valid[row])
            assert n_valid == len(memories[row][0])
            for layer in range(config.n_layer):
                if n_valid:
                    assert_close("memory", mems.hidden[layer][row, -n_valid:], torch.stack(memories[row][layer]), tolerance)
    total.backward()
    expected_total.backward()
    for name, parameter in model.named_parameters():
        assert_close(f"gradient of {name}", parameter.grad, w[name].grad, tolerance)
