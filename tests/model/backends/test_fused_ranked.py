"""XLNet's fused kernels against its equation: odd sizes, several tiles, all gradients; in Triton's interpreter or on a GPU."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.helpers import assert_close, gradients, tiny_xlnet
from tests.model.backends.ranked_case import Case
from tests.model.backends.test_fused import Noted
from transformer_xl.errors import ConfigError
from transformer_xl.model.attention.two_streams import ranked_attention
from transformer_xl.model.backends import choose_ranked_backend
from transformer_xl.model.backends.ranked import matmul_ranked_attention
from transformer_xl.model.call import Execution, run_layer
from transformer_xl.model.xlnet import Order, XLNet

pytest.importorskip("triton", reason="the fused kernels are written in Triton, which is not installed")

from transformer_xl.model.backends import fused, fused_ranked, fused_ranked_kernels
from transformer_xl.model.backends.fused_ranked import fused_ranked_attention

# where there is a GPU, `make test-gpu` runs the kernels on it
pytestmark = [
    pytest.mark.usefixtures("on_the_gpu", "small_tiles"),
    *([pytest.mark.gpu] if torch.cuda.is_available() else []),
]

CPU, GPU = torch.device("cpu"), torch.device("cuda")
SHAPES: dict[str, dict[str, Any]] = {
    "one tile": {"B": 1, "T": 10, "M": 6, "K": 4, "N": 1, "H": 16},
    "whole tiles": {"B": 2, "T": 16, "M": 16, "K": 16, "N": 1, "H": 16},
    "odd sizes": {"B": 2, "T": 19, "M": 9, "K": 5, "N": 2, "H": 5},
    "no memory": {"B": 1, "T": 21, "M": 0, "K": 7, "N": 2, "H": 8},
    "content alone": {"B": 2, "T": 20, "M": 5, "K": 0, "N": 1, "H": 4},
    "content alone, all in sight": {"B": 2, "T": 18, "M": 0, "K": 0, "N": 1, "H": 4, "sees": "all"},
    "one token": {"B": 3, "T": 1, "M": 5, "K": 1, "N": 1, "H": 4},
    "more targets than tokens": {"B": 1, "T": 3, "M": 2, "K": 18, "N": 1, "H": 4},
    "memories of different ages, and padding": {"B": 3, "T": 7, "M": 30, "K": 3, "N": 1, "H": 4, "n_unseen": (17, 33, 0)},
    "some see nothing": {"B": 2, "T": 17, "M": 2, "K": 6, "N": 1, "H": 4, "sees": "nothing"},
    "wide heads": {"B": 1, "T": 17, "M": 3, "K": 2, "N": 1, "H": 41},
    "one text": {"B": 2, "T": 18, "M": 3, "K": 2, "N": 1, "H": 4, "n_text": 1},
    "texts do not count": {"B": 2, "T": 18, "M": 3, "K": 2, "N": 1, "H": 4, "n_text": 0},
    "one direction": {"B": 2, "T": 18, "M": 3, "K": 2, "N": 2, "H": 4, "both": False},
    "one direction, texts do not count": {"B": 2, "T": 9, "M": 9, "K": 2, "N": 1, "H": 4, "both": False, "n_text": 0},
}


def compare(case: Case, expected: dict[str, Tensor], tolerance: float = 1e-5) -> None:
    """Compare outputs and all gradients."""
    found = case.run(fused_ranked_attention)
    assert found.keys() == expected.keys()
    for what, actual in found.items():
        assert_close(what, actual, expected[what], tolerance)


def compare_in_narrow_type(case: Case) -> None:
    """Compare the distances from the equation in fp32, ours and that of the equation in the case's type."""
    expected, plain = case.to(torch.float32).run(ranked_attention), case.run(ranked_attention)
    for what, actual in case.run(fused_ranked_attention).items():
        error, allowed = ((x.float() - expected[what]).norm() for x in (actual, plain[what]))
        # what all queries and keys share is a few sums of many errors, and luck whose cancel
        factor = 4 if "_" in what else 1.5
        assert actual.dtype == case.grad.dtype
        assert error <= factor * allowed, what


@pytest.mark.parametrize("shape", SHAPES)
def test_kernels_equal_the_equation(shape: str) -> None:
    case = Case.draw(**SHAPES[shape], dtype=torch.float32)
    compare(case, case.run(ranked_attention))


def test_queries_that_see_nothing_gather_zeros() -> None:
    case = Case.draw(B=2, T=4, M=3, K=14, N=1, H=4, sees="nothing", dtype=torch.float32)
    blind = case.sight.hidden(4).all(-1)
    assert 0 < blind.sum() < blind.numel()
    out = case.attend(fused_ranked_attention)
    assert not out[blind].any()
    assert out[~blind].all()
    assert not torch.autograd.grad(out, case.inputs["q"], blind[..., None, None].expand_as(out).float())[0].any()


