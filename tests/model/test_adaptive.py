"""The adaptive softmax as a distribution, in chunks, and in half precision; its equation is compared in tests/reference."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers import assert_close, gradients, tiny_model
from transformer_xl.model import softmax
from transformer_xl.model.adaptive import AdaptiveSoftmax
from transformer_xl.model.softmax import linear_nll
from transformer_xl.training.lamb import Lamb

TAILS = {"cutoffs": (4, 9), "div_val": 2, "proj_share_all_but_first": True}


@given(
    cutoffs=st.sets(st.integers(1, 12), max_size=4).map(sorted).map(tuple),
    div_val=st.sampled_from([1, 2]),
    tie_weight=st.booleans(),
    shared=st.booleans(),
    proj_same_dim=st.booleans(),
    d_embed=st.sampled_from([None, 16, 18]),
)
def test_probabilities_add_up_to_one_and_losses_are_theirs(cutoffs, div_val, tie_weight, shared, proj_same_dim, d_embed):
    model = tiny_model(
        cutoffs=cutoffs,
        div_val=div_val,
        tie_weight=tie_weight,
        proj_share_all_but_first=shared,
        proj_same_dim=proj_same_dim,
        d_embed=d_embed,
        d_model=16,
    )
    ids, labels = torch.randint(13, (2, 2, 6))
    labels[0, 2] = labels[1, 5] = -100
    log_probabilities = model(ids).logits.log_softmax(-1)
    nll = model(ids, labels=labels).nll
    expected = -log_probabilities.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1) * (labels >= 0)
    assert_close("nll", nll, expected, 1e-5)
    if cutoffs or div_val > 1:
        assert_close("sum", model(ids).logits.exp().sum(-1), torch.ones(2, 6), 1e-5)


@pytest.mark.parametrize("variant", [{}, {"cutoffs": (4, 9)}, TAILS, {**TAILS, "tie_weight": False}])
@pytest.mark.parametrize("autocast", [False, True])
def test_chunks_change_neither_losses_nor_gradients(variant, autocast, monkeypatch):
    """Chunks of one token up to all, in fp32 by the library's function, under autocast by recomputation."""
    model = tiny_model(**variant)
    ids, labels = torch.randint(13, (2, 3, 7))
    labels[1, 3] = -100
    weights = torch.rand(3, 7)
    results = []
    for elements in (1, 40, 1 << 25):
        monkeypatch.setattr(softmax, "CHUNK_ELEMENTS", elements)
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            nll = model(ids, labels=labels).nll
        (nll * weights).sum().backward()
        results.append([nll.detach(), *(gradient.clone() for gradient in gradients(model).values())])
    tolerance = 2e-2 if autocast else 1e-5  # gradients of weights add up bf16 products of one chunk or of several
    for result in results[:-1]:
        for actual, expected in zip(result, results[-1], strict=True):
            assert_close("chunked", actual, expected, tolerance)


def test_autocast_computes_losses_near_those_of_fp32_and_keeps_them_fp32():
    model = tiny_model(**TAILS)
    ids, labels = torch.randint(13, (2, 3, 7))
    expected = model(ids, labels=labels).nll
    with torch.autocast("cpu", torch.bfloat16):
        out = model(ids, labels=labels)
        logits = model(ids).logits
    assert out.nll.dtype == logits.dtype == torch.float32
    assert_close("nll", out.nll, expected, 3e-2)
    assert_close("sum", logits.exp().sum(-1), torch.ones(3, 7), 1e-5)
    assert {h.dtype for h in out.mems.hidden} == {torch.float32}


def test_a_model_in_bf16_scores_and_learns_also_where_no_token_falls_in_a_cluster():
    model = tiny_model(**TAILS).to(torch.bfloat16)
    for labels in (torch.randint(13, (3, 7)), torch.zeros(1, 4, dtype=torch.int64)):
        model.zero_grad()
        nll = model(labels, labels=labels).nll
        nll.sum().backward()
        assert nll.dtype == torch.float32
        assert all(gradient.isfinite().all() for gradient in gradients(model).values())


def test_all_labels_ignored_is_zero_and_leaves_them_alone():
    labels = torch.full((1, 5), -100)
    nll = tiny_model(**TAILS)(torch.zeros(1, 5, dtype=torch.int64), labels=labels).nll
    assert torch.equal(nll, torch.zeros(1, 5))
    assert (labels == -100).all()


