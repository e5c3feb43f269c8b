"""What raised a prediction, against loops that leave keys out one by one, finite differences, and sums that must come out."""

import copy
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from tests.explain.models import ATTENTION, make
from tests.helpers import default_dtype, tiny_model, tiny_xlnet
from tests.reference import loops, xlnet_loops
from transformer_xl.batch import Rows
from transformer_xl.errors import ConfigError, TokenizerError
from transformer_xl.explain.attribution import Attribution, Method, ask, attribute, gated
from transformer_xl.model.call import Execution
from transformer_xl.reading.evaluation import evaluate
from transformer_xl.reading.stream import scoring

KINDS = [*(kind for kind in ATTENTION if kind != "zero first memory"), "shift, n-grams"]
TGT_LEN = 4
TEXT: Any = {"mems": None, "n_pad": None, "segments": None, "execution": Execution(), "keep_graph": False}
SAME: Any = object()


def any_model(kind: str, **changes: Any) -> Any:
    if kind.startswith("xlnet"):
        return tiny_xlnet(backward_half="backward_half" in kind, **changes).double()
    if kind == "shift, n-grams":
        return tiny_model(shift="averages", ngram_rows=[30], d_model=16, mem_len=5).double()
    if kind in ATTENTION:
        return tiny_model(**ATTENTION[kind], **changes).double()
    return make(kind).double()


def text(n: int = 20) -> np.ndarray:
    return torch.randint(13, (n,)).numpy()


def loop_log_p(model: Any, ids: np.ndarray, position: int, without: int, first: int, monkeypatch: Any) -> torch.Tensor:
    """Log-probabilities of the token at `position`; in segments from `first` on, nobody but itself sees the key `without`."""
    config, left_out = model.config, []
    with monkeypatch.context() as patch, default_dtype(torch.float64), torch.no_grad():
        w = {name: p.detach() for name, p in model.named_parameters()}
        memory: list[list[torch.Tensor]] = [[] for _ in range(config.n_layer)]
        borders = [*range(0, position - 1, TGT_LEN), position if model.keeps_keys else len(ids)]
        borders = [begin for begin in borders if begin < position] + [
            position if model.keeps_keys else min(borders[-2] + TGT_LEN, len(ids) - 1)
        ]
        log_p = torch.empty(0)
        for begin, end in pairwise(borders):
            places = iter([*range(begin - len(memory[0]), end)] * config.n_layer)
            keys_and_values, attend = loops.keys_and_values, loops.attend

            def marked(*given: Any, places: Any = places, begin: int = begin, plain: Any = keys_and_values) -> Any:
                pair = plain(*given)
                if next(places) == without and begin >= first:
                    left_out.append(pair)
                return pair

            def seeing(h: Any, read: Any, seen: Any, distances: Any, *rest: Any, plain: Any = attend) -> Any:
                kept = [d == 0 or not any(pair is other for other in left_out) for pair, d in zip(seen, distances, strict=True)]
                seen, distances = ([x for x, keep in zip(all_, kept, strict=True) if keep] for all_ in (seen, distances))
                return plain(h, read, seen, distances, *rest)

            with patch.context() as inner:
                inner.setattr(loops, "keys_and_values", marked)
                inner.setattr(loops, "attend", seeing)
                log_p, memory = loops.read_row(ids[begin:end].tolist(), memory, w, config, ids[:begin].tolist())
        return log_p[position - 1 - borders[-2]]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("segments", [1, 2])
def test_leaving_out_equals_loops_without_each_key(kind, segments, monkeypatch):
    model, ids, position, other = any_model(kind), text(), 15, 7
    found = attribute(model, ids, position, tgt_len=TGT_LEN, segments=segments, contrast=other)
    first = 12 - (segments - 1) * TGT_LEN  # of the segments in which it is left out
    assert found.places.tolist() == list(range(max(first - model.mem_len, 0), position - 1))
    whole = loop_log_p(model, ids, position, -1, 0, monkeypatch)
    expected = []
    for place in found.places.tolist():
        rest = loop_log_p(model, ids, position, place, first, monkeypatch)
        expected.append(float((whole - rest)[ids[position]] - (whole - rest)[other]))
    np.testing.assert_allclose(found.nats, expected, atol=1e-10)
    assert np.abs(expected).max() > 1e-3


