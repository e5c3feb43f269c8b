import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.helpers import assert_close
from transformer_xl.errors import TokenizerError
from transformer_xl.model import softmax as softmax_module
from transformer_xl.model.softmax import TokenEmbedding, TokenSoftmax, check_ids, linear_nll, look_up

IDS = torch.tensor([[0, 3, 6], [6, 1, 2]])


def test_nats_are_computed_in_fp32_from_half_precision_scores() -> None:
    softmax = TokenSoftmax(7, d_embed=4, d_model=4, tied=True).bfloat16()
    embedding = TokenEmbedding(7, d_embed=4, d_model=4, scale=2.0).bfloat16()
    h = torch.randn(2, 3, 4).bfloat16()
    nll = softmax.nll(h, IDS, embedding)
    assert nll.dtype == torch.float32
    expected = F.cross_entropy(softmax.logits(h, embedding).float().flatten(0, 1), IDS.flatten(), reduction="none")
    assert torch.equal(nll.flatten(), expected)


@pytest.mark.parametrize("kind", [torch.tensor, np.array])
def test_ids_are_those_from_0_to_the_size(kind) -> None:
    check_ids(kind([[0, 12], [3, 4]]), vocab_size=13)
    check_ids(kind([]), vocab_size=13)
    for wrong in (-1, 13, 2**40):
        with pytest.raises(TokenizerError, match=rf"^token id {wrong} is outside the vocabulary \(13\); is this the model's"):
            check_ids(kind([[5, wrong], [0, 1]]), vocab_size=13)


@pytest.mark.parametrize(("tied", "d_embed"), [(True, 6), (False, 6), (True, 4), (False, 4)])
def test_smoothed_labels_are_those_of_torch(tied: bool, d_embed: int) -> None:
    """The nats and eps times the advantage have the value and all gradients of cross entropy with label smoothing eps."""
    torch.manual_seed(0)
    embedding = TokenEmbedding(11, d_embed=d_embed, d_model=6, scale=1.0)
    softmax = TokenSoftmax(11, d_embed=d_embed, d_model=6, tied=tied, tied_projection=tied)
    torch.nn.init.normal_(softmax.bias)
    h = torch.randn(2, 5, 6, requires_grad=True)
    labels = torch.tensor([[3, -100, 0, 10, 3], [-100, -100, 7, 1, 2]])
    parameters = [h, *softmax.parameters(), *(embedding.parameters() if tied else ())]
    own = softmax.nll(h, labels, embedding).sum() + 0.1 * softmax.advantage(h, labels, embedding)
    scores = softmax.logits(h, embedding).flatten(0, 1)
    expected = F.cross_entropy(scores, labels.flatten(), reduction="sum", label_smoothing=0.1)
    assert own.item() == pytest.approx(expected.item(), abs=1e-5)
    for one, other in zip(torch.autograd.grad(own, parameters), torch.autograd.grad(expected, parameters), strict=True):
        assert_close("gradient", one, other, 1e-5)


def test_an_advantage_is_computed_in_fp32_under_autocast() -> None:
    softmax, embedding = TokenSoftmax(11, d_embed=4, d_model=6, tied=True), TokenEmbedding(11, d_embed=4, d_model=6, scale=1.0)
    h, labels = torch.randn(1, 4, 6).bfloat16(), torch.tensor([[1, 2, 3, 4]])
    expected = softmax.advantage(h.float(), labels, embedding)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(softmax.advantage(h, labels, embedding), expected)


def test_a_cpu_computes_no_scores_of_tokens_without_labels(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    h, vectors, bias = torch.randn(6, 3, requires_grad=True), torch.randn(5, 3, requires_grad=True), torch.zeros(5)
    labels = torch.tensor([1, -100, 4, -100, -100, 0])
    nats = F.cross_entropy(h @ vectors.T, labels, reduction="none")
    gradients = torch.autograd.grad(nats.sum(), (h, vectors))
    n_scored = []
    compute = softmax_module._nll
    monkeypatch.setattr(softmax_module, "_nll", lambda h, *rest: n_scored.append(len(h)) or compute(h, *rest))
    own = linear_nll(h, vectors, bias, labels)
    torch.testing.assert_close(own, nats)
    for one, other in zip(torch.autograd.grad(own.sum(), (h, vectors)), gradients, strict=True):
        torch.testing.assert_close(one, other)
    assert n_scored == [3]
    assert linear_nll(h, vectors, bias, torch.full((6,), -100)).tolist() == [0] * 6


@pytest.mark.parametrize("shape", [(3, 40), (7,), (2, 0)])
def test_rows_of_bags_and_their_gradients_are_those_of_an_embedding(shape: tuple[int, ...]) -> None:
    ids, table = torch.randint(0, 5, shape), torch.randn(7, 4, requires_grad=True)
    found, expected = softmax_module._rows_of_bags(ids, table), look_up(ids, table)
    assert found.shape == expected.shape == (*shape, 4)
    assert torch.equal(found, expected)
    gradients = [torch.autograd.grad(x.pow(3).sum(), table)[0] for x in (found, expected)]
    torch.testing.assert_close(*gradients)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_many_tokens_of_few_ids_give_the_same_gradients_every_time() -> None:
    table = torch.randn(16, 512, device="cuda", requires_grad=True)
    ids, weights = torch.randint(0, 16, (16_384,), device="cuda"), torch.randn(16_384, 512, device="cuda")
    first, *others = (torch.autograd.grad((look_up(ids, table) * weights).sum(), table)[0] for _ in range(5))
    assert all(torch.equal(first, other) for other in others)
