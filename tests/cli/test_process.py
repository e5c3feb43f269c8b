"""`txl` as a process of its own: signals, closed pipes, full disks, and what is imported when."""

import builtins
import errno
import io
import json
import os
import runpy
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import forked
from tests.cli.conftest import Answer, Txl, without_slow_parts
from tests.forked import run_forked
from tests.training.helpers import differing, run_bits
from tests.world_cases import program
from transformer_xl import console
from transformer_xl.checkpoint.run_directory import RunDirectory
from transformer_xl.cli.printers import show

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals and limits")

CODE = "import sys; from transformer_xl.cli import main; main(sys.argv[1:])"
TRAIN = ("train", "tiny.toml", "--corpus", "text.txt", "--out")


def program_without_curve(*arguments: str) -> None:
    """Run as `txl` in a process that is forked; a curve takes longer than the training."""
    without_slow_parts(pytest.MonkeyPatch())
    program(*arguments)


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-W", "error", "-c", CODE, *arguments]


def test_ctrl_c_while_the_program_itself_is_read_is_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    really = builtins.__import__

    def importing(name: str, *where: Any, **options: Any) -> Any:
        if name == "transformer_xl.cli":
            raise KeyboardInterrupt
        return really(name, *where, **options)

    monkeypatch.setattr(builtins, "__import__", importing)
    with pytest.raises(SystemExit) as end:
        runpy.run_module("transformer_xl", run_name="__main__")
    assert end.value.code == 130


@pytest.fixture
def environment(workbench: Path) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}  # a person has buffers
    return {**inherited, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2] / "src")}


def test_signals_stop_a_run_that_then_resumes_exactly(workbench: Path, txl: Txl) -> None:
    """The whole promise, once: every way to be stopped, then to the end; the state is that of a run which was left alone."""
    settings = ("--set", "train.max_steps=100", "--set", "train.log_interval=2", "--set", "train.eval_interval=40")
    settings = (*settings, "--set", "train.checkpoint_interval=1000")
    arguments = (*TRAIN, "run1", *settings)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE):
        with forked.start("tests.cli.test_process:program_without_curve", *arguments) as child:
            shown = b""
            while "% · step ".encode() not in shown:
                shown += child.stderr.read(1000) or pytest.fail(shown.decode())
            arguments = ("train", "--resume", "--out", "run1")
            if number == signal.SIGPIPE:
                child.stderr.close()
                assert child.wait() == 141
                continue
            child.send_signal(number)
            _, rest = child.communicate()
            assert child.wait() == {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 129}[number]
        text = (shown + rest).decode()
        last = text.splitlines()[-1]
        assert last.startswith(f"{number.name}: saved step ")
        assert last.rstrip().endswith("; go on with: txl train --resume --out run1")
        assert "Traceback" not in text
    assert RunDirectory(workbench / "run1").store().steps()[-1] < 100, "it ended before it was stopped"
    assert txl(*arguments).status == 0
    assert txl(*TRAIN, "run2", *settings).status == 0
    assert differing(run_bits(workbench / "run1"), run_bits(workbench / "run2")) == []


def test_ctrl_c_while_a_finished_model_is_scored(workbench: Path, txl: Txl) -> None:
    """It keeps what was trained, draws the curve, and says how to score later."""
    settings = ("--set", "train.max_steps=8", "--set", "train.eval_interval=99", "--set", "eval.max_tokens=20")
    with forked.start("tests.world_cases:program_that_scores_slowly", *TRAIN, "new", *settings) as child:
        shown = b""
        while b"scoring all" not in shown:
            shown += child.stderr.read(1000) or pytest.fail(shown.decode())
        child.send_signal(signal.SIGINT)
        _, rest = child.communicate()
        assert child.wait() == 130
    assert rest == b"SIGINT: saved step 8, which is not scored; score it with: txl eval new\n"
    assert (workbench / "new" / "loss.png").exists()
    assert RunDirectory(workbench / "new").store().steps() == [8]
    assert txl("eval", "new").status == 0
    scored, again = (txl("train", "--resume", "--out", "new").err for _ in range(2))
    assert "scoring all" in scored and "finished already" in again
    found = [next(line for line in err.splitlines() if line.startswith("validation, ")) for err in (scored, again)]
    assert found[0] == found[1]


