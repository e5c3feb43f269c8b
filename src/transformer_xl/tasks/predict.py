"""What a fine-tuned model says of texts, one after another.

Texts come and go in windows: those of a window are read in batches of about the same length, and given back in the order in
which they came. So memory does not grow with their number. An answer does not depend on its batch, because padding is not seen.

Rows of documents are read in order, those of several documents side by side, with a memory of the rows before in each.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from transformer_xl.batch import Batch
from transformer_xl.checkpoint.open_run import Opened, Which
from transformer_xl.checkpoint.run_directory import load
from transformer_xl.config.model import HeadConfig
from transformer_xl.config.run import TaskConfig
from transformer_xl.data.columns import with_columns_of
from transformer_xl.data.entities import as_bio, name_entities, scheme_of
from transformer_xl.data.examples import read_examples, suffix_of
from transformer_xl.data.labels import Example, labels_of, whole_documents
from transformer_xl.data.layout import Layout, Row, batch_of
from transformer_xl.data.squad import read_squad
from transformer_xl.data.text_files import FileRange, read_blocks
from transformer_xl.errors import ConfigError, CorpusError, NotFiniteError, TokenizerError, counted, shown
from transformer_xl.kernels.device import Precision, autocast, check_precision, choose_device, choose_precision
from transformer_xl.model.call import Execution
from transformer_xl.model.memory import Memory
from transformer_xl.model.task_model import TaskModel
from transformer_xl.reading.stream import scoring
from transformer_xl.reading.texts import n_characters, windows
from transformer_xl.tasks.answers import SpanPredictor
from transformer_xl.tasks.metrics import Prediction
from transformer_xl.tokenizers.base import Tokenizer
from transformer_xl.tokenizers.spaceless import join_words, words_of

_FLOATS = ("auto", "fp32", "bf16", "fp16")

TaskText = str | tuple[str, str] | Example
"""A text; a text and its pair; or an example, which may have choices, or belong to a document."""


def predict(
    source: str | Path | tuple[TaskModel, Tokenizer],
    texts: TaskText | Iterable[TaskText | list[Any]],
    *,
    batch_size: int = 32,
    precision: str = "fp32",
    device: str = "auto",
    which: Which = "best",
) -> Iterator[Prediction]:
    """Return what a fine-tuned model says of texts, one after another, as an iterator that reads the texts as it goes.

    Args:
        source: a run of `txl finetune`, an exported model or a hub id, or what `load` has returned.
        texts: one text, or any number of them, also without end. A text is a str; a tuple of two, such as a premise and a
            hypothesis, or a passage and a question; or an `Example`, for instance with choices. For a model that learned from
            documents, a list of texts is a document, and so are examples of one `document` in a row; other texts stand alone.
        batch_size: texts that are read side by side.
        precision: of matrix products: auto, fp32, bf16 or fp16.
        device: auto, cpu, cuda, cuda:N or mps; a model that is given stays where it is.
        which: of a run: the weights with the best validation, the last ones, or the last average.

    Returns:
        A `Prediction` for each text, in their order.

    Raises:
        CheckpointError: there is no such model, or it is damaged.
        ConfigError: the model has no head, or an unknown device or precision.
        CorpusError: a text that does not fit the task.
    """
    if isinstance(source, str | Path):
        place = choose_device(device)
        model, tokenizer = load(source, which=which)
        head_of(model, f"'{source}'")
        model = model.to(place)
    else:
        model, tokenizer = source
    given: Iterable[Any] = [texts] if isinstance(texts, str | tuple | Example) else texts
    examples = _rows_of(given) if head_of(model).in_documents else map(example_of, given)
    return predictions(model, tokenizer, examples, batch_size=batch_size, precision=precision)


def _rows_of(texts: Iterable[TaskText | list[Any]]) -> Iterator[Example]:
    """Yield texts as examples; those of a list belong to one document, whose name no file and no column can have."""
    for number, text in enumerate(texts):
        if not isinstance(text, list):
            yield example_of(text)
            continue
        if not text:
            raise CorpusError(f"document {number} has no rows; give it some, or leave it out")
        yield from (replace(example_of(row), document=f"\0{number}") for row in text)


def example_of(text: Any) -> Example:
    """Return a text as an example."""
    if isinstance(text, Example):
        return text
    is_pair = isinstance(text, tuple | list) and len(text) == 2 and isinstance(text[0], str) and isinstance(text[1], str | None)
    if not isinstance(text, str) and not is_pair:
        raise CorpusError(f"{shown(text)} is neither a text nor two; a list is a document where the model learned from some")
    first, pair = (text, None) if isinstance(text, str) else text
    if not first.strip() or (pair is not None and not pair.strip()):
        raise CorpusError(f"the text {shown(text)} is empty; give one, or leave it out")
    return Example(first, pair)


def read_texts(
    source: Path | Iterator[bytes], opened: Opened, *, labelled: bool = False, document: str | None = None
) -> Iterator[Example]:
    """Yield the texts of a file (see `read_examples`; of SQuAD where questions are answered) or lines, in the run's columns.

    Unless `labelled`, labels are left out, because they may be others than the model's, and an empty line is an empty text.
    A model of BIO gets the labels of BIOES and BILOU as BIO.
    `document` is the column of documents; None: the run's.
    """
    head = head_of(opened.any_model, f"'{opened.source}'")
    task, first = opened.config.task or TaskConfig(kind=head.kind), b""
    if not isinstance(source, Path):
        first = next(source, b"")
        source = itertools.chain([first], source)
    elif not source.is_dir():
        first = next(read_blocks(FileRange(source)), b"")
    if isinstance(source, Path) and head.kind == "span" and suffix_of(source) == ".json":
        examples = (question.example for question in read_squad(source, labelled=labelled))
    else:
        is_csv = isinstance(source, Path) and not source.is_dir() and suffix_of(source) == ".csv"
        task = task if head.kind == "tokens" else with_columns_of(first, task, is_csv=is_csv)
        task = _in_documents(task, head, document)
        how = {"labelled": labelled, "reads_labels": labelled, "keeps_empty": not labelled, "known_labels": head.labels}
        examples = read_examples(source, task, **how)
    if labelled and head.kind == "tokens" and name_entities(head.labels) and scheme_of([head.labels]) in ("BIO", "IOB1"):
        return (replace(each, label=as_bio(each.label)) if isinstance(each.label, tuple) else each for each in examples)
    return examples if labelled else (replace(example, label=None) for example in examples)


def _in_documents(task: TaskConfig, head: HeadConfig, document: str | None) -> TaskConfig:
    """Return a task with the column of documents that is told, or else its own, if the model reads documents."""
    if document is None and task.document is None and head.in_documents:
        raise ConfigError("the model reads rows of documents; name their column by --document, or 'files' if each file is one")
    if document is not None and not head.in_documents:
        raise ConfigError(f"--document '{document}': the model reads each text alone; leave it out")
    return task if document is None else task.model_copy(update={"document": document})


def head_of(model: Any, source: object = "the model") -> HeadConfig:
    """Return the settings of a fine-tuned model's head."""
    head = getattr(getattr(model, "config", None), "head", None)
    if not isinstance(model, TaskModel) or head is None:
        raise ConfigError(f"{source} has no head; teach it a task first: txl finetune RUN --task NAME --data FILE --out DIR")
    return head


