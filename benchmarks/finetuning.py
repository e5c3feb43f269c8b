"""What fine-tuning reaches: sentences, a mark in a long text, books, answers in passages. Small models, several seeds.

- sst2: a pretrained XLNet, the same model from random weights, and what `--beside` names, beside a bag of words;
- reach: a text whose label is one of its words, by how many words before the end it stands;
- books: which book a passage of 4,000 pieces is from, by its first 512 alone, and read whole with memories of several lengths;
- squad: exact match and F1 on the questions of articles that were not learned from.

The learning rate of each model is the best of `--rates` on the validation texts, with the first seed; the ways to read books
share one. A line is printed for each fine-tuning, then a table of means over the seeds, with the standard deviation. Names of
runs may contain `{seed}`, so that each seed begins with a pretraining of its own.
"""

import argparse
import itertools
import json
import statistics
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from common.labelled_texts import marked, passages
from common.machine import describe, n_cores
from common.report import facts

import transformer_xl as txl
from transformer_xl.config.model import ModelConfig
from transformer_xl.console import say, table
from transformer_xl.data.labelled import Example
from transformer_xl.model.build import make_model
from transformer_xl.tokenizers.base import Tokenizer
from transformer_xl.training.display import Display
from transformer_xl.training.finetune import TaskOutcome

HERE = Path(__file__).parent
PEER_PYTHON = HERE.parent / ".venv-peer" / "bin" / "python"
PARTS = ("sst2", "reach", "books", "squad")
N_WORD, BACK = 160, (1, 16, 32, 48, 64, 80, 96, 112, 128, 160)
"""Words of a text with a mark, and the borders of the distances that are told apart."""


