"""A run from start to end on a GPU: `make test-gpu`. (Kernels: test_fused.py.)

With TXL_TEST_DEVICE=cpu everything runs on a CPU instead, which shows that the tests themselves are right.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.helpers import AtOnce, tiny_model
from tests.reading.test_evaluation import GRAPHED as SCORED
from tests.reading.test_evaluation import MODELS, assert_equal, graphed_and_not, some_ids
from tests.training.helpers import bits, differing, entries, run_bits, settled, tiny_trainer
from transformer_xl.checkpoint.run_directory import load
from transformer_xl.generation import scores as scores_module
from transformer_xl.generation.decoder import Decoder
from transformer_xl.generation.draft import Chosen, Draft
from transformer_xl.generation.sampling import Sampling
from transformer_xl.generation.scheduler import write
from transformer_xl.kernels.device import InferencePrecision
from transformer_xl.kernels.graphs import Graphs
from transformer_xl.reading.evaluation import evaluate
from transformer_xl.training.display import Display
from transformer_xl.training.run import train

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]  # compilers warn about their own code

DEVICE = os.environ.get("TXL_TEST_DEVICE", "cuda")
ROOT = Path(__file__).parents[2]
IDS = torch.from_numpy(np.random.default_rng(3).integers(0, 12, (2, 40)))
SETTINGS = {
    "fp32": ["model.dropatt=0.1"],
    "bf16": ["train.precision=bf16", "model.dropatt=0.1"],
    "adaptive": ["train.precision=bf16", "model.cutoffs=[4, 8]", "model.div_val=2", "optim.optimizer=adamw"],
    "penalties": [
        "train.precision=bf16",
        "train.varlen=true",
        "optim.lr_by_length=true",
        "train.activation_penalty=0.2",
        "train.temporal_penalty=0.1",
        "model.dropoutput=0.3",
        "model.locked_dropout=true",
        "model.untie_r=true",
    ],
    "lengths": ["train.varlen=true", "model.same_length=true", "model.clamp_len=4", "train.average=ema"],
}


@pytest.fixture(autouse=True)
def poison() -> None:
    """Leave `torch.empty` as it is, because compilers take what it makes for constants."""


def start(home: Path, out: Path, *settings: str, device: str = DEVICE, resume: bool = False) -> Path:
    overrides, shown = (f"train.device={device}", *settings), Display(quiet=True)
    train(str(home / "tiny.toml"), corpus=str(home / "text.txt"), out=out, overrides=overrides, display=shown, resume=resume)
    return out


def with_source() -> dict[str, str]:
    """The environment of a child that imports this source first, and whatever else this process finds by PYTHONPATH."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))}


def losses(run: Path) -> list[float]:
    return [entry["loss"] for entry in entries(run) if entry["kind"] in ("train", "valid")]


@pytest.mark.parametrize("name", SETTINGS)
def test_two_runs_and_a_resumed_one_end_with_the_same_bits(name: str, home: Path, tmp_path: Path) -> None:
    settings = SETTINGS[name]
    once, again = (run_bits(start(home, tmp_path / run, *settings)) for run in ("once", "again"))
    assert differing(once, again) == []
    cut = start(home, tmp_path / "cut", *settings, "train.max_steps=40")
    newest = sorted((cut / "checkpoints").iterdir())[-1]
    shutil.rmtree(newest)  # the run goes on from the checkpoint before
    assert differing(run_bits(start(home, cut, *settings, resume=True)), once) == []


GRAPHED = {
    **SETTINGS,
    "groups": ["train.accumulate=2", "train.tbptt_segments=2", "train.average=swa", "train.average_start=0.3"],
    "locked": ["train.precision=bf16", "model.locked_dropout=true", "model.dropemb=0.2", "optim.optimizer=sgd"],
    "shift": ["train.precision=bf16", "model.shift=averages", "model.ngram_rows=[64]", "model.pre_lnorm=true"],
    "lamb": ["optim.optimizer=lamb", "train.reset_at_documents=true"],
    "alibi": ["model.attention=alibi", "train.loss=half"],
}


@pytest.mark.parametrize("name", GRAPHED)
def test_a_graph_gives_the_bits_of_single_kernels(name: str, home: Path, tmp_path: Path) -> None:
    graph, single = (run_bits(start(home, tmp_path / way, *GRAPHED[name], f"train.graph={way}")) for way in ("auto", "off"))
    assert differing(graph, single) == ["config"]


