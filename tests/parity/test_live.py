"""Hugging Face's TransfoXL and XLNet, fine-tuned or not, against their converted models, over configurations drawn at random.

There are 200 of a TransfoXL and 100 of each XLNet; TXL_EXAMPLES stands for another number than 100.

Not part of the suite: `make parity` builds the peer's environment and runs it. One long-lived process there
(peer_huggingface.py) makes a tiny random model per configuration; it is converted and must say, remember and learn the same.
Both sides compute with the same float32 weights in float64: some random models are so ill-conditioned that two correct programs
differ by more than 1e-5 in float32. The gradients come through a float32 file.
"""

import json
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from tests.parity.reading import compare, compare_head, compare_xlnet, read_golden
from transformer_xl.conversion.convert import convert
from transformer_xl.conversion.export import load_model
from transformer_xl.model.transformer_xl import TransformerXL
from transformer_xl.model.xlnet import XLNet

N = int(os.environ.get("TXL_EXAMPLES", "100"))
WORKER = Path(__file__).with_name("peer_huggingface.py")
PYTHON = Path(os.environ.get("TXL_PEER_PYTHON", WORKER.parents[2] / ".venv-peer" / "bin" / "python"))

pytestmark = [pytest.mark.parity, pytest.mark.timeout(1800)]