@pytest.mark.parametrize("segments", [1, 2])
def test_an_xlnets_target_without_each_token_equals_loops(segments):
    model, ids, position = any_model("xlnet"), text(12), 6
    config, w = model.config, {name: p.detach() for name, p in model.named_parameters()}
    found = attribute(model, ids, position, tgt_len=4, segments=segments)
    begin = 4 - 4 * (segments - 1)
    assert found.places.tolist() == [place for place in range(max(begin - config.mem_len, 0), 8) if place != position]

    def log_p(without: int) -> float:
        memory: list[list[torch.Tensor]] = [[] for _ in range(config.n_layer)]
        for start in (0, 4):
            mine, targets = range(start, start + 4), [position - 4] if start else []
            obeys = start >= begin
            sees = [[j != position and not (obeys and j == without) for j in mine] for _ in mine]
            if obeys and 0 <= without < start:
                assert without == start - len(memory[0])  # the oldest: without it, the others keep their distances
                memory = [layer[1:] for layer in memory]
            _, log_ps, memory = xlnet_loops.read_row(ids[list(mine)].tolist(), sees, targets, [0] * 4, False, memory, w, config)
        return float(log_ps[0][ids[position]])

    with default_dtype(torch.float64), torch.no_grad():
        assert found.log_p == pytest.approx(log_p(-1), abs=1e-10)
        places = [0, 4, 5, 7] if segments == 1 else [4, 5, 7]
        expected = [log_p(-1) - log_p(place) for place in places]
    np.testing.assert_allclose(found.nats[np.isin(found.places, places)], expected, atol=1e-10)


@pytest.mark.parametrize("kind", [*KINDS, "zero first memory", "vanilla", "lstm", "xlnet", "xlnet, backward_half"])
def test_gradients_are_finite_differences_of_gates(kind):
    model, ids = any_model(kind), text()
    with scoring(model):
        read, prediction = ask(model, ids, 14, contrast=(int(ids[14]) + 1) % 13, tgt_len=TGT_LEN, segments=2)
        step = 1e-6 * torch.eye(len(read.places), dtype=torch.float64)
        for gate in (1.0, 0.3):
            up, down = (read.log_p(gate + sign * step, prediction)[:, 0] for sign in (1, -1))
            slope = read.gradient(prediction, gate)[0]
            np.testing.assert_allclose(slope, (up - down) / 2e-6, atol=1e-6)
            assert np.abs(slope).max() > 1e-4


@pytest.mark.parametrize("ext_len", [0, 3])
@pytest.mark.parametrize("kind", ["paper", "same_length, clamp_len", "zero first memory", "vaswani", "lstm", "vanilla"])
def test_the_prediction_is_that_of_evaluate(kind, ext_len):
    model, ids = any_model(kind).train().with_context(ext_len=ext_len), text()
    found = [attribute(model, ids, position, method="gradient", tgt_len=TGT_LEN).log_p for position in range(1, len(ids))]
    assert model.training
    nats: Any = evaluate(model, ids, tgt_len=TGT_LEN, ext_len=ext_len, same_length=model.same_length, per_token=True).token_nats
    np.testing.assert_allclose(found, -nats, atol=1e-5)


@pytest.mark.parametrize("kind", ["paper", "shaw", "lstm", "xlnet"])
def test_integrated_gradients_add_up(kind):
    model, ids = any_model(kind, **({} if kind == "lstm" else {"activation": "gelu"})), text()
    for position in (5, 14):
        other = (int(ids[position]) + 1) % 13
        found = attribute(model, ids, position, contrast=other, method="integrated", tgt_len=TGT_LEN, segments=2)
        assert found.nats.sum() == pytest.approx(found.log_p - found.without, abs=2e-3)
        assert abs(found.log_p - found.without) > 0.02


def test_an_lstms_gates_multiply_its_vectors_of_tokens():
    model, ids = any_model("lstm"), text()
    found = attribute(model, ids, 11, method="gradient", tgt_len=TGT_LEN)
    with torch.no_grad():
        _, mems = model.read(torch.from_numpy(ids[None, :8]))
    x = model.embed(torch.from_numpy(ids[None, 8:11])).detach().requires_grad_()
    h, _ = model.read_vectors(x, mems=mems, rows=Rows(), execution=Execution(), keep_graph=False)
    log_p = model.softmax.logits(h, model.embedding)[0, -1].log_softmax(-1)[ids[11]]
    (grad,) = torch.autograd.grad(log_p, x)
    assert found.places.tolist() == [8, 9, 10]
    np.testing.assert_allclose(found.nats, (grad * x).sum(-1)[0].detach(), atol=1e-10)


