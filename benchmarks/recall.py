"""How far back models recall: pairs of a key and a value, then other tokens, then the keys in another order.

Every side trains from nothing on texts with at most 96 tokens between, and is asked over longer distances. What it keeps of a
text has the same size on all sides but the LSTM's, which has as many parameters instead: with a state of this size it would
have a hundred times as many. Sides and seeds that --out has are not run again, so a second terminal can take others; table and
recall.png show all. xLSTM needs `.venv-rivals` (`make rivals`).
"""

import argparse
import itertools
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from common.machine import describe
from common.report import facts

from transformer_xl.config.model import LstmConfig, ModelConfig, TransformerXLConfig
from transformer_xl.console import progress, table
from transformer_xl.files import replace_file
from transformer_xl.model.build import make_model
from transformer_xl.pictures import line_style, new_figure, save_with_legend

sys.path.append(str(Path(__file__).parents[1] / "examples"))
from memory_matrix import N_VALUE, SIZES, WINDOW, MatrixConfig, read, texts

FARTHEST = 96
"""In training."""
LSTM: dict[str, Any] = {"vocab_size": SIZES["vocab_size"], "n_layer": SIZES["n_layer"], "dropout": 0.0}
WITHOUT_PAIRS: dict[str, Any] = {**SIZES, "ngram_rows": ()}


def n_slot() -> int:
    """Return how many positions of a plain memory take as much room as matrices and the window before them."""
    kept = make_model(MatrixConfig(**SIZES, mem_len=WINDOW)).init_mems(1).n_bytes
    return kept // (4 * SIZES["n_layer"] * SIZES["d_model"])


def xlstm() -> ModelConfig:
    """Return an xLSTM whose state is as large as what the matrices keep; its width gives it as many parameters."""
    from rivals import XlstmConfig

    return XlstmConfig(**LSTM, d_model=80, n_head=1, d_inner=272, chunk_size=WINDOW)


SIDES: dict[str, Callable[[], ModelConfig]] = {
    "delta": lambda: MatrixConfig(**SIZES, mem_len=WINDOW),
    "plain": lambda: TransformerXLConfig(**SIZES, mem_len=n_slot()),
    "delta without pairs": lambda: MatrixConfig(**WITHOUT_PAIRS, mem_len=WINDOW),
    "lstm": lambda: LstmConfig(**LSTM, d_model=64, d_hidden=150),
    "xlstm": xlstm,
}
OF_THIS_PROJECT = [side for side in SIDES if side != "xlstm"]


@dataclass
class Result:
    """What one side recalls."""

    side: str
    seed: int
    parameters: int
    kept_bytes: int
    loss: float  # nats, of the last hundred steps
    recalled: dict[int, float]  # distance → share


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/recall"), metavar="DIR", help="default: %(default)s")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=OF_THIS_PROJECT, help="default: all but xlstm")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="default: 0")
    parser.add_argument("--steps", type=int, default=2_000, help="of 32 texts (default: %(default)s)")
    parser.add_argument("--lr", type=float, default=5e-3, help="of AdamW (default: %(default)s)")
    distances = [10, 32, 100, 320, 1_000, 3_200, 10_000, 100_000]
    parser.add_argument("--distances", type=int, nargs="+", default=distances, help="default: 10 to 100,000")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for side, seed in itertools.product(options.sides, options.seeds):
        file = options.out / f"{side.replace(' ', '-')}-{seed}.json"
        if not file.exists():
            result = run(side, seed, options)
            options.out.mkdir(parents=True, exist_ok=True)
            replace_file(file, json.dumps(asdict(result)).encode())
    results = [Result(**json.loads(file.read_text())) for file in sorted(options.out.glob("*-*.json"))]
    show(results, options.out / "recall.png")


def run(side: str, seed: int, options: argparse.Namespace) -> Result:
    """Train a side and ask it."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed + 1)
    model = make_model(SIDES[side]())
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, betas=(0.9, 0.95), weight_decay=0.01)
    losses = []
    with progress(f"{side}, seed {seed}", options.steps, unit=None) as bar:
        for step in range(options.steps):
            for group in optimizer.param_groups:
                group["lr"] = options.lr * min(1, (step + 1) / 50) * (1 - step / options.steps)
            reach = min(8 + step // 8, FARTHEST)  # near ones first
            distance = int(torch.randint(reach + 1, (), generator=generator))
            distance -= distance % getattr(model.config, "chunk_size", 1)  # xLSTM learns from whole chunks only
            nats, _ = read(model.train(), *texts(32, distance, generator), keep_graph=True)
            nats.mean().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(nats.detach().mean()))
            bar.advance()
    recalled = {}
    with torch.no_grad():
        for distance in options.distances:
            n = 64 if distance < 5_000 else 16
            recalled[distance] = float(read(model.eval(), *texts(n, distance, generator), keep_graph=False)[1].float().mean())
    kept = model.init_mems(1).n_bytes
    n_parameter = sum(p.numel() for p in model.parameters())
    return Result(side, seed, n_parameter, kept, statistics.fmean(losses[-100:]), recalled)


def show(results: list[Result], path: Path) -> None:
    """Print the table of all results, and draw them."""
    print(facts({**describe(), "chance": f"1 of {N_VALUE}"}))
    distances = sorted({int(distance) for result in results for distance in result.recalled})
    rows = [["side", "parameters", "kept, bytes", "seeds", "loss", *(f"{distance:,}" for distance in distances)]]
    figure = new_figure()
    axes = figure.subplots()
    for i, side in enumerate(name for name in SIDES if any(result.side == name for result in results)):
        own = [result for result in results if result.side == side]
        shares = {d: [share for r in own for at, share in r.recalled.items() if int(at) == d] for d in distances}
        means = {d: statistics.fmean(each) for d, each in shares.items() if each}
        cells = [f"{means[d]:.3f}" if d in means else "" for d in distances]
        loss = f"{statistics.fmean(r.loss for r in own):.3f}"
        rows.append([side, f"{own[0].parameters:,}", f"{own[0].kept_bytes:,}", str(len(own)), loss, *cells])
        axes.plot(list(means), list(means.values()), label=side, **line_style(i))
    print(table(rows))
    axes.axhline(1 / N_VALUE, color="gray", linestyle=":", label="chance")
    axes.axvline(10 * WINDOW, color="gray", linestyle="--", linewidth=1, label="ten windows")
    axes.set(xscale="log", xlabel="tokens between a pair and the question", ylabel="share recalled", ylim=(0, 1.03))
    print(f"picture: {save_with_legend(figure, axes, path, beside=True)}")


if __name__ == "__main__":
    main()
