"""Write small runs and saved models with an earlier release, and what they compute, so that later ones can be held to it.

    git worktree add build/0.2 3dfe531
    PYTHONPATH=build/0.2/src .venv/bin/python tests/parity/make_goldens_release.py

Each golden is a directory with a run or a saved model as that release wrote it, and `expected.json`: text, its ids, and the
nats of each token after the first. Model cards (`README.md`) are deleted by hand.
"""

import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

import torch

import transformer_xl as txl
from transformer_xl.conversion.export import export

GOLDENS = Path(__file__).resolve().parent / "goldens" / "release_0_2"
TEXT = "It was the best of times, it was the worst of times; 12,345 of them. "
CORPUS = TEXT * 30 + "the age of wisdom, the age of foolishness, the epoch of belief. " * 30
SMALL = [
    "model.n_layer=2", "model.d_model=16", "model.n_head=2", "model.d_head=8", "model.d_inner=24", "model.mem_len=8",
    "train.batch_size=2", "train.tgt_len=8", "train.max_steps=2", "train.precision=fp32", "train.eval_interval=2",
    "train.threads=1", "train.sample_tokens=0", "model.ngram_rows=[8,8]",
]  # fmt: skip
RUNS = {
    "byte": ["tokenizer.kind=byte"],
    "char": ["tokenizer.kind=char"],
    "word": ["tokenizer.kind=word"],
    "bpe": ["tokenizer.kind=bpe", "tokenizer.vocab_size=300"],
    "unigram": ["tokenizer.kind=unigram", "tokenizer.vocab_size=60"],
    "unigram-xlnet": ["tokenizer.kind=unigram", "tokenizer.vocab_size=60", "tokenizer.normalization=xlnet"],
    "unigram-bytes": ["tokenizer.kind=unigram", "tokenizer.vocab_size=320", "tokenizer.byte_fallback=true"],
}
RUN_DIRECTORIES = ("byte", "unigram")  # the others are kept as saved models alone


def main() -> None:
    """Train, save and read."""
    shutil.rmtree(GOLDENS, ignore_errors=True)
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        Path("times.txt").write_text(CORPUS, encoding="utf-8")
        for name, overrides in RUNS.items():
            run = Path(folder) / name
            txl.train("quickstart", out=run, corpus="times.txt", overrides=[*SMALL, *overrides])
            model, tokenizer = txl.load(run)
            (GOLDENS / name).mkdir(parents=True)
            export(run, GOLDENS / name / "saved", kind="native")
            if name in RUN_DIRECTORIES:
                shutil.copytree(
                    run,
                    GOLDENS / name / "run",
                    ignore=shutil.ignore_patterns("*.png", "*.lock", "environment.json", "tensorboard"),
                )
            text = TEXT * 3
            ids = tokenizer.encode(text)
            ids_BT = torch.as_tensor([ids])
            with torch.no_grad():
                nats = model(ids_BT[:, :-1], labels=ids_BT[:, 1:]).nll[0].tolist()
            expected = {"version": txl.__version__, "text": text, "ids": [int(i) for i in ids], "nats": nats}
            (GOLDENS / name / "expected.json").write_text(json.dumps(expected) + "\n", encoding="utf-8")
    print(sum(path.stat().st_size for path in GOLDENS.rglob("*")), "bytes", file=sys.stderr)


if __name__ == "__main__":
    main()
