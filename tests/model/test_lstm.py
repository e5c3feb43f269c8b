"""An LSTM that reads in segments computes what `torch.nn.LSTM` computes at once, wherever the segments are cut."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.helpers import gradients
from transformer_xl.batch import Rows
from transformer_xl.config.model import LstmConfig
from transformer_xl.errors import ConfigError
from transformer_xl.generation.decoder import Decoder
from transformer_xl.model.lstm import Lstm, LstmLayer
from transformer_xl.model.memory import Mems
from transformer_xl.reading.evaluation import evaluate

SIZES: dict[str, Any] = {"vocab_size": 13, "n_layer": 3, "d_model": 6, "d_hidden": 10, "dropout": 0.0}


@pytest.fixture
def model() -> Lstm:
    torch.manual_seed(1)
    model = Lstm(LstmConfig(**SIZES)).double().eval()
    nn.init.normal_(model.get_parameter("embedding.weight"))  # as small as it begins, what was read hardly matters
    return model


def ids(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(13, shape, generator=torch.Generator().manual_seed(seed))


def by_torch(model: Lstm, tokens: Tensor) -> Tensor:
    """Read a whole stream by the library's own modules."""
    x = model.embedding(tokens)
    for layer in model.layers:
        assert isinstance(layer, LstmLayer)
        own = nn.LSTM(layer.lstm.input_size, layer.lstm.hidden_size, batch_first=True).double()
        own.load_state_dict(layer.lstm.state_dict())
        x, _ = own(x)
    return model.softmax.logits(x, model.embedding)


def test_segments_are_one_stream(model: Lstm) -> None:
    tokens, mems, found = ids(3, 17), None, []
    for segment in tokens.split(5, dim=1):
        out = model(segment, mems=mems)
        mems = out.mems
        assert out.logits is not None
        found.append(out.logits)
    torch.testing.assert_close(torch.cat(found, dim=1), by_torch(model, tokens), rtol=0, atol=1e-12)


def test_a_document_begins_without_a_past(model: Lstm) -> None:
    tokens, starts = ids(2, 9), torch.zeros(2, 9, dtype=torch.bool)
    starts[0, 4] = starts[1, 0] = starts[1, 7] = True
    past = model(ids(2, 5, seed=1)).mems
    out = model(tokens, mems=past, rows=Rows(document_starts=starts))
    first, second = model(tokens[:1, :4], mems=past.select(slice(0, 1))), model(tokens[:1, 4:])
    torch.testing.assert_close(out.logits[:1], torch.cat([first.logits, second.logits], dim=1), rtol=0, atol=1e-12)
    third, fourth = model(tokens[1:, :7]), model(tokens[1:, 7:])
    torch.testing.assert_close(out.logits[1:], torch.cat([third.logits, fourth.logits], dim=1), rtol=0, atol=1e-12)
    for own, one, other in zip(out.mems.hidden, second.mems.hidden, fourth.mems.hidden, strict=True):
        torch.testing.assert_close(own, torch.cat([one, other]), rtol=0, atol=1e-12)


def test_padding_is_not_read(model: Lstm) -> None:
    tokens, past = ids(3, 6), model(ids(3, 5, seed=1)).mems
    out = model(tokens, mems=past, rows=Rows(n_pad=torch.tensor([0, 2, 6])))
    for row, n_pad in enumerate([0, 2]):
        alone = model(tokens[row : row + 1, n_pad:], mems=past.select(slice(row, row + 1)))
        torch.testing.assert_close(out.logits[row, n_pad:], alone.logits[0], rtol=0, atol=1e-12)
        for own, one in zip(out.mems.hidden, alone.mems.hidden, strict=True):
            torch.testing.assert_close(own[row], one[0], rtol=0, atol=1e-12)
    for own, before in zip(out.mems.hidden, past.hidden, strict=True):
        assert torch.equal(own[2], before[2])


def test_what_is_read_again_is_not_remembered(model: Lstm) -> None:
    tokens = ids(2, 9)
    kept = model.with_context(ext_len=4)(tokens).mems
    for own, one in zip(kept.hidden, model(tokens[:, :5]).mems.hidden, strict=True):
        torch.testing.assert_close(own, one, rtol=0, atol=1e-12)
    past = model(ids(2, 3, seed=1)).mems
    for own, one in zip(model.with_context(ext_len=9)(tokens, mems=past).mems.hidden, past.hidden, strict=True):
        assert torch.equal(own, one)


def test_without_memory_each_segment_begins_anew(model: Lstm) -> None:
    forgetful = model.with_context(mem_len=0)
    first = forgetful(ids(2, 5, seed=1))
    assert first.mems.length == 0
    assert torch.equal(forgetful(ids(2, 5), mems=first.mems).logits, model(ids(2, 5)).logits)


