"""`txl` as a person and a script use it."""

import errno
import gzip
import json
import math
import shlex
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from rich.console import Console

from tests.cli.command_lines import commands
from tests.cli.conftest import Txl, save
from tests.helpers import TINY
from transformer_xl.checkpoint.run_directory import load
from transformer_xl.cli import app, main
from transformer_xl.config.model import HeadConfig, TransformerXLConfig
from transformer_xl.data.text import Text, beginning
from transformer_xl.generation.sampling import NUMBERS
from transformer_xl.model.build import make_model
from transformer_xl.tokenizers.kinds import ByteTokenizer
from transformer_xl.training.trainer import Trainer
from transformer_xl.version import __version__


def test_train_says_what_it_does_and_what_comes_next(txl: Txl, workbench: Path) -> None:
    answer = txl("train", "tiny.toml", "--corpus", "text.txt", "--out", "new", "--set", "train.max_steps=8")
    assert answer.status == 0
    assert answer.out == ""
    lines = answer.err.splitlines()
    assert lines[0].startswith("tiny: ")
    assert "parameters, vocabulary 256 (byte)" in lines[0]
    assert lines[1] == "fp32 on cpu: as set; run directory new"
    assert any(line.startswith("100% · step 8 · loss 5.") for line in lines)
    assert any(line.startswith("step 8: validation 5.") for line in lines)
    assert lines[-2:] == ["loss curve: new/loss.png", "next: txl eval new    txl generate new --prompt TEXT"]
    config = json.loads((workbench / "new" / "config.json").read_text())
    assert config["data"]["corpus"] == str(workbench / "text.txt")  # absolute, so that it resumes from anywhere
    quiet = txl("train", "--resume", "--out", "new", "--set", "train.max_steps=9", "--quiet")
    assert (quiet.status, quiet.out, quiet.err) == (0, "", "")


@pytest.mark.parametrize(
    ("text", "name"),
    [("text.txt", "text"), ("../work/my books/text.txt.gz", "text"), ("my books", "my books"), ("my*/*", "work")],
)
def test_a_text_in_place_of_a_recipe_is_trained_on(txl: Txl, workbench: Path, text: str, name: str) -> None:
    (workbench / "my books").mkdir()
    (workbench / "my books" / "text.txt.gz").write_bytes(gzip.compress((workbench / "text.txt").read_bytes()))
    small = (
        "model.n_layer=1 model.d_model=8 model.d_inner=8 model.mem_len=4 train.batch_size=2 train.tgt_len=4 train.max_steps=1"
    )
    answer = txl("train", text, *(f"--set={setting}" for setting in small.split()))
    assert answer.status == 0, answer.err
    first, *_, last = answer.err.splitlines()
    given = shlex.quote(text)
    assert first == f"training on {text} with the recipe quickstart; txl train RECIPE --corpus {given} takes another"
    where = shlex.quote(f"runs/{name}")
    assert last == f"next: txl eval {where}    txl generate {where} --prompt TEXT"
    config = json.loads((workbench / "runs" / name / "config.json").read_text())
    assert (config["name"], config["data"]["corpus"]) == ("quickstart", str(Path(text).absolute()))


def test_training_says_what_is_not_scored(txl: Txl) -> None:
    options = ("--corpus", "text.txt", "--set", "train.max_steps=2", "--set", "tokenizer.kind=word")
    trained = txl("train", "tiny.toml", "--out", "new", *options).err.splitlines()
    (note,) = [line.strip() for line in txl("eval", "new").out.splitlines() if "Not scored" in line]
    assert note in trained
    assert "same vocabulary only" in note


UNDIVIDED = {
    "Chinese": "话说天下大势，分久必合，合久必分；第{}回便从这里讲起。\n",
    "Japanese": "吾輩は猫である。名前はまだ無い。これは{}番目の行である。\n",
    "Thai": "มนุษย์ทั้งหลายเกิดมามีอิสระและเสมอภาคกันในเกียรติศักดิ์ ต่างมีเหตุผลและมโนธรรมข้อที่{}\n",
}


