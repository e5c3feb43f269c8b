"""`train`: the run directory, stopping and resuming, falling back (R6), what is refused, and that nothing is lost."""

import dataclasses
import json
import math
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import ANY

import pytest
import torch

from tests.helpers import with_settings
from tests.training.helpers import Lines, differing, entries, fail, run_bits, stop_at, write_text
from transformer_xl.checkpoint.run_directory import RunDirectory, load
from transformer_xl.checkpoint.store import CheckpointStore, averaged_weights
from transformer_xl.config.model import TransformerXLConfig
from transformer_xl.data.corpora import absolute_corpus
from transformer_xl.errors import CheckpointError, ConfigError, CorpusError, TrainingError
from transformer_xl.model.call import Execution
from transformer_xl.reading.evaluation import Score, evaluate
from transformer_xl.training import run as training_run
from transformer_xl.training import scoring
from transformer_xl.training.display import Display
from transformer_xl.training.record import Record
from transformer_xl.training.run import Outcome, Pretraining, train
from transformer_xl.training.trainer import StepResult, Trainer

STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

Start = Callable[..., Outcome]
pytestmark = pytest.mark.usefixtures("no_picture")  # the run of `finished` has drawn one before


def starter(home: Path, folder: Path) -> Start:
    """Return what trains the tiny recipe; `out` is a name below a folder."""

    def start(
        out: str | Path = "run", *overrides: str, display: Display | None = None, resume: bool = False, **more: Any
    ) -> Outcome:
        arguments = {"recipe": str(home / "tiny.toml"), "corpus": str(home / "text.txt"), **more}
        return train(out=folder / out, overrides=overrides, display=display or Lines(), resume=resume, **arguments)

    return start


def store_of(run: Path) -> CheckpointStore:
    return CheckpointStore(run / "checkpoints")


def of_kind(run: Path, *kinds: str) -> list[dict[str, Any]]:
    """The entries of some kinds in the log of a run."""
    return [entry for entry in entries(run) if entry["kind"] in kinds]


@pytest.fixture
def start(home: Path, tmp_path: Path) -> Start:
    return starter(home, tmp_path)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Where the runs of most tests lie."""
    return tmp_path / "run"


@pytest.fixture(scope="module")
def finished(home: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Outcome, Lines]:
    """A run that was left alone, how it ended and what was shown; tests only read it."""
    folder, display = tmp_path_factory.mktemp("runs"), Lines()
    outcome = starter(home, folder)("whole", display=display)
    return folder / "whole", outcome, display


@pytest.fixture
def whole(finished: tuple[Path, Outcome, Lines]) -> Path:
    return finished[0]


@pytest.fixture(scope="module")
def short(home: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 8 steps; tests leave it as it is."""
    folder = tmp_path_factory.mktemp("runs")
    starter(home, folder)("short", "train.max_steps=8")
    return folder / "short"


