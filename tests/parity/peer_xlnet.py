"""Build tiny random XLNet models with Hugging Face's code, and say what they compute.

Runs in the environment of requirements-huggingface.txt. `peer_huggingface.py` passes on requests that have "model": "xlnet":

    {"model": "xlnet", "directory": PATH, "seed": N, "hyperparameters": {of XLNetConfig}, "n_segment": S, "batch_size": B,
     "tgt_len": T, "n_target": K (0: one stream), "segments": whether there are texts, "padding": whether rows are padded at the
     left, "zeros": positions of a first memory of zeros, "weights": "bin" | "legacy" | "safetensors"}

Expectations have these tensors, batch first, in float64:

    ids                     int64 (S, B, T)
    labels                  int64 (S, B, K), the tokens at the targets; -100 is not scored; with one stream (S, B, T)
    rank, sees              int64 (S, B, T): i sees j if rank[j] < sees[i]; the peer gets this as `perm_mask`
    targets                 int64 (S, B, K), positions; with one stream there are none
    segments                int64 (S, B, T), the text of each token (some only)
    n_pad                   int64 (B,), padding at the left of each row (some only, of one segment without memory)
    logits                  (S, B, K, V) or (S, B, T, V)
    nats                    (S, B, K) or (S, B, T), 0 where nothing is scored
    mems.{layer}            (B, M, D), the memory after the last segment
    grads.{name}            of the last segment's summed nats, for every parameter

and an entry of metadata, `about`: see golden_writer.py.
"""

from pathlib import Path
from typing import Any

import golden_writer
import torch
import transformers
from torch import Tensor
from transformers import XLNetConfig, XLNetLMHeadModel

PEER = f"transformers {transformers.__version__} XLNetLMHeadModel"
NOT_SCORED = -100