def test_streams_that_are_closed_at_the_start(environment: dict[str, str]) -> None:
    """A complaint does not go to standard output, nor into the file that is opened next."""
    shell = f"exec {shlex.join(command('trian'))} 0<&- 2>&-"
    done = subprocess.run(["sh", "-c", shell], env=environment, stdout=subprocess.PIPE, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (2, b"")


def test_a_reader_that_has_seen_enough_leaves_the_memory_as_it_was(workbench: Path, txl: Txl) -> None:
    assert txl("generate", "run", "--prompt", "the", "--tokens", "3", "--memory", "book").status == 0
    before = Path("book").read_bytes()
    options = ("--prompt", "the", "--tokens", "100000", "--compile", "no", "--memory", "book")
    with forked.start("tests.world_cases:program", "generate", "run", *options) as child:
        assert child.stdout.read(20)
        child.stdout.close()
        assert child.wait() == 0
        assert child.stderr.read() == b""
    assert Path("book").read_bytes() == before


def unread() -> int:
    """Return the writing end of a pipe whose reading end is closed."""
    read, write = os.pipe()
    os.close(read)
    return write


CORPORA = ("corpus", "list")
"""So little that it is written when the command has ended, as a score is; but torch is not imported for it."""


@pytest.mark.parametrize(("arguments", "status"), [(CORPORA, 0), (("--help",), 0), (("eval", "run", "--mem-len", "x"), 2)])
def test_standard_output_without_a_reader_is_no_error(
    environment: dict[str, str], arguments: tuple[str, ...], status: int
) -> None:
    out = unread()
    done = subprocess.run(command(*arguments), env=environment, stdout=out, stderr=subprocess.PIPE, timeout=60, check=False)
    os.close(out)
    assert done.returncode == status, done.stderr
    assert b"Error" not in done.stderr


def test_standard_error_without_a_reader_takes_nothing_from_the_status(environment: dict[str, str]) -> None:
    """But a run that nobody watches any more is saved and ends, see above."""
    err = unread()
    done = subprocess.run(command("eval", "gone"), env=environment, stdout=subprocess.PIPE, stderr=err, timeout=60, check=False)
    os.close(err)
    assert (done.returncode, done.stdout) == (1, b"")


def program_that_says_how_far_it_is(*arguments: str) -> None:
    """Run as `txl`, and write a line of progress whenever there is any."""
    console.LINE_SECONDS = 0.0
    program(*arguments)


def test_standard_error_without_a_reader_takes_nothing_from_the_result(workbench: Path) -> None:
    with forked.start("tests.cli.test_process:program_that_says_how_far_it_is", "eval", "run") as child:
        child.stderr.close()
        assert b"bits per character" in child.stdout.read()
        assert child.wait() == 0


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has it")
@pytest.mark.parametrize(
    "arguments", [CORPORA, pytest.param(("generate", "run", "--tokens", "3", "--quiet"), marks=pytest.mark.slow)]
)
def test_a_disk_that_is_full_for_the_result_is_one_line(environment: dict[str, str], arguments: tuple[str, ...]) -> None:
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(
            command(*arguments), env=environment, stdout=full, stderr=subprocess.PIPE, timeout=60, check=False
        )
    (line,) = done.stderr.splitlines()
    assert (done.returncode, line.startswith(b"txl: error: ")) == (1, True)
    assert b"No space left on device; free disk space" in line
    assert b"standard output" in line


def test_standard_output_that_cannot_be_written_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def full() -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("sys.stdout", output := io.StringIO())
    monkeypatch.setattr(output, "flush", full)
    with pytest.raises(OSError, match="No space left on device: 'standard output'"):
        show("text")


def test_ctrl_c_while_writing(environment: dict[str, str]) -> None:
    """In a process that nobody forked."""
    options = ("--tokens", "100000", "--compile", "no")
    child = subprocess.Popen(
        command("generate", "run", *options), env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert child.stdout
    child.stdout.read(5)
    child.send_signal(signal.SIGINT)
    _, err = child.communicate(timeout=60)
    assert child.returncode == 130
    assert err.startswith(b"interrupted; read ")


def txl_on_a_full_disk(size: int, workbench: Path, *arguments: str) -> Answer:
    """Call `txl`, forked, on a disk that takes no more than `size` bytes per file."""
    (answer,) = run_forked("tests.world_cases:txl_with_small_files", 1, size, str(workbench), *arguments)
    return Answer(**answer)


def test_a_disk_that_is_full_when_checkpoints_are_saved(workbench: Path, txl: Txl) -> None:
    """Prepared text and log fit, checkpoints do not."""
    refused = txl_on_a_full_disk(20_000, workbench, *TRAIN, "full")
    assert refused.status == 1, refused.err
    lines = refused.err.splitlines()
    assert "Traceback" not in refused.err
    warnings = [line for line in lines if line.startswith("warning: ")]
    assert all("is not saved: " in line and "File too large; raise the limit of file sizes" in line for line in warnings)
    assert len(warnings) == 4  # steps 8 to 32; step 40 is the last, an error
    assert lines[-1].startswith("txl: error: 'full/checkpoints/step-00000040.tmp/")
    assert txl("train", "--resume", "--out", "full", "--quiet").status == 0
    assert differing(run_bits(workbench / "full"), run_bits(workbench / "run")) == ["config"]


def test_a_disk_that_is_full_at_the_start(workbench: Path, txl: Txl) -> None:
    assert txl("corpus", "prepare", "text.txt").status == 0
    refused = txl_on_a_full_disk(100, workbench, *TRAIN, "full")
    assert refused.status == 1
    (line,) = refused.err.splitlines()
    assert line.startswith("txl: error: 'full/") and line.endswith("': File too large; raise the limit of file sizes")
    assert txl(*TRAIN, "full", "--set", "train.max_steps=1").status == 0  # what it left is in nobody's way


HEAVY = {"torch", "numpy", "matplotlib", "tokenizers", "safetensors", "huggingface_hub", "pydantic"}


LIGHT = ["--help", "train --help", "finetune --help", "ablate --help", "corpus prepare --help", "--version", "trian"]


def test_help_imports_nothing_heavy(environment: dict[str, str]) -> None:
    code = f"""
import contextlib, json, sys
from transformer_xl.cli import main
found = {{}}
for line in {LIGHT!r}:
    with contextlib.suppress(SystemExit):
        main(line.split())
    found[line] = sorted({HEAVY!r} & sys.modules.keys())
print(json.dumps(found), file=sys.stderr)
"""
    child = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True, timeout=60
    )
    assert json.loads(child.stderr.splitlines()[-1]) == {line: [] for line in LIGHT}
