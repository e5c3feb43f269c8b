"""Spans are those that loops over all windows find; scores are those of the official scripts (tests/parity/goldens/squad)."""

import itertools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers import TINY, examples, random_weights
from transformer_xl.config.model import HeadConfig, TransformerXLConfig, XLNetConfig
from transformer_xl.config.run import TokenizerConfig
from transformer_xl.data.labels import Example
from transformer_xl.data.layout import Layout
from transformer_xl.data.squad import Question, WindowLayout, batch_of_windows
from transformer_xl.errors import ConfigError, CorpusError
from transformer_xl.model.task_model import TaskModel
from transformer_xl.tasks.answer_scores import best_threshold, exact_and_f1
from transformer_xl.tasks.answers import WindowScores, best_answers
from transformer_xl.tasks.metrics import Answer, Prediction, TaskScore
from transformer_xl.tasks.predict import predictions
from transformer_xl.tokenizers.kinds import ByteTokenizer, Tokenizer, train_tokenizer

GOLDEN = Path(__file__).parents[1] / "parity" / "goldens" / "squad" / "scores.json"
GOLDENS: dict[str, list[dict[str, Any]]] = json.loads(GOLDEN.read_text(encoding="ascii"))
PASSAGE = "Ann went to the café in May. There she met Bo, who sold 12 naïve cats."
BYTES = ByteTokenizer()


def predicted(question: dict[str, Any], threshold: float | None) -> Prediction:
    """Return a prediction that was made up."""
    example = Example("passage", "question", label=tuple(question["answers"]))
    said, no_answer = question["said"], question["no_answer"]
    label = "" if threshold is not None and no_answer > threshold else said
    answers = (Answer(said, 0, 1, 0.5, 2.0), Answer("no", 1, 2, 0.1, 1.0)) if said else ()
    return Prediction(example, label, answers=answers, no_answer=no_answer)


def official_metrics(scores: dict[str, float]) -> dict[str, float]:
    """Return scores of the script for version 2.0 under the names of this project."""
    parts = {"": "", "answerable_": "HasAns_", "impossible_": "NoAns_"}
    names = {f"{ours}{name}": f"{theirs}{name}" for ours, theirs in parts.items() for name in ("exact", "f1")}
    expected = {ours: scores[name] / 100 for ours, name in names.items() if name in scores}
    for name in ("exact", "f1"):
        expected[f"best_{name}"] = scores[f"best_{name}"] / 100
        expected[f"best_{name}_threshold"] = scores[f"best_{name}_thresh"]
    return expected


@pytest.mark.parametrize("golden", GOLDENS["1.1"], ids=lambda golden: str(len(golden["questions"])))
def test_scores_are_those_of_the_script_for_version_1(golden: dict[str, Any]) -> None:
    pairs = [(each["said"], gold) for each in golden["questions"] for gold in each["answers"]]
    for (said, gold), (exact, f1) in zip(pairs, golden["pairs"], strict=True):
        assert exact_and_f1(said, [gold], "1.1") == (exact, pytest.approx(f1, abs=1e-12)), (said, gold)
    score = TaskScore.of("span", (), (predicted(each, None) for each in golden["questions"]))
    assert score.n == len(golden["questions"])
    assert score.metrics == {
        "exact": pytest.approx(golden["scores"]["exact_match"] / 100, abs=1e-12),
        "f1": pytest.approx(golden["scores"]["f1"] / 100, abs=1e-12),
    }
    assert score.main == score.metrics["f1"]


@pytest.mark.parametrize("golden", GOLDENS["2.0"], ids=lambda golden: f"{len(golden['questions'])}-{golden['threshold']}")
def test_scores_are_those_of_the_script_for_version_2(golden: dict[str, Any]) -> None:
    for question, exact, f1 in zip(golden["questions"], *golden["each"], strict=True):
        assert exact_and_f1(question["said"], question["answers"]) == (exact, pytest.approx(f1, abs=1e-12)), question
    score = TaskScore.of("span", (), (predicted(each, golden["threshold"]) for each in golden["questions"]))
    assert score.metrics == pytest.approx(official_metrics(golden["scores"]), abs=1e-12)


@pytest.mark.parametrize(
    ("said", "gold", "exact", "f1"),
    [
        ("1994年被", "1994年", 0, 10 / 11),
        ("《红楼梦》", "红楼梦", 1, 1),
        ("河内。", "河内", 1, 1),
        ("“1994－1996年”", "1994-1996年", 1, 1),
        ("Apple公司", "apple ＋公司", 1, 1),
        ("Apple公司", "Apple", 0, 2 / 4),
        ("こんにちは、", "こんばんは", 0, 3 * 2 / 10),
        ("A座", "B座", 0, 1 / 2),  # articles are English
        ("河　内", "河内", 1, 1),
        ("——", "河内", 0, 0),
        ("서울 시", "서울", 0, 2 / 3),  # has spaces
        ("theatre-東", "the theatre-東!", 1, 1),  # a character in English text, as the official scripts have it
    ],
)
def test_text_without_spaces_is_compared_by_characters(said: str, gold: str, exact: float, f1: float) -> None:
    for version in ("1.1", "2.0"):
        assert exact_and_f1(said, ["x", gold], version) == (exact, pytest.approx(f1)), version
        assert exact_and_f1(gold, [said, "x"], version)[1] == pytest.approx(f1)


