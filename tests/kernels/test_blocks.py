"""What stands between the products of a layer, as kernels against PyTorch's; in Triton's interpreter, or on a GPU."""

import importlib
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.helpers import assert_close, tiny_model

pytest.importorskip("triton", reason="the fused kernels are written in Triton, which is not installed")

from transformer_xl.kernels import blocks as fused_blocks
from transformer_xl.kernels.blocks import _Dropped, active_inner, added, column_sums, dropped
from transformer_xl.kernels.equation import Positions, relative_attention
from transformer_xl.kernels.flash import fused_attention
from transformer_xl.kernels.fused import n_padded
from transformer_xl.model import transformer_xl
from transformer_xl.model.call import Execution
from transformer_xl.model.dropout import Dropout, dropped_pair

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
    found = gradients(added(inputs["x"], inputs["y"], bias, p=0.0, locked=False, norm=norm), inputs)
    total = inputs["x"] + inputs["y"] + (0 if bias is None else bias)
    expected = gradients(total if norm is None else norm(total), inputs)
    for what, actual in found.items():
        assert_close(what, actual, expected[what], 1e-5)


@pytest.mark.parametrize("shape", SHAPES)
def test_relu_and_its_gradients_are_those_of_pytorch(shape: tuple[int, ...]) -> None:
    inputs = {"y": drawn(*shape), "bias": drawn(shape[-1])}
    found = gradients(active_inner(*inputs.values(), p=0.0, locked=False), inputs)
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
    for run in (
        lambda y: added(torch.zeros(B, T, D), y, None, p=p, locked=locked, norm=None),
        lambda y: active_inner(y, torch.zeros(D), p=p, locked=locked),
        lambda y: dropped(y, p=p, locked=locked)[0],
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
    launched, launch = [], fused_blocks.launch

    def noted(kernel: Any, *arguments: Any, **named: Any) -> None:
        launched.append(kernel.fn.__name__)
        launch(kernel, *arguments, **named)

    monkeypatch.setattr(fused_blocks, "launch", noted)
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
    seeds, launched = torch.tensor([7, 2**40 + 3]), count_launches(monkeypatch)
    outs = _Dropped.apply(0.3, locked, seeds, *pair)
    found = torch.autograd.grad(outs, pair, grads)
    assert launched == ["pair_kernel"] * 2
    for x, seed, grad, out, of_x in zip(pair, seeds, grads, outs, found, strict=True):
        (alone,) = _Dropped.apply(0.3, locked, seed[None], x)
        assert out.dtype == of_x.dtype == dtype
        assert torch.equal(out, alone)
        assert torch.equal(of_x, torch.autograd.grad(alone, x, grad)[0])


def test_pairs_of_many_rows_are_computed_several_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_blocks, "_FEW_ROWS", 4)
    test_a_pair_loses_in_one_launch_what_each_loses_alone((1, 6, 530), (1, 3, 7), torch.float32, True, monkeypatch)


def test_a_pair_is_dropped_in_one_launch_unless_nothing_is_or_somebody_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    fuse(monkeypatch)
    launched, x, y = count_launches(monkeypatch), torch.ones(2, 5, 8), torch.ones(2, 3, 4)
    for idle in (Dropout(0.0), Dropout(0.5).eval()):
        assert all(map(torch.equal, dropped_pair(idle, x, y), (x, y)))
    assert launched == []
    drop, heard = Dropout(0.5), []
    for _ in range(2):
        assert all(part.unique().tolist() == [0, 2] for part in dropped_pair(drop, x, y))
        drop.register_forward_hook(lambda _, args, out: heard.append(out))
    assert launched == ["pair_kernel"] * 3
    assert len(heard) == 2


