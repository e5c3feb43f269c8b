"""How far estimates of what raised a prediction can be trusted: their rank correlation with leaving each token out.

For tokens drawn from held-out text of each corpus, the tokens that the prediction could see are ranked by the nats that it
loses without each (`txl.attribute`), and by what costs less:

- gradient       of the gates of all tokens, one backward pass
- integrated     the same at 16 places between closed and open gates
- attention      the mean weight of all heads of all layers, from the token that predicts; it knows no sign
- state          gradient times what the layers remember, the usual estimate; for remembered tokens alone

Spearman's rank correlation is that of one prediction; the mean of all and its standard error are printed. In `size` both sides
are without sign: what mattered, whether it raised or lowered.

Models learn from each corpus first, as a recipe says, or are given by --runs.
"""

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from common.harness import command, parse, run

import transformer_xl as txl
from transformer_xl.checkpoint.open_run import open_run
from transformer_xl.console import say, table
from transformer_xl.explain.attribution import Asked, GatedText, Method, ask, spearman
from transformer_xl.reading.stream import scoring
from transformer_xl.training.display import Display

METHODS: tuple[Method, ...] = ("leave-out", "gradient", "integrated")
NAMES = ("gradient", "integrated", "attention", "state")


def measure(name: str, options: argparse.Namespace) -> dict[str, Any] | None:
    """Return the figures of a corpus, or of a run; None if the corpus is not at hand."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(name) if options.runs else Path(folder, "run")
        try:
            if not options.runs:
                txl.train(options.recipe, corpus=name, out=path, overrides=options.set, display=Display(quiet=True))
            found = correlations(path, options)
        except (txl.TxlError, OSError) as error:
            say(f"{name} is left out: {error}")
            return None
    rows = [["rank correlation with leaving out", "raised or lowered", "size", "seconds"]]
    for estimate in NAMES:
        cells = [
            f"{of['mean']:.3f} ± {of['error']:.3f}" if (of := found.get(key)) else "" for key in (estimate, f"{estimate} size")
        ]
        rows.append([estimate, *cells, f"{found['seconds'][estimate]:.2f}" if estimate in METHODS else ""])
    exact = f"leaving out takes {found['seconds']['leave-out']:.2f} s"
    print(f"\n{name}: {options.tokens} tokens, {found['nats']:.3f} nats each; {exact}")
    print(table(rows))
    return found


def correlations(path: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Return means of the rank correlations over tokens drawn from a run's test split, and seconds of a prediction."""
    opened = open_run(path)
    model, tgt_len = opened.model, opened.config.eval_tgt_len
    ids = opened.text(split="test").ids
    before = model.reach(tgt_len) + options.segments * tgt_len  # so much fills a memory
    if len(ids) < before + 2 * tgt_len:
        raise txl.TxlError(f"its test split has {len(ids):,} tokens, and {before + 2 * tgt_len:,} are needed")
    draw = np.random.default_rng(0)
    rhos: dict[str, list[float]] = {name: [] for name in (*NAMES, *(f"{name} size" for name in NAMES[:3]))}
    seconds, nats = dict.fromkeys(METHODS, 0.0), 0.0
    for _ in range(options.tokens):
        found = None
        start = int(draw.integers((len(ids) - before - tgt_len - 1) // tgt_len)) * tgt_len
        part = ids[start : start + before + tgt_len + 1].astype(np.int64)
        position = before + 1 + int(draw.integers(tgt_len))
        values: dict[str, np.ndarray] = {}
        for method in METHODS:
            begin = time.perf_counter()
            found = txl.attribute(model, part, position, method=method, tgt_len=tgt_len, segments=options.segments)
            seconds[method] += (time.perf_counter() - begin) / options.tokens
            values[method] = found.nats
        assert found is not None
        nats -= found.log_p / options.tokens
        exact = values.pop("leave-out")
        text, asked = ask(model, part, position, contrast=None, tgt_len=tgt_len, segments=1)
        with scoring(text.model):
            weights = text.attention()[asked[0][0, 0]]
        values["attention"] = np.array([weights[text.places == place].sum() for place in found.places])  # 0 of what is farther
        for name, estimate in values.items():
            rhos[name].append(spearman(exact, estimate))
            rhos[f"{name} size"].append(spearman(np.abs(exact), np.abs(estimate)))
        of_memory = state_times_gradient(text, asked)
        shared = np.isin(found.places, of_memory[0])
        rhos["state"].append(spearman(exact[shared], of_memory[1][np.isin(of_memory[0], found.places)]))
    means = {
        name: {"mean": float(np.mean(all_)), "error": float(np.std(all_) / len(all_) ** 0.5)} for name, all_ in rhos.items()
    }
    return {"nats": nats, "seconds": seconds, **means}


def state_times_gradient(text: GatedText, asked: Asked) -> tuple[np.ndarray, np.ndarray]:
    """Return the remembered places, and for each the sum over layers and features of state times gradient."""
    ((ids, end, mems),), model = text.pieces, cast("Any", text.model)
    kept = {name: x.clone().requires_grad_(name.startswith("hidden")) for name, x in mems.state_dict().items()}
    with scoring(model), torch.enable_grad():
        h_1TD, _ = model.read(ids, mems=type(mems).from_state_dict(kept))
        nll = model.softmax.nll(h_1TD[:, asked[0][0]], asked[1].to(model.device), model.embedding)
    hidden = [x for x in kept.values() if x.requires_grad]
    products = [(grad * x.detach()).sum(-1)[0] for grad, x in zip(torch.autograd.grad(-nll.sum(), hidden), hidden, strict=True)]
    end -= ids.shape[1]
    values = torch.stack(products).sum(0).cpu().numpy()[-min(end, model.mem_len) :]
    return np.arange(end - len(values), end), values


if __name__ == "__main__":
    parser = command(__doc__)
    parser.add_argument("--corpora", nargs="+", default=["python-stdlib"], help="names, files or directories (%(default)s)")
    parser.add_argument("--recipe", default="quickstart", help="what learns from them (%(default)s)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of the recipe")
    parser.add_argument("--runs", nargs="+", type=Path, help="trained on texts before, instead")
    parser.add_argument("--tokens", type=int, default=200, help="drawn from each (%(default)s)")
    parser.add_argument("--segments", type=int, default=1, help="in which a token is left out (%(default)s)")
    options = parse(parser)
    run(options, measure, map(str, options.runs or options.corpora))
