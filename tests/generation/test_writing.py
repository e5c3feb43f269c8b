"""Many texts over the rows of a decoder: none depends on another, and what is reported is what the model believes."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from tests.helpers import assert_close, tiny_model
from transformer_xl.generation.choice import choose
from transformer_xl.generation.decoder import Decoder
from transformer_xl.generation.requests import Chosen, Finished, FinishReason, Request, text_seed
from transformer_xl.generation.sampling import Sampling
from transformer_xl.generation.writing import write
from transformer_xl.model.base import LanguageModel
from transformer_xl.reading.evaluation import evaluate
from transformer_xl.reading.stream import KeptKeys

PROMPTS = [[1, 2, 3], [4] * 9, [5], [6, 7], [8, 9, 10, 11, 12, 0], [3, 1]]
LENGTHS = [7, 2, 11, 0, 5, 20]


def requests(**changes: Any) -> list[Request]:
    return [
        Request(**{"prompt": prompt, "seed": 100 + i, "max_new_tokens": length, **changes})
        for i, (prompt, length) in enumerate(zip(PROMPTS, LENGTHS, strict=True))
    ]


def texts(
    model: LanguageModel, wanted: Sequence[Request], *, rows: int = 1, likeliest: int | None = None, **sampling: Any
) -> tuple[list[list[Chosen]], list[Finished]]:
    """Write, and sort what comes by text."""
    chosen: list[list[Chosen]] = [[] for _ in wanted]
    finished: dict[int, Finished] = {}
    decoder = Decoder(model, batch_size=rows)
    for event in write(decoder, iter(wanted), sampling=Sampling(**sampling), likeliest=likeliest):
        assert event.text not in finished, "nothing comes after the end of a text"
        if isinstance(event, Chosen):
            chosen[event.text].append(event)
        else:
            finished[event.text] = event
    return chosen, [finished[i] for i in range(len(wanted))]


def ids(chosen: list[list[Chosen]]) -> list[list[int]]:
    return [[each.token for each in text] for text in chosen]


@pytest.mark.parametrize("options", [{}, {"cutoffs": [4, 9], "div_val": 2}, {"attention": "vaswani"}])
def test_a_text_does_not_depend_on_the_rows_around_it(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = tiny_model(**options)
    sampling = {"repetition_penalty": 1.3, "repetition_window": 4}
    alone, ends = texts(model, requests(), **sampling)
    assert [end.n_written for end in ends] == LENGTHS
    assert [end.n_read for end in ends] == [len(prompt) for prompt in PROMPTS]
    for rows in (2, 3, 6, 9):
        together, their_ends = texts(model, requests(), rows=rows, **sampling)
        assert ids(together) == ids(alone)
        assert [end.reason for end in their_ends] == ["length"] * 6
    for i, request in enumerate(requests()):
        assert ids(texts(model, [request], **sampling)[0]) == [ids(alone)[i]]


@pytest.mark.parametrize("options", [{}, {"cutoffs": [4, 9], "div_val": 2}])
def test_reported_log_probabilities_are_those_of_evaluation(options: dict[str, Any]) -> None:
    """Whatever the sampling makes of them; with the same context, which is that of `same_length`."""
    torch.manual_seed(0)
    model = tiny_model(same_length=True, mem_len=6, **options)
    chosen, _ = texts(model, requests(), rows=3, likeliest=0, temperature=2.0, top_k=9, logit_bias={3: -2.0})
    n_compared = 0
    for prompt, text in zip(PROMPTS, chosen, strict=True):
        if text:
            whole = np.array([*prompt, *(each.token for each in text)])
            nats = evaluate(model, whole, tgt_len=9, per_token=True).token_nats
            assert nats is not None
            reported = np.array([each.log_probability for each in text], float)
            np.testing.assert_allclose(reported, -nats[-len(text) :], atol=1e-4)
            n_compared += len(text)
    assert n_compared == sum(LENGTHS)


def test_likeliest_tokens_come_with_their_log_probabilities() -> None:
    torch.manual_seed(0)
    model = tiny_model(cutoffs=[4, 9])
    (text,), _ = texts(model, [Request(prompt=[1, 2], seed=0, max_new_tokens=5)], likeliest=3)
    decoder, piece = Decoder(model), [1, 2]
    for each in text:
        values, best = decoder.feed([piece])[0].log_softmax(-1).topk(3)
        assert [token for token, _ in each.likeliest] == best.tolist()
        assert [value for _, value in each.likeliest] == pytest.approx(values.tolist(), abs=1e-5)
        piece = [each.token]
    (text,), _ = texts(model, [Request(prompt=[1, 2], seed=0, max_new_tokens=1)], likeliest=99)
    assert sum(np.exp(value) for _, value in text[0].likeliest) == pytest.approx(1, abs=1e-5)
    assert len(text[0].likeliest) == 13
    (text,), _ = texts(model, [Request(prompt=[1, 2], seed=0, max_new_tokens=1)])
    assert (text[0].log_probability, text[0].likeliest) == (None, ())


def test_stop_tokens_and_ends() -> None:
    model = tiny_model()
    (whole,), _ = texts(model, [Request(prompt=[1], seed=3, max_new_tokens=30)])
    tokens = [each.token for each in whole]
    stop = tokens[12]
    first = tokens.index(stop)
    (text,), (end,) = texts(model, [Request(prompt=[1], seed=3, max_new_tokens=30, stop_tokens={stop})])
    assert [each.token for each in text] == tokens[:first]
    assert (end.reason, end.n_written, end.stop_token) == ("stop", first, stop)
    seen: list[int] = []

    def ends(token: int):
        seen.append(token)
        return "stop" if len(seen) == 4 else None

    (text,), (end,) = texts(model, [Request(prompt=[1], seed=3, max_new_tokens=30, ends=ends)])
    assert [each.token for each in text] == seen == tokens[:4]
    assert (end.reason, end.n_written, end.stop_token) == ("stop", 4, None)


def test_the_softmax_is_computed_once_for_each_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of large vocabularies it is the larger part of the work."""
    calls: list[int] = []
    head = KeptKeys.head
    monkeypatch.setattr(KeptKeys, "head", lambda self, hidden: (calls.append(1), head(self, hidden))[1])
    texts(tiny_model(), [Request(prompt=[1, 2], seed=0, max_new_tokens=20)], likeliest=2)
    assert len(calls) == 20  # and not while prompts are read


