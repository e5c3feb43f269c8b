"""Predictions as lines, and a file of lines to which a later call adds what is missing."""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from transformer_xl.data.entities import name_entities
from transformer_xl.data.text_files import content_sha256
from transformer_xl.errors import ConfigError, CorpusError, one_line, shown
from transformer_xl.files import canonical_json, check_new, files_below, locked, remove, replace_file
from transformer_xl.generation.session_file import model_sha256
from transformer_xl.model.base import SequenceModel
from transformer_xl.tasks.metrics import Prediction
from transformer_xl.untrusted import read_json_object

_DIGITS = 6  # of numbers in JSON


def as_json(prediction: Prediction, labels: Sequence[str]) -> str:
    """Return a prediction as a line of JSON; a text is left out if it has an id, and an empty one has the label null.

    Example:
        >>> from transformer_xl.data.labels import Example
        >>> print(as_json(Prediction(Example("Fine!"), "good", (0.25, 0.75)), ["bad", "good"]))
        {"text": "Fine!", "label": "good", "probability": 0.75, "probabilities": {"bad": 0.25, "good": 0.75}}
    """
    example, label = prediction.example, prediction.label
    if example.is_empty:
        return json.dumps({"text": "", "label": None})
    line: dict[str, Any] = {"text": example.text, "pair": example.pair} if example.id is None else {"id": example.id}
    line |= {"document": example.document}
    if example.words:
        line |= {"words": example.words, "labels": label, "probabilities": list(map(_rounded, prediction.probabilities))}
        line |= {"spans": [vars(span) for span in prediction.spans]} if name_entities(labels) else {}
    elif prediction.no_answer is not None:
        rounded = [{name: _rounded(value) for name, value in vars(answer).items()} for answer in prediction.answers]
        best = rounded[0] if rounded and label else {}
        line |= {"answer": label} | {name: best.get(name) for name in ("start", "end", "score")}
        line |= {
            "probability": _rounded(prediction.probability),
            "no_answer": _rounded(prediction.no_answer),
            "answers": rounded,
        }
    else:
        shares = [_rounded(p) for p in prediction.probabilities]
        line |= {
            "label": label,
            "choice": _chosen(prediction),
            "probability": _rounded(prediction.probability),
            "probabilities": dict(zip(labels, shares, strict=True)) if labels else shares or None,
        }
    written = json.dumps({name: value for name, value in line.items() if value is not None}, ensure_ascii=False)
    return written.encode("utf-8", "backslashreplace").decode()  # a lone surrogate stays \ud800, as JSON has it


def as_row(prediction: Prediction, labels: Sequence[str]) -> str:
    r"""Return a prediction as a line with tabs between: what it is, how probable, and of what: an id, or else the text.

    An answer has its first character and the one after its last before the id or question. Several labels, and their
    probabilities, have commas between. Tabs and line ends within become spaces. The row of an empty text is empty. Words have a
    line each, with probability and label, and a line end after the last one: files of CoNLL, whose last column is the label.

    Example:
        >>> from transformer_xl.data.labels import Example
        >>> as_row(Prediction(Example("Fine\tday!\n"), "good", (0.25, 0.75)), ["bad", "good"])
        'good\t0.7500\tFine day!'
        >>> as_row(Prediction(Example("Oh", id="7"), ("x", "z"), (0.5, 0.25, 0.75)), ["x", "y", "z"])
        'x,z\t0.5000,0.7500\t7'
    """
    example, label = prediction.example, prediction.label
    if example.is_empty:
        return ""
    if example.words and isinstance(label, tuple):
        rows = zip(example.words, label, prediction.probabilities, strict=True)
        return "".join(f"{' '.join(word.split())}\t{p:.4f}\t{name}\n" for word, name, p in rows)
    texts = (example.text, example.pair, _chosen(prediction))
    columns = [f"{label:.4f}" if isinstance(label, float) else str(label)]
    if isinstance(label, tuple):
        of_label = dict(zip(labels, prediction.probabilities, strict=True))
        columns = [",".join(label), ",".join(f"{of_label[name]:.4f}" for name in label)]
    elif prediction.probability is not None:
        columns.append(f"{prediction.probability:.4f}")
    if prediction.no_answer is not None:
        columns += [str(prediction.answers[0].start), str(prediction.answers[0].end)] if label else ["", ""]
        texts = (example.pair,)
    columns += [example.id] if example.id is not None else [text for text in texts if text is not None]
    return "\t".join(" ".join(column.split()) for column in columns)


