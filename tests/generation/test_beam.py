"""Beam search against plain transcriptions: one tries all texts, one reads whole sequences again at every step."""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from tests.helpers import random_weights, tiny_model
from transformer_xl.config.model import LstmConfig
from transformer_xl.errors import ConfigError, TokenizerError
from transformer_xl.generation.beam import Hypothesis, beam_search
from transformer_xl.generation.decoder import Decoder
from transformer_xl.generation.generate import generate
from transformer_xl.generation.sampling import Sampling
from transformer_xl.generation.scores import Scores
from transformer_xl.model.base import LanguageModel
from transformer_xl.model.lstm import Lstm

PROMPTS = [[1, 2, 3], [4] * 9, [5], [6, 7], [8, 9, 10, 11, 12, 0], [3, 1]]
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "adaptive": {"cutoffs": [4, 9], "div_val": 2},
    "rotary": {"attention": "rotary"},
    "shift and n-grams": {"shift": "averages", "d_model": 16, "ngram_rows": [50]},
    "zero_first_memory": {"zero_first_memory": True},
    "reads again": {"attention": "vaswani"},
    "no memory": {"mem_len": 0},
    "lstm": {},
}
Text = tuple[tuple[int, ...], float]
"""Tokens, a stop included, and their log-probability."""


def model_of(kind: str) -> LanguageModel:
    torch.manual_seed(3)
    if kind == "lstm":
        return random_weights(Lstm(LstmConfig(vocab_size=13, n_layer=2, d_model=10)).eval())
    return tiny_model(**KINDS[kind])


class Plain:
    """The plain reference: what follows, from one row that reads each text anew, token by token."""

    def __init__(self, model: LanguageModel, **options: Any) -> None:
        self._decoder, self._known = Decoder(model, **options), {}

    def following(self, prompt: Sequence[int], text: Sequence[int]) -> list[float]:
        """Return the log-probability of each token that may come next."""
        if (key := (tuple(prompt), tuple(text))) not in self._known:
            self._known[key] = self._scores([*prompt], [*text]).double().log_softmax(-1).tolist()
        return self._known[key]

    def _scores(self, prompt: list[int], text: list[int]) -> torch.Tensor:
        self._decoder.reset()
        scores = self._decoder.feed([prompt])
        for token in text:
            scores = self._decoder.feed([[token]])
        return scores[0]

    def all_texts(self, prompt: Sequence[int], length: int, stop: set[int]) -> list[Text]:
        """Every text that ends, with its tokens, the stop included, and its log-probability."""
        found: list[Text] = []
        begun: list[Text] = [((), 0.0)]
        for n in range(1, length + 1):
            longer: list[Text] = [
                ((*text, token), nats + more) for text, nats in begun for token, more in enumerate(self.following(prompt, text))
            ]
            found += [text for text in longer if text[0][-1] in stop or n == length]
            begun = [text for text in longer if text[0][-1] not in stop]
        return found

    def beams(self, prompt: Sequence[int], n_beam: int, length: int, stop: set[int], banned: Sequence[int] = ()) -> list[Text]:
        """A textbook beam search, whose finished texts leave the beam."""
        found: list[Text] = []
        begun: list[Text] = [((), 0.0)]
        while begun:
            longer: list[Text] = [
                ((*text, token), nats + more)
                for text, nats in begun
                for token, more in enumerate(self.following(prompt, text))
                if token not in banned
            ]
            best = sorted(longer, key=lambda text: -text[1])[: n_beam - len(found)]
            ended = [text for text in best if text[0][-1] in stop or len(text[0]) == length]
            found, begun = found + ended, [text for text in best if text not in ended]
        return found


def ranked(
    texts: Sequence[Text], penalty: float, n: int, stop: set[int]
) -> list[tuple[tuple[int, ...], int | None, float, float]]:
    scored = [(tokens, nats, nats / ((5 + len(tokens)) / 6) ** penalty) for tokens, nats in texts]
    best = sorted(scored, key=lambda text: -text[2])[:n]
    return [
        (tokens[:-1], tokens[-1], nats, score) if tokens[-1] in stop else (tokens, None, nats, score)
        for tokens, nats, score in best
    ]


