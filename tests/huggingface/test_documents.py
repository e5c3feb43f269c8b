"""The snippets of docs/huggingface.md run, one after the other, and so does the example."""

import re
import runpy
import sys
from pathlib import Path

import pytest

from tests.helpers import tiny_model
from transformer_xl.config.model import HeadConfig
from transformer_xl.config.run import TokenizerConfig
from transformer_xl.model.task_model import TaskModel
from transformer_xl.tokenizers.kinds import train_tokenizer

pytest.importorskip("transformers", reason="the extra 'hf' is not installed")
pytest.importorskip("accelerate", reason="the extra 'hf' is not installed")

ROOT = Path(__file__).parents[2]


def make_model(path: Path, head: HeadConfig | None = None) -> None:
    model = tiny_model(vocab_size=256)
    if head is not None:
        model = TaskModel(model.config.model_copy(update={"head": head}))
    model.save_pretrained(path)
    train_tokenizer(TokenizerConfig(kind="byte"), []).save(path / "tokenizer.json")


@pytest.mark.filterwarnings("ignore:'pin_memory' argument")
def test_the_snippets_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    make_model(tmp_path / "my-model")
    make_model(tmp_path / "mood", HeadConfig(kind="classification", labels=("bad", "good"), tgt_len=8))
    make_model(tmp_path / "squad", HeadConfig(kind="span"))
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs" / "huggingface.md").read_text(encoding="utf-8").partition("## ONNX\n")[0]
    snippets = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(snippets) > 3
    names: dict[str, object] = {}
    for snippet in snippets:
        exec(snippet, names)
    out = capsys.readouterr().out
    assert "def " in out
    assert "{'label': " in out
    assert (tmp_path / "trained" / "model.safetensors").is_file()


@pytest.mark.filterwarnings("ignore:'pin_memory' argument")
def test_the_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from transformers import TrainingArguments

    make_model(tmp_path / "model")
    monkeypatch.setattr(sys, "argv", ["huggingface.py", str(tmp_path / "model")])
    monkeypatch.setattr(
        "transformers.TrainingArguments", lambda out, **options: TrainingArguments(out, **{**options, "max_steps": 2})
    )
    runpy.run_path(str(ROOT / "examples" / "huggingface.py"), run_name="__main__")
    assert capsys.readouterr().out.count("The memory") == 3
