"""What memory is worth where rows belong to documents: the label of a sentence is a word of the sentence three before it.

A document has 10 sentences of 5 words, of which one, at a random place, is a name. The label of a sentence is the name in the
sentence three before it; the first three have the label "none". A small TransformerXL and a small XLNet with random weights
learn from 200 documents and are scored on 20 others, whose words are drawn anew,

- with memory: as `--document` reads them, and
- the same model with its memory emptied before each sentence; and
- another that was trained on the same rows without their documents (`alone`).

Without memory nothing tells the label, so the best that can be had is the commonest one, "none", in 30 % of the sentences.
"""

import argparse
import random
import tempfile
from pathlib import Path
from typing import Any

import torch
from common.harness import command, parse, run

import transformer_xl as txl
from transformer_xl.config.model import model_config
from transformer_xl.config.run import TokenizerConfig
from transformer_xl.console import table
from transformer_xl.data.labels import Example
from transformer_xl.model.build import make_model
from transformer_xl.tokenizers.unigram import train_unigram
from transformer_xl.training.display import Display

NAMES = ("Anna", "Bert", "Clara", "David", "Emma", "Frank")
WORDS = ("the", "of", "and", "to", "in", "that", "it", "was", "he", "for", "his", "with", "as", "on", "had", "at")
N_SENTENCE, N_WORD, BACK = 10, 5, 3

SIZES = {"n_layer": 2, "d_model": 64, "n_head": 4, "d_head": 16, "d_inner": 128, "mem_len": 64, "dropout": 0.0, "dropatt": 0.0}
TASK = """
[task]
kind = "classification"

[optim]
lr = {rate}
clip = 1.0
schedule = "linear"
warmup_share = 0.1

[train]
batch_size = 20
tgt_len = 64
max_epochs = {epochs}
precision = "fp32"
eval_interval = 1000
sample_tokens = 0
"""


def measure(kind: str, options: argparse.Namespace) -> list[tuple[float, ...]]:
    """Learn with all seeds, print a table, and return the shares."""
    with tempfile.TemporaryDirectory() as folder:
        found = [compared(options, kind, seed, Path(folder, str(seed))) for seed in range(options.seeds)]
    rows = [["model", "seed", "with memory", "memory emptied", "trained alone", "commonest label", "seconds"]]
    for seed, (*shares, seconds) in enumerate(found):
        rows.append([kind, str(seed), *(f"{100 * share:.1f} %" for share in shares), f"{seconds:.0f}"])
    print(f"\n{table(rows)}")
    return found


def compared(options: argparse.Namespace, kind: str, seed: int, folder: Path) -> tuple[float, ...]:
    """Return the shares of right labels with memory, emptied, and trained alone, and of the commonest; seconds of training."""
    (folder / "data").mkdir(parents=True)
    n_scored = max(options.documents // 10, 2)
    write(folder / "data" / "train.tsv", options.documents, seed=2 * seed)
    write(folder / "data" / "dev.tsv", n_scored, seed=2 * seed + 1)
    write(folder / "data" / "test.tsv", n_scored, seed=1000 + seed)
    (folder / "task.toml").write_text(TASK.format(rate=options.rate, epochs=options.epochs))
    draw = random.Random(0)
    sentences = [f"{' '.join(draw.choices(NAMES + WORDS, k=N_WORD))}\n" for _ in range(3000)]  # enough to make words of letters
    tokenizer = train_unigram(TokenizerConfig(kind="unigram", vocab_size=64), sentences)
    torch.manual_seed(seed)
    make_model(model_config({"kind": kind, "vocab_size": tokenizer.vocab_size, **SIZES})).save_pretrained(folder / "base")
    tokenizer.save(folder / "base" / "tokenizer.json")

    def tuned(out: str, document: str | None) -> Any:
        how: dict[str, Any] = {"task": str(folder / "task.toml"), "data": folder / "data", "seed": seed}
        return txl.finetune(folder / "base", out=folder / out, document=document, display=Display(quiet=True), **how)

    ended, alone = tuned("documents", "document"), tuned("alone", None)
    texts = [line.split("\t") for line in (folder / "data" / "test.tsv").read_text(encoding="utf-8").splitlines()[1:]]
    found = txl.predict(folder / "documents", [Example(text) for _, text, _ in texts])  # each belongs to no document
    emptied = sum(one.label == label for one, (_, _, label) in zip(found, texts, strict=True)) / len(texts)
    return ended.test.main, emptied, alone.test.main, BACK / N_SENTENCE, ended.seconds


def write(path: Path, n: int, *, seed: int) -> None:
    """Write documents as rows of a table: document, sentence, label."""
    draw = random.Random(seed)
    lines = ["document\tsentence\tlabel"]
    for document in range(n):
        names = draw.choices(NAMES, k=N_SENTENCE)
        for place, name in enumerate(names):
            words: list[str] = [*draw.choices(WORDS, k=N_WORD - 1)]
            words.insert(draw.randrange(N_WORD), name)
            lines.append(f"{document}\t{' '.join(words)}\t{names[place - BACK] if place >= BACK else 'none'}")
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    parser = command(__doc__)
    parser.add_argument("--kinds", nargs="+", choices=("transformer_xl", "xlnet"), default=["transformer_xl", "xlnet"])
    parser.add_argument("--documents", type=int, default=200, help="to learn from; a tenth as many are scored (%(default)s)")
    parser.add_argument("--epochs", type=float, default=25, help="passes over them (%(default)s)")
    parser.add_argument("--rate", type=float, default=1e-3, help="learning rate (%(default)s)")
    parser.add_argument("--seeds", type=int, default=3, help="default: %(default)s")
    parser.set_defaults(threads=1)
    options = parse(parser)
    run(options, measure, options.kinds)