def predictions(
    model: Any,
    tokenizer: Tokenizer,
    examples: Iterable[Example],
    *,
    batch_size: int = 32,
    precision: str = "fp32",
    skip: int = 0,
    is_ready: Callable[[], bool] | None = None,
    execution: Execution = Execution(),
) -> Iterator[Prediction]:
    """Return what a fine-tuned model says of each text, in their order, as an iterator that reads the texts as it goes.

    Of an empty text it says nothing: the label is empty, and there are no probabilities.

    Args:
        model: a `TaskModel`; its mode is restored whenever a prediction is handed out.
        tokenizer: of the model.
        examples: the texts; their labels may be known or not.
        batch_size: texts that are read side by side; documents, if texts are rows of these.
        precision: of matrix products: auto, fp32, bf16 or fp16.
        skip: leave out the predictions of so many texts at the beginning; the others are computed to the last bit as they are
            without it.
        is_ready: whether the next text is there already; texts that others still have to write are not waited for while some
            that are there have no answer. None: they all are there.
        execution: how the model computes.

    Returns:
        The predictions.

    Raises:
        ConfigError: a model without a head, an unknown precision, or scores that are not finite numbers.
        CorpusError: a text that does not fit the task.
    """
    head = head_of(model)
    if batch_size < 1:
        raise ConfigError(f"batch_size ({batch_size}) must be at least 1")
    chosen = precision_of_texts(precision, model.device)
    if head.kind == "tokens":
        examples = map(_with_words, examples)
    predict: _Predict
    if head.in_documents:
        predict = _Documents(model, head, tokenizer, batch_size, chosen, execution)
        parts = windows(
            _parts(whole_documents(examples), is_ready), batch_size, is_ready, size=lambda part: sum(map(n_characters, part))
        )
        rows = (list(itertools.chain.from_iterable(window)) for window in parts)
        if is_ready is None:
            return _predicted(predict, rows, skip)
        return itertools.islice(_predicted(predict, rows, 0), skip, None)  # what is skipped may be remembered
    if head.kind == "span":
        predict = SpanPredictor(model, tokenizer, batch_size, chosen, execution)
    else:
        predict = _Texts(model, head, tokenizer, batch_size, chosen, execution)
    return _predicted(predict, windows(examples, batch_size, is_ready), skip)


