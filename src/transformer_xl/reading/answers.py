"""Where a fine-tuned model finds the answer to a question, and how right answers are.

A passage is read in windows (`data/squad.py`). Each window gives a few likely starts, and a few likely ends for each of them,
as log-probabilities, so start and end add up. Of a piece that several windows show, the window counts that shows most text
around it. The best spans of all windows compete. Whether there is an answer at all is said by the window that is surest that it
holds one.

Scores are those of the official scripts `evaluate-v1.1.py` and `evaluate-v2.0.py`, as shares.

Reference: Rajpurkar et al. 2016, section 6.1, and 2018; decoding as in zihangdai/xlnet `run_squad.py`, except that the last
piece of a passage may answer.
"""

import math
import re
import string
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Literal, NamedTuple

import numpy as np
import torch

from transformer_xl.config.model import HeadConfig
from transformer_xl.data.labels import Example, Label
from transformer_xl.data.squad import Question, Window, WindowLayout, batch_of_windows
from transformer_xl.data.tokenizers import Tokenizer
from transformer_xl.errors import ConfigError, CorpusError, shown
from transformer_xl.kernels.device import Precision, autocast
from transformer_xl.model.call import Execution
from transformer_xl.model.heads import SpanScores
from transformer_xl.model.task_model import TaskModel
from transformer_xl.reading.stream import scoring
from transformer_xl.reading.tasks import Answer, Prediction, Tally, TaskScore

N_START, N_END, N_BEST = 5, 5, 5
"""Starts of a window, ends of each, and answers that are kept of a question; the authors' numbers."""