@pytest.mark.parametrize("keep", [False, True])
def test_gradients_reach_the_segment_before_only_if_kept(model: Lstm, keep: bool) -> None:
    before = ids(1, 4, seed=1)
    mems = model(before, keep_graph=keep).mems
    assert all(h.requires_grad == keep for h in mems.hidden)
    found = []
    for each in (mems, mems.detach()):
        model.zero_grad()
        model(ids(1, 1), mems=each, labels=ids(1, 1, seed=2)).nll.sum().backward()
        found.append(gradients(model)["embedding.weight"].clone())
    reached = (found[0] != found[1]).any(dim=1).nonzero().flatten()  # the softmax reaches all tokens, with either
    assert reached.tolist() == (before.unique().tolist() if keep else [])


def test_dropconnect_takes_hidden_weights_only_and_one_mask_a_segment() -> None:
    torch.manual_seed(0)
    model = Lstm(LstmConfig(**SIZES, dropweight=0.5)).train()
    layer = model.layers[1]
    assert isinstance(layer, LstmLayer)
    seen: list[Tensor] = []

    def see(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        seen.extend([*inputs, output])

    layer.drop_weight.register_forward_hook(see)
    starts = torch.zeros(1, 8, dtype=torch.bool)
    starts[0, 3] = True  # two pieces
    model(ids(1, 8), rows=Rows(document_starts=starts))
    whole, drawn = seen
    assert whole is layer.lstm.weight_hh_l0
    assert 0.3 < (drawn == 0).double().mean() < 0.7
    model.eval()
    assert torch.equal(model(ids(1, 8)).logits, model(ids(1, 8)).logits)


def test_forget_gates_begin_open(model: Lstm) -> None:
    for layer in model.layers:
        assert isinstance(layer, LstmLayer)
        bias = layer.lstm.get_parameter("bias_ih_l0") + layer.lstm.get_parameter("bias_hh_l0")
        assert bias.tolist() == [1.0 if i // layer.lstm.hidden_size == 1 else 0.0 for i in range(len(bias))]


@pytest.mark.parametrize("options", [{"mem_len": 2}, {"clamp_len": 3}, {"same_length": True}])
def test_what_an_lstm_has_not_is_refused(model: Lstm, options: dict[str, Any]) -> None:
    (name,) = options
    with pytest.raises(ConfigError, match=name):
        model.with_context(**options)


def test_one_lane_scores_the_stream(model: Lstm) -> None:
    stream = ids(40)
    logits = by_torch(model, stream[None, :-1])
    nats = nn.functional.cross_entropy(logits[0], stream[1:], reduction="none")
    score = evaluate(model, stream, tgt_len=7, per_token=True)
    assert score.token_nats is not None
    torch.testing.assert_close(torch.from_numpy(score.token_nats).double(), nats, rtol=0, atol=1e-6)


def test_a_decoder_carries_the_state(model: Lstm) -> None:
    decoder = Decoder(model, batch_size=2)
    text = ids(2, 11)
    decoder.feed([text[0, :5].tolist(), text[1, :3].tolist()])
    decoder.feed([text[0, 5:].tolist(), text[1, 3:7].tolist()])
    active = torch.tensor([False, True])
    *_, last = [decoder.step(text[:, position], active=active) for position in range(7, 11)]
    whole = by_torch(model, text)
    torch.testing.assert_close(last.full()[1].double(), whole[1, -1], rtol=0, atol=1e-6)
    other = Decoder(model, batch_size=2)
    for row in range(2):
        other.put(row, decoder.take(row))
    token = torch.tensor([1, 2])
    assert torch.equal(decoder.step(token).full(), other.step(token).full())


def test_a_memory_of_it_is_a_memory(model: Lstm) -> None:
    mems = model(ids(3, 4)).mems
    again = Mems.from_state_dict(mems.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(again.hidden, mems.hidden, strict=True))
    emptied = mems.reset(torch.tensor([True, False, False]))
    torch.testing.assert_close(model(ids(3, 4), mems=emptied).logits[0], model(ids(3, 4)[:1]).logits[0], rtol=0, atol=1e-12)


def test_a_state_outlives_the_decoder_that_took_it_over() -> None:
    model = Lstm(LstmConfig(**SIZES))
    decoder, other = Decoder(model), Decoder(model)
    decoder.feed([[1, 2, 3]])
    state = decoder.take(0)
    before = {name: x.clone() for name, x in state.tensors.items()}
    other.put(0, state)
    other.feed([[6, 7]])
    assert all(torch.equal(x, before[name]) for name, x in state.tensors.items())


def test_states_are_of_one_type_in_all_precisions() -> None:
    model = Lstm(LstmConfig(**SIZES))
    decoder, other = (Decoder(model, batch_size=2, precision="bf16") for _ in range(2))
    decoder.step([1, 2])
    for row in range(2):
        other.put(row, decoder.take(row))
    assert torch.equal(decoder.step([3, 4]).full(), other.step([3, 4]).full())