class ExactPositions:
    """`relative_positional_encoding` of a model in the model's type; theirs is in float32, and two streams do not cast it."""

    def __init__(self, model: Any):
        self.model = model

    def __call__(self, qlen: int, klen: int, bsz: int) -> Tensor:
        model = self.model
        distance = torch.arange(klen, -qlen, -1.0, dtype=model.dtype)
        if model.clamp_len > 0:
            distance = distance.clamp(-model.clamp_len, model.clamp_len)
        frequency = 1 / torch.pow(10000, torch.arange(0, model.d_model, 2.0, dtype=model.dtype) / model.d_model)

        def rows(distance: Tensor, n_row: int) -> Tensor:
            angle = distance[:, None] * frequency
            return torch.cat([angle.sin(), angle.cos()], dim=-1)[:, None].expand(-1, n_row, -1)

        if not model.bi_data:
            return rows(distance, bsz)
        return torch.cat([rows(distance, bsz // 2), rows(-distance, bsz // 2)], dim=1)


def build(hyperparameters: dict[str, Any], seed: int) -> XLNetLMHeadModel:
    """Make a random model without dropout, in evaluation mode."""
    model = XLNetLMHeadModel(XLNetConfig(**hyperparameters, dropout=0.0, use_mems_eval=True)).eval()
    golden_writer.randomize(model, seed)
    return model


def draw(request: dict[str, Any], vocab_size: int) -> dict[str, Tensor]:
    """Draw what the model reads: tokens, an order of some of them, texts, padding."""
    S, B, T, K = (request[name] for name in ("n_segment", "batch_size", "tgt_len", "n_target"))
    generator = torch.Generator().manual_seed(request["seed"])

    def integers(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator)

    n_pad = torch.zeros(B, dtype=torch.int64)
    if request["padding"]:
        n_pad = integers(0, T - K - 1, B)  # one token at least is no target: a target that sees nothing is not compared
        n_pad[0] = 1
    drawn = {"ids": integers(0, vocab_size, S, B, T)}
    if request["segments"]:
        drawn["segments"] = integers(0, 3, S, B, T)
    if request["padding"]:
        drawn["n_pad"] = n_pad
    rank, sees = torch.full((S, B, T), -1), torch.zeros(S, B, T, dtype=torch.int64)
    targets = torch.zeros(S, B, K, dtype=torch.int64)
    for s in range(S):
        for b in range(B):
            pad = int(n_pad[b])
            places = pad + torch.randperm(T - pad, generator=generator)[:K]
            targets[s, b] = places
            order = torch.randperm(K, generator=generator)
            rank[s, b, places], sees[s, b, places] = order, order
            # as SEP and CLS do, another token stands in the order without being a target, and sees itself
            free = [i for i in range(pad, T) if i not in places.tolist()]
            if K and len(free) > 1:
                rank[s, b, free[-1]], sees[s, b, free[-1]] = K - 1, K
    labels = drawn["ids"].gather(2, targets) if K else drawn["ids"].clone()
    labels[integers(0, 5, *labels.shape) == 0] = NOT_SCORED
    labels[-1, 0, -1] = drawn["ids"][-1, 0, -1]  # something is scored
    if request["padding"] and not K:
        labels[:, torch.arange(T) < n_pad[:, None]] = NOT_SCORED
    return drawn | {"rank": rank, "sees": sees, "targets": targets, "labels": labels}


def expect(model: XLNetLMHeadModel, drawn: dict[str, Tensor], zeros: int) -> dict[str, Tensor]:
    """Take the expectations from the model; it begins without memory, or after so many zero vectors."""
    S, B, T = drawn["ids"].shape
    K = drawn["targets"].shape[2]
    mems = [torch.zeros(zeros, B, model.config.d_model, dtype=model.dtype)] * model.config.n_layer if zeros else None
    found, last = {"logits": [], "nats": []}, torch.zeros(())
    for s in range(S):
        given: dict[str, Any] = {}
        if K:
            hidden = drawn["rank"][s].unsqueeze(1) >= drawn["sees"][s].unsqueeze(2)
            given["perm_mask"] = hidden.to(model.dtype)
            given["target_mapping"] = torch.nn.functional.one_hot(drawn["targets"][s], T).to(model.dtype)
        if "segments" in drawn:
            given["token_type_ids"] = drawn["segments"][s]
        if "n_pad" in drawn:
            given["attention_mask"] = (torch.arange(T) >= drawn["n_pad"][:, None]).to(model.dtype)
        labels = drawn["labels"][s]
        output = model(drawn["ids"][s], mems=mems, labels=labels, **given)
        log_probs = output.logits.log_softmax(-1)
        scored = labels != NOT_SCORED
        nats = -log_probs.gather(-1, labels.clamp(min=0)[..., None]).squeeze(-1) * scored
        if scored.any():
            torch.testing.assert_close(output.loss, nats.sum() / scored.sum())
        found["logits"].append(output.logits.detach())
        found["nats"].append(nats.detach())
        mems, last = output.mems, nats.sum()
    model.zero_grad(set_to_none=True)
    last.backward()
    tensors = drawn | {name: torch.stack(parts) for name, parts in found.items()}
    tensors |= {f"mems.{i}": layer.transpose(0, 1) for i, layer in enumerate(mems or ())}
    for name, parameter in model.named_parameters():
        tensors[f"grads.{name}"] = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    assert all(torch.isfinite(tensor).all() for tensor in tensors.values())
    return tensors


def expect_exactly(model: XLNetLMHeadModel, drawn: dict[str, Tensor], zeros: int) -> dict[str, Tensor]:
    """Take the expectations in float64, after a look at whether the peer's own code says about the same in float32."""
    single = expect(model, drawn, zeros)
    model.transformer.relative_positional_encoding = ExactPositions(model.transformer)
    assert all(torch.allclose(single[name], x, atol=1e-6) for name, x in expect(model, drawn, zeros).items())
    model.double()
    double = expect(model, drawn, zeros)
    for name, exact in double.items():
        if exact.is_floating_point():  # some random models are ill-conditioned
            assert (single[name] - exact).abs().max() <= 1e-4 * max(1.0, exact.abs().max().item()), name
    return double


def write(request: dict[str, Any], directory: Path, *, must_learn: bool = False) -> XLNetLMHeadModel:
    """Write `checkpoint/` and `expected.safetensors`; return the model with the gradients, in float64."""
    hyperparameters = request["hyperparameters"]
    model = build(hyperparameters, request["seed"])
    drawn = draw(request, hyperparameters["vocab_size"])
    golden_writer.save(model, directory / "checkpoint", request["weights"])
    tensors = expect_exactly(model, drawn, request["zeros"])
    if must_learn:
        idle = {"mask_emb"} if not request["n_target"] else set()
        idle |= set() if request["segments"] else {"r_s_bias", "seg_embed"}
        golden_writer.check_all_learn({name: x for name, x in tensors.items() if name.rpartition(".")[2] not in idle})
    golden_writer.save_expected(
        directory / "expected.safetensors",
        tensors,
        peer=PEER,
        hyperparameters=hyperparameters,
        first_memory="zeros" if request["zeros"] else "empty",
        aliases=golden_writer.aliases(model),
        reading={name: request[name] for name in ("zeros",)},
    )
    return model


def answer(request: dict[str, Any]) -> None:
    """Do what one request asks for: as `write`, and leave the gradients in the peer's own format."""
    directory = Path(request["directory"])
    model = write(request, directory)
    golden_writer.put_gradients(model)
    golden_writer.save(model.float(), directory / "gradient", request["weights"])