def main() -> None:
    options = parse_arguments()
    torch.set_num_threads(options.threads)
    print(facts({**describe(), "threads": str(options.threads), "seeds": str(options.seeds)}))
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for part in options.parts:
            directory = Path(folder, part)
            directory.mkdir()
            found[part] = globals()[part](options, directory)
    if options.json:
        options.json.write_text(json.dumps(found, indent=2))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="default: all")
    parser.add_argument("--xlnet", required=True, metavar="RUN", help="a pretrained XLNet; others have its vocabulary")
    parser.add_argument("--beside", nargs="+", default=[], metavar="NAME=RUN", help="other pretrained models, for sst2")
    parser.add_argument("--rates", nargs="+", type=float, default=[1e-4, 3e-4, 1e-3], help="learning rates (%(default)s)")
    parser.add_argument("--memories", nargs="+", type=int, default=[512, 1024, 2048], help="of books (%(default)s)")
    parser.add_argument("--passages", type=int, default=30, help="the most of each book (default: %(default)s)")
    parser.add_argument("--book-epochs", type=float, default=10, help="passes over them (default: %(default)s)")
    parser.add_argument("--data", type=Path, required=True, metavar="DIR", help="directory with sst2, gutenberg and squad")
    parser.add_argument("--seeds", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--epochs", type=float, default=3, help="passes over the texts of sst2 and squad (default: 3)")
    parser.add_argument("--threads", type=int, default=n_cores(), help="default: all cores (%(default)s)")
    parser.add_argument("--peer-python", type=Path, default=PEER_PYTHON, help="Python with peer-requirements.txt installed")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure there too")
    options = parser.parse_args()
    if "sst2" in options.parts and not options.peer_python.exists():
        parser.error(f"the peer's environment '{options.peer_python}' does not exist; run `make bench`, which sets it up")
    return options


def sst2(options: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """Compare models on sentences of film reviews."""
    data = options.data / "sst2"
    sources = {"XLNet, pretrained": options.xlnet, "XLNet, random weights": untrained(options.xlnet, directory / "random")}
    sources |= dict(pair.split("=", 1) for pair in options.beside)
    how = [f"train.max_epochs={options.epochs}", "train.max_steps=none", "optim.warmup_steps=50", "train.eval_interval=100"]
    how += ['task.text="1"', 'task.label=["2"]']  # the files have no line of names
    found = {who: repeated(options, source, "sst2", data, directory, how, who) for who, source in sources.items()}
    files = [str(data / f"{split}.tsv.xz") for split in ("train", "dev", "test")]
    command = [str(options.peer_python), str(HERE / "common" / "bag_of_words.py"), *files]
    words = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    rows = [(who, *spread(each["valid"]), *spread(each["test"])) for who, each in found.items()]
    rows.append(("bag of words", f"{100 * words['dev']:.1f}", "", f"{100 * words['test']:.1f}", ""))
    show("SST-2, accuracy in %", ("model", "dev", "±", "test", "±"), rows)
    return {**found, "bag of words": words}


def reach(options: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """Look for a mark at every distance, with segments and memories of 32 tokens in 2 layers: they reach 96 back."""
    data = directory / "texts"
    data.mkdir()
    marked(data, name="train", n=6000, length=N_WORD, back=(1, N_WORD), seed=0)
    marked(data, name="dev", n=600, length=N_WORD, back=(1, N_WORD), seed=0)
    sizes = {"n_layer": 2, "d_model": 64, "n_head": 2, "d_head": 32, "d_inner": 128, "dropout": 0.0, "dropatt": 0.0}
    source = untrained(options.xlnet, directory / "random", **sizes, mem_len=32)
    how = ["train.tgt_len=32", "task.gradient_segments=8", "train.max_epochs=none", "train.max_steps=2000"]
    how += ["train.batch_size=64", "task.patience=none", "train.eval_interval=500"]
    runs = repeated(options, source, "classification", data, directory, how, "reach")
    found: dict[str, list[float]] = {}
    for low, high in itertools.pairwise(BACK):
        texts = directory / f"{low}"
        texts.mkdir()
        marked(texts, name="test", n=300, length=N_WORD, back=(low, high - 1), seed=1)
        examples = [json.loads(line) for line in (texts / "test.jsonl").read_text(encoding="utf-8").splitlines()]
        found[f"{low} to {high - 1}"] = [accuracy(run, examples) for run in runs["runs"]]
    show("a mark in a text: found in %", ("words before the end", "found", "±"), [(k, *spread(v)) for k, v in found.items()])
    return found


def books(options: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """Tell books by passages of 4,000 pieces."""
    data = directory / "texts"
    data.mkdir()
    _, tokenizer = txl.load(options.xlnet.format(seed=0))
    passages(options.data / "gutenberg", tokenizer, data, n_book=8, n_piece=4000, most=options.passages, seed=0)
    how = [
        f"train.max_epochs={options.book_epochs}",
        "train.batch_size=8",
        "train.eval_interval=100",
        "train.tgt_len=512",
    ]
    ways = {"the first 512 pieces alone": ["task.max_len=512", "model.mem_len=0"]}
    ways |= {f"all, memory of {n:,}": [f"model.mem_len={n}"] for n in options.memories}
    found: dict[str, Any] = {}
    rates = options.rates
    for who, own in ways.items():
        found[who] = repeated(options, options.xlnet, "classification", data, directory, how + own, who, rates=rates)
        rates = [found[who]["rate"]]
    rows = [(who, *spread(each["valid"]), *spread(each["test"])) for who, each in found.items()]
    show("which of 8 books, accuracy in %", ("read", "dev", "±", "test", "±"), rows)
    return found


def squad(options: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """Answer questions about passages of articles that were not learned from."""
    how = [f"train.max_epochs={options.epochs}", "train.tgt_len=256", "train.eval_interval=200", "task.patience=none"]
    data = options.data / "squad" / "dev-v1.1.json.xz"
    found = repeated(options, options.xlnet, "squad", data, directory, how, "XLNet, pretrained")
    rows = [(name, *spread([each[name] for each in found["metrics"]])) for name in ("exact", "f1")]
    show("SQuAD 1.1, articles not learned from, %", ("official score", "reached", "±"), rows)
    return found


def untrained(run: str, directory: Path, **sizes: Any) -> str:
    """Save a model of a run's settings, or of other sizes, with random weights and the run's tokenizer."""
    model, tokenizer = txl.load(run.format(seed=0))
    config: ModelConfig = type(model.config)(**{**model.config.model_dump(), **sizes})
    torch.manual_seed(0)
    save(make_model(config), tokenizer, directory)
    return str(directory)


def save(model: Any, tokenizer: Tokenizer, directory: Path) -> None:
    """Write a model with its tokenizer."""
    model.save_pretrained(directory)
    tokenizer.save(directory / "tokenizer.json")


def repeated(
    options: argparse.Namespace,
    source: str,
    task: str,
    data: Path,
    directory: Path,
    overrides: Sequence[str],
    who: str,
    *,
    rates: Sequence[float] | None = None,
) -> dict[str, Any]:
    """Fine-tune with the best of a few learning rates, and with several seeds."""
    name = "".join(letter if letter.isalnum() else "-" for letter in who)

    def run(rate: float, seed: int) -> TaskOutcome:
        out = directory / f"{name}-{rate:g}-{seed}"
        how = [*overrides, f"optim.lr={rate}"]
        base, display = source.format(seed=seed), Display(quiet=True)
        tuned = txl.finetune(base, task=task, data=data, out=out, overrides=how, seed=seed, display=display)
        if tuned.valid is None:
            raise SystemExit(f"{who}: ended by a signal at step {tuned.step:,}")
        figures = f"dev {100 * tuned.valid.main:.1f}" + (f", test {100 * tuned.test.main:.1f}" if tuned.test else "")
        say(f"{who}, rate {rate:g}, seed {seed}: {figures}; {tuned.step:,} steps, {tuned.seconds:.0f} s")
        return tuned

    first = {rate: run(rate, 0) for rate in rates or options.rates}
    rate = max(first, key=lambda rate: first[rate].valid.main)  # pyright: ignore[reportOptionalMemberAccess]
    tuned = [first[rate], *(run(rate, seed) for seed in range(1, options.seeds))]
    return {
        "rate": rate,
        "valid": [each.valid.main for each in tuned if each.valid],
        "metrics": [each.valid.metrics for each in tuned if each.valid],
        "test": [each.test.main for each in tuned if each.test],
        "runs": [str(each.directory) for each in tuned],
    }


def accuracy(run: str, examples: list[dict[str, str]]) -> float:
    """Return the share of texts whose label a run finds."""
    found = txl.predict(run, [Example(each["text"]) for each in examples])
    return statistics.fmean(one.label == each["label"] for one, each in zip(found, examples, strict=True))


def spread(values: Sequence[float]) -> tuple[str, str]:
    """Return mean and standard deviation in percent; of a single value no deviation."""
    if not values:
        return "", ""
    return f"{100 * statistics.fmean(values):.1f}", f"{100 * statistics.stdev(values):.1f}" if len(values) > 1 else ""


def show(title: str, head: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    print(f"\n{title}")
    print(table([head, *rows]))


if __name__ == "__main__":
    main()
