"""What a vocabulary of 267,735 words costs in memory and time: scores in chunks against scores of all tokens at once.

Each point in a fresh process: a model of one narrow layer, so that the softmax is what counts, scores a batch (no gradients),
or scores it and propagates back. "all at once" computes the logits of all tokens first, as a plain program would.
"""

import argparse
from typing import Any

from common.harness import apart, command, parse, run, seconds_of
from common.machine import peak_mb, reset_peak, resident_mb

from transformer_xl.console import say, table

VOCABULARY = 267_735
SOFTMAXES: dict[str, dict[str, Any]] = {
    "adaptive, div_val 4": {"cutoffs": (20_000, 40_000, 200_000), "div_val": 4, "proj_share_all_but_first": True},
    "adaptive, div_val 1": {"cutoffs": (20_000, 40_000, 200_000)},
    "plain": {},
}
WAYS = ("chunks", "all at once")
WIDTH = 256


def measure(softmax: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure one softmax, print a table, and return all figures."""
    found, rows = [], [["softmax", "task", "tokens", "logits MB", "chunks MB", "s", "all at once MB", "s"]]
    for task in ("score", "train"):
        for n_token in options.tokens:
            row = [softmax, task, f"{n_token:,}", f"{n_token * VOCABULARY * 4 / 1e6:,.0f}"]
            for way in WAYS if n_token <= options.limit else WAYS[:1]:
                say(f"{softmax}, {task}, {n_token:,} tokens, {way}")
                own = apart(point, softmax, task, n_token, way)
                found.append({"task": task, "tokens": n_token, "way": way, **own})
                row += [f"{own['above_mb']:,.0f}", f"{own['seconds']:.2f}"]
            rows.append(row + ["-"] * (8 - len(row)))
    print(f"\n{table(rows)}")
    return found


def point(softmax: str, task: str, n_token: int, way: str) -> dict[str, float]:
    """Return peak memory above that of weights and gradients, and seconds, of the second of two passes."""
    import torch

    from transformer_xl.config.model import TransformerXLConfig
    from transformer_xl.model.transformer_xl import TransformerXL

    torch.manual_seed(0)
    sizes = {"n_layer": 1, "d_model": WIDTH, "n_head": 4, "d_head": 64, "d_inner": WIDTH, "mem_len": 0, "dropout": 0.0}
    model = TransformerXL(TransformerXLConfig(vocab_size=VOCABULARY, **sizes, **SOFTMAXES[softmax]))
    ids, labels = torch.randint(VOCABULARY, (2, n_token // 64, 64))

    def step() -> None:
        with torch.set_grad_enabled(task == "train"):
            if way == "chunks":
                nll = model(ids, labels=labels).nll
            else:
                scores = model(ids).logits.log_softmax(-1)
                nll = -scores.gather(-1, labels.unsqueeze(-1))
            if task == "train":
                nll.mean().backward()

    step()  # gradients are there from now on
    idle = resident_mb()
    reset_peak()
    return {"seconds": seconds_of(step), "above_mb": peak_mb() - idle}


if __name__ == "__main__":
    parser = command(__doc__)
    parser.add_argument("--softmax", choices=SOFTMAXES, nargs="+", default=list(SOFTMAXES), help="default: all")
    parser.add_argument("--tokens", type=int, nargs="+", default=[256, 1024, 4096], help="tokens per batch")
    parser.add_argument("--limit", type=int, default=1024, help="all at once only up to so many tokens (default: %(default)s)")
    options = parse(parser)
    run(options, measure, options.softmax, model=f"1 layer, d_model {WIDTH}, {VOCABULARY:,} words, fp32")
