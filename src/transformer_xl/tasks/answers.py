"""Where a fine-tuned model finds the answer to a question.

A passage is read in windows (`data/squad.py`). Each window gives a few likely starts, and a few likely ends for each of them,
as log-probabilities, so start and end add up. Of a piece that several windows show, the window counts that shows most text
around it. The best spans of all windows compete. Whether there is an answer at all is said by the window that is surest that it
holds one.

Reference: zihangdai/xlnet `run_squad.py`, except that the last piece of a passage may answer.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

import numpy as np

from transformer_xl.config.model import HeadConfig
from transformer_xl.data.labels import Example
from transformer_xl.data.squad import Question, Window, WindowLayout, batch_of_windows
from transformer_xl.errors import CorpusError, NotFiniteError, shown
from transformer_xl.kernels.device import Precision, autocast
from transformer_xl.model.call import Execution
from transformer_xl.model.heads import SpanScores
from transformer_xl.model.task_model import TaskModel
from transformer_xl.reading.stream import scoring
from transformer_xl.tasks.metrics import Answer, Prediction
from transformer_xl.tokenizers.base import Tokenizer

N_START, N_END, N_BEST = 5, 5, 5
"""Starts of a window, ends of each, and answers that are kept of a question; the authors' numbers."""


class WindowScores(NamedTuple):
    """The best spans of one window; see `SpanScores`, without the axis of windows. Places count from where its row begins."""

    starts: np.ndarray
    start_log_probs: np.ndarray
    ends: np.ndarray
    end_log_probs: np.ndarray
    no_answer: float
    scores: np.ndarray


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
    likeliest: dict[tuple[int, int], tuple[float, float]] = {}
    for window, window_scores in zip(windows, scores, strict=True):
        for first, last, log_prob, score in _spans(window, window_scores, max_answer_len):
            place = int(window.starts[first]), int(window.ends[last])
            if passage[slice(*place)].strip():  # a piece may stand for a space
                likeliest[place] = max((log_prob, score), likeliest.get(place, (-math.inf, 0.0)))
    best = sorted(likeliest.items(), key=lambda item: (-item[1][0], item[0]))[:n_best]
    answers = [Answer(passage[start:end], start, end, math.exp(log_prob), score) for (start, end), (log_prob, score) in best]
    return answers, _sigmoid(min(score.no_answer for score in scores))


def _spans(window: Window, of: WindowScores, max_answer_len: int) -> Iterator[tuple[int, int, float, float]]:
    """Yield the spans that a window may answer with: first and last of its pieces, their log-probability and their score."""
    n_piece = len(window.starts)
    starts, ends = of.starts - window.begin, of.ends - window.begin
    log_probs = of.start_log_probs[:, None] + of.end_log_probs
    for k, start in enumerate(starts.tolist()):
        if not 0 <= start < n_piece or not window.has_most_context[start]:
            continue
        for j, end in enumerate(ends[k].tolist()):
            if start <= end < min(n_piece, start + max_answer_len) and log_probs[k, j] > -math.inf:
                yield start, end, float(log_probs[k, j]), float(of.scores[k, j])


def _sigmoid(score: float) -> float:
    return 1 / (1 + math.exp(-score)) if score > 0 else 1 - 1 / (1 + math.exp(score))


@dataclass(frozen=True)
class SpanPredictor:
    """Predicts answers: texts are passages, and their pairs questions. Made of arguments of `predictions` (`predict.py`).

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
        there = batch.to(self.model.device)
        with autocast(self.model.device, self.precision):
            scores = self.model.span_scores(
                there.ids,
                n_pad=there.rows.n_pad,
                segments=there.texts.segments,
                may_answer=there.texts.may_answer,
                n_start=N_START + 1,  # the last token, which answers nothing, may be among them
                n_end=N_END + 1,
                execution=self.execution,
            )
        return self._of_windows(scores, batch.n_pad.tolist())

    def _of_windows(self, scores: SpanScores, n_pad: Sequence[int]) -> Iterator[WindowScores]:
        arrays = {field.name: getattr(scores, field.name).cpu() for field in fields(scores)}
        if any(each.isnan().any() for each in arrays.values()) or not arrays["no_answer"].isfinite().all():
            raise NotFiniteError(f"the model's scores in {self.precision} are not finite numbers; use --precision fp32")
        numbers = {name: (each.double() if each.is_floating_point() else each).numpy() for name, each in arrays.items()}
        for i, pad in enumerate(n_pad):
            own = {name: array[i] for name, array in numbers.items()}
            yield WindowScores(**own)._replace(starts=own["starts"] - pad, ends=own["ends"] - pad)


def question_of(example: Example) -> Question:
    """Return an example, whose text is a passage and whose pair is a question, for its windows; its label is left out.

    Raises:
        CorpusError: one of the two is missing.
    """
    if example.pair is None or not example.pair.strip():
        raise CorpusError(
            f"{example.where}no question is asked of {shown(example.text[:60])}; give it as the second text (pair)"
        )
    if not example.text.strip():
        raise CorpusError(
            f"{example.where}the passage is empty; give the text that may hold the answer to {shown(example.pair[:60])}"
        )
    return Question(example.id or "", example.pair, example.text, is_labelled=False, place=example.place)


def _prediction(example: Example, head: HeadConfig, answers: Sequence[Answer], no_answer: float) -> Prediction:
    is_none = not answers or (head.no_answer_above is not None and no_answer > head.no_answer_above)
    return Prediction(example, "" if is_none else answers[0].text, answers=tuple(answers), no_answer=no_answer)
