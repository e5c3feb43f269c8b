"""`txl convert` as a person and a script use it."""

import json
import shlex
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.cli.conftest import Txl
from tests.conversion.examples import fine_tuned_by_the_authors
from tests.helpers import tiny_xlnet
from tests.tokenizers.test_unigram import GOLDENS as PIECES
from transformer_xl import onnx
from transformer_xl.checkpoint.run_directory import RunDirectory, load
from transformer_xl.model.transformer_xl import TransformerXL

GOLDENS = Path(__file__).parents[1] / "parity" / "goldens"


@pytest.fixture
def place(workbench: Path) -> Path:
    """Where the command runs, with a checkpoint of each kind."""
    for kind, golden in {
        "hf": "huggingface/plain",
        "ky": "authors/trained",
        "nv": "nvidia/plain",
        "xlnet": "xlnet/memory",
    }.items():
        shutil.copytree(GOLDENS / golden / "checkpoint", workbench / kind)
    shutil.copytree(GOLDENS / "tensorflow" / "base", workbench / "tf")
    return workbench


def test_a_converted_checkpoint_is_scored_and_written_with(txl: Txl, place: Path) -> None:
    answer = txl("convert", "hf", "native")
    assert (answer.status, answer.err) == (0, "")
    first, *_, last = answer.out.splitlines()
    assert first.startswith("huggingface checkpoint 'hf/pytorch_model.bin': ")
    assert first.endswith(" parameters, 2 layers, vocabulary 31, memory 6")
    assert last.startswith("written to native; try: ")
    words = json.loads((place / "native" / "tokenizer.json").read_text())["words"]
    (place / "other.txt").write_text(" ".join(words[1:] * 3) + "\n")
    evaluate, generate = (shlex.split(command)[1:] for command in last.removeprefix("written to native; try: ").split(", "))
    evaluate[evaluate.index("TEXT")], generate[generate.index("TEXT")] = "other.txt", words[4]
    score = json.loads(txl(*evaluate, "--json").out)
    assert score["tokens"] > 50
    assert score["nats"] > 0
    assert txl(*generate, "--tokens", "3").out.startswith(words[4])


@pytest.mark.parametrize(
    ("source", "kind", "tokenizer", "options"),
    [
        ("hf", "huggingface", "word", []),
        ("hf/pytorch_model.bin", "huggingface", "word", ["--moses", "en"]),
        ("ky", "authors", "symbols", ["--kind", "authors"]),
        ("ky/model.pt", "authors", "symbols", ["--vocabulary", "ky/cache.pt"]),
        ("nv", "nvidia", "word", ["--set", "clamp_len=none"]),
        ("tf", "tensorflow", "symbols", ["--set", "mem_len=6", "--set", "model.same_length=true"]),
        ("tf/model.ckpt-123", "tensorflow", "symbols", ["--set", "mem_len=6"]),
    ],
)
def test_json_is_one_object(txl: Txl, place: Path, source: str, kind: str, tokenizer: str, options: list[str]) -> None:
    answer = txl("convert", source, "native", "--json", *options)
    assert (answer.status, answer.err) == (0, "")
    figures = json.loads(answer.out)
    assert answer.out.count("\n") == 1
    model, its_tokenizer = load("native")
    assert (figures["kind"], figures["tokenizer"], figures["destination"]) == (kind, tokenizer, "native")
    assert its_tokenizer.kind == tokenizer
    assert figures["weights"].startswith(source)
    assert figures["parameters"] == sum(parameter.numel() for parameter in model.parameters())
    assert figures["bytes"] == (place / "native" / "model.safetensors").stat().st_size
    assert figures["model"] == model.config.model_dump(mode="json")
    if kind == "tensorflow":
        assert figures["model"]["mem_len"] == 6
        assert figures["model"]["same_length"] == ("model.same_length=true" in options)
    if "--moses" in options:
        assert json.loads((place / "native" / "tokenizer.json").read_text())["moses"] == "en"


def test_a_run_becomes_a_directory_that_can_be_shared(txl: Txl, place: Path) -> None:
    answer = txl("convert", "run", "mine")
    assert (answer.status, answer.err) == (0, "") and answer.out.endswith(" parameters written to mine\n")
    assert "- text: `text.txt`" in (place / "mine" / "README.md").read_text()
    reading = ("--file", "text.txt", "--batch-size", "2", "--json")
    length = RunDirectory("run").config().train.tgt_len
    shared, own = (json.loads(txl("eval", each, *reading).out) for each in ("mine", "run"))
    assert shared["nats"] == own["nats"] and shared["reading"]["tgt_len"] == length
    assert json.loads(txl("info", "mine", "--json").out)["tgt_len"] == length
    assert txl("convert", "mine", "foreign", "--to", "huggingface").status == 0
    assert json.loads((place / "foreign" / "config.json").read_text())["tgt_len"] == length