@pytest.mark.parametrize("kind", ["paper", "same_length, clamp_len", "shift, n-grams", "lstm", "vanilla"])
def test_a_long_text_is_read_from_where_its_beginning_no_longer_matters(kind, monkeypatch):
    model, ids, n_read = any_model(kind), text(600), []
    read = type(model).read
    monkeypatch.setattr(type(model), "read", lambda self, ids, **how: n_read.append(ids.numel()) or read(self, ids, **how))
    found = attribute(model, ids, 599, method="gradient", tgt_len=TGT_LEN, segments=2)
    n_first = sum(n_read)
    assert n_first < 560
    monkeypatch.setattr(type(model), "reach", lambda self, tgt_len: 600)
    whole = attribute(model, ids, 599, method="gradient", tgt_len=TGT_LEN, segments=2)
    np.testing.assert_allclose(found.nats, whole.nats, atol=1e-10)
    assert found.log_p == pytest.approx(whole.log_p, abs=1e-10) and sum(n_read) - n_first > 590


def test_only_what_a_model_can_see_is_listed():
    found = attribute(any_model("vanilla"), text(), 15, tgt_len=TGT_LEN, segments=3)
    assert found.places.tolist() == [12, 13]


@pytest.mark.parametrize("sharpness", [30, 60])
def test_a_sharp_head_looks_at_the_rest_without_what_it_looks_at(sharpness):
    model, ids = tiny_model(), text()
    with torch.no_grad():
        for block in model.attention_blocks():
            block.qkv_net.weight[: -block.n_head * block.d_head].mul_(sharpness)  # others get no weight in fp32
    found = attribute(model, ids, 15, tgt_len=TGT_LEN)
    assert np.isfinite([*found.nats, found.without]).all()
    expected = attribute(copy.deepcopy(model).double(), ids, 15, tgt_len=TGT_LEN)
    np.testing.assert_allclose(found.nats, expected.nats, atol=1e-2)


@pytest.mark.parametrize("kind", ["paper", "lstm", "xlnet"])
def test_rounded_weights_and_autocast_are_attributed_in_fp32(kind):
    model, ids = any_model(kind).bfloat16(), text()
    for method in ("leave-out", "gradient", "integrated")[kind == "lstm" :]:
        found, expected = (attribute(of, ids, 9, method=method, tgt_len=4) for of in (model, copy.deepcopy(model).float()))
        np.testing.assert_array_equal(found.nats, expected.nats)
        with torch.autocast("cpu", torch.bfloat16):
            np.testing.assert_array_equal(attribute(model, ids, 9, method=method, tgt_len=4).nats, expected.nats)
    assert model.dtype == torch.bfloat16


def test_a_model_in_training_stays_so_where_its_memory_is_longer_than_the_text():
    model = any_model("paper").train().with_context(mem_len=50)
    attribute(model, text(), 9, tgt_len=TGT_LEN)
    assert all(module.training for module in model.modules())


@pytest.mark.parametrize("kind", ["paper", "lstm", "xlnet"])
def test_gates_are_obeyed_in_their_own_thread_alone(kind):
    model, ids = any_model(kind), torch.from_numpy(text(4)[None])
    with torch.no_grad(), ThreadPoolExecutor(1) as other:
        plain = model.read(ids)[0] if kind != "xlnet" else model.read_text(ids, **TEXT)[0]
        with gated(model, torch.full((1, 4), 0.1).double(), ends=4):
            read = model.read if kind != "xlnet" else partial(model.read_text, **TEXT)
            assert torch.equal(other.submit(torch.no_grad()(read), ids).result()[0], plain)
            assert not torch.allclose(read(ids)[0], plain)


