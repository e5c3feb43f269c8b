"""`txl predict`, and `txl eval` of a fine-tuned model."""

import json
import os
import select
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import transformer_xl
from tests import forked
from tests.cli.conftest import Txl, save
from tests.helpers import TINY, random_weights
from tests.tasks.test_predict import BYTES, LINE, task_model
from transformer_xl.checkpoint.open_run import open_run
from transformer_xl.config.model import HeadConfig, TransformerXLConfig
from transformer_xl.config.run import TaskConfig
from transformer_xl.data.labels import Example
from transformer_xl.model.task_model import TaskModel
from transformer_xl.tasks.metrics import TaskScore
from transformer_xl.tasks.predict import read_texts
from transformer_xl.tokenizers.characters import CharTokenizer
from transformer_xl.training.entries import read_metrics

N = 40


@pytest.fixture
def model(workbench: Path) -> Callable[[str], TaskModel]:
    """Save a fine-tuned model as `mood`, and texts with labels as `texts.tsv` and, one a line, as `lines.txt`."""
    lines = [f"{i} {LINE[i % 5 : i % 31 + 6]}".strip() for i in range(N)]
    (workbench / "lines.txt").write_text("".join(f"{line}\n" for line in lines))
    rows = [f"{line}\t{('bad', 'good')[i % 2]}\n" for i, line in enumerate(lines)]
    (workbench / "texts.tsv").write_text("".join(["sentence\tlabel\n", *rows]))

    def saved(kind: str = "classification") -> TaskModel:
        torch.manual_seed(0)
        model = task_model(kind)
        save(model, BYTES, "mood")
        return model

    return saved


def test_lines_of_all_kinds_of_files_are_those_of_python(txl: Txl, model: Callable[[str], TaskModel]) -> None:
    expected = list(transformer_xl.predict((model("classification"), BYTES), Path("lines.txt").read_text().splitlines()))
    exact = ("--precision", "fp32")
    rows = txl("predict", "mood", "lines.txt", *exact).out.splitlines()
    assert rows == [f"{each.label}\t{each.probability:.4f}\t{' '.join(each.example.text.split())}" for each in expected]
    assert txl("predict", "mood", "texts.tsv", "--batch-size", "7", *exact).out.splitlines() == rows
    objects = [json.loads(line) for line in txl("predict", "mood", "texts.tsv", "--json", *exact).out.splitlines()]
    assert [each["label"] for each in objects] == [each.label for each in expected]
    for found, each in zip(objects, expected, strict=True):
        assert list(found["probabilities"].values()) == pytest.approx(each.probabilities, abs=1e-5)
    typed = txl("predict", "mood", "--text", "one", "--pair", "two", "--json", *exact)
    half = txl("predict", "mood", "--text", os.fsdecode("the 龘".encode()[:-1]))
    assert half.complaint == "the text has half of a character (a lone surrogate); give the whole one"
    (alone,) = transformer_xl.predict("mood", ("one", "two"))
    assert json.loads(typed.out)["probability"] == pytest.approx(alone.probability, abs=1e-5)


@pytest.mark.parametrize(
    ("kind", "row", "found"),
    [
        ("multilabel", "x,y\t0.9", {"label", "probabilities"}),
        ("regression", "-0.", {"label"}),
        ("choice", "1\t0.5", {"label", "choice", "probability", "probabilities"}),
    ],
)
def test_lines_of_other_heads(txl: Txl, model: Callable[[str], TaskModel], kind: str, row: str, found: set[str]) -> None:
    """Of a choice the chosen text is shown."""
    with torch.no_grad():
        for parameter in (saved := model(kind)).parameters():
            parameter.mul_(0.1)
        saved.head.get_parameter("scores.bias").fill_(3.0 if kind == "multilabel" else -0.5)
    save(saved, BYTES, "other")
    fields = {"text": "who?", "choices": ["he", "she"]} if kind == "choice" else {"text": "a text"}
    Path("one.jsonl").write_text(json.dumps(fields) + "\n")
    shown = txl("predict", "other", "one.jsonl")
    assert shown.status == 0, shown.err
    assert kind == "choice" or shown.out.startswith(row)
    line = json.loads(txl("predict", "other", "one.jsonl", "--json").out)
    assert set(line) == {"text", *found}
    assert "choice" not in line or line["choice"] == fields["choices"][line["label"]]


