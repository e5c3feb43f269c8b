"""Labels of words: scores are those of seqeval (tests/parity/goldens/seqeval), spans stand where the text has them."""

import math

import pytest

from tests.data.test_entities import GOLDEN
from transformer_xl.data.labels import Example
from transformer_xl.tasks.metrics import Prediction, Span, TaskScore


def _predictions(case) -> list[Prediction]:
    found = []
    for true, said in zip(case["true"], case["said"], strict=True):
        label, words = tuple(true.split()), tuple("w" * len(true.split()))
        found.append(Prediction(Example(" ".join(words), label=label, words=words), tuple(said.split()), nats=0.5))
    return found


@pytest.mark.parametrize("scheme", GOLDEN["cases"])
def test_scores_of_entities_are_those_of_seqeval(scheme):
    for case in GOLDEN["cases"][scheme]:
        labels = sorted({label for name in ("true", "said") for each in case[name] for label in each.split()} | {"B-X"})
        score = TaskScore.of("tokens", labels, _predictions(case))
        expected = dict(case["scores"])
        precision, recall, f1, _ = expected.pop("micro avg")
        assert score.per_label.keys() == expected.keys()
        for name, figures in expected.items():
            assert list(score.per_label[name].values()) == pytest.approx(figures, abs=1e-12)
        figures = {"f1": f1, "precision": precision, "recall": recall, "accuracy": case["accuracy"], "nats": 0.5}
        assert score.metrics == pytest.approx(figures, abs=1e-12)
        assert score.n == sum(len(each.split()) for each in case["true"])
        assert (score.main_name, score.confusion) == ("f1", None)


def test_plain_labels_are_scored_as_classes():
    words = ("a", "b", "c")
    predictions = [
        Prediction(Example("a b c", label=("N", "V", "N"), words=words), ("N", "N", "N"), nats=0.3),
        Prediction(Example("a", label=("V",), words=("a",)), ("V",), nats=0.7),
        Prediction(Example("a", words=("a",)), ("V",)),
    ]
    score = TaskScore.of("tokens", ("N", "V", "X"), predictions)
    assert (score.kind, score.n, score.main_name) == ("tokens", 4, "accuracy")
    assert score.metrics == pytest.approx({"accuracy": 0.75, "macro_f1": (0.8 + 2 / 3) / 2, "nats": (3 * 0.3 + 0.7) / 4})
    assert score.confusion is not None and score.confusion.tolist() == [[2, 0, 0], [1, 1, 0], [0, 0, 0]]
    assert score.in_words() == "accuracy 0.750, macro F1 0.733, nats 0.4000 (4 words)"


def test_spans_stand_in_the_text_as_it_was_written():
    example = Example("Dr.  Ann Lee, in Ann", words=("Dr.", "Ann", "Lee", ",", "in", "Ann"))
    prediction = Prediction(example, ("O", "B-PER", "I-PER", "O", "O", "I-LOC"), (0.5,) * 6)
    assert prediction.spans == (Span("PER", "Ann Lee", 5, 12, 1, 3), Span("LOC", "Ann", 17, 20, 5, 6))
    assert prediction.probability is None
    assert Prediction(Example("a"), ("x",)).spans == ()


def test_without_entities_nothing_is_right_or_wrong():
    score = TaskScore.of("tokens", ("B-X", "O"), [Prediction(Example("a", label=("O",), words=("a",)), ("O",))])
    assert (score.metrics, score.per_label) == ({"f1": 0.0, "precision": 0.0, "recall": 0.0, "accuracy": 1.0}, {})
    assert not math.isnan(score.main)
