"""What a codec learns from, and when."""

import numpy as np
import torch

from tests.helpers import tiny_model
from transformer_xl.compression.codec import Bytes, Codec
from transformer_xl.compression.coder import Encoder
from transformer_xl.config import OptimConfig

OPTIM = OptimConfig(optimizer="adamw", lr=1e-2, schedule="linear", min_lr_ratio=0.5)
TEXT = np.random.default_rng(0).integers(97, 103, (2, 40)).astype(np.uint8)


def read(begin: int, n: int) -> Bytes:
    return TEXT[:, begin : begin + n]


def begun(n_again: int = 6, optim: OptimConfig | None = OPTIM) -> Codec:
    return Codec(tiny_model(vocab_size=256, n_layer=1), 2, tgt_len=4, optim=optim, n_again=n_again)


def test_it_learns_from_each_segment_and_from_earlier_bytes_and_never_from_what_is_not_known_yet() -> None:
    codec, places = begun(), []
    for begin in range(0, 40, 4):
        asked: list[tuple[int, int]] = []
        codec.code(Encoder(), read(begin, 4), [2] * 4)
        codec.learn(lambda first, n, asked=asked: asked.append((first, n)) or read(first, n), begin / 40)
        assert all(first >= 0 and first + n <= begin + 4 for first, n in asked)
        assert asked[0] == (max(begin - 1, 0), 5 if begin else 4)  # with the byte before, which is read
        assert len(asked) == (2 if begin + 4 > 6 else 1)
        places += [first + n for first, n in asked[1:]]
    assert len(set(places)) > 4


def test_it_predicts_with_what_it_has_learned() -> None:
    """The next segment is read with the new weights, as by a codec that began with them."""
    torch.manual_seed(0)
    codec = begun()
    before = {name: weight.clone() for name, weight in codec.model.state_dict().items()}
    codec.learn(read, 0.0)
    changed = [name for name, weight in codec.model.state_dict().items() if not torch.equal(weight, before[name])]
    assert len(changed) > 5
    fresh = Codec(codec.model, 2, tgt_len=4, optim=OPTIM, n_again=6)
    with torch.no_grad():
        for ids in torch.from_numpy(TEXT[:, :4].T.astype(np.int64)):
            assert torch.equal(codec.stream.step(ids), fresh.stream.step(ids))


def test_what_it_has_learned_from_is_likelier_afterwards() -> None:
    torch.manual_seed(0)
    codec, nats = begun(), []
    for begin in range(0, 40, 4):
        nats.append(codec._nats(read, 0, 40, None)[0].item())
        codec.learn(read, begin / 40)
    assert nats[-1] < nats[0] - 1


def test_the_rate_follows_the_share_of_the_text() -> None:
    steps = []
    for progress in (0.0, 0.9):
        torch.manual_seed(0)
        codec = begun()
        weight = dict(codec.model.named_parameters())["embedding.weight"].detach()
        first = weight.clone()
        codec.learn(read, progress)
        steps.append(float((weight - first).abs().max()))
    assert steps[1] < 0.7 * steps[0]


def test_weights_stay_as_they_are_without_an_optimizer_and_after_a_loss_that_is_no_number() -> None:
    codec = begun(optim=None)
    before = {name: weight.clone() for name, weight in codec.model.state_dict().items()}
    codec.learn(read, 0.0)
    assert codec.place == 4
    assert all(torch.equal(weight, before[name]) for name, weight in codec.model.state_dict().items())
    codec = begun()
    with torch.no_grad():
        next(iter(codec.model.layers.parameters())).fill_(torch.nan)
    before = {name: weight.clone() for name, weight in codec.model.state_dict().items()}
    codec.learn(read, 0.0)
    assert all(torch.equal(weight.nan_to_num(), before[name].nan_to_num()) for name, weight in codec.model.state_dict().items())
