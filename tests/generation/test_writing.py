"""Many texts over the rows of a decoder: none depends on another, and what is reported is what the model believes."""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from tests.helpers import tiny_model
from transformer_xl.generation.choice import choose
from transformer_xl.generation.decoder import Decoder
from transformer_xl.generation.draft import Chosen, Draft, Ended
from transformer_xl.generation.sampling import Sampling
from transformer_xl.generation.scheduler import write
from transformer_xl.generation.seeds import text_seed
from transformer_xl.generation.stopping import Stopping
from transformer_xl.model.base import LanguageModel
from transformer_xl.reading.evaluation import evaluate
from transformer_xl.reading.stream import KeptKeys
from transformer_xl.tokenizers.kinds import ByteTokenizer

PROMPTS = [[1, 2, 3], [4] * 9, [5], [6, 7], [8, 9, 10, 11, 12, 0], [3, 1]]
LENGTHS = [7, 2, 11, 0, 5, 20]


def drafts(**changes: Any) -> list[Draft]:
    return [
        Draft(prompt, seed=100 + i, max_new_tokens=length, **changes)
        for i, (prompt, length) in enumerate(zip(PROMPTS, LENGTHS, strict=True))
    ]


def texts(model: LanguageModel, wanted: Sequence[Draft], *, rows: int = 1) -> list[list[Chosen]]:
    """Write, and sort what comes by text."""
    chosen: dict[Draft, list[Chosen]] = {draft: [] for draft in wanted}
    for event in write(Decoder(model, batch_size=rows), iter(wanted)):
        assert isinstance(event, Ended) or event.draft.label != "ended", "nothing comes after the end of a text"
        if isinstance(event, Chosen):
            chosen[event.draft].append(event)
        elif isinstance(event, Ended):
            event.draft.label = "ended"
    return list(chosen.values())


def ids(chosen: list[list[Chosen]]) -> list[list[int]]:
    return [[each.token for each in text] for text in chosen]