class Peer:
    """The peer's process, asked and answering in JSON lines."""

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        self.process, self.log = process, log
        assert self.answer()["ready"]

    def answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the peer ended:\n{self.log.read_text()[-2000:]}"
        return json.loads(line)

    def make(self, request: dict[str, Any]) -> None:
        """Let it make what `request` asks for."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        answer = self.answer()
        assert answer.get("ok"), answer["error"]


@pytest.fixture(scope="module")
def peer(tmp_path_factory) -> Iterator[Peer]:
    if not PYTHON.exists():
        pytest.skip(f"{PYTHON} is missing; `make parity` makes this environment of the peer")
    log = tmp_path_factory.mktemp("peer") / "stderr.txt"
    with log.open("w") as stderr:
        command = [str(PYTHON), str(WORKER)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, text=True) as process:
            yield Peer(process, log)


@st.composite
def requests(draw: st.DrawFn) -> dict[str, Any]:
    """Draw a configuration of TransfoXLLMHeadModel, and a stream to read."""
    vocab_size = draw(st.integers(4, 60))
    cutoffs = sorted(draw(st.sets(st.integers(1, vocab_size - 1), max_size=3)))
    div_val = draw(st.integers(1, 4))
    d_model = 2 * draw(st.integers(2, 8))
    mem_len = draw(st.integers(0, 9))
    hyperparameters = {
        "vocab_size": vocab_size,
        "cutoffs": cutoffs,
        "div_val": div_val,
        "d_model": d_model,
        "d_embed": max(draw(st.just(d_model) | st.integers(1, 20)), div_val ** len(cutoffs)),
        "n_layer": draw(st.integers(1, 3)),
        "n_head": draw(st.integers(1, 3)),
        "d_head": draw(st.integers(1, 6)),
        "d_inner": draw(st.integers(1, 20)),
        "mem_len": mem_len,
        "clamp_len": draw(st.integers(-1, 12)),
        "same_length": draw(st.booleans()) if mem_len else False,
        "pre_lnorm": draw(st.booleans()),
        "untie_r": draw(st.booleans()),
        "tie_word_embeddings": draw(st.booleans()),
        "proj_share_all_but_first": draw(st.booleans()),
        "layer_norm_epsilon": draw(st.sampled_from([1e-5, 1e-6, 1e-3])),
    }
    return {
        "hyperparameters": hyperparameters,
        "seed": draw(st.integers(0, 2**31)),
        "n_segment": draw(st.integers(3, 5)),
        "batch_size": draw(st.integers(1, 3)),
        "tgt_len": draw(st.integers(1, 9)),
        "weights": draw(st.sampled_from(["bin", "legacy", "safetensors"])),
    }


@settings(max_examples=2 * N)
@given(request=requests())
def test_converted_model_computes_the_same(peer: Peer, request: dict[str, Any]):
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        peer.make({"directory": temporary, **request})
        convert(directory / "checkpoint", directory / "native")
        convert(directory / "gradient", directory / "native-gradient")
        model = TransformerXL.from_pretrained(directory / "native")
        gradients = load_file(directory / "native-gradient" / "model.safetensors")
        golden = read_golden(directory / "expected64.safetensors")
        compare(model, golden, gradients, tolerance=1e-9, tolerance_of_gradients=1e-6)


@st.composite
def xlnet_requests(draw: st.DrawFn) -> dict[str, Any]:
    """Draw a configuration of XLNetLMHeadModel, and segments to read (see peer_xlnet.py).

    The peer sees all of its memory: there is none before the first segment, or a full one of zeros, and none where rows are
    padded.
    """
    n_head, bi_data = draw(st.integers(1, 3)), draw(st.booleans())
    tgt_len = draw(st.integers(3, 9))
    n_target = draw(st.just(0) | st.integers(1, tgt_len - 2))
    padding = draw(st.booleans()) and tgt_len - n_target > 2
    mem_len = draw(st.integers(1, 9))
    zeros = mem_len if draw(st.booleans()) and not padding else 0
    hyperparameters = {
        "vocab_size": draw(st.integers(4, 60)),
        "d_model": n_head * draw(st.sampled_from([2, 4, 6])),
        "n_layer": draw(st.integers(1, 3)),
        "n_head": n_head,
        "d_inner": draw(st.integers(1, 20)),
        "ff_activation": draw(st.sampled_from(["gelu", "gelu_new", "relu", "relu2"])),
        "mem_len": mem_len,
        "reuse_len": draw(st.none() | st.integers(1, tgt_len)),
        "clamp_len": draw(st.integers(-1, 12)),
        "bi_data": bi_data,
        "untie_r": draw(st.booleans()),
        "same_length": draw(st.booleans()),
        "tie_word_embeddings": draw(st.booleans()),
        "layer_norm_eps": draw(st.sampled_from([1e-12, 1e-5, 1e-3])),
    }
    return {
        "model": "xlnet",
        "hyperparameters": hyperparameters,
        "seed": draw(st.integers(0, 2**31)),
        "n_segment": 1 if padding else draw(st.integers(1, 4)),
        "batch_size": draw(st.sampled_from([2, 4]) if bi_data else st.integers(1, 3)),
        "tgt_len": tgt_len,
        "n_target": n_target,
        "segments": draw(st.booleans()),
        "padding": padding,
        "zeros": zeros,
        "weights": draw(st.sampled_from(["bin", "legacy", "safetensors"])),
    }


@settings(max_examples=N)
@given(request=xlnet_requests())
def test_converted_xlnet_computes_the_same(peer: Peer, request: dict[str, Any]):
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        peer.make({"directory": temporary, **request})
        convert(directory / "checkpoint", directory / "native", settings={"zero_first_memory": request["zeros"] > 0})
        convert(directory / "gradient", directory / "native-gradient")
        model = XLNet.from_pretrained(directory / "native")
        gradients = load_file(directory / "native-gradient" / "model.safetensors")
        golden = read_golden(directory / "expected.safetensors")
        compare_xlnet(model, golden, gradients, dtype=torch.float64, tolerance=1e-9, tolerance_of_gradients=1e-6)


@st.composite
def head_requests(draw: st.DrawFn) -> dict[str, Any]:
    """Draw a configuration of a fine-tuned XLNet, and texts to score (see peer_xlnet_heads.py)."""
    task = draw(st.sampled_from(["classification", "multilabel", "regression", "choice", "span", "tokens"]))
    n_head = draw(st.integers(1, 3))
    projection = draw(st.booleans())
    length, n_whole = draw(st.integers(3, 7)), draw(st.integers(0, 2)) if task not in ("choice", "span") else 0
    summary = draw(st.sampled_from(["last", "mean"])) if not n_whole else "last"
    hyperparameters = {
        "vocab_size": draw(st.integers(4, 60)),
        "d_model": n_head * draw(st.sampled_from([2, 4, 6])),
        "n_layer": draw(st.integers(1, 3)),
        "n_head": n_head,
        "d_inner": draw(st.integers(1, 20)),
        "ff_activation": draw(st.sampled_from(["gelu", "gelu_new", "relu", "relu2"])),
        "mem_len": draw(st.integers(1, 9)),
        "clamp_len": draw(st.integers(-1, 12)),
        "layer_norm_eps": draw(st.sampled_from([1e-12, 1e-5, 1e-3])),
        "summary_type": summary,
        "summary_use_proj": projection,
        "summary_activation": "tanh" if projection else None,
    }
    return {
        "model": "head",
        "task": task,
        "hyperparameters": hyperparameters,
        "seed": draw(st.integers(0, 2**31)),
        "n_score": 1 if task == "regression" else draw(st.integers(2, 5)),
        "batch_size": draw(st.integers(1, 3)),
        "n_choice": draw(st.integers(2, 4)),
        "lengths": [draw(st.integers(1, length)), *[length] * n_whole] if n_whole else [length],
        "padding": not n_whole and summary == "last" and draw(st.booleans()),
        "weights": draw(st.sampled_from(["bin", "legacy", "safetensors"])),
    }


@settings(max_examples=N)
@given(request=head_requests())
def test_converted_heads_compute_the_same(peer: Peer, request: dict[str, Any]):
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        peer.make({"directory": temporary, **request})
        golden = read_golden(directory / "expected.safetensors")
        for ours, theirs in (("native", "checkpoint"), ("native-gradient", "gradient")):
            convert(directory / theirs, directory / ours, settings={"head": golden.reading})
        model, _ = load_model(directory / "native", kinds=("xlnet",))
        gradients = load_file(directory / "native-gradient" / "model.safetensors")
        compare_head(model, golden, gradients, dtype=torch.float64, tolerance=1e-9, tolerance_of_gradients=1e-6)
