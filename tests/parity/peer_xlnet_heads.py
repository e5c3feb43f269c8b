"""Build tiny random fine-tuned XLNet models with Hugging Face's code, and say what their heads compute.

Runs in the environment of requirements-huggingface.txt. `peer_huggingface.py` passes on requests that have "model": "head":

    {"model": "head", "directory": PATH, "seed": N, "hyperparameters": {of XLNetConfig},
     "task": "classification" | "multilabel" | "regression" | "choice" | "span" | "tokens", "n_score": N, "batch_size": B,
     "n_choice": C (of a choice), "lengths": [of the segments that a text is read in, with memory],
     "padding": whether rows are padded at the left, "weights": as in peer_xlnet.py}

Expectations have these tensors, in float64; T is the sum of the lengths:

    ids, segments       int64 (B, T); (B, C, T) of a choice
    n_pad               int64 (B,), or (B, C); padding at the left of each row
    labels              classification, choice int64 (B,); multilabel (B, N); regression (B,); span int64 (B, 3): first and last
                        token of the answer and whether there is none (1), which points at the last token; tokens (B, T), -100
                        where one is not scored
    may_answer          bool (B, T), of spans: tokens that an answer may consist of
    logits              (B, N), or (B, C); of a span (B, T): of starts; of tokens (B, T, N), 0 at padding
    ends, impossible    of spans: (B, T) logits of ends after the true start, (B,) logits of that there is no answer
    nats                (B,), the loss of each example; (B, T) of tokens
    grads.{name}        of the mean of nats, for every parameter

and an entry of metadata, `about`: see golden_writer.py.

In one point the peer differs from the authors. Whether there is an answer, it reads in training from the state of the true
start. They read it from the mean of all states, weighted by the probability of a start, and so does the peer in prediction.
`impossible` and its share of the loss are theirs; what is said of starts and ends is the peer's own loss.
"""

from pathlib import Path
from typing import Any

import golden_writer
import torch
import torch.nn.functional as F
import transformers
from peer_xlnet import ExactPositions
from torch import Tensor
from transformers import (
    XLNetConfig,
    XLNetForMultipleChoice,
    XLNetForQuestionAnswering,
    XLNetForSequenceClassification,
    XLNetForTokenClassification,
)

CLASSES = {
    "choice": XLNetForMultipleChoice,
    "span": XLNetForQuestionAnswering,
    "tokens": XLNetForTokenClassification,
}
IDLE = {"choice": ("logits_proj.bias",), "span": ("start_logits.dense.bias", "end_logits.dense_1.bias")}
"""What is added to all that a softmax compares, and learns nothing."""
PROBLEMS = {"classification": "single_label_classification", "multilabel": "multi_label_classification"}


def build(request: dict[str, Any]) -> Any:
    """Make a random model without dropout, in evaluation mode."""
    task, own = request["task"], {}
    if task == "span":  # a window may have fewer tokens than they would look for
        own = {"start_n_top": 1, "end_n_top": 1}
    elif task == "tokens":
        own = {"num_labels": request["n_score"]}
    elif task != "choice":
        own = {"num_labels": request["n_score"], "problem_type": PROBLEMS.get(task, "regression")}
    config = XLNetConfig(**request["hyperparameters"], **own, dropout=0.0, summary_last_dropout=0.0, use_mems_eval=True)
    model = CLASSES.get(task, XLNetForSequenceClassification)(config).eval()
    golden_writer.randomize(model, request["seed"])
    return model


def draw(request: dict[str, Any]) -> dict[str, Tensor]:
    """Draw what the model reads, and what it should say."""
    task, B, T = request["task"], request["batch_size"], sum(request["lengths"])
    rows = (B, request["n_choice"]) if task == "choice" else (B,)
    generator = torch.Generator().manual_seed(request["seed"])

    def integers(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator)

    n_pad = integers(0, T - 2, *rows) if request["padding"] else torch.zeros(rows, dtype=torch.int64)
    drawn = {"ids": integers(0, request["hyperparameters"]["vocab_size"], *rows, T), "n_pad": n_pad}
    drawn["segments"] = integers(0, 3, *rows, T)
    if task == "span":
        may_answer = integers(0, 2, B, T) > 0
        may_answer[:, -1] = True  # theirs, too, points at CLS where there is no answer
        may_answer &= torch.arange(T) >= n_pad[:, None]
        ends = torch.stack(
            [may_answer[b].nonzero()[integers(0, int(may_answer[b].sum()), 2), 0].sort().values for b in range(B)]
        )
        impossible = integers(0, 3, B) == 0
        ends[impossible] = T - 1
        return drawn | {"may_answer": may_answer, "labels": torch.cat([ends, impossible[:, None].long()], dim=1)}
    if task == "tokens":
        labels = integers(0, request["n_score"], B, T)
        is_scored = (integers(0, 3, B, T) > 0) & (torch.arange(T) >= n_pad[:, None])
        is_scored[:, -1] = True
        return drawn | {"labels": labels.where(is_scored, -100)}
    if task == "regression":
        return drawn | {"labels": torch.randn(B, generator=generator, dtype=torch.float64)}
    if task == "multilabel":
        return drawn | {"labels": integers(0, 2, B, request["n_score"]).double()}
    return drawn | {"labels": integers(0, request["n_choice"] if task == "choice" else request["n_score"], B)}