def test_dropped_elements_look_independent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neighbors, and elements apart by Fibonacci numbers, after which the counter is nearly where it was."""
    monkeypatch.setattr(fused_blocks, "_FEW_ROWS", 0)  # the interpreter takes its time by the program
    monkeypatch.setattr(fused_blocks, "_TILE", 16 * 512)
    kept = _Dropped.apply(0.5, False, torch.tensor([7]), torch.ones(1, 256, 512))[0][0] > 0
    signs = kept.double() * 2 - 1
    lags = [(1, 0), (1, 1), *((0, n) for n in (1, 2, 3, 4, 5, 8, 13, 16, 21, 34, 55, 89, 144, 233))]
    for down, right in lags:
        assert (signs * signs.roll((down, right), (0, 1))).mean().abs().item() < 5 / signs.numel() ** 0.5, (down, right)
    for dim, n in enumerate(signs.shape):
        assert signs.mean(dim).abs().max().item() < 5 / n**0.5
        assert signs.mean(dim).std().item() == pytest.approx(n**-0.5, rel=0.2)


def test_a_second_gradient_is_refused() -> None:
    """It would lack what kernels do not tell autograd."""
    x, bias = drawn(2, 3, 8), drawn(8)
    for out in (added(x, x, bias, p=0.0, locked=False, norm=nn.LayerNorm(8)), active_inner(x, bias, p=0.0, locked=False)):
        (gradient,) = torch.autograd.grad(out.sin().sum(), bias, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            gradient.sum().backward()


def test_sums_of_more_programs_than_are_loaded_at_once_are_whole() -> None:
    """Those of attention have one for each tile of queries of each row."""
    sums = torch.randn(1300, 11)
    assert_close("sums", column_sums(sums, torch.float32), sums.sum(0), 1e-5)


def test_narrow_states_become_fp32_under_autocast_as_norms_of_pytorch_are() -> None:
    x = torch.randn(2, 3, 8, dtype=torch.bfloat16)
    with torch.autocast(x.device.type, torch.bfloat16):
        assert added(x, x, None, p=0.0, locked=False, norm=nn.LayerNorm(8)).dtype == torch.float32


def test_relu_keeps_what_is_not_a_number() -> None:
    y = torch.tensor([[float("nan"), -1.0, 1.0]])
    assert active_inner(y, torch.zeros(3), p=0.0, locked=False).isnan().tolist() == [[True, False, False]]


def fuse(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let models compute as they do on a GPU."""
    for module in ("kernels.fused", "model.attention.block", "model.attention.relative"):
        monkeypatch.setattr(importlib.import_module(f"transformer_xl.{module}"), "is_fused", lambda x: True)


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


def test_all_layers_get_position_keys_with_the_zeros_that_kernels_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """One padding for all of them, where each would pad its own."""
    fuse(monkeypatch)
    model, lengths = tiny_model(n_layer=3), []

    def attend(q: Tensor, k: Tensor, v: Tensor, positions: Positions, **named: Any) -> Tensor:
        assert positions.r is not None
        lengths.append(len(positions.r))
        return relative_attention(q, k, v, positions, **named)

    monkeypatch.setattr(model, "backend", lambda *_: attend)
    model(torch.randint(0, 13, (2, 9), device=model.device))
    assert lengths == [n_padded(9)] * 3


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


KINDS = {
    "post-norm": {"n_layer": 2},
    "shift": {"shift": "averages", "pre_lnorm": True, "d_model": 16},
    "gelu, no memory": {"activation": "gelu", "mem_len": 0},
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
    monkeypatch.setattr(transformer_xl, "choose_backend", lambda *_, **__: fused_attention)
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
    assert launched == ["pair_kernel", "pair_kernel"]
    masks = found["out"].detach().ne(0) / 0.7
    assert 0.5 < masks.gt(0).float().mean() < 0.9
    block.eval()
    expected = gradients(projected() * masks, inputs)
    for what, actual in found.items():
        assert_close(what, actual, expected[what], 1e-5)


class Conversions(TorchDispatchMode):
    """Counts conversions to another type."""

    def __init__(self) -> None:
        super().__init__()
        self.n = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.n += func.overloadpacket.__name__ == "_to_copy"
        return func(*args, **(kwargs or {}))


def test_what_both_projections_read_is_converted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Segment, memory and weights; on their way back gradients of the segment and of the weights."""
    fuse(monkeypatch)
    block: Any = tiny_model(d_model=12, n_head=2, d_head=6, dropout=0.0).train().layers[0].attention
    mem, h, conversions = torch.randn(2, 5, 12), drawn(2, 3, 12), Conversions()
    with conversions, torch.autocast(h.device.type, torch.bfloat16):
        q, k, v = block.project(h, mem, None)
        assert conversions.n == 3
        torch.autograd.backward([q, k, v], [torch.ones_like(x) for x in (q, k, v)])
    assert conversions.n == 5


COMPILING = """
import inspect
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from transformer_xl.kernels import blocks, flash_kernels

FP32, SEEDS = {"sums", "weight", "shift", "x", "grad_x"}, {"seed_at"}
COUNTS = {"n_row", "T", "S", "C", "n_sum", "n_other", "T_other"}
kernels = {name: kernel for name, kernel in vars(blocks).items() if name.endswith("_kernel")}
for name, kernel in sorted({**kernels, "phase_kernel": flash_kernels.phase_kernel}.items()):
    given = dict(D=384, D_other=768, W=8 if "sum" in name else 512, R=4, H=32)
    given |= dict(DROPS=True, LOCKED=True)
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
    names = ["active_gradient", "active", "added_gradient", "added", "pair", "phase", "sum"]
    assert done.stdout.split() == [f"{name}_kernel" for name in names]
