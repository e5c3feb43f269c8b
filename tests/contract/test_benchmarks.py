"""The benchmarks run. What they measure is not looked at: that would be a test of the machine.

Those that take more than a few seconds are run by `make test-benchmarks` only.
"""

import json
import lzma
import os
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.training.helpers import write_recipe, write_text
from transformer_xl.inference.reader import Reader
from transformer_xl.model.transformer_xl import TransformerXL
from transformer_xl.training.run import train

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
PEER_PYTHON = Path(os.environ.get("TXL_PEER_PYTHON", ROOT / ".venv-peer" / "bin" / "python"))
SCRIPTS = [str(path.relative_to(BENCHMARKS)) for folder in ("", "gpu") for path in (BENCHMARKS / folder).glob("*.py")]
PEER = ["--peer-python", PEER_PYTHON]

needs_peer = pytest.mark.skipif(not PEER_PYTHON.exists(), reason=f"{PEER_PYTHON} is missing; `make test-benchmarks` makes it")


def run(script: str, *arguments: object, status: int = 0) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCHMARKS / script), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == status, done.stderr
    return done


@pytest.fixture
def measured(tmp_path):
    """A function that runs a benchmark and returns its figures; each of their times was taken."""

    def measured(script: str, *arguments: object) -> Any:
        run(script, *arguments, "--threads", 1, "--json", tmp_path / "figures.json")
        results = json.loads((tmp_path / "figures.json").read_text())["results"]
        times = list(times_of(results))
        assert min(times, default=1.0) > 0
        return results

    return measured


def times_of(figures: Any) -> Iterator[float]:
    """Yield all numbers below the key "seconds"."""
    if isinstance(figures, list):
        figures = dict(enumerate(figures))
    for key, value in figures.items() if isinstance(figures, dict) else ():
        if key == "seconds":
            yield from numbers(value)
        else:
            yield from times_of(value)


def numbers(value: Any) -> Iterator[float]:
    if isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from numbers(each)
    else:
        yield value


