"""`finetune` on rows of documents: what lies in the rows before is learned, also by a run that was stopped and killed."""

import random
from pathlib import Path
from typing import Any

import pytest

from tests.training.helpers import TUNED_SIZES, Lines, differing, fail, run_bits, stop_at, write_bench
from transformer_xl.checkpoint.run_directory import RunDirectory
from transformer_xl.config.model import model_config
from transformer_xl.config.run import TokenizerConfig
from transformer_xl.data.task_texts import read_task
from transformer_xl.errors import CheckpointError, ConfigError, CorpusError
from transformer_xl.model.build import make_model
from transformer_xl.tasks.predict import predict
from transformer_xl.tokenizers.kinds import train_tokenizer
from transformer_xl.training.finetune import TaskOutcome, finetune

WORDS = "xyz"
RESUMED: dict[str, Any] = {"source": None, "task": None, "data": None, "document": None, "resume": True}


def documents(n: int, *, seed: int) -> list[list[tuple[str, str]]]:
    """Documents of 2 to 5 rows: the label of a row is the word in the row before it."""
    draw = random.Random(seed)
    found = []
    for _ in range(n):
        words = draw.choices(WORDS, k=draw.randint(2, 5))
        rows = [f"a{word}" for word in words]
        found.append(list(zip(rows, ["none", *words], strict=False)))
    return found


