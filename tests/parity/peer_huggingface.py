"""Build tiny random TransfoXL models with Hugging Face's code on request, and say what they compute.

Runs in the environment of requirements-huggingface.txt; `test_live.py` starts it and talks to it in JSON lines, one request
and one answer per line. The first line on stdout says that it is ready: {"ready": true, "transformers": VERSION}. A request is

    {"directory": PATH, "seed": N, "hyperparameters": {of TransfoXLConfig}, "n_segment": S, "batch_size": B, "tgt_len": T,
     "weights": "bin" | "legacy" | "safetensors"}

and leaves behind, under directory, `checkpoint/` (what `save_pretrained` writes), `gradient/` (the same model with gradients in
place of weights, so that converting it says where each gradient belongs) and `expected64.safetensors` (see golden_writer.py; in
float64, because some random models are so ill-conditioned that float32 itself is 1e-5 off). The answer is {"ok": true}, or
{"error": TRACEBACK}. Requests for XLNet have "model": "xlnet" (see peer_xlnet.py), or "head" (peer_xlnet_heads.py).

    .venv-peer/bin/python tests/parity/peer_huggingface.py < requests.jsonl
"""

import contextlib
import json
import sys
import traceback
import warnings
from pathlib import Path
from typing import Any

import golden_writer
import peer_xlnet
import peer_xlnet_heads
import torch
import transformers
from torch import Tensor
from transformers import TransfoXLConfig, TransfoXLLMHeadModel

PEER = f"transformers {transformers.__version__} TransfoXLLMHeadModel"


def build(hyperparameters: dict[str, Any], seed: int) -> TransfoXLLMHeadModel:
    """Make a random model without dropout, in evaluation mode."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # about the order of its outputs
        model = TransfoXLLMHeadModel(TransfoXLConfig(**hyperparameters, dropout=0.0, dropatt=0.0)).eval()
    golden_writer.randomize(model, seed)
    return model


def expect(model: TransfoXLLMHeadModel, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """Take the expectations from the model, from its first zero memory on."""

    def read(ids: Tensor, labels: Tensor, mems: list[Tensor] | None) -> tuple[Tensor, list[Tensor], Any]:
        output = model(ids, mems=mems)
        log_probs = output.prediction_scores
        if ids.shape[1] > 1:  # its own losses leave out the last label of a segment, and are out of order with cutoffs
            own = model(ids, mems=mems, labels=ids.clone()).losses
            nats = -log_probs.gather(-1, labels[..., None]).squeeze(-1)[:, :-1]
            torch.testing.assert_close(own.flatten().sort().values, nats.flatten().sort().values)
        return log_probs, [layer.transpose(0, 1) for layer in output.mems or []], output.mems

    return golden_writer.expectations(model, read, ids, labels)


def answer(request: dict[str, Any]) -> None:
    """Do what one request asks for."""
    if "model" in request:
        {"xlnet": peer_xlnet, "head": peer_xlnet_heads}[request["model"]].answer(request)
        return
    directory, seed = Path(request["directory"]), request["seed"]
    model = build(request["hyperparameters"], seed)
    sizes = {name: request[name] for name in ("n_segment", "batch_size", "tgt_len")}
    ids, labels = golden_writer.stream(model.config.vocab_size, seed=seed, **sizes)
    golden_writer.save(model, directory / "checkpoint", request["weights"])
    with golden_writer.in_double(model, model.transformer.pos_emb):
        tensors = expect(model, ids, labels)
    golden_writer.save_expected(
        directory / "expected64.safetensors",
        tensors,
        peer=PEER,
        hyperparameters=request["hyperparameters"],
        first_memory="zeros",
        aliases=golden_writer.aliases(model),
    )
    golden_writer.put_gradients(model)
    golden_writer.save(model.float(), directory / "gradient", request["weights"])


def main() -> None:
    """Answer requests until stdin ends; whatever the peer prints goes to stderr."""
    answers = sys.stdout
    with contextlib.redirect_stdout(sys.stderr):
        print(json.dumps({"ready": True, "transformers": transformers.__version__}), file=answers, flush=True)
        for line in sys.stdin:
            try:
                answer(json.loads(line))
                reply = {"ok": True}
            except Exception:
                reply = {"error": traceback.format_exc()}
            print(json.dumps(reply), file=answers, flush=True)


if __name__ == "__main__":
    main()
