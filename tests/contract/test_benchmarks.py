"""The benchmarks run. What they measure is not looked at: that would be a test of the machine.

Those that take more than a few seconds are run by `make test-benchmarks` only.
"""

import json
import lzma
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.training.helpers import write_recipe, write_text
from transformer_xl.inference.reader import Reader
from transformer_xl.model.transformer_xl import TransformerXL
from transformer_xl.training.run import train

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
PEER_PYTHON = Path(os.environ.get("TXL_PEER_PYTHON", ROOT / ".venv-peer" / "bin" / "python"))


def run(script: str, *arguments: object, status: int = 0) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCHMARKS / script), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == status, done.stderr
    return done


SCRIPTS = [str(path.relative_to(BENCHMARKS)) for folder in ("", "gpu") for path in (BENCHMARKS / folder).glob("*.py")]


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


def test_readme_names_every_benchmark():
    readme = (BENCHMARKS / "README.md").read_text(encoding="utf-8")
    for script in SCRIPTS:
        assert f"## {script}" in readme


@pytest.mark.benchmarks
def test_memory(tmp_path):
    picture = tmp_path / "memory.png"
    done = run("memory.py", "--tiny", "--segments", 1, "--mem-lens", 0, 8, "--lengths", 2, "--plot", picture)
    assert done.stdout.count("above idle MB") == 4
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.benchmarks
def test_recall(tmp_path):
    arguments = ("--out", tmp_path, "--steps", 2, "--distances", 10, 40)
    done = run("recall.py", *arguments, "--sides", "delta", "plain")
    assert (tmp_path / "recall.png").read_bytes().startswith(b"\x89PNG")
    again = run("recall.py", *arguments, "--sides", "lstm")
    assert "delta" in done.stdout
    assert [line.split()[0] for line in again.stdout.splitlines()[-4:-1]] == ["delta", "plain", "lstm"]
    kept = {json.loads(file.read_text())["kept_bytes"] for file in tmp_path.glob("[dp]*.json")}
    assert max(kept) < 1.01 * min(kept)


@pytest.mark.benchmarks
def test_reading_time(tmp_path, monkeypatch):
    monkeypatch.setenv("TXL_CACHE", str(tmp_path / "cache"))
    recipe, text = write_recipe(tmp_path / "tiny.toml"), write_text(tmp_path / "text.txt")
    train(str(recipe), corpus=str(text), out=tmp_path / "run")
    sizes = ("--tokens", 90, "--tune-tokens", 40, "--training-tokens", 50)
    run("reading_time.py", tmp_path / "run", *sizes, "--json", tmp_path / "figures.json")
    rows = json.loads((tmp_path / "figures.json").read_text())
    assert [row["way"] for row in rows] == ["plain", "sgd", "rms", "cache", "rms and cache"]
    assert all(row["loss"] + row["gained"] == pytest.approx(rows[0]["loss"]) for row in rows)


@pytest.mark.benchmarks
def test_prepare_memory(tmp_path):
    done = run("prepare_memory.py", "--mb", 1, "--kind", "byte", "word", "--directory", tmp_path)
    kinds = [line.split()[0] for line in done.stdout.splitlines()[-2:]]
    assert kinds == ["byte", "word"]
    assert not list(tmp_path.iterdir()), "the temporary directory is left"


@pytest.mark.benchmarks
def test_large_corpus(tmp_path):
    done = run("large_corpus.py", "--mb", 25, "--directory", tmp_path)
    rows = [line.split() for line in done.stdout.splitlines()[-3:]]
    assert [row[1] for row in rows] == ["byte", "none", "documents"]
    assert len({tuple(row[-2:]) for row in rows}) == 1, "not all read the same text"
    assert all(float(row[3]) < 20 for row in rows[1:]), "reading keeps what it has read: 50 MB of ids in the end"
    assert not list(tmp_path.iterdir()), "the temporary directory is left"


@pytest.mark.benchmarks
def test_convert(tmp_path):
    done = run("convert.py", "--tiny", "--format", "bin", "safetensors", "--directory", tmp_path)
    assert [line.split()[0] for line in done.stdout.splitlines()[-2:]] == ["bin", "safetensors"]
    assert not list(tmp_path.iterdir()), "the temporary directory is left"


