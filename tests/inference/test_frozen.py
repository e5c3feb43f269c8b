"""Frozen weights and the softmax with them: rounded as promised, and otherwise the model's own numbers."""

from functools import partial
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers import assert_close, tiny_model
from tests.reference.test_equation import VARIANTS
from transformer_xl.errors import TokenizerError
from transformer_xl.inference import softmax as frozen_softmax
from transformer_xl.inference.frozen import freeze, product, streamed_product
from transformer_xl.inference.softmax import FrozenSoftmax, compute_head
from transformer_xl.kernels.device import InferencePrecision, activation_dtype
from transformer_xl.model.softmax import Embedding
from transformer_xl.model.transformer_xl import TransformerXL

# freeze


@given(
    rows=st.integers(1, 5),
    columns=st.integers(1, 9),
    exponents=st.lists(st.integers(-30, 30), min_size=5, max_size=5),
    seed=st.integers(0, 99),
)
def test_int8_rounds_by_at_most_half_a_step_of_each_output(rows: int, columns: int, exponents: list[int], seed: int) -> None:
    """Outputs of very different magnitude have scales of their own, and the largest weight of each is 127 steps."""
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    weight = weight * torch.tensor(exponents[:rows]).exp2().unsqueeze(1)
    matrix = freeze(weight, "int8")
    assert matrix.scale is not None and matrix.scale.shape == (rows,) and matrix.scale.dtype == torch.float32
    assert matrix.weight.dtype == torch.int8
    restored = matrix.weight.double() * matrix.scale.double().unsqueeze(1)
    error = (restored - weight.double()).abs().amax(1)
    assert (error <= matrix.scale.double() * (0.5 + 1e-4)).all()
    assert matrix.weight.abs().amax(1).tolist() == [127] * rows


def test_int8_of_zeros_is_zeros() -> None:
    matrix = freeze(torch.tensor([[0.0, 0.0], [1.0, -0.5]]), "int8")
    assert matrix.weight.tolist() == [[0, 0], [127, -64]]
    assert matrix.scale is not None and (matrix.scale > 0).all(), "0 / 0, and what an integer makes of NaN is not defined"
    assert product(torch.ones(1, 2), matrix, torch.float32)[0, 0] == 0


@pytest.mark.parametrize("wrong", [float("inf"), float("-inf"), float("nan")])
def test_int8_does_not_hide_weights_that_are_not_finite(wrong: float) -> None:
    """Their output is not finite either, and other outputs do not change."""
    matrix = freeze(torch.tensor([[wrong, 1.0], [0.5, 1.0]]), "int8")
    y = product(torch.ones(1, 2), matrix, torch.float32)
    assert not y[0, 0].isfinite() and abs(float(y[0, 1]) - 1.5) < 0.01


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_fp32_is_the_type_of_the_weights_and_shares_them(dtype: torch.dtype) -> None:
    weight = torch.nn.Parameter(torch.randn(3, 4, dtype=dtype))
    matrix = freeze(weight, "fp32")
    assert matrix.scale is None and matrix.weight.dtype == dtype == activation_dtype("fp32", dtype)
    assert matrix.weight.data_ptr() == weight.data_ptr() and not matrix.weight.requires_grad


@pytest.mark.parametrize("precision", ["bf16", "int8"])
def test_narrow_weights_are_copies_without_gradient(precision: InferencePrecision) -> None:
    weight = torch.nn.Parameter(torch.randn(3, 4))
    matrix = freeze(weight, precision)
    assert not matrix.weight.requires_grad and matrix.weight.data_ptr() != weight.data_ptr()
    assert activation_dtype(precision, torch.float32) == torch.bfloat16


@pytest.mark.parametrize("n_row", [1, 2, 7, 17])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-6), ("bf16", 0.02), ("int8", 0.03)])
def test_both_products_are_the_linear_map(precision: InferencePrecision, tolerance: float, bias: bool, n_row: int) -> None:
    """With more rows than loops are fast for, too; bounds are the rounding of bf16 (2^-8) and of int8 besides."""
    weight, x = torch.randn(6, 9), torch.randn(n_row, 9)
    offset = torch.randn(6) if bias else None
    right = F.linear(x, weight, offset)
    matrix, dtype = freeze(weight, precision), activation_dtype(precision, torch.float32)
    assert_close("product", product(x, matrix, dtype, offset).float(), right, tolerance)
    assert_close("streamed", streamed_product(x, matrix, dtype, offset).float(), right, tolerance)


def test_loops_do_not_round_what_they_multiply() -> None:
    """Only the weights are rounded: the product with them is exact to fp32."""
    weight, x = torch.randn(6, 9), torch.randn(1, 9)
    for precision in ("bf16", "int8"):
        matrix = freeze(weight, precision)
        scale = 1.0 if matrix.scale is None else matrix.scale.unsqueeze(1)
        right = F.linear(x, matrix.weight.float() * scale)
        assert_close(precision, streamed_product(x, matrix, torch.bfloat16), right, 1e-6)


# softmax

SOFTMAXES: dict[str, dict[str, Any]] = {
    **{name: options for name, options in VARIANTS.items() if {"cutoffs", "div_val", "d_embed", "tie_weight"} & {*options}},
    "plain": {},
}


