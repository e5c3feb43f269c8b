"""What stands between the products of a layer, as kernels against PyTorch's; in Triton's interpreter, or on a GPU."""

import importlib
import os
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.helpers import assert_close, tiny_model

pytest.importorskip("triton", reason="the fused kernels are written in Triton, which is not installed")

from transformer_xl.model import backends, products
from transformer_xl.model.attention import relative
from transformer_xl.model.backends import fused_blocks
from transformer_xl.model.backends.fused import fused_attention
from transformer_xl.model.backends.fused_blocks import Dropped, DroppedPair, active_inner, added
from transformer_xl.model.call import Execution
from transformer_xl.model.dropout import Dropout, drawn_seed, dropped_pair, whole_pass
from transformer_xl.model.products import linear, narrowed
from transformer_xl.model.transformer_xl import TransformerXL
from transformer_xl.training import narrow
from transformer_xl.training.narrow import LateSums, NarrowWeights

pytestmark = [
    pytest.mark.usefixtures("on_the_gpu", "true_bf16"),
    *([pytest.mark.gpu] if torch.cuda.is_available() else []),
]

SHAPES = [(3, 5, 7), (2, 9, 64), (1, 70, 33), (1, 2, 530), (1, 1, 2)]


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, requires_grad=True)


def gradients(out: Tensor, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    torch.manual_seed(5)
    found = torch.autograd.grad((out * torch.randn_like(out)).sum(), list(inputs.values()))
    return {"out": out, **dict(zip(inputs, found, strict=True))}


@pytest.mark.parametrize(
    ("shape", "has_bias", "has_norm"),
    [*((shape, both, both) for shape in SHAPES for both in (True, False)), (SHAPES[0], True, False), (SHAPES[0], False, True)],
)
def test_sums_norms_and_all_gradients_are_those_of_pytorch(shape: tuple[int, ...], has_bias: bool, has_norm: bool) -> None:
    inputs = {"x": drawn(*shape), "y": drawn(*shape)}
    norm = nn.LayerNorm(shape[-1]) if has_norm else None
    if has_bias:
        inputs["bias"] = drawn(shape[-1])
    if norm is not None:
        inputs |= {"weight": nn.init.normal_(norm.weight), "shift": nn.init.normal_(norm.bias)}
    bias = inputs.get("bias")
    found = gradients(added(inputs["x"], inputs["y"], bias, drop=Dropout(0.0), norm=norm), inputs)
    total = inputs["x"] + inputs["y"] + (0 if bias is None else bias)
    expected = gradients(total if norm is None else norm(total), inputs)
    for what, actual in found.items():
        assert_close(what, actual, expected[what], 1e-5)


@pytest.mark.parametrize("shape", SHAPES)
def test_relu_and_its_gradients_are_those_of_pytorch(shape: tuple[int, ...]) -> None:
    inputs = {"y": drawn(*shape), "bias": drawn(shape[-1])}
    found = gradients(active_inner(*inputs.values(), drop=Dropout(0.0)), inputs)
    for what, expected in gradients(F.relu(inputs["y"] + inputs["bias"]), inputs).items():
        assert_close(what, found[what], expected, 1e-6)


def test_many_rows_are_summed_by_few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_blocks, "_MOST_PROGRAMS", 2)
    monkeypatch.setattr(fused_blocks, "_TILE", 64)
    test_sums_norms_and_all_gradients_are_those_of_pytorch((3, 13, 20), True, True)
    test_relu_and_its_gradients_are_those_of_pytorch((3, 13, 20))


