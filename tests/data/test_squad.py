import json
import lzma
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers import examples
from tests.tokenizers.cases import TOKENIZERS
from transformer_xl.config.run import TokenizerConfig
from transformer_xl.data.labelled import LabelledStream
from transformer_xl.data.layout import Layout
from transformer_xl.data.squad import (
    GoldAnswer,
    LabelledWindows,
    Question,
    WindowLayout,
    divide,
    held_out,
    learnable,
    read_squad,
)
from transformer_xl.errors import ConfigError, CorpusError, TokenizerError
from transformer_xl.tokenizers.kinds import ByteTokenizer, Tokenizer, WordTokenizer, train_tokenizer
from transformer_xl.tokenizers.unigram import SentencePieceTokenizer

PASSAGE = "Ann went to the café in May 1984. There she met Bo, who sold 12 naïve cats."
QUESTION: dict[str, Any] = {"id": "q1", "question": "Who went?", "answers": [{"text": "Ann", "answer_start": 0}]}


def squad(*questions: dict[str, Any], passage: str = PASSAGE) -> dict[str, Any]:
    return {"version": "1.1", "data": [{"title": "A", "paragraphs": [{"context": passage, "qas": list(questions)}]}]}


def written(folder: Path, values: Any) -> Path:
    path = folder / "dev.json"
    path.write_text(json.dumps(values), encoding="utf-8")
    return path


def asked(passage: str, answer: str, *, text: str = "who?", **changes: Any) -> Question:
    return Question("1", text, passage, (GoldAnswer(answer, passage.index(answer)),), **changes)


def pieces() -> SentencePieceTokenizer:
    tokenizer = train_tokenizer(TokenizerConfig(kind="unigram", vocab_size=90), [(PASSAGE + " who? whom?\n") * 20])
    assert isinstance(tokenizer, SentencePieceTokenizer)
    return tokenizer


def window_layout(tokenizer: Tokenizer, is_xlnet: bool, **changes: Any) -> WindowLayout:
    return WindowLayout(Layout(tokenizer, "xlnet" if is_xlnet else "transformer_xl"), **changes)


def test_questions_come_with_answers_at_their_places(tmp_path: Path) -> None:
    second = {"id": "q2", "question": "When?", "is_impossible": True, "plausible_answers": [{"text": "May"}]}
    path = tmp_path / "dev.json.xz"
    path.write_bytes(lzma.compress(json.dumps(squad(QUESTION, second)).encode()))
    first, impossible = read_squad(path)
    assert (first.id, first.text, first.passage, first.answers) == ("q1", "Who went?", PASSAGE, (GoldAnswer("Ann", 0),))
    assert (first.is_impossible, impossible.is_impossible, impossible.answers) == (False, True, ())
    assert impossible.place == f"'{path}', question 'q2'"


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        (b'{"data": [', "is not in the form of SQuAD: Invalid JSON: EOF"),
        ([], "is not in the form of SQuAD: Input should be an object"),
        ({"data": []}, "has no questions"),
        (squad(QUESTION, QUESTION), "question 'q1': another question has the same id"),
        *(
            (squad({**QUESTION, **changes}), complaint)
            for changes, complaint in [
                ({"answers": [{"text": "Ann", "answer_start": "0"}]}, "qas.0.answers.0.answer_start: Input should be"),
                ({"answers": [{"answer_start": 0}]}, "answers.0.text: Field required"),
                ({"answers": []}, "question 'q1': it has no answers"),
                ({"is_impossible": True}, "question 'q1': it has answers although is_impossible is true"),
                ({"question": " \n"}, "question: String should match"),
            ]
        ),
    ],
)
def test_what_is_no_squad_file_is_refused(values: Any, complaint: str, tmp_path: Path) -> None:
    path = written(tmp_path, values) if not isinstance(values, bytes) else tmp_path / "dev.json"
    if isinstance(values, bytes):
        path.write_bytes(values)
    with pytest.raises(CorpusError, match=complaint) as caught:
        read_squad(path)
    assert "\n" not in str(caught.value)