def parts(model: TransformerXL, precision: InferencePrecision = "fp32") -> FrozenSoftmax:
    with torch.no_grad():
        return FrozenSoftmax(cast(Any, model.softmax), cast(Embedding, model.embedding), precision)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
@pytest.mark.parametrize("name", SOFTMAXES)
def test_scores_and_losses_are_the_models_own(name: str, dtype: torch.dtype, tolerance: float) -> None:
    model = tiny_model(**SOFTMAXES[name]).to(dtype)
    softmax, h = parts(model), torch.randn(2, 6, 10, dtype=dtype)
    labels = torch.tensor([[0, 3, 4, 8, 9, 12], [-100, 2, -100, 11, 5, 12]])
    with torch.no_grad():
        logits, nll = model.softmax.logits(h, model.embedding), model.softmax.nll(h, labels, model.embedding)
    actual = softmax.logits(h.flatten(0, 1))
    assert actual.dtype == dtype
    assert_close("logits", actual, logits.flatten(0, 1), tolerance)
    assert_close("nll", softmax.nll(h.flatten(0, 1), labels.flatten()), nll.flatten().to(dtype), tolerance)
    own, tails = softmax.head(h[0])
    size = softmax.borders[1]
    assert own.shape == (6, size) and tails.shape == (6, len(softmax.borders) - 2)
    assert_close("head", own, logits[0, :, :size], tolerance)
    for i in range(tails.shape[1]):
        first, last = softmax.borders[i + 1 : i + 3]
        assert_close("whole tail", tails[:, i], logits[0, :, first:last].logsumexp(-1), tolerance)
        assert_close("tail", softmax.tail(i, h[0], tails[:, i]), logits[0, :, first:last], tolerance)


@pytest.mark.parametrize(("name", "largest"), [("plain", 13), ("cutoffs, div_val 2", 5)])
@pytest.mark.parametrize("elements", [1, 20, 60])
def test_chunks_cannot_be_seen(name: str, largest: int, elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model(**SOFTMAXES[name])
    softmax, h, labels = parts(model), torch.randn(17, 10), torch.randint(0, 13, (17,))
    labels[4] = -100
    whole, sizes = softmax.nll(h, labels), []
    monkeypatch.setattr(frozen_softmax, "_CHUNK_ELEMENTS", elements)
    head = softmax.head
    monkeypatch.setattr(softmax, "head", lambda h: (sizes.append(len(h)), head(h))[1])
    assert_close("in chunks", softmax.nll(h, labels), whole, 1e-6)
    assert len(sizes) > 1 and max(sizes) == max(1, elements // largest)
    assert whole[4] == 0


def test_tokens_that_are_not_scored_cost_nothing_even_where_states_are_not_finite() -> None:
    softmax, h = parts(tiny_model(cutoffs=(4, 9))), torch.randn(3, 10)
    h[1] = float("nan")
    nats = softmax.nll(h, torch.tensor([1, -100, 12]))
    assert nats[1] == 0 and nats.isfinite().all()


@pytest.mark.parametrize("name", ["plain", "cutoffs, div_val 2"])
@pytest.mark.parametrize("wrong", [13, -1, -101])
def test_labels_outside_the_vocabulary_are_refused(name: str, wrong: int) -> None:
    softmax, h = parts(tiny_model(**SOFTMAXES[name])), torch.randn(3, 10)
    with pytest.raises(TokenizerError, match=rf"token id {wrong} is outside the vocabulary \(13\)"):
        softmax.nll(h, torch.tensor([1, -100, wrong]))
    assert softmax.nll(h, torch.full((3,), -100)).tolist() == [0, 0, 0]


@pytest.mark.parametrize("name", ["plain", "cutoffs, div_val 2", "cutoffs, d_embed"])
@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-6), ("bf16", 0.02), ("int8", 0.05)])
def test_the_head_for_a_compiler_is_the_head(name: str, precision: InferencePrecision, tolerance: float) -> None:
    """In a narrower precision it is near that of fp32, and probabilities still add up to 1."""
    model, h = tiny_model(**SOFTMAXES[name]), torch.randn(3, 10)
    softmax, full = parts(model, precision), parts(model)
    streamed_head = partial(compute_head, product=streamed_product)
    for streamed, right in zip(softmax.head(h, compute=streamed_head), full.head(h), strict=True):
        assert streamed.dtype == torch.float32
        if right.numel():
            assert_close("streamed", streamed, right, tolerance)
    logits = softmax.logits(h)
    assert_close("logits", logits, full.logits(h), tolerance)
    if len(softmax.borders) > 2:
        assert_close("sum", logits.logsumexp(-1).exp(), torch.ones(3), 1e-5)


def test_int8_softmax_is_smaller() -> None:
    """All matrices of head, tails and projections are rounded, not only the head's."""
    model = tiny_model(cutoffs=(4, 9), div_val=2)
    softmax = parts(model, "int8")
    matrices = [m for cluster in softmax.clusters for m in (cluster.projection, cluster.vectors) if m is not None]
    assert len(matrices) == 6 and {m.weight.dtype for m in matrices} == {torch.int8}
