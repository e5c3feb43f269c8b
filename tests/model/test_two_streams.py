"""XLNet's attention: products against autograd and against the loops in any blocks, dropout, types, and what is kept."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers import assert_close, tiny_xlnet
from tests.reference.test_xlnet import compare, read_by_loops
from transformer_xl.errors import ConfigError
from transformer_xl.model.attention import two_streams
from transformer_xl.model.attention.two_streams import Biases, BlockSight, Sight, ranked_attention
from transformer_xl.model.call import Execution, run_layer

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}
SHAPES: dict[str, dict[str, Any]] = {
    "odd sizes": {"B": 2, "T": 7, "M": 6, "K": 3, "N": 3, "H": 5},
    "no memory": {"B": 3, "T": 5, "M": 0, "K": 2, "N": 2, "H": 4},
    "content alone": {"B": 3, "T": 6, "M": 2, "K": 0, "N": 2, "H": 4},
    "content alone, all in sight": {"B": 3, "T": 6, "M": 0, "K": 0, "N": 2, "H": 4, "hides": 0.0},
    "one token": {"B": 2, "T": 1, "M": 5, "K": 1, "N": 1, "H": 4},
    "some see nothing": {"B": 2, "T": 5, "M": 2, "K": 4, "N": 2, "H": 4, "hides": 0.8},
    "several blocks": {"B": 2, "T": 260, "M": 3, "K": 5, "N": 2, "H": 4},
}
BLOCKS = [(192, 4 << 20), (2, 1), (3, 1 << 12)]
"""Queries in a block, and bytes that rows are grouped by: everything; a row at a time; some rows."""


@dataclass
class Case:
    """Arguments of one call, and the gradient of its result."""

    inputs: dict[str, Tensor]
    sight: Sight
    grad: Tensor

    @classmethod
    def draw(
        cls, B: int, T: int, M: int, K: int, N: int, H: int, *, hides: float = 0.4, texts: bool = True, both: bool = True,
        dtype: torch.dtype = torch.float64,
    ) -> "Case":  # fmt: skip
        """Draw a case; a key is hidden with probability `hides`, and all are from the last query if any may be."""
        S, Q = M + T, T + K
        shapes = {"q": (B, Q, N, H), "k": (B, S, N, H), "v": (B, S, N, H), "r": (1 + both, S + T, N, H)}
        shapes |= {"u": (N, H), "v_bias": (N, H), "s": (N, H), "e": (2, N, H)}
        inputs = {name: torch.randn(shape, dtype=torch.float64).to(dtype).requires_grad_() for name, shape in shapes.items()}
        hidden = torch.rand(B, Q, S) < hides
        hidden[:, -1] |= hides > 0
        is_backward = torch.arange(B) % 3 == 1 if both else torch.zeros(B, dtype=torch.bool)
        differs = torch.rand(B, Q, S) < 0.5 if texts else None
        sight = Sight(torch.randint(0, T, (B, K)), hidden, is_backward, differs)
        return cls(inputs, sight, torch.randn(B, Q, N, H).to(dtype))

    def to(self, dtype: torch.dtype) -> "Case":
        """Return the same in another type."""
        inputs = {name: x.detach().to(dtype).requires_grad_() for name, x in self.inputs.items()}
        return Case(inputs, self.sight, self.grad.to(dtype))

    def attend(self, *, dropatt: float = 0.0) -> Tensor:
        """Return the output."""
        q, k, v, r, *biases = self.inputs.values()
        return ranked_attention(q, k, v, r, biases=Biases(*biases), sight=self.sight, dropatt=dropatt)

    def run(self) -> dict[str, Tensor]:
        """Return the output, and the gradients of all inputs that have one."""
        out = self.attend()
        grads = torch.autograd.grad(out, list(self.inputs.values()), self.grad, allow_unused=True)
        given = {name: grad for name, grad in zip(self.inputs, grads, strict=True) if grad is not None}
        return {"out": out.detach(), **given}

    def run_by_autograd(self) -> dict[str, Tensor]:
        """Return the same with gradients that autograd finds, all queries of content in one block."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(two_streams, "_BLOCK", 1 << 20)
            patch.setattr(two_streams, "products", plain)
            return self.run()


def plain(
    qu: Tensor, qv: Tensor, k: Tensor, v: Tensor, r: Tensor, by_text: Tensor | None, sight: BlockSight, dropatt: float
) -> Tensor:
    """Do what `products` does, without dropout."""
    assert not dropatt
    return (qu @ k.mT + sight.bias(qv, r, by_text)).softmax(-1) @ v