def expect(model: Any, task: str, lengths: list[int], drawn: dict[str, Tensor]) -> dict[str, Tensor]:
    """Take the expectations from the model."""
    T = drawn["ids"].shape[-1]
    real = (torch.arange(T) >= drawn["n_pad"][..., None]).to(model.dtype)
    labels = drawn["labels"].to(model.dtype) if drawn["labels"].is_floating_point() else drawn["labels"]
    model.zero_grad(set_to_none=True)
    if task == "span":
        found = _span(model, drawn, real)
    else:
        mems, output, begin, logits = None, None, 0, []
        for length in lengths:
            here = slice(begin, begin + length)
            given = {"token_type_ids": drawn["segments"][..., here], "attention_mask": real[..., here]}
            own = {} if mems is None else {"mems": mems}
            of_these = labels[:, here].contiguous() if task == "tokens" else labels
            output = model(drawn["ids"][..., here], labels=of_these, **given, **own)
            mems, begin = output.mems, begin + length
            logits.append(output.logits)
            mean = _nats(task, output.logits, of_these).sum() / (of_these != -100).sum()
            mean = mean if task == "tokens" else _nats(task, output.logits, labels).mean()
            torch.testing.assert_close(output.loss, mean, equal_nan=True)  # the mean of no word is none
        assert output is not None
        scores = torch.cat(logits, dim=1) * real[..., None] if task == "tokens" else output.logits
        found = {"logits": scores, "nats": _nats(task, scores, labels)}
    found["nats"].mean().backward()
    tensors = drawn | {name: x.detach() for name, x in found.items()}
    for name, parameter in model.named_parameters():
        tensors[f"grads.{name}"] = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
    assert all(torch.isfinite(tensor).all() for tensor in tensors.values())
    return tensors


def _nats(task: str, logits: Tensor, labels: Tensor) -> Tensor:
    if task == "tokens":
        return F.cross_entropy(logits.mT, labels, reduction="none")
    if task == "regression":
        return (logits.squeeze(-1) - labels) ** 2
    if task == "multilabel":
        return F.binary_cross_entropy_with_logits(logits, labels, reduction="none").mean(-1)
    return F.cross_entropy(logits, labels, reduction="none")


def _span(model: Any, drawn: dict[str, Tensor], real: Tensor) -> dict[str, Tensor]:
    """Let each module of the peer's head say its part, and the whole what it says itself."""
    start, end, impossible = drawn["labels"].unbind(1)
    p_mask = (~drawn["may_answer"]).to(model.dtype)
    given = {"token_type_ids": drawn["segments"], "attention_mask": real}
    h = model.transformer(drawn["ids"], **given)[0]
    starts, ends = model.start_logits(h), model.end_logits(h, start_positions=start)
    masked = [logits.masked_fill(p_mask > 0, -1e30) for logits in (starts, ends)]
    mean = torch.einsum("btd,bt->bd", h, masked[0].softmax(-1))
    no_answer = model.answer_class(h, start_states=mean)
    pointing = [F.cross_entropy(logits, gold, reduction="none") for logits, gold in zip(masked, (start, end), strict=True)]
    both = sum(pointing) / 2
    own = model(drawn["ids"], start_positions=start.clone(), end_positions=end.clone(), p_mask=p_mask, **given)
    torch.testing.assert_close(own.loss, both.mean())
    torch.testing.assert_close(model(drawn["ids"], p_mask=p_mask, **given).cls_logits, no_answer)
    unanswered = F.binary_cross_entropy_with_logits(no_answer, impossible.to(model.dtype), reduction="none")
    return {"logits": starts, "ends": ends, "impossible": no_answer, "nats": both + 0.5 * unanswered}


def write(request: dict[str, Any], directory: Path, *, must_learn: bool = False) -> Any:
    """Write `checkpoint/` and `expected.safetensors`; return the model with the gradients, in float64."""
    model, drawn = build(request), draw(request)
    golden_writer.save(model, directory / "checkpoint", request["weights"])
    task, lengths = request["task"], request["lengths"]
    single = expect(model, task, lengths, drawn)
    model.transformer.relative_positional_encoding = ExactPositions(model.transformer)
    tensors = expect(model.double(), task, lengths, drawn)
    for name, exact in tensors.items():
        if exact.is_floating_point():  # some random models are ill-conditioned
            assert (single[name] - exact).abs().max() <= 1e-4 * max(1.0, exact.abs().max().item()), name
    if must_learn:
        idle = ("mask_emb", *IDLE[task]) if task in IDLE else ("mask_emb",)
        golden_writer.check_all_learn({name: x for name, x in tensors.items() if not name.endswith(idle)})
    golden_writer.save_expected(
        directory / "expected.safetensors",
        tensors,
        peer=f"transformers {transformers.__version__} {type(model).__name__}",
        hyperparameters=request["hyperparameters"],
        first_memory="empty",
        aliases=golden_writer.aliases(model),
        reading={"tgt_len": lengths[-1]},
    )
    return model


def answer(request: dict[str, Any]) -> None:
    """Do what one request asks for: as `write`, and leave the gradients in the peer's own format."""
    directory = Path(request["directory"])
    model = write(request, directory)
    golden_writer.put_gradients(model)
    golden_writer.save(model.float(), directory / "gradient", request["weights"])
