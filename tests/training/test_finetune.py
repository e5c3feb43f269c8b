"""`finetune`: what it learns, keeps and shows; stopping, resuming and patience; what is refused."""

import json
import random
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.training.helpers import TASK, Lines, differing, entries, fail, run_bits, stop_at, tiny_trainer, write_bench
from transformer_xl.checkpoint.open_run import open_run
from transformer_xl.checkpoint.run_directory import RunDirectory, load
from transformer_xl.cli.options import TextChoice
from transformer_xl.conversion.export import export
from transformer_xl.data.labels import Example
from transformer_xl.data.task_texts import read_task
from transformer_xl.errors import CheckpointError, ConfigError, CorpusError, TrainingError
from transformer_xl.model.task_model import TaskModel
from transformer_xl.tasks.metrics import TaskScore
from transformer_xl.tasks.predict import predictions
from transformer_xl.training.finetune import FineTuning, TaskOutcome, finetune
from transformer_xl.training.run import train
from transformer_xl.world import World

Tune = Callable[..., TaskOutcome]
RESUMED: dict[str, Any] = {"source": None, "task": None, "data": None, "resume": True}


def write_texts(path: Path, n: int, *, seed: int, labels: tuple[str, str] = ("good", "bad")) -> Path:
    """Texts of random letters, of several lengths, with one word in each that says the label."""
    draw = random.Random(seed)
    lines = ["sentence\tlabel"]
    for _ in range(n):
        words = draw.choices("abcdefg", k=draw.randint(2, 20))
        label = draw.randrange(2)
        words.insert(draw.randrange(len(words) + 1), ("YES", "NO")[label])
        lines.append(f"{' '.join(words)}\t{labels[label]}")
    path.write_text("\n".join(lines) + "\n")
    return path