@pytest.mark.parametrize("locked", [True, False])
def test_the_same_elements_are_dropped_forward_and_backward(locked: bool) -> None:
    """A sum with zeros shows what was kept, and so does a gradient of ones."""
    B, T, D, p = 3, 40, 50, 0.3
    drop = Dropout(p, locked=locked)
    for run in (
        lambda y: added(torch.zeros(B, T, D), y, None, drop=drop, norm=None),
        lambda y: active_inner(y, torch.zeros(D), drop=drop),
        lambda y: Dropped.apply(y, p, locked, drawn_seed(y.device)),
    ):
        y = torch.ones(B, T, D, requires_grad=True)
        out = run(y)
        (grad,) = torch.autograd.grad(out.sum(), y)
        assert torch.equal(out, grad)
        assert out.unique().tolist() == pytest.approx([0, 1 / (1 - p)])
        assert 0.2 < (out == 0).float().mean().item() < 0.4
        assert bool((out == out[:, :1]).all()) == locked
        assert not torch.equal(out[0], out[1])


def count_launches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list to which every launch adds the name of its kernel."""
    launched, launch = [], fused_blocks._launch

    def noted(kernel: Any, *arguments: Any, **named: Any) -> None:
        launched.append(kernel.fn.__name__)
        launch(kernel, *arguments, **named)

    monkeypatch.setattr(fused_blocks, "_launch", noted)
    return launched


@pytest.mark.parametrize(
    ("shape", "other", "dtype", "locked"),
    [
        ((2, 9, 34), (2, 5, 17), torch.float32, True),
        ((2, 9, 34), (2, 5, 17), torch.bfloat16, False),
        ((1, 2, 1030), (1, 3, 515), torch.bfloat16, False),
        ((2, 1, 40), (2, 3, 150), torch.float32, True),
        ((1, 4, 6), (1, 0, 3), torch.float32, False),
    ],
)
def test_a_pair_loses_in_one_launch_what_each_loses_alone(
    shape: tuple[int, ...], other: tuple[int, ...], dtype: torch.dtype, locked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = [torch.randn(sizes, dtype=dtype, requires_grad=True) for sizes in (shape, other)]
    grads = [torch.randn_like(x).transpose(0, 1).contiguous().transpose(0, 1) for x in pair]
    seeds, launched = [torch.tensor([7]), torch.tensor([2**40 + 3])], count_launches(monkeypatch)
    outs = DroppedPair.apply(*pair, 0.3, locked, *seeds)
    found = torch.autograd.grad(outs, pair, grads)
    assert launched == ["pair_kernel"] * 2
    for x, seed, grad, out, of_x in zip(pair, seeds, grads, outs, found, strict=True):
        alone = Dropped.apply(x, 0.3, locked, seed)
        assert out.dtype == of_x.dtype == dtype
        assert torch.equal(out, alone)
        assert torch.equal(of_x, torch.autograd.grad(alone, x, grad)[0])


def test_pairs_of_many_rows_are_computed_several_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_blocks, "_FEW_ROWS", 4)
    test_a_pair_loses_in_one_launch_what_each_loses_alone((1, 6, 530), (1, 3, 7), torch.float32, True, monkeypatch)


def test_a_pair_is_dropped_in_one_launch_unless_nothing_is_or_somebody_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    fuse(monkeypatch)
    launched, x, y = count_launches(monkeypatch), torch.ones(2, 5, 8), torch.ones(2, 3, 4)
    for idle in (Dropout(0.0), Dropout(0.5).eval(), nn.Identity()):
        assert all(map(torch.equal, dropped_pair(idle, x, y), (x, y)))  # pyright: ignore[reportArgumentType]
    assert launched == []
    drop, heard, found = Dropout(0.5), [], []
    for _ in range(2):
        torch.manual_seed(2)
        found += [dropped_pair(drop, x, y)]
        drop.register_forward_hook(lambda _, args, out: heard.append(out))
    assert launched == ["pair_kernel", "active_kernel", "active_kernel"]
    assert len(heard) == 2
    assert all(map(torch.equal, *found))  # the seeds are drawn in the same order


def test_dropped_elements_look_independent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neighbors, and elements apart by Fibonacci numbers, after which the counter is nearly where it was."""
    monkeypatch.setattr(fused_blocks, "_FEW_ROWS", 0)  # the interpreter takes its time by the program
    monkeypatch.setattr(fused_blocks, "_TILE", 16 * 512)
    kept = Dropped.apply(torch.ones(1, 256, 512), 0.5, False, torch.tensor([7]))[0] > 0
    signs = kept.double() * 2 - 1
    lags = [(1, 0), (1, 1), *((0, n) for n in (1, 2, 3, 4, 5, 8, 13, 16, 21, 34, 55, 89, 144, 233))]
    for down, right in lags:
        assert (signs * signs.roll((down, right), (0, 1))).mean().abs().item() < 5 / signs.numel() ** 0.5, (down, right)
    for dim, n in enumerate(signs.shape):
        assert signs.mean(dim).abs().max().item() < 5 / n**0.5
        assert signs.mean(dim).std().item() == pytest.approx(n**-0.5, rel=0.2)