def _parts(examples: Iterator[Example], is_ready: Callable[[], bool] | None) -> Iterator[list[Example]]:
    """Yield the rows of each document, or fewer while others still have to write the next one; see `predictions`."""
    part: list[Example] = []
    last = None
    for example in examples:
        if part and not example.is_empty and (example.document is None or example.document != last):
            yield part
            part = []
        last = last if example.is_empty else example.document
        part.append(example)
        if is_ready is not None and not is_ready():
            yield part
            part = []
    if part:
        yield part


def precision_of_texts(name: str, device: torch.device) -> Precision:
    """Return the precision of a name; `auto` takes bf16 or fp16 where the device multiplies it natively.

    Raises:
        ConfigError: an unknown name, or int8.
    """
    check_precision(name, _FLOATS)
    return choose_precision(name, device)[0]


def _with_words(example: Example) -> Example:
    """Return an example with its words: those that it has, or see `words_of`."""
    if example.pair is not None:
        raise CorpusError(f"{example.where}the model labels the words of one text; leave the second one out")
    words = example.words or tuple(words_of(example.text))
    return replace(example, words=words, text=example.text or join_words(words))


_Predict = Callable[[Sequence[Example]], list[Prediction]]
"""Says something of each of some texts, in their order."""


def _predicted(predict: _Predict, parts: Iterator[list[Example]], skip: int) -> Iterator[Prediction]:
    n_done = 0
    for window in parts:
        n_done += len(window)
        if n_done > skip:
            yield from itertools.islice(_of_window(predict, window), max(len(window) - (n_done - skip), 0), None)


def _of_window(predict: _Predict, window: list[Example]) -> Iterator[Prediction]:
    texts = [example for example in window if not example.is_empty]
    try:
        said = iter(predict(texts))
    except (CorpusError, TokenizerError):  # those before the one that cannot be read are answered first
        said = (predict([example])[0] for example in texts)
    for example in window:
        yield Prediction(example, "") if example.is_empty else next(said)