def write_lines(path: Path, n: int, label: Callable[[int], str]) -> Path:
    """Texts of one letter, again and again."""
    path.write_text("\n".join(json.dumps({"text": "a" * (i % 9 + 1), "label": label(i)}) for i in range(n)))
    return path


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with random weights, texts, and a task."""
    home = write_bench(tmp_path_factory.mktemp("finetune"), mem_len=32, dropout=0.1)
    for seed, (name, n) in enumerate({"train": 160, "dev": 40, "test": 20}.items()):
        write_texts(home / "data" / f"{name}.tsv", n, seed=seed)
    return home


@pytest.fixture
def tune(bench: Path, tmp_path: Path, taught: object, no_picture: None, monkeypatch: pytest.MonkeyPatch) -> Tune:
    """Start a run that draws nothing; that of `taught` has drawn all there is."""
    monkeypatch.setattr("transformer_xl.training.finetune.draw_confusion", lambda path, *_, **__: path)

    def tune(out: str = "run", *overrides: str, **more: Any) -> TaskOutcome:
        asked: dict[str, Any] = {"source": bench / "base", "task": str(bench / "quick.toml"), "data": bench / "data"}
        asked |= {"display": Lines(), **more}
        return finetune(out=tmp_path / out, overrides=overrides, **asked)

    return tune


@pytest.fixture(scope="module")
def taught(bench: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, TaskOutcome, Lines]:
    """A run that was left alone; tests only read it."""
    out, shown = tmp_path_factory.mktemp("taught") / "run", Lines()
    ended = finetune(bench / "base", task=str(bench / "quick.toml"), data=bench / "data", out=out, display=shown)
    return out, ended, shown


def test_a_label_that_hangs_on_one_word_is_learned(taught: tuple[Path, TaskOutcome, Lines], bench: Path) -> None:
    out, ended, shown = taught
    assert ended.finished and ended.step == 80 and ended.stopped_by is None
    assert ended.valid and ended.valid.main == 1.0 and ended.valid.n == 40
    assert ended.test and ended.test.main == 1.0 and ended.test.n == 20
    assert {path.name for path in ended.pictures} == {"loss.png", "confusion.png"}
    assert all(path.is_file() for path in ended.pictures)
    assert json.loads(json.dumps(ended.as_dict()))["valid"]["accuracy"] == 1.0
    assert sum("160 texts to learn from, 40 to validate on" in line for line in shown.said) == 1
    config = RunDirectory(out).config()
    assert config.model.head and config.model.head.labels == ("bad", "good")
    assert config.task and config.task.base == str(bench / "base")
    assert config.train.eval_interval == 10  # no longer than an epoch


def test_labels_of_words_that_hang_on_the_word_before_are_learned(bench: Path, tmp_path: Path) -> None:
    """Sentences of one segment and of several, from start to end; a label that breaks BIO ends it before a step."""
    draw = random.Random(0)
    (tmp_path / "data").mkdir()
    for name, n in {"train": 160, "dev": 40, "test": 20}.items():
        rows = []
        for _ in range(n):
            words = draw.choices(["a", "be", "mr", "see", "of"], k=draw.randint(2, 16))
            after = zip(["", *words], words, strict=False)
            rows.append("".join(f"{word} {'B-PER' if before == 'mr' else 'O'}\n" for before, word in after))
        (tmp_path / "data" / f"{name}.conll").write_text("\n".join(rows))
    task = tmp_path / "words.toml"
    task.write_text(TASK.replace('"classification"', '"tokens"').replace("tgt_len = 32", "tgt_len = 16"))
    ended = finetune(bench / "base", task=str(task), data=tmp_path / "data", out=tmp_path / "run", display=(shown := Lines()))
    assert ended.valid and ended.test and ended.valid.main_name == "f1"
    assert ended.valid.main > 0.95 and ended.test.metrics["accuracy"] > 0.95
    assert any(re.search(r"always saying 'O' would be right for \d\d\.\d% of the words", line) for line in shown.said)
    model, tokenizer = load(tmp_path / "run")
    (prediction,) = predictions(model, tokenizer, [Example("a mr be of mr see")])
    assert [(span.text, span.start, span.type) for span in prediction.spans] == [("be", 5, "PER"), ("see", 14, "PER")]
    with pytest.raises(CorpusError, match=r"train.conll' line 2: I-PER follows O, but only B-PER begins an entity"):
        (tmp_path / "data" / "train.conll").write_text("a O\nb I-PER\nc O\nd B-PER\n")
        finetune(bench / "base", task=str(task), data=tmp_path / "data", out=tmp_path / "other", display=shown)


def test_its_card_names_task_texts_and_base_and_no_corpus(taught: tuple[Path, TaskOutcome, Lines], tmp_path: Path) -> None:
    export(taught[0], tmp_path / "shared", kind="native")
    card = (tmp_path / "shared" / "README.md").read_text()
    assert "- text: `data`, read as byte tokens\n- task: classification\n- begun with the weights of `base`\n" in card
    assert "validation" not in card and "pipeline_tag" not in card, "the best loss of a task is a metric"
    assert load(tmp_path / "shared")[0].config.head.labels == ("bad", "good")


def test_what_is_loaded_are_the_best_weights(taught: tuple[Path, TaskOutcome, Lines], bench: Path) -> None:
    out, ended, _ = taught
    store = RunDirectory(out).store()
    assert store.best_step == ended.best_step and store.best_step in store.steps()
    model, tokenizer = load(out)
    config = RunDirectory(out).config()
    assert config.task is not None and ended.valid is not None
    found = predictions(model, tokenizer, read_task(config.task, seed=0).valid, batch_size=config.eval.batch_size)
    score = TaskScore.of("classification", model.config.head.labels, found)
    assert score.metrics == ended.valid.metrics


def test_a_run_that_was_stopped_and_killed_has_the_bits_of_one_left_alone(tune: Tune, tmp_path: Path) -> None:
    settings = ["train.max_steps=16", "train.max_epochs=none", "train.checkpoint_interval=4", "train.log_interval=3"]
    settings += ["train.accumulate=2", "train.average=ema", "optim.layer_lr_decay=0.7"]
    whole = tune("whole", *settings)

    with pytest.raises(RuntimeError, match="killed"):
        tune("parts", *settings, display=Lines({6: fail("killed")}))
    assert RunDirectory(tmp_path / "parts").store().steps()[-1] == 4
    shown = stop_at(9)
    stopped = tune("parts", display=shown, **RESUMED)
    assert shown.said[-1] == f"SIGINT: saved step 9; go on with: txl finetune --resume --out {tmp_path / 'parts'}"
    assert (stopped.stopped_by, stopped.finished, stopped.step, stopped.valid) == (signal.SIGINT, False, 9, None)
    shown = Lines()
    ended = tune("parts", display=shown, **RESUMED)
    assert any(line.startswith("resumed at step 9, 56% of the budget") for line in shown.said)
    found = {name: value for name, value in ended.as_dict().items() if name not in ("directory", "seconds", "pictures")}
    assert found == {name: value for name, value in whole.as_dict().items() if name in found}
    assert differing(run_bits(tmp_path / "parts"), run_bits(tmp_path / "whole")) == []


def test_a_run_that_was_killed_before_it_saved_anything_has_the_same_bits(
    tune: Tune, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = ("train.max_steps=4", "train.max_epochs=none", "train.seed=1")  # other weights than those of the base
    tune("whole", *settings)

    with monkeypatch.context() as patch:
        patch.setattr("transformer_xl.training.start.save", fail("killed"))
        with pytest.raises(RuntimeError, match="killed"):
            tune("parts", *settings)
    assert RunDirectory(tmp_path / "parts").holds_run
    tune("parts", **RESUMED)
    assert differing(run_bits(tmp_path / "parts"), run_bits(tmp_path / "whole")) == []


def test_a_run_goes_on_that_called_the_numbers_of_its_labels_otherwise(tune: Tune, tmp_path: Path) -> None:
    """As one of 0.3 did, which called JSON's 1.0 so; the same texts have the same classes."""
    (tmp_path / "texts").mkdir()
    table = write_texts(tmp_path / "texts" / "train.tsv", 40, seed=0, labels=("1.0", "0.0"))
    settings = ("train.max_steps=2", "train.max_epochs=none")
    tune("run", *settings, data=tmp_path / "texts")
    (_, *rows) = table.read_text().splitlines()
    (tmp_path / "lines").mkdir()
    objects = ({"sentence": text, "label": float(label)} for text, label in (row.split("\t") for row in rows))
    (tmp_path / "lines" / "train.jsonl").write_text("\n".join(map(json.dumps, objects)))
    assert tune("run", "train.max_steps=4", **RESUMED | {"data": tmp_path / "lines"}).step == 4
    config = RunDirectory(tmp_path / "run").config()
    assert config.model.head and config.model.head.labels == ("0.0", "1.0")
    _, examples = TextChoice(split="valid").labelled(open_run(tmp_path / "run", any_model=True))
    assert {each.label for each in examples} <= {"0.0", "1.0"}


