"""Questions about passages: files of SQuAD 1.1 and 2.0, and the windows of a passage in which a model looks for the answer.

A window is one row of ids. A model that sees both sides (XLNet) reads

    passage <sep> question <sep> <cls>        segments 0 … 0, 0, 1 … 1, 1, 2

and a model that reads from left to right reads the question first, so that it knows what it looks for:

    question newline passage newline          segments all 0

(a vocabulary without line ends has a space instead). The last token stands for "no answer here". A passage that is too long for
one row is cut into windows that begin `doc_stride` tokens apart. Every piece knows from which characters it comes, so an answer
is a part of the passage as it was written, not text put together from pieces.

Reference: Rajpurkar et al. 2016 and 2018 for the files; zihangdai/xlnet `run_squad.py` for windows and their best context.
"""

import re
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, StringConstraints, ValidationError

from transformer_xl.batch import NOT_SCORED, Batch
from transformer_xl.config.model import ModelConfig
from transformer_xl.data.labels import Example
from transformer_xl.data.layout import Layout, Row, batch_of
from transformer_xl.data.text_files import FileRange, read_blocks
from transformer_xl.errors import ConfigError, CorpusError, TokenizerError, shown
from transformer_xl.tokenizers.base import Tokenizer

Item = TypeVar("Item")


class GoldAnswer(NamedTuple):
    """A right answer: its text, and the character of the passage at which it begins, or -1 if it stands nowhere there."""

    text: str
    start: int

    @property
    def end(self) -> int:
        """The character after its last one."""
        return self.start + len(self.text)


@dataclass(frozen=True)
class Question:
    """A question about a passage."""

    id: str  # its name in the file
    text: str  # the question
    passage: str  # the text that may hold the answer
    answers: tuple[GoldAnswer, ...] = ()  # from one or several people; none if there is none, or if it is not known
    is_impossible: bool = False  # the passage does not hold an answer
    is_labelled: bool = True  # whether the file says what the answer is, or that there is none
    article: int = 0  # number of the article that the passage is from
    place: str = ""  # where it comes from, for messages
    n_moved: int = 0  # answers that stand elsewhere in the passage than the file says

    @property
    def example(self) -> Example:
        """The passage and the question as a text and its pair, with the texts of all right answers as the label."""
        label = tuple(answer.text for answer in self.answers) if self.is_labelled else None
        return Example(self.passage, self.text, label=label, place=self.place, id=self.id)

    @property
    def place_of_answer(self) -> GoldAnswer | None:
        """The first answer that stands in the passage."""
        return next((answer for answer in self.answers if answer.start >= 0), None)


class _Entry(BaseModel):
    model_config = ConfigDict(strict=True)


_Text = Annotated[str, StringConstraints(pattern=r"\S")]


class _Answer(_Entry):
    text: _Text
    answer_start: int


class _Question(_Entry):
    id: _Text
    question: _Text
    answers: list[_Answer] = []
    is_impossible: bool = False


class _Paragraph(_Entry):
    context: _Text
    qas: list[_Question]


class _Article(_Entry):
    paragraphs: list[_Paragraph]


class _File(_Entry):
    data: list[_Article]


def read_squad(path: Path, *, labelled: bool = True) -> list[Question]:
    """Read the questions of a file of SQuAD 1.1 or 2.0, plain or compressed (.gz, .xz, .zst), in its order.

    Unless they are `labelled`, those that have neither an answer nor the mark that there is none come, too.
    """
    try:
        file = _File.model_validate_json(b"".join(read_blocks(FileRange(path))))
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = f"{'.'.join(map(str, first['loc']))}: " if first["loc"] else ""
        raise CorpusError(f"'{path}' is not in the form of SQuAD: {where}{first['msg']}; write it as in SQuAD") from None
    questions = [
        _question(entry, paragraph.context, number, path, labelled=labelled)
        for number, article in enumerate(file.data)
        for paragraph in article.paragraphs
        for entry in paragraph.qas
    ]
    if not questions:
        raise CorpusError(f"'{path}' has no questions; give another file")
    if twice := next((name for name, n in Counter(question.id for question in questions).items() if n > 1), None):
        raise CorpusError(f"'{path}', question {shown(twice)}: another question has the same id; give each its own")
    return questions


def _question(entry: _Question, passage: str, article: int, path: Path, *, labelled: bool) -> Question:
    place = f"'{path}', question {shown(entry.id)}"
    if entry.is_impossible and entry.answers:
        raise CorpusError(f"{place}: it has answers although is_impossible is true; remove one of the two")
    if labelled and not entry.is_impossible and not entry.answers:
        raise CorpusError(f"{place}: it has no answers; add one, or set is_impossible to true")
    answers = tuple(GoldAnswer(answer.text, _nearest(answer, passage)) for answer in entry.answers)
    n_moved = sum(0 <= ours.start != theirs.answer_start for ours, theirs in zip(answers, entry.answers, strict=True))
    is_labelled = bool(answers) or entry.is_impossible
    return Question(entry.id, entry.question, passage, answers, entry.is_impossible, is_labelled, article, place, n_moved)


