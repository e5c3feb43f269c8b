"""What fine-tuning an XLNet reaches on sentences of film reviews (SST-2), beside random weights and a bag of words.

The learning rate of each model is the best of `--rates` on the validation texts, with the first seed. Names of runs may contain
`{seed}`, so that each seed begins with a pretraining of its own. `--data` holds train.tsv.xz, dev.tsv.xz and test.tsv.xz: a
sentence, a tab, and 0 or 1 on each line.
"""

import argparse
import json
import statistics
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from common.harness import COMMON, command, parse, run

import transformer_xl as txl
from transformer_xl.console import say, table
from transformer_xl.model.build import make_model
from transformer_xl.training.display import Display


def measure(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Fine-tune all models with all seeds, print a table, and return the figures."""
    files = [str(options.data / f"{split}.tsv.xz") for split in ("train", "dev", "test")]
    bag = [str(options.peer_python), str(COMMON / "bag_of_words.py"), *files]
    with tempfile.TemporaryDirectory() as folder:
        sources = {"pretrained": options.xlnet, "random weights": untrained(options.xlnet, Path(folder, "random"))}
        found: dict[str, Any] = {who: repeated(options, source, Path(folder), who) for who, source in sources.items()}
    rows = [["model", "dev", "±", "test", "±"]]
    rows += [[who, *spread(own["valid"]), *spread(own["test"])] for who, own in found.items()]
    found["bag of words"] = words = json.loads(subprocess.run(bag, check=True, capture_output=True, text=True).stdout)
    rows.append(["bag of words", *spread([words["dev"]]), *spread([words["test"]])])
    print(f"\n{name}, accuracy in %\n{table(rows)}")
    return found


def untrained(source: str, directory: Path) -> str:
    """Save a model of a run's settings with random weights, and the run's tokenizer."""
    model, tokenizer = txl.load(source.format(seed=0))
    torch.manual_seed(0)
    make_model(model.config).save_pretrained(directory)
    tokenizer.save(directory / "tokenizer.json")
    return str(directory)


def repeated(options: argparse.Namespace, source: str, directory: Path, who: str) -> dict[str, Any]:
    """Fine-tune with the best of a few learning rates, and with several seeds."""
    how = [f"train.max_epochs={options.epochs}", "train.max_steps=none", "optim.warmup_steps=50", "train.eval_interval=100"]
    how += ['task.text="1"', 'task.label=["2"]']  # the files have no line of names

    def tuned(rate: float, seed: int) -> Any:
        out, base, display = directory / f"{who}-{rate:g}-{seed}", source.format(seed=seed), Display(quiet=True)
        given = {"task": "sst2", "data": options.data, "seed": seed, "display": display}
        done = txl.finetune(base, out=out, overrides=[*how, f"optim.lr={rate}"], **given)
        if done.valid is None or done.test is None:
            raise SystemExit(f"{who}: ended by a signal at step {done.step:,}")
        figures = f"dev {100 * done.valid.main:.1f}, test {100 * done.test.main:.1f}"
        say(f"{who}, rate {rate:g}, seed {seed}: {figures}; {done.step:,} steps, {done.seconds:.0f} s")
        return done

    first = {rate: tuned(rate, 0) for rate in options.rates}
    rate = max(first, key=lambda rate: first[rate].valid.main)
    runs = [first[rate], *(tuned(rate, seed) for seed in range(1, options.seeds))]
    return {"rate": rate, "valid": [done.valid.main for done in runs], "test": [done.test.main for done in runs]}


def spread(values: Sequence[float]) -> tuple[str, str]:
    """Return mean and standard deviation in percent; of a single value no deviation."""
    return f"{100 * statistics.fmean(values):.1f}", f"{100 * statistics.stdev(values):.1f}" if len(values) > 1 else ""


if __name__ == "__main__":
    parser = command(__doc__, peer=True)
    parser.add_argument("--xlnet", required=True, metavar="RUN", help="a pretrained XLNet")
    parser.add_argument("--data", type=Path, required=True, metavar="DIR", help="directory with the sentences")
    parser.add_argument("--rates", nargs="+", type=float, default=[3e-4, 1e-3], help="learning rates (%(default)s)")
    parser.add_argument("--seeds", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--epochs", type=float, default=3, help="passes over the texts (default: %(default)s)")
    options = parse(parser)
    run(options, measure, ["SST-2"], seeds=str(options.seeds))