def write(path: Path, n: int, *, seed: int) -> None:
    rows = [f"{name}\t{text}\t{label}\n" for name, rows in enumerate(documents(n, seed=seed)) for text, label in rows]
    path.write_text("".join(["talk\ttext\tlabel\n", *rows]))


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with random weights, documents, and a task."""
    home = write_bench(tmp_path_factory.mktemp("documents"), mem_len=12, dropout=0.0)
    for seed, (name, n) in enumerate({"train": 120, "dev": 20, "test": 20}.items()):
        write(home / "data" / f"{name}.tsv", n, seed=seed)
    return home


def tune(bench: Path, out: Path, *overrides: str, **more: Any) -> TaskOutcome:
    asked: dict[str, Any] = {"source": bench / "base", "task": str(bench / "quick.toml"), "data": bench / "data"}
    settings = ("optim.lr=3e-3", "train.batch_size=12", "train.tgt_len=16", "train.max_epochs=12")
    overrides = overrides if more.get("resume") else (*settings, *overrides)
    return finetune(out=out, overrides=overrides, **{**asked, "document": "talk", "display": Lines(), **more})


def test_what_the_row_before_says_is_learned_with_memory_alone(bench: Path, tmp_path: Path) -> None:
    """Where nothing tells the label, the commonest one is right for three in ten rows."""
    ended = tune(bench, tmp_path / "run")
    head = RunDirectory(tmp_path / "run").config().model.head
    assert head is not None and head.in_documents
    assert ended.test and ended.test.main > 0.7
    rows = [row for document in documents(20, seed=2) for row in document]
    emptied = predict(tmp_path / "run", [text for text, _ in rows])
    assert sum(one.label == label for one, (_, label) in zip(emptied, rows, strict=True)) < 0.5 * len(rows)
    found = [one.label for one in predict(tmp_path / "run", [[text for text, _ in rows] for rows in documents(20, seed=2)])]
    assert sum(label == right for label, (_, right) in zip(found, rows, strict=True)) / len(rows) == ended.test.main


@pytest.mark.parametrize("kind", ["transformer_xl", "xlnet"])
def test_a_run_that_was_stopped_and_killed_has_the_bits_of_one_left_alone(kind: str, bench: Path, tmp_path: Path) -> None:
    """Memory, the place of each lane and the average are saved."""
    settings = ["train.max_epochs=2", "train.checkpoint_interval=4", "train.log_interval=3", "train.eval_interval=9"]
    settings += ["train.accumulate=2", "train.average=ema"]
    write(data := tmp_path / "few.tsv", 40, seed=3)
    base = bench / "base"
    if kind == "xlnet":
        tokenizer = train_tokenizer(TokenizerConfig(kind="unigram", vocab_size=40), ["ax ay az\n" * 20])
        kind_and_sizes = {**TUNED_SIZES, "kind": "xlnet", "vocab_size": tokenizer.vocab_size, "mem_len": 12}
        base = tmp_path / "xlnet"
        make_model(model_config({**kind_and_sizes, "dropout": 0.0, "dropatt": 0.1})).save_pretrained(base)
        tokenizer.save(base / "tokenizer.json")

    asked: dict[str, Any] = {"source": base, "data": data}
    whole = tune(bench, tmp_path / "whole", *settings, **asked)
    with pytest.raises(RuntimeError, match="killed"):
        tune(bench, tmp_path / "parts", *settings, **asked, display=Lines({6: fail("killed")}))
    n = whole.step * 3 // 4  # within the second epoch
    assert tune(bench, tmp_path / "parts", display=stop_at(n), **RESUMED).step == n
    tune(bench, tmp_path / "parts", **RESUMED)
    assert differing(run_bits(tmp_path / "parts"), run_bits(tmp_path / "whole")) == []


def test_files_may_be_documents_and_whole_ones_are_held_out(bench: Path, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    for name, rows in enumerate(documents(30, seed=5)):
        lines = [f"{text}\t{label}\n" for text, label in rows]
        (tmp_path / "data" / f"{name}.tsv").write_text("".join(["text\tlabel\n", *lines]))
    shown = Lines()
    told = {"data": tmp_path / "data", "document": "files", "display": shown}
    tune(bench, tmp_path / "run", "train.max_steps=1", "train.max_epochs=none", **told)
    (kept,) = (line for line in shown.said if "are kept to validate on" in line)
    task = RunDirectory(tmp_path / "run").config().task
    assert task is not None
    texts = read_task(task, seed=0)
    held_out, learned = ({example.document for example in part} for part in (texts.valid, texts.train))
    assert len(held_out) + len(learned) == 30 and len(held_out) > 1
    assert kept.startswith(f"{len(texts.valid)} of {len(texts.valid) + len(texts.train)} texts of ")


def test_an_epoch_has_as_many_steps_as_the_longest_document_has_rows(bench: Path, tmp_path: Path) -> None:
    rows = [("long" if i < 40 else f"{i}", "ax", ("none", *WORDS)[i % 4]) for i in range(60)]
    (tmp_path / "long.tsv").write_text("".join("\t".join(row) + "\n" for row in [("talk", "text", "label"), *rows]))
    settings = [f"task.valid={bench / 'data' / 'dev.tsv'}", "train.max_epochs=none", "train.checkpoint_interval=1000"]
    tune(bench, tmp_path / "run", *settings, "train.max_steps=1", data=tmp_path / "long.tsv")
    train = RunDirectory(tmp_path / "run").config().train
    assert (train.eval_interval, train.checkpoint_interval) == (40, 40)


def test_what_is_refused(bench: Path, tmp_path: Path) -> None:
    def refuse(kind: type[Exception], message: str, *overrides: str, **more: Any) -> None:
        with pytest.raises(kind, match=message):
            tune(bench, tmp_path / "run", *overrides, **more)
        assert not (tmp_path / "run").exists()

    refuse(CorpusError, r"^'.*train.tsv' has no column 'tlak', as task.document says; did you mean 'talk'\?$", document="tlak")
    message = r"^rows of documents are read .* has mem_len 0; set mem_len \(model.mem_len\), or leave the document \(task.docu"
    refuse(ConfigError, message, "model.mem_len=0")
    refuse(ConfigError, r"^task: document \('talk'\) does not go with kind \(choice\), whose texts stand alone", task="choice")
    refuse(ConfigError, r"^task: document \('talk'\) does not go with kind \(span\), whose texts stand alone", task="squad")
    (tmp_path / "one.tsv").write_text("talk\ttext\tlabel\na\tx\ty\na\ty\tx\n")
    message = r"^'.*one.tsv' line 2 begins the only document; give more, because one is held out to validate$"
    refuse(CorpusError, message, data=tmp_path / "one.tsv")
    (tmp_path / "mixed.tsv").write_text("talk\ttext\tlabel\na\tx\ty\nb\ty\tx\na\ty\tx\n")
    refuse(CorpusError, r"^'.*mixed.tsv' line 4: document 'a' goes on here", f"task.valid={tmp_path / 'mixed.tsv'}")
    out = tmp_path / "done"
    tune(bench, out, "train.max_steps=1", "train.max_epochs=none")
    with pytest.raises(CheckpointError, match=r"^task.document \('files'\) differs from that of the run in"):
        finetune(out=out, resume=True, document="files", display=Lines())
