"""What XLNet's objective is worth beside others, at equal time on one text.

- xlnet: `--recipe`, with memory, rows of both directions, and targets that see earlier targets;
- masked: the same rows and the same two streams, but every target is hidden from all others, as by Hugging Face's
  DataCollatorForPermutationLanguageModeling, without memory and without backward rows;
- transformer_xl: a model of the same layers that predicts the next token, with a memory of as many positions.

Each way is a run of `txl train` in `--out`, which finetuning.py starts from. XLNet trains for `--steps`, or `--minutes`; the
others train for as many steps as the same time allows. Their speeds are found in turns beforehand, and kept in `--out`. Runs
that are there are finished and kept. In the end both XLNets are scored on the same targets of the test split, in rows that are
read forward.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from common.machine import describe, n_cores
from common.report import facts

from transformer_xl.batch import Batch
from transformer_xl.checkpoint.open_run import open_run
from transformer_xl.console import say, table
from transformer_xl.data.pairs import PairStream
from transformer_xl.model.xlnet import XLNet
from transformer_xl.reading.reading import Reading
from transformer_xl.reading.targets import score_targets, scored_stream

WAYS = {
    "xlnet": [],
    "masked": ["model.mem_len=0", "model.bi_data=false"],
    "transformer_xl": ["model.kind=transformer_xl"],
}
_TRY_STEPS, _TRY_ROUNDS = 60, 2


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        return child(*sys.argv[2:])
    options = parse_arguments()
    print(facts({**describe(), "threads": str(options.threads), "corpus": options.corpus, "seeds": str(options.seeds)}))
    options.out.mkdir(parents=True, exist_ok=True)
    steps = choose_steps(options)
    for seed in range(options.seeds):
        for way in options.ways:
            train(options, way, options.out / f"{way}-{seed}", steps[way], seed)
    rows = [row for seed in range(options.seeds) for way in options.ways for row in scores(options, way, seed)]
    print("\nnats per target of the test split, rows read forward")
    print(table([("objective", "seed", "steps", "memory", "nats"), *[(*map(str, row[:-1]), f"{row[-1]:.4f}") for row in rows]]))
    if options.json:
        options.json.write_text(json.dumps({"steps": steps, "scores": rows}, indent=2))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", required=True, help="directory with WikiText-2, or any text")
    parser.add_argument("--recipe", default="xlnet-small", help="a recipe or its file (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("runs/pretraining"), metavar="DIR", help="default: %(default)s")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), help="default: all")
    parser.add_argument("--seeds", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--minutes", type=float, default=30, help="of training for each (default: %(default)s)")
    parser.add_argument("--steps", type=int, metavar="N", help="of XLNet, instead of minutes: for a machine that is not quiet")
    parser.add_argument("--threads", type=int, default=n_cores(), help="default: all cores (%(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure there too")
    return parser.parse_args()


def choose_steps(options: argparse.Namespace) -> dict[str, int]:
    """Return the steps of each way that take equal time."""
    file = options.out / "speed.json"
    if not file.exists():
        file.write_text(json.dumps(try_speeds(options)))
    speeds = json.loads(file.read_text())
    say("steps per second: " + ", ".join(f"{way} {speed:.3f}" for way, speed in speeds.items()))
    n_xlnet = options.steps or max(1, round(60 * options.minutes * speeds["xlnet"]))
    return {way: max(1, round(n_xlnet * speed / speeds["xlnet"])) for way, speed in speeds.items()}


def try_speeds(options: argparse.Namespace) -> dict[str, float]:
    """Return the steps per second of each way, the best of short runs in turns."""
    speeds = dict.fromkeys(WAYS, 0.0)
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(_TRY_ROUNDS):
            for way in WAYS:
                out = Path(folder, f"{way}, round {turn + 1}")
                train(options, way, out, _TRY_STEPS, 0, "train.log_interval=20", f"train.eval_interval={_TRY_STEPS}")
                speeds[way] = max(speeds[way], *(e["tokens_per_second"] * e["step"] / e["tokens"] for e in logged(out)))
    return speeds


def train(options: argparse.Namespace, way: str, out: Path, steps: int, seed: int, *more: str) -> None:
    """Train a run, or what is left of it, in a process of its own."""
    how = [*WAYS[way], f"train.max_steps={steps}", "train.max_minutes=none", f"train.threads={options.threads}"]
    how += [f"train.seed={seed}", *more]
    arguments = ["train", options.recipe, "--corpus", options.corpus, "--out", str(out), "--resume", "--quiet"]
    arguments += [part for setting in how for part in ("--set", setting)]
    child = subprocess.run([sys.executable, __file__, "--child", way, *arguments], stdout=subprocess.DEVNULL)
    if child.returncode:
        raise SystemExit(child.returncode)  # it has said why
    say(f"{out.name}: {steps:,} steps, {logged(out)[-1]['seconds']:,.0f} s")


def logged(out: Path) -> list[dict[str, Any]]:
    """Return what a run logged of its training."""
    entries = [json.loads(line) for line in (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [entry for entry in entries if entry["kind"] == "train"]


def child(way: str, *arguments: str) -> None:
    """Be `txl`; for masked with other rows."""
    from transformer_xl.cli import main as txl

    if way == "masked":
        hide_targets()
    sys.argv = ["txl", *arguments]
    txl()


def hide_targets() -> None:
    """Make every PairStream put `<mask>`, 6 in XLNet's vocabularies, in the place of its targets."""
    original = PairStream.read

    def masked(self: PairStream, tgt_len: int | None = None) -> Batch:
        batch = original(self, tgt_len)
        targets = batch.pairs.order.targets
        # A row with fewer targets names its last token in place of those it lacks, which is no target.
        batch.ids.scatter_(1, torch.where(batch.labels >= 0, targets, targets[:, :1]), 6)
        return batch

    PairStream.read = masked


def scores(options: argparse.Namespace, way: str, seed: int) -> list[tuple[str, int, int, int, float]]:
    """Score an XLNet with the memory that it was trained with, and without."""
    opened = open_run(options.out / f"{way}-{seed}", any_model=True)
    config, model = opened.config, opened.any_model
    if not isinstance(model, XLNet):
        return []
    text = opened.text(split="test")
    forward = config.changed(model={"bi_data": False})
    found: list[tuple[str, int, int, int, float]] = []
    for mem_len in dict.fromkeys((config.eval_mem_len, 0)):
        stream = scored_stream(forward, text.ids, opened.tokenizer)
        loss = score_targets(model, stream, Reading(mem_len=mem_len)).loss
        found.append((way, seed, config.train.max_steps or 0, mem_len, loss))
    return found


if __name__ == "__main__":
    main()