def test_initial_weights_follow_the_authors_distributions():
    torch.manual_seed(0)
    model = tiny_model(**{**TAILS, "d_model": 64, "d_embed": 64, "proj_init_std": 0.5, "init_std": 0.02})
    model.init_weights()
    assert model.get_parameter("embedding.projections.0").std().item() == pytest.approx(0.5, rel=0.1)
    assert model.get_parameter("embedding.tables.0").std().item() == pytest.approx(0.02, rel=0.2)
    assert model.get_parameter("softmax.projections.0").std().item() == pytest.approx(0.5, rel=0.1)
    assert model.get_parameter("softmax.cluster_weight").std().item() == pytest.approx(0.02, rel=0.3)
    assert isinstance(model.softmax, AdaptiveSoftmax)
    assert not any(bias.any() for bias in [*model.softmax.biases, model.get_parameter("softmax.cluster_bias")])


@pytest.mark.parametrize("tie_weight", [True, False])
def test_clusters_of_one_width_share_one_parameter(tie_weight):
    """As in the code of the authors and NVIDIA, so that LAMB has one trust ratio for the whole vocabulary."""
    model = tiny_model(cutoffs=(4, 9), tie_weight=tie_weight, init_std=0.3)
    expected = {"bias": (13,), "cluster_weight": (2, 10), "cluster_bias": (2,)} | ({} if tie_weight else {"weight": (13, 10)})
    assert {name: tuple(p.shape) for name, p in model.softmax.named_parameters()} == expected
    optimizer = Lamb(model.softmax.parameters(), lr=0.1, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0)
    before = model.softmax.bias.detach().clone()
    ids, labels = torch.randint(13, (2, 3, 7))
    model(ids, labels=labels).nll.mean().backward()
    optimizer.step()
    step = model.softmax.bias.detach() - before
    assert step.norm().item() == pytest.approx(0.1 * before.norm().item(), rel=1e-4)
    plain = tiny_model(cutoffs=(4, 9), div_val=2)
    assert isinstance(plain.softmax, AdaptiveSoftmax)
    assert [tuple(bias.shape) for bias in plain.softmax.biases] == [(4,), (5,), (4,)]


@pytest.mark.parametrize("has_library", [True, False])
def test_linear_nll_in_double_precision_stays_double(has_library, monkeypatch):
    monkeypatch.setattr(softmax, "CHUNK_ELEMENTS", 8)
    if not has_library:  # as in torch 2.10
        monkeypatch.delattr(torch.nn, "LinearCrossEntropyOptions", raising=False)
        monkeypatch.delattr(softmax.F, "linear_cross_entropy", raising=False)
    h, vectors, bias = torch.randn(5, 3).double(), torch.randn(4, 3).double(), torch.randn(4).double()
    labels = torch.tensor([0, 3, -100, 1, 2])
    scores = (h @ vectors.T + bias).log_softmax(-1)
    expected = -scores.gather(1, labels.clamp(min=0)[:, None]).squeeze(1) * (labels >= 0)
    actual = linear_nll(h, vectors, bias, labels)
    assert actual.dtype == torch.float64
    assert_close("nll", actual, expected, 1e-12)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("variant", [{}, {"cutoffs": (4, 9)}])
def test_no_more_scores_than_allowed_are_held_at_once(variant, autocast, monkeypatch):
    """Scores are computed for so few tokens at a time that tokens x classes stay within the bound."""
    held, own, library = [], softmax._nll, getattr(softmax.F, "linear_cross_entropy", None)

    def count(h, vectors, *rest):
        held.append(len(h) * len(vectors))
        return own(h, vectors, *rest)

    def count_library(h, vectors, *rest, options, **others):
        assert library is not None
        held.append(options.batch_chunk_size * len(vectors))
        return library(h, vectors, *rest, options=options, **others)

    monkeypatch.setattr(softmax, "CHUNK_ELEMENTS", 40)
    monkeypatch.setattr(softmax, "_nll", count)
    monkeypatch.setattr(softmax.F, "linear_cross_entropy", count_library, raising=False)
    ids, labels = torch.randint(13, (2, 3, 7))
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        tiny_model(**variant)(ids, labels=labels)
    assert held
    assert max(held) <= 40


@pytest.mark.parametrize("token", [-1, 13])
@pytest.mark.parametrize("variant", [{}, {"cutoffs": (4, 9)}, TAILS, {"div_val": 2}])
def test_ids_and_labels_outside_the_vocabulary_are_refused(variant, token):
    inside, outside = torch.zeros(1, 2, dtype=torch.int64), torch.tensor([[1, token]])
    for ids, labels in ((outside, None), (inside, outside)):
        with pytest.raises(IndexError):
            tiny_model(**variant)(ids, labels=labels)
