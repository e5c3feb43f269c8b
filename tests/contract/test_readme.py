"""What the README tells a reader to type works in the order in which it stands there: every block, and every row of commands.
Commands of all pages can be parsed.

Trainings are cut short, an ablation is only planned, and texts are small; nothing else is changed.
"""

import itertools
import json
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import urllib.request
from pathlib import Path

import numpy as np
import pytest

from tests.cli.command_lines import commands
from tests.contract.test_languages import CHINESE, ENGLISH, ROOT
from transformer_xl.cli import app, main

SMALL = [
    "model.n_layer=2", "model.d_model=16", "model.n_head=2", "model.d_head=8", "model.d_inner=24", "model.mem_len=8",
    "train.batch_size=2", "train.tgt_len=8", "train.max_steps=2", "train.sample_tokens=0", "train.precision=fp32",
    "eval.max_tokens=400",
]  # fmt: skip
AGENTS = ROOT / "docs" / "coding-agents.md"
SHORTER = {"--cache": "20"}
LINES = "".join(f"It was the {n}th of times, and 'so on'.\n" for n in range(400))
NOT_RUN = {"torchrun"}  # needs processes of its own: tests/training/test_run_torchrun.py


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with what a reader of the README has."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TXL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("transformer_xl.training.record._tensorboard", lambda *_: None)
    for name in ("my.txt", "more.txt", "book.txt", "chapter.txt", "essay.txt"):
        (tmp_path / name).write_text(LINES if name == "my.txt" else LINES[:2000], encoding="utf-8")
    (tmp_path / "books").mkdir()
    for n in range(3):
        shutil.copy("my.txt", f"books/{n}.txt")
        subprocess.run(["xz", f"books/{n}.txt"], check=True)
    (tmp_path / "r.tsv").write_text("text\tlabel\n" + "it was good\tyes\nit was bad\tno\n" * 30, encoding="utf-8")
    (tmp_path / "gaps.tsv").write_text("it was _\tgood\tbad\n", encoding="utf-8")
    (tmp_path / "test.en").write_text("it was\n", encoding="utf-8")
    (tmp_path / "pairs.txt").write_text("it was\tes war\n" * 200, encoding="utf-8")
    np.save("pieces.npy", np.arange(4000) % 7)
    shutil.copytree(ROOT / "tests" / "parity" / "goldens" / "huggingface" / "plain" / "checkpoint", "transfo-xl-wt103")
    return tmp_path


def train(corpus: str, run: str, *overrides: str) -> None:
    follow(shlex.join(["txl", "train", "--corpus", corpus, "--out", run, *itertools.chain(*(("--set", o) for o in overrides))]))


def follow(line: str) -> None:
    """Run one command, cut short where it trains; it must end well."""
    words = shlex.split(line, comments=True)
    if not words or words[0] in NOT_RUN:
        return
    if words[0] == "make":
        subprocess.run(["make", "-n", *words[1:]], cwd=ROOT, check=True, capture_output=True)
        return
    if words[0] == "python":
        subprocess.run([sys.executable, ROOT / words[1], *words[2:]], check=True, capture_output=True)
        return
    assert words[0] == "txl", line
    words = [SHORTER.get(before, word) for before, word in itertools.pairwise(words)]
    if words[0] == "serve":
        serve(words)
        return
    if words[0] == "ablate":
        words.append("--dry-run")  # what it trains is in tests/cli/test_ablate.py
    if words[0] in ("train", "finetune"):
        given = "--from" in words or words[0] == "finetune"  # the model is
        for override in SMALL:
            words += [] if given and override.startswith("model.") else ["--set", override]
    if words[:2] == ["train", "quickstart"]:
        words += ["--corpus", "my.txt"]
    with pytest.raises(SystemExit) as end:
        main(words)
    assert not end.value.code, line