def test_questions_with_the_same_probability_of_no_answer_are_not_parted() -> None:
    scores, no_answer = np.array([1.0, 0.0, 0.0]), np.array([0.5, 0.5, 0.5])
    assert best_threshold(scores, no_answer, np.array([False, True, True])) == (pytest.approx(2 / 3), 0.0)
    assert best_threshold(scores, no_answer, np.array([False, False, False])) == (pytest.approx(1 / 3), 0.5)
    for order in itertools.permutations(range(3)):
        chosen = list(order)
        assert best_threshold(scores[chosen], no_answer[chosen], np.array([False, True, False])[chosen]).score == pytest.approx(
            1 / 3
        )


@settings(max_examples=examples(300))
@given(st.data())
def test_the_best_spans_are_those_that_loops_find(data: st.DataObject) -> None:
    """Every pair of a start and an end in every window is looked at, with the rules written out."""
    seed = data.draw(st.integers(0, 2**20))
    rng = np.random.default_rng(seed)
    stride, most = data.draw(st.integers(2, 12)), data.draw(st.integers(1, 9))
    layout = WindowLayout(Layout(BYTES, "lstm"), tgt_len=stride + 14, doc_stride=stride, max_query_len=4)
    windows = layout.windows(Question("1", "who?", PASSAGE, is_labelled=False))
    scores, expected = [], {}
    characters = [i for i, character in enumerate(PASSAGE) for _ in character.encode()]
    sizes = [len(window.starts) for window in windows]
    for w, window in enumerate(windows):
        n_row = len(window.row.ids)
        k, j = min(4, n_row), min(3, n_row)
        starts = rng.choice(n_row, k, replace=False)
        ends = np.stack([rng.choice(n_row, j, replace=False) for _ in range(k)])
        start_log_probs, end_log_probs = -rng.exponential(2, k), -rng.exponential(2, (k, j))
        start_log_probs[rng.random(k) < 0.1] = -math.inf
        shifted = start_log_probs[:, None] + end_log_probs + 10 * w
        scores.append(WindowScores(starts, start_log_probs, ends, end_log_probs, float(rng.normal()), shifted))
        for a, b in itertools.product(range(k), range(j)):
            first, last = int(starts[a]) - 5, int(ends[a, b]) - 5  # "who?\n" stands before the passage
            in_passage = 0 <= first < sizes[w] and 0 <= last < sizes[w]
            if not in_passage or last < first or last - first + 1 > most or start_log_probs[a] == -math.inf:
                continue
            place = w * stride + first
            context = {
                other: min(place - other * stride, other * stride + size - 1 - place) + 0.01 * size
                for other, size in enumerate(sizes)
                if other * stride <= place < other * stride + size
            }
            if w == max(context, key=lambda other: (context[other], -other)):
                span = characters[place], characters[w * stride + last] + 1
                if not PASSAGE[slice(*span)].strip():
                    continue
                log_prob = start_log_probs[a] + end_log_probs[a, b]
                expected[span] = max(expected.get(span, (-math.inf, 0)), (log_prob, shifted[a, b]))
    found, no_answer = best_answers(PASSAGE, windows, scores, max_answer_len=most)
    best = sorted(expected.items(), key=lambda item: -item[1][0])[:5]
    assert [(each.start, each.end) for each in found] == [span for span, _ in best]
    assert [each.probability for each in found] == pytest.approx([math.exp(log_prob) for _, (log_prob, _) in best])
    assert [each.score for each in found] == pytest.approx([score for _, (_, score) in best])
    assert all(each.text == PASSAGE[each.start : each.end] for each in found)
    assert no_answer == pytest.approx(1 / (1 + math.exp(-min(score.no_answer for score in scores))))


def test_starts_belong_to_their_own_ends() -> None:
    """The pairs of transformers 4.35.2 are those of another start; see docs/models.md."""
    layout = WindowLayout(Layout(BYTES, "lstm"), tgt_len=100, doc_stride=10, max_query_len=10)
    windows = layout.windows(Question("1", "who?", "Ann met Bo.", is_labelled=False))
    starts, ends = np.array([5, 13]), np.array([[7, 14], [14, 7]])  # of "Ann" and of "Bo"
    scores = WindowScores(starts, np.log([0.6, 0.4]), ends, np.log([[0.9, 0.1], [0.8, 0.2]]), -800.0, np.zeros((2, 2)))
    found, no_answer = best_answers("Ann met Bo.", windows, [scores], max_answer_len=10)
    assert [(each.text, round(each.probability, 6)) for each in found] == [("Ann", 0.54), ("Bo", 0.32), ("Ann met Bo", 0.06)]
    assert no_answer == 0.0


