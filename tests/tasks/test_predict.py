"""A text's answer depends on that text alone; scores are those of scikit-learn 1.9 and SciPy 1.17."""

import itertools
import json
import math
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from tests.helpers import TINY, random_weights, tiny_model
from transformer_xl.config.model import HeadConfig, TransformerXLConfig, XLNetConfig
from transformer_xl.config.run import TokenizerConfig
from transformer_xl.data.labels import Example, Label, labels_of
from transformer_xl.data.layout import Layout, batch_of
from transformer_xl.errors import ConfigError, CorpusError
from transformer_xl.model.task_model import TaskModel
from transformer_xl.reading import texts as texts_module
from transformer_xl.reading.texts import windows
from transformer_xl.tasks.metrics import Prediction, Sameness, TaskScore, matthews, pearson, ranks
from transformer_xl.tasks.predict import predict, predictions
from transformer_xl.tokenizers.kinds import ByteTokenizer, Tokenizer, train_tokenizer

LINE = "the cat sat on the mat and the dog sat on the cat "
HEADS: dict[str, dict[str, Any]] = {
    "classification": {"labels": ("bad", "fair", "good")},
    "multilabel": {"labels": ("x", "y")},
    "regression": {"summary": "mean"},
    "choice": {},
}
LABELS: dict[str, list[Label | None]] = {
    "classification": ["bad", "good", None],
    "multilabel": [(), ("x", "y"), None],
    "regression": [0.5, 2, None],
    "choice": [0, 1, None],
}
BYTES = ByteTokenizer()


@cache
def pieces() -> Tokenizer:
    return train_tokenizer(TokenizerConfig(kind="unigram", vocab_size=60), [LINE * 20])


def task_model(kind: str, tokenizer: Tokenizer = BYTES, *, is_xlnet: bool = False) -> TaskModel:
    head = HeadConfig(kind=kind, tgt_len=8, dropout=0.0, **HEADS[kind])  # pyright: ignore[reportArgumentType]
    config = XLNetConfig if is_xlnet else TransformerXLConfig
    return random_weights(TaskModel(config(**{**TINY, "vocab_size": tokenizer.vocab_size, "head": head})).eval())


def texts(kind: str, n: int) -> list[Example]:
    """Return texts of very different lengths; those of a choice have two or three of them."""
    found = []
    for i in range(n):
        text, label = LINE[i % 3 : 7 * (i * i % 5) + i % 11 + 1], LABELS[kind][i % 3]
        choices = tuple(LINE[: 9 * j + i] for j in range(2 + i % 2)) if kind == "choice" else ()
        found.append(Example(text, None if choices or i % 2 else LINE[:i], choices, label, place=f"line {i}"))
    return found


def figures(prediction: Prediction) -> list[float]:
    value = [prediction.label] if isinstance(prediction.label, float) else []
    return [*value, *prediction.probabilities, *([] if prediction.nats is None else [prediction.nats])]


def likeliest(kind: str, probabilities: tuple[float, ...]) -> Label:
    """What a model says that gives labels these probabilities."""
    if kind == "multilabel":
        return tuple(name for name, p in zip(HEADS[kind]["labels"], probabilities, strict=True) if p >= 0.5)
    best = int(np.argmax(probabilities))
    return best if kind == "choice" else HEADS[kind]["labels"][best]