@pytest.mark.parametrize("options", [{}, {"cutoffs": [4, 9], "div_val": 2}, {"attention": "vaswani"}])
def test_a_text_does_not_depend_on_the_rows_around_it(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = tiny_model(**options)
    sampling = Sampling(repetition_penalty=1.3, repetition_window=4)
    wanted = drafts(sampling=sampling)
    alone = ids(texts(model, wanted))
    assert [draft.n_written for draft in wanted] == LENGTHS
    assert [draft.n_read for draft in wanted] == [len(prompt) for prompt in PROMPTS]
    for rows in (2, 9):
        wanted = drafts(sampling=sampling)
        assert ids(texts(model, wanted, rows=rows)) == alone
        assert [draft.reason for draft in wanted] == ["length"] * 6


@pytest.mark.parametrize("options", [{}, {"cutoffs": [4, 9], "div_val": 2}])
def test_reported_log_probabilities_are_those_of_evaluation(options: dict[str, Any]) -> None:
    """Whatever the sampling makes of them; with the same context, which is that of `same_length`."""
    torch.manual_seed(0)
    model = tiny_model(same_length=True, mem_len=6, **options)
    sampling = Sampling(temperature=2.0, top_k=9, logit_bias={3: -2.0})
    chosen = texts(model, drafts(likeliest=0, sampling=sampling), rows=3)
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
    (text,) = texts(model, [Draft([1, 2], seed=0, max_new_tokens=5, likeliest=3)])
    decoder, piece = Decoder(model), [1, 2]
    for each in text:
        values, best = decoder.feed([piece])[0].log_softmax(-1).topk(3)
        assert [token for token, _ in each.likeliest] == best.tolist()
        assert [value for _, value in each.likeliest] == pytest.approx(values.tolist(), abs=1e-5)
        piece = [each.token]
    (text,) = texts(model, [Draft([1, 2], seed=0, max_new_tokens=1, likeliest=99)])
    assert sum(np.exp(value) for _, value in text[0].likeliest) == pytest.approx(1, abs=1e-5)
    assert len(text[0].likeliest) == 13
    (text,) = texts(model, [Draft([1, 2], seed=0, max_new_tokens=1)])
    assert (text[0].log_probability, text[0].likeliest) == (None, ())


def test_stop_tokens_and_stop_strings() -> None:
    model = tiny_model(vocab_size=256)

    def one(**options: Any) -> tuple[Draft, list[Chosen], str]:
        draft, chosen, rest = Draft([1], seed=3, max_new_tokens=30, tokenizer=ByteTokenizer(), **options), [], ""
        for event in write(Decoder(model), [draft]):
            chosen += [event] if isinstance(event, Chosen) else []
            rest = event.rest if isinstance(event, Ended) else rest
        return draft, chosen, "".join(each.piece for each in chosen) + rest

    _, whole, text = one()
    tokens = [each.token for each in whole]
    assert text == ByteTokenizer().decode(tokens)
    stop = tokens[12]
    first = tokens.index(stop)
    draft, chosen, text = one(stopping=Stopping(tokens={stop}))
    assert [each.token for each in chosen] == tokens[:first] and text == ByteTokenizer().decode(tokens[:first])
    assert (draft.reason, draft.n_written, draft.stopped_by) == ("stop", first, stop)

    likely = Sampling(logit_bias=dict.fromkeys(range(97, 123), 9.0))
    _, whole, text = one(sampling=likely)
    end = next(i for i in range(5, 29) if text.index(text[i : i + 2]) == i)
    draft, chosen, cut = one(sampling=likely, stopping=Stopping(strings=[text[end : end + 2]]))
    assert [each.token for each in chosen] == [each.token for each in whole[: end + 2]] and cut == text[:end]
    assert (draft.reason, draft.n_written, draft.stopped_by) == ("stop", end + 2, text[end : end + 2])


def test_the_softmax_is_computed_once_for_each_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of large vocabularies it is the larger part of the work."""
    calls: list[int] = []
    head = KeptKeys.head
    monkeypatch.setattr(KeptKeys, "head", lambda self, hidden: (calls.append(1), head(self, hidden))[1])
    texts(tiny_model(), [Draft([1, 2], seed=0, max_new_tokens=20, likeliest=2)])
    assert len(calls) == 20  # and not while prompts are read


def test_huge_numbers_of_tokens_and_texts_cost_nothing_before_they_come() -> None:
    endless = (Draft([i % 13], seed=i, max_new_tokens=10**15) for i in itertools.count())
    events = write(Decoder(tiny_model(), batch_size=2), endless)
    assert [next(events).draft.seed for _ in range(8)] == [0, 1] * 4


@pytest.mark.parametrize(("window", "most"), [(5, 5), (None, 13)])
def test_the_history_does_not_grow(window: int | None, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths: list[int] = []

    def noted(scores: Any, row: int, sampling: Sampling, history: list[int], generator: Any) -> int:
        lengths.append(len(history))
        return choose(scores, row, sampling, history, generator)

    monkeypatch.setattr("transformer_xl.generation.scheduler.choose", noted)
    sampling = Sampling(repetition_penalty=1.1, repetition_window=window)
    list(write(Decoder(tiny_model()), [Draft([1, 2] * 9, seed=0, max_new_tokens=200, sampling=sampling)]))
    assert lengths[0] == (5 if window else 2)
    assert max(lengths) == lengths[-1] == most


class Spelled(ByteTokenizer):
    """Spells the first tokens with a letter, and each after them with a dot, or not at all."""

    def __init__(self, n: int, *, then: str | None = ".") -> None:
        super().__init__()
        self.n, self.then = n, then

    def stream(self) -> Any:
        return self

    def push(self, token: int) -> str:
        self.n -= 1
        if self.n < 0 and self.then is None:
            raise RuntimeError(f"token {token} cannot be shown")
        return "a" if self.n >= 0 else self.then or ""

    def finish(self) -> str:
        return ""


def test_seeds_of_many_texts_differ_and_the_first_is_the_seed_itself() -> None:
    seeds = {text_seed(seed, prompt, sample) for seed in range(20) for prompt in range(20) for sample in range(5)}
    assert len(seeds) == 2000
    assert text_seed(2**64 - 1, 0, 0) == 2**64 - 1
    assert text_seed(1, 2, 3) == text_seed(1, 2, 3) != text_seed(1, 3, 2)
    assert max(seeds) < 2**32