def test_a_copy_in_the_type_of_autocast_takes_part_in_gradients() -> None:
    x, y, weight = drawn(2, 5, 16), drawn(2, 5, 16), drawn(16, 16)
    norm = nn.LayerNorm(16)
    found = []
    for fused in (True, False):
        with torch.autocast(x.device.type, torch.bfloat16), whole_pass():
            h = added(x, y, None, drop=Dropout(0.0), norm=norm) if fused else norm(x + y).float()
            assert hasattr(h, "autocast_copy") == fused
            out = linear(h, weight) + h
        found.append(torch.autograd.grad(out.square().sum(), [x, y, weight]))
    for actual, expected in zip(*found, strict=True):
        assert ((actual - expected).norm() / expected.norm()).item() < 2e-2


def test_products_read_a_copy_only_where_it_is_what_autocast_would_make() -> None:
    x, weight, norm = torch.randn(2, 5, 16), torch.randn(16, 16), nn.LayerNorm(16)
    kind = x.device.type
    with torch.no_grad(), torch.autocast(kind, torch.bfloat16):
        assert not hasattr(added(x, x, None, drop=Dropout(0.0), norm=norm), "autocast_copy")  # somebody may look at it
        with whole_pass():
            h = added(x, x, None, drop=Dropout(0.0), norm=norm)
            assert narrowed(h) is h.autocast_copy[0]  # pyright: ignore[reportAttributeAccessIssue]
            with torch.autocast(kind, torch.float16):
                assert narrowed(h).dtype == torch.float16
            with torch.autocast(kind, enabled=False):
                torch.testing.assert_close(linear(h, weight), F.linear(h, weight))
            h.mul_(2)
            assert torch.equal(narrowed(h), h.bfloat16())
    assert narrowed(torch.zeros(1, dtype=torch.float64)).dtype == torch.float64


def test_narrow_states_become_fp32_under_autocast_as_norms_of_pytorch_are() -> None:
    x = torch.randn(2, 3, 8, dtype=torch.bfloat16)
    with torch.autocast(x.device.type, torch.bfloat16):
        assert added(x, x, None, drop=Dropout(0.0), norm=nn.LayerNorm(8)).dtype == torch.float32


def test_relu_keeps_what_is_not_a_number() -> None:
    y = torch.tensor([[float("nan"), -1.0, 1.0]])
    assert active_inner(y, torch.zeros(3), drop=Dropout(0.0)).isnan().tolist() == [[True, False, False]]


def test_seeds_of_one_pass_are_drawn_together_and_differ() -> None:
    device = torch.zeros(0).device
    with whole_pass():
        seeds = [drawn_seed(device) for _ in range(150)]
        state = torch.get_rng_state() if device.type == "cpu" else torch.cuda.get_rng_state()
        drawn_seed(device)
        after = torch.get_rng_state() if device.type == "cpu" else torch.cuda.get_rng_state()
        assert torch.equal(state, after)
    assert len({int(seed) for seed in (*seeds, drawn_seed(device))}) == 151