_ARTICLES = re.compile(r"\b(?:an?|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


class WindowScores(NamedTuple):
    """The best spans of one window; see `SpanScores`, without the axis of windows. Places count from where its row begins."""

    starts: np.ndarray
    start_log_probs: np.ndarray
    ends: np.ndarray
    end_log_probs: np.ndarray
    no_answer: float


def best_answers(
    passage: str, windows: Sequence[Window], scores: Sequence[WindowScores], *, max_answer_len: int, n_best: int = N_BEST
) -> tuple[list[Answer], float]:
    """Return the likeliest answers to a question, best first, and the probability that there is none.

    Args:
        passage: the text.
        windows: of the passage.
        scores: of the windows.
        max_answer_len: pieces of the longest answer.
        n_best: the most answers.

    Returns:
        Answers at different places of the passage. None if no start that was looked at has an end at or after it.
    """
    found: dict[tuple[int, int], float] = {}
    for window, score in zip(windows, scores, strict=True):
        for first, last, log_prob in _spans(window, score, max_answer_len):
            place = int(window.starts[first]), int(window.ends[last])
            if not passage[slice(*place)].strip():  # a piece may stand for a space
                continue
            found[place] = max(log_prob, found.get(place, -math.inf))
    best = sorted(found.items(), key=lambda item: (-item[1], item[0]))[:n_best]
    answers = [Answer(passage[start:end], start, end, math.exp(log_prob)) for (start, end), log_prob in best]
    return answers, _sigmoid(min(score.no_answer for score in scores))


def _spans(window: Window, score: WindowScores, max_answer_len: int) -> Iterator[tuple[int, int, float]]:
    """Yield the spans that a window may answer with: first and last of its pieces, and the log-probability of both."""
    n_piece = len(window.starts)
    for start, start_log_prob, ends, end_log_probs in zip(
        score.starts - window.begin, score.start_log_probs, score.ends - window.begin, score.end_log_probs, strict=True
    ):
        if not 0 <= start < n_piece or not window.has_most_context[start]:
            continue
        for end, end_log_prob in zip(ends, end_log_probs, strict=True):
            log_prob = float(start_log_prob) + float(end_log_prob)
            if start <= end < min(n_piece, start + max_answer_len) and log_prob > -math.inf:
                yield int(start), int(end), log_prob


def _sigmoid(score: float) -> float:
    return 1 / (1 + math.exp(-score)) if score > 0 else 1 - 1 / (1 + math.exp(score))


@dataclass(frozen=True)
class SpanPredictor:
    """Predicts answers: texts are passages, and their pairs questions. Made of arguments of `predictions` (`tasks.py`).

    `batch_size` counts windows here.
    """

    model: TaskModel
    tokenizer: Tokenizer
    batch_size: int
    precision: Precision
    execution: Execution

    def __call__(self, examples: Sequence[Example]) -> list[Prediction]:
        """Return what the model says of each text, in their order.

        Raises:
            CorpusError: a text without a question, or an empty one.
            ConfigError: scores that are not numbers.
        """
        head = self.model.config.head
        assert head is not None
        layout = WindowLayout.of(self.model.config, self.tokenizer)
        windows = [layout.windows(question_of(example)) for example in examples]
        flat = [window for own in windows for window in own]
        scores = iter(self._scores(flat))
        found = []
        for example, own in zip(examples, windows, strict=True):
            answers, no_answer = best_answers(
                example.text, own, [next(scores) for _ in own], max_answer_len=head.max_answer_len
            )
            found.append(_prediction(example, head, answers, no_answer))
        return found

    def _scores(self, windows: Sequence[Window]) -> list[WindowScores]:
        """Read the longest windows first, so that a lack of memory is noticed at once."""
        order = sorted(range(len(windows)), key=lambda i: len(windows[i].row.ids), reverse=True)
        found: dict[int, WindowScores] = {}
        with scoring(self.model):
            for begin in range(0, len(order), self.batch_size):
                chosen = order[begin : begin + self.batch_size]
                found.update(zip(chosen, self._read([windows[i] for i in chosen]), strict=True))
        return [found[i] for i in range(len(windows))]

    def _read(self, windows: Sequence[Window]) -> Iterator[WindowScores]:
        batch = batch_of_windows([window.row for window in windows], [window.labels for window in windows])
        device = self.model.device
        with autocast(device, self.precision):
            scores = self.model.span_scores(
                batch.ids.to(device),
                n_pad=batch.n_pad.to(device),
                segments=batch.segments.to(device),
                may_answer=batch.may_answer.to(device),
                n_start=N_START + 1,  # the last token, which answers nothing, may be among them
                n_end=N_END + 1,
                execution=self.execution,
            )
        return self._of_windows(scores, batch.n_pad.tolist())

    def _of_windows(self, scores: SpanScores, n_pad: Sequence[int]) -> Iterator[WindowScores]:
        arrays = {field.name: getattr(scores, field.name).cpu() for field in fields(scores)}
        if any(each.isnan().any() for each in arrays.values()) or not arrays["no_answer"].isfinite().all():
            raise ConfigError(f"the model's scores in {self.precision} are not finite numbers; use --precision fp32")
        starts, start_log_probs, ends, end_log_probs, no_answer = (
            arrays[name].numpy() if arrays[name].dtype == torch.int64 else arrays[name].double().numpy() for name in arrays
        )
        for i, pad in enumerate(n_pad):
            yield WindowScores(starts[i] - pad, start_log_probs[i], ends[i] - pad, end_log_probs[i], float(no_answer[i]))


def question_of(example: Example) -> Question:
    """Return an example, whose text is a passage and whose pair is a question, for its windows; its label is left out.

    Raises:
        CorpusError: one of the two is missing.
    """
    where = f"{example.place}: " if example.place else ""
    if example.pair is None or not example.pair.strip():
        raise CorpusError(f"{where}no question is asked of {shown(example.text[:60])}; give it as the second text (pair)")
    if not example.text.strip():
        raise CorpusError(f"{where}the passage is empty; give the text that may hold the answer to {shown(example.pair[:60])}")
    return Question(example.id or "", example.pair, example.text, is_labelled=False, place=example.place)


def _prediction(example: Example, head: HeadConfig, answers: Sequence[Answer], no_answer: float) -> Prediction:
    is_none = not answers or (head.no_answer_above is not None and no_answer > head.no_answer_above)
    return Prediction(example, "" if is_none else answers[0].text, answers=tuple(answers), no_answer=no_answer)


Version = Literal["1.1", "2.0"]


def normalized(text: str) -> str:
    """Return an answer as it is compared: in lower case, without punctuation and articles, with single spaces.

    Example:
        >>> normalized("The  cat's (a) hat.")
        'cats hat'
    """
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split())


def exact_and_f1(said: str, answers: Sequence[str], version: Version = "2.0") -> tuple[float, float]:
    """Return how right an answer is: whether it is one of the right ones, and the best F1 of its words with one of them.

    Args:
        said: the answer, empty if there is none.
        answers: the right ones; empty if there is none.
        version: 2.0: right answers without words do not count, unless all are, and two answers without words agree. 1.1: all
            count, and an answer without words has F1 0.

    Example:
        >>> exact_and_f1("the cat sat", ["A cat", "dog"])
        (0.0, 0.6666666666666666)
    """
    words = normalized(said).split()
    golds = [normalized(answer).split() for answer in answers]
    if version == "2.0":
        golds = [gold for gold in golds if gold] or [[]]
    if not golds:
        return 0.0, 0.0
    return float(any(gold == words for gold in golds)), max(_f1(words, gold, version) for gold in golds)