def _nearest(answer: _Answer, passage: str) -> int:
    """Return where an answer stands, as near as can be to where its file says it does; -1 if it stands nowhere."""
    if answer.answer_start >= 0 and passage.startswith(answer.text, answer.answer_start):
        return answer.answer_start
    starts = [match.start() for match in re.finditer(f"(?={re.escape(answer.text)})", passage)]
    return min(starts, key=lambda start: abs(start - answer.answer_start), default=-1)


def learnable(questions: Sequence[Question], path: Path) -> tuple[list[Question], tuple[str, ...]]:
    """Return the questions of a file that a place in their passage can be learned from, and sentences about the others."""
    kept = [question for question in questions if question.is_impossible or question.place_of_answer]
    n_absent = sum(answer.start < 0 for question in questions for answer in question.answers)
    n_moved = sum(question.n_moved for question in questions)
    if n_absent and not any(question.answers for question in kept):
        raise CorpusError(f"no answer of '{path}' is in its passage; give the file whose answers are copied from its passages")
    notes = []
    if n_moved:
        notes.append(f"{n_moved:,} answers of '{path}' are not where answer_start says; they are taken from the nearest place")
    if n_absent:
        n_left = len(questions) - len(kept)
        notes.append(
            f"{n_absent:,} answers of '{path}' are not in their passages; {n_left:,} questions without others are skipped"
        )
    return kept, tuple(notes)


def held_out(questions: Sequence[Question], share: float, *, seed: int) -> tuple[list[Question], list[Question]]:
    """Cut off a `share` of the questions at least, by article, so that nobody is asked about a text that was learned from.

    If there is one article only, they are divided by passage.
    """
    groups: list[Any] = [question.article for question in questions]
    if len(set(groups)) < 2:
        groups = [question.passage for question in questions]
    if len(set(groups)) < 2:
        raise CorpusError("all questions are about one passage, so none can be held out; give a file for that (task.valid)")
    return divide(questions, groups, share, seed=seed)


def divide(items: Sequence[Item], groups: Sequence[Any], share: float, *, seed: int) -> tuple[list[Item], list[Item]]:
    """Cut off about a `share` of the items, in whole groups; both sides keep their order. There must be two groups.

    Groups come in a random order. One that is larger than what is still missing is left out, or else it could be most of the
    text; the smallest of these is cut off nevertheless if that comes at least as near to the share, or if nothing else is.
    """
    counts = Counter(groups)
    missing, kept, names = share * len(items), list[Any](), list(counts)
    for name in (names[index] for index in np.random.default_rng(seed).permutation(len(names))):
        if counts[name] <= missing:
            missing -= counts[name]
        else:
            kept.append(name)
    smallest = min(kept, key=counts.__getitem__)
    if len(kept) == len(names) or (len(kept) > 1 and counts[smallest] <= 2 * missing):
        kept.remove(smallest)
    chosen = counts.keys() - kept
    kept = [item for item, name in zip(items, groups, strict=True) if name not in chosen]
    return kept, [item for item, name in zip(items, groups, strict=True) if name in chosen]


class Pieces(NamedTuple):
    """A text as ids, and the characters from which each comes: arrays of shape (n,), int64."""

    ids: np.ndarray
    starts: np.ndarray
    ends: np.ndarray

    def covering(self, start: int, end: int) -> tuple[int, int] | None:
        """Return the first and the last piece of the characters from start to end (exclusive); None if no piece has any.

        Example:
            >>> Pieces(*map(np.array, ([7, 8], [0, 2], [2, 4]))).covering(1, 4)
            (0, 1)
        """
        first, last = int(np.searchsorted(self.ends, start, "right")), int(np.searchsorted(self.starts, end, "left")) - 1
        return (first, last) if first <= last else None


@dataclass(frozen=True)
class Window:
    """A part of a passage with its question, as one row of tokens."""

    row: Row  # the tokens; `may_answer` is True for the passage's pieces
    # first and last token of the answer and 0; or twice the last token and 1 where the window has none. All -100: not known, or
    # the answer has no pieces
    labels: tuple[int, int, int]
    begin: int  # the place in the row at which pieces of the passage begin
    starts: np.ndarray  # (n,) int64, the characters of the passage at which its pieces in this window begin
    ends: np.ndarray  # (n,) int64, those after their last ones
    has_most_context: np.ndarray  # (n,) bool, pieces which no other window shows with more text at both sides


class _Cut(NamedTuple):
    """A window of a passage: its pieces from begin to end (exclusive), and the first and last piece of the answer in it.

    Of both, -1: the window has no answer, and -100: it is not scored.
    """

    begin: int
    end: int
    first: int
    last: int