def span_model(tokenizer: Tokenizer, *, is_xlnet: bool, **changes: Any) -> TaskModel:
    sizes: dict[str, Any] = {"tgt_len": 24, "doc_stride": 6, "max_query_len": 9, "max_answer_len": 8, "dropout": 0.0}
    head = HeadConfig(kind="span", **{**sizes, **changes})
    config = XLNetConfig if is_xlnet else TransformerXLConfig
    torch.manual_seed(0)
    return random_weights(TaskModel(config(**{**TINY, "vocab_size": tokenizer.vocab_size, "head": head})).eval())


def asked() -> list[Example]:
    passages = [PASSAGE, PASSAGE[20:], "Bo", PASSAGE * 2, "Ann left."]
    return [Example(passages[i % 5], "who was it, then?"[: 3 + i], place=f"line {i}", id=str(i)) for i in range(11)]


@pytest.mark.parametrize("is_xlnet", [False, True])
def test_answers_do_not_depend_on_their_batch(is_xlnet: bool) -> None:
    """They are those of each window, read alone."""
    tokenizer = BYTES
    if is_xlnet:
        tokenizer = train_tokenizer(TokenizerConfig(kind="unigram", vocab_size=80), [(PASSAGE + " who was it?\n") * 20])
    model, questions = span_model(tokenizer, is_xlnet=is_xlnet), asked()
    assert model.config.head
    layout = WindowLayout.of(model.config, tokenizer)
    expected = []
    for example in questions:
        windows = layout.windows(Question("", example.pair or "", example.text, is_labelled=False))
        scores = []
        for window in windows:
            batch = batch_of_windows([window.row], [window.labels])
            with torch.no_grad():
                segments, may_answer = batch.texts.segments, batch.texts.may_answer
                spans = model.span_scores(batch.ids, segments=segments, may_answer=may_answer, n_start=6, n_end=6)
            scores.append(WindowScores(*(tensor[0].numpy() for tensor in vars(spans).values())))
        expected.append(best_answers(example.text, windows, scores, max_answer_len=8))
    assert any(len(layout.windows(Question("", "who?", each.text, is_labelled=False))) > 3 for each in questions)
    for batch_size in (3, 64):
        found = list(predictions(model, tokenizer, iter(questions), batch_size=batch_size))
        assert [each.example for each in found] == questions
        for prediction, (answers, no_answer) in zip(found, expected, strict=True):
            assert prediction.no_answer == pytest.approx(no_answer, abs=1e-5)
            assert [(each.start, each.end) for each in prediction.answers] == [(each.start, each.end) for each in answers]
            assert [each.probability for each in prediction.answers] == pytest.approx(
                [each.probability for each in answers], abs=1e-5
            )
            assert prediction.label == answers[0].text == prediction.example.text[answers[0].start : answers[0].end]
            assert prediction.probability == prediction.answers[0].probability


def test_no_answer_is_given_where_it_is_more_probable_than_allowed() -> None:
    question = asked()[:1]
    (free,) = predictions(span_model(BYTES, is_xlnet=False), BYTES, question)
    assert free.no_answer is not None and free.label
    for threshold, label in ((free.no_answer - 1e-6, ""), (free.no_answer + 1e-6, free.label)):
        (found,) = predictions(span_model(BYTES, is_xlnet=False, no_answer_above=threshold), BYTES, question)
        assert (found.label, found.answers, found.no_answer) == (label, free.answers, free.no_answer)


@pytest.mark.parametrize(
    ("example", "complaint"),
    [
        (Example("Ann left.", place="line 7"), r"line 7: no question is asked of 'Ann left.'; give it as the second text"),
        (Example("Ann left.", " "), r"^no question is asked"),
        (Example(" ", "who?"), r"the passage is empty; give the text that may hold the answer to 'who\?'"),
    ],
)
def test_a_question_needs_both_texts(example: Example, complaint: str) -> None:
    with pytest.raises(CorpusError, match=complaint):
        list(predictions(span_model(BYTES, is_xlnet=False), BYTES, [example]))


def test_scores_that_are_no_numbers_are_refused() -> None:
    model = span_model(BYTES, is_xlnet=False)
    with torch.no_grad():
        model.head.get_parameter("answerable.weight").fill_(torch.nan)
    with pytest.raises(ConfigError, match=r"scores in fp32 are not finite numbers; use --precision fp32"):
        list(predictions(model, BYTES, asked()[:1]))