def test_a_file_that_is_gone_on_with_is_the_same_to_the_last_byte(txl: Txl, model: Callable[[str], TaskModel]) -> None:
    """Wherever it was torn; what comes from another model or other texts, was computed otherwise, or is damaged, is refused."""
    model("classification")
    command = ("predict", "mood", "lines.txt", "--batch-size", "3", "--out", "found.jsonl")
    assert f"{N} lines in " in txl(*command).err
    out = Path("found.jsonl")
    whole = out.read_bytes()
    for before in (("predict", "gone", "gone.txt"), ("score", "gone", "gone.txt"), ("translate", "gone", "--file", "gone.txt")):
        assert "is there already; go on with it by --resume" in txl(*before, "--out", "found.jsonl").complaint  # first of all
    for n in (0, 1, len(whole) // 3, len(whole) - 1, len(whole)):
        out.write_bytes(whole[:n])
        n_kept = whole[:n].count(b"\n")
        after = f" after {n_kept} that were there" if n_kept else ""
        assert f"written to 'found.jsonl'{after}\n" in txl(*command, "--resume").err
        assert out.read_bytes() == whole
    assert "--batch-size 3" in txl(*command[:3], *command[5:], "--resume").complaint
    refused = txl("predict", "mood", "texts.tsv", "--out", "found.jsonl", "--resume")
    assert refused.complaint == "'found.jsonl' comes from the texts 'lines.txt', not 'texts.tsv'; choose another --out"
    model("multilabel")
    assert "comes from the model 'mood', which was another then" in txl(*command, "--resume").complaint
    Path("lines.txt").write_text("other\n")
    model("classification")
    assert "comes from the texts 'lines.txt', which was another then" in txl(*command, "--resume").complaint
    Path("found.jsonl.origin.json").unlink()
    assert "'found.jsonl.origin.json'" in txl(*command, "--resume").complaint
    for name, line in (("torn.jsonl", b'{"text": \n'), ("torn.tsv", b"\xff\n")):
        assert txl(*command[:-1], name).status == 0
        Path(name).write_bytes(line + Path(name).read_bytes())
        assert txl(*command[:-1], name, "--resume").complaint.startswith(f"'{name}', line 1 cannot be read: ")


@pytest.mark.parametrize("kind", ["classification", "documents"])
def test_rows_before_a_character_that_the_vocabulary_lacks_are_written(txl: Txl, workbench: Path, kind: str) -> None:
    """They are those that a file without it has, and the remedy is named."""
    characters = CharTokenizer(LINE)
    head = HeadConfig(kind="classification", labels=("bad", "good"), tgt_len=8, dropout=0.0, in_documents=kind == "documents")
    sizes = {**TINY, "vocab_size": characters.vocab_size, "mem_len": 30, "head": head}
    save(random_weights(TaskModel(TransformerXLConfig(**sizes)).eval()), characters, "mood")
    rows = [f"{name}\t{text}" for name, text in (("t", "text"), ("a", "cat"), ("a", "dog"), ("a", "sat on"), ("a", "\u6df1"))]
    Path("sound.tsv").write_text("\n".join(rows[:4]))
    Path("texts.tsv").write_text("\n".join([*rows, "a\tcat"]), encoding="utf-8")
    how = ("--precision", "fp32", "--batch-size", "9", *(("--document", "t") if kind == "documents" else ()))
    expected, answer = (txl("predict", "mood", name, "--json", *how) for name in ("sound.tsv", "texts.tsv"))
    found, right = ([json.loads(line) for line in each.out.splitlines()] for each in (answer, expected))
    assert [line["text"] for line in found] == ["cat", "dog", "sat on"] and answer.status == 1
    for line, other in zip(found, right, strict=True):
        assert list(line["probabilities"].values()) == pytest.approx(list(other["probabilities"].values()), abs=1e-4)
    assert answer.complaint.startswith("'texts.tsv' line 5: character 深 (U+6DF1) is not in the tokenizer's alphabet of")
    assert "add it by txl train TEXT --from RUN --grow" in answer.complaint


def test_answers_have_their_place(txl: Txl, workbench: Path) -> None:
    """From a file of SQuAD, from a line, and from the command line; and they are scored."""
    head = HeadConfig(kind="span", tgt_len=256, dropout=0.0)
    saved = random_weights(TaskModel(TransformerXLConfig(**{**TINY, "vocab_size": 256}, head=head)).eval())
    save(saved, BYTES, "squad")
    answer = {"text": "cat", "answer_start": LINE.index("cat")}
    questions = [{"id": "7", "question": "who?", "answers": [answer]}]
    Path("dev.json").write_text(json.dumps({"data": [{"paragraphs": [{"context": LINE, "qas": questions}]}]}))
    exact = ("--precision", "fp32")
    found = json.loads(txl("predict", "squad", "dev.json", "--json", *exact).out)
    (prediction,) = transformer_xl.predict((saved, BYTES), (LINE, "who?"))
    assert (found["id"], found["answer"]) == ("7", prediction.label)
    assert LINE[found["start"] : found["end"]] == found["answer"] != ""
    assert [each["score"] for each in found["answers"]] == pytest.approx([each.score for each in prediction.answers], abs=1e-5)
    assert found["score"] == found["answers"][0]["score"]
    assert found["no_answer"] == pytest.approx(prediction.no_answer, abs=1e-5)
    row = txl("predict", "squad", "--text", LINE, "--pair", "who?", *exact).out
    columns = [found["answer"].strip(), f"{prediction.probability:.4f}", str(found["start"]), str(found["end"]), "who?"]
    assert row == "\t".join(columns) + "\n"
    assert txl("eval", "squad", "--file", "dev.json").out.startswith("dev.json: exact match ")


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals and pipes")
class TestProcess:
    def test_a_pipe_gives_each_answer_before_the_next_text_comes(self, model: Callable[[str], TaskModel]) -> None:
        model("classification")
        with forked.start("tests.world_cases:program", "predict", "mood", "--quiet") as child:
            for text in ("", "text 1", "", " ", "text 2"):
                child.stdin.write(f"{text}\n".encode())
                line = b""
                while not line.endswith(b"\n"):
                    line += child.stdout.read(100) or pytest.fail(child.stderr.read().decode())
                assert line == b"\n" if not text.strip() else line.endswith(f"\t{text}\n".encode())
            out, _ = child.communicate(b"without an end")
            assert (child.wait(), out.count(b"\n")) == (0, 1)

    def test_ctrl_c_loses_nothing(self, txl: Txl, model: Callable[[str], TaskModel]) -> None:
        model("classification")
        Path("many.txt").write_text(Path("lines.txt").read_text() * 4)
        command = ("predict", "mood", "many.txt", "--batch-size", "1", "--out")
        out = Path("found.tsv")
        with forked.start("tests.world_cases:program", *command, "found.tsv") as child:
            while not out.exists() or not out.stat().st_size:
                assert select.select([child.stderr], [], [], 0.01)[0] == [], child.stderr.read()
            child.send_signal(signal.SIGINT)
            _, err = child.communicate()
            assert child.wait() == 130, err
        n = out.read_bytes().count(b"\n")
        assert 0 < n < 4 * N
        last = f"interrupted; 'found.tsv' has {n:,} line{'s' * (n != 1)}; go on with the same command and --resume"
        assert err.decode().splitlines()[-1] == last
        assert txl(*command, "found.tsv", "--resume").status == txl(*command, "whole.tsv").status == 0
        assert out.read_bytes() == Path("whole.tsv").read_bytes()


def test_an_empty_line_gives_an_empty_row(txl: Txl, model: Callable[[str], TaskModel]) -> None:
    """In files and pipes, before names of columns, between JSON objects, and of a file that is gone on with."""
    model("classification")
    contents = {
        "lines.txt": "\na fine day\n\n \nanother\n\n",
        "table.tsv": "\nsentence\tlabel\na fine day\tx\n\n\t\nanother\tx\n\n",
        "objects.jsonl": '\n{"text": "a fine day"}\n\n \n{"text": "another"}\n\n',
    }
    Path("one.txt").write_text("a\n\n")
    assert txl("predict", "mood", "one.txt").err == "1 empty line has an empty row\n"
    for name, content in contents.items():
        Path(name).write_text(content)
        answer = txl("predict", "mood", name)
        assert [line.split("\t")[-1] for line in answer.out.splitlines()] == ["", "a fine day", "", "", "another", ""], name
        assert answer.err.endswith("4 empty lines have empty rows\n")
        out = Path(f"{name}.out.jsonl")
        assert txl("predict", "mood", name, "--out", out.name).status == 0
        whole = out.read_bytes()
        assert [json.loads(line)["label"] is None for line in whole.splitlines()] == [True, False, True, True, False, True]
        out.write_bytes(b"".join(whole.splitlines(keepends=True)[:3]))
        assert txl("predict", "mood", name, "--out", out.name, "--resume").status == 0
        assert out.read_bytes() == whole


def test_a_model_that_says_the_same_of_all_texts_says_so(txl: Txl, model: Callable[[str], TaskModel]) -> None:
    saved = model("classification")
    found = transformer_xl.predict((saved, BYTES), Path("lines.txt").read_text().splitlines())
    bias = saved.head.get_parameter("scores.bias").data
    bias -= torch.tensor([each.probabilities for each in found]).log().mean(0)
    save(saved, BYTES, "different")
    assert "got the same" not in txl("predict", "different", "lines.txt").err
    bias.copy_(torch.tensor([-99.0, 0.0, -99.0]))
    save(saved, BYTES, "same")
    start = f"warning: all {N} texts got the same, 'fair'; "
    assert f"{start}if they should not, fine-tune with more steps" in txl("predict", "same", "lines.txt").err
    assert f"{start}fine-tune with more steps" in txl("eval", "same", "--file", "texts.tsv").err


def test_a_directory_is_texts_of_many_lines(txl: Txl, model: Callable[[str], TaskModel]) -> None:
    model("classification")
    Path("documents/old").mkdir(parents=True)
    Path("documents/one.txt").write_text("a\n\nb\n")
    Path("documents/old/two.txt").write_text("c")
    answer = txl("predict", "mood", "documents", "--json", "--precision", "fp32")
    assert answer.status == 0, answer
    found = [json.loads(line) for line in answer.out.splitlines()]
    assert [each["id"] for each in found] == ["old/two.txt", "one.txt"]
    for each, text in zip(found, ["c", "a\n\nb"], strict=True):
        (alone,) = transformer_xl.predict("mood", text)
        assert each["probability"] == pytest.approx(alone.probability, abs=1e-5)
    assert txl("predict", "mood", "documents", "--out", "found.tsv").status == 0
    Path("documents/one.txt").write_text("another")
    refused = txl("predict", "mood", "documents", "--out", "found.tsv", "--resume").complaint
    assert "'documents', which was another then" in refused


@pytest.mark.parametrize(
    ("told", "content", "text"),
    [
        ({"text": "2"}, "7\ta b\n", "a b"),  # by number, which is in no cell
        ({"text": "2", "label": ("3",)}, "7\ta b\tgood\n", "a b"),
        ({"text": "view"}, "a review\n", "a review"),  # a part of the line, and no cell
        ({"text": "view"}, "id\tview\n7\ta b\n", "a b"),
        ({"text": "2"}, "a b\n", "a b"),  # of another file than that of the training
    ],
)
def test_columns_that_were_told_are_looked_for(
    told: dict[str, str], content: str, text: str, model: Callable[[str], TaskModel]
) -> None:
    opened = open_run(str(model("classification") and "mood"), any_model=True)
    task = TaskConfig.model_validate({"kind": "classification", "label": (), **told})
    opened = replace(opened, config=opened.config.model_copy(update={"task": task}))
    (example,) = read_texts(iter([content.encode()]), opened)
    assert (example.text, example.pair, example.label) == (text, None, None)


def save_of_documents() -> None:
    """Save a model of rows of documents as `talks`."""
    head = HeadConfig(kind="classification", labels=("bad", "good"), tgt_len=8, dropout=0.0, in_documents=True)
    sizes = {**TINY, "vocab_size": 256, "mem_len": 30, "head": head}
    save(random_weights(TaskModel(TransformerXLConfig(**sizes)).eval()), BYTES, "talks")


def test_rows_of_documents_are_read_in_their_column(txl: Txl, workbench: Path) -> None:
    """Or each file of a directory is a document."""
    save_of_documents()
    Path("lines.txt").write_text("Is it so?\n")
    rows = [("a", "one"), ("a", "two and more"), ("b", "three"), ("b", "four"), ("b", "five")]
    Path("rows.tsv").write_text("".join(f"{name}\t{text}\n" for name, text in [("talk", "text"), *rows]))
    Path("files").mkdir()
    for name in "ab":
        Path(f"files/{name}.txt").write_text("".join(f"{text}\n" for document, text in rows if document == name))
    expected = list(transformer_xl.predict("talks", [[text for document, text in rows if document == name] for name in "ab"]))
    alone = list(transformer_xl.predict("talks", [text for _, text in rows]))
    assert not np.allclose([each.probabilities for each in expected], [each.probabilities for each in alone], atol=1e-3)

    for arguments, names in (
        (("rows.tsv", "--document", "talk"), "ab"),
        (("files", "--document", "files"), ("a.txt", "b.txt")),
    ):
        answer = txl("predict", "talks", *arguments, "--json", "--precision", "fp32")
        found = [json.loads(line) for line in answer.out.splitlines()]
        assert [line["document"] for line in found] == [names[0]] * 2 + [names[1]] * 3
        for line, right in zip(found, expected, strict=True):
            assert (line["text"], line["label"]) == (right.example.text, right.label)
            assert list(line["probabilities"].values()) == pytest.approx(right.probabilities, abs=1e-5)
    objects = "".join(json.dumps({"dialogue": name, "text": text}) + "\n" for name, text in rows)
    Path("rows.jsonl").write_text(objects)
    Path("mixed.tsv").write_text("".join(f"{name}\t{text}\n" for name, text in [("talk", "text"), *rows, rows[0]]))
    save(task_model("classification"), BYTES, "mood")
    for command, complaint in {
        "talks rows.tsv": "the model reads rows of documents; name their column by --document, or 'files'",
        "talks rows.tsv --document tlak": "'rows.tsv' has no column 'tlak'",
        "talks rows.jsonl --document talk": "'rows.jsonl' has no column 'talk' of documents; name theirs by --document (known",
        "talks lines.txt --document talk": "'lines.txt' has no column 'talk' of documents; name theirs by --document, or",
        "talks mixed.tsv --document talk": "'mixed.tsv' line 7: document 'a' goes on here",
        "mood rows.tsv --document talk": "--document 'talk': the model reads each text alone; leave it out",
    }.items():
        assert complaint in txl("predict", *command.split()).complaint, command


def test_mistakes(txl: Txl, model: Callable[[str], TaskModel]) -> None:
    model("classification")
    Path("empty").mkdir()
    Path("names.tsv").write_text("sentence\tlabel\n")
    for command, complaint in {
        "lines.txt --text a": "--text is read instead of a file; leave 'lines.txt' out",
        "--pair a": "--pair goes with --text; in a file, a tab stands between",
        "lines.txt --resume": "--resume goes on with a file; name it with --out",
        "lines.txt --out no/x.tsv": "--out 'no/x.tsv': the directory",
        "empty": "'empty' holds no text; give another file",
        "names.tsv --out none.tsv": "'names.tsv' holds no text; give another file",
    }.items():
        assert txl("predict", "mood", *command.split()).complaint.startswith(complaint), command


def test_texts_that_were_held_out_are_scored_apart(txl: Txl, workbench: Path) -> None:
    """They have chosen the weights, so that a score of what was learned from is of the other texts alone."""
    rows = [f"text {n}\t{n / 10}" for n in range(40)]
    Path("data").mkdir()
    Path("data/train.tsv").write_text("\n".join(["text\tlabel", *rows]) + "\n")

    def tuned(run: str, data: str) -> str:
        settings = ("--task", "regression", "--data", data, "--set", "train.max_steps=2", "--seed", "5")
        assert txl("finetune", "run", "--out", run, *settings).status == 0
        return run

    def score(run: str, *options: str) -> dict[str, Any]:
        return json.loads(txl("eval", run, "--precision", "fp32", "--json", *options).out)

    run = tuned("tuned", "data/train.tsv")
    train, valid, whole = (score(run, *how.split()) for how in ("--split train", "--split valid", "--file data/train.tsv"))
    assert train["text"] == "the 36 texts of 'data/train.tsv' that were learned from"
    assert 36 * train["mse"] + 4 * valid["mse"] == pytest.approx(40 * whole["mse"], rel=1e-5)
    assert valid["mse"] == pytest.approx(read_metrics(Path(run))[-1]["mse"], rel=1e-3)
    assert "held out of 'data/train.tsv' (--split valid); give one" in txl("eval", run).complaint
    Path("data/dev.tsv").write_text("\n".join(["text\tlabel", *rows[:7]]) + "\n")
    run = tuned("other", "data")
    assert [score(run, *how)["text"] for how in ((), ("--split", "train"))] == ["data/dev.tsv", "data/train.tsv"]


def test_scores_of_a_fine_tuned_model(txl: Txl, model: Callable[[str], TaskModel]) -> None:
    saved = model("classification")
    rows = [line.split("\t") for line in Path("texts.tsv").read_text().splitlines()[1:]]
    examples = [Example(text, label=label) for text, label in rows]
    found = transformer_xl.predict((saved, BYTES), examples)
    expected = TaskScore.of("classification", ("bad", "fair", "good"), found)
    shown = txl("eval", "mood", "--file", "texts.tsv", "--precision", "fp32")
    assert shown.out.splitlines()[0].startswith(f"texts.tsv: {expected.in_words()}, fp32, ")
    assert shown.out.splitlines()[1].split() == ["label", "precision", "recall", "F1", "texts"]
    line = json.loads(txl("eval", "mood", "--file", "texts.tsv", "--json").out)
    assert expected.confusion is not None and line["confusion"] == expected.confusion.tolist()
    assert line["accuracy"] == expected.metrics["accuracy"]
    assert txl("eval", "mood").complaint == "'mood' has no file of its own to test on; give one with labels by --file"
    assert txl("eval", "mood", "--file", "lines.txt").complaint.startswith("'lines.txt': which column holds the label?")
    for option in ("--mem-len 3", "--temperature 1.1", "--compare-memory", "--cache 9", "--per-token nats.tsv"):
        refused = txl("eval", "mood", "--file", "texts.tsv", *option.split()).complaint
        assert refused == f"{option.split()[0]} is for models that predict tokens; 'mood' is fine-tuned and reads whole texts"
