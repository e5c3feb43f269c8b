"""Tools that read models of transformers, unchanged: minicons gives our surprisals, inseq our gradients and heads.

Not part of the suite: `make tools` builds their environment (tools-requirements.txt) and runs this. They run in a process of
its own there; nothing of them is imported here.
"""

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.helpers import assert_close
from tests.huggingface.conftest import Saved

PEER = Path(__file__).with_name("peer_tools.py")
PYTHON = Path(os.environ.get("TXL_TOOLS_PYTHON", PEER.parents[2] / ".venv-tools" / "bin" / "python"))
REQUEST = {
    "texts": ["this is a text of several words", "several words"],
    "prompts": ["this is", "a text of"],
    "conditional": [["this is", "a text"], ["a text", "of words"]],
    "methods": ["attention", "saliency", "integrated_gradients", "occlusion"],
}

pytestmark = [
    pytest.mark.parity,
    pytest.mark.skipif(not PYTHON.exists(), reason=f"{PYTHON} is missing; `make tools` makes this environment"),
]


@pytest.mark.parametrize("kind", ["char", "word"])
def test_minicons_and_inseq_give_our_numbers(kind: str, save: Callable[..., Saved]) -> None:
    saved = save(kind)
    run = subprocess.run([PYTHON, PEER, saved.path, json.dumps(REQUEST)], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    said = json.loads(run.stdout.splitlines()[-1])
    for text, tokens, total in zip(REQUEST["texts"], said["tokens"], said["sequences"], strict=True):
        own = log_probs(saved, ids_of(saved, text))
        assert_close("tokens", torch.tensor([score for _, score in tokens][1:]), own, 1e-4)
        assert_close("sequence", torch.tensor(total), own.sum(), 1e-4)
    for before, text, total in zip(*REQUEST["conditional"], said["conditional"], strict=True):
        ids = ids_of(saved, f"{before} {text}")
        own = log_probs(saved, ids)[len(ids_of(saved, before)) - 1 :]
        assert_close("continuation", torch.tensor(total), own.sum(), 1e-4)
    assert [word for word, _ in said["words"][0]] == REQUEST["texts"][0].split()
    for text, scores in zip(REQUEST["prompts"], said["next"], strict=True):
        own = saved.model(ids_of(saved, text)[None]).logits
        assert own is not None
        assert_close("next", torch.tensor(scores), own[0, -1].log_softmax(-1), 1e-4)
    for i, prompt in enumerate(REQUEST["prompts"]):
        n_prompt = len(ids_of(saved, prompt))
        ids = torch.tensor(said["attention"][i]["ids"])
        assert len(ids) == n_prompt + 2 and torch.equal(ids[:n_prompt], ids_of(saved, prompt))
        weights, _ = saved.model.attention_weights(ids[None, :-1])
        heads, slope = (torch.tensor(said[method][i]["weights"]) for method in ("attention", "saliency"))
        for step, n in enumerate((n_prompt, n_prompt + 1)):
            expected = torch.stack([weight[0, :, n - 1, :n] for weight in weights])  # (layer, head, key)
            assert_close("heads", heads[:n, step], expected.permute(2, 0, 1), 1e-5)
            assert_close("slopes", slope[:n, step], slopes(saved, ids[: n + 1]).abs(), 1e-5)
        assert all(torch.tensor(said[method][i]["weights"]).abs().max() > 0 for method in REQUEST["methods"])


def ids_of(saved: Saved, text: str) -> Tensor:
    return torch.from_numpy(saved.tokenizer.encode(text))


def log_probs(saved: Saved, ids: Tensor) -> Tensor:
    """Return the log-probability of each token but the first."""
    nll = saved.model(ids[None, :-1], labels=ids[None, 1:]).nll
    assert nll is not None
    return -nll[0].detach()


def slopes(saved: Saved, ids: Tensor) -> Tensor:
    """Return the gradient of the last token's probability with respect to the vectors of those before it."""
    vectors = saved.model.embedding(ids[None, :-1]).detach().requires_grad_()
    h_BTD, _ = saved.model.read(vectors)
    saved.model.softmax.logits(h_BTD, saved.model.embedding)[0, -1].softmax(-1)[ids[-1]].backward()
    assert vectors.grad is not None
    return vectors.grad[0]