def test_each_says_how_it_is_used():
    """All in one process, where torch is imported once."""
    code = (
        "import runpy, sys\n"
        "paths = sys.path[1:]\n"
        "for script in sys.argv[1:]:\n"
        "    sys.argv, sys.path[:] = [script, '--help'], [script.rpartition('/')[0], *paths]\n"
        "    for name in [name for name in sys.modules if name.partition('.')[0] == 'common']:\n"
        "        del sys.modules[name]  # each must find its own\n"
        "    print('#', script, flush=True)\n"
        "    try:\n"
        "        runpy.run_path(script, run_name='__main__')\n"
        "    except SystemExit as exit:\n"
        "        assert not exit.code, exit.code\n"
    )
    paths = [str(BENCHMARKS / script) for script in SCRIPTS]
    done = subprocess.run([sys.executable, "-c", code, *paths], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    for script, said in zip(paths, done.stdout.split("# ")[1:], strict=True):
        assert said.startswith(f"{script}\nusage"), said


def test_readme_and_make_name_every_benchmark():
    readme, make = (BENCHMARKS / "README.md").read_text(encoding="utf-8"), (ROOT / "Makefile").read_text(encoding="utf-8")
    for script in SCRIPTS:
        assert f"`{script}`" in readme
        assert f"benchmarks/{script}" in make or script == "finetuning.py", "it needs a trained run"


def test_without_peer_says_how_to_get_it(tmp_path):
    last = run("train_step.py", "--peer-python", tmp_path / "python", status=2).stderr.splitlines()[-1]
    assert str(tmp_path / "python") in last and "make bench" in last


@pytest.mark.benchmarks
def test_what_cannot_be_is_refused(tmp_path):
    assert "--processes must divide the 2 lanes" in run("processes.py", "--shape", "tiny", "--processes", 3, status=2).stderr
    assert "--repeats must be at least 1" in run("eval_speed.py", "--repeats", 0, status=2).stderr
    peer = ["--device", "cpu", "--peer", tmp_path / "mem_transformer.py"]
    assert "it is mem_transformer.py, with utils/ beside it" in run("gpu/train_step.py", *peer, status=1).stderr


@pytest.mark.benchmarks
@needs_peer
def test_train_step_has_parity_and_times(measured):
    result = measured("train_step.py", "--shape", "tiny", "--repeats", 2, *PEER)["tiny"]
    sides = {"peer", "ours fp32", "ours auto", "Llama fp32", "Llama auto"}
    assert set(result["seconds"]) == set(result["memory_mb"]) == sides
    assert all(len(times) == 2 for times in result["seconds"].values())
    assert result["parity"]["ours fp32"]["loss"] < 1e-5
    assert result["parity"]["ours fp32"]["gradient"] < 1e-4


@pytest.mark.benchmarks
@needs_peer
def test_xlnet_has_parity_and_times(measured):
    parts = measured("xlnet.py", "--shape", "tiny", "--repeats", 2, *PEER)
    assert set(parts) == {"pretrain", "finetune"}
    for result in parts.values():
        assert {"peer", "ours fp32", "ours auto"} <= set(result["seconds"]) == set(result["memory_mb"])
        assert result["parity"]["ours fp32"]["loss"] < 1e-5
        assert result["parity"]["ours fp32"]["gradient"] < 1e-4


@pytest.mark.benchmarks
@needs_peer
def test_decode_reads_as_the_peer_does(measured):
    how = ["--precisions", "fp32", "int8", "--ways", "eager", "--tokens", 3, "--repeats", 2]
    result = measured("decode.py", "--shape", "tiny", *how, *PEER)["tiny"]
    exact, rounded = result["modes"]["fp32 eager"], result["modes"]["int8 eager"]
    assert exact["parity"]["log_prob"] < 1e-5 and exact["parity"]["agree"] == 1.0
    assert rounded["parity"]["log_prob"] > 1e-3, "int8 is fp32"
    assert exact["rounds"].keys() == {"peer", "ours", "llama", "bandwidth"}
    assert rounded["rounds"].keys() == {"peer", "ours", "bandwidth"}
    assert all(len(values) == 2 and min(values) > 0 for values in exact["rounds"].values())
    assert exact["memory_mb"]["life"] >= exact["memory_mb"]["peak"] > exact["memory_mb"]["idle"]
    assert [found["precision"] for found in result["sessions"]] == ["fp32"]
    assert result["sessions"][0]["rounds"].keys() == {"1", "2", "4", "8", "16", "bandwidth"}


@pytest.mark.benchmarks
@needs_peer
def test_evaluate_reads_as_the_peer_does(measured):
    result = measured("evaluate.py", "--shape", "tiny", "--segments", 3, "--repeats", 2, *PEER)["tiny"]
    assert {who: len(times) for who, times in result["seconds"].items()} == {"peer": 2, "ours fp32": 2, "ours auto": 2}
    assert result["parity"]["ours fp32"]["segment"] < 1e-5


def test_eval_speed(measured, tmp_path):
    sizes = ("--lengths", 7, 12, "--tgt-len", 4, "--stride", 2, "--repeats", 2, "--plot", tmp_path / "a.png")
    recipe = write_recipe(tmp_path / "tiny.toml")
    (result,) = measured("eval_speed.py", "--recipe", recipe, *sizes).values()
    for row in result["figures"]:
        own = result["seconds"][str(row["length"])]
        ratios = [theirs / ours for theirs, ours in zip(own["vanilla"], own["ours"], strict=True)]
        assert len(ratios) == 2 and row["min"] <= row["slowdown"] <= row["max"] == max(ratios)
    assert result["figures"][1]["operations"] > result["figures"][0]["operations"] > 1
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.benchmarks
def test_memory(measured, tmp_path):
    picture = tmp_path / "memory.png"
    sweeps = measured("memory.py", "--tiny", "--segments", 1, "--mem-lens", 0, 8, "--lengths", 2, "--plot", picture)["memory"]
    assert [len(results) for _, results in sweeps] == [2, 2, 1, 1]
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.benchmarks
def test_corpus(measured, tmp_path):
    found = measured("corpus.py", "--mb", 25, "--kind", "byte", "--directory", tmp_path)
    assert [own["kind"] for own in found["prepare"]] == ["byte"]
    assert [own["shuffle"] for own in found["stream"]] == ["none", "documents"]
    assert len({own["tokens"] for own in found["stream"]}) == 1, "not all read the same text"
    grown = [own["peak_mb"] - own["start_mb"] for own in found["stream"]]
    assert max(grown) < 20, "reading keeps what it has read: 50 MB of ids in the end"
    assert {path.name for path in tmp_path.iterdir()} == {"figures.json"}, "the temporary directory is left"


@pytest.mark.benchmarks
def test_convert(measured, tmp_path):
    found = measured("convert.py", "--tiny", "--format", "bin", "safetensors", "--directory", tmp_path)
    assert set(found) == {"bin", "safetensors"}
    assert {path.name for path in tmp_path.iterdir()} == {"figures.json"}, "the temporary directory is left"


@pytest.mark.benchmarks
def test_large_vocabulary(measured):
    (found,) = measured("large_vocabulary.py", "--softmax", "adaptive, div_val 4", "--tokens", 64, "--limit", 1).values()
    assert [(own["task"], own["way"]) for own in found] == [("score", "chunks"), ("train", "chunks")]


@pytest.fixture
def reading_shapes(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    from common.shapes import READING_SHAPES

    return list(READING_SHAPES.values())


def test_reading_shapes_count_the_weights_that_a_token_touches(reading_shapes):
    for shape in reading_shapes:
        with torch.device("meta"):
            parameters = dict(TransformerXL(shape.sizes.config()).named_parameters())
        touched = [p for name, p in parameters.items() if name.startswith("layers.") and "r_net" not in name]
        touched += [p for name, p in parameters.items() if name.endswith(("cluster_weight", "softmax.projections.0"))]
        head = shape.sizes.cutoffs[0] if shape.sizes.cutoffs else shape.sizes.vocab_size
        matrices = sum(p.numel() for p in touched if p.dim() == 2) + head * shape.sizes.d_model
        for precision, size in (("fp32", 4), ("bf16", 2), ("int8", 1)):
            assert shape.weight_bytes(precision) == size * matrices + 4 * shape.vectors()


def test_reading_shapes_count_the_memory_that_a_token_touches(reading_shapes):
    shape = reading_shapes[-1]
    model = TransformerXL(shape.sizes.config())
    for precision in ("fp32", "bf16", "int8"):
        reader = Reader(model, tgt_len=4, precision=precision)
        per_slot = (reader.empty_memory(3).n_bytes / 3 - 16) / reader.n_slot  # without the counters of each row
        assert shape.memory_bytes(precision) == per_slot * shape.sizes.mem_len
        assert shape.position_bytes(precision) == per_slot * (shape.sizes.clamp_len + 1) / 2 == reader.n_bytes
        assert shape.token_bytes(precision, rows=3) - shape.token_bytes(precision) == 2 * per_slot * shape.sizes.mem_len


@pytest.mark.benchmarks
def test_gpu_decode(measured):
    found = measured("gpu/decode.py", "--shape", "tiny", "--rows", 2, "--repeats", 1, "--tokens", 2, "--device", "cpu")["tiny"]
    ways = [(precision, 2, way) for precision in ("fp32", "bf16") for way in ("eager", "graph")]
    assert [(own["precision"], own["rows"], own["way"]) for own in found] == ways


@pytest.mark.benchmarks
def test_gpu_score(measured):
    sizes = ["--shape", "tiny", "--rows", 1, 2, "--tgt-len", 5, "--segments", 3, "--repeats", 2]
    found = measured("gpu/score.py", *sizes, "--device", "cpu")["tiny"]
    assert [own["rows"] for own in found["streams"]] == [1, 2]
    assert [own["n_token"] for own in found["texts"]] == [16]
    for own in (*found["streams"], *found["texts"]):
        assert own["differs"] == 0
        assert {way: len(seconds) for way, seconds in own["seconds"].items()} == {"graph": 2, "eager": 2}


@pytest.mark.benchmarks
def test_gpu_train_step(measured):
    how = ["--shape", "tiny", "--ways", "eager", "graph", "--backends", "matmul", "sdpa", "--precisions", "fp32", "bf16"]
    found = measured("gpu/train_step.py", *how, "--steps", 1, "--repeats", 2, "--device", "cpu")["tiny"]["precisions"]
    assert set(found) == {"fp32", "bf16"}
    for own in found.values():
        assert own["flops"] > 0 and len(own["matmul_rate"]) == 2
        assert {label for label, side in own["sides"].items() if "seconds" in side} == {"matmul, eager", "sdpa, eager"}
        assert own["sides"]["sdpa, graph"]["failure"].startswith("train.graph (on) cannot be: cpu has no CUDA graphs")


@pytest.mark.benchmarks
@pytest.mark.parametrize("script", ["gpu/decode.py", "gpu/score.py", "gpu/train_step.py", "attention.py"])
def test_without_a_gpu_they_say_so(script):
    assert "skipped: " in run(script, "--device", "cuda:99").stdout


@pytest.mark.benchmarks
def test_attention(measured):
    fp32, bf16 = measured("attention.py", "--shape", "tiny", "--repeats", 2, "--device", "cpu")["tiny"]
    assert (fp32["dtype"], bf16["dtype"]) == ("fp32", "bf16")
    for name in ("equation", "matmul", "sdpa"):
        assert all(len(fp32["found"][name][way]["seconds"]) == 2 for way in ("forward", "with gradients"))


@pytest.mark.benchmarks
def test_processes_learn_what_one_does(measured):
    found = measured("processes.py", "--shape", "tiny", "--precisions", "fp32", "--steps", 2, "--repeats", 2)["tiny"]["fp32"]
    assert set(found["seconds"]) == set(found["peak_mb"]) == {"one process", "ddp", "fsdp"}
    assert set(found["loss_differs"]) == {"ddp", "fsdp"}
    assert max(found["loss_differs"].values()) < 1e-5


@pytest.mark.benchmarks
def test_serve(measured):
    small = ["--tiny", "--repeats", 1, "--tokens", 2000, "--sessions", 40, "--minutes", 0.05]
    found = measured("serve.py", *small, "--parts", "streams", "victim", "sessions", "prefixes", "soak")
    assert found["sessions"]["wrong"] == found["sessions"]["read_again"] == 0
    assert found["soak"]["errors"] == [] and sum(found["soak"]["calls"].values()) > 0


@pytest.mark.benchmarks
def test_long_session():
    done = run("long_session.py", "--tiny", "--tokens", 200, "--no-compile", "--threads", 1)
    assert "(+0.00%)" in done.stdout
    assert [line.split()[0] for line in done.stdout.splitlines() if line.startswith(("20 ", "200 "))] == ["20", "200"]


TINY_XLNET = """
[model]
kind = "xlnet"
n_layer = 1
d_model = 8
n_head = 1
d_head = 8
d_inner = 8
mem_len = 8

[tokenizer]
kind = "unigram"
vocab_size = 40
normalization = "xlnet"

[train]
batch_size = 2
tgt_len = 16
max_steps = 4
precision = "fp32"
sample_tokens = 0
"""


@pytest.mark.benchmarks
@needs_peer
def test_finetuning(measured, tmp_path):
    (tmp_path / "tiny.toml").write_text(TINY_XLNET)
    train(str(tmp_path / "tiny.toml"), corpus=str(write_text(tmp_path / "text.txt")), out=tmp_path / "run-0")
    (tmp_path / "run-1").symlink_to(tmp_path / "run-0")
    for split in ("train", "dev", "test"):
        lines = [f"a{'b' * (i % 5)} {'ba' if i % 2 else 'ab'}\t{i % 2}" for i in range(40)]
        (tmp_path / f"{split}.tsv.xz").write_bytes(lzma.compress("\n".join(lines).encode()))
    how = ["--rates", "1e-3", "--seeds", 2, "--epochs", 1, *PEER]
    (found,) = measured("finetuning.py", "--xlnet", tmp_path / "run-{seed}", "--data", tmp_path, *how).values()
    assert found.keys() == {"pretrained", "random weights", "bag of words"}
    assert len(found["pretrained"]["test"]) == len(found["random weights"]["test"]) == 2


@pytest.mark.benchmarks
def test_attribution(measured, tmp_path):
    run_on = ["--set", "train.max_steps=2", "--set", "train.max_minutes=none", "--tokens", 2]
    text, missing = write_text(tmp_path / "text.txt", 9000), tmp_path / "missing.txt"
    found = measured("attribution.py", "--corpora", text, missing, *run_on)
    assert found[str(missing)] is None
    assert found[str(text)].keys() > {"gradient", "integrated", "attention", "state"}


@pytest.mark.benchmarks
def test_document_labels_are_learned_with_and_without_memory(measured):
    found = measured("document_labels.py", "--documents", 4, "--epochs", 1, "--seeds", 1)
    assert {kind: len(runs) for kind, runs in found.items()} == {"transformer_xl": 1, "xlnet": 1}
    assert all(0 <= share <= 1 for runs in found.values() for *shares, _ in runs for share in shares)


@pytest.fixture
def small_race(tmp_path):
    """A function that races an LSTM, which needs no other library, alone; tests/parity/test_rivals.py races all sides."""
    (tmp_path / "text.txt").write_text("".join(f"{i} is {i * i}; " for i in range(3000)))
    small = ["model.n_layer=2", "model.d_model=64", "train.batch_size=2", "train.tgt_len=8", "eval.max_tokens=50"]
    options = ["--out", tmp_path / "out", "--corpus", tmp_path / "text.txt", "--text", "enwik8", "--minutes", 0.001, 0.002]
    options += ["--sides", "lstm", "--rounds", 1, "--tokens", 100]

    def race(*arguments: object) -> Path:
        run("race.py", *options, "--set", *small, "--quiet", *arguments)
        return tmp_path / "out"

    return race


@pytest.mark.benchmarks
def test_race_chooses_on_validation_and_goes_on(small_race):
    out = small_race("--parts", "pace", "grid")
    choices = json.loads((out / "choices.json").read_text())["enwik8"]
    assert not list(out.rglob("seed*.json")), "a test part was scored"
    for minutes, n_trial in (("0.001", 8), ("0.002", 3)):
        files = (out / "enwik8" / "grid" / f"{minutes}min" / "lstm").glob("*.json")
        trials = [json.loads(file.read_text()) for file in files]
        assert len(trials) == n_trial and all("nats" not in trial for trial in trials)
        least = min(trials, key=lambda trial: trial["validation"])
        assert choices[minutes]["lstm"] == {key: least[key] for key in ("model", "optim")}
    small_race("--parts", "race", "--seeds", 1)
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*.safetensors")}
    small_race("--seeds", 2)
    assert all(path.stat().st_mtime_ns == then for path, then in before.items()), "what is finished is not repeated"
    rows = json.loads((out / "race.json").read_text())["rows"]
    assert {(row["side"], row["minutes"]) for row in rows} == {("lstm", 0.001), ("lstm", 0.002)}
    for row in rows:
        assert len(row["nats"]) == len(row["nats_without_memory"]) == 2 and row["step_seconds"] > 0
        assert {key: row[key] for key in ("model", "optim")} == choices[f"{row['minutes']:g}"][row["side"]]
    assert (out / "race.png").read_bytes().startswith(b"\x89PNG")
    assert "±" in (out / "table.md").read_text()


def test_a_race_that_cannot_be_is_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(BENCHMARKS)
    for wrong, complaint in (
        ([], "its validation and test are one text; --corpus shakespeare=input.txt divides the last tenth"),
        (["--corpus", "shakspeare=x"], "there is no text 'shakspeare'; the texts are shakespeare, enwik8, ptb, poems"),
        (["--set", "train.nothing=1"], "train: unknown key 'nothing'"),
    ):
        monkeypatch.setattr(sys, "argv", ["race.py", "--out", str(tmp_path / "out"), "--text", "shakespeare", *wrong])
        with pytest.raises(SystemExit) as exit:
            runpy.run_path(str(BENCHMARKS / "race.py"), run_name="__main__")
        line = str(exit.value.code)
        assert line.startswith("race.py: error: ") and complaint in line and "\n" not in line
    assert capsys.readouterr().err == ""
    assert not (tmp_path / "out").exists()