def assert_found(
    found: Sequence[Hypothesis], expected: Sequence[tuple[tuple[int, ...], int | None, float, float]], atol: float = 1e-4
) -> None:
    assert [(each.tokens, each.stop_token) for each in found] == [(tokens, stop) for tokens, stop, _, _ in expected]
    assert [each.log_probability for each in found] == pytest.approx([nats for _, _, nats, _ in expected], abs=atol)
    assert [each.score for each in found] == pytest.approx([score for *_, score in expected], abs=atol)


@pytest.mark.parametrize("options", [{}, {"cutoffs": [1, 2]}])
def test_with_enough_beams_the_best_of_all_texts_is_found(options: dict[str, Any]) -> None:
    torch.manual_seed(1)
    model = tiny_model(vocab_size=3, mem_len=2, **options)
    plain, stop, prompts = Plain(model), {2}, [[0], [1, 0, 1, 1]]
    decoder = Decoder(model, batch_size=81)
    how: dict[str, Any] = {"beams": 81, "max_new_tokens": 4, "n": 31, "stop_tokens": stop}
    for penalty in (1.0, 0.0, -1.5, 3.0):
        found = beam_search(decoder, prompts, length_penalty=penalty, **how)
        for prompt, of_prompt in zip(prompts, found, strict=True):
            texts = plain.all_texts(prompt, 4, stop)
            assert len(texts) == 31  # 2 of each length below 4 that end in a stop: 1 + 2 + 4, and 8 * 3 of length 4
            assert math.fsum(math.exp(nats) for _, nats in texts) == pytest.approx(1, abs=1e-5)
            assert_found(of_prompt, ranked(texts, penalty, 31, stop))
            assert [each.score for each in of_prompt] == sorted((each.score for each in of_prompt), reverse=True)


@pytest.mark.parametrize("kind", KINDS)
def test_it_finds_what_a_textbook_search_finds(kind: str) -> None:
    """With memory shorter than the texts, and texts of different lengths that take each other's places."""
    model, stop = model_of(kind), {1, 2, 7, 9}
    plain = Plain(model, tgt_len=4)
    found = beam_search(
        Decoder(model, batch_size=10, tgt_len=4),  # three texts at a time, and a row that is idle
        PROMPTS[:4],
        beams=3,
        n=3,
        max_new_tokens=5,
        stop_tokens=stop,
        length_penalty=0.7,
    )
    for prompt, of_prompt in zip(PROMPTS[:4], found, strict=True):
        assert_found(of_prompt, ranked(plain.beams(prompt, 3, 5, stop), 0.7, 3, stop))
    assert len({len(each.tokens) for of_prompt in found for each in of_prompt}) > 1


@pytest.mark.parametrize("stop", [{3}, set()])
@pytest.mark.parametrize("options", [{}, {"cutoffs": [4, 9]}])
def test_one_beam_writes_what_temperature_0_writes(options: dict[str, Any], stop: set[int]) -> None:
    torch.manual_seed(5)
    model = tiny_model(**options)
    prompts = PROMPTS[:3]  # the last takes the place of another
    found = beam_search(Decoder(model, batch_size=2), prompts, beams=1, max_new_tokens=70, stop_tokens=stop, length_penalty=2)
    for prompt, (each,) in zip(prompts, found, strict=True):
        greedy = generate(model, prompt, Sampling(temperature=0), max_new_tokens=70, stop_tokens=stop)
        assert each.tokens == tuple(greedy)
        assert (each.stop_token is None) == (len(each.tokens) == 70)


