"""Labels of words: scores are those of seqeval (tests/parity/goldens/seqeval), spans stand where the text has them."""

import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.data.test_entities import GOLDEN
from tests.helpers import TINY, random_weights
from tests.tasks.test_predict import BYTES, pieces
from transformer_xl.config.model import HeadConfig, TransformerXLConfig, XLNetConfig
from transformer_xl.config.run import TaskConfig
from transformer_xl.data.examples import read_examples
from transformer_xl.data.labels import Example
from transformer_xl.data.layout import Layout
from transformer_xl.errors import CorpusError
from transformer_xl.model.task_model import TaskModel
from transformer_xl.reading import texts as texts_module
from transformer_xl.tasks.lines import as_json, as_row, prediction_file
from transformer_xl.tasks.metrics import EntitySpan, Prediction, TaskScore
from transformer_xl.tasks.predict import predictions, read_texts
from transformer_xl.tokenizers.kinds import CharTokenizer

LABELS = ("B-X", "I-X", "O")


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
    assert prediction.spans == (EntitySpan("PER", "Ann Lee", 5, 12, 1, 3), EntitySpan("LOC", "Ann", 17, 20, 5, 6))
    assert prediction.probability is None
    assert Prediction(Example("a"), ("x",)).spans == ()
    assert Prediction(Example("a b", words=("a", "b")), ("NOUN", "VERB")).spans == ()


def test_without_entities_nothing_is_right_or_wrong():
    score = TaskScore.of("tokens", ("B-X", "O"), [Prediction(Example("a", label=("O",), words=("a",)), ("O",))])
    assert (score.metrics, score.per_label) == ({"f1": 0.0, "precision": 0.0, "recall": 0.0, "accuracy": 1.0}, {})
    assert not math.isnan(score.main)


def _model(*, is_xlnet: bool = False, in_documents: bool = False) -> TaskModel:
    config = XLNetConfig if is_xlnet else TransformerXLConfig
    head = HeadConfig(kind="tokens", labels=LABELS, tgt_len=8, dropout=0.0, in_documents=in_documents)
    sizes = {**TINY, "vocab_size": pieces().vocab_size if is_xlnet else BYTES.vocab_size}
    torch.manual_seed(0)
    return random_weights(TaskModel(config(**sizes, head=head)).eval())


@pytest.mark.parametrize("is_xlnet", [False, True])
def test_words_have_the_labels_of_their_tokens_whatever_the_batch(is_xlnet, monkeypatch):
    """Sentences of one segment and of several; all words are labelled, and their cost is a mean of known labels."""
    monkeypatch.setattr(texts_module, "WINDOW", 2)
    model, tokenizer = _model(is_xlnet=is_xlnet), pieces() if is_xlnet else BYTES
    layout, words = Layout.of(model.config, tokenizer), ["the", "cat", "sat", "on", "the", "mat", "and", "the", "dog"]
    examples = []
    for i in range(11):
        some = tuple(words[i % 4 : i % 4 + 1 + i * i % 7])
        label = tuple(LABELS[j % 3] for j in range(len(some))) if i % 3 else None
        examples.append(Example(" ".join(some), words=some, label=label))
    expected = []
    for example in examples:
        (row,) = layout.rows(example)
        ids = torch.from_numpy(row.ids.astype("int64"))[None]
        with torch.no_grad():
            scores = model(ids, segments=torch.from_numpy(row.segments.astype("int64"))[None]).logits[0, row.words]
        expected.append(scores.log_softmax(-1))
    for batch_size in (3, 64):
        for found, example, nats in zip(
            predictions(model, tokenizer, examples, batch_size=batch_size), examples, expected, strict=True
        ):
            assert found.example == example
            assert found.label == tuple(LABELS[i] for i in nats.argmax(-1))
            assert found.probabilities == pytest.approx(nats.max(-1).values.exp().tolist(), abs=1e-5)
            if example.label is None:
                assert found.nats is None
            else:
                costs = [-nats[i, LABELS.index(name)].item() for i, name in enumerate(example.label)]
                assert found.nats == pytest.approx(sum(costs) / len(costs), abs=1e-5)