def test_patience_ends_a_run_and_more_patience_goes_on(tune: Tune, tmp_path: Path) -> None:
    """The rate is so small that nothing ever gets better."""
    settings = ("task.patience=3", "optim.lr=1e-20", "train.eval_interval=2")
    shown = Lines()
    ended = tune("run", *settings, display=shown)
    assert (ended.finished, ended.step, ended.best_step) == (True, 8, 2)
    assert any("because 3 validations in a row brought nothing better" in line for line in shown.said)
    assert ended.valid and ended.valid.remark.startswith("all 40 texts got the same, '") and ended.valid.remark in shown.warned
    log = (tmp_path / "run" / "metrics.jsonl").read_text()
    again = tune("run", **RESUMED, display=(told := Lines()))
    how = f"--resume --out {tmp_path / 'run'} --set task.patience=6"
    assert any(each.startswith("finished already: 8 steps") and each.endswith(f"txl finetune {how}") for each in told.said)
    assert (again.step, again.valid and again.valid.as_dict()) == (8, ended.valid and ended.valid.as_dict())
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == log
    longer = tune("run", "task.patience=4", **RESUMED)
    assert (longer.finished, longer.step) == (True, 10)


def test_of_equally_right_weights_those_with_the_lower_loss_are_best(tune: Tune, monkeypatch: pytest.MonkeyPatch) -> None:
    nats = iter((0.7, 0.8, 0.65, 0.6, 0.65, 0.65, 0.65, 0.65))  # of the weights and of their average, at steps 2, 4 and 6

    def scored(*_: object) -> TaskScore:
        return TaskScore("classification", 40, {"accuracy": 0.5, "nats": next(nats)})

    monkeypatch.setattr("transformer_xl.training.finetune._score", scored)
    ended = tune("run", "train.max_steps=6", "train.eval_interval=2", "train.average=ema")
    assert ended.best_step == 4
    log = entries(ended.directory)
    assert [entry["step"] for entry in log if entry["kind"] == "train"] == [1, 2, 3, 4, 5, 6]  # twice a validation
    assert [entry["average_accuracy"] for entry in log if entry["kind"] == "valid"] == [0.5] * 3
    best = RunDirectory(ended.directory).store().load(4).state["record"]["best"]
    assert (best["average"], best["tie_break"]) == (True, 0.6)