@pytest.mark.parametrize("method", ["leave-out", "gradient"])
def test_no_more_is_read_at_once_than_heads_and_keys_allow(method, monkeypatch):
    model, ids, rows = any_model("paper"), text(40), []
    read = type(model).read
    monkeypatch.setattr(type(model), "read", lambda self, ids, **how: rows.append(len(ids)) or read(self, ids, **how))
    expected = attribute(model, ids, 35, method=method, tgt_len=TGT_LEN)
    n_key, n_head = len(expected.places) + 1, model.config.n_layer * model.config.n_head
    assert max(rows) == (n_key if method == "leave-out" else 1)
    rows.clear()
    monkeypatch.setattr("transformer_xl.explain.attribution._WEIGHTS", 3 * 3 * n_key * n_head)  # of three rows of three tokens
    found = attribute(model, ids, 35, method=method, tgt_len=TGT_LEN)
    np.testing.assert_allclose(found.nats, expected.nats, atol=1e-12)
    assert max(rows) == (3 if method == "leave-out" else 1)


def test_a_short_text_and_a_first_token():
    model, ids = any_model("paper"), torch.tensor([3, 1, 4])
    found = attribute(model, ids, 2)  # shorter than a segment
    assert found.places.tolist() == [0] and found.nats[0] == pytest.approx(found.log_p - found.without)
    only = attribute(model, ids, 1)  # predicted from a token before which nothing stands
    assert len(only.places) == len(only.nats) == 0 and only.log_p == only.without


@pytest.mark.parametrize(
    ("kind", "arguments", "error", "message"),
    [
        ("paper", {"position": 0}, ConfigError, r"position \(0\) must be at least 1 and at most 19"),
        ("paper", {"position": 20}, ConfigError, r"position \(20\) must be at least 1 and at most 19"),
        ("xlnet", {"position": -1}, ConfigError, r"position \(-1\) must be at least 0 and at most 19"),
        *(("paper", {"position": wrong}, ConfigError, rf"position \({wrong}\) must be") for wrong in (True, 5.0, None)),
        ("paper", {"contrast": SAME}, ConfigError, r"contrast \(\d+\) is the token at position 9 itself"),
        ("paper", {"method": None}, ConfigError, "unknown method 'None'; known: gradient"),
        ("paper", {"tgt_len": 2.5}, ConfigError, r"tgt_len \(2.5\) must be"),
        ("paper", {"device": "meta"}, ConfigError, "model is on the device 'meta', which holds no weights"),
        ("paper", {"contrast": 13}, TokenizerError, r"token id 13 is outside the vocabulary \(13\)"),
        ("paper", {"contrast": -1}, TokenizerError, r"token id -1 is outside the vocabulary \(13\)"),
        ("paper", {"ids": text() + 0.5}, ValueError, r"^ids, .*, must be integers"),
        ("paper", {"ids": "a text"}, ValueError, r"^ids, .a text., must be integers"),
        ("paper", {"ids": torch.zeros(2, 3, dtype=torch.int64)}, ValueError, r"^ids, .*, must be the token ids of one text"),
        ("paper", {"ids": text() + 7}, TokenizerError, r"token id 1[0-9] is outside the vocabulary \(13\)"),
        ("paper", {"contrast": 1.5}, ValueError, r"^contrast, \[1.5\], must be integers"),
        ("paper", {"contrast": "a"}, ValueError, r"^contrast, .*, must be integers"),
        ("paper", {"method": "gradients"}, ConfigError, "unknown method 'gradients'; did you mean 'gradient'"),
        ("paper", {"segments": 0}, ConfigError, r"segments \(0\) must be at least 1"),
        ("lstm", {}, ConfigError, "hides tokens from attention, and a model of kind 'lstm' has none; use 'gradient'"),
    ],
)
def test_what_cannot_be_attributed_is_refused_in_a_line(kind, arguments, error, message):
    method: Method = arguments.pop("method", "leave-out")
    model, ids = any_model(kind).to(arguments.pop("device", "cpu")), text()
    if arguments.get("contrast") is SAME:
        arguments["contrast"] = int(ids[9])
    with pytest.raises(error, match=message) as caught:
        attribute(model, **{"ids": ids, "position": 9, "method": method, **arguments})
    assert "\n" not in str(caught.value)


def test_what_is_found_is_printed_in_one_line() -> None:
    found = Attribution(np.arange(500), np.where(np.arange(500) == 7, -1.5, 0.01), -2.0, -3.0)
    line = "Attribution(-1.500 by 7, +0.010 by 0, +0.010 by 1, of 500 tokens, log_p=-2.0000, without=-3.0000)"
    assert repr(found) == line
