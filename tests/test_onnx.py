"""The exported graph computes what the model computes, over several segments of rows of different age and length."""

import io
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.helpers import assert_close, tiny_model
from transformer_xl.batch import Rows
from transformer_xl.errors import ConfigError
from transformer_xl.model.transformer_xl import TransformerXL
from transformer_xl.onnx import export_onnx

onnx = pytest.importorskip("onnx", reason="the extra 'onnx' is not installed")
onnxruntime = pytest.importorskip("onnxruntime", reason="the extra 'onnx' is not installed")
pytest.importorskip("onnxscript", reason="the extra 'onnx' is not installed")

VARIANTS: dict[str, dict[str, Any]] = {
    "n-grams, adaptive": {
        **{"n_layer": 1, "ngram_rows": (40, 9), "cutoffs": (4, 9), "div_val": 2, "d_embed": 10},
        **{"clamp_len": 4, "same_length": True, "untie_r": True, "pre_lnorm": True},
    },
    "zero first memory": {"n_layer": 1, "zero_first_memory": True},
    "al_rfou": {"attention": "al_rfou", "max_klen": 8, "n_head": 2, "d_head": 5, "cutoffs": (4, 9)},
    "shaw": {"attention": "shaw", "max_klen": 9, "final_norm": True},
    "rotary": {"attention": "rotary", "pre_lnorm": True},
    "alibi": {"attention": "alibi", "clamp_len": 4},
    "averages, gates": {"shift": "averages", "d_model": 16, "gate": "gru", "pre_lnorm": True},
}

IN_THE_SUITE = ("n-grams, adaptive",)
"""An export takes seconds; the others are slow tests."""

Export = Callable[[str], tuple[TransformerXL, Path]]


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Export:
    """Exports a variant's model in training mode, with segments of three, once for all tests."""

    @cache
    def exported(variant: str) -> tuple[TransformerXL, Path]:
        model, said = tiny_model(**VARIANTS[variant]).train(), io.StringIO()
        with redirect_stdout(said), redirect_stderr(said):
            path = export_onnx(model, tmp_path_factory.mktemp(variant) / "deep" / "model.onnx", tgt_len=3)
        assert said.getvalue() == "", "the exporter's own remarks"
        return model, path

    return exported


class Runner:
    """Runs the file segment by segment and keeps the memory, as a program without torch would."""

    def __init__(self, path: Path, model: TransformerXL, batch_size: int) -> None:
        self.session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        names = [node.name for node in self.session.get_inputs()]
        assert names == [
            "ids",
            "n_pad",
            "n_valid",
            *(f"mems.{i}" for i in range(model.config.n_layer)),
            *["tokens"] * bool(model.config.n_earlier),
        ]
        self.outputs = [node.name for node in self.session.get_outputs()]
        n_valid = model.mem_len if model.config.zero_first_memory else 0
        self.memory: dict[str, np.ndarray] = {"n_valid": np.full(batch_size, n_valid, np.int64)}
        shapes = {node.name: node.shape for node in self.session.get_inputs()}
        for name in names[3 : 3 + model.config.n_layer]:
            assert shapes[name][1] == model.n_kept
            self.memory[name] = np.zeros((batch_size, *shapes[name][1:]), np.float32)
        if model.config.n_earlier:
            self.memory["tokens"] = np.zeros((batch_size, model.config.n_earlier), np.int64)

    def read(self, ids: torch.Tensor, n_pad: torch.Tensor) -> torch.Tensor:
        values = self.session.run(None, {"ids": ids.numpy(), "n_pad": n_pad.numpy(), **self.memory})
        named = dict(zip(self.outputs, values, strict=True))
        self.memory = {name.removeprefix("new_"): value for name, value in named.items() if name != "logits"}
        return torch.from_numpy(named["logits"])


