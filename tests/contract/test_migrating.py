"""docs/migrating.md works: its commands and programs run on tiny checkpoints of the peers, and its options exist.

Blocks marked `run` (```sh run, ```python run) are executed, section by section, in a directory where the files lie that the
section speaks of.
"""

import json
import math
import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import transformer_xl as txl
from tests.conversion.examples import fine_tuned_by_the_authors
from transformer_xl.cli import main
from transformer_xl.config.recipes import load_recipe
from transformer_xl.config.run import OptimConfig, RunConfig
from transformer_xl.training.optim import Schedule

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "docs" / "migrating.md"
GOLDENS = ROOT / "tests" / "parity" / "goldens"
TENSORFLOW: dict[str, object] = {"mem_len": 6}


def blocks(section: str) -> list[tuple[str, str]]:
    """Return language and code of the blocks under a heading that are to be executed."""
    parts = re.split("^##+ (.+)$", DOCUMENT.read_text(encoding="utf-8"), flags=re.MULTILINE)
    text = dict(zip(parts[1::2], parts[2::2], strict=True))[section]
    return re.findall(r"^```(\w+) run\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)


def tables() -> list[list[list[str]]]:
    """Return all tables, as rows of cells, with the header first and without the line under it."""
    found = re.findall(r"(?:^\|.*\n)+", DOCUMENT.read_text(encoding="utf-8"), flags=re.MULTILINE)
    rows = [[line.strip("|").split("|") for line in table.splitlines() if set(line) - set("|-")] for table in found]
    return [[[cell.strip() for cell in row] for row in table] for table in rows]


def put(golden: str, files: dict[str, str]) -> None:
    """Copy files of a golden to where the document has them."""
    for name, place in files.items():
        Path(place).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(GOLDENS / golden / name, place)


def put_text(golden: str, *places: str, settings: dict[str, object] | None = None) -> None:
    """Write a text of the golden's vocabulary."""
    shutil.rmtree("scratch", ignore_errors=True)
    txl.convert(GOLDENS / golden, "scratch", settings=settings)
    tokenizer = txl.load("scratch")[1]
    text = tokenizer.decode(list(range(tokenizer.vocab_size)))
    for place in places:
        Path(place).parent.mkdir(parents=True, exist_ok=True)
        Path(place).write_text(f"{text}\n" * 4, encoding="utf-8")


def pytorch() -> None:
    golden = "authors/div_val_2_two_tails/checkpoint"
    run, data = "LM-TFM-wt103/20190108-120000", "data/wikitext-103"
    put(golden, {"model.pt": f"{run}/model.pt", "cache.pt": f"{data}/cache.pt"})
    put_text(golden, f"{data}/test.txt", "prompt.txt")


def tensorflow_model(golden: str, prefix: str, vocabulary: str) -> None:
    parts = {f"model.ckpt-123.{part}": f"{prefix}.{part}" for part in ("index", "data-00000-of-00001")}
    put(f"tensorflow/{golden}", parts | {"cache.pkl": vocabulary})
    put(f"tensorflow/{golden}", {"corpus-info.json": str(Path(vocabulary).with_name("corpus-info.json"))})


def tensorflow() -> None:
    tensorflow_model("adaptive", "EXP-wt103/model.ckpt-400000", "data/wikitext-103/cache.pkl")
    put_text("tensorflow/adaptive", "data/wikitext-103/test.txt", settings=TENSORFLOW)


def published() -> None:
    texts = {
        "enwik8": ("base", "enwik8.test"),
        "text8": ("base", "text8.test"),
        "wt103": ("divided", "wiki.test.tokens"),
        "lm1b": ("divided_untied", "news.en.heldout-00000-of-00050"),
    }
    for name, (golden, text) in texts.items():
        folder, step = f"pretrained_xl/tf_{name}", 1191000 if name == "lm1b" else 0
        tensorflow_model(golden, f"{folder}/model/model.ckpt-{step}", f"{folder}/data/cache.pkl")
        put_text(f"tensorflow/{golden}", text, settings=TENSORFLOW)


def huggingface() -> None:
    golden = "huggingface/plain/checkpoint"
    shutil.copytree(GOLDENS / golden, "transfo-xl-wt103")
    put_text(golden, "wiki.test.tokens", "my.txt")


def nvidia() -> None:
    golden = "nvidia/plain/checkpoint"
    put(golden, {"checkpoint_last.pt": "LM-TFM/checkpoint_best.pt"})
    put_text(golden, "data/wikitext-103/test.txt")


def fairseq() -> None:
    """Put together what fairseq's trainer writes around a model of Hugging Face, and its dictionary."""
    golden = GOLDENS / "huggingface/cutoffs/checkpoint"
    config = json.loads((golden / "config.json").read_text())
    weights = torch.load(golden / "pytorch_model.bin", weights_only=True)
    state = {
        "args": None,
        "cfg": {"model": {**config, "_name": "transformer_xl", "cutoffs": [*config["cutoffs"], config["vocab_size"] + 1]}},
        "model": {f"decoder.model.{name}": tensor for name, tensor in weights.items()},
    }
    torch.save(state, "checkpoint_best.pt")
    words = [f"word{i}" for i in range(config["vocab_size"] - 4)]
    Path("data-bin/wikitext-103").mkdir(parents=True)
    Path("data-bin/wikitext-103/dict.txt").write_text("".join(f"{word} 1\n" for word in words))
    Path("wiki.test.tokens").write_text(f" \n {' '.join(words)} \n" * 3)


def labml() -> None:
    letters = "It is the east, and Juliet is the sun.\n"
    others = sorted(set(map(chr, range(65, 123))) - set(letters))[: 31 - len(set(letters))]
    Path("tiny_shakespeare.txt").write_text((letters + "".join(others)) * 100)
    shutil.copytree(GOLDENS / "labml/trained/checkpoint", "logs/transformer_xl/UUID/checkpoints/0")


def xlnet() -> None:
    shutil.copytree(GOLDENS / "xlnet_tensorflow/pretraining/checkpoint", "xlnet_cased_L-12_H-768_A-12")
    shutil.copytree(GOLDENS / "xlnet/two_streams/checkpoint", "xlnet-base-cased")


def fine_tuned_xlnet() -> None:
    fine_tuned_by_the_authors("classification", Path()).rename("xlnet_mnli")


def both_ways() -> None:
    huggingface()
    Path("my.txt").write_text(Path("my.txt").read_text() * 100)  # enough to train on
    pytorch()
    txl.convert("transfo-xl-wt103", "models/hf", moses=None)
    txl.convert("transfo-xl-wt103", "models/hf-text", moses="en")
    txl.convert("LM-TFM-wt103/20190108-120000", "models/wt103", vocabulary="data/wikitext-103/cache.pt")


SETTINGS: dict[str, Callable[[], None]] = {
    "The authors' PyTorch code": pytorch,
    "The authors' TensorFlow code": tensorflow,
    "The published models": published,
    "Hugging Face": huggingface,
    "NVIDIA DeepLearningExamples": nvidia,
    "fairseq": fairseq,
    "labml": labml,
    "XLNet": xlnet,
    "Fine-tuned XLNets": fine_tuned_xlnet,
    "What is not converted": both_ways,
    "Export to Hugging Face or the authors' code": both_ways,
}


@pytest.fixture
def workbench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TXL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("transformer_xl.training.record._tensorboard", lambda *_: None)
    (tmp_path / "models").mkdir()
    return tmp_path


def call(command: str) -> None:
    """Call `txl` in this process; a training is cut to a few steps."""
    program, *arguments = shlex.split(command)
    assert program == "txl", command
    if arguments[0] == "train":
        short = ("train.max_minutes=none", "train.max_steps=2", "train.device=cpu", "train.sample_tokens=2")
        arguments += ["--quiet", *(argument for setting in short for argument in ("--set", setting))]
    with pytest.raises(SystemExit) as exit:
        main(arguments)
    assert not exit.value.code, command


def execute(section: str) -> None:
    SETTINGS[section]()
    for language, code in blocks(section):
        if language == "python":
            exec(compile(code, f"{DOCUMENT.name}: {section}", "exec"), {"__name__": "document"})
        else:
            for command in filter(str.strip, code.replace("\\\n", " ").splitlines()):
                call(command)


def test_every_runnable_section_has_its_files() -> None:
    assert sum(len(blocks(section)) for section in SETTINGS) == DOCUMENT.read_text(encoding="utf-8").count(" run\n") > 15


LOOKED_AT = ("fairseq", "XLNet", "Export to Hugging Face or the authors' code")
"""Sections whose results the tests below look at."""


@pytest.mark.parametrize("section", [section for section in SETTINGS if section not in LOOKED_AT])
def test_blocks_run(section: str, workbench: Path) -> None:
    execute(section)


def test_the_model_of_fairseq_is_the_wrapped_one(workbench: Path) -> None:
    execute("fairseq")
    txl.convert(GOLDENS / "huggingface/cutoffs/checkpoint", "plain")
    assert Path("models/fairseq/model.safetensors").read_bytes() == Path("plain/model.safetensors").read_bytes()
    ours, plain = (json.loads(Path(place, "config.json").read_text()) for place in ("models/fairseq", "plain"))
    assert ours == plain | {"dropout": ours["dropout"]}
    tokenizer = txl.load("models/fairseq")[1]
    assert tokenizer.encode(" \n word0 other\n").tolist() == [2, 4, 3, 2]


def test_an_xlnet_goes_back_as_it_was_trained(workbench: Path) -> None:
    execute("XLNet")
    assert json.loads(Path("exported-xlnet/config.json").read_text())["ff_activation"] == "gelu_new"
    assert json.loads(Path("models/xlnet-base-hf/config.json").read_text())["activation"] == "gelu_tanh"


def test_what_is_written_for_others(workbench: Path) -> None:
    execute("Export to Hugging Face or the authors' code")
    (table,) = (table for table in tables() if table[0][1] == "written")
    written = {cells[0]: set(re.findall(r"`([\w.]+)`", cells[1])) for cells in table[1:]}
    for target, folder in (("huggingface", "exported-hf"), ("authors", "exported-authors")):
        assert {path.name for path in Path(folder).iterdir()} == written[f"`--to {target}`"]


def options_of(command: str, capsys: pytest.CaptureFixture[str]) -> set[str]:
    capsys.readouterr()
    with pytest.raises(SystemExit):
        main([command, "--help"])
    return set(re.findall(r"--[a-z][a-z-]*", capsys.readouterr().out))


def test_our_options_exist(capsys: pytest.CaptureFixture[str]) -> None:
    options = {command: options_of(command, capsys) for command in ("train", "eval", "generate", "convert")}
    rows = [row for table in tables() if table[0][-1] == "ours" for row in table[1:]]
    assert len(rows) > 20
    for row in rows:
        ours = re.findall(r"`([^`]+)`", row[-1])
        assert ours, row
        key = ""
        for name in ours:
            if name.startswith("txl "):
                _, command, option = name.split()
                assert option in options[command], row
                continue
            given, _, value = name.partition("=")
            key = given or key  # `=value` is another value of the key before
            section, _, field = key.partition(".")
            assert field in type(getattr(RunConfig(), section)).model_fields, row
            if value:
                load_recipe("shakespeare-small", [f"{key}={value}"])


@pytest.mark.parametrize("warmup", [0, 1, 400])
def test_the_formula_for_rates_of_inv_sqrt_gives_the_authors_rates(warmup: int) -> None:
    theirs = 0.02
    ours = theirs / math.sqrt(warmup) if warmup else theirs
    schedule = Schedule(OptimConfig(schedule="inv_sqrt", lr=ours, warmup_steps=warmup))
    for step in (1, 2, 100, 399, 400, 401, 5000):  # of the authors' `lr_lambda`; the step after it is ours
        factor = step**-0.5 if step > warmup else step / warmup**1.5
        assert ours * schedule.factor(step - 1, 0.0) == pytest.approx(theirs * factor)
