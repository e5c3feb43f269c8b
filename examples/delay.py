"""A stream of numbers, learned with supervision: at each step, say the number of six steps ago.

python examples/delay.py                                 # a quarter of a minute on one core

Segments have four steps, so the answer always lies in an earlier segment: only a memory can hold it. The same model without
one does no better than to say the mean. To learn from measurements of your own, replace `numbers`; the vector of a step may
have any number of features.
"""

import argparse
from collections.abc import Iterator

import torch
from torch import Tensor, nn

import transformer_xl as txl

DELAY, LANES, TGT_LEN = 6, 32, 4


def numbers(n_segment: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield inputs and targets of one segment after another, each (LANES, TGT_LEN, 1); before the stream there were zeros."""
    past = torch.zeros(LANES, DELAY, 1)
    for _ in range(n_segment):
        stream = torch.cat([past, torch.rand(LANES, TGT_LEN, 1) * 2 - 1], dim=1)
        yield stream[:, DELAY:], stream[:, :TGT_LEN]
        past = stream[:, -DELAY:]


def learn(mem_len: int, n_step: int) -> float:
    """Train a model, print its mean squared error now and then, and return that of the last tenth of the steps."""
    torch.manual_seed(0)
    sizes = {"n_layer": 2, "d_model": 32, "n_head": 2, "d_head": 16, "d_inner": 64, "dropout": 0.0, "mem_len": mem_len}
    body = txl.TransformerXLBody(txl.TransformerXLConfig(**sizes, pre_lnorm=True, final_norm=True), d_input=1)
    answer = nn.Linear(32, 1)
    optimizer = torch.optim.AdamW([*body.parameters(), *answer.parameters()], lr=3e-3)
    mems, errors, span = body.init_mems(LANES), [], max(1, n_step // 10)
    for step, (x_BTF, target_BTF) in enumerate(numbers(n_step), start=1):
        y_BTD, mems = body(x_BTF, mems=mems)  # what it returns has no gradient, so each step learns from its own segment
        error = nn.functional.mse_loss(answer(y_BTD), target_BTF)
        optimizer.zero_grad()
        error.backward()
        optimizer.step()
        errors.append(error.item())
        if step % span == 0:
            print(f"memory of {mem_len}, step {step:,}: mean squared error {sum(errors[-span:]) / span:.4f}", flush=True)
    return sum(errors[-span:]) / span


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=600)
    if (steps := parser.parse_args().steps) < 1:
        parser.error("--steps must be at least 1")
    found, without = learn(8, steps), learn(0, steps)
    print(f"mean squared error with memory {found:.4f}, without {without:.4f}; that of saying 0 is {1 / 3:.4f}")


if __name__ == "__main__":
    main()