@pytest.mark.benchmarks
def test_large_vocabulary():
    point = json.loads(run("large_vocabulary.py", "--point", "adaptive, div_val 4", "score", 64, "chunks").stdout)
    assert point.keys() == {"seconds", "above_mb"}


@pytest.mark.parametrize("script", ["train_step.py", "xlnet.py", "decode.py", "evaluate.py"])
def test_without_peer_says_how_to_get_it(script, tmp_path):
    done = run(script, "--peer-python", tmp_path / "python", status=2)
    last = done.stderr.splitlines()[-1]
    assert str(tmp_path / "python") in last
    assert "make bench" in last


@pytest.mark.benchmarks
def test_train_step_has_parity_and_times(tmp_path):
    if not PEER_PYTHON.exists():
        pytest.skip(f"the peer's environment '{PEER_PYTHON}' does not exist; `make test-benchmarks` sets it up")
    figures = tmp_path / "figures.json"
    run("train_step.py", "--shape", "tiny", "--repeats", 2, "--peer-python", PEER_PYTHON, "--json", figures)
    result = json.loads(figures.read_text())["shapes"]["tiny"]
    sides = {"peer", "ours fp32", "ours auto", "Llama fp32", "Llama auto"}
    assert set(result["seconds"]) == set(result["memory_mb"]) == sides
    assert all(len(times) == 2 and min(times) > 0 for times in result["seconds"].values())
    assert result["parity"]["ours fp32"]["loss"] < 1e-5
    assert result["parity"]["ours fp32"]["gradient"] < 1e-4


@pytest.mark.benchmarks
def test_xlnet_has_parity_and_times(tmp_path):
    if not PEER_PYTHON.exists():
        pytest.skip(f"the peer's environment '{PEER_PYTHON}' does not exist; `make test-benchmarks` sets it up")
    figures = tmp_path / "figures.json"
    run("xlnet.py", "--shape", "tiny", "--repeats", 2, "--threads", 1, "--peer-python", PEER_PYTHON, "--json", figures)
    parts = json.loads(figures.read_text())["parts"]
    assert set(parts) == {"pretrain", "finetune", "document"}
    for part, result in parts.items():
        assert {"peer", "ours fp32", "ours auto"} <= set(result["seconds"]) == set(result["memory_mb"])
        assert all(len(times) == 2 and min(times) > 0 for times in result["seconds"].values())
        if part != "document":
            assert result["parity"]["ours fp32"]["loss"] < 1e-5
            assert result["parity"]["ours fp32"]["gradient"] < 1e-4


@pytest.mark.benchmarks
def test_decode_tries_out_everything(tmp_path):
    figures = tmp_path / "figures.json"
    arguments = ["--precisions", "fp32", "int8", "--tokens", 3, "--threads", 1]
    done = run("decode.py", "--quick", *arguments, "--json", figures)
    assert "NOT the peer" in done.stdout
    result = json.loads(figures.read_text())["shapes"]["tiny"]
    exact, rounded = result["modes"]["fp32 eager"], result["modes"]["int8 eager"]
    assert exact["parity"]["log_prob"] < 1e-5
    assert exact["parity"]["agree"] == 1.0
    assert rounded["parity"]["log_prob"] > 1e-3, "int8 is fp32"
    assert exact["rounds"].keys() == {"peer", "ours", "llama", "bandwidth"}
    assert rounded["rounds"].keys() == {"peer", "ours", "bandwidth"}
    assert all(len(values) == 2 and min(values) > 0 for values in exact["rounds"].values())
    assert exact["memory_mb"]["life"] >= exact["memory_mb"]["peak"] > exact["memory_mb"]["idle"]
    assert [found["precision"] for found in result["sessions"]] == ["fp32"]
    assert result["sessions"][0]["rounds"].keys() == {"1", "2", "4", "8", "16", "bandwidth"}