def _f1(words: list[str], gold: list[str], version: Version) -> float:
    if version == "2.0" and not (words and gold):
        return float(words == gold)
    n_common = (Counter(words) & Counter(gold)).total()
    return 2 * n_common / (len(words) + len(gold)) if n_common else 0.0


class BestThreshold(NamedTuple):
    """The best score that can be had by giving no answer where its probability is above a threshold, and the threshold."""

    score: float
    threshold: float


def best_threshold(scores: np.ndarray, no_answer: np.ndarray, is_impossible: np.ndarray) -> BestThreshold:
    """Look for the threshold of the probability of no answer that gives the best score, as the official script does.

    Args:
        scores: (n,), of the answers that would be given; those to questions without an answer count 0, unless they are empty.
        no_answer: (n,), probability that there is none.
        is_impossible: (n,) bool, whether there is none.

    Returns:
        The mean score, and the largest probability at which an answer is given; 0 if none ever should be. Questions of the
        same probability, which the script parts, stay together.

    Example:
        >>> best_threshold(np.array([1.0, 0.5, 0.0]), np.array([0.1, 0.3, 0.9]), np.array([False, False, True]))
        BestThreshold(score=0.8333333333333334, threshold=0.3)
    """
    order = np.argsort(no_answer, kind="stable")
    ordered = no_answer[order]
    gain = np.where(is_impossible, scores - 1, scores)[order]  # by answering, beside giving no answer to any
    total = is_impossible.sum() + np.cumsum(gain)
    may_end = np.append(ordered[1:] != ordered[:-1], True)
    total = np.where(may_end, total, -np.inf)
    best = int(total.argmax())
    if total[best] <= is_impossible.sum():
        return BestThreshold(float(is_impossible.mean()), 0.0)
    return BestThreshold(float(total[best] / len(scores)), float(ordered[best]))


class AnswerTally(Tally):
    """Counts how right answers are: as in version 2.0 if a question has no answer, else as in 1.1.

    Labels are the right answers: a tuple of texts, empty if the passage holds none.
    """

    def __init__(self, labels: Sequence[str] = ()) -> None:
        super().__init__()
        self._columns: dict[str, array[float]] = {
            name: array("d")
            for name in ("exact_1", "f1_1", "exact", "f1", "no_answer", "is_impossible", "is_found", "is_silent")
        }

    def _count(self, prediction: Prediction, label: Label) -> None:
        assert isinstance(label, tuple), "questions have tuples of answers"
        said = prediction.answers[0].text if prediction.answers else ""
        values = (
            *exact_and_f1(said, label, "1.1"),
            *exact_and_f1(said, label),
            1.0 if prediction.no_answer is None else prediction.no_answer,
            float(not label),
            float(bool(said)),
            float(bool(said) and not prediction.label),
        )
        for column, value in zip(self._columns.values(), values, strict=True):
            column.append(value)

    def _score(self) -> TaskScore:
        columns = {name: np.array(column) for name, column in self._columns.items()}
        is_impossible, is_silent = columns["is_impossible"] > 0, columns["is_silent"] > 0
        if not is_impossible.any():
            given = {name: np.where(is_silent, 0.0, columns[f"{name}_1"]) for name in ("exact", "f1")}
            return TaskScore("span", self.n, {name: float(each.mean()) for name, each in given.items()})
        given = {name: np.where(is_silent, columns["is_impossible"], columns[name]) for name in ("exact", "f1")}
        metrics = {name: float(each.mean()) for name, each in given.items()}
        for part, of_part in (("answerable", ~is_impossible), ("impossible", is_impossible)):
            if of_part.any():
                metrics |= {f"{part}_{name}": float(each[of_part].mean()) for name, each in given.items()}
        for name in given:
            scores = np.where(is_impossible, 1 - columns["is_found"], columns[name])
            best = best_threshold(scores, columns["no_answer"], is_impossible)
            metrics |= {f"best_{name}": best.score, f"best_{name}_threshold": best.threshold}
        return TaskScore("span", self.n, metrics)