class WindowLayout:
    r"""How questions become rows of ids.

    Args:
        layout: of the model's texts.
        tgt_len: tokens of the longest row.
        doc_stride: tokens by which the windows of a passage move on.
        max_query_len: tokens of a question that are read.

    Example:
        >>> from transformer_xl.tokenizers.kinds import ByteTokenizer
        >>> layout = WindowLayout(Layout(ByteTokenizer(), "lstm"), tgt_len=14, doc_stride=4, max_query_len=4)
        >>> question = Question("1", "who?", "it was Ann.", (GoldAnswer("Ann", 7),))
        >>> [bytes(window.row.ids.tolist()) for window in layout.windows(question)]
        [b'who?\nit was A\n', b'who?\nas Ann.\n']
        >>> [window.labels for window in layout.windows(question)]
        [(13, 13, 1), (8, 10, 0)]
    """

    def __init__(self, layout: Layout, *, tgt_len: int, doc_stride: int = 128, max_query_len: int = 64) -> None:
        layout.tokenizer.encode_with_offsets("")  # an error if it does not keep places
        if not len(layout.sep):
            raise TokenizerError(
                f"this tokenizer (kind {layout.tokenizer.kind}) has no token for a line end or a space, which divides "
                "question and passage; train one that has"
            )
        n_special = layout.n_special(2)
        room = tgt_len - n_special - max_query_len
        if room < doc_stride:
            raise ConfigError(
                f"task.doc_stride ({doc_stride}) must be at most {room}: rows of {tgt_len} tokens (train.tgt_len) keep so many "
                f"for the passage beside {max_query_len} of the question (task.max_query_len) and {n_special} others"
                if room > 0
                else f"task.max_query_len ({max_query_len}) leaves no room for the passage in rows of {tgt_len} tokens "
                f"(train.tgt_len); use at most {max(1, tgt_len - n_special - 1)}, or longer rows"
            )
        self._layout, self.n_special = layout, n_special
        self._tgt_len, self._doc_stride, self._max_query_len = tgt_len, doc_stride, max_query_len
        self._passage = lru_cache(8)(self._pieces)  # questions about a passage follow each other

    @classmethod
    def of(cls, config: ModelConfig, tokenizer: Tokenizer) -> "WindowLayout":
        """Return the layout that belongs to a model with a head for spans."""
        head = config.head
        assert head is not None
        tgt_len = head.tgt_len if head.max_len is None else min(head.tgt_len, head.max_len)
        layout = Layout(tokenizer, config.kind)
        return cls(layout, tgt_len=tgt_len, doc_stride=head.doc_stride, max_query_len=head.max_query_len)

    def _pieces(self, text: str) -> Pieces:
        return Pieces(*self._layout.encode_with_offsets(text))

    def pieces(self, question: Question) -> Pieces:
        """Return the pieces of a question's passage."""
        where = question.place or f"question {shown(question.id)}"
        try:
            pieces = self._passage(question.passage)
        except TokenizerError as error:
            raise TokenizerError(f"{where}: {error}") from None
        if not len(pieces.ids):
            raise CorpusError(f"{where}: nothing of its passage can be encoded; leave it out")
        return pieces

    def asked(self, question: Question) -> np.ndarray:
        """Return the ids of a question's text, int32 (n,)."""
        return self._layout.encode_at(question.text, question.place)[: self._max_query_len]

    def recovered(self, question: Question, answer: GoldAnswer) -> str:
        """Return what the pieces of an answer give back: the answer, unless it begins or ends inside of a piece."""
        pieces = self.pieces(question)
        covering = pieces.covering(answer.start, answer.end)
        if covering is None:
            return ""
        first, last = covering
        return question.passage[pieces.starts[first] : pieces.ends[last]]

    def windows(self, question: Question) -> list[Window]:
        """Return the windows of a question's passage, in their order, labeled with the first answer that is in it."""
        pieces, asked = self.pieces(question), self.asked(question)
        cuts = self.cuts(question, pieces, len(asked))
        best = _most_context(cuts, len(pieces.ids))
        windows = []
        for i, cut in enumerate(cuts):
            own = slice(cut.begin, cut.end)
            row, begin, labels = self.row(pieces.ids[own], asked, cut)
            windows.append(Window(row, labels, begin, pieces.starts[own], pieces.ends[own], best[own] == i))
        return windows

    def cuts(self, question: Question, pieces: Pieces, n_asked: int) -> list[_Cut]:
        """Return the windows of a question's passage as places of pieces."""
        room, n_piece = self._tgt_len - self.n_special - n_asked, len(pieces.ids)
        begins = [0, *range(self._doc_stride, max(0, n_piece - room) + self._doc_stride, self._doc_stride)]
        gold = question.place_of_answer
        answer = gold and pieces.covering(gold.start, gold.end)
        cuts = []
        for begin in begins:
            end = min(begin + room, n_piece)
            if answer is not None and begin <= answer[0] and answer[1] < end:
                cuts.append(_Cut(begin, end, *answer))
            else:
                is_known = question.is_impossible or answer is not None
                cuts.append(_Cut(begin, end, *[-1 if is_known else NOT_SCORED] * 2))
        return cuts

    def row(self, passage: np.ndarray, asked: np.ndarray, cut: _Cut) -> tuple[Row, int, tuple[int, int, int]]:
        """Return a window's row, the place of its passage in it, and its labels."""
        if self._layout.is_xlnet:
            row, begin = self._layout.row(passage, asked), 0
        else:
            row, begin = self._layout.row(asked, passage), len(asked) + len(self._layout.sep)
        may_answer = np.zeros(len(row.ids), bool)
        may_answer[begin : begin + len(passage)] = True
        last = len(row.ids) - 1
        labels = {-1: (last, last, 1), NOT_SCORED: (NOT_SCORED, NOT_SCORED, NOT_SCORED)}.get(
            cut.first, (cut.first - cut.begin + begin, cut.last - cut.begin + begin, 0)
        )
        return replace(row, may_answer=may_answer), begin, labels


