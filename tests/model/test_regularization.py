"""The options of dropout in a whole model: where they apply, what shares a mask, and what is never dropped."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.helpers import tiny_model
from tests.training import helpers as training_helpers
from transformer_xl.model.attention.block import AttentionKind
from transformer_xl.model.base import LanguageModel
from transformer_xl.model.call import Regularizers
from transformer_xl.model.dropout import DropConnectLinear, Dropout
from transformer_xl.model.transformer_xl import TransformerXL

KINDS: dict[str, dict[str, Any]] = {
    "transformer_xl": {},
    "shaw": {"attention": "shaw", "max_klen": 20},
    "vaswani": {"attention": "vaswani"},
    "al_rfou": {"attention": "al_rfou", "max_klen": 20},
}
WIDE = {"d_model": 60, "n_head": 2, "d_head": 30, "d_inner": 80, "vocab_size": 101, "mem_len": 7}
EVERYTHING = {
    "locked_dropout": True,
    "dropout": 0.3,
    "dropatt": 0.1,
    "dropinput": 0.4,
    "dropoutput": 0.5,
    "dropqkv": 0.2,
    "dropemb": 0.3,
    "dropweight": 0.2,
}


def random_ids(T: int = 9, *, seed: int = 0) -> Tensor:
    return torch.randint(101, (3, T), generator=torch.Generator().manual_seed(seed))


def nll(model: TransformerXL, **settings: Any) -> Tensor:
    ids = random_ids(10)
    output = model(ids[:, :-1], labels=ids[:, 1:], **settings).nll
    assert output is not None
    return output


class Recorder:
    """Input and output of every dropout of a model, by name, in the order of the calls that drop anything."""

    def __init__(self, model: nn.Module) -> None:
        self.calls: dict[str, list[tuple[Tensor, Tensor]]] = {}
        for name, module in model.named_modules():
            if isinstance(module, Dropout):
                module.register_forward_hook(self._record(name))

    def _record(self, name: str) -> Any:
        def hook(_: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> None:
            if out is not args[0]:
                self.calls.setdefault(name, []).append((args[0].detach(), out.detach()))

        return hook


@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("kind", KINDS)
def test_whatever_is_dropped_along_time_is_dropped_at_all_positions(kind: str, activation: str) -> None:
    model = tiny_model(**WIDE, **KINDS[kind], activation=activation, locked_dropout=True, dropout=0.5, dropqkv=0.5).train()
    recorder = Recorder(model)
    mems = model(random_ids()).mems
    model(random_ids(seed=1), mems=mems)
    n_input = 2 if kind == "transformer_xl" else 1  # embeddings, and r
    calls_each = {"drop_input": n_input, "drop_output": 1}
    for i in range(2):
        calls_each |= {f"layers.{i}.attention.drop": 1, f"layers.{i}.attention.drop_qkv": 2, f"layers.{i}.feed_forward.drop": 2}
    assert {name: len(calls) for name, calls in recorder.calls.items()} == {name: 2 * n for name, n in calls_each.items()}
    for name, calls in recorder.calls.items():
        for x, out in calls:
            kept = torch.where(x == 0, torch.nan, out / x)
            of_feature = kept.nanmean(-2, keepdim=True)  # relu is 0 at some positions, which say nothing
            torch.testing.assert_close(kept, of_feature.expand_as(kept).where(x != 0, torch.nan), equal_nan=True)
            assert 0.2 < (of_feature == 0).double().mean() < 0.8, name


def test_independent_masks_stay_the_default() -> None:
    model = tiny_model(**WIDE, dropout=0.5).train()
    recorder = Recorder(model)
    model(random_ids())
    for name in ("drop_input", "drop_output", "layers.0.attention.drop", "layers.1.feed_forward.drop"):
        for _, out in recorder.calls[name]:
            assert not torch.equal(out[..., 0, :] == 0, out[..., 1, :] == 0), name


@pytest.mark.parametrize(
    ("settings", "shares"),
    [
        ({"dropout": 0.5}, {"drop_input": 0.5, "drop_output": 0.5, "layers.0.attention.drop": 0.5}),
        ({"dropout": 0.5, "dropinput": 0.0}, {"drop_input": 0.0, "drop_output": 0.5, "layers.0.attention.drop": 0.5}),
        ({"dropinput": 0.7, "dropoutput": 0.3}, {"drop_input": 0.7, "drop_output": 0.3, "layers.0.attention.drop": 0.0}),
    ],
)
def test_input_and_output_have_rates_of_their_own(settings: dict[str, float], shares: dict[str, float]) -> None:
    model = tiny_model(**WIDE, **settings).train()
    recorder = Recorder(model)
    model(random_ids(40))
    assert set(recorder.calls).issuperset(name for name, share in shares.items() if share)
    for name, share in shares.items():
        for x, out in recorder.calls.get(name, ()):
            dropped = (out == 0) & (x != 0)
            assert dropped.double().mean().item() == pytest.approx(share, abs=0.04), name


@pytest.mark.parametrize("layout", [{}, {"d_embed": 16}, {"cutoffs": (20, 60), "div_val": 2}])
def test_dropped_words_vanish_from_the_input_in_all_rows(layout: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model(**WIDE, **layout, dropemb=0.4).train()
    entered, project = [], AttentionKind.project
    monkeypatch.setattr(AttentionKind, "project", lambda self, h, *rest: entered.append(h) or project(self, h, *rest))
    ids = random_ids(200)
    model(ids)
    absent = (entered[0].abs() < 1e-4).all(-1)
    gone = set(ids[absent].tolist())
    assert gone.isdisjoint(ids[~absent].tolist())
    assert 20 < len(gone) < 60  # of 101
    embedded = model.embedding(ids)
    torch.testing.assert_close(entered[0][~absent], embedded[~absent] / 0.6, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("tied", [True, False])
def test_the_softmax_keeps_the_words_that_the_input_lost(tied: bool) -> None:
    model = tiny_model(**WIDE, tie_weight=tied, dropemb=0.5).train()
    torch.manual_seed(0)
    nll(model).sum().backward()
    assert isinstance(model.embedding.weight, Tensor)
    assert model.embedding.weight.grad is not None
    gradient = model.embedding.weight.grad.abs().amax(-1)
    without_gradient = gradient < 1e-4 * gradient.max()
    read = torch.zeros(101, dtype=torch.bool)
    read[random_ids(10)[:, :-1]] = True
    assert without_gradient[~read].all() != tied
    assert without_gradient[read].any() != tied


@pytest.mark.parametrize("kind", KINDS)
def test_the_matrices_of_the_layers_lose_weights_and_nothing_else_does(kind: str) -> None:
    model = tiny_model(**WIDE, **KINDS[kind], dropweight=0.5, activation="gelu").train()
    torch.manual_seed(0)
    nll(model).sum().backward()
    matrices = {name for name, p in model.named_parameters() if name.startswith("layers.") and p.dim() == 2}
    names = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, DropConnectLinear)}
    assert names == matrices
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        share = (parameter.grad == 0).double().mean().item()
        if name in matrices:
            assert share > 0.45, name
        elif name.startswith("layers."):
            assert share < 0.1, name


def test_memory_and_segment_are_projected_with_the_same_weights() -> None:
    block = tiny_model(**WIDE, dropweight=0.5).train().layers[0].attention
    assert isinstance(block, AttentionKind)
    h = torch.randn(3, 5, 60)
    _, k, v = block.project(h, h, None)
    assert torch.equal(k[:, :5], k[:, 5:])
    assert torch.equal(v[:, :5], v[:, 5:])
    assert not torch.allclose(k, block.project(h, h, None)[1]), "but every call has a mask of its own"


def test_memory_holds_what_entered_the_layers_and_is_not_dropped_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model(**WIDE | {"mem_len": 14}, **EVERYTHING).train()
    entered, project = [], AttentionKind.project
    monkeypatch.setattr(AttentionKind, "project", lambda self, h, *rest: entered.append(h) or project(self, h, *rest))
    first = model(random_ids()).mems
    second = model(random_ids(seed=1), mems=first).mems
    for i in range(2):
        assert torch.equal(first.hidden[i], entered[i])
        assert torch.equal(second.hidden[i], torch.cat([entered[i][:, -5:], entered[2 + i]], 1))
        assert not second.hidden[i].requires_grad
    one, other = (entered[i].detach() == 0 for i in (0, 2))
    assert not torch.equal(one.all(1), other.all(1)), "a segment has masks of its own"


@pytest.mark.parametrize("kind", KINDS)
def test_evaluation_and_the_weights_know_nothing_of_it(kind: str) -> None:
    regularized = tiny_model(**WIDE, **KINDS[kind], **EVERYTHING)
    plain = tiny_model(**WIDE, **KINDS[kind])
    plain.load_state_dict(regularized.state_dict())
    state = torch.get_rng_state()
    assert torch.equal(nll(regularized), nll(plain))
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(0)
    trained = nll(regularized.train())
    assert not torch.allclose(trained, nll(plain))
    torch.manual_seed(0)
    assert torch.equal(nll(regularized), trained), "the masks follow the seed"


@pytest.mark.parametrize("kind", KINDS)
def test_everything_at_once_learns_in_every_precision(kind: str) -> None:
    layout: dict[str, Any] = {"pre_lnorm": True, "final_norm": True, "activation": "gelu"} if kind != "vaswani" else {}
    model = tiny_model(**WIDE, **KINDS[kind], **EVERYTHING, **layout).train()
    for dtype in (torch.float32, torch.bfloat16):
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            nll(model, mems=model(random_ids(seed=2)).mems).mean().backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None, name
            assert torch.isfinite(parameter.grad).all(), name
            assert parameter.grad.any(), name


@pytest.mark.parametrize("kind", ["transformer_xl", "vanilla", "lstm"])
def test_penalties_are_mean_squares_of_the_last_states_and_of_their_changes(kind: str) -> None:
    model = training_helpers.tiny_model(kind=kind)
    assert isinstance(model, LanguageModel)
    ids = torch.randint(11, (3, 5), generator=torch.Generator().manual_seed(0))
    labels = ids.clone()
    labels[0, :4] = -100
    (*_, states), _ = model.hidden_states(ids)
    changes = (states[:, 1:] - states[:, :-1]).square().mean()
    expected = 11 * (0.2 * states.square().mean() + 0.1 * changes)  # of 11 labels
    out = model(ids, labels=labels, regularizers=Regularizers(activation=0.2, temporal=0.1))
    assert out.auxiliary is not None
    torch.testing.assert_close(out.auxiliary, expected)
    plain = model(ids, labels=labels)
    assert plain.auxiliary is None and plain.nll is not None
    assert torch.equal(out.nll, plain.nll), "nats stay what they are"
    one = model(ids[:, :1], labels=ids[:, :1], regularizers=Regularizers(temporal=0.1))
    assert one.auxiliary is not None and one.auxiliary.item() == 0, "a single token changes from nothing"


@pytest.mark.parametrize("kind", ["transformer_xl", "vanilla", "lstm"])
def test_penalties_are_of_states_before_their_dropout(kind: str) -> None:
    model = training_helpers.tiny_model(kind=kind, dropoutput=0.6).train()
    ids, by = torch.randint(11, (3, 5)), Regularizers(activation=0.2, temporal=0.1)
    dropped = model(ids, labels=ids, regularizers=by)
    assert dropped.nll is not None and not torch.equal(dropped.nll, model(ids, labels=ids).nll)
    torch.testing.assert_close(dropped.auxiliary, model.eval()(ids, labels=ids, regularizers=by).auxiliary)