@pytest.mark.parametrize(("n_byte", "n_part"), [(2 * 2 * 24 * 48 * 4, 2), (2 * 24 * 48 * 4, 3), (1, 6)])
def test_rows_and_heads_are_computed_in_parts(n_byte: int, n_part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rows at a time, one row, one head of a row; each row with position keys of its own direction."""
    case = Case.draw(B=3, T=19, M=9, K=5, N=2, H=5, dtype=torch.float32)
    expected = case.run(ranked_attention)
    monkeypatch.setattr(fused, "SCRATCH_BYTES", n_byte)
    assert len(list(fused.parts(case.inputs["q"], 48))) == n_part
    compare(case, expected)


@pytest.mark.usefixtures("true_bf16")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrow_types_are_as_close_as_the_equation_in_them(dtype: torch.dtype) -> None:
    compare_in_narrow_type(Case.draw(B=2, T=19, M=14, K=6, N=1, H=16, dtype=dtype))


def test_results_are_the_same_every_time() -> None:
    case = Case.draw(B=2, T=18, M=5, K=3, N=1, H=4, dtype=torch.float32)
    first, second = (case.run(fused_ranked_attention) for _ in range(2))
    assert all(torch.equal(first[what], second[what]) for what in first)


@pytest.mark.parametrize("scratch", [1 << 20, 20 * 32 * 4])
def test_dropout_drops_the_same_weights_forward_and_backward(scratch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values that are the unit vectors show the weights, and so which of them were dropped."""
    monkeypatch.setattr(fused, "SCRATCH_BYTES", scratch)
    B, T, M, K, N = 2, 17, 2, 3, 2
    S = T + M
    case = Case.draw(B, T, M, K, N, S, dtype=torch.float32)
    eye = torch.eye(S)[:, None].expand(B, S, N, S)
    shown = replace(case, inputs=case.inputs | {"v": eye.clone().requires_grad_()})
    torch.manual_seed(3)
    weights_BQNS = shown.attend(fused_ranked_attention, dropatt=0.3).detach()
    visible = ~case.sight.hidden(T).unsqueeze(2).expand_as(weights_BQNS)
    kept = (weights_BQNS != 0) & visible
    assert 0.6 < kept.sum() / visible.sum() < 0.8
    both = visible[0] & visible[1]
    assert not torch.equal(kept[0] & both, kept[1] & both)
    assert not torch.equal(kept[:, :, 0], kept[:, :, 1])

    def with_the_same_dropped(q: Tensor, k: Tensor, v: Tensor, r: Tensor, *, dropatt: float, **named: Any) -> Tensor:
        weights = ranked_attention(q, k, eye, r, **named)
        return torch.einsum("bqns,bsnh->bqnh", weights * kept / (1 - dropatt), v)

    torch.manual_seed(3)
    actual = case.run(fused_ranked_attention, dropatt=0.3)
    for what, expected in case.run(with_the_same_dropped, dropatt=0.3).items():
        assert_close(what, actual[what], expected, 1e-5)
    assert not torch.equal(case.attend(fused_ranked_attention, dropatt=0.3), actual["out"])


def test_keys_and_values_may_be_parts_of_one_tensor() -> None:
    case = Case.draw(B=2, T=12, M=5, K=2, N=2, H=8, dtype=torch.float32)
    expected = case.run(ranked_attention)
    both = torch.stack([case.inputs["k"], case.inputs["v"]], dim=2).detach()
    case.inputs["k"], case.inputs["v"] = (both[:, :, i].requires_grad_() for i in range(2))
    compare(case, expected)


def test_rows_and_heads_are_counted_where_a_grid_has_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU takes 65,535 programs along the second and third axis, and 2^31 along the first."""
    grids: list[Any] = []
    for name in ("ranked_forward_kernel", "ranked_key_gradient_kernel", "ranked_query_gradient_kernel"):
        monkeypatch.setattr(fused_ranked_kernels, name, Noted(grids))
    Case.draw(B=7, T=40, M=30, K=8, N=3, H=4, dtype=torch.float32).run(fused_ranked_attention)
    assert grids == [(42,), (105,), (63,)]


class Sizes(TorchDispatchMode):
    """Notes the sizes of all tensors that are made, by type."""

    def __init__(self) -> None:
        super().__init__()
        self.most: dict[torch.dtype, int] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else [out]:
            if isinstance(x, Tensor):
                self.most[x.dtype] = max(self.most.get(x.dtype, 0), x.numel())
        return out


def test_no_mask_is_made_and_nothing_of_the_size_of_scores_is_kept() -> None:
    B, T, M, K = 2, 20, 20, 3
    case = Case.draw(B, T, M, K, N=1, H=4, dtype=torch.float32)
    kept: list[int] = []

    def record(x: Tensor) -> Tensor:
        kept.append(x.numel())
        return x

    with Sizes() as sizes, torch.autograd.graph.saved_tensors_hooks(record, lambda x: x):
        case.run(fused_ranked_attention)
    assert max(kept) < B * T * (T + M)
    for dtype in (torch.bool, torch.int32, torch.int64):
        assert sizes.most[dtype] <= B * 4 * (T + K)


def test_tables_are_made_once_for_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, tables = [], fused_ranked._tables

    def counted(*arguments: Any) -> Any:
        calls.append(arguments)
        return tables(*arguments)

    monkeypatch.setattr(fused_ranked, "_tables", counted)
    tiny_xlnet(n_layer=3, n_head=1).read(torch.randint(13, (1, 5)), execution=Execution("triton"))
    assert len(calls) == 1


def test_ranks_may_be_any_numbers() -> None:
    """Ranks that 32 bits do not hold are as far away as those that they do."""
    case = Case.draw(B=2, T=5, M=2, K=3, N=1, H=4, dtype=torch.float32)
    far = torch.tensor([-(2**40), 7, 2**40], dtype=torch.int64)
    rank, sees = far[torch.randint(3, (2, 7))], far[torch.randint(3, (2, 8))]
    case.sight = replace(case.sight, sees=sees, rank=rank, _known={})
    compare(case, case.run(ranked_attention))


def read_twice(model: XLNet, execution: Execution) -> dict[str, Tensor]:
    """Read two segments with all that an XLNet knows, and return states, scores of targets, and every gradient."""
    torch.manual_seed(1)
    ids, texts, rank = torch.randint(13, (3, 9)), torch.randint(2, (3, 9)), torch.randint(-1, 4, (3, 9))
    facts: dict[str, Any] = {
        "segments": texts,
        "is_backward": torch.tensor([False, True, True]),
        "n_pad": torch.tensor([0, 3, 0]),
    }
    targets = torch.stack([3 + torch.randperm(6)[:3] for _ in range(3)])
    order = Order(rank, rank.clamp(min=0), targets)
    model.zero_grad()
    h, mems = model.read(ids, **facts, execution=execution)
    mems = mems.reset(torch.tensor([False, False, True]))
    out = model(ids, order=order, labels=ids.gather(1, targets), mems=mems, **facts, execution=execution)
    assert out.nll is not None
    (out.nll.sum() + (h * facts["n_pad"].eq(0)[:, None, None]).square().sum()).backward()
    real = torch.arange(9) >= facts["n_pad"][:, None]
    return {"states": h.detach()[real], "nats": out.nll.detach(), **gradients(model)}


def test_a_model_computes_the_same_with_them() -> None:
    model = tiny_xlnet(n_head=1)
    expected = read_twice(model, Execution("equation"))
    for what, actual in read_twice(model, Execution("triton")).items():
        assert_close(what, actual, expected[what], 1e-5)


@pytest.mark.filterwarnings("ignore")  # of the compiler, about its own code
def test_a_compiled_layer_calls_the_kernels_as_they_are() -> None:
    model, ids = tiny_xlnet(n_layer=1, n_head=1).train(), torch.randint(13, (1, 4))
    found = []
    for run in (run_layer, torch.compile(run_layer, backend="aot_eager")):
        model.zero_grad()
        model.read(ids, segments=ids % 2, execution=Execution("triton", run_layer=run))[0].sum().backward()
        found.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    for actual, expected in zip(*found, strict=True):
        assert_close("gradient", actual, expected, 1e-6)


def test_a_gpu_gets_them_and_an_old_one_matmul(capability: list[int]) -> None:
    assert choose_ranked_backend("auto", GPU) is choose_ranked_backend("triton", GPU) is fused_ranked_attention
    assert choose_ranked_backend("auto", GPU, in_compiled=True) is fused_ranked_attention
    assert choose_ranked_backend("auto", CPU) is matmul_ranked_attention
    assert choose_ranked_backend("auto", GPU, dtype=torch.float64) is matmul_ranked_attention
    assert choose_ranked_backend("auto", GPU, dtype=torch.bfloat16, d_head=257) is matmul_ranked_attention
    capability[:] = [7, 5]
    assert choose_ranked_backend("auto", GPU) is matmul_ranked_attention


def test_where_they_cannot_run_a_line_says_why(capability: list[int]) -> None:
    """By the same function as for a Transformer-XL, see `test_choice.py`; it gets the type and the width of the model."""
    with pytest.raises(ConfigError, match=r"d_head \(130\) does not fit .*; 128 do; use 'auto'"):
        tiny_xlnet(d_head=130).check_backend("triton", GPU)
    with pytest.raises(ConfigError, match="fp32 at most"):
        tiny_xlnet().double().check_backend("triton", GPU)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("d_head", [64, 80])
def test_whole_sizes_on_a_gpu(dtype: torch.dtype, d_head: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the tiles that are chosen there."""
    monkeypatch.undo()
    case = Case.draw(B=4, T=300, M=200, K=60, N=3, H=d_head, n_unseen=(0, 90, 210, 200), dtype=dtype)
    if dtype != torch.float32:
        return compare_in_narrow_type(case)
    return compare(case, case.run(ranked_attention), 1e-4)