def serve(words: list[str]) -> None:
    """Start the server and, once it answers, end it."""
    command = [sys.executable, "-m", "transformer_xl", *words, "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as server:
        assert server.stdout is not None
        (address,) = next(found for line in server.stdout if (found := re.findall(r"http://[\w.:]+", line)))
        with urllib.request.urlopen(f"{address}/healthz", timeout=60) as answer:
            assert answer.status == 200
        server.terminate()
        server.stdout.read()
    assert server.returncode == 0


def blocks(document: Path) -> list[tuple[str, str]]:
    """Return the language and the content of each fenced block."""
    return re.findall(r"^```(\w*)[^\n]*\n(.*?)^```$", document.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_reader_can_type_all_of_it(bench: Path) -> None:
    text = ENGLISH.read_text(encoding="utf-8")  # the Chinese one has the same commands: test_languages.py
    for language, block in blocks(ENGLISH):
        if language == "python":
            Path("block.py").write_text(block, encoding="utf-8")
            runpy.run_path("block.py")
            continue
        lines = block.splitlines()
        typed = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")] or lines
        for line in typed:
            follow(line)
    assert {path.name for path in Path("exported").iterdir()} >= {"config.json", "model.safetensors", "tokenizer.json"}
    train("my.txt", "runs/mine")
    train("pairs.txt", "runs/en-de", "data.documents=lines", "train.loss=answer")
    commands = [
        command
        for row in text.splitlines()
        if row.startswith("|") and "---" not in row
        for command in re.findall(r"`((?:txl|torchrun|python) [^`]+)`", row.split("|")[2])
    ]
    assert len(commands) >= 10
    for command in commands:
        follow(command)


def keys_of_commands() -> dict[str, list[str]]:
    """Return the keys that the page for coding agents names, by command."""
    rows = re.findall(r"^\| `txl (.+ --json)` \| (`.+`) \|$", AGENTS.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {command: re.findall(r"`(\w+)`", keys) for command, keys in rows}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_coding_agent_can_type_all_of_its_page(bench: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its lines work one after another, and commands print as JSON what it says."""
    for language, block in blocks(AGENTS):
        if language == "python":
            Path("block.py").write_text(block, encoding="utf-8")
            runpy.run_path("block.py")
        for line in block.splitlines():
            if line.startswith("txl "):
                follow(line)
    capsys.readouterr()
    for command, keys in keys_of_commands().items():
        words = shlex.split(command)
        for override in SMALL if words[0] in ("finetune", "ablate") else ():
            words += [] if words[0] == "finetune" and override.startswith("model.") else ["--set", override]
        with pytest.raises(SystemExit) as end:
            main(words)
        assert not end.value.code, command
        printed = json.loads(capsys.readouterr().out.splitlines()[0])
        assert [key for key in printed if key != "remark"] == keys, command  # which is there if all texts got the same answer


def test_coding_agents_are_told_of_every_command() -> None:
    told = keys_of_commands()
    table = re.split(r"^## ", AGENTS.read_text(encoding="utf-8"), flags=re.MULTILINE)[2]
    assert table.startswith("Commands\n")
    for name, arguments in commands(app):
        command, _, part = name.partition(" ")
        assert re.search(rf"^\| .*`txl {command}\b.*{part}", table, flags=re.MULTILINE), name
        assert any(line.startswith(f"{name} ") for line in told) == any("--json" in a.names for a in arguments), name


@pytest.mark.parametrize("document", [ENGLISH, CHINESE, *sorted((ROOT / "docs").glob("*.md"))], ids=lambda page: page.name)
def test_commands_can_be_parsed(document: Path) -> None:
    """Their options exist, and values have the right kind; `$'\\n'` is a line end in a shell."""
    code = "\n".join(block for language, block in blocks(document) if language not in ("python", "py", "toml"))
    lines = code.replace("\\\n", " ").replace(r"$'\n'", "X").splitlines()
    for line in lines:
        for command in re.findall(r"(?:^(?:\$ )?|\| )txl ([a-z].*)|-m transformer_xl ([a-z].*)", line):
            words = shlex.split(re.split(r" [|>&]", "".join(command))[0], comments=True)
            app.parse_args(words, exit_on_error=False, print_error=False)