@pytest.mark.parametrize("is_xlnet", [False, True])
def test_sentences_of_a_document_are_read_with_a_memory_of_those_before(is_xlnet):
    model, tokenizer = _model(is_xlnet=is_xlnet, in_documents=True), pieces() if is_xlnet else BYTES
    layout, sentences = Layout.of(model.config, tokenizer), [("the", "cat"), ("sat", "on", "the", "mat"), ("and",)]
    rows = [Example(" ".join(words), words=words, document=name) for name in "ab" for words in sentences[: 3 - (name == "b")]]
    found = list(predictions(model, tokenizer, rows))
    mems, alone = None, list(predictions(model, tokenizer, [replace(rows[1], document="c")]))
    for prediction, example in zip(found[:3], rows, strict=False):
        row = layout.row_of_words(example)
        ids, segments = (torch.from_numpy(each.astype("int64"))[None] for each in (row.ids, row.segments))
        with torch.no_grad():
            out = model(ids, segments=segments, words=torch.from_numpy(row.words)[None], mems=mems)
        mems = out.mems
        assert prediction.probabilities == pytest.approx(out.logits[0].softmax(-1).amax(-1).tolist(), abs=1e-5)
    assert found[4].probabilities == pytest.approx(found[1].probabilities, abs=1e-5)  # the other document begins alike
    assert found[1].probabilities != pytest.approx(alone[0].probabilities, abs=1e-3)


def test_a_text_is_divided_by_white_space():
    (found, same) = predictions(_model(), BYTES, [Example(" a\tnew  text\n"), Example("", words=("a", "new", "text"))])
    assert found.example.words == ("a", "new", "text") and found.probabilities == pytest.approx(same.probabilities, abs=1e-6)
    assert same.example.text == "a new text"
    (empty,) = predictions(_model(), BYTES, [Example("  ")])
    assert (empty.label, as_row(empty, LABELS), json.loads(as_json(empty, LABELS))["label"]) == ("", "", None)
    with pytest.raises(CorpusError, match=r"^the model labels the words of one text; leave the second one out"):
        next(predictions(_model(), BYTES, [Example("a", "b")]))


@pytest.mark.parametrize("tab", ["\t", " "])
def test_columns_that_were_told_hold_the_words_of_other_files_too(tmp_path: Path, tab: str):
    config = SimpleNamespace(task=TaskConfig(kind="tokens", text="2", label=("3",)))
    opened: Any = SimpleNamespace(any_model=_model(), source="x", config=config)
    (tmp_path / "a.txt").write_text("".join(f"{tab.join(row.split())}\n" for row in ("1 Ann B-X", "2 sees O")))
    (found,) = read_texts(tmp_path / "a.txt", opened)
    assert (found.words, found.label) == (("Ann", "sees"), None)
    (labelled,) = read_texts(tmp_path / "a.txt", opened, labelled=True)
    assert labelled.label == ("B-X", "O")
    (tmp_path / "b.txt").write_text("Ann sees Bob\nand Carl\n")
    assert [each.text for each in read_texts(tmp_path / "b.txt", opened)] == ["Ann sees Bob", "and Carl"]