def test_a_missing_vocabulary_is_warned_of(txl: Txl, place: Path) -> None:
    for source, file, hint in (
        ("hf", "vocab.pkl", "put vocab.pkl, vocab.bin or vocab.txt beside the weights, or give it with --vocabulary"),
        ("ky", "cache.pt", "give the cache.pt in the directory of their training text with --vocabulary"),
    ):
        (place / source / file).unlink()
        answer = txl("convert", source, f"of-{source}")
        assert answer.status == 0
        assert answer.err == f"warning: no vocabulary, so 'of-{source}' has no tokenizer; {hint}\n"
        assert answer.out.splitlines()[-1] == f"written to of-{source}"
        assert "tokenizer.json" in txl("eval", f"of-{source}", "--file", "text.txt").complaint


def test_an_xlnet_says_what_is_left_out_and_what_is_missing(txl: Txl, place: Path) -> None:
    answer = txl("convert", "xlnet", "native", "--set", "activation=gelu_tanh")
    assert answer.status == 0
    first, *_ = answer.out.splitlines()
    assert first.startswith("huggingface checkpoint 'xlnet/model.safetensors': ")
    assert first.endswith(" parameters, 2 layers, vocabulary 13, memory 7")
    assert answer.err.startswith("warning: no vocabulary, so 'native' has no tokenizer; ")
    assert "spiece.model" in answer.err
    shutil.copytree(GOLDENS / "xlnet_tensorflow" / "finetuned" / "checkpoint", place / "finetuned")
    answer = txl("convert", "finetuned", "other", "--set", "head=none")
    assert "left out, because heads of other tasks are not converted: 'model/classification_sst/logit/kernel'" in answer.err
    notes = json.loads(txl("convert", "finetuned", "again", "--set", "head=none", "--json").out)["notes"]
    assert len(notes) == answer.err.count("note: ") == 4


def test_an_xlnet_with_its_pieces_says_how_to_load_it(txl: Txl, place: Path) -> None:
    """Neither txl eval nor txl generate reads from left to right with it."""
    tiny_xlnet(vocab_size=500, n_head=2, d_head=5).save_pretrained("native")
    assert txl("convert", "native", "foreign", "--to", "huggingface").status == 0
    (place / "foreign" / "spiece.model").write_bytes((PIECES / "xlnet.model").read_bytes())
    advice = txl("convert", "foreign", "again").out.splitlines()[-1]
    assert advice == "written to again; try, in Python: model, tokenizer = transformer_xl.load('again')"
    model, tokenizer = load("again")
    assert model.read(torch.as_tensor(tokenizer.encode("to be"))[None])[0].shape[-1] == 10


def test_a_fine_tuned_xlnet_says_for_what(txl: Txl, place: Path) -> None:
    fine_tuned_by_the_authors("classification", place)
    answer = txl("convert", "source", "native", "--set", 'head.labels=["no", "yes", "\\u001b[2J"]')
    assert (answer.status, answer.out.splitlines()[1]) == (0, "fine-tuned: classification as 'no', 'yes', '\\x1b[2J'")
    assert "did you mean 'labels'" in txl("convert", "source", "other", "--set", "head.label=a").complaint