def test_of_equal_answers_the_first_are_best(tune: Tune, monkeypatch: pytest.MonkeyPatch) -> None:
    """They have no loss that would tell them apart."""
    equal = TaskScore("classification", 40, {"accuracy": 0.5})
    monkeypatch.setattr("transformer_xl.training.finetune._score", lambda *_: equal)
    assert tune("run", "train.max_steps=6", "train.eval_interval=2").best_step == 2


def test_a_signal_while_the_best_weights_are_scored_ends_only_the_scoring(
    tune: Tune, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopping(self: Lines, what: str, total: int, **_: str) -> Callable[[int], None]:
        return lambda n: signal.raise_signal(signal.SIGTERM) if what == "scoring" else None

    display = Lines()
    with monkeypatch.context() as patch:
        patch.setattr(Lines, "scoring", stopping)
        ended = tune("run", "train.max_steps=2", display=display)
    assert (ended.finished, ended.step, ended.valid, ended.stopped_by) == (True, 2, None, signal.SIGTERM)
    how = f"score it with: txl finetune --resume --out {tmp_path / 'run'}"
    assert display.said[-1] == f"SIGTERM: saved step 2, which is not scored; {how}"
    assert tune("run", **RESUMED).valid


def test_scores_that_are_no_numbers_end_a_run(tune: Tune) -> None:
    with pytest.raises(TrainingError, match=r"^diverged: scores of the validation texts are not finite numbers after step 5;"):
        tune("run", "optim.lr=1e30", "optim.schedule=constant", "optim.warmup_share=0", "train.eval_interval=5")


def test_a_model_in_parts_is_not_fine_tuned(tune: Tune, bench: Path) -> None:
    objective = FineTuning(str(bench / "base"), str(bench / "quick.toml"), ["train.parallel=fsdp"], {"data": "a.tsv"}, None)
    with pytest.raises(ConfigError, match=r"^train.parallel \(fsdp\) divides a model, which fine-tuning scores whole; use ddp"):
        objective.stream(objective.new_settings(), World(0, 2))


def test_a_taught_model_is_taught_on_with_its_head_only_for_the_same_labels(
    taught: tuple[Path, TaskOutcome, Lines], tune: Tune, tmp_path: Path
) -> None:
    out, _, _ = taught
    base = load(out)[0].state_dict()
    for name, labels, has_head in (("same", ("good", "bad"), True), ("other", ("up", "down"), False)):
        data = write_texts(tmp_path / f"{name}.tsv", 40, seed=9, labels=labels)
        shown = Lines()
        tune(name, "train.max_steps=1", "optim.lr=1e-20", source=out, data=data, display=shown)
        assert any(("with its own head" if has_head else "with a new head") in line for line in shown.said)
        model = load(tmp_path / name)[0]
        assert isinstance(model, TaskModel)
        same = {key: torch.equal(tensor, base[key]) for key, tensor in model.state_dict().items() if key != "head.scores.bias"}
        assert {key.split(".")[0] for key, equal in same.items() if equal} == (
            {"head", "backbone"} if has_head else {"backbone"}
        )


@pytest.mark.parametrize(
    ("label", "kind", "files"),
    [
        (lambda i: ("x", "y", "x,y", "")[i % 4], "multilabel", set()),
        (lambda i: str(i % 7 / 2), "regression", set()),
        (lambda i: f"class{i % 35:02}", "classification", set()),  # too many to draw
    ],
)
def test_other_kinds_of_labels(label: Callable[[int], str], kind: str, files: set[str], tune: Tune, tmp_path: Path) -> None:
    ended = tune("run", f"task.kind={kind}", "train.max_steps=3", data=write_lines(tmp_path / "texts.jsonl", 80, label))
    assert {path.name for path in ended.pictures} == files | {"loss.png"}
    assert ended.valid and ended.valid.n == 8  # a tenth was held out
    assert ended.test is None


def test_rare_classes_count_as_much_as_frequent_ones(tune: Tune, tmp_path: Path) -> None:
    """One text of ten is `good`, and no text says which: balanced, about as many get either class."""
    data, found = write_lines(tmp_path / "texts.jsonl", 200, lambda i: "bad" if i % 10 else "good"), []
    for settings in ((), ("task.class_weights=balanced",)):
        tune(f"run{len(settings)}", *settings, "train.max_epochs=4", data=data, display=(shown := Lines()))
        model, tokenizer = load(tmp_path / f"run{len(settings)}")
        found.append([each.probabilities[1] for each in predictions(model, tokenizer, [Example("a" * n) for n in (2, 5, 8)])])
        notes = [line for line in shown.said if line.startswith("weights of the classes")]
        assert notes == ["weights of the classes (balanced): bad 0.556, good 5"] * len(settings)
    plain, balanced = found
    assert all(0.02 < p < 0.25 for p in plain) and all(0.3 < p < 0.7 for p in balanced), found


def test_the_rate_is_the_same_whether_epochs_or_steps_are_the_budget(tmp_path: Path) -> None:
    """And neither the first nor the last step learns nothing."""

    def rates(**budget: int) -> list[float]:
        optim = {"schedule": "linear", "warmup_steps": 0, "warmup_share": 0.25, "decay_after_warmup": True}
        head = {"head": {"kind": "classification", "labels": ("a", "b"), "tgt_len": 5}}
        trainer = tiny_trainer(model=head, optim=optim, train={"batch_size": 6, "max_steps": None, **budget})
        return [trainer.train_step().rate for _ in range(20)]

    by_steps = rates(max_steps=20)
    assert rates(max_epochs=4) == pytest.approx(by_steps)  # 30 texts
    assert by_steps[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0]) and by_steps[-1] > 0.05