def searched(model: LanguageModel, **options: Any) -> tuple[list[Hypothesis], int]:
    """What is found for one prompt, and how many times something was read or written."""
    calls = itertools.count()
    decoder = Decoder(model, batch_size=4)
    (found,) = beam_search(decoder, [[1, 2]], beams=4, stop_tokens={0}, interrupted=lambda: next(calls) < 0, **options)
    return found, next(calls)


@pytest.mark.parametrize("penalty", [4.0, 1.0, 0.0, -2.0])
@pytest.mark.parametrize("seed", [1, 13, 28, 34])  # some of them find out bounds that are too low, or of another text
def test_giving_up_early_changes_nothing(penalty: float, seed: int) -> None:
    torch.manual_seed(seed)
    model = tiny_model(vocab_size=5)
    (one, early), (two, later), (all_four, last) = (
        searched(model, max_new_tokens=16, length_penalty=penalty, n=n) for n in (1, 2, 4)
    )
    three, _ = searched(model, max_new_tokens=16, length_penalty=penalty, n=3)
    assert early <= later <= last
    assert (one, two, three) == (all_four[:1], all_four[:2], all_four[:3])


@pytest.mark.parametrize("penalty", [0.0, 1.0, -2.0])
def test_a_text_is_given_up_as_soon_as_nothing_better_can_come(penalty: float) -> None:
    model = tiny_model(vocab_size=5)
    with torch.no_grad():
        model.softmax.bias.copy_(torch.tensor([40.0, 0, 0, 0, 0]))  # the stop is all but certain
    (found,), n_call = searched(model, max_new_tokens=9, length_penalty=penalty)
    assert (found.tokens, found.stop_token, n_call) == ((), 0, 2)
    assert searched(model, max_new_tokens=9, length_penalty=penalty, n=4)[1] > 2