def _most_context(cuts: Sequence[_Cut], n_piece: int) -> np.ndarray:
    """Return for each piece of a passage the window that shows most text at its poorer side, shape (n_piece,), int64.

    Of windows with the same number of tokens there, the longer one is taken, and then the first.
    """
    best, most = np.zeros(n_piece, np.int64), np.full(n_piece, -1.0)
    for i, (begin, end, *_) in enumerate(cuts):
        places = np.arange(begin, end)
        context = np.minimum(places - begin, end - 1 - places) + 0.01 * (end - begin)
        better = context > most[begin:end]
        best[begin:end][better] = i
        most[begin:end][better] = context[better]
    return best


def batch_of_windows(rows: Sequence[Row], labels: Sequence[tuple[int, int, int]], length: int | None = None) -> Batch:
    """Return windows as the rows of a batch, padded at the left; places in its labels count the padding."""
    batch = batch_of([(row,) for row in rows], torch.tensor(labels, dtype=torch.int64), length=length)
    places = batch.labels[:, :2]
    places += batch.n_pad[:, None] * (places != NOT_SCORED)
    return batch


class LabelledWindows:
    """The windows of all questions, which a `LabelledStream` deals out; each passage is encoded and held once.

    Attributes:
        lengths: tokens of each window's row, int64 (n,).
        checksum: see `LabelledRows`.
        n_lost: questions whose answer begins or ends inside of a piece, so that no prediction can be exactly the answer.
    """

    def __init__(self, questions: Sequence[Question], layout: WindowLayout) -> None:
        if not questions:
            raise CorpusError("there are no questions to learn from; give a file with some")
        self._layout = layout
        self._passages: list[np.ndarray] = []
        self._asked: list[np.ndarray] = []
        numbers: dict[str, int] = {}
        windows: list[tuple[int, ...]] = []  # numbers of passage and question, and the cut
        lengths: list[int] = []
        self.n_lost = 0
        for question in questions:
            pieces, asked = layout.pieces(question), layout.asked(question)
            number = numbers.setdefault(question.passage, len(numbers))
            if number == len(self._passages):
                self._passages.append(pieces.ids.astype(np.int32))
            self._asked.append(asked)
            cuts = layout.cuts(question, pieces, len(asked))
            windows += [(number, len(self._asked) - 1, *cut) for cut in cuts]
            lengths += [cut.end - cut.begin + len(asked) + layout.n_special for cut in cuts]
            if gold := question.place_of_answer:
                self.n_lost += layout.recovered(question, gold) != gold.text
        self._windows, self.lengths = np.array(windows, np.int64), np.array(lengths, np.int64)
        self.checksum = zlib.crc32(self._windows.tobytes())
        for held in (*self._passages, *self._asked):
            self.checksum = zlib.crc32(held.tobytes(), self.checksum)

    def __len__(self) -> int:
        return len(self.lengths)

    def batch(self, chosen: np.ndarray, is_scored: np.ndarray, length: int) -> Batch:
        """Return a batch; see `LabelledRows.batch`."""
        rows, labels = [], []
        for index, counts in zip(chosen.tolist(), is_scored.tolist(), strict=True):
            passage, asked, *places = self._windows[index].tolist()
            cut = _Cut(*places)
            row, _, own = self._layout.row(self._passages[passage][cut.begin : cut.end], self._asked[asked], cut)
            rows.append(row)
            labels.append(own if counts else (NOT_SCORED,) * 3)
        return batch_of_windows(rows, labels, length)