def test_lines_of_words_are_read_back(tmp_path: Path):
    example = Example("Dr.  Ann\tLee", words=("Dr.", "Ann\tLee"), id="7")
    prediction = Prediction(example, ("O", "B-X"), (0.75, 0.5))
    row = as_row(prediction, LABELS)
    assert row == "Dr.\t0.7500\tO\nAnn Lee\t0.5000\tB-X\n"
    (tmp_path / "a.conll").write_text(f"{row}\n" * 2)
    for told in ({}, {"text": "2", "label": ("4",)}, {"text": "tokens", "label": ("tags",)}):  # of the run's other files
        again = list(read_examples(tmp_path / "a.conll", TaskConfig.model_validate({"kind": "tokens", **told})))
        assert [each.label for each in again] == [("O", "B-X")] * 2 and again[0].words == ("Dr.", "Ann Lee")
    opened: Any = SimpleNamespace(any_model=_model(), source="x", config=SimpleNamespace(task=None))
    piped = list(read_texts(iter(f"{row}\n{row}".encode().splitlines(keepends=True)), opened))
    assert [each.words for each in piped] == [("Dr.", "Ann Lee")] * 2
    spans = [{"type": "X", "text": "Ann\tLee", "start": 5, "end": 12, "first_word": 1, "end_word": 2}]
    found = json.loads(as_json(prediction, LABELS))
    assert found == {
        "id": "7", "words": ["Dr.", "Ann\tLee"], "labels": ["O", "B-X"], "probabilities": [0.75, 0.5], "spans": spans,
    }  # fmt: skip
    assert "spans" not in json.loads(as_json(prediction, ("N", "V")))


def test_json_has_characters_as_they_are() -> None:
    """But for halves of a surrogate pair, which the name of a file may have, and no file can."""
    line = as_json(Prediction(Example("a", id="\u6df1\ud83c\U0001f600"), "good", (0.25, 0.75)), ["bad", "good"])
    assert line.startswith('{"id": "\u6df1\\ud83c\U0001f600", ') and line.encode()
    assert json.loads(line)["id"] == "\u6df1\ud83c\U0001f600"


def test_a_sentence_that_was_not_written_to_its_end_is_written_again(tmp_path: Path):
    origin = {"lines": "conll", "computed": "x", "model_sha256": "1", "texts_sha256": "2"}
    out = tmp_path / "out.conll"
    with prediction_file(out, origin, resume=False) as (file, n_kept):
        assert n_kept == 0
        file.write(b"a\tO\t1\n\n\nb\tO\t1\nc\tO\t1\n")  # a sentence, an empty line's, and one that was cut off
    with prediction_file(out, origin, resume=True) as (_, n_kept):
        assert n_kept == 2
    assert out.read_bytes() == b"a\tO\t1\n\n\n"


CHINESE = CharTokenizer("小明去北京。19年爱,\n")


@pytest.mark.parametrize("words", [("小", "明", "去", "北京", "。"), ("1", "9", "年"), ("19", "1", "91")])
def test_chinese_words_are_read_as_chinese_is_written(words):
    """Without spaces, which its vocabulary may lack; so each word's token stands where its last character does."""
    row = Layout(CHINESE, "lstm").row_of_words(Example("", words=words))
    assert CHINESE.decode(row.ids.tolist()) == "".join(words) + "\n"
    assert row.words.tolist() == [len("".join(words[: i + 1])) - 1 for i in range(len(words))]


def test_each_chinese_character_of_a_text_is_a_word():
    config = TransformerXLConfig(**{**TINY, "vocab_size": CHINESE.vocab_size}, head=_model().config.head)
    model = random_weights(TaskModel(config).eval())
    (found, same) = predictions(model, CHINESE, [Example("小明 去北京。"), Example("", words=tuple("小明去北京。"))])
    assert found.example.words == tuple("小明去北京。") and same.example.text == "小明去北京。"
    assert found.probabilities == pytest.approx(same.probabilities, abs=1e-6)
    spans = replace(found, label=("B-X", "I-X", "O", "B-X", "I-X", "O")).spans
    assert spans == (EntitySpan("X", "小明", 0, 2, 0, 2), EntitySpan("X", "北京", 4, 6, 3, 5))


@pytest.mark.parametrize("labels", ["B-X E-X S-X O", "B-X L-X U-X O", "B-X I-X B-X O"])
def test_a_model_of_bio_is_scored_on_files_of_bioes(tmp_path: Path, labels: str):
    opened: Any = SimpleNamespace(any_model=_model(), source="x", config=SimpleNamespace(task=None))
    (tmp_path / "a.conll").write_text("".join(f"w {label}\n" for label in labels.split()))
    (found,) = read_texts(tmp_path / "a.conll", opened, labelled=True)
    assert found.label == ("B-X", "I-X", "B-X", "O")