@pytest.mark.parametrize("averaged", [False, True])
def test_whether_there_is_an_answer_chooses_weights_and_threshold(averaged: bool, tune: Tune, tmp_path: Path) -> None:
    """In questions of SQuAD 2.0; the threshold that was best is kept with the model."""
    answer = {"text": "Ann", "answer_start": 0}
    articles = []
    for n in range(10):
        asked = [
            {"id": f"{n} {i}", "question": "who?", "is_impossible": bool(i % 2), "answers": [] if i % 2 else [answer]}
            for i in range(8)
        ]
        articles.append({"title": f"{n}", "paragraphs": [{"context": f"Ann went {n}.", "qas": asked}]})
    (tmp_path / "squad.json").write_text(json.dumps({"version": "2.0", "data": articles}))
    settings = ["task.kind=span", "task.doc_stride=8", "task.max_query_len=8", "train.max_steps=4", "train.eval_interval=2"]
    ended = tune("run", *settings, *(["train.average=ema"] if averaged else []), data=tmp_path / "squad.json")
    assert ended.valid is not None and ended.valid.main_name == "best_f1"
    config = RunDirectory(ended.directory).config()
    assert config.model.head and config.model.head.no_answer_above == ended.valid.metrics["best_f1_threshold"]
    assert ended.valid.metrics["f1"] == pytest.approx(ended.valid.metrics["best_f1"])
    model, _ = load(ended.directory)
    assert model.config.head == config.model.head
    again = finetune(out=ended.directory, resume=True, display=Lines())
    assert again.valid is not None and again.valid.metrics == ended.valid.metrics


def test_a_test_file_without_labels_is_not_scored(tune: Tune, bench: Path, tmp_path: Path) -> None:
    (tmp_path / "test.tsv").write_text("sentence\na b\nc d\n")
    shown = Lines()
    ended = tune("run", f"task.test={tmp_path / 'test.tsv'}", "train.max_steps=1", display=shown)
    assert ended.test is None
    assert f"'{tmp_path / 'test.tsv'}' is not scored: its texts have no labels" in shown.said