@dataclass
class _Texts:
    """Predicts classes, labels, numbers, choices, and labels of words."""

    model: TaskModel
    head: HeadConfig
    tokenizer: Tokenizer
    batch_size: int
    precision: Precision
    execution: Execution

    def __call__(self, examples: Sequence[Example]) -> list[Prediction]:
        """Read the longest texts first, so that a lack of memory is noticed at once."""
        if self.head.kind == "choice":
            _check_choices(examples)
        layout, labels = Layout.of(self.model.config, self.tokenizer), labels_of(self.head, examples)
        rows = [layout.rows(example) for example in examples]
        order = sorted(range(len(rows)), key=lambda i: (len(rows[i]), max(len(row.ids) for row in rows[i])), reverse=True)
        found: dict[int, Prediction] = {}
        with scoring(self.model):
            for chosen in self._batches(rows, order):
                batch = batch_of([rows[i] for i in chosen], labels[chosen])
                said = self._said([examples[i] for i in chosen], self._read(batch)[0], batch.labels)
                found.update(zip(chosen, said, strict=True))
        return [found[i] for i in range(len(examples))]

    def _batches(self, rows: Sequence[tuple[Row, ...]], order: Sequence[int]) -> Iterator[list[int]]:
        """Yield indices of texts with equally many choices."""
        for _, group in itertools.groupby(order, key=lambda i: len(rows[i])):
            chosen = list(group)
            for begin in range(0, len(chosen), self.batch_size):
                yield chosen[begin : begin + self.batch_size]

    def _read(self, batch: Batch, mems: Memory | None = None) -> tuple[Tensor, Memory]:
        """Return the scores of a batch on the CPU, and the memory after it."""
        batch = batch.to(self.model.device)
        with autocast(self.model.device, self.precision):
            own = {"n_pad": batch.rows.n_pad, "segments": batch.texts.segments, "words": batch.texts.words}
            out = self.model(batch.ids, **own, mems=mems, execution=self.execution)
        assert out.logits is not None
        logits = out.logits.cpu().double()
        if not logits.isfinite().all():
            raise NotFiniteError(f"the model's scores in {self.precision} are not finite numbers; use --precision fp32")
        return logits, out.mems

    def _said(self, examples: Sequence[Example], logits: Tensor, labels: Tensor) -> list[Prediction]:
        """Return predictions from scores (B, n), or (B, 1) of numbers, (B, W, n) of words."""
        if self.head.kind == "tokens":
            return [self._of_words(*each) for each in zip(examples, logits, labels, strict=True)]
        if self.head.kind == "regression":
            return [Prediction(example, value) for example, value in zip(examples, logits[:, 0].tolist(), strict=True)]
        if self.head.kind == "multilabel":
            probabilities = logits.sigmoid()
            nats = F.binary_cross_entropy_with_logits(logits, labels.double(), reduction="none").mean(1)
            found = [
                tuple(name for name, p in zip(self.head.labels, row, strict=True) if p >= 0.5) for row in probabilities.tolist()
            ]
        else:
            probabilities = logits.softmax(1)
            nats = F.cross_entropy(logits, labels, reduction="none")
            best = logits.argmax(1).tolist()
            found = best if self.head.kind == "choice" else [self.head.labels[i] for i in best]
        rows = zip(examples, found, probabilities.tolist(), nats.tolist(), strict=True)
        return [Prediction(example, label, tuple(p), None if example.label is None else nat) for example, label, p, nat in rows]

    def _of_words(self, example: Example, logits: Tensor, labels: Tensor) -> Prediction:
        n = len(example.words)
        best, found = logits[:n].softmax(1).max(1)
        nats = None if example.label is None else float(F.cross_entropy(logits[:n], labels[:n]))
        return Prediction(example, tuple(self.head.labels[i] for i in found.tolist()), tuple(best.tolist()), nats)


@dataclass
class _Documents(_Texts):
    """Predicts what `_Texts` does of rows of documents, but no choices. The last document of a call may go on in the next."""

    last: tuple[str | None, Memory | None] = (None, None)  # its name, and the memory after its last row

    def __call__(self, examples: Sequence[Example]) -> list[Prediction]:
        """Read as many documents as a batch has rows side by side, those with the most rows first, until each ends."""
        if not examples:  # all rows are empty
            return []
        names = [i if example.document is None else example.document for i, example in enumerate(examples)]
        documents = [list(rows) for _, rows in itertools.groupby(range(len(examples)), key=names.__getitem__)]
        order = sorted(documents, key=len, reverse=True)
        found: dict[int, Prediction] = {}
        layout, labels = Layout.of(self.model.config, self.tokenizer), labels_of(self.head, examples)
        rows = [layout.rows(example) for example in examples]  # a text that cannot be read leaves the memory as it is
        (name, before), self.last = self.last, (None, None)
        with scoring(self.model):
            for first in range(0, len(order), self.batch_size):
                lanes = order[first : first + self.batch_size]
                mems = self.model.init_mems(len(lanes))
                if before is not None and name is not None and name == examples[0].document:
                    mems = mems.where(torch.tensor([lane[0] > 0 for lane in lanes]), before)
                found |= self._of_lanes(lanes, examples, rows, labels, mems)
        return [found[i] for i in range(len(examples))]

    def _of_lanes(
        self, lanes: list[list[int]], examples: Sequence[Example], rows: list[tuple[Row, ...]], labels: Tensor, mems: Memory
    ) -> dict[int, Prediction]:
        """Return the predictions of documents, the longest first, each the indices of its rows."""
        last = len(examples) - 1
        found: dict[int, Prediction] = {}
        for place in range(len(lanes[0])):
            chosen = [lane[place] for lane in lanes if place < len(lane)]
            batch = batch_of([rows[i] for i in chosen], labels[chosen])
            logits, mems = self._read(batch, mems.select(slice(len(chosen))))
            found.update(zip(chosen, self._said([examples[i] for i in chosen], logits, batch.labels), strict=True))
            if last in chosen:
                self.last = examples[last].document, mems.select(torch.tensor([chosen.index(last)]))
        return found


def _check_choices(examples: Iterable[Example]) -> None:
    for example in examples:
        if len(example.choices) < 2:
            n = counted(len(example.choices), "choice")
            raise CorpusError(f"{example.where}it has {n}, and the model chooses among 2 or more; give them")