def _chosen(prediction: Prediction) -> str | None:
    return prediction.example.choices[prediction.label] if isinstance(prediction.label, int) else None


def _rounded(value: Any) -> Any:
    return round(value, _DIGITS) if isinstance(value, float) else value


@contextmanager
def prediction_file(path: Path, origin: Mapping[str, str], *, resume: bool) -> Iterator[tuple[BinaryIO, int]]:
    """Open a file for lines of predictions; yield it and the number of lines that it has already.

    Beside it stands what it comes from, `FILE.origin.json`, so that it is gone on with by the same model and texts only. A
    last line that was not written to its end is cut off, and of words a last sentence, which an empty line ends.
    """
    record = path.with_name(f"{path.name}.origin.json")

    def refuse() -> None:
        raise ConfigError(f"another process writes to '{path}'; wait until it ends, or choose another --out")

    with locked(path.with_name(f"{path.name}.lock"), on_busy=refuse):
        n_kept = 0
        if not resume:
            check_new(path)
        if path.exists() and path.stat().st_size:
            _check_origin(path, read_json_object(record), origin)
            read = json.loads if origin["lines"] == "json" else bytes.decode
            n_kept = _whole_lines(path, read, in_sentences=origin["lines"] == "conll")
        else:
            replace_file(record, canonical_json(dict(origin)))
        try:
            with path.open("ab") as file:
                yield file, n_kept
        except Exception:
            if not path.stat().st_size:  # what comes of a mistake would refuse the next try
                remove(path)
                remove(record)
            raise


def origin_of(source: str | Path, model: SequenceModel, texts: Path | None, computed: str, *, json: bool) -> dict[str, str]:
    """Return what a file of predictions comes from: names for people, and checksums of model and texts.

    `texts` of None are standard input, which cannot be compared; `computed` names the options that decide the lines, also the
    number of texts side by side, because it decides how sums are rounded.
    """
    content = {"name": "standard input"} if texts is None else {"name": str(texts), "sha256": _content_sha256(texts)}
    is_words = model.config.head is not None and model.config.head.kind == "tokens"
    return {
        "model_name": str(source),
        "model_sha256": model_sha256(model),
        **{f"texts_{name}": value for name, value in content.items()},
        "lines": "json" if json else "conll" if is_words else "tsv",
        "computed": computed,
    }


def _content_sha256(texts: Path) -> str:
    if not texts.is_dir():
        return content_sha256(texts)
    files = files_below(texts)
    return hashlib.sha256("".join(f"{each.relative_to(texts)} {content_sha256(each)}\n" for each in files).encode()).hexdigest()


def _check_origin(path: Path, record: Mapping[str, Any], origin: Mapping[str, str]) -> None:
    for what in ("model", "texts"):
        if record.get(f"{what}_sha256") != origin.get(f"{what}_sha256"):
            theirs, ours = (shown(each.get(f"{what}_name")) for each in (record, origin))
            which = f"{theirs}, not {ours}" if theirs != ours else f"{ours}, which was another then"
            raise ConfigError(f"'{path}' comes from the {what} {which}; choose another --out")
    for how in ("lines", "computed"):
        if record.get(how) != origin[how]:
            raise ConfigError(f"'{path}' was begun with {shown(record.get(how))}, not {origin[how]}; give the same")


def _whole_lines(path: Path, read: Callable[[bytes], object], *, in_sentences: bool) -> int:
    """Cut off a last line or sentence without an end, and return how many there are; an error names a line that is bad."""
    n_whole = n_line = end = 0
    with path.open("r+b") as file:
        while (line := file.readline()).endswith(b"\n"):
            n_line += 1
            if not in_sentences or line == b"\n":
                n_whole, end = n_whole + 1, file.tell()
            try:
                read(line)
            except ValueError as error:
                raise CorpusError(f"'{path}', line {n_line} cannot be read: {one_line(error)}; choose another --out") from None
        file.truncate(end)
    return n_whole