def test_a_model_without_memory_reads_beginnings_and_says_so(tune: Tune) -> None:
    shown = Lines()
    ended = tune("run", "model.mem_len=0", "train.max_steps=1", display=shown)
    head = RunDirectory(ended.directory).config().model.head
    assert head and (head.tgt_len, head.max_len) == (32, 32)
    said = "this model has no memory, so 32 tokens of a text are read; --set model.mem_len=32 reads all"
    assert said in shown.said


def test_what_is_refused(tune: Tune, bench: Path, tmp_path: Path, taught: tuple[Path, TaskOutcome, Lines]) -> None:
    def refuse(kind: type[Exception], message: str, *overrides: str, **more: Any) -> None:
        with pytest.raises(kind, match=message):
            tune("run", *overrides, **more)

    refuse(ConfigError, r"^model.n_layer \(3\) differs from that of '.*base' \(2\), whose weights", "model.n_layer=3")
    refuse(ConfigError, r"^model.kind \(lstm\) differs from that of '.*base' \(transformer_xl\)", "model.kind=lstm")
    refuse(ConfigError, r"^unknown task 'clasification'; did you mean 'classification'\?$", task="clasification")
    refuse(ConfigError, "^which model is to learn the task", source=None)
    refuse(ConfigError, "^--task is missing", task=None)
    refuse(ConfigError, "^--data is missing", data=None)
    refuse(FileNotFoundError, r"dat'$", data=bench / "dat")
    refuse(CheckpointError, "^'nope' is not a directory of a model", source="nope")
    refuse(ConfigError, r"^train.varlen \(True\) does not go with task.kind \(classification\)", "train.varlen=true")
    refuse(ConfigError, r"class_weights \(balanced\) is for", "task.kind=regression", "task.class_weights=balanced")
    dev = write_texts(tmp_path / "dev.tsv", 9, seed=1, labels=("good", "god"))
    refuse(CorpusError, r"^'.*dev.tsv' line \d+: label 'god' is unknown; did you mean 'good'\?$", f"task.valid={dev}")
    assert not (tmp_path / "run").exists(), "nothing is left of a run that could not start"

    out = taught[0]
    with pytest.raises(CheckpointError, match=r"is fine-tuned; go on with txl finetune --resume --out "):
        train(out=out, resume=True, display=Lines())
    with pytest.raises(CheckpointError, match=r"^task.summary \('mean'\) differs from that of the run"):
        finetune(out=out, resume=True, overrides=["task.summary=mean"], display=Lines())
    with pytest.raises(CheckpointError, match=r"^'.*' began with '.*base', not 'models/x'; leave it out"):
        finetune("models/x", out=out, resume=True, display=Lines())


def test_a_run_goes_on_with_its_own_texts_only(tune: Tune, tmp_path: Path) -> None:
    """Scores of others could not be compared; where they lie makes no difference."""
    learned, valid = (write_texts(tmp_path / f"{name}.tsv", 60, seed=5) for name in ("learned", "valid"))
    sound = learned.read_bytes()
    tune("run", f"task.valid={valid}", data=learned, display=stop_at(2))
    others = "^the text to learn from or to validate on is not the one that"
    other = write_texts(tmp_path / "other.tsv", 60, seed=6)
    with pytest.raises(CheckpointError, match=others):
        tune("run", f"task.valid={other}", **RESUMED)
    write_texts(learned, 60, seed=6)
    with pytest.raises(CheckpointError, match=others):
        tune(**RESUMED)
    write_texts(learned, 60, seed=5, labels=("good", "rare"))
    write_texts(valid, 60, seed=5, labels=("good", "rare"))
    with pytest.raises(CheckpointError, match=f"{others} .* because their labels differ: 'bad', 'good' and 'good', 'rare'"):
        tune(**RESUMED)
    learned.write_bytes(sound)
    (tmp_path / "moved.tsv").write_bytes(sound)  # equal to what is validated on
    assert tune("run", f"task.valid={tmp_path / 'moved.tsv'}", "train.max_epochs=1", **RESUMED).finished
