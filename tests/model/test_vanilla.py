"""The vanilla Transformer, compared with its definition by loops; segments know nothing of each other."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from transformer_xl.batch import Rows
from transformer_xl.config.model import VanillaConfig
from transformer_xl.errors import ConfigError
from transformer_xl.generation.decoder import Decoder
from transformer_xl.model.attention.block import AttentionKind
from transformer_xl.model.call import Execution, Regularizers
from transformer_xl.model.layers import DecoderLayer
from transformer_xl.model.softmax import TokenSoftmax
from transformer_xl.model.vanilla import Vanilla
from transformer_xl.reading.evaluation import evaluate

SIZES = {"vocab_size": 13, "n_layer": 3, "d_model": 6, "n_head": 2, "d_head": 5, "d_inner": 9, "max_len": 8, "dropout": 0.0}


def build(**options: object) -> Vanilla:
    torch.manual_seed(1)
    model = Vanilla(VanillaConfig.model_validate({**SIZES, **options})).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.4)
    return model.eval()


def ids(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(13, shape, generator=torch.Generator().manual_seed(seed))


def norm(x: Tensor, module: nn.LayerNorm) -> Tensor:
    return (x - x.mean()) / (x.var(unbiased=False) + module.eps).sqrt() * module.weight + module.bias


def by_loops(model: Vanilla, tokens: Tensor) -> Tensor:
    """Return the states (T, D) that the softmax reads, of one row."""
    pre = model.config.pre_lnorm
    states = [model.get_parameter("embedding.weight")[i] * math.sqrt(model.config.d_model) for i in tokens.tolist()]
    for layer, table in zip(model.layers, model.positions, strict=True):
        assert isinstance(layer, DecoderLayer)
        attention, feed = layer.attention, layer.feed_forward
        assert isinstance(attention, AttentionKind)
        inputs = [h + table[t] for t, h in enumerate(states)]
        N, H = attention.n_head, attention.d_head
        w_q, w_k, w_v = attention.qkv_net.weight.view(3, N, H, -1)
        normed = [norm(h, attention.layer_norm) if pre else h for h in inputs]
        states = []
        for t, own in enumerate(normed):
            heads = []
            for n in range(N):
                scores = torch.stack([(w_q[n] @ own) @ (w_k[n] @ normed[s]) / math.sqrt(H) for s in range(t + 1)])
                heads.append(sum(p * (w_v[n] @ normed[s]) for s, p in enumerate(scores.softmax(0))))
            h = inputs[t] + attention.o_net.weight @ torch.cat(heads)
            h = h if pre else norm(h, attention.layer_norm)
            inner = feed.inner.weight @ (norm(h, feed.layer_norm) if pre else h) + feed.inner.bias
            h = h + feed.outer.weight @ inner.relu() + feed.outer.bias
            states.append(h if pre else norm(h, feed.layer_norm))
    if isinstance(model.final_norm, nn.LayerNorm):
        states = [norm(h, model.final_norm) for h in states]
    return torch.stack(states)


@pytest.mark.parametrize("options", [{}, {"pre_lnorm": True, "final_norm": True}])
def test_it_is_its_definition(options: dict[str, bool]) -> None:
    model = build(**options)
    tokens = ids(2, 7)
    h_BTD, mems = model.read(tokens)
    for row in range(2):
        torch.testing.assert_close(h_BTD[row], by_loops(model, tokens[row]), rtol=0, atol=1e-12)
    assert mems.length == 0


def test_padding_moves_positions_and_is_not_seen() -> None:
    model, tokens = build(), ids(2, 7)
    h_BTD, _ = model.read(tokens, rows=Rows(n_pad=torch.tensor([0, 3])))
    torch.testing.assert_close(h_BTD[0], by_loops(model, tokens[0]), rtol=0, atol=1e-12)
    torch.testing.assert_close(h_BTD[1, 3:], by_loops(model, tokens[1, 3:]), rtol=0, atol=1e-12)


def test_a_document_sees_nothing_of_the_one_before() -> None:
    model, tokens = build(), ids(2, 7)
    starts = torch.zeros(2, 7, dtype=torch.bool)
    starts[0, 3] = True
    changed = tokens.clone()
    changed[0, 1] = (changed[0, 1] + 1) % 13
    one, other = (model.read(own, rows=Rows(document_starts=starts))[0] for own in (tokens, changed))
    assert torch.equal(one[0, 3:], other[0, 3:])
    assert not torch.equal(one[0, 1:3], other[0, 1:3])
    torch.testing.assert_close(one[1], by_loops(model, tokens[1]), rtol=0, atol=1e-12)


def test_a_segment_longer_than_its_positions_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"9 tokens .* 8 positions"):
        build()(ids(1, 9))


@pytest.mark.parametrize("options", [{"mem_len": 3}, {"clamp_len": 3}, {"same_length": True}])
def test_what_it_has_not_is_refused(options: dict[str, Any]) -> None:
    (name,) = options
    with pytest.raises(ConfigError, match=name):
        build().with_context(**options)


def test_scored_as_the_paper_scores_it() -> None:
    """One position at a time, the whole segment read anew."""
    model, stream = build(), ids(30)
    score = evaluate(model, stream, tgt_len=1, ext_len=7, per_token=True)
    assert score.token_nats is not None
    for t in range(1, 30):
        h_TD = by_loops(model, stream[max(t - 8, 0) : t])
        logits = model.softmax.logits(h_TD[None, -1:], model.embedding)[0, 0]
        expected = -logits.log_softmax(0)[stream[t]]
        assert score.token_nats[t - 1] == pytest.approx(expected.item(), abs=1e-5)


@pytest.mark.parametrize(("progress", "predicting"), [(0.0, 3), (0.16, 3), (0.17, 2), (0.33, 2), (0.34, 1), (0.5, 1), (1.0, 1)])
def test_layers_stop_predicting_one_after_another(progress: float, predicting: int) -> None:
    """The first of three until 1/6 of the training, the second until 2/6, the last one always."""
    model, tokens, labels = build(intermediate_losses=True).train(), ids(2, 7), ids(2, 7, seed=1)
    out = model(tokens, labels=labels, regularizers=Regularizers(progress=progress))
    plain = model.eval()(tokens, labels=labels)
    assert plain.auxiliary is None
    torch.testing.assert_close(out.nll, plain.nll)
    outputs = model._layers(tokens, Rows(), Execution())
    expected = sum(model.softmax.nll(h, labels, model.embedding).sum() for h in outputs[-predicting:-1])
    assert out.auxiliary.item() == pytest.approx(float(torch.as_tensor(expected).detach()), rel=1e-6)


def test_later_tokens_count_by_half() -> None:
    model, tokens, labels = build(n_target=3).train(), ids(2, 7), ids(2, 7, seed=1)
    labels[0, 5] = -100
    out = model(tokens, labels=labels)
    h_BTD = model._layers(tokens, Rows(), Execution())[-1]
    expected = 0.0
    for ahead, softmax in enumerate(model.later_targets, start=1):
        assert isinstance(softmax, TokenSoftmax)
        logits = softmax.logits(h_BTD, model.embedding)
        for row in range(2):
            for t in range(7 - ahead):
                if labels[row, t + ahead] >= 0:
                    expected -= 0.5 * logits[row, t].log_softmax(0)[labels[row, t + ahead]].item()
    assert out.auxiliary.item() == pytest.approx(expected, rel=1e-6)


def test_all_weights_have_gradients_however_short_a_segment_is() -> None:
    """Processes that share gradients wait for all of them."""
    model = build(n_target=3, intermediate_losses=True).train()
    out = model(ids(2, 1), labels=ids(2, 1, seed=1))
    (out.nll.sum() + out.auxiliary).backward()
    assert [name for name, parameter in model.named_parameters() if parameter.grad is None] == []


@pytest.mark.parametrize("losses", [{"n_target": 2}, {"intermediate_losses": True}])
def test_shapes_are_checked_where_losses_are_added(losses: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"labels \(2, 6\) must have the shape of ids \(2, 7\)"):
        build(**losses).train()(ids(2, 7), labels=ids(2, 6))


def test_a_decoder_reads_the_last_positions_again() -> None:
    model, text = build(), ids(1, 20)
    decoder = Decoder(model)
    decoder.feed([text[0, :11].tolist()])
    *_, scores = [decoder.step(token[None]) for token in text[0, 11:]]
    expected = model.softmax.logits(by_loops(model, text[0, -8:])[None, -1:], model.embedding)[0, 0]
    torch.testing.assert_close(scores.full()[0].double(), expected, rtol=0, atol=1e-6)


def test_only_what_is_scored_meets_the_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores of text that is read again are not computed, because they are most of the work of a word model."""
    model, tokens = build(), ids(2, 6)
    labels = torch.full((2, 6), -100)
    labels[0, 4:], labels[1, 5] = 3, 7
    seen: list[int] = []
    nll = model.softmax.nll
    monkeypatch.setattr(model.softmax, "nll", lambda h, *rest, **how: (seen.append(h.shape[1]), nll(h, *rest, **how))[1])
    with torch.no_grad():
        found = model(tokens, labels=labels).nll
        nothing = model(tokens, labels=torch.full((2, 6), -100)).nll
    assert seen == [2, 1]
    torch.testing.assert_close(found, model(tokens, labels=labels).nll)
    assert nothing.tolist() == [[0.0] * 6] * 2