@pytest.fixture(scope="module")
def at_20(home: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was stopped halfway; tests leave it as it is."""
    folder = tmp_path_factory.mktemp("runs")
    starter(home, folder)("half", display=stop_at(20))
    return folder / "half"


@pytest.fixture
def half(at_20: Path, tmp_path: Path) -> Path:
    """An own copy of it, as `run`."""
    return shutil.copytree(at_20, tmp_path / "run")


def test_a_run_leaves_what_the_directory_promises(finished: tuple[Path, Outcome, Lines]) -> None:
    whole, outcome, display = finished
    assert (outcome.directory, outcome.finished, outcome.step) == (whole, True, 40)
    assert outcome.score and outcome.score_without_memory
    assert outcome.score.tokens == outcome.score_without_memory.tokens
    assert outcome.picture is not None and outcome.picture == whole / "loss.png"
    assert outcome.picture.read_bytes().startswith(b"\x89PNG")
    names = ["checkpoints", "config.json", "environment.json", "loss.png", "metrics.jsonl", "tokenizer.json"]
    assert sorted(path.name for path in outcome.directory.iterdir()) == names
    log = entries(outcome.directory)
    assert [entry["step"] for entry in log if entry["kind"] == "train"] == list(range(4, 41, 4))
    assert [entry["step"] for entry in log if entry["kind"] == "valid"] == [16, 32, 40]
    assert [entry["step"] for entry in log if entry["kind"] == "sample"] == [16, 32, 40]
    assert log[-1]["kind"] == "final"
    assert log[-1]["loss_without_memory"] == outcome.score_without_memory.loss
    config = RunDirectory(outcome.directory).config()
    assert (config.name, config.model.vocab_size, config.train.precision) == ("tiny", 256, "fp32")
    assert any("memory is worth" in line for line in display.said)
    assert display.warned == []


def test_validation_computes_as_training_does_and_the_end_scores_all(
    start: Start, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backends: list[str] = []

    def watched(*arguments: Any, execution: Execution, **options: Any) -> Score:
        backends.append(execution.backend)
        return evaluate(*arguments, execution=execution, **options)

    monkeypatch.setattr("transformer_xl.training.scoring.evaluate", watched)
    start("run", "train.max_steps=4", "train.attention=sdpa", "eval.max_tokens=50")
    assert backends and set(backends) == {"sdpa"}
    valid, final = of_kind(run, "valid", "final")
    assert valid["scored"] == 50 < final["scored"] == final["split_tokens"]


def test_the_logged_loss_is_the_mean_of_the_steps_since_the_last_line(
    start: Start, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results: list[StepResult] = []
    train_step = Trainer.train_step

    def remembered(self: Trainer) -> StepResult:
        results.append(train_step(self))
        return results[-1]

    monkeypatch.setattr(Trainer, "train_step", remembered)
    start("run", "train.max_steps=10")
    lines = of_kind(run, "train")
    for line, steps in zip(lines, (results[:4], results[4:8], results[8:]), strict=True):
        assert line["loss"] == pytest.approx(sum(r.nats for r in steps) / sum(r.tokens for r in steps))
        assert line["grad_norm"] == steps[-1].grad_norm
        assert line["lr"] == pytest.approx(0.01 * steps[-1].rate)
        assert line["tokens"] == 20 * line["step"]


def test_parameters_of_what_is_compared_are_said_at_the_start(start: Start, tmp_path: Path) -> None:
    display, other = Lines(), tmp_path / "other.toml"
    other.write_text("[model]\nn_layer = 1\nd_model = 8\n")
    start("run", f"compared_with={other}", "train.max_steps=1", display=display)
    assert display.said[1].startswith("compared with the recipe other: ")
    assert display.said[1].split()[5] == display.said[0].split()[1]
    with pytest.raises(ConfigError, match="compared_with: unknown recipe 'quickstrat'; did you mean 'quickstart'"):
        start("wrong", "compared_with=quickstrat")
    assert not (tmp_path / "wrong").exists()
    other.unlink()
    assert start("run", "train.max_steps=2", resume=True).finished


def test_a_stopped_and_resumed_run_is_the_uninterrupted_one(run: Path, start: Start, whole: Path, tmp_path: Path) -> None:
    handlers = [signal.getsignal(n) for n in STOPS]
    # between lines of the log, at one, between validation and checkpoint
    for step, number in ((10, signal.SIGINT), (12, signal.SIGTERM), (28, signal.SIGHUP), (30, signal.SIGTERM)):
        display = stop_at(step, number)
        outcome = start("run", display=display, resume=True)
        assert (outcome.finished, outcome.step, outcome.stopped_by) == (False, step, number)
        expected = f"{number.name}: saved step {step}; go on with: txl train --resume --out {tmp_path / 'run'}"
        assert display.said[-1] == expected
        assert [signal.getsignal(n) for n in STOPS] == handlers
    assert start("run", resume=True).finished
    assert differing(run_bits(run), run_bits(whole)) == []


@pytest.mark.parametrize(
    ("kind", "varlen", "length"), [("shaw", "false", 11), ("al_rfou", "false", 11), ("shaw", "true", 26), (None, "true", None)]
)
def test_a_table_of_positions_is_as_long_as_training_reaches(
    start: Start, run: Path, kind: str | None, varlen: str, length: int | None
) -> None:
    """Segments have 5 tokens, random ones up to 15 more, and the memory 6."""
    start("run", *([f"model.attention={kind}"] if kind else []), f"train.varlen={varlen}", "train.max_steps=2")
    config = RunDirectory(run).config().model
    assert isinstance(config, TransformerXLConfig) and config.max_klen == length
    if length:
        assert load(run)[0].get_parameter("r_emb").shape[1] == length


def test_validation_reads_with_extended_context(start: Start) -> None:
    plain, extended = (start(name, "train.max_steps=2", *more).score for name, more in (("a", ()), ("b", ("eval.ext_len=3",))))
    assert plain and extended and plain.tokens == extended.tokens
    assert plain.nats != extended.nats


def test_validation_in_other_segments_says_how_much_it_sees(start: Start, run: Path) -> None:
    """Training's are of 5 with a memory of 6."""
    for out, settings, said in (
        ("run", ["eval.tgt_len=2"], "segments of 2, memory of 9: tokens see up to 11 tokens"),
        ("told", ["eval.tgt_len=2", "eval.mem_len=3"], "segments of 2, memory of 3: tokens see up to 5 tokens"),
        ("as usual", [], None),
    ):
        display = Lines()
        start(out, "train.max_steps=1", *settings, display=display)
        lines = [line.removeprefix("validation reads ") for line in display.said if line.startswith("validation reads ")]
        assert lines == ([f"{said}, in training up to 11"] if said else [])
    assert [entry["mem_len"] for entry in of_kind(run, "valid")] == [9]


@pytest.mark.parametrize(
    "overrides",
    [
        [
            "optim.optimizer=sgd",
            "optim.schedule=plateau",
            "train.eval_interval=2",
            "train.precision=bf16",
            "train.accumulate=2",
        ],
        ["train.max_steps=none", "train.max_epochs=0.15", "train.average=swa", "train.average_start=0.3"],
        ["train.average=ema", "train.tbptt_segments=2", "train.varlen=true", "train.deterministic=true"],
        ["train.max_minutes=1000", "train.eval_interval=11"],
    ],
)
def test_other_runs_resume_exactly_too(run: Path, start: Start, tmp_path: Path, overrides: list[str]) -> None:
    overrides = ["train.max_steps=16", "train.eval_interval=8", "train.checkpoint_interval=4", *overrides]
    start("whole", *overrides)
    start("run", *overrides, display=stop_at(10))
    start("run", resume=True, recipe=None, corpus=None)
    assert differing(run_bits(run), run_bits(tmp_path / "whole")) == []


@pytest.mark.parametrize("kind", ["ema", "swa"])
def test_averages_are_evaluated_beside_the_weights_and_loaded(start: Start, run: Path, kind: str) -> None:
    overrides = [f"train.average={kind}", "train.average_decay=0.9", "train.average_start=0.5"]
    overrides += ["train.max_steps=12", "train.eval_interval=4"]
    display = Lines()
    outcome = start("run", *overrides, display=display)
    log = of_kind(run, "valid", "final")
    assert ["average_loss" in entry for entry in log] == [kind == "ema", True, True, True]
    assert outcome.score and outcome.score_of_average
    assert log[-1]["average_loss"] == outcome.score_of_average.loss != outcome.score.loss
    assert display.said[-1].startswith("averaged weights: ")
    checkpoint = store_of(run).load_newest(on_damaged=print)
    loaded = load(run, which="average")[0].state_dict()
    assert all(tensor.equal(checkpoint.training[f"average.{name}"]) for name, tensor in loaded.items())
    assert all(tensor.equal(checkpoint.model[name]) for name, tensor in load(run, which="last")[0].state_dict().items())


@pytest.mark.parametrize("better", ["plain", "average"])
def test_the_best_weights_are_the_better_ones(start: Start, run: Path, monkeypatch: pytest.MonkeyPatch, better: str) -> None:
    """At step 4; later, both are worse."""
    score_all = scoring.score_split

    def judged(run: Any, *arguments: Any, **options: Any) -> Any:
        scores = score_all(run, *arguments, **options)
        assert scores.average
        shift = 1000.0 * run.trainer.step / 4 * (1 if better == "plain" else -1 if run.trainer.step == 4 else 1)
        average = dataclasses.replace(scores.average, nats=scores.average.nats + shift)
        return dataclasses.replace(scores, average=average)

    monkeypatch.setattr(training_run, "score_split", judged)
    monkeypatch.setattr(scoring, "score_split", judged)
    start("run", "train.average=ema", "train.max_steps=12", "train.eval_interval=4")
    store = store_of(run)
    assert store.best_step is not None
    checkpoint = store.load(store.best_step)
    best = load(run)[0].state_dict()
    if better == "average":
        assert store.best_step == 4
    expected = checkpoint.model if better == "plain" else averaged_weights(checkpoint)
    assert all(tensor.equal(expected[name]) for name, tensor in best.items())
    assert load(run, which="last")[0].state_dict()["softmax.bias"].equal(store.load(12).model["softmax.bias"])


def test_a_run_without_averages_has_none_to_load(short: Path) -> None:
    with pytest.raises(CheckpointError, match=r"checkpoint 8 of .* holds no averaged weights; load its best or last ones"):
        load(short, which="average")


def test_deterministic_runs_are_equal_to_the_bit(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[bool] = []
    train_step = Trainer.train_step

    def watched(self: Trainer) -> StepResult:
        modes.append(torch.are_deterministic_algorithms_enabled())
        return train_step(self)

    monkeypatch.setattr(Trainer, "train_step", watched)
    for name in ("one", "other"):
        start(name, "train.deterministic=true", "train.max_steps=4")
    assert differing(run_bits(tmp_path / "one"), run_bits(tmp_path / "other")) == []
    assert modes == [True] * 8
    assert not torch.are_deterministic_algorithms_enabled()


def test_validation_and_samples_leave_training_alone(start: Start, tmp_path: Path) -> None:
    start("rarely", "train.eval_interval=1000", "train.max_steps=12")
    start("often", "train.eval_interval=3", "train.sample_tokens=3", "train.max_steps=12")
    rarely, often = run_bits(tmp_path / "rarely"), run_bits(tmp_path / "often")
    assert [name for name in differing(rarely, often) if name.startswith(("model.", "training."))] == []


def test_a_run_that_time_ends_is_validated_at_each_quarter_however_few_its_steps(
    start: Start, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until its interval is reached; where another limit is nearer, the interval alone counts."""
    train_step = Trainer.train_step

    def minute(self: Trainer) -> Any:
        result = train_step(self)
        self.seconds = 60.0 * self.step
        return result

    monkeypatch.setattr(Trainer, "train_step", minute)
    cases = (1000, 16, "none", [4, 8, 12, 16]), (7, 16, "none", [4, 7, 14, 16]), (1000, 17, 16, [16]), (1000, "none", 16, [16])
    for interval, minutes, most, steps in cases:
        out = f"{interval}-{minutes}"
        start(out, f"train.eval_interval={interval}", f"train.max_minutes={minutes}", f"train.max_steps={most}")
        assert [entry["step"] for entry in of_kind(run.parent / out, "valid")] == steps


def test_a_stop_before_the_first_step(start: Start, whole: Path, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Lines, "__enter__", lambda self: signal.raise_signal(signal.SIGTERM))
        outcome = start()
    assert (outcome.finished, outcome.step) == (False, 0)
    start("run", resume=True)
    assert differing(run_bits(run), run_bits(whole)) == []


def test_a_second_signal_ends_at_once_but_not_a_terminal_that_is_closed_and_sends_two(start: Start) -> None:
    def twice(number: signal.Signals) -> Lines:
        return Lines({10: lambda: (signal.raise_signal(number), signal.raise_signal(number))})

    with pytest.raises(KeyboardInterrupt):
        start(display=twice(signal.SIGINT))
    assert start("other", display=twice(signal.SIGHUP)).stopped_by == signal.SIGHUP


def test_what_nohup_started_goes_on_without_a_terminal(start: Start) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert start("run", "train.max_steps=12", display=stop_at(10, signal.SIGHUP)).finished
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_finished_run_can_be_finished_again_and_prolonged(
    start: Start, finished: tuple[Path, Outcome, Lines], run: Path
) -> None:
    _, first, lines = finished
    shutil.copytree(first.directory, run)
    log = entries(run)
    display = Lines()
    again = start(resume=True, display=display)
    assert (again.finished, again.step, again.picture) == (True, 40, run / "loss.png")
    for own, other in ((first.score, again.score), (first.score_without_memory, again.score_without_memory)):
        assert own and other
        assert other.as_dict() == own.as_dict() | {"seconds": ANY, "tokens_per_second": ANY}
    *_, did, _, found = display.said
    assert did.startswith("finished already: 40 steps, 800 tokens")
    assert did.endswith(f"txl train --resume --out {run} --set train.max_steps=80")
    assert found == lines.said[-1]
    assert entries(run) == log
    with pytest.raises(ConfigError, match=r"^train.max_steps \(30\) is less than what the run in '.*run' has done \(40\)"):
        start("run", "train.max_steps=30", resume=True)
    assert json.loads((run / "config.json").read_text())["train"]["max_steps"] == 40
    other = start("run", "eval.tgt_len=4", resume=True)  # is scored with other settings
    assert other.score and again.score and other.score.nats != pytest.approx(again.score.nats)
    start("run", "train.max_steps=48", resume=True, display=stop_at(44))
    assert json.loads((run / "config.json").read_text())["train"]["max_steps"] == 48
    assert start(resume=True).step == 48  # the new budget was remembered
    assert len(of_kind(run, "final")) == 1


def test_a_signal_while_the_finished_model_is_scored_ends_only_the_scoring(
    run: Path, start: Start, short: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At its beginning, within it, and in the last step of training."""
    names: list[str] = []

    def counting(self: Lines, what: str, n_token: int) -> Callable[[int], None]:
        names.append(what)
        return lambda n: signal.raise_signal(signal.SIGTERM) if len(names) == 2 else None

    display = Lines()
    with monkeypatch.context() as patch:
        patch.setattr(Lines, "scoring", counting)
        outcome = start("run", "train.max_steps=8", display=display)
    assert names == ["validation", "scoring without memory"]
    assert (outcome.finished, outcome.step, outcome.score, outcome.stopped_by) == (True, 8, None, signal.SIGTERM)
    assert outcome.picture == run / "loss.png"
    assert display.said[-1] == f"SIGTERM: saved step 8, which is not scored; score it with: txl eval {run}"
    assert not of_kind(run, "final")
    assert start(resume=True).score  # it can be scored later
    assert differing(run_bits(run), run_bits(short)) == []
    display = stop_at(8)
    assert start("other", "train.max_steps=8", display=display).stopped_by == signal.SIGINT
    assert not any(line.startswith("scoring") for line in display.said)


@pytest.mark.parametrize("resumed", [False, True])
def test_the_final_scoring_is_bounded(start: Start, run: Path, monkeypatch: pytest.MonkeyPatch, resumed: bool) -> None:
    monkeypatch.setattr(scoring, "_SCORING_SECONDS", 0.0)
    monkeypatch.setattr(scoring, "_SCORING_SHARE", 0.0)
    display, settings = Lines(), ("train.max_steps=4", "eval.max_tokens=50")
    if resumed:  # the process was killed before the model was scored
        with monkeypatch.context() as patch:
            patch.setattr(Pretraining, "conclude", lambda self, run, _: self.outcome(run))
            start("run", *settings)
    outcome = start("run", *settings, display=display, resume=resumed)
    assert outcome.score and outcome.score_without_memory
    assert outcome.score.tokens == outcome.score_without_memory.tokens == 50
    (bound,) = [line for line in display.said if line.startswith("scoring")]
    n = bound.split(" of ")[1].split()[0]
    assert bound.startswith(f"scoring the first 50 of {n} tokens") and bound.endswith(
        f"txl eval {run} --split valid scores all"
    )
    assert display.said[-1].startswith(f"validation, the first 50 of {n} tokens: ")
    *_, valid, _, final = of_kind(run, "valid", "sample", "final")
    assert (final["loss"], final["scored"]) == (valid["loss"], 50)
    again = Lines()
    start("run", display=again, resume=True)
    assert again.said[-1] == display.said[-1]


def test_resume_starts_a_run_where_there_is_none(start: Start, short: Path, run: Path) -> None:
    start("run", "train.max_steps=8", resume=True)
    assert differing(run_bits(run), run_bits(short)) == []


def test_resume_before_the_first_checkpoint_starts_over(start: Start, short: Path, run: Path) -> None:
    with pytest.raises(RuntimeError, match="power cut"):
        start("run", "train.max_steps=8", display=Lines({4: fail("power cut")}))
    display = Lines()
    start(resume=True, display=display)
    assert any(line.endswith("yet: starting from the beginning") for line in display.warned)
    assert differing(run_bits(run), run_bits(short)) == []


# Falling back


def damage(directory: Path, step: int) -> None:
    path = directory / "checkpoints" / f"step-{step:08d}" / "training.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_a_damaged_newest_checkpoint_is_passed_over_and_the_log_goes_back_with_it(start: Start, whole: Path, run: Path) -> None:
    start("run", display=stop_at(30))
    damage(run, 30)
    display = Lines()
    start(resume=True, display=display)
    (warning,) = display.warned
    assert "\n" not in warning
    assert "step-00000030/training.safetensors' is damaged" in warning
    assert any(line.startswith("resumed at step 24") for line in display.said)
    assert differing(run_bits(run), run_bits(whole)) == []


def test_an_abandoned_future_is_never_resumed(start: Start, run: Path) -> None:
    """The newest checkpoint could not be read, and the run went on from the one before, with another rate."""
    start("run", "train.checkpoint_interval=10", display=stop_at(28))
    damage(run, 28)
    display = stop_at(24)
    start("run", "optim.lr=0.5", display=display, resume=True)
    assert any(line.startswith("resumed at step 20") for line in display.said)
    abandoned = run / "checkpoints" / "step-00000028.abandoned"
    assert abandoned.is_dir()  # set aside, not deleted
    assert store_of(run).steps() == [16, 20, 24]  # 16 is the best
    display = Lines()
    start(display=display, resume=True)
    assert display.warned == []
    assert any(line.startswith("resumed at step 24") for line in display.said)
    (line,) = [entry for entry in of_kind(run, "train") if entry["step"] == 28]
    assert line["lr"] > 0.01  # the new rate still holds


def test_a_best_of_an_abandoned_future_is_forgotten(start: Start, run: Path) -> None:
    """Validations improve at 16 and 32; 32 gets lost, and the run must not take what it saves at 32 next for the best."""
    store = store_of(run)
    start("run", "train.keep_checkpoints=5", display=stop_at(32))
    assert store.best_step == 32
    damage(run, 32)
    start("run", display=stop_at(28), resume=True)
    assert (store.best_step, store.steps()) == (16, [8, 16, 24, 28])
    assert start(resume=True).finished
    assert store.best_step == 40


def test_a_best_that_was_saved_but_not_recorded_is_recorded_on_resume(start: Start, half: Path) -> None:
    """The process was killed between renaming the checkpoint and writing best.json."""
    (half / "checkpoints" / "best.json").unlink()
    start("run", display=stop_at(24), resume=True)
    assert store_of(half).best_step == 16


def test_a_best_that_is_gone_is_forgotten(start: Start, half: Path) -> None:
    """So that the next validation, which is worse than it was, is saved as the best there is."""
    shutil.rmtree(half / "checkpoints" / "step-00000016")
    start("run", "optim.lr=1e-20", "train.max_steps=24", resume=True)
    assert store_of(half).best_step == 24


def test_checkpoints_of_0_2_are_refused(start: Start, half: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    newest = dataclasses.replace(store_of(half).load_newest(on_damaged=print), copies={})
    monkeypatch.setattr(CheckpointStore, "load_newest", lambda *_, **__: newest)
    with pytest.raises(CheckpointError, match=r"^'.*run' was trained by transformer_xl 0.2, which saved other states; go on"):
        start(resume=True)


def test_nothing_sound_is_one_error_and_nothing_changes(start: Start, half: Path) -> None:
    store = store_of(half)
    for step in store.steps():
        damage(half, step)
    log, steps = entries(half), store.steps()
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* can be loaded \(\d tried\)"):
        start(resume=True)
    assert (entries(half), store.steps()) == (log, steps)


def test_a_half_written_line_of_the_log_is_written_again(start: Start, whole: Path, half: Path) -> None:
    with (half / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"kind": "train", "step": 24, "los')
    start(resume=True)
    assert entries(half) == entries(whole)


def test_a_damaged_log_is_named_by_its_line_and_nothing_is_lost(start: Start, whole: Path, half: Path) -> None:
    path = half / "metrics.jsonl"
    sound = path.read_bytes()
    path.write_bytes(sound[:400] + b"\xc3" + sound[401:])
    with pytest.raises(CheckpointError, match=r"metrics.jsonl', line \d is no entry of a log"):
        start(resume=True)
    path.write_bytes(sound)
    assert start(resume=True).finished
    assert differing(run_bits(half), run_bits(whole)) == []


# Bad steps through the run


def poison(monkeypatch: pytest.MonkeyPatch, steps: range, *, weights: bool = False) -> None:
    """Make the loss NaN at some steps, or the weights infinite after them."""
    forward_backward, train_step = Trainer._forward_backward, Trainer.train_step

    def spoiled(self: Trainer, *segment: Any) -> Any:
        total, mems = forward_backward(self, *segment)
        return total * math.nan if self.step + 1 in steps and not weights else total, mems

    def diverging(self: Trainer) -> StepResult:
        result = train_step(self)
        if weights and self.step in steps:
            with torch.no_grad():
                self.model.softmax.bias.add_(math.inf)
        return result

    monkeypatch.setattr(Trainer, "_forward_backward", spoiled)
    monkeypatch.setattr(Trainer, "train_step", diverging)


@pytest.mark.parametrize("is_late", [False, True])
def test_skipped_steps_are_warned_of_and_counted_in_the_log(
    is_late: bool, start: Start, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a step is launched before the one before it is read, as on a GPU, and where a signal ends the run."""
    if is_late:
        monkeypatch.setattr("transformer_xl.training.trainer.must_wait", lambda *_: False)
    poison(monkeypatch, range(6, 13))
    display = Lines()
    assert start("run", "train.max_steps=20", display=display).finished
    assert display.warned[0] == "step 6: loss or gradient not finite, step skipped (1 so far)"
    assert len(display.warned) == 7
    assert [line["skipped"] for line in of_kind(run, "train")] == [0, 3, 7, 7, 7]
    assert [line["loss"] is None for line in of_kind(run, "train")] == [False, False, True, False, False]
    assert store_of(run).steps() == [16, 20]
    assert not start("stopped", display=stop_at(30)).finished
    state = store_of(run.with_name("stopped")).load_newest(on_damaged=pytest.fail).state
    *_, last = of_kind(run.with_name("stopped"), "train")
    assert last["step"] == 28
    assert state["record"]["interval"]["tokens"] == state["tokens"] - last["tokens"] == 40


def test_a_run_that_ends_for_bad_steps_keeps_its_last_good_checkpoint(
    start: Start, whole: Path, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        poison(patch, range(15, 100))
        with pytest.raises(TrainingError, match=r"in 10 steps in a row \(up to step 24"):
            start("run", "train.checkpoint_interval=2")
    assert store_of(run).steps() == [12, 14]
    assert start("run", "train.checkpoint_interval=8", resume=True).finished
    assert entries(run) == entries(whole)


def test_weights_that_are_not_finite_are_not_saved(start: Start, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    poison(monkeypatch, range(16, 17), weights=True)
    display = Lines()
    with pytest.raises(TrainingError, match="up to step 26"):
        start(display=display)
    assert "weights are not finite after step 16, so they are not saved" in display.warned[0]
    assert store_of(run).steps() == [8]
    with pytest.raises(TrainingError, match=r"weights are not finite after step 16.*resume with a lower optim.lr"):
        start("other", "train.max_steps=16")
    assert store_of(run.with_name("other")).steps() == [8]


DIVERGING = ("optim.optimizer=adamw", "optim.lr=1e30", "optim.warmup_steps=0", "train.max_steps=6")


def test_a_model_whose_losses_are_no_numbers_at_the_end_has_diverged(
    run: Path, start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends: list[str] = []
    stub = "transformer_xl.training.record.draw_curve"
    monkeypatch.setattr(stub, lambda entries, config, path, *, end="", **_: ends.append(end) or path)
    for resume in (False, True):
        display = Lines()
        with pytest.raises(
            TrainingError, match=r"^diverged at step 2: losses of the trained model are not finite .* \(1e\+30\)$"
        ):
            start("run", *DIVERGING, resume=resume, display=display)
        assert display.said[-1] == f"loss curve: {tmp_path / 'run' / 'loss.png'}"
        last = entries(run)[-1]
        assert (last["kind"], last["loss"], last["scored"]) == ("final", None, last["split_tokens"])
    with pytest.raises(TrainingError, match=r"^diverged at step 2: no finite loss and gradient in 3 steps in a row"):
        start("other", *DIVERGING, "train.max_bad_steps=3")
    assert ends == ["diverged at step 2"] * 3
    display = Lines()
    assert start("finite", *DIVERGING, "optim.lr=1e4", display=display).score is not None
    assert "such a loss is that of a model whose training diverged" in display.warned[-1]


# what is refused


def refuse(start: Start, error: type[Exception], match: str, *overrides: str, out: str | Path = "new", **more: Any) -> None:
    """A failed start says why in one line and leaves no directory."""
    with pytest.raises(error, match=match) as caught:
        start(out, *overrides, **more)
    assert "\n" not in str(caught.value)


def test_failed_starts_leave_no_directory(start: Start, tmp_path: Path) -> None:
    empty = tmp_path / "empty.txt"
    empty.touch()
    latin = tmp_path / "latin.txt"
    latin.write_bytes("caf\u00e9 ".encode("latin-1") * 400)
    before = sorted(tmp_path.iterdir())
    refuse(start, CorpusError, "corpus '.*empty.txt' is empty; give a file", corpus=str(empty))
    refuse(start, CorpusError, "1,957 tokens, and 5,001 are needed, for train.batch_size", "train.batch_size=1000")
    char = "tokenizer.kind=char"
    refuse(start, CorpusError, r"latin.txt': byte 3 \(0xe9\) is not UTF-8; convert it \(.*iconv", char, corpus=str(latin))
    refuse(start, CorpusError, "gone.txt': no such file or name", corpus=str(tmp_path / "gone.txt"))
    refuse(start, ConfigError, r"d_model \(9\) must be even, because its sinusoids come in pairs; use 10", "model.d_model=9")
    refuse(start, ConfigError, "must increase and stay between 0 and vocab_size", "model.cutoffs=[20,10]")
    refuse(start, ConfigError, "unknown device 'gpu'; did you mean 'cuda'", "train.device=gpu")
    assert sorted(tmp_path.iterdir()) == before


def test_the_directory_of_another_run_is_not_touched(
    start: Start, short: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = run_bits(short)
    monkeypatch.setattr("transformer_xl.training.run.prepare", lambda *_, **__: pytest.fail("found out too late"))
    refuse(start, CheckpointError, "short' holds another run; continue it with --resume", out=short)
    assert differing(run_bits(short), before) == []
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").touch()
    for resume in (False, True):
        refuse(start, CheckpointError, "mine' is not empty and holds no run", out="mine", resume=resume)
    (tmp_path / "file.txt").touch()
    refuse(start, CheckpointError, "file.txt' is a file", out="file.txt")


def test_resume_with_something_else_is_refused(start: Start, short: Path) -> None:
    before = run_bits(short)
    for override, match in (
        ("model.d_model=10", r"model.d_model \(10\) differs from that of the run in '.*' \(8\); resume without changing it"),
        ("tokenizer.kind=char", r"tokenizer.kind \('char'\) differs"),
        ("data.split=[0.8,0.1,0.1]", "data.split"),
        ("train.batch_size=8", "train.batch_size"),
        ("optim.optimizer=sgd", r"optim.optimizer \('sgd'\) differs"),
    ):
        refuse(start, CheckpointError, match, override, out=short, resume=True)
    refuse(start, CheckpointError, "is a run of recipe 'tiny', not 'quickstart'", out=short, resume=True, recipe="quickstart")
    assert differing(run_bits(short), before) == []


def test_resume_with_another_text_is_refused(run: Path, recipe: str, tmp_path: Path) -> None:
    start, text = starter(tmp_path, tmp_path), write_text(tmp_path / "text.txt")
    shutil.copy(recipe, tmp_path)
    start("run", "train.max_steps=8")
    before, words = run_bits(run), text.read_bytes()
    other = tmp_path / "other.txt"
    other.write_bytes(words)
    refuse(start, CheckpointError, r"data.corpus \('.*other.txt'\) differs", out="run", resume=True, corpus=str(other))
    for changed in (words.replace(b"cat", b"dog"), words[:-100]):  # as many tokens as before, and fewer
        text.write_bytes(changed)
        refuse(start, CheckpointError, "the text of '.*text.txt' is not the one", out="run", resume=True)
    text.write_bytes(words)
    assert differing(run_bits(run), before) == []
    assert start("run", "train.max_steps=12", resume=True).step == 12


def test_resume_with_changed_settings_of_the_run_is_refused(start: Start, short: Path, run: Path) -> None:
    """Somebody edited those in a checkpoint, and its manifest."""
    shutil.copytree(short, run)
    with_settings(run, model={"d_inner": RunDirectory(short).config().model.model_dump()["d_inner"] + 1})
    refuse(start, CheckpointError, "checkpoint 8 does not fit the run in .*feed_forward.outer.weight", out="run", resume=True)


def test_two_processes_cannot_train_into_one_directory(start: Start, short: Path, run: Path) -> None:
    message = "another process is training in '.*run'; wait until it ends, or choose another --out"
    refused: list[str] = []

    def try_again() -> None:
        with pytest.raises(CheckpointError, match=message) as caught:
            start(resume=True)
        refused.append(str(caught.value))

    assert start("run", "train.max_steps=8", display=Lines({4: try_again})).finished
    assert len(refused) == 1
    assert differing(run_bits(run), run_bits(short)) == []
    assert start(resume=True).finished  # the lock went with the first


# a disk that refuses


FULL = OSError(28, "No space left on device")


def fill_the_disk(monkeypatch: pytest.MonkeyPatch, *steps: int, error: Exception = FULL) -> None:
    """Let the checkpoints of these steps find no room, or fail by another error."""
    write = CheckpointStore._write

    def full(self: CheckpointStore, checkpoint: Any, final: Path) -> None:
        if checkpoint.step in steps:
            raise error
        write(self, checkpoint, final)

    monkeypatch.setattr(CheckpointStore, "_write", full)


@pytest.mark.parametrize(
    ("error", "reason"), [(FULL, "No space left on device; free disk space"), (CheckpointError("no JSON"), "no JSON")]
)
def test_a_checkpoint_that_cannot_be_saved_is_a_warning_and_training_goes_on(
    start: Start, whole: Path, run: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, reason: str
) -> None:
    fill_the_disk(monkeypatch, 16, 24, error=error)
    display = Lines()
    assert start(display=display).finished
    assert len(display.warned) == 2
    assert display.warned[0] == f"step 16 is not saved: {reason}; training goes on"
    assert differing(run_bits(run), run_bits(whole)) == []


def test_a_disk_too_small_for_a_checkpoint_is_found_before_anything_is_trained(
    run: Path, start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start("run", "train.max_steps=8")
    before = run_bits(run)
    with monkeypatch.context() as patch:
        patch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=10_000))
        patch.setattr(Trainer, "train_step", lambda _: pytest.fail("it trained"))
        message = "has 10 kB free, and a checkpoint takes .* kB; free disk space or choose another --out"
        refuse(start, CheckpointError, message)
        assert not (tmp_path / "new").exists()
        refuse(start, CheckpointError, message, "train.max_steps=16", out="run", resume=True)
        assert differing(run_bits(run), before) == []
        assert start("run", "train.max_steps=8", resume=True).finished  # it saves nothing more


def test_a_run_whose_directory_is_deleted_ends_and_names_it(run: Path, start: Start) -> None:
    with pytest.raises(FileNotFoundError, match=r"No such file or directory: '.*run/metrics.jsonl'"):
        start(run, display=Lines({20: lambda: shutil.rmtree(run)}))
    assert not run.exists()


def test_a_full_disk_at_a_line_of_the_log_ends_the_run_and_keeps_what_was_saved(
    start: Start, whole: Path, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of the line is written."""
    write = Record.write

    def full(self: Record, kind: str, step: int, **values: Any) -> None:
        if step < 28:
            return write(self, kind, step, **values)
        with self.path.open("a") as file:
            file.write('{"kind": "tra')
        raise OSError(28, "No space left on device", str(self.path))

    with monkeypatch.context() as patch:
        patch.setattr(Record, "write", full)
        with pytest.raises(OSError, match=r"No space left on device: '.*run/metrics.jsonl'"):
            start()
    assert store_of(run).steps() == [16, 24]
    assert start(resume=True).finished
    assert differing(run_bits(run), run_bits(whole)) == []


def test_the_log_is_on_the_disk_before_a_checkpoint_relies_on_it(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    for owner, name in ((Record, "sync"), (CheckpointStore, "save"), (Record, "close")):
        method = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *a, name=name, method=method, **k: events.append(name) or method(*a, **k))
    start("run", "train.max_steps=16")
    assert events == [*["sync", "save"] * 2, "close"]


def test_a_best_that_could_not_be_saved_is_not_taken_for_saved(
    start: Start, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Losses 3, 1 (lost: the disk is full), 2: the last is the best that there is."""
    script = {4: 3.0, 8: 1.0, 12: 2.0}

    monkeypatch.setattr(Pretraining, "validate", lambda self, run: [(script[run.trainer.step], 0.0)])
    fill_the_disk(monkeypatch, 8)
    start("run", "train.max_steps=12", "train.eval_interval=4", "train.checkpoint_interval=4")
    assert store_of(run).best_step == 12


def test_a_full_disk_at_the_end_is_an_error_and_the_run_can_be_finished(
    start: Start, whole: Path, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        fill_the_disk(patch, 40)
        refuse(start, OSError, "No space left on device", out="run")
    assert start(resume=True).finished
    assert differing(run_bits(run), run_bits(whole)) == []


def test_runs_without_a_validation_split(start: Start, run: Path) -> None:
    outcome = start("run", "data.split=[1,0,0]", "train.max_steps=8")
    assert (outcome.finished, outcome.score) == (True, None)
    assert [entry["kind"] for entry in entries(run)] == ["train"] * 2
    with pytest.warns(UserWarning, match="no best checkpoint is recorded"):
        load(run)


def test_corpora_keep_their_meaning_wherever_a_run_is_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "a.txt").touch()
    for corpus in ("a.txt", "./a.txt", "~/a.txt", str(tmp_path / "a.txt")):
        assert absolute_corpus(corpus) == str(tmp_path / "a.txt")
    assert absolute_corpus("~/*.txt") == str(tmp_path / "*.txt")
    assert absolute_corpus("enwik8") == "enwik8"