@pytest.mark.benchmarks
def test_evaluate_tries_out_everything(tmp_path):
    figures = tmp_path / "figures.json"
    done = run("evaluate.py", "--quick", "--segments", 3, "--threads", 1, "--json", figures)
    assert "NOT the peer" in done.stdout
    result = json.loads(figures.read_text())["shapes"]["tiny"]
    assert set(result["seconds"]) == {"peer", "ours fp32", "ours auto"}
    assert all(len(rounds) == 2 and {len(own) for own in rounds} == {3} for rounds in result["seconds"].values())
    assert result["parity"]["ours fp32"]["segment"] < 1e-5


def test_eval_speed(tmp_path):
    sizes = ("--lengths", 7, 12, "--tgt-len", 4, "--stride", 2, "--repeats", 2)
    recipe, files = write_recipe(tmp_path / "tiny.toml"), ("--plot", tmp_path / "a.png", "--json", tmp_path / "a.json")
    done = run("eval_speed.py", "--recipe", recipe, *sizes, *files)
    assert done.stdout.splitlines()[-3].split()[:4] == ["length", "vanilla", "ms", "ours"]
    result = json.loads((tmp_path / "a.json").read_text())
    for row in result["figures"]:
        own = result["seconds"][str(row["length"])]
        ratios = [theirs / ours for theirs, ours in zip(own["vanilla"], own["ours"], strict=True)]
        assert len(ratios) == 2 and row["min"] <= row["slowdown"] <= row["max"] == max(ratios)
    assert result["figures"][1]["operations"] > result["figures"][0]["operations"] > 1
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.benchmarks
def test_decode_and_evaluate_read_as_the_peer_does(tmp_path):
    if not PEER_PYTHON.exists():
        pytest.skip(f"the peer's environment '{PEER_PYTHON}' does not exist; `make test-benchmarks` sets it up")
    arguments = ["--shape", "tiny", "--repeats", 1, "--threads", 1, "--peer-python", PEER_PYTHON, "--json"]
    run("decode.py", "--parts", "one", "--precisions", "fp32", "--ways", "eager", *arguments, tmp_path / "decode.json")
    run("evaluate.py", *arguments, tmp_path / "evaluate.json")
    decode, score = (json.loads((tmp_path / f"{name}.json").read_text())["shapes"]["tiny"] for name in ("decode", "evaluate"))
    assert "TransfoXLLMHeadModel" in decode["peer"]["name"]
    assert decode["modes"]["fp32 eager"]["parity"]["log_prob"] < 1e-5
    assert score["parity"]["ours fp32"]["segment"] < 1e-5