@pytest.mark.parametrize(("both", "texts"), [(True, True), (False, False)])
@pytest.mark.parametrize("shape", SHAPES)
def test_products_equal_what_autograd_makes_of_the_equation(
    shape: str, both: bool, texts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for dtype, tolerance in TOLERANCE.items():
        case = Case.draw(**SHAPES[shape], both=both, texts=texts, dtype=dtype)
        expected = case.run_by_autograd()
        for block, n_bytes in BLOCKS:
            monkeypatch.setattr(two_streams, "_BLOCK", block)
            monkeypatch.setattr(two_streams, "_CACHED_BYTES", n_bytes)
            actual = case.run()
            assert actual.keys() == expected.keys()
            for what, value in actual.items():
                assert_close(f"{what} in blocks of {block}", value, expected[what], tolerance)


@pytest.mark.parametrize("way", ["products", "sdpa"])
@pytest.mark.parametrize(("block", "n_bytes"), BLOCKS[1:])
def test_any_blocks_equal_the_loops(way: str, block: int, n_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(two_streams, "_BLOCK", block)
    monkeypatch.setattr(two_streams, "_CACHED_BYTES", n_bytes)
    monkeypatch.setattr(two_streams, "products", getattr(two_streams, way))
    model = tiny_xlnet(mem_len=3)
    compare(model, read_by_loops(model, ages=[0, 5]), torch.float64, way)


def test_bf16_rounds_no_more_than_autograd() -> None:
    """Of many draws together: the gradient of a vector is a few numbers, whose errors may happen to cancel."""
    squares: dict[str, list[float]] = {}
    for _ in range(20):
        case = Case.draw(B=2, T=40, M=20, K=9, N=2, H=16)
        exact, case = case.run(), case.to(torch.bfloat16)
        actual, by_autograd = case.run(), case.run_by_autograd()
        for what, value in exact.items():
            total = squares.setdefault(what, [0.0, 0.0])
            for i, rounded in enumerate((actual, by_autograd)):
                total[i] += (rounded[what] - value).square().sum().item()
    for what, (error, plain_error) in squares.items():
        assert error < 1.3**2 * plain_error, what


@pytest.mark.parametrize("shape", ["odd sizes", "some see nothing"])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_gradients_with_dropout_are_those_of_what_was_dropped(shape: str, dtype: torch.dtype) -> None:
    case = Case.draw(**SHAPES[shape])
    names = list(case.inputs)

    def attend(*inputs: Tensor) -> Tensor:
        torch.manual_seed(3)
        return replace(case, inputs=dict(zip(names, inputs, strict=True))).attend(dropatt=0.4)

    if dtype == torch.float64:
        assert torch.autograd.gradcheck(attend, tuple(case.inputs.values()), fast_mode=True)
        return
    wide, narrow = (
        torch.autograd.grad(attend(*c.inputs.values()), list(c.inputs.values()), c.grad) for c in (case, case.to(dtype))
    )
    for name, expected, actual in zip(names, wide, narrow, strict=True):  # fp32 computes its weights again
        assert_close(f"gradient of {name}", actual.double(), expected, TOLERANCE[dtype])


@pytest.mark.parametrize("way", ["products", "sdpa"])
def test_dropout_keeps_the_mean_and_drops_the_share_asked_for(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values that are the unit vectors show the weights."""
    S = 12
    monkeypatch.setattr(two_streams, "products", getattr(two_streams, way))
    case = Case.draw(B=2, T=6, M=S - 6, K=2, N=2, H=S)
    case.inputs["v"] = torch.eye(S, dtype=torch.float64)[:, None].expand(2, S, 2, S)
    with torch.no_grad():
        kept = case.attend()
        drawn = torch.stack([case.attend(dropatt=0.4) for _ in range(1000)])
    seen = kept > 0
    assert (drawn[:, seen] == 0).double().mean().item() == pytest.approx(0.4, abs=0.01)
    error = drawn.std(0) / len(drawn) ** 0.5
    assert ((drawn.mean(0) - kept).abs() <= 5 * error + 1e-6).all()


def test_nothing_of_the_size_of_scores_is_kept() -> None:
    """Without dropout; with it the masks are, a byte each."""
    case = Case.draw(B=1, T=40, M=40, K=4, N=2, H=4, dtype=torch.float32)
    kept: list[int] = []

    def record(x: Tensor) -> Tensor:
        kept.append(x.numel() if x.is_floating_point() else 0)
        return x

    with torch.autograd.graph.saved_tensors_hooks(record, lambda x: x):
        case.attend()
    assert 0 < max(kept) < 40 * 80


def test_there_is_no_backend_to_choose() -> None:
    with pytest.raises(
        ConfigError, match=r"train.attention \(sdpa\) chooses an attention backend, and a model of kind 'xlnet'"
    ):
        tiny_xlnet().check_backend("sdpa", torch.device("cpu"))


@pytest.mark.filterwarnings("ignore")  # of the compiler, about its own code
def test_a_compiled_layer_has_the_same_gradients() -> None:
    model, ids = tiny_xlnet().train(), torch.randint(13, (2, 6))
    gradients = []
    for run in (run_layer, torch.compile(run_layer, backend="aot_eager")):
        model.zero_grad()
        model.read(ids, segments=ids % 2, execution=Execution(run_layer=run))[0].sum().backward()
        gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    for actual, expected in zip(*gradients, strict=True):
        assert_close("gradient", actual, expected, 1e-5)
