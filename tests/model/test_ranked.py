"""Every backend of XLNet's attention against its equation: outputs, every gradient, dropout, and what is kept."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers import assert_close, tiny_xlnet
from tests.model.ranked_case import Case
from transformer_xl.errors import ConfigError
from transformer_xl.model import ranked
from transformer_xl.model.attention.two_streams import ranked_attention
from transformer_xl.model.call import Execution, run_layer
from transformer_xl.model.ranked import choose_ranked_backend, matmul_ranked_attention, sdpa_ranked_attention

CPU = torch.device("cpu")
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}
SHAPES: dict[str, dict[str, Any]] = {
    "odd sizes": {"B": 2, "T": 7, "M": 6, "K": 3, "N": 3, "H": 5},
    "no memory": {"B": 3, "T": 5, "M": 0, "K": 2, "N": 2, "H": 4},
    "content alone": {"B": 3, "T": 6, "M": 2, "K": 0, "N": 2, "H": 4},
    "content alone, all in sight": {"B": 3, "T": 6, "M": 0, "K": 0, "N": 2, "H": 4, "sees": "all"},
    "one token": {"B": 2, "T": 1, "M": 5, "K": 1, "N": 1, "H": 4},
    "some see nothing": {"B": 2, "T": 5, "M": 2, "K": 4, "N": 2, "H": 4, "sees": "nothing"},
    "several blocks": {"B": 2, "T": 260, "M": 3, "K": 5, "N": 2, "H": 4},
}


@pytest.mark.parametrize("n_text", [0, 1, 3])
@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ["matmul", "sdpa"])
def test_backend_equals_the_equation(name: str, shape: str, both: bool, n_text: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for dtype, tolerance in TOLERANCE.items():
        case = Case.draw(**SHAPES[shape], both=both, n_text=n_text, dtype=dtype)
        expected = case.run(ranked_attention)
        for n_bytes in (1, 1 << 12, 4 << 20):  # a head at a time, some rows, everything
            monkeypatch.setattr(ranked, "_CACHED_BYTES", n_bytes)
            found = case.run(choose_ranked_backend(name, CPU))
            assert found.keys() == expected.keys()
            for what, actual in found.items():
                assert_close(f"{what} of {name}", actual, expected[what], tolerance)


@pytest.mark.parametrize("name", ["matmul", "sdpa"])
def test_bf16_rounds_no_more_than_the_equation(name: str) -> None:
    case = Case.draw(B=2, T=40, M=20, K=9, N=2, H=16)
    exact = case.run(ranked_attention)
    case = case.to(torch.bfloat16)
    for what, equation in case.run(ranked_attention).items():
        actual = case.run(choose_ranked_backend(name, CPU))[what]
        allowed = 1.3 * (equation - exact[what]).norm()
        assert (actual - exact[what]).norm() < allowed, what


@pytest.mark.parametrize("shape", ["odd sizes", "some see nothing"])
def test_gradients_with_dropout_are_those_of_what_was_dropped(shape: str) -> None:
    case = Case.draw(**SHAPES[shape])
    names = list(case.inputs)

    def attend(*inputs: Tensor) -> Tensor:
        torch.manual_seed(3)
        return replace(case, inputs=dict(zip(names, inputs, strict=True))).attend(matmul_ranked_attention, dropatt=0.4)

    assert torch.autograd.gradcheck(attend, tuple(case.inputs.values()), fast_mode=True)


@pytest.mark.parametrize("name", ["equation", "matmul", "sdpa"])
def test_dropout_keeps_the_mean_and_drops_the_share_asked_for(name: str) -> None:
    """Values that are the unit vectors show the weights."""
    S = 12
    case = Case.draw(B=2, T=6, M=S - 6, K=2, N=2, H=S)
    case.inputs["v"] = torch.eye(S, dtype=torch.float64)[:, None].expand(2, S, 2, S)
    attend = choose_ranked_backend(name, CPU)
    with torch.no_grad():
        kept = case.attend(attend)
        drawn = torch.stack([case.attend(attend, dropatt=0.4) for _ in range(1000)])
    seen = kept > 0
    assert (drawn[:, seen] == 0).double().mean().item() == pytest.approx(0.4, abs=0.01)
    error = drawn.std(0) / len(drawn) ** 0.5
    assert ((drawn.mean(0) - kept).abs() <= 5 * error + 1e-6).all()


def test_nothing_of_the_size_of_scores_is_kept() -> None:
    """Without dropout; with it the masks are, a byte each."""
    case = Case.draw(B=1, T=40, M=40, K=4, N=2, H=4, dtype=torch.float32)
    kept: list[int] = []

    def record(x: Tensor) -> Tensor:
        kept.append(x.numel())
        return x

    with torch.autograd.graph.saved_tensors_hooks(record, lambda x: x):
        case.attend(matmul_ranked_attention)
    assert max(kept) < 44 * 80


def test_facts_are_computed_once_for_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, facts = [], ranked._facts

    def counted(*arguments: Any) -> Any:
        calls.append(arguments)
        return facts(*arguments)

    monkeypatch.setattr(ranked, "_facts", counted)
    tiny_xlnet(n_layer=3).read(torch.randint(13, (2, 5)))
    assert len(calls) == 1


def test_names() -> None:
    assert choose_ranked_backend("equation", CPU) is ranked_attention
    assert choose_ranked_backend("auto", CPU) is choose_ranked_backend("matmul", CPU) is matmul_ranked_attention
    assert choose_ranked_backend("auto", torch.device("cuda")) is sdpa_ranked_attention
    model, ids = tiny_xlnet(), torch.randint(13, (1, 4))
    by_sdpa, by_equation = (model.read(ids, execution=Execution(name))[0] for name in ("sdpa", "equation"))
    assert_close("states", by_sdpa, by_equation, 1e-5)
    with pytest.raises(ConfigError, match="an xlnet has no attention backend 'flash'; known: auto, equation, matmul, sdpa"):
        model.check_backend("flash", CPU)
    with pytest.raises(ConfigError, match="an xlnet has no attention backend 'matmull'; did you mean 'matmul'"):
        model.read(ids, execution=Execution("matmull"))


@pytest.mark.filterwarnings("ignore")  # of the compiler, about its own code
def test_a_compiled_layer_calls_the_products_as_they_are() -> None:
    model, ids = tiny_xlnet().train(), torch.randint(13, (2, 6))
    graphs, found = [], []

    def count(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    for run in (run_layer, torch.compile(run_layer, backend=count)):
        model.zero_grad()
        model.read(ids, segments=ids % 2, execution=Execution(run_layer=run))[0].sum().backward()
        found.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    assert len(graphs) <= 3, "before and after, and once more where a layer's input has gradients"
    for actual, expected in zip(*found, strict=True):
        assert_close("gradient", actual, expected, 1e-5)