def test_with_a_penalty_on_length_the_next_token_may_still_win(monkeypatch: pytest.MonkeyPatch) -> None:
    """Token 0 is a stop: unlikely at first, almost certain afterwards. The longest text could not win, the next does."""
    steps = iter([[0.15, 0.8, 0.05], [0.95, 0.03, 0.02]])

    def top(self: Scores, n: int, *, rows: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        nats, ids = torch.tensor(next(steps)).log().sort(descending=True)
        return nats[:n].repeat(len(rows), 1), ids[:n].repeat(len(rows), 1)

    monkeypatch.setattr(Scores, "top", top)
    ((found,),) = beam_search(
        Decoder(tiny_model(), batch_size=2), [[1]], beams=2, max_new_tokens=9, stop_tokens={0}, length_penalty=-3
    )
    assert (found.tokens, found.stop_token) == ((1,), 0)
    assert found.score == pytest.approx(math.log(0.8 * 0.95) * (7 / 6) ** 3)


def test_equal_texts_come_by_beam_and_then_by_id() -> None:
    model = tiny_model(vocab_size=4)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    (found,) = beam_search(Decoder(model, batch_size=6), [[1]], beams=6, n=6, max_new_tokens=2)
    assert [each.tokens for each in found] == [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (1, 1)]
    assert found[0].log_probability == pytest.approx(2 * math.log(1 / 4))


def test_what_is_banned_is_never_written_and_the_rest_keeps_its_probability() -> None:
    model = tiny_model()
    plain = Plain(model)
    expected = torch.tensor(plain.following(PROMPTS[0], []))
    banned = expected.topk(4).indices.tolist()  # more than there are beams
    found = beam_search(Decoder(model, batch_size=3), PROMPTS[:2], beams=3, n=3, max_new_tokens=4, banned_tokens=banned)
    for prompt, of_prompt in zip(PROMPTS, found, strict=False):
        assert_found(of_prompt, ranked(plain.beams(prompt, 3, 4, set(), banned), 1.0, 3, set()))
    with pytest.raises(ConfigError, match="no token can be drawn"):
        beam_search(Decoder(model), [[1]], beams=1, max_new_tokens=1, banned_tokens=range(13))


def test_a_prompt_is_read_once_and_by_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[tuple[int, list[int]]] = []
    advance = Decoder.advance

    def counting(self: Decoder, row: int, ids: Any) -> None:
        read.append((row, ids.tolist()))
        advance(self, row, ids)

    monkeypatch.setattr(Decoder, "advance", counting)
    beam_search(Decoder(tiny_model(), batch_size=4, tgt_len=4), PROMPTS[:2], beams=2, max_new_tokens=2)
    assert read == [(0, [1, 2, 3]), (2, [4] * 4), (2, [4] * 4), (2, [4])]


def test_texts_that_are_done_come_at_once_and_an_interrupt_keeps_them() -> None:
    model = tiny_model()
    options: dict[str, Any] = {"beams": 2, "max_new_tokens": 5}
    whole = beam_search(Decoder(model, batch_size=4), PROMPTS, **options)
    came: dict[int, list[Hypothesis]] = {}
    found = beam_search(
        Decoder(model, batch_size=4), PROMPTS, **options, on_found=came.__setitem__, interrupted=lambda: len(came) >= 2
    )
    assert found == [came[0], came[1], [], [], [], []]
    assert [each[0].tokens for each in found[:2]] == [each[0].tokens for each in whole[:2]]
    calls = itertools.count()
    assert beam_search(Decoder(model), [[1]], beams=1, max_new_tokens=2, interrupted=lambda: next(calls) == 0) == [[]]


def test_nothing_to_write_is_an_empty_text() -> None:
    decoder = Decoder(tiny_model(), batch_size=4)
    decoder.feed([[1]] * 4)
    assert beam_search(decoder, PROMPTS[:2], max_new_tokens=0) == [[Hypothesis((), 0.0, 0.0)]] * 2
    assert decoder.scores.full().isnan().all()  # all rows have forgotten
    assert beam_search(Decoder(tiny_model(), batch_size=4), []) == []


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"beams": 0}, ConfigError, r"^beams \(0\) must be at least 1 and finite, a whole number$"),
        ({"beams": 5}, ConfigError, r"^beams \(5\) need as many rows, and the decoder has 4; open it with Decoder\(model, bat"),
        *(({"n": n}, ConfigError, rf"^n \({n}\) must be at least 1 and at most 4, a whole number$") for n in (0, 5)),
        ({"max_new_tokens": -1}, ConfigError, r"^max_new_tokens \(-1\) must be at least 0 and finite, a whole number$"),
        ({"max_new_tokens": 2.5}, ConfigError, r"^max_new_tokens \(2.5\) must be at least 0 and finite, a whole number$"),
        ({"length_penalty": math.nan}, ConfigError, r"^length_penalty \(nan\) must be between -30 and 30; 0 compares"),
        ({"stop_tokens": [13]}, ConfigError, r"^stop token id 13 is outside the vocabulary \(13\)"),
        ({"banned_tokens": [13]}, TokenizerError, r"^token id 13 is outside the vocabulary \(13\)"),
        ({"prompts": [[1], []]}, TokenizerError, r"^prompt 1: the prompt is empty; give at least one token"),
        ({"prompts": [[1], [13]]}, TokenizerError, r"^token id 13 is outside the vocabulary \(13\)"),
        ({"prompts": [1, 2]}, ValueError, r"^prompt 0, 1, must be the token ids of one text$"),
        ({"prompts": [[0.5]]}, ValueError, r"^prompt 0, \[0\.5\], must be integers"),
    ],
)
def test_what_cannot_be_searched_is_refused_and_nothing_read(
    options: dict[str, Any], error: type[Exception], match: str
) -> None:
    decoder = Decoder(tiny_model(), batch_size=4)
    decoder.feed([[1, 2]] * 4)
    before = decoder.scores.full()
    with pytest.raises(error, match=match):
        beam_search(decoder, **{"prompts": [[1]], "max_new_tokens": 3, **options})
    assert torch.equal(decoder.scores.full(), before)