@pytest.mark.parametrize(
    ("kind", "is_xlnet"), [*((kind, False) for kind in HEADS), *((kind, True) for kind in ("classification", "regression"))]
)
def test_answers_do_not_depend_on_their_batch(kind: str, is_xlnet: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of one text after another, read by the model alone, are those of all texts in any batches."""
    monkeypatch.setattr(texts_module, "WINDOW", 2)
    tokenizer = pieces() if is_xlnet else BYTES
    model, examples = task_model(kind, tokenizer, is_xlnet=is_xlnet), texts(kind, 13)
    layout, head = Layout.of(model.config, tokenizer), model.config.head
    assert head
    expected = []
    with torch.no_grad():
        for example in examples:
            batch = batch_of([layout.rows(example)], labels_of(head, [example]))
            out = model(batch.ids, n_pad=batch.n_pad, segments=batch.texts.segments, labels=batch.labels)
            logits = model(batch.ids, n_pad=batch.n_pad, segments=batch.texts.segments).logits[0]
            one = {"multilabel": logits.sigmoid(), "regression": logits}.get(kind, logits.softmax(0)).tolist()
            expected.append(one + (out.nll.tolist() if example.label is not None and kind != "regression" else []))
    for batch_size in (3, 64):
        found = list(predictions(model, tokenizer, iter(examples), batch_size=batch_size))
        assert [each.example for each in found] == examples
        for prediction, one in zip(found, expected, strict=True):
            assert figures(prediction) == pytest.approx(one, abs=1e-5), prediction.example.place
            if kind != "regression":
                assert prediction.label == likeliest(kind, prediction.probabilities)


def test_texts_are_read_as_they_are_asked_for() -> None:
    """An endless source is no problem, and the mode of the model and of torch are those of the caller in between."""
    taken = []

    def endless() -> Iterator[Example]:
        for i in itertools.count():
            taken.append(i)
            yield Example(LINE[: i % 9])

    model = task_model("classification").train()
    found = predictions(model, BYTES, endless(), batch_size=2)
    sizes = []
    for _ in itertools.islice(found, 70):
        assert model.training and torch.is_grad_enabled()
        sizes.append(len(taken))
    assert sorted(set(sizes)) == [2, 6, 14, 30, 62, 94]


def test_windows_wait_for_nobody() -> None:
    """Only the first text of a window is waited for; a window of long texts is short."""
    ready = iter([False, True, True, False, False])
    found = windows((Example("a") for _ in range(5)), 8, lambda: next(ready))
    assert [len(window) for window in found] == [1, 3, 1]
    long = [Example("a" * (texts_module._MOST_CHARACTERS // 2)) for _ in range(5)]
    assert [len(window) for window in windows(long, 8)] == [2, 2, 1]


def test_what_is_skipped_changes_no_bit() -> None:
    model, examples = task_model("classification"), texts("classification", 23)
    whole = list(predictions(model, BYTES, examples, batch_size=2))
    for skip in (0, 5, 22, 99):
        assert list(predictions(model, BYTES, examples, batch_size=2, skip=skip)) == whole[skip:]


def test_mistakes_of_texts_and_models() -> None:
    model = task_model("classification")
    with pytest.raises(ConfigError, match="the model has no head; teach it a task first: txl finetune RUN"):
        predictions(tiny_model(), BYTES, [])
    with pytest.raises(ConfigError, match="unknown precision 'int8'; known: auto"):
        predictions(model, BYTES, [], precision="int8")
    with pytest.raises(ConfigError, match=r"unknown precision 'bf61'; did you mean 'bf16'\?"):
        predictions(model, BYTES, [], precision="bf61")
    with pytest.raises(CorpusError, match=r"dev.tsv, line 7: label 'god' is unknown; did you mean 'good'\?"):
        list(predictions(model, BYTES, [Example("a", label="god", place="dev.tsv, line 7")]))
    with pytest.raises(CorpusError, match="line 1: it has 0 choices, and the model chooses among 2 or more; give them"):
        list(predictions(task_model("choice"), BYTES, [replace(texts("choice", 2)[1], choices=())]))
    with torch.no_grad():
        next(model.head.parameters()).fill_(torch.inf)
    with pytest.raises(ConfigError, match="the model's scores in fp32 are not finite numbers; use --precision fp32"):
        list(predictions(model, BYTES, [Example("a")]))


def said(true: Label | None, label: Label, nats: float | None = None) -> Prediction:
    return Prediction(Example("text", label=true, place="dev.tsv, line 7"), label, nats=nats)


def test_scores_of_classes() -> None:
    """The fourth class never occurs, the fifth is never predicted either and counts in no mean."""
    true, predicted = "cccccccaabbccabcacabcbbbcbcbbcccccccccbc", "dcbdcddacbbddaddaddbdcbbbddbbacccddddcbd"
    pairs = [said(*pair, nats=i) for i, pair in enumerate(zip(true, predicted, strict=True))]
    score = TaskScore.of("classification", "abcde", [*pairs, said(None, "a", nats=math.inf)])
    assert (score.n, score.main) == (40, 0.425)
    expected = {"accuracy": 0.425, "macro_f1": 0.4508928571428571, "nats": 19.5}
    assert score.metrics == pytest.approx(expected)
    table = [[row[name] for name in ("precision", "recall", "f1", "n")] for row in score.per_label.values()]
    expected = [
        [0.75, 0.6, 0.66666667, 5],
        [0.8, 0.72727273, 0.76190476, 11],
        [0.75, 0.25, 0.375, 24],
        [0, 0, 0, 0],
        [0, 0, 0, 0],
    ]
    np.testing.assert_allclose(table, expected, atol=1e-8)
    assert score.confusion is not None
    assert score.confusion[:4, :4].tolist() == [[3, 0, 1, 1], [0, 8, 1, 2], [1, 2, 6, 15], [0, 0, 0, 0]]
    assert matthews(score.confusion) == pytest.approx(0.3649475829126435)
    assert json.loads(json.dumps(score.as_dict()))["confusion"] == score.confusion.tolist()


def test_scores_of_two_classes() -> None:
    true, predicted = "cccccccaabbccabcacabcbbbcbcbbcccccccccbc", "dcbdcddacbbddaddaddbdcbbbddbbacccddddcbd"
    true, predicted = (["no" if letter == "a" else "yes" for letter in text] for text in (true, predicted))
    pairs = [said(a, b) for a, b in zip(true, predicted, strict=True)]
    score = TaskScore.of("classification", ["no", "yes"], pairs)
    assert score.metrics["matthews"] == pytest.approx(0.629940788348712)
    assert score.metrics["macro_f1"] == pytest.approx(0.812206572769953)
    same = TaskScore.of("classification", ["no", "yes"], [said("no", "no"), said("yes", "no")])
    assert same.metrics["matthews"] == 0


def test_scores_of_labels() -> None:
    true = ["x", "x", "y", "xy", "z", "yz", "xy", "", "y", "y", "z", "y"]
    predicted = ["", "", "xyz", "xy", "", "yz", "yz", "z", "xy", "xyz", "z", "xyz"]
    pairs = [said(tuple(a), tuple(b)) for a, b in zip(true, predicted, strict=True)]
    score = TaskScore.of("multilabel", "xyz", pairs)
    assert score.main_name == "micro_f1"
    expected = {"micro_f1": 0.6060606060606061, "macro_f1": 0.5407407407407407, "exact": 0.25}
    assert score.metrics == pytest.approx(expected)
    assert score.per_label["z"] == pytest.approx({"precision": 0.28571429, "recall": 0.66666667, "f1": 0.4, "n": 3})


def test_scores_of_numbers() -> None:
    true = [1.0, 3.0, 3.0, 2.5, 5.0, 0.0, 4.0, 4.0, 4.0, 2.0]
    predicted = [1.1, 2.5, 3.0, 3.0, 4.0, 0.5, 4.0, 3.5, 5.0, 2.5]
    score = TaskScore.of("regression", (), [said(a, b) for a, b in zip(true, predicted, strict=True)])
    expected = {"pearson": 0.9207728723305263, "spearman": 0.913061090812414, "mse": 0.326}
    assert score.metrics == pytest.approx(expected)
    assert ranks(np.array([0.3, 0.1, 0.3, 0.3])).tolist() == [3, 1, 3, 3]
    constant = TaskScore.of("regression", (), [said(a, 0.1) for a in true])
    assert math.isnan(pearson(np.full(3, 0.1), np.arange(3.0)))
    assert (constant.main, constant.as_dict()["pearson"]) == (-1.0, None)


def test_scores_of_choices() -> None:
    score = TaskScore.of("choice", (), [said(0, 0, 0.25), said(3, 1, 0.75), said(0, 0), said(2, 0)])
    assert score.metrics == {"accuracy": 0.5, "nats": 0.5}
    assert score.in_words() == "accuracy 0.500, nats 0.5000 (4 texts)"


def test_an_empty_text_gets_nothing_said_of_it() -> None:
    """Wherever it stands; the others are as they are without it."""
    for kind in ("classification", "regression", "multilabel"):
        model, examples = task_model(kind), texts(kind, 9)
        with_empty = [Example(""), *examples[:4], Example(" "), Example("\n"), *examples[4:], Example("")]
        found = list(predictions(model, BYTES, with_empty, batch_size=2))
        assert [each.example for each in found] == with_empty
        assert {each.label for each in found if each.example.is_empty} == {""}
        full = [each for each in found if not each.example.is_empty]
        for each, alone in zip(full, predictions(model, BYTES, examples), strict=True):
            assert figures(each) == pytest.approx(figures(alone), abs=1e-5)
        assert list(predictions(model, BYTES, with_empty, batch_size=2, skip=6)) == found[6:]
        known = {"classification": "bad", "regression": 1.0}.get(kind, ("x",))
        labelled = [replace(each, example=replace(each.example, label=known)) for each in found]
        assert TaskScore.of(kind, HEADS[kind].get("labels", ()), labelled).n == len(examples)
    with pytest.raises(CorpusError, match="no text has a label, so there is nothing to score; give a file with labels"):
        TaskScore.of("choice", (), [said(None, 1)])


@pytest.mark.parametrize(
    ("true", "label", "shown"),
    [
        (["good", "bad", "good"], "good", "'good'; fine-tune"),
        ([("x",), ("y",)], (), "no label; fine-tune"),
        ([0.5, 2.0], 0.25, "0.25; fine-tune"),
        ([0, 3], 0, "0; fine-tune"),
        ([None] * 10, "good", "'good'; if they should not, fine-tune"),
        (["good"] * 3, "good", ""),
        ([None] * 9, "good", ""),
    ],
)
def test_the_same_answer_to_every_text_is_noticed(true: list[Label | None], label: Label, shown: str) -> None:
    sameness = Sameness()
    for each in true:
        sameness.add(said(each, label))
    start = f"all {len(true)} texts got the same, {shown}"
    assert sameness.remark.startswith(start) if shown else not sameness.remark
    assert sameness.remark.endswith(" or balanced classes (task.class_weights=balanced)") == (shown[:1] == "'")
    other = 1.5 * label if isinstance(label, float) else ("y",) if label == () else 1 if label == 0 else "fair"
    sameness.add(said(true[0], other))
    assert not sameness.remark


def test_a_score_remarks_that_all_texts_got_the_same() -> None:
    numbers = [said(1.0, 0.51231), said(2.0, 0.51234), said(None, 7.0)]
    score = TaskScore.of("regression", (), numbers)
    assert score.remark == score.as_dict()["remark"] != ""
    score = TaskScore.of("regression", (), [*numbers, said(2.0, 0.52)])
    assert (score.remark, "remark" in score.as_dict()) == ("", False)
    same = [Prediction(Example("x " * n, label=("O",) * n, words=("x",) * n), ("O",) * n) for n in (1, 2)]
    assert TaskScore.of("tokens", ("O", "A"), same).remark == ""
    words = [Prediction(Example("x y z", label=gold, words=("x", "y")), ("O", "O")) for gold in (("O", "O"), ("A", "O"))]
    assert TaskScore.of("tokens", ("O", "A"), words).remark.startswith("all 2 texts got the same, 'O'; fine-tune with more")
    none = [replace(said(gold, ""), no_answer=0.9) for gold in (("cat",), ())]
    assert TaskScore.of("span", (), none).remark.startswith("all 2 texts got the same, no answer; fine-tune with more steps")


class TestDocuments:
    """Rows of documents: 1, 2, … of them in each, of very different lengths."""

    SIZES = (3, 1, 7, 2, 5, 1, 4)

    def model(self, kind: str = "classification", tokenizer: Tokenizer = BYTES, *, is_xlnet: bool = False) -> TaskModel:
        head = {"kind": kind, "tgt_len": 8, "dropout": 0.0, "in_documents": True, **HEADS[kind]}
        sizes = {**TINY, "vocab_size": tokenizer.vocab_size, "mem_len": 40, "head": head}
        return random_weights(TaskModel((XLNetConfig if is_xlnet else TransformerXLConfig)(**sizes)).eval())

    def rows(self, kind: str = "classification") -> list[Example]:
        names = [f"document {name}" for name, n in enumerate(self.SIZES) for _ in range(n)]
        return [replace(text, document=name) for text, name in zip(texts(kind, len(names)), names, strict=True)]

    def by_hand(self, model: TaskModel, tokenizer: Tokenizer, examples: list[Example]) -> list[list[float]]:
        """Scores of rows that are read one after another, without padding, after those before them in their document."""
        layout, found, last, mems = Layout.of(model.config, tokenizer), [], None, None
        for example in examples:
            mems, last = None if example.document is None or example.document != last else mems, example.document
            batch = batch_of([layout.rows(example)], torch.zeros(1))
            with torch.no_grad():
                out = model(batch.ids, segments=batch.texts.segments, mems=mems)
            mems, kind = out.mems, model.config.head and model.config.head.kind
            scores = {"multilabel": out.logits.sigmoid(), "regression": out.logits}.get(str(kind), out.logits.softmax(1))
            found.append(scores[0].tolist())
        return found

    @pytest.mark.parametrize(
        ("kind", "is_xlnet"), [("classification", False), ("classification", True), ("multilabel", False), ("regression", True)]
    )
    def test_a_row_is_read_after_those_before_it_in_any_batch(self, kind: str, is_xlnet: bool) -> None:
        tokenizer = pieces() if is_xlnet else BYTES
        model, examples = self.model(kind, tokenizer, is_xlnet=is_xlnet), self.rows(kind)
        expected = self.by_hand(model, tokenizer, examples)
        alone = [replace(example, document=None) for example in examples]
        for rows, scores in ((examples, expected), (alone, self.by_hand(model, tokenizer, alone))):
            for batch_size in (1, 3):
                found = list(predictions(model, tokenizer, iter(rows), batch_size=batch_size))
                assert [each.example for each in found] == rows
                for prediction, one in zip(found, scores, strict=True):
                    assert figures(prediction)[: len(one)] == pytest.approx(one, abs=1e-5), prediction.example.place
        assert not np.allclose(np.concatenate(expected), np.concatenate(scores), atol=1e-2)

    @pytest.mark.parametrize("is_ready", [[False], [True, False], [True, True, False, False], [True]])
    def test_rows_are_answered_when_the_next_one_has_to_be_waited_for(self, is_ready: list[bool]) -> None:
        """A document goes on with its memory, also after an empty row."""
        model, examples = self.model(), self.rows()
        examples[12:12] = [Example("")]  # within a document
        expected = self.by_hand(model, BYTES, [example for example in examples if not example.is_empty])
        expected[12:12] = [[]]
        taken: list[Example] = []
        arriving = (taken.append(example) or example for example in examples)
        answers = predictions(model, BYTES, arriving, is_ready=itertools.cycle(is_ready).__next__, skip=6)
        for i, (prediction, one) in enumerate(zip(answers, expected[6:], strict=True), 6):  # within a document
            assert prediction.example == examples[i]
            assert list(prediction.probabilities) == pytest.approx(one, abs=1e-5)
            assert any(is_ready) or len(taken) == i + 1

    def test_what_is_skipped_changes_no_bit(self) -> None:
        model, examples = self.model(), self.rows()
        examples[5:5] = [Example("")]
        for batch_size in (1, 2):
            whole = list(predictions(model, BYTES, examples, batch_size=batch_size))
            for skip in (1, 5, 12, len(examples)):
                assert list(predictions(model, BYTES, examples, batch_size=batch_size, skip=skip)) == whole[skip:]

    def test_lists_are_documents_in_python(self) -> None:
        model = self.model()
        given = [
            ["one", ("two", "and more"), "three"],
            "alone",
            Example("a", document="x"),
            Example("b", document="x"),
            ["four"],
        ]
        first, last = "\x000", "\x004"
        rows = [Example("one", document=first), Example("two", "and more", document=first), Example("three", document=first)]
        rows += [Example("alone"), *given[2:4], Example("four", document=last)]
        found = list(predict((model, BYTES), given))
        assert [each.example for each in found] == rows
        for prediction, one in zip(found, self.by_hand(model, BYTES, rows), strict=True):
            assert list(prediction.probabilities) == pytest.approx(one, abs=1e-5)
        with pytest.raises(CorpusError, match=r"^document 1 has no rows; give it some, or leave it out$"):
            list(predict((model, BYTES), [["one"], []]))
        with pytest.raises(CorpusError, match=r"^document 'x' goes on here, after rows of another one"):
            list(predict((model, BYTES), [*given[2:4], "alone", ["a"], given[2]]))

    def test_a_list_is_another_document_than_one_of_its_number(self) -> None:
        model = self.model()
        _, found = predict((model, BYTES), [Example("a", document="1"), ["b"]])
        (alone,) = predict((model, BYTES), [["b"]])
        assert found.probabilities == pytest.approx(alone.probabilities, abs=1e-6)

    @pytest.mark.parametrize("text", [["a", "b", "c"], ("a",), ("a", 1), 1, [["a"], "b"]])
    def test_what_is_no_text_is_refused(self, text: Any) -> None:
        with pytest.raises(CorpusError, match=r"is neither a text nor two; a list is a document where the model learned from"):
            list(predict((task_model("classification"), BYTES), [text]))

    @pytest.mark.parametrize("text", ["\ud800 cat", ("a", "b\udc80"), "the \udce9\udcbe"])
    def test_half_of_a_character_is_refused(self, text: Any) -> None:
        with pytest.raises(CorpusError, match=r"^the text has half of a character \(a lone surrogate\); give the whole one$"):
            list(predict((task_model("classification"), BYTES), [text]))
        with pytest.raises(CorpusError, match=r"^'t.tsv' line 3: the text has half of a character"):
            Example("which?", choices=("a", "b\ud800"), place="'t.tsv' line 3")