def test_answers_that_are_not_where_the_file_says_are_found_or_counted(tmp_path: Path) -> None:
    """As in files of CMRC 2018: the ids are Chinese ones, an article has an id, and some starts are off or -1."""
    passage, names = "范廷颂1919年生于宁平省，1994年升任枢机，1994年访问河内。", "TRAIN_186_QUERY_{}"
    told = [
        [("1994年", 14), ("1994年升任", 14)],
        [("1994年", 20)],  # the second one is nearer
        [("河内", -1)],
        [("河内市", 5), ("河内", 30)],
        [("河内市", -1)],
    ]
    questions = [
        {"id": names.format(i), "question": "何时？", "answers": [{"text": text, "answer_start": at} for text, at in each]}
        for i, each in enumerate(told)
    ]
    path = tmp_path / "dev.json"
    file = squad(*questions, passage=passage)
    path.write_text(json.dumps(file, ensure_ascii=False), encoding="utf-8")
    found = read_squad(path)
    assert [[answer.start for answer in each.answers] for each in found] == [[14, 14], [24], [31], [-1, 31], [-1]]
    assert found[3].example.label == ("河内市", "河内"), "scores compare texts"
    layout = window_layout(ByteTokenizer(), False, tgt_len=250)
    places = [layout.windows(each)[0] for each in found]
    assert [passage[each.starts[each.labels[0] - each.begin] :][:2] for each in places[:4]] == ["19", "19", "河内", "河内"]
    assert places[4].labels == (-100, -100, -100)
    kept, notes = learnable(found, path)
    assert kept == found[:4]
    assert notes == (
        f"3 answers of '{path}' are not where answer_start says; they are taken from the nearest place",
        f"2 answers of '{path}' are not in their passages; 1 questions without others are skipped",
    )
    with pytest.raises(CorpusError, match=r"no answer of '.*dev.json' is in its passage; give the file"):
        learnable(found[4:], path)


def test_questions_without_answers_can_be_asked(tmp_path: Path) -> None:
    path = written(tmp_path, squad({"id": "q", "question": "Who?"}, {**QUESTION, "answers": []}))
    unlabelled = read_squad(path, labelled=False)
    assert [question.is_labelled for question in unlabelled] == [False, False]
    with pytest.raises(CorpusError, match=r"question 'q': it has no answers"):
        read_squad(path)
    layout = window_layout(ByteTokenizer(), False, tgt_len=250)
    assert [list(window.labels) for window in layout.windows(unlabelled[0])] == [[-100] * 3]