@pytest.mark.parametrize(
    "variant", [pytest.param(name, marks=[] if name in IN_THE_SUITE else pytest.mark.slow) for name in VARIANTS]
)
def test_the_graph_is_the_model_segment_after_segment(variant: str, exported: Export) -> None:
    model, path = exported(variant)
    assert [file.name for file in path.parent.iterdir()] == ["model.onnx"]
    assert all(module.training for module in model.modules()), "the caller's model is left as it was"
    onnx.checker.check_model(path, full_check=True)
    model = deepcopy(model).eval()
    for batch_size in (1, 3):
        runner, mems = Runner(path, model, batch_size), model.init_mems(batch_size)
        for n_pad in ([0, 0, 0], [0, 2, 1], [2, 3, 0], [0, 0, 1]):
            ids, pad = torch.randint(13, (batch_size, 3)), torch.tensor(n_pad[:batch_size])
            with torch.no_grad():
                out = model(ids, mems=mems, rows=Rows(n_pad=pad))
            mems = out.mems
            logits = runner.read(ids, pad)
            assert out.logits is not None
            for row in range(batch_size):
                assert_close("logits", logits[row, n_pad[row] :], out.logits[row, n_pad[row] :], 1e-4)
            assert runner.memory["n_valid"].tolist() == mems.n_valid.tolist()
            assert mems.tokens is None or runner.memory["tokens"].tolist() == mems.tokens.tolist()
            for i, hidden in enumerate(mems.hidden):
                for row, n in enumerate(mems.n_valid.tolist()):
                    ours = torch.from_numpy(runner.memory[f"mems.{i}"])[row]
                    first = max(len(ours) - n, 0)
                    assert_close("memory", ours[first:], hidden[row, first:], 1e-4)


def test_a_fixed_batch_and_another_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the exporter is asked for: it takes seconds, and a shape that it is not told to leave open is fixed."""
    asked: list[Any] = []

    def export(*arguments: Any, **options: Any) -> None:
        asked.extend([arguments, options])
        raise InterruptedError

    monkeypatch.setattr(torch.onnx, "export", export)
    model = tiny_model(n_layer=1).with_context(mem_len=7)
    with pytest.raises(InterruptedError):
        export_onnx(model, tmp_path / "model.onnx", batch_size=2, tgt_len=1)
    (_, (ids, n_pad, n_valid, mems)), options = asked
    assert [list(x.shape) for x in (ids, n_pad, n_valid, *mems)] == [[2, 1], [2], [2], [2, 7, 10]]
    assert options["dynamic_shapes"] is None
    assert options["input_names"] == ["ids", "n_pad", "n_valid", "mems.0"]


@pytest.mark.parametrize("sizes", [{"tgt_len": 0}, {"batch_size": 0}, {"tgt_len": -1, "batch_size": 2}])
def test_sizes_below_one_are_refused(tmp_path: Path, sizes: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=r"^tgt_len \(.+\) and batch_size \(.+\) must be at least 1$"):
        export_onnx(tiny_model(n_layer=1), tmp_path / "model.onnx", **sizes)
    assert not list(tmp_path.iterdir())


def test_a_model_without_memory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no segments to go on from"):
        export_onnx(tiny_model(mem_len=0), tmp_path / "model.onnx")


@pytest.mark.parametrize(
    ("variant", "first_n_valid"), [(IN_THE_SUITE[0], 0), pytest.param("zero first memory", 5, marks=pytest.mark.slow)]
)
def test_the_document_reads_on_as_the_model_does(
    variant: str, first_n_valid: int, exported: Export, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, path = exported(variant)
    model = deepcopy(model).eval()
    text = (Path(__file__).parents[1] / "docs" / "huggingface.md").read_text(encoding="utf-8").partition("## ONNX\n")[2]
    monkeypatch.chdir(path.parent)
    names: dict[str, Any] = {}
    exec(text.partition("```python\n")[2].partition("```")[0], names)
    with torch.no_grad():
        mems = model(torch.arange(3)[None]).mems
        expected = model(torch.arange(1)[None], mems=mems).logits
    assert expected is not None
    assert_close("last scores", torch.from_numpy(names["found"]["logits"][0, -1]), expected[0, -1], 1e-4)
    assert names["facts"] == {"mem_len": 5, "tgt_len": 3, "vocab_size": 13, "first_n_valid": first_n_valid}