def test_progress_is_shown_on_a_terminal(txl: Txl, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr("transformer_xl.console.DRAW_SECONDS", 0)
    answer = txl("convert", "hf", "native", "--json")
    assert answer.status == 0
    assert json.loads(answer.out)["kind"] == "huggingface"
    assert "kB" in answer.err


def test_a_name_that_may_be_a_hub_id_is_told_how_to_load(txl: Txl) -> None:
    assert "hf download transfo-xl-wt103 --local-dir transfo" in txl("convert", "transfo-xl-wt103", "native").complaint


def test_ctrl_c_ends_quietly_and_leaves_nothing_behind(txl: Txl, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(self: object) -> None:
        raise KeyboardInterrupt

    before = sorted(place.iterdir())
    monkeypatch.setattr("transformer_xl.conversion.readers.tensors.TensorRef.load", interrupt)
    answer = txl("convert", "hf", "native")
    assert (answer.status, answer.out) == (130, "")
    assert sorted(place.iterdir()) == before


@pytest.mark.parametrize("kind", ["huggingface", "authors"])
def test_a_run_is_written_for_others_and_comes_back(txl: Txl, place: Path, kind: str) -> None:
    answer = txl("convert", "run", "foreign", "--to", kind)
    model, _ = load("run")
    n_parameters = sum(parameter.numel() for parameter in model.parameters())
    assert (answer.status, answer.out) == (0, f"{n_parameters:,} parameters written to foreign\n")
    assert (place / "foreign" / "vocab.txt").exists()
    if kind == "authors":
        figures = json.loads(txl("convert", "run", "again", "--to", kind, "--json", "--tgt-len", "9").out)
        assert figures == {"kind": kind, "parameters": n_parameters, "destination": "again", "notes": []}
        assert json.loads((place / "again" / "arguments.json").read_text())["tgt_len"] == 9
    else:
        assert answer.err.startswith("note: Hugging Face begins every stream after mem_len zero vectors")
    assert txl("convert", "foreign", "back").status == 0
    again, _ = load("back")
    assert isinstance(again, TransformerXL) and again.config.zero_first_memory == (kind == "huggingface")
    for name, tensor in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name


def test_a_compatible_run_is_written_for_all_others(txl: Txl, place: Path) -> None:
    settings = "activation=gelu final_norm=true pre_lnorm=true same_length=true same_length_besides_self=true untie_r=true"
    section = "".join(f"{setting}\n" for setting in settings.replace("gelu", '"gelu"').split())
    recipe = (place / "tiny.toml").read_text().replace("[model]\n", f"[model]\nlayer_norm_epsilon = 1e-3\n{section}")
    (place / "strange.toml").write_text(recipe)
    train = ("train", "strange.toml", "--corpus", "text.txt", "--quiet", "--set", "train.max_steps=2")
    assert txl(*train, "--out", "strange").status == 0
    assert "model.activation=gelu (only relu), " in txl("convert", "strange", "hf2", "--to", "huggingface").complaint
    assert txl(*train, "--out", "plain", "--compatible", "--set", "model.final_norm=false").status == 0
    length = RunDirectory("plain").config().train.tgt_len
    assert length != 128  # which models are read with otherwise
    for kind, settings in (("huggingface", "config.json"), ("authors", "arguments.json")):
        assert txl("convert", "plain", f"for-{kind}", "--to", kind).status == 0
        assert json.loads((place / f"for-{kind}" / settings).read_text())["tgt_len"] == length
    back = txl("convert", "for-huggingface", "back")
    assert f"try: txl eval back --file TEXT --tgt-len {length}, txl generate back" in back.out
    complaint = txl(*train, "--out", "new", "--compatible", "--set", "model.activation=gelu").complaint
    assert complaint == "--set model.activation=gelu contradicts --compatible, which needs relu; leave one of them out"
    complaint = txl("train", "lstm-ptb", "--compatible").complaint
    assert complaint == "'lstm-ptb' is of kind 'lstm', which no other program has; leave --compatible out"


def test_a_step_is_written_for_onnx(txl: Txl, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says what a program must know to run it. The exporter, which takes seconds, is in tests/test_onnx.py."""
    pytest.importorskip("onnxscript", reason="the extra 'onnx' is not installed")
    traced: list[Any] = []

    class Program:
        model = SimpleNamespace(metadata_props={})

        def save(self, path: Path, *, external_data: bool) -> None:
            path.write_text(json.dumps(self.model.metadata_props))

    def trace(model: TransformerXL, *sizes: int | None) -> Program:
        traced.append((model.mem_len, *sizes))
        return Program()

    monkeypatch.setattr(onnx, "_trace", trace)
    answer = txl("convert", "run", "step.onnx", "--to", "onnx", "--tgt-len", "4")
    assert (answer.status, answer.err, traced) == (0, "", [(6, None, 4)])
    facts = {"mem_len": "6", "tgt_len": "4", "vocab_size": "256", "first_n_valid": "0"}
    assert json.loads((place / "step.onnx").read_text()) == facts
    told = ", ".join(f"{name} {value}" for name, value in facts.items())
    assert answer.out == f"written to step.onnx; {told} (in its metadata too)\n"
    answer = txl("convert", "run", "text.txt/step.onnx", "--to", "onnx")
    assert answer.status == 1
    assert "'text.txt': File exists" in answer.complaint
    assert traced[1] == (6, None, 128)