def test_no_article_is_on_both_sides() -> None:
    questions = [Question(str(i), "?", f"p{i // 2}", article=i // 10) for i in range(100)]
    kept, held = held_out(questions, 0.15, seed=3)
    assert len(held) == 20, "whole articles, at least the share"
    assert not {q.article for q in kept} & {q.article for q in held}
    assert sorted(kept + held, key=lambda q: int(q.id)) == questions
    assert held_out(questions, 0.15, seed=3) == (kept, held)
    others = [{q.article for q in held_out(questions, 0.15, seed=seed)[1]} for seed in range(9)]
    assert any(other != {q.article for q in held} for other in others)
    assert len(held_out(questions, 0.999, seed=0)[1]) == 90, "one article remains"


def test_a_group_larger_than_the_share_is_cut_off_only_if_all_are() -> None:
    kept, cut = divide("aaabb", "aaabb", 0.1, seed=0)
    assert (kept, cut) == (list("aaa"), list("bb"))
    assert divide("aaabbbc", "aaabbbc", 0.15, seed=0)[1] == ["c"], "another group would be farther from the share"


def test_one_article_is_divided_by_passage() -> None:
    kept, held = held_out([Question(str(i), "?", f"p{i // 2}") for i in range(10)], 0.2, seed=0)
    assert (len(kept), len(held), len({q.passage for q in held})) == (8, 2, 1)
    with pytest.raises(CorpusError, match=r"about one passage, so none can be held out; give a file .*task.valid"):
        held_out([Question("1", "?", "p"), Question("2", "?", "p")], 0.5, seed=0)


def test_rows_of_an_xlnet() -> None:
    tokenizer = pieces()
    question = asked(PASSAGE, "May 1984")
    (window,) = window_layout(tokenizer, True, tgt_len=300).windows(question)
    passage, asks = tokenizer.encode(PASSAGE).tolist(), tokenizer.encode("who?").tolist()
    sep, cls = tokenizer.id_of("<sep>"), tokenizer.id_of("<cls>")
    assert window.row.ids.tolist() == [*passage, sep, *asks, sep, cls]
    assert window.row.segments.tolist() == [0] * (len(passage) + 1) + [1] * (len(asks) + 1) + [2]
    assert window.row.may_answer is not None and window.row.may_answer.tolist() == [True] * len(passage) + [False] * (
        len(asks) + 3
    )
    first, last, is_impossible = list(window.labels)
    assert tokenizer.decode(window.row.ids[first : last + 1].tolist()).strip() == "May 1984"
    assert PASSAGE[window.starts[first] : window.ends[last]] == "May 1984"
    assert is_impossible == 0


def test_windows_without_the_answer_point_at_their_last_token() -> None:
    layout = window_layout(pieces(), True, tgt_len=14, doc_stride=4, max_query_len=4)
    windows = layout.windows(asked(PASSAGE, "cats"))
    assert len(windows) > 2
    for window in windows[:-1]:
        assert list(window.labels) == [len(window.row.ids) - 1, len(window.row.ids) - 1, 1]
    assert windows[-1].labels[2] == 0
    for window in layout.windows(Question("1", "who?", PASSAGE, is_impossible=True)):
        assert list(window.labels) == [len(window.row.ids) - 1, len(window.row.ids) - 1, 1]


@settings(max_examples=examples(300))
@given(st.data())
def test_windows_cover_the_passage_and_share_each_piece_to_the_one_that_shows_most(data: st.DataObject) -> None:
    n = data.draw(st.integers(1, 40))
    passage = "".join(data.draw(st.lists(st.sampled_from("ab é"), min_size=n, max_size=n))) + "x"
    query = data.draw(st.integers(1, 5))
    stride = data.draw(st.integers(1, 9))
    room = stride + data.draw(st.integers(0, 9))
    layout = window_layout(ByteTokenizer(), False, tgt_len=room + 2 + 5, doc_stride=stride, max_query_len=5)
    start = data.draw(st.integers(0, n))
    answer = GoldAnswer(passage[start : data.draw(st.integers(start + 1, n + 1))], start)
    question = Question("1", "?" * query, passage, (answer,))
    windows = layout.windows(question)
    raw, own = passage.encode(), room + 5 - query
    context: dict[int, list[float]] = {}
    for i, window in enumerate(windows):
        begin = i * stride
        piece = raw[begin : begin + own]
        assert bytes(window.row.ids.tolist()) == b"?" * query + b"\n" + piece + b"\n"
        inside = begin <= len(passage[:start].encode()) and len(passage[: answer.end].encode()) <= begin + len(piece)
        assert (window.labels[2] == 0) == inside
        if inside:
            first, last = [place - window.begin for place in window.labels[:2]]
            assert passage[window.starts[first] : window.ends[last]] == answer.text
        for place in range(len(piece)):
            context.setdefault(begin + place, []).append(min(place, len(piece) - 1 - place) + 0.01 * len(piece))
    assert len(context) == len(raw), "every piece is in a window"
    assert sum(window.has_most_context.sum() for window in windows) == len(raw)
    for i, window in enumerate(windows):
        for place in np.flatnonzero(window.has_most_context):
            shown = context[i * stride + int(place)]
            own_context = min(place, len(window.starts) - 1 - place) + 0.01 * len(window.starts)
            assert own_context == max(shown)


@pytest.mark.parametrize("name", ["byte", "char", "bpe", "word", "lines", "sentences"])
def test_answers_come_back_where_pieces_end_with_them(name: str) -> None:
    passage = "The cat's naïve\nhat. The é x 1 sat"
    layout = window_layout(TOKENIZERS[name], False, tgt_len=200, max_query_len=20)
    for answer in ("The", "naïve", "naïve\nhat.", "é x", "sat", passage):
        question = asked(passage, answer)
        assert layout.recovered(question, question.answers[0]) == answer


def test_an_answer_without_pieces_is_not_scored() -> None:
    tokenizer = train_tokenizer(TokenizerConfig(kind="unigram", vocab_size=90, normalization="xlnet"), [(PASSAGE + "\n") * 20])
    layout = window_layout(tokenizer, True, tgt_len=200)
    question = asked("Ann \u0301 went", "\u0301")
    assert layout.windows(question)[0].labels == (-100, -100, -100)
    assert layout.recovered(question, question.answers[0]) == ""
    with pytest.raises(CorpusError, match=r"'1': nothing of its passage can be encoded"):
        layout.windows(asked("\u0301", "\u0301"))


@pytest.mark.parametrize(
    ("tokenizer", "changes", "complaint"),
    [
        (ByteTokenizer(), {"tgt_len": 100}, r"task.doc_stride \(128\) must be at most 34: rows of 100 tokens"),
        (ByteTokenizer(), {"tgt_len": 60}, r"task.max_query_len \(64\) leaves no room .* use at most 57"),
        (WordTokenizer(["<unk>", "a"], line_end=None), {}, "no token for a line end or a space"),
        (TOKENIZERS["letters"], {}, "does not keep the place of its tokens"),
    ],
)
def test_what_cannot_hold_a_question_is_refused(tokenizer: Tokenizer, changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises((ConfigError, TokenizerError), match=complaint):
        window_layout(tokenizer, **{"is_xlnet": False, "tgt_len": 300, **changes})


def test_a_stream_deals_out_every_window_once_with_its_answer() -> None:
    layout = window_layout(ByteTokenizer(), False, tgt_len=30, doc_stride=9, max_query_len=9)
    questions = [
        asked(PASSAGE, "Bo", text="whom?"),
        asked(PASSAGE, "naïve cats", text="what?"),
        Question("3", "why?", PASSAGE, is_impossible=True),
        asked("Ann left.", "Ann"),
    ]
    windows = LabelledWindows(questions, layout)
    expected = [(bytes(each.row.ids.tolist()), each.labels) for question in questions for each in layout.windows(question)]
    assert windows.lengths.tolist() == [len(row) for row, _ in expected]
    stream = LabelledStream(windows, batch_size=4, seed=1)
    found = []
    for _ in range(stream.segments_per_epoch):
        batch = next(stream)
        for ids, n_pad, label, may_answer in zip(
            batch.ids, batch.n_pad.tolist(), batch.labels, batch.texts.may_answer, strict=True
        ):
            if label[0] >= 0:
                labels = (int(label[0]) - n_pad, int(label[1]) - n_pad, int(label[2]))
                found.append((bytes(ids[n_pad:].tolist()), labels))
                answer = bytes(ids[label[0] : label[1] + 1].tolist()).decode()
                assert answer in ("Bo", "naïve cats", "Ann", "\n")
                assert bool(may_answer[label[0]]) == (answer != "\n")
    assert sorted(found) == sorted(expected)
    assert len({answer for _, answer in found if not answer[2]}) > 2
    assert windows.checksum != LabelledWindows(questions[1:], layout).checksum
    other = [asked(PASSAGE, "Ann", text="whom?"), *questions[1:]]
    assert windows.checksum != LabelledWindows(other, layout).checksum
    with pytest.raises(CorpusError, match="no questions to learn from"):
        LabelledWindows([], layout)


def test_answers_inside_of_pieces_are_counted() -> None:
    layout = window_layout(TOKENIZERS["word"], False, tgt_len=200, max_query_len=20)
    questions = [asked("in the 1990s, then", answer) for answer in ("1990", "the", "then", "hen")]
    assert LabelledWindows(questions, layout).n_lost == 2
    assert layout.recovered(questions[0], questions[0].answers[0]) == "1990s,"
    with pytest.raises(TokenizerError, match=r"^question '1': text with a lone surrogate"):
        window_layout(TOKENIZERS["unigram"], False, tgt_len=200).windows(Question("1", "who?", "\ud800"))


@pytest.mark.data
def test_every_answer_of_squad_comes_back_or_begins_or_ends_inside_of_a_piece() -> None:
    """Characters, and words made of pieces of 8,000: what pieces give back is the answer, or the least that contains it."""
    path = Path(os.environ.get("TXL_DATA", "no such directory")) / "squad" / "dev-v1.1.json.xz"
    if not path.exists():
        pytest.skip(f"'{path}' does not exist; set TXL_DATA to a directory with real corpora")
    questions = read_squad(path)
    assert len(questions) == 10_570
    text = "\n".join(dict.fromkeys(question.passage for question in questions))
    tokenizer = train_tokenizer(TokenizerConfig(kind="unigram", vocab_size=8000), [text])
    layouts = [
        window_layout(ByteTokenizer(), False, tgt_len=512),
        window_layout(tokenizer, True, tgt_len=512),
    ]
    n_answer, n_exact = 0, [0, 0]
    for question in questions:
        for answer in dict.fromkeys(question.answers):
            n_answer += 1
            for i, layout in enumerate(layouts):
                found = layout.recovered(question, answer)
                n_exact[i] += found == answer.text
                assert answer.text in found
                if found != answer.text:
                    borders = {*layout.pieces(question).starts.tolist(), *layout.pieces(question).ends.tolist()}
                    assert answer.start not in borders or answer.end not in borders
    assert n_exact[0] == n_answer == 18_216
    assert n_exact[1] / n_answer > 0.97