@pytest.mark.parametrize("language", UNDIVIDED)
def test_words_that_are_lines_are_no_words(language: str, txl: Txl, workbench: Path) -> None:
    """Training, preparing, scoring and explaining say so, and none gives bits per character of lines learned by heart."""
    (workbench / "undivided.txt").write_text("".join(UNDIVIDED[language].format(n) for n in range(300)), encoding="utf-8")
    options = ("--corpus", "undivided.txt", "--set", "train.max_steps=2", "--set", "tokenizer.kind=word")
    outputs = [txl("train", "tiny.toml", "--quiet", "--out", "new", *options)]  # a warning all the same
    outputs += [txl("eval", "new", "--compare-memory"), txl("corpus", "prepare", "undivided.txt", "--tokenizer", "word")]
    for output in outputs:
        assert "words of this vocabulary are whole lines" in output.out + output.err
        assert "tokenizer.kind=char, unigram or byte" in output.out + output.err
    outputs += [txl("explain", "new", "undivided.txt"), txl("info", "new")]
    assert [output.status for output in outputs] == [0] * 5
    assert not any("per character" in output.out + output.err or "byte\n" in output.out for output in outputs)
    assert "bits per word" in outputs[1].out and "bits per word" in outputs[3].out
    for command in (("eval", "new", "--compare-memory"), ("explain", "new", "undivided.txt")):
        score = json.loads(txl(*command, "--json").out)
        values = {**score, **score.get("without_memory", {}), **{f"{name} of all": score[name] for name in score}}
        assert {value for name, value in values.items() if "bpc" in name or "n_characters" in name} == {None}
        assert score["nats"] > 0 and score.get("without_memory", score)["nats"] > 0
    final = [json.loads(line) for line in (workbench / "new" / "metrics.jsonl").read_text().splitlines()][-1]
    assert (final["kind"], final["bpc"], final["characters"]) == ("final", None, None)


def test_words_of_a_divided_text_are_words(txl: Txl, workbench: Path) -> None:
    (workbench / "divided.txt").write_text("话 说 天下 大势 ， 分 久 必 合 ， 合 久 必 分 。\n" * 300, encoding="utf-8")
    options = ("--corpus", "divided.txt", "--set", "train.max_steps=2", "--set", "tokenizer.kind=word")
    trained = txl("train", "tiny.toml", "--out", "new", *options).err
    assert "whole lines" not in trained and "bits per character" in trained
    final = [json.loads(line) for line in (workbench / "new" / "metrics.jsonl").read_text().splitlines()][-1]
    assert final["bpc"] == pytest.approx(final["loss"] * final["scored"] / final["characters"] / math.log(2))