def test_graphs_of_more_lengths_than_are_kept_give_the_same_bits(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, number in (("_MOST_GRAPHS", 2), ("_LAUNCHES_OF_A_CAPTURE", 1)):
        monkeypatch.setattr(f"transformer_xl.kernels.graphs.{name}", number)
    captures, capture = [], Graphs._try_to_capture
    monkeypatch.setattr(Graphs, "_try_to_capture", lambda self, key, *work: captures.append(key) or capture(self, key, *work))
    test_a_graph_gives_the_bits_of_single_kernels("penalties", home, tmp_path)
    assert DEVICE == "cpu" or len(captures) > 2, "none was dropped"


@pytest.mark.skipif(DEVICE == "cpu", reason="a CPU has no CUDA graphs")
def test_steps_are_captured_and_bad_ones_change_nothing() -> None:
    trainer = tiny_trainer(train={"device": DEVICE}, optim={"optimizer": "muon"}, model={"dropout": 0.2}, device=DEVICE)
    for _ in range(8):  # an epoch has six segments, all of one length
        settled(trainer)
    assert trainer._graphs is not None
    assert len(trainer._graphs) == 1
    before = bits(trainer)
    with torch.no_grad():
        trainer.mems[0].state_dict()["hidden.0"][0, -1] = float("nan")
    for _ in range(2):
        settled(trainer)
    assert trainer.skipped == 2
    changed = [name for name in differing(before, bits(trainer)) if name.startswith(("model.", "optimizer."))]
    assert changed == []


def test_a_gpu_trains_what_a_cpu_trains(home: Path, tmp_path: Path) -> None:
    settings = ("model.dropout=0", "train.log_interval=1", "train.max_steps=10", "optim.optimizer=adamw")
    here, there = (losses(start(home, tmp_path / f"{i}", *settings, device=device)) for i, device in enumerate((DEVICE, "cpu")))
    assert here == pytest.approx(there, abs=1e-4)


@pytest.mark.parametrize(("first", "second"), [(DEVICE, "cpu"), ("cpu", DEVICE)])
def test_a_run_goes_on_elsewhere(first: str, second: str, home: Path, tmp_path: Path) -> None:
    settings = ("model.dropout=0", "train.max_steps=40", "optim.optimizer=adamw")
    moved = start(home, tmp_path / "moved", *settings, device=first)
    expected = losses(moved)
    shutil.rmtree(sorted((moved / "checkpoints").iterdir())[-1])
    assert losses(start(home, moved, *settings, device=second, resume=True)) == pytest.approx(expected, abs=1e-3)


@pytest.fixture(scope="module")
def run(home: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return start(home, tmp_path_factory.mktemp("gpu") / "run")


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16", "int8"])
@pytest.mark.parametrize("compile", [False, True])
def test_decoding_is_that_of_a_cpu_and_continues_to_the_last_bit(
    precision: str, compile: bool, run: Path, tmp_path: Path
) -> None:
    model, _ = load(run)
    reference = Decoder(model, batch_size=2).feed(IDS)
    options = {"batch_size": 2, "precision": precision, "compile": compile}
    model = model.to(DEVICE)
    decoder, fresh = Decoder(model, **options), Decoder(model, **options)
    scores = decoder.feed(IDS.to(DEVICE))
    torch.testing.assert_close(scores.cpu(), reference, atol=1e-4 if precision == "fp32" else 0.1, rtol=0)
    decoder.save(tmp_path / "session.safetensors")
    fresh.load(tmp_path / "session.safetensors")
    for token in range(5):
        expected, found = (each.step([token, token]).full() for each in (decoder, fresh))
        assert torch.equal(expected, found)


@pytest.mark.parametrize("n_row", [1, 3])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "int8"])
def test_a_graph_of_decoding_gives_the_bits_of_single_kernels(
    precision: InferencePrecision, n_row: int, run: Path, tmp_path: Path
) -> None:
    """Pieces of text, rows that sit out, one that begins anew, and a session that is saved and loaded in the middle."""
    model = load(run)[0].to(DEVICE)
    graph, single = (Decoder(model, batch_size=n_row, precision=precision) for _ in range(2))
    assert graph.kept and single.kept
    if DEVICE == "cpu":
        graph.kept.reader.capture(graph.kept.memory)
    assert graph.kept.reader.captured
    single.kept.reader.interpret()
    active, draws = [True, False, True][:n_row], np.random.default_rng(5)
    for i in range(60):
        ids = draws.integers(0, 12, n_row)
        both = [each.step(ids, active=active if i % 3 else None).full() for each in (graph, single)]
        assert torch.equal(*both)
        if i % 20 == 9:
            for each in (graph, single):
                each.reset([False, True, False][-n_row:])
                each.feed([[1, 2, 3, 4, 5]] * n_row)
        if i == 35:
            graph.save(tmp_path / "session.safetensors")
            graph.load(tmp_path / "session.safetensors")
    for row in range(n_row):
        one, other = (each.take(row).tensors for each in (graph, single))
        assert one.keys() == other.keys() and all(torch.equal(x, other[name]) for name, x in one.items())


