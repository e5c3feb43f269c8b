"""`txl generate`."""

import itertools
import sys
from pathlib import Path
from typing import Literal


def generate(
    run: str,
    /,
    *,
    prompt: str = "\n",
    prompt_file: Path | None = None,
    tokens: int = 500,
    temperature: float = 0.8,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int | None = None,
    mem_len: int | None = None,
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "fp32",
    device: str = "auto",
    checkpoint: Literal["best", "last"] = "best",
) -> None:
    """Write on from a prompt; the text appears as it comes.

    Common uses:
        txl generate runs/mine --prompt "Once upon a time" --seed 1
        txl generate runs/mine --prompt-file chapter1.txt --tokens 1000 --top-p 0.95
        txl generate runs/mine --temperature 0

    Args:
        run: directory of a run, of an exported model, or a hub id.
        prompt: text to go on from. Default: a newline.
        prompt_file: take the prompt from this file; a text of any length is read into memory first.
        tokens: how many tokens to write.
        temperature: 1 draws as the model believes, lower is safer, 0 takes the likeliest token.
        top_k: draw from the k likeliest tokens only.
        top_p: draw from the likeliest tokens that together have this probability.
        seed: the same seed gives the same text.
        mem_len: positions of memory. Default: as in training.
        precision: of the matrix products.
        device: auto, cpu, cuda, cuda:N or mps.
        checkpoint: of a run: the one with the best validation loss, or the last.
    """
    from transformer_xl.checkpoint.run_directory import load
    from transformer_xl.data.encoding import encode_file
    from transformer_xl.errors import ConfigError
    from transformer_xl.generation.generate import generate as write
    from transformer_xl.model.precision import choose_device, choose_precision

    if mem_len is not None and mem_len < 0:
        raise ConfigError(f"--mem-len ({mem_len}) must be at least 0")
    model, tokenizer = load(run, which=checkpoint, on_damaged=lambda message: print(f"warning: {message}", file=sys.stderr))
    torch_device = choose_device(device)
    chosen, _ = choose_precision(precision, torch_device)
    ids = tokenizer.encode(prompt) if prompt_file is None else encode_file(prompt_file, tokenizer)[0]
    written = write(
        model.to(torch_device),
        ids.tolist(),
        max_new_tokens=tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        mem_len=mem_len,
        precision=chosen,
    )
    stream = tokenizer.stream()
    show = sys.stdout.write
    for token in itertools.chain(ids.tolist(), written):  # the prompt as the model read it
        show(stream.push(token))
        sys.stdout.flush()
    show(stream.finish() + "\n")
