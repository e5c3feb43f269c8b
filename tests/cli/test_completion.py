"""Shells complete commands, and the help names arguments."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import Txl


@pytest.mark.skipif(not shutil.which("bash"), reason="no bash")
def test_bash_completes_commands_options_choices_and_recipes(txl: Txl, tmp_path: Path) -> None:
    (tmp_path / "script").write_text(txl("completion", "bash").out)
    program = tmp_path / "txl"
    program.write_text(f'#!/bin/sh\nPYTHONPATH={":".join(sys.path)} exec {sys.executable} -m transformer_xl "$@"\n')
    program.chmod(0o700)

    def bash(code: str) -> str:
        command = ["bash", "-c", f"source {tmp_path}/script; {code}"]
        path = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
        return subprocess.run(command, env=path, capture_output=True, text=True, check=True, timeout=60).stdout

    def completed(line: str) -> set[str]:
        words = line.split(" ")
        return set(bash(f"COMP_WORDS=({line}); COMP_CWORD={len(words) - 1}; _txl; echo ${{COMPREPLY[@]}}").split())

    assert completed("txl tra") == {"train", "translate"}
    assert completed("txl train --dry") == {"--dry-run"}
    assert completed("txl eval run --checkpoint a") == {"average"}
    assert completed("txl train wt103-") >= {"wt103-base", "wt103-large"}
    assert "sst2" in completed("txl finetune run --task s")
    assert "-o default" in bash("complete -p txl")  # a run or a text: whatever file there is


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_scripts_for_other_shells(txl: Txl, tmp_path: Path, shell: str) -> None:
    script = txl("completion", shell).out
    assert "finetune" in script and "dry-run" in script
    if program := shutil.which(shell):
        (tmp_path / "script").write_text(script)
        subprocess.run([program, "-n", tmp_path / "script"], check=True, timeout=60)


def test_usage_names_what_may_be_left_out(txl: Txl) -> None:
    usage = {"train": "[RECIPE or TEXT]", "predict": "RUN [FILE]", "plot": "[RUN...]", "ablate": "[RECIPE...]", "eval": "RUN"}
    for command, argument in {**usage, "corpus prepare": "[CORPUS]"}.items():
        assert txl(*command.split(), "--help").out.splitlines()[0] == f"Usage: txl {command} [OPTIONS] {argument}"