@pytest.mark.parametrize("case", SCORED)
@pytest.mark.parametrize("kind", MODELS)
def test_a_graph_of_scoring_gives_the_bits_of_single_kernels(kind: str, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One lane and several, with a short segment at the end, and the state that is handed over."""
    model = tiny_model(**MODELS[kind]).to(DEVICE)
    one, other, made = graphed_and_not(model, some_ids(150), monkeypatch, **SCORED[case])
    assert_equal(one, other)
    if case != "a cache":
        assert made
        assert any(each.places if isinstance(each, AtOnce) else len(each) and not each.problem for each in made)


@pytest.mark.parametrize("kind", MODELS)
def test_lanes_are_scored_there_as_here(kind: str) -> None:
    model, ids = tiny_model(**{**MODELS[kind], "same_length": True}), some_ids(150)
    here = evaluate(model, ids, tgt_len=7)
    model = model.to(DEVICE)
    precisions: list[tuple[InferencePrecision, float]] = [("fp32", 1e-4), ("bf16", 0.05)]
    for precision, tolerance in precisions:
        for rows in (1, 4):
            there = evaluate(model, ids, tgt_len=7, batch_size=rows, precision=precision)
            assert there.loss == pytest.approx(here.loss, abs=tolerance)


def test_a_text_is_the_same_every_time_whether_drawn_there_or_here(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model(vocab_size=5000).to(DEVICE)
    sampling = Sampling(temperature=0.8, top_k=100, top_p=0.95)

    def texts() -> dict[int, list[int]]:
        written: dict[int, list[int]] = {i: [] for i in range(3)}
        drafts = [Draft([i, 7], seed=i, max_new_tokens=30, sampling=sampling) for i in range(3)]
        for event in write(Decoder(model, batch_size=3), drafts):
            if isinstance(event, Chosen):
                written[event.draft.seed].append(event.token)
        return written

    there = texts()
    assert texts() == there and all(len(text) == 30 for text in there.values())
    monkeypatch.setattr(scores_module, "_DRAWING", ())
    assert texts() == texts()


def test_commands_run_there(home: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "transformer_xl"]
    environment = with_source()
    environment.pop("TRITON_INTERPRET", None)
    run = str(tmp_path / "run")
    for arguments in (
        ["train", str(home / "tiny.toml"), "--corpus", str(home / "text.txt"), "--out", run, "--set", f"train.device={DEVICE}"],
        ["eval", run, "--device", DEVICE],
        ["generate", run, "--device", DEVICE, "--tokens", "20", "--seed", "1"],
        ["bench", "decode", run, "--device", DEVICE, "--tokens", "5"],
    ):
        done = subprocess.run(command + arguments, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{arguments[0]}: {done.stderr}"


def test_one_process_of_torchrun_uses_its_gpu(home: Path, tmp_path: Path) -> None:
    """NCCL, with nobody to talk to."""
    alone = start(home, tmp_path / "alone", "model.dropout=0")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1", "-m", "transformer_xl"]
    command += ["train", str(home / "tiny.toml"), "--corpus", str(home / "text.txt"), "--out", str(tmp_path / "run")]
    command += ["--set", f"train.device={DEVICE}", "--set", "model.dropout=0"]
    environment = with_source()
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert losses(tmp_path / "run") == pytest.approx(losses(alone), abs=1e-4)