def fuse(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let models compute as they do on a GPU."""
    for module in ("dropout", "gates", "layers", "products", "attention.block", "attention.relative"):
        monkeypatch.setattr(importlib.import_module(f"transformer_xl.model.{module}"), "is_fused", lambda x: True)


def test_layers_that_are_computed_again_drop_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    fuse(monkeypatch)
    model = tiny_model(dropout=0.3, dropqkv=0.2, dropatt=0.2).train()
    ids, found = torch.randint(0, 13, (2, 9), device=model.device), []
    for again in (False, True):
        torch.manual_seed(1)
        model.zero_grad()
        execution = Execution("matmul", checkpoint_layers=again)
        model(ids[:, :-1], labels=ids[:, 1:], execution=execution).nll.mean().backward()
        found.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    assert all(torch.equal(gradient, found[1][name]) for name, gradient in found[0].items())


def test_what_listens_or_is_not_usual_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    fuse(monkeypatch)
    model, heard = tiny_model(dropout=0.0), []
    ids = torch.randint(0, 13, (2, 8), device=model.device)
    layer: Any = model.layers[0]
    layer.attention.o_net.register_forward_hook(lambda *_: heard.append(1))
    model(ids)
    assert heard == [1]
    layer.feed_forward.layer_norm = nn.LayerNorm(model.config.d_model, elementwise_affine=False)
    found = model(ids).logits
    monkeypatch.undo()
    assert_close("logits", found, model(ids).logits, 1e-5)


@pytest.mark.parametrize(("backend", "fused"), [("auto", True), ("triton", True), ("equation", False), ("sdpa", False)])
def test_layers_can_be_differentiated_twice_where_attention_can(
    backend: str, fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device is said to be a GPU; nothing is computed."""
    monkeypatch.setattr(backends, "fuses", lambda *_: True)
    monkeypatch.setattr(backends, "_PLAIN", (SimpleNamespace,))
    x: Any = SimpleNamespace(device=torch.device("cuda"), dtype=torch.float32)
    seen: list[bool] = []
    layer = nn.Module()
    layer.forward = lambda h: seen.append(backends.is_fused(x))  # pyright: ignore[reportAttributeAccessIssue]
    Execution(backend).run(layer, torch.zeros(0))
    assert (seen, backends.is_fused(x)) == ([fused], True)


KINDS = {
    "post-norm": {"n_layer": 2},
    "pre-norm": {"pre_lnorm": True},
    "no memory": {"mem_len": 0},
    "shift": {"shift": "averages", "pre_lnorm": True, "d_model": 16},
    "gelu": {"activation": "gelu"},
    "gate": {"gate": "gru", "pre_lnorm": True},
    "rotary": {"attention": "rotary"},
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_learns_the_same(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loss, memory and every gradient over two segments, the second with a gradient into the memory; in bf16 as exactly."""
    model = tiny_model(**{"n_layer": 1, "n_head": 2, **KINDS[kind]}).train()
    device = next(model.parameters()).device
    ids = torch.randint(0, model.config.vocab_size or 1, (2, 2, 7), device=device)

    def learned(*, narrow: bool = False, by: str = "matmul") -> dict[str, Any]:
        model.zero_grad(set_to_none=True)
        mems, losses = None, []
        with torch.autocast(device.type, torch.bfloat16, enabled=narrow):
            for segment in ids:
                out = model(segment[:, :-1], mems=mems, labels=segment[:, 1:], keep_graph=True, execution=Execution(by))
                mems, losses = out.mems, [*losses, out.nll.mean()]
        torch.stack(losses).sum().backward()
        return {"loss": torch.stack(losses), **{name: p.grad for name, p in model.named_parameters()}}

    expected, rounded = learned(), learned(narrow=True)
    fuse(monkeypatch)
    ways = ("matmul", "triton") if kind == "shift" else ("matmul",)  # the interpreter takes its time
    for by in ways:
        for what, actual in learned(by=by).items():
            assert_close(what, actual, expected[what], 1e-5)
    errors = [
        sum((found[what] - right).double().square().sum().item() for what, right in expected.items()) ** 0.5
        for found in (*(learned(narrow=True, by=by) for by in ways), rounded)
    ]
    assert max(errors) <= 3 * errors[-1]  # a unit whose input is nearly 0 may be on in one, and off in the other


def test_attention_weights_are_those_of_the_equation(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model(dropout=0.0).eval()
    ids = torch.randint(0, 13, (2, 6), device=model.device)
    expected, _ = model.attention_weights(ids)
    fuse(monkeypatch)
    monkeypatch.setattr(relative, "choose_backend", lambda *_, **__: fused_attention)
    for i, weights in enumerate(model.attention_weights(ids)[0]):
        assert_close(str(i), weights, expected[i], 1e-5)


@pytest.mark.parametrize("locked", [True, False])
def test_queries_keys_and_values_are_dropped_forward_and_backward(locked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What PyTorch projects, multiplied by the masks that the results show, has the same gradients."""
    model: Any = tiny_model(d_model=12, n_head=2, d_head=6, dropout=0.0, dropqkv=0.3, locked_dropout=locked).train()
    block = model.layers[0].attention
    inputs = {"mem": drawn(2, 5, 12), "h": drawn(2, 3, 12), "weight": block.qkv_net.weight}

    def projected() -> Tensor:
        q, k, v = block.project(inputs["h"], inputs["mem"], None)
        return torch.cat([q, k, v], 1)

    with monkeypatch.context() as patch:
        fuse(patch)
        launched = count_launches(patch)
        found = gradients(projected(), inputs)
    assert launched == ["join_kernel", "pair_kernel", "pair_kernel"]
    masks = found["out"].detach().ne(0) / 0.7
    assert 0.5 < masks.gt(0).float().mean() < 0.9
    block.eval()
    expected = gradients(projected() * masks, inputs)
    for what, actual in found.items():
        assert_close(what, actual, expected[what], 1e-5)


def learned_narrow(
    model: TransformerXL, segments: Tensor, copies: NarrowWeights | None = None, *, again: bool = False
) -> dict[str, Tensor]:
    """Return all gradients of a pass over segments with copies of the weights; later ones have gradients into the memory."""
    if not again:
        model.zero_grad(set_to_none=True)
    torch.manual_seed(1)
    copies, mems, losses = copies or NarrowWeights(model, torch.bfloat16), None, []
    with copies.in_place():
        with torch.autocast(model.device.type, torch.bfloat16), whole_pass():
            for segment in segments:
                out = model(segment[:, :-1], mems=mems, labels=segment[:, 1:], keep_graph=True)
                mems, losses = out.mems, [*losses, out.nll.mean()]
        torch.stack(losses).sum().backward()
        copies.collect()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("frozen", [False, True])
def test_gradients_of_all_layers_are_computed_together(frozen: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over two segments, the second with a gradient into the memory."""
    fuse(monkeypatch)
    model = tiny_model(n_layer=3, d_model=16, n_head=2, d_head=8, d_inner=24, mem_len=5, dropout=0.0).train()
    layers: Any = model.layers
    layers[1].attention.qkv_net.requires_grad_(requires_grad=not frozen)
    ids, sizes = torch.randint(0, 13, (2, 3, 9), device=model.device), []
    multiplied = products.multiplied
    monkeypatch.setattr(narrow, "multiplied", lambda alike: sizes.append(len(alike)) or multiplied(alike))

    found = learned_narrow(model, ids)
    # queries and the output of attention; keys and values, and keys of positions, each without and with a memory; inside of the
    # network, and out of it
    assert sorted(sizes) == ([2, 2, 3, 3, 6, 6, 10] if frozen else [3, 3, 3, 3, 6, 6, 12])
    monkeypatch.setattr(products, "_MOST_LATE_ROWS", -1)
    expected = learned_narrow(model, ids)
    assert len(sizes) == 7
    assert found.keys() == expected.keys()
    assert ("layers.1.attention.qkv_net.weight" in found) != frozen
    for name, gradient in found.items():
        assert_close(name, gradient, expected[name], 2**-7, least=1e-3)


def sums_model(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> tuple[TransformerXL, Tensor]:
    """A fused model of three layers, and a segment."""
    fuse(monkeypatch)
    sizes = {"n_layer": 3, "d_model": 16, "n_head": 2, "d_head": 8, "d_inner": 24, "mem_len": 5, "dropout": 0.0}
    model = tiny_model(**{**sizes, **changes}).train()
    return model, torch.randint(0, 13, (1, 3, 9), device=model.device)


@pytest.fixture
def sums(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Say of each kernel that adds up sums how many layers' blocks it does so for."""
    found: list[int] = []
    totals, gradients = fused_blocks.totals, LateSums.gradients

    def counted(self: LateSums) -> Iterator[tuple[Tensor, Tensor]]:
        found.extend(len(taken) for buffers in self._buffers.values() for _, taken in buffers)
        return gradients(self)

    monkeypatch.setattr(fused_blocks, "totals", lambda *args: found.append(1) or totals(*args))
    monkeypatch.setattr(LateSums, "gradients", counted)
    return found


def early(monkeypatch: pytest.MonkeyPatch, model: TransformerXL, segments: Tensor) -> dict[str, Tensor]:
    """Return the gradients where each block adds up its own sums."""
    with monkeypatch.context() as patch:
        patch.setattr(fused_blocks, "_MOST_LATE_SUMS", 0)
        return learned_narrow(model, segments)


def check(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Norms have the same gradients but for the order of sums, and biases the same before they are rounded."""
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        assert_close(name, gradient, expected[name], 2**-8 if name.endswith("er.bias") else 1e-5, least=1e-3)


@pytest.mark.parametrize(
    ("changes", "late"),
    [
        ({}, [3, 3, 3]),  # the ends of both blocks, and the inside of the feed-forward network
        ({"pre_lnorm": True}, [3, 3]),  # attention ends without a bias
        ({"activation": "gelu"}, [3, 3]),
        ({"pre_lnorm": True, "gate": "gru"}, [3]),
        ({"dropweight": 0.2}, [1, 1, 1, 1, 1, 1, 3]),  # biases of such maps have no copies
    ],
)
def test_sums_of_all_layers_are_added_up_together(
    changes: dict[str, Any], late: list[int], sums: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, segments = sums_model(monkeypatch, **changes)
    found = learned_narrow(model, segments)
    assert sums == late
    assert found.keys() == dict(model.named_parameters()).keys()
    if not changes:
        assert all(torch.equal(gradient, found[name]) for name, gradient in learned_narrow(model, segments).items())
    sums.clear()
    check(found, early(monkeypatch, model, segments))
    assert sums == [1] * sum(late)


def test_without_copies_each_block_adds_up_its_own_sums(sums: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after a pass with copies; its gradients are the same within the rounding of bf16."""
    model, segments = sums_model(monkeypatch, mem_len=0)
    for p in model.parameters():
        p.data.copy_(p.bfloat16())  # or kernels would read other biases
    found = learned_narrow(model, segments)
    sums.clear()
    model.zero_grad(set_to_none=True)
    with torch.autocast(model.device.type, torch.bfloat16), whole_pass():
        out = model(segments[0, :, :-1], labels=segments[0, :, 1:])
    out.nll.mean().backward()
    assert sums == [1] * 9
    for name, p in model.named_parameters():
        assert p.grad is not None
        assert_close(name, found[name], p.grad, 2**-7, least=1e-3)


def test_a_few_large_sums_are_not_kept(sums: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    model, segments = sums_model(monkeypatch)
    monkeypatch.setattr(fused_blocks, "_MOST_LATE_SUMS", 2 * 24)  # 24 rows by two programs; the ends of blocks have 2 x 3 x 16
    learned_narrow(model, segments)
    assert sorted(sums) == [1] * 6 + [3]


def test_frozen_norms_and_biases_get_no_gradient(sums: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    model, segments = sums_model(monkeypatch)
    layers: Any = model.layers
    frozen = ["0.attention.layer_norm.weight", "1.feed_forward.layer_norm.bias", "1.feed_forward.outer.bias"]
    frozen += ["2.attention.layer_norm.weight", "2.attention.layer_norm.bias", "2.feed_forward.inner.bias"]
    for name in frozen:
        layers.get_parameter(name).requires_grad_(requires_grad=False)
    found = learned_narrow(model, segments)
    assert not {f"layers.{name}" for name in frozen} & found.keys()
    assert "layers.0.attention.layer_norm.bias" in found
    assert sums == [1, 3, 2, 2]  # the sums of the frozen bias are not kept
    check(found, early(monkeypatch, model, segments))


def test_sums_of_several_uses_and_passes_are_added(sums: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers share a norm and a bias."""
    model, segments = sums_model(monkeypatch)
    layers: Any = model.layers
    for i in (1, 2):
        layers[i].feed_forward.layer_norm = layers[0].feed_forward.layer_norm
        layers[i].feed_forward.inner = layers[0].feed_forward.inner
    once = learned_narrow(model, segments)
    assert sums == [3, 3, 3]
    twice = learned_narrow(model, segments, again=True)
    check({name: gradient / 2 for name, gradient in twice.items()}, once)
    check(once, early(monkeypatch, model, segments))


def test_a_failing_pass_leaves_no_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    model, segments = sums_model(monkeypatch)
    layers: Any = model.layers
    copies, taken = NarrowWeights(model, torch.bfloat16), []

    def fail(*_: Any) -> None:
        taken.extend(copies._sums._buffers)
        raise KeyboardInterrupt

    listening = layers[0].register_full_backward_hook(fail)
    with pytest.raises(KeyboardInterrupt):
        learned_narrow(model, segments, copies)
    listening.remove()
    assert len(taken) == 2
    assert not copies._sums._buffers
    assert not any(hasattr(p, "late_sums") for p in model.parameters())
    check(learned_narrow(model, segments, copies), early(monkeypatch, model, segments))


COMPILING = """
import inspect
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from transformer_xl.model.backends import fused_blocks
from transformer_xl.model.backends.fused import fused_attention

FP32, SEEDS = {"sums", "weight", "shift", "x", "mem", "grad_x"}, {"seed_at", "other_seed_at"}
COUNTS = {"n_row", "T", "M", "S", "C", "n_sum", "mem_row", "mem_at", "n_other", "T_other"}
names = [name for name in dir(fused_blocks) if name.endswith("_kernel")]
for name, stacked in [*((name, False) for name in names), ("sum_kernel", True)]:
    kernel = getattr(fused_blocks, name)
    given = dict(D=384, D_other=768, W=8 if "sum" in name else 512, R=4, H=32, N=3, STACKED=stacked)
    given |= dict(DROPS=True, LOCKED=True, RELU=True)
    names = list(inspect.signature(kernel.fn).parameters)
    constants = {n: given[n] for n in names if n in given}
    kinds = dict.fromkeys(COUNTS, "i32") | dict.fromkeys(FP32, "*fp32") | dict.fromkeys(SEEDS, "*i64")
    kinds |= {"p": "fp32", "eps": "fp32"}
    signature = {n: "constexpr" if n in constants else kinds.get(n, "*bf16") for n in names}
    triton.compile(ASTSource(kernel, signature, constexprs=constants), target=GPUTarget("cuda", 90, 32))
    print(name)
"""


@pytest.mark.slow
def test_kernels_compile_for_gpus() -> None:
    """The compiler may refuse what the interpreter accepts, and it needs no GPU to do so."""
    environment = os.environ | {"TRITON_INTERPRET": "0"}
    command = [sys.executable, "-W", "ignore", "-c", COMPILING]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    names = ["active_gradient", "active", "added_gradient", "added", "join", "pair", "phase", "sum", "sum"]
    assert done.stdout.split() == [f"{name}_kernel" for name in names]