def test_eval_prints_every_unit_and_its_progress_unless_quiet(txl: Txl, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = txl("eval", "run")
    assert (answer.status, answer.err) == (0, "")
    first, *others = answer.out.splitlines()
    assert first.startswith("test split of ")
    assert [line.split()[0] for line in others] == ["loss", "ppl", "bpc", "bpb", "nats"]
    monkeypatch.setattr("transformer_xl.console.LINE_SECONDS", 0.0)
    assert "scoring: 100% · " in txl("eval", "run").err
    assert (txl("eval", "run", "--quiet").err, "bits per character" in answer.out) == ("", True)


def test_eval_json_is_json_and_consistent(txl: Txl) -> None:
    answer = txl("eval", "run", "--json", "--compare-memory", "--precision", "fp32")
    score = json.loads(answer.out)
    assert score["nats"] == pytest.approx(score["loss"] * score["tokens"])
    assert score["bpc"] == pytest.approx(score["nats"] / score["n_characters"] / math.log(2))
    assert score["bpb"] == pytest.approx(score["nats"] / score["n_bytes"] / math.log(2))
    assert score["ppl"] == pytest.approx(math.exp(score["loss"]))
    assert score["n_bytes"] == score["tokens"] > score["n_characters"]  # a byte model of a text that is not all ASCII
    without = json.loads(txl("eval", "run", "--json", "--mem-len", "0", "--precision", "fp32").out)
    assert score["without_memory"]["nats"] == pytest.approx(without["nats"], abs=1e-6)
    assert without["nats"] != pytest.approx(score["nats"], abs=1e-6)


def test_eval_of_a_split_is_what_training_said(txl: Txl, workbench: Path) -> None:
    final = json.loads((workbench / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    score = json.loads(txl("eval", "run", "--split", "valid", "--json", "--checkpoint", "last", "--precision", "fp32").out)
    assert score["loss"] == pytest.approx(final["loss"], abs=1e-6)


def test_one_process_makes_no_copy_of_a_split(txl: Txl, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be larger than memory, and there is nobody to compare its hash with."""

    class Mapped(np.ndarray):
        def tobytes(self, *_: object, **__: object) -> bytes:
            raise AssertionError("the whole split is copied")

    def mapped(*arguments: Any, **options: Any) -> Text:
        text = beginning(*arguments, **options)
        return replace(text, ids=text.ids.view(Mapped))

    monkeypatch.setattr("transformer_xl.data.text.beginning", mapped)
    monkeypatch.setattr(Text, "digest", None)
    assert txl("eval", "run").status == 0


def test_eval_options_reach_the_reader(txl: Txl) -> None:
    def nats(*options: str) -> float:
        return json.loads(txl("eval", "run", "--json", "--precision", "fp32", *options).out)["nats"]

    same = nats("--same-length", "--mem-len", "9")
    for options in (("--tgt-len", "3"), ("--batch-size", "1"), ("--tgt-len", "50", "--batch-size", "5")):
        assert nats("--same-length", "--mem-len", "9", *options) == pytest.approx(same, abs=1e-3)
    assert nats("--same-length", "--mem-len", "2") != pytest.approx(same, abs=1e-3)
    assert nats("--clamp-len", "1") != pytest.approx(nats(), abs=1e-6)
    assert nats("--ext-len", "3", "--tgt-len", "4") != pytest.approx(nats("--tgt-len", "4"), abs=1e-6)


def test_eval_says_what_reading_time_buys(txl: Txl, workbench: Path) -> None:
    def score(*options: str) -> dict[str, Any]:
        return json.loads(txl("eval", "run", "--json", "--precision", "fp32", "--batch-size", "1", *options).out)

    before = {path: path.read_bytes() for path in (workbench / "run").rglob("*.safetensors")}
    plain, both = score(), score("--dynamic", "sgd", "--dynamic-lr", "0.02", "--cache", "30")
    assert both["plain"]["nats"] == plain["nats"]
    assert both["dynamic"] == {"rule": "sgd", "lr": 0.02, "decay": 0.0}
    assert both["cache"] == {"size": 30, "weight": 0.1, "theta": 5.0}
    cached, rms = score("--cache", "30"), score("--dynamic", "rms", "--dynamic-decay", "0.1")
    assert (cached["dynamic"], rms["cache"]) == (None, None)
    assert (rms["dynamic"]["rule"], rms["dynamic"]["decay"]) == ("rms", 0.1)
    assert len({each["nats"] for each in (plain, both, cached, rms)}) == 4
    assert both["nats"] == score("--dynamic", "sgd", "--dynamic-lr", "0.02", "--cache", "30")["nats"]
    said = txl("eval", "run", "--precision", "fp32", "--dynamic", "sgd", "--dynamic-lr", "0.02", "--cache", "30").out
    for figure in ("lr 0.02", "size 30", f"{plain['loss']:.4f}", f"{both['loss']:.4f}", f"{plain['loss'] - both['loss']:z.4f}"):
        assert figure in said
    assert {path: path.read_bytes() for path in before} == before


def test_a_model_without_a_corpus_learns_and_chooses_nothing_there(txl: Txl, workbench: Path) -> None:
    save(*load("run"), "exported")
    for options in ("--dynamic rms", "--temperature auto"):
        refused = txl("eval", "exported", "--file", "text.txt", *options.split()).complaint
        assert "'exported' is a model without one; use --dynamic sgd, or give a number" in refused


@pytest.mark.parametrize(
    "line",
    [
        "eval run --temperature warm",
        "generate run --top-k many",
        f"generate run --top-k {'9' * 5000}",
        "eval run --quiet=perhaps",
        "eval run --split tset",
        "train text.txt quickstart",
    ],
)
def test_a_value_of_another_type_and_an_argument_too_many_are_refused(txl: Txl, line: str) -> None:
    answer = txl(*line.split())
    command, *_, wrong = line.replace("=", " ").split()
    assert answer.status == 2
    assert wrong[:9] in answer.complaint and answer.complaint.endswith(f"See txl {command} --help.")


def test_eval_divides_scores_by_a_temperature(txl: Txl, home: Path) -> None:
    def score(*options: str) -> dict[str, Any]:
        return json.loads(txl("eval", "run", "--json", "--precision", "fp32", *options).out)

    plain, given, best = score(), score("--temperature", "1.25"), score("--temperature", "auto")
    assert "temperature" not in plain
    assert (given["temperature"], given["temperature_chosen_on"]) == (1.25, None)
    assert best["temperature_chosen_on"] == f"valid split of {home / 'text.txt'}"
    for each in (given, best):
        assert each["plain"]["loss"] == pytest.approx(plain["loss"], abs=1e-6)
        assert each["loss"] != each["plain"]["loss"]
    of_valid = {t: score("--split", "valid", "--temperature", f"{t}")["loss"] for t in (0.9, best["temperature"], 1.1)}
    assert min(of_valid, key=of_valid.__getitem__) == best["temperature"]
    said = txl("eval", "run", "--precision", "fp32", "--temperature", "auto", "--compare-memory").out
    without = score("--temperature", f"{best['temperature']}", "--mem-len", "0")["loss"]
    for figure in (
        f"{best['temperature']:g}",
        f"{plain['loss'] - best['loss']:z.4f}",
        f"({without - best['loss']:z.4f} nats per",
    ):
        assert figure in said


def test_eval_of_a_file_counts_all_its_tokens(txl: Txl, workbench: Path) -> None:
    (workbench / "other.txt").write_text("ein anderer Text — ß\n" * 3, encoding="utf-8")
    score = json.loads(txl("eval", "run", "--file", "other.txt", "--json").out)
    size = len((workbench / "other.txt").read_bytes())
    assert (score["tokens"], score["n_bytes"], score["n_characters"]) == (size - 1, size - 1, 21 * 3 - 1)
    assert score["text"] == "file other.txt"


def test_nats_per_token_as_table_and_array(txl: Txl, workbench: Path) -> None:
    score = json.loads(txl("eval", "run", "--json", "--per-token", "nats.tsv").out)
    header, *rows = (workbench / "nats.tsv").read_text(encoding="utf-8").split("\n")[:-1]
    assert header == "position\tid\tnats\ttoken"
    positions, ids, nats, tokens = zip(*(row.split("\t") for row in rows), strict=True)
    assert list(map(int, positions)) == list(range(1, score["tokens"] + 1))
    assert sum(map(float, nats)) == pytest.approx(score["nats"], abs=1e-2)
    assert next(json.loads(token) for token, i in zip(tokens, ids, strict=True) if i == "32") == " "
    txl("eval", "run", "--per-token", "nats.npy")
    array = np.load(workbench / "nats.npy", allow_pickle=False)
    np.testing.assert_allclose(array, np.array(nats, dtype=float), atol=2e-6)


def test_training_survives_such_a_sample(txl: Txl, workbench: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = [0xED, 0xA0, 0x80, 0xC2, 0x85, 0xE2, 0x80, 0xA8, 0x41]  # a surrogate, two line ends that JSON leaves alone, A
    monkeypatch.setattr("transformer_xl.training.run.generate", lambda *_, **__: iter(written))
    assert txl("train", "tiny.toml", "--corpus", "text.txt", "--out", "new", "--set", "train.max_steps=20").status == 0
    lines = (workbench / "new" / "metrics.jsonl").read_text().split("\n")[:-1]
    samples = [entry["text"] for entry in map(json.loads, lines) if entry["kind"] == "sample"]
    assert samples == ["\ud800\x85\u2028A"] * 2
    resumed = txl("train", "--resume", "--out", "new", "--set", "train.max_steps=24")
    assert resumed.status == 0 and ": as before; run directory" in resumed.err
    assert len((workbench / "new" / "metrics.jsonl").read_text().split("\n")) > len(lines)


def test_an_exported_model_is_written_with_and_scored(txl: Txl, workbench: Path) -> None:
    save(*load("run"), "exported")
    options = ("--prompt", "the", "--seed", "3", "--tokens", "20")
    assert txl("generate", "exported", *options).out == txl("generate", "run", *options).out
    scores = [json.loads(txl("eval", name, "--file", "text.txt", "--json").out) for name in ("run", "exported")]
    assert scores[0]["tokens"] == scores[1]["tokens"]
    assert "give --file or --corpus" in txl("eval", "exported").complaint


@pytest.mark.parametrize(
    ("bias", "status", "says"),
    [
        (
            math.nan,
            1,
            "error: weights of 'spoiled/model.safetensors' are not finite numbers: softmax.bias, 1 of its tensors",
        ),
        (3e38, 1, "error: the loss of 'spoiled' in fp32 is not a finite number; such a loss is that of a model whose training"),
        (1e4, 0, "warning: such a loss is that of a model whose training diverged; train again with a lower optim.lr"),
    ],
)
def test_a_model_that_diverged_is_called_so(txl: Txl, workbench: Path, bias: float, status: int, says: str) -> None:
    model, tokenizer = load("run")
    with torch.no_grad():
        model.get_parameter("softmax.bias").copy_((torch.arange(model.config.vocab_size or 0) % 2 * 2 - 1) * bias)
    save(model, tokenizer, "spoiled")
    for more in ((), ("--json",)):
        answer = txl("eval", "spoiled", "--file", "text.txt", "--precision", "fp32", *more)
        assert answer.status == status
        assert says in answer.err
    if math.isnan(bias):
        assert (
            "weights of 'spoiled/model.safetensors' are not finite numbers"
            in txl("generate", "spoiled", "--prompt", "the").complaint
        )


def test_corpora_are_listed_and_prepared(txl: Txl, workbench: Path) -> None:
    entries = [json.loads(line) for line in txl("corpus", "list", "--json").out.splitlines()]
    assert {"python-stdlib", "enwik8", "wikitext-103"} <= {entry["name"] for entry in entries}
    assert "enwik8" in txl("corpus", "list").out
    prepared = json.loads(txl("corpus", "prepare", "text.txt", "--tokenizer", "char", "--json").out)
    splits = prepared["splits"]
    assert sum(split["bytes"] for split in splits.values()) == (workbench / "text.txt").stat().st_size
    assert splits["train"]["tokens"] == splits["train"]["characters"] < splits["train"]["bytes"]
    assert (Path(prepared["directory"]) / "train.bin").is_file()
    by_line = json.loads(txl("corpus", "prepare", "text.txt", "--documents", "lines", "--json").out)["splits"]
    assert sum(split["documents"] for split in by_line.values()) == len((workbench / "text.txt").read_bytes().splitlines())
    answer = txl("corpus", "prepare", "text.txt", "--tokenizer", "bpe", "--vocab-size", "270")
    assert answer.out.splitlines()[0].endswith(", with a vocabulary of 270 (bpe)")


# a person errs


@pytest.mark.parametrize(
    ("command", "complaint"),
    [
        ("train quickstrat", "'quickstrat' is neither a recipe nor a text here; did you mean 'quickstart'?"),
        ("train tent.txt", "'tent.txt': there is no such text; did you mean 'text.txt'?"),
        ("train gone.txt", "'gone.txt': there is no such text"),
        ("train text.txt --set model.d_modl=1", "model: unknown key 'd_modl'; did you mean 'd_model'?"),
        ("train text.txt --set train.lr=1", "--set 'train.lr=1' is no setting; did you mean optim.lr?"),
        ("train tiny.toml --set d_modl=1", "--set 'd_modl=1' is no setting; did you mean model.d_model?"),
        ("generate run --bias 999=1", "--bias 999: token ids end at 255"),
        ("generate run --bias a=inf", "--bias 'a=inf' is not TOKEN=NUMBER"),
        ("generate run --bias a=1_0", "--bias 'a=1_0' is not TOKEN=NUMBER"),
        ("train *.foo", "no file matches '*.foo'; give a text, or a recipe that txl recipes lists"),
        (
            "train text.txt --corpus latin.txt",
            "'text.txt' is a text, and --corpus names another, 'latin.txt'; give one",
        ),
        ("train run", "'run' is a run, not a text; continue it with txl train --resume --out run"),
        (
            "train --resume --out rum",
            "'rum' holds no run: config.json is missing; train one with txl train or txl finetune; did you mean 'run'?",
        ),
        ("train tiny.toml --corpus text.txt --out text.txt", "'text.txt' is a file; choose another --out"),
        ("train tiny.toml --corpus text.txt --out /proc/x", "'/proc/x': No such file or directory"),
        ("train nested.toml", "recipe 'nested.toml' is not valid TOML: maximum recursion depth exceeded"),
        (f"eval {'n' * 300}/x", "File name too long"),
        ("eval run --device meta", "this machine cannot compute on device 'meta'"),
        ("train tiny.toml --corpus te.txt --out new", "corpus 'te.txt': no such file or name; known: enwik8, "),
        ("train tiny.toml --corpus latin.txt --out new --set tokenizer.kind=char", "byte 3 (0xe9) is not UTF-8"),
        ("train tiny.toml --out new --set model.n_layer=two", "n_layer ('two') must be a valid integer"),
        ("train tiny.toml --corpus text.txt --out run", "'run' holds another run; continue it with --resume"),
        (
            "eval run --dynamic sgd --batch-size 2",
            "dynamic evaluation reads from beginning to end in one lane; set batch_size (2) to 1",
        ),
        ("eval run --temperature 0", "temperature (0.0, 1.0) must be above 0 and finite; 1 changes nothing"),
        (
            "eval run --temperature 1.1 --cache 9",
            "a temperature is for a model without dynamic evaluation and without a cache; leave one of them out",
        ),
        ("eval run --dynamic-lr 0.1", "--dynamic-lr is for dynamic evaluation; add --dynamic rms or --dynamic sgd"),
        ("eval run --cache-theta 1", "--cache-theta is for a cache; add --cache 2000"),
        ("eval run --file text.txt --split test", "--file scores a whole file; leave --split and --corpus out"),
        ("eval run --file empty.txt", "empty.txt' has no token; at least 2 are needed"),
        ("eval run --per-token no/where.tsv", "--per-token 'no/where.tsv': the directory "),
        ("corpus get wikitext-104", "cannot download corpus 'wikitext-104'; did you mean 'wikitext-103'?"),
        ("corpus prepare tent.txt", "corpus 'tent.txt': no such file or name; did you mean 'text.txt'?"),
    ],
)
def test_errors_are_one_line_and_leave_nothing(txl: Txl, workbench: Path, command: str, complaint: str) -> None:
    (workbench / "nested.toml").write_text("name = " + "[" * 5000)
    (workbench / "empty.txt").touch()
    (workbench / "short.txt").write_text("too short")
    (workbench / "latin.txt").write_bytes(b"caf\xe9 " * 400)
    before = {path: path.stat().st_mtime_ns for path in workbench.rglob("*") if path.is_file()}
    answer = txl(*command.split())
    assert answer.status == 1
    assert complaint in answer.complaint
    assert answer.out == ""
    after = {path: path.stat().st_mtime_ns for path in workbench.rglob("*") if path.is_file() and path.name != ".lock"}
    assert {path: time for path, time in before.items() if path.name != ".lock"} == after
    assert not (workbench / "new").exists()


@pytest.mark.parametrize(
    ("command", "complaint"),
    [
        ("frobnicate", 'Unknown command "frobnicate".'),
        ("train --frobnicate", "Unknown option --frobnicate."),
        ("train --set", "--set needs a value."),
        ("eval", "RUN is missing."),
        ("bench decod run", "Too many arguments: nothing takes 'run'."),
        ("generate run --temp 1", "Unknown option --temp; did you mean --temperature?"),
        ("generate run --max-length 5", "Unknown option --max-length; did you mean --tokens?"),
        ("eval run --mem-length 5", "Unknown option --mem-length; did you mean --mem-len?"),
        ("score run text.txt --unit word", "Unknown option --unit; did you mean --per?"),
        ("eval run --unit word", "Unknown option --unit."),  # nothing is near
        ("train --learning-rate 1", "Unknown option --learning-rate; did you mean --set optim.lr=VALUE?"),
        ("generate run --prompt-file", "--prompt-file needs a value."),
        ("generate run --prompt-file --tokens 5", "--prompt-file needs a value; for one that is called like an option, write"),
    ],
)
def test_wrong_usage_is_one_line_and_status_2(txl: Txl, command: str, complaint: str) -> None:
    answer = txl(*command.split())
    assert answer.status == 2
    assert answer.complaint.startswith(complaint)
    assert answer.complaint.endswith(f"See txl {command.split()[0]} --help." if " " in command else "--help.")


def test_damage_is_named_and_passed_over(txl: Txl, workbench: Path) -> None:
    newest = max((workbench / "run" / "checkpoints").glob("step-*"))
    data = bytearray((newest / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (newest / "model.safetensors").write_bytes(data)
    for command in (("eval", "run"), ("generate", "run", "--tokens", "3"), ("train", "--resume", "--out", "run")):
        answer = txl(*command)
        assert answer.status == 0
        assert answer.err.count("is damaged") == 1
        (line,) = [line for line in answer.err.splitlines() if "is damaged" in line]
        assert line.startswith("warning: ")
        assert f"{newest.name}/model.safetensors" in line


def test_a_damaged_config_changes_nothing(txl: Txl, workbench: Path) -> None:
    """It is for people: the checkpoints have their own."""
    (workbench / "run" / "config.json").write_text("{")
    assert txl("eval", "run").status == 0
    assert txl("train", "--resume", "--out", "run", "--quiet").status == 0


def test_an_interrupt_is_no_traceback(txl: Txl, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("transformer_xl.cli.job.write", interrupted)
    answer = txl("generate", "run")
    assert (answer.status, answer.err.strip()) == (130, "interrupted")


@pytest.mark.parametrize(
    ("command", "complaint"),
    [
        ("eval run --memlen 3", "Unknown option --memlen; did you mean --mem-len? See txl eval --help."),
        ("eval run t.txt", "Too many arguments: nothing takes 't.txt'. See txl eval --help."),
        ("train tiny.toml --max-steps=3", "Unknown option --max-steps; did you mean --set train.max_steps=VALUE?"),
        ("train tiny.toml --layers 3", "Unknown option --layers; did you mean --set model.n_layer=VALUE?"),
        ("train tiny.toml --corpsu x", "Unknown option --corpsu; did you mean --corpus?"),
    ],
)
def test_an_unknown_option_is_explained(txl: Txl, command: str, complaint: str) -> None:
    assert txl(*command.split()).complaint.startswith(complaint)


@pytest.mark.parametrize(
    ("error", "complaint"),
    [
        (MemoryError(), "not enough memory for what was asked; lower its numbers, such as --mem-len or --batch-size"),
        (
            torch.OutOfMemoryError("CUDA out of memory. 1.5 GiB is free."),
            "not enough memory (CUDA out of memory. 1.5 GiB is free) for what was asked; lower its numbers, such as --mem-len",
        ),
        (OverflowError("int too large"), "not enough memory (int too large) for what was asked"),
        (OSError(errno.ENOSPC, "No space left on device", "x"), "'x': No space left on device; free disk space"),
        (OSError(errno.EACCES, "Permission denied", b"x", None, "y"), "'x' to 'y': Permission denied; check its permissions"),
        (FileNotFoundError(2, "No such file", "text.tx"), "'text.tx': No such file; did you mean 'text.txt'?"),
        (FileNotFoundError(2, "No such file", "rum/a/b"), "'rum/a/b': No such file; there is no directory 'rum', did you mean"),
        (FileNotFoundError(2, "No such file", "a\x1b[31m\nb\r"), r"'a\x1b[31m b ': No such file"),
        (RuntimeError("a bug"), None),
    ],
)
def test_only_a_lack_of_memory_and_faults_of_the_system_are_told(
    txl: Txl, monkeypatch: pytest.MonkeyPatch, error: Exception, complaint: str | None
) -> None:
    """Anything else that is not an error of ours is a bug, whose traceback is wanted."""

    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("transformer_xl.reading.evaluation.evaluate", fail)
    if complaint is None:
        with pytest.raises(type(error)):
            main(["eval", "run"])
    else:
        assert txl("eval", "run").complaint.startswith(complaint)


FULL = torch.OutOfMemoryError("CUDA out of memory. 1.5 GiB is free.")


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Let memory run out in a step."""
    train_step = Trainer.train_step

    def run_out(at: int) -> None:
        def step(trainer: Trainer) -> Any:
            if trainer.step + 1 >= at:
                raise FULL
            return train_step(trainer)

        monkeypatch.setattr(Trainer, "train_step", step)

    return run_out


REMEDY = "raise train.accumulate, set train.checkpoint_layers=true, or lower train.batch_size or train.tgt_len"


def test_training_that_runs_out_of_memory_says_what_to_change(txl: Txl, full: Callable[[int], None]) -> None:
    """At the first step, and later; what was saved stays, and a larger machine goes on with it."""
    command = ("train", "tiny.toml", "--corpus", "text.txt", "--quiet")
    full(1)
    lacking = f"not enough memory (CUDA out of memory. 1.5 GiB is free) for 4 lanes of 5 tokens at once; {REMEDY}"
    assert txl(*command, "--out", "first").complaint == lacking
    full(20)
    assert txl(*command, "--out", "later").complaint == f"{lacking}; step 16 is saved, and --resume goes on from it"
    assert sorted(path.name for path in Path("later", "checkpoints").iterdir())[-1].endswith("16")
    full(1000)
    assert txl("train", "--resume", "--out", "later", "--quiet").status == 0
    logs = [Path(run, "metrics.jsonl").read_text().splitlines() for run in ("later", "run")]
    assert [json.loads(line).get("loss") for line in logs[0]] == [json.loads(line).get("loss") for line in logs[1]]


def test_a_model_without_room_on_its_device_leaves_no_directory(txl: Txl, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise FULL

    monkeypatch.setattr("transformer_xl.training.start.Trainer", fail)
    assert REMEDY in txl("train", "tiny.toml", "--corpus", "text.txt", "--quiet", "--out", "none").complaint
    assert not Path("none", "config.json").exists()


def test_help_has_examples_and_breaks_no_description_of_an_option(txl: Txl, monkeypatch: pytest.MonkeyPatch) -> None:
    """Line breaks of a docstring stay in the help, however wide the terminal is."""
    assert "txl train" in txl("--help").out.split("Common uses:")[1]
    assert txl("--version").out.strip() == __version__
    monkeypatch.setattr(app, "console", Console(width=400))
    lines: list[str] = []
    for name, _ in commands(app):
        answer = txl(*name.split(), "--help")
        assert (answer.status, answer.err) == (0, "")
        assert f"txl {name}" in answer.out.split("Common uses:")[1]
        lines += answer.out.splitlines()
    assert sum(line.startswith("│ --") for line in lines) > 100
    assert [line for line in lines if line.startswith("│        ")] == []


def test_ctrl_c_before_the_first_step_says_so(txl: Txl, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("transformer_xl.training.run.prepare", interrupted)
    answer = txl("train", "tiny.toml", "--corpus", "text.txt", "--out", "early")
    assert (answer.status, answer.err.strip()) == (130, "interrupted before the first step; nothing was learned")


def test_a_fine_tuned_model_is_refused_where_tokens_are_predicted(txl: Txl, workbench: Path) -> None:
    head = HeadConfig(kind="regression", tgt_len=8)
    save(make_model(TransformerXLConfig(**{**TINY, "vocab_size": 256}, head=head)), ByteTokenizer(), "tuned")
    for arguments in (("generate", "tuned", "--prompt", "a"), ("explain", "tuned", "text.txt")):
        expected = "'tuned' is fine-tuned (regression) and predicts no tokens; txl predict gives what it was tuned for"
        assert txl(*arguments).complaint == expected


def arguments_of(accepts: Callable[[set[Any]], object]) -> Iterator[tuple[list[str], Any]]:
    """Yield the first argument of each command that accepts such values, and what must stand before it."""
    for name, arguments in commands(app):
        for option in arguments:
            if accepts({option.hint, *get_args(option.hint)}) and option.names[0] != "--prompt":
                required = sum(each.required for each in arguments) if option.index is None else option.index
                yield [*name.split(), *["run"] * required], option
                break


def test_empty_values_are_refused_in_every_command(txl: Txl) -> None:
    """As of an unset variable; as a path, it would be the working directory."""
    found = list(arguments_of(lambda kinds: kinds & {str, Path, list[str]} or Ellipsis in kinds))
    assert len(found) > 15
    for before, option in found:
        answer = txl(*before, *([""] if option.index is not None else [option.names[0], ""]))
        assert answer.status == 2
        assert answer.complaint.startswith(f'Invalid value "" for {option.names[0]}. It must not be empty.')
    assert txl("generate", "run", "--prompt", "").complaint.startswith("--prompt '' is empty")  # with --memory, a text goes on


def test_whole_numbers_have_limits(txl: Txl) -> None:
    """No option counts below zero, and no library holds more than 64 bits."""
    for before, option in arguments_of(lambda kinds: int in kinds):
        for number in ("-1", str(2**63), "1.500"):
            answer = txl(*before, f"{option.names[0]}={number}")
            assert answer.status == 2
            assert answer.complaint.startswith(f'Invalid value "{number}" for {option.names[0]}. ')
    for name, arguments in commands(app):
        for option in arguments:
            if int in {option.hint, *get_args(option.hint)} and option.names[0].lstrip("-").replace("-", "_") not in NUMBERS:
                assert option.parameter.validator, f"txl {name} {option.names[0]} has no limits"  # Sampling has its own


COLORED = "\x1b[31m\nred\r\x9b0m"


@pytest.mark.parametrize(
    "command",
    [
        ("eval", COLORED),
        ("eval", "run", "--file", COLORED),
        ("train", COLORED),
        ("train", "tiny.toml", "--corpus", "text.txt", "--out", f"text.txt/{COLORED}"),
        ("train", "tiny.toml", "--set", f"train.{COLORED}=1"),
        ("train", "colored.toml"),
        ("generate", "run", f"--{COLORED}"),
        ("generate", "run", "--stop-token", COLORED),
        (COLORED,),
    ],
)
def test_control_characters_of_values_are_spelled_out(txl: Txl, workbench: Path, command: tuple[str, ...]) -> None:
    (workbench / "colored.toml").write_text(f"[train]\n{json.dumps(COLORED)} = 1\n")
    answer = txl(*command)
    assert answer.status and "red" in answer.complaint
    assert not any(ord(character) < 32 or 127 <= ord(character) < 160 for character in answer.err.removesuffix("\n"))