@pytest.fixture
def reading_shapes(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    from common.reading_ours import config_of
    from common.reading_shapes import READING_SHAPES

    return [(shape, config_of(shape)) for shape in READING_SHAPES.values()]


def test_reading_shapes_count_the_weights_that_a_token_touches(reading_shapes):
    for shape, config in reading_shapes:
        with torch.device("meta"):
            parameters = dict(TransformerXL(config).named_parameters())
        touched = [p for name, p in parameters.items() if name.startswith("layers.") and "r_net" not in name]
        touched += [p for name, p in parameters.items() if name.endswith(("cluster_weight", "softmax.projections.0"))]
        head = shape.cutoffs[0] if shape.cutoffs else shape.vocab_size
        matrices = sum(p.numel() for p in touched if p.dim() == 2) + head * shape.d_model
        for precision, size in (("fp32", 4), ("bf16", 2), ("int8", 1)):
            assert shape.weight_bytes(precision) == size * matrices + 4 * shape.vectors()


def test_reading_shapes_count_the_memory_that_a_token_touches(reading_shapes):
    shape, config = reading_shapes[-1]
    model = TransformerXL(config)
    for precision in ("fp32", "bf16", "int8"):
        reader = Reader(model, tgt_len=4, precision=precision)
        per_slot = (reader.empty_memory(3).n_bytes / 3 - 16) / reader.n_slot  # without the counters of each row
        assert shape.memory_bytes(precision) == per_slot * shape.mem_len
        assert shape.position_bytes(precision) == per_slot * (shape.clamp_len + 1) / 2 == reader.n_bytes
        assert shape.token_bytes(precision, rows=3) - shape.token_bytes(precision) == 2 * per_slot * shape.mem_len


@pytest.mark.benchmarks
def test_gpu_decode_is_skipped_or_runs():
    arguments = ["--shape", "tiny", "--rows", 2, "--repeats", 1, "--tokens", 2]
    assert "skipped: " in run("gpu/decode.py", *arguments, "--device", "cuda:99").stdout
    lines = run("gpu/decode.py", *arguments, "--device", "cpu").stdout.splitlines()
    ways = [[precision, "2", way] for precision in ("fp32", "bf16") for way in ("eager", "graph")]
    assert [line.split()[:3] for line in lines[-4:]] == ways


@pytest.mark.benchmarks
def test_gpu_score_is_skipped_or_runs(tmp_path):
    figures = tmp_path / "figures.json"
    arguments = ["--shape", "tiny", "--rows", 1, 2, "--tgt-len", 5, "--segments", 3, "--repeats", 2]
    assert "skipped: " in run("gpu/score.py", *arguments, "--device", "cuda:99").stdout
    done = run("gpu/score.py", *arguments, "--device", "cpu", "--json", figures)
    lines = done.stdout.splitlines()
    begin = next(i for i, line in enumerate(lines) if "ms a segment" in line)
    expected = [["bf16", rows, way] for rows in ("1", "2") for way in ("graph", "eager")]
    assert [line.split()[:3] for line in lines[begin + 1 : begin + 5]] == expected
    assert lines[-1] == "nats are equal in all ways, to the last bit"
    found = json.loads(figures.read_text())["shapes"]["tiny"]
    for own in (*found["streams"], *found["texts"]):
        assert own["differs"] == 0
        assert all(len(seconds) == 2 and min(seconds) > 0 for seconds in own["seconds"].values())
    assert [own["n_token"] for own in found["texts"]] == [16]


@pytest.mark.benchmarks
def test_gpu_train_step_is_skipped_or_runs(tmp_path):
    figures = tmp_path / "figures.json"
    arguments = ["--shape", "tiny", "--ways", "eager", "graph", "--backends", "matmul", "sdpa"]
    arguments += ["--precisions", "fp32", "bf16", "--steps", 1, "--repeats", 2]
    assert run("gpu/train_step.py", *arguments, "--device", "cuda:99").stdout.startswith("skipped: no GPU")
    done = run("gpu/train_step.py", *arguments, "--device", "cpu", "--json", figures)
    why = "train.graph (on) cannot be: cpu has no CUDA graphs"
    assert f"fp32 matmul, graph; fp32 sdpa, graph; bf16 matmul, graph; bf16 sdpa, graph: {why}" in done.stdout
    shape = json.loads(figures.read_text())["shapes"]["tiny"]
    for found in shape["precisions"].values():
        assert found["flops"] > 0
        assert len(found["matmul_rate"]) == 2
        timed = {label: side["seconds"] for label, side in found["sides"].items() if "seconds" in side}
        assert set(timed) == {"matmul, eager", "sdpa, eager"}
        assert all(len(seconds) == 2 and min(seconds) > 0 for seconds in timed.values())


@pytest.mark.benchmarks
def test_gpu_train_step_says_what_a_peer_is(tmp_path):
    done = run("gpu/train_step.py", "--shape", "tiny", "--device", "cpu", "--peer", tmp_path / "mem_transformer.py", status=1)
    assert "it is mem_transformer.py, with utils/ beside it" in done.stderr


@pytest.mark.benchmarks
def test_attention(tmp_path):
    figures = tmp_path / "figures.json"
    run("attention.py", "--shape", "tiny", "--repeats", 2, "--threads", 1, "--device", "cpu", "--json", figures)
    fp32, bf16 = json.loads(figures.read_text())["results"]
    assert (fp32["dtype"], bf16["dtype"]) == ("fp32", "bf16")
    for name in ("equation", "matmul", "sdpa"):
        assert all(len(fp32["found"][name][way]["seconds"]) == 2 for way in ("forward", "with gradients"))


@pytest.mark.benchmarks
def test_processes_learn_what_one_does(tmp_path):
    figures = tmp_path / "figures.json"
    arguments = ["--shape", "tiny", "--precisions", "fp32", "--threads", 1, "--steps", 2, "--repeats", 2]
    done = run("processes.py", *arguments, "--json", figures)
    assert "2 with 1 thread each, against one with 2" in done.stdout
    found = json.loads(figures.read_text())["shapes"]["tiny"]["precisions"]["fp32"]
    assert set(found["seconds"]) == set(found["peak_mb"]) == {"one process", "ddp", "fsdp"}
    assert all(len(times) == 2 and min(times) > 0 for times in found["seconds"].values())
    assert set(found["loss_differs"]) == {"ddp", "fsdp"}
    assert max(found["loss_differs"].values()) < 1e-5


def test_processes_refuses_lanes_that_cannot_be_divided():
    done = run("processes.py", "--shape", "tiny", "--processes", 3, status=2)
    assert "--processes must divide the 2 lanes of shape tiny" in done.stderr


@pytest.mark.benchmarks
def test_generate(tmp_path):
    recipe, text = write_recipe(tmp_path / "tiny.toml"), write_text(tmp_path / "text.txt")
    train(str(recipe), corpus=str(text), out=tmp_path / "run")
    done = run("generate.py", tmp_path / "run", "--tokens", 5, "--calls", 1, "--no-compile")
    rows = [line.split() for line in done.stdout.splitlines() if "fp32, not compiled" in line]
    assert [row[0] for row in rows] == ["1"]


@pytest.mark.benchmarks
def test_serve():
    small = ["--tiny", "--repeats", 1, "--tokens", 2000, "--calls", 5, "--sessions", 40, "--minutes", 0.05]
    done = run("serve.py", *small, "--parts", "streams", "victim", "cancel", "overload", "sessions", "prefixes", "soak")
    assert "rows busy" in done.stdout and "0 of 100 came back with another text; 0 tokens were read again" in done.stdout
    assert done.stdout.splitlines()[-1].endswith(" calls of 12 clients, 0 errors")


@pytest.mark.benchmarks
def test_long_session():
    done = run("long_session.py", "--tiny", "--tokens", 200, "--no-compile", "--threads", 1)
    assert "(+0.00%)" in done.stdout
    assert [line.split()[0] for line in done.stdout.splitlines() if line.startswith(("20 ", "200 "))] == ["20", "200"]


@pytest.mark.benchmarks
def test_explain_page():
    done = run("explain_page.py", "--bytes", 2000)
    first, second = (line.split() for line in done.stdout.splitlines() if line.startswith(("1,000 ", "2,000 ")))
    assert float(second[2]) > float(first[2]) > 0


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
def test_pretraining_and_then_finetuning(tmp_path):
    if not PEER_PYTHON.exists():
        pytest.skip(f"the peer's environment '{PEER_PYTHON}' does not exist; `make test-benchmarks` sets it up")
    write_text(tmp_path / "text.txt")
    (tmp_path / "tiny.toml").write_text(TINY_XLNET)
    out, figures = tmp_path / "out", tmp_path / "figures.json"
    out.mkdir()
    (out / "speed.json").write_text('{"xlnet": 1.0, "masked": 2.0, "transformer_xl": 1.0}')
    arguments = ["--recipe", tmp_path / "tiny.toml", "--corpus", tmp_path / "text.txt", "--out", out, "--steps", 2]
    run("pretraining.py", *arguments, "--seeds", 2, "--ways", "xlnet", "masked", "--threads", 1, "--json", figures)
    found = json.loads(figures.read_text())
    assert found["steps"] == {"xlnet": 2, "masked": 4, "transformer_xl": 2}
    scored = {("xlnet", 0, 8), ("xlnet", 0, 0), ("masked", 0, 0), ("xlnet", 1, 8), ("xlnet", 1, 0), ("masked", 1, 0)}
    assert {(way, seed, memory) for way, seed, _, memory, _ in found["scores"]} == scored

    (tmp_path / "sst2").mkdir()
    for split in ("train", "dev", "test"):
        lines = [f"a{'b' * (i % 5)} {'ba' if i % 2 else 'ab'}\t{i % 2}" for i in range(40)]
        (tmp_path / "sst2" / f"{split}.tsv.xz").write_bytes(lzma.compress("\n".join(lines).encode()))
    arguments = ["--xlnet", out / "xlnet-{seed}", "--beside", f"masked={out}/masked-{{seed}}", "--data", tmp_path]
    arguments += ["--parts", "sst2", "--rates", "1e-3", "--seeds", 2, "--epochs", 1, "--threads", 1]
    done = run("finetuning.py", *arguments, "--peer-python", PEER_PYTHON, "--json", figures)
    found = json.loads(figures.read_text())["sst2"]
    assert found.keys() == {"XLNet, pretrained", "XLNet, random weights", "masked", "bag of words"}
    assert all(len(each["test"]) == 2 for who, each in found.items() if who != "bag of words"), done.stdout


@pytest.mark.benchmarks
def test_document_labels_are_learned_with_and_without_memory(tmp_path):
    figures = tmp_path / "figures.json"
    run("document_labels.py", "--documents", 4, "--epochs", 1, "--seeds", 1, "--json", figures)
    found = json.loads(figures.read_text())
    assert {kind: len(runs) for kind, runs in found.items()} == {"transformer_xl": 1, "xlnet": 1}
    assert all(0 <= share <= 1 for runs in found.values() for shares in runs for share in shares[:-1])


@pytest.mark.benchmarks
def test_race_tries_rates_and_goes_on(tmp_path):
    """Between sides that need no other library; tests/parity/test_rivals.py races all."""
    (tmp_path / "text.txt").write_text("".join(f"{i} is {i * i}; " for i in range(3000)))
    write_recipe(tmp_path / "tiny.toml")
    small = ["model.n_layer=1", "model.d_model=8", "train.batch_size=2", "train.tgt_len=5", "eval.max_tokens=50"]
    corpus, tiny = f"shakespeare={tmp_path / 'text.txt'}", f"shakespeare={tmp_path / 'tiny.toml'}"
    what = ["--out", tmp_path / "out", "--text", "shakespeare", "--corpus", corpus, "--sides", "ours", "--ours", tiny]
    how = ["--minutes", 0.001, "--lr", 0.01, 0.02, "--adamw-lr", 0.01, "--tokens", 100, "--set", *small, "--quiet"]
    done = run("race.py", *what, "--seeds", 1, *how)
    assert done.stdout.count(" *") == 2, "the best rates of both sides are marked"
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*") if path.suffix == ".safetensors"}
    done = run("race.py", *what, "--seeds", 2, *how)
    assert all(path.stat().st_mtime_ns == then for path, then in before.items()), "what is finished is not repeated"
    assert len(list((tmp_path / "out").rglob("without-memory/*.json"))) == 4
    rows = json.loads((tmp_path / "out" / "race.json").read_text())["rows"]
    assert {row["side"] for row in rows} == {"ours", "tiny"}
    for row in rows:
        assert len(row["nats"]) == len(row["nats_without_memory"]) == 2 and row["step_seconds"] > 0
        tried = (tmp_path / "out" / "shakespeare" / "rates" / row["side"] / "results").glob("*.json")
        least = min((json.loads(path.read_text()) for path in tried), key=lambda result: result["validation"]["loss"])
        assert least["variant"] == f"{row['side']}-{row['lr']:g}-{row['adamw_lr']:g}"
    assert (tmp_path / "out" / "race.png").read_bytes().startswith(b"\x89PNG")
    assert "±" in (tmp_path / "out" / "table.md").read_text()


def test_a_race_that_cannot_be_is_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(BENCHMARKS)
    for wrong, complaint in (
        (["--ours", "ours.toml"], "--ours 'ours.toml' would be called 'ours', as a side is; give it another name"),
        (["--corpus", "shakspeare=x"], "there is no text 'shakspeare'; the texts are shakespeare, enwik8, ptb"),
        (["--set", "train.nothing=1"], "train: unknown key 'nothing'"),
    ):
        monkeypatch.setattr(sys, "argv", ["race.py", "--out", str(tmp_path / "out"), "--text", "shakespeare", *wrong])
        with pytest.raises(SystemExit) as exit:
            runpy.run_path(str(BENCHMARKS / "race.py"), run_name="__main__")
        line = str(exit.value.code)
        assert line.startswith("race.py: error: ") and complaint in line and "\n" not in line
    assert capsys.readouterr().err == ""
    assert not (tmp_path / "out").exists()