def test_huge_numbers_of_tokens_and_texts_cost_nothing_before_they_come() -> None:
    endless = (Request(prompt=[i % 13], seed=i, max_new_tokens=10**15) for i in iter(int, 1))
    events = write(Decoder(tiny_model(), batch_size=2), endless, sampling=Sampling())
    assert [next(events).text for _ in range(6)] == [0, 1] * 3


@pytest.mark.parametrize(("window", "most"), [(5, 5), (None, 13)])
def test_the_history_does_not_grow(window: int | None, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths: list[int] = []

    def noted(scores: Any, row: int, sampling: Sampling, history: list[int], generator: Any) -> int:
        lengths.append(len(history))
        return choose(scores, row, sampling, history, generator)

    monkeypatch.setattr("transformer_xl.generation.writing.choose", noted)
    sampling = Sampling(repetition_penalty=1.1, repetition_window=window)
    list(write(Decoder(tiny_model()), [Request(prompt=[1, 2] * 9, seed=0, max_new_tokens=200)], sampling=sampling))
    assert lengths[0] == (5 if window else 2)
    assert max(lengths) == lengths[-1] == most


@pytest.mark.parametrize(("reason", "unread"), [("length", 0), ("interrupted", 0), ("stop", 1)])
def test_going_on_remembers_the_text(reason: FinishReason, unread: int) -> None:
    torch.manual_seed(0)
    model, text = tiny_model(), [4, 5, 6]
    decoder = Decoder(model)
    decoder.read([text])
    for prompt in ([7, 8], []):
        none: list[FinishReason | None] = [None]
        last: list[FinishReason | None] = [None if reason == "length" else reason]
        pieces = iter(none * 3 + last * 9)
        request = Request(prompt=prompt, seed=1, max_new_tokens=6, ends=lambda _, pieces=pieces: next(pieces))
        events = list(write(decoder, [request], sampling=Sampling(), go_on=True))
        written = [event.token for event in events if isinstance(event, Chosen)]
        assert events[-1][1] == reason
        text += [*prompt, *written[: len(written) - unread]]
        assert_close("memory", decoder.scores.full(), Decoder(model).feed([text]), 1e-5)


def test_rows_that_go_on_wait_for_the_others_as_they_are() -> None:
    torch.manual_seed(0)
    model = tiny_model()
    decoder = Decoder(model, batch_size=3)
    decoder.read([[1, 2], [3], [4, 5, 6]])
    wanted = [Request(prompt=[7], seed=i, max_new_tokens=n) for i, n in enumerate((9, 2, 0))]
    written: list[list[int]] = [[], [], []]
    for event in write(decoder, wanted, sampling=Sampling(), go_on=True):
        if isinstance(event, Chosen):
            written[event.text].append(event.token)
    for row, before in enumerate(([1, 2], [3], [4, 5, 6])):
        expected = Decoder(model).feed([[*before, 7, *written[row]]])
        assert_close(f"row {row}", decoder.scores.full()[row : row + 1], expected, 1e-5)


def test_reading_may_be_stopped_between_pieces() -> None:
    """What `on_read` raises leaves a decoder that has read exactly what it was told of."""
    torch.manual_seed(0)
    model, prompt, n_read = tiny_model(mem_len=9), np.arange(5000) % 13, 0
    decoder = Decoder(model, batch_size=2)

    def on_read(text: int, n: int) -> None:
        nonlocal n_read
        assert text == 0
        n_read += n
        if n_read > 2000:
            raise KeyboardInterrupt

    request = Request(prompt=prompt, seed=1)
    with pytest.raises(KeyboardInterrupt):
        list(write(decoder, [request], sampling=Sampling(), on_read=on_read))
    assert 2000 < n_read < 5000
    assert_close("memory", decoder.scores.full()[:1], Decoder(model).feed([prompt[:n_read].tolist()]), 1e-5)


def test_a_long_prompt_does_not_stop_the_others() -> None:
    """Between two steps it reads one piece."""
    torch.manual_seed(0)
    wanted = [Request(prompt=[1, 2], seed=0, max_new_tokens=12), Request(prompt=[i % 13 for i in range(640)], seed=1)]
    gaps, since = [], 0
    seen: list[tuple[int, int]] = []
    decoder = Decoder(tiny_model(), batch_size=2)
    for event in write(decoder, wanted, sampling=Sampling(), on_read=lambda text, n: seen.append((text, n))):
        if isinstance(event, Chosen) and event.text == 0:
            gaps.append(sum(n for text, n in seen[since:] if text == 1))
            since = len(seen)
    assert gaps == [64] * 10 + [0] * 2


def test_each_text_may_be_sampled_in_its_own_way() -> None:
    torch.manual_seed(0)
    model = tiny_model()
    ways = [Sampling(temperature=0), Sampling(top_k=2), None, Sampling(repetition_penalty=5.0, repetition_window=None)]
    wanted = [Request(prompt=[1, 2, 3], seed=7, max_new_tokens=15, sampling=way) for way in ways]
    together, _ = texts(model, wanted, rows=4, min_p=0.1)
    for request, way, text in zip(wanted, ways, ids(together), strict=True):
        alone = write(Decoder(model), [request], sampling=Sampling(temperature=9.0) if way else Sampling(min_p=0.1))
        assert [event.token for event in alone if isinstance(event, Chosen)] == text
    assert len({tuple(text) for text in ids(together)}) == 4


def test_seeds_of_many_texts_differ_and_the_first_is_the_seed_itself() -> None:
    seeds = {text_seed(seed, prompt, sample) for seed in range(20) for prompt in range(20) for sample in range(5)}
    assert len(seeds) == 2000
    assert text_seed(2**64 - 1, 0, 0) == 2**64 - 1
    assert text_seed(1, 2, 3) == text_seed(1, 2, 3) != text_seed(1, 3, 2)
    assert max(seeds) < 2**32
