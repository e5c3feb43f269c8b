"""A race of models at equal parameters and equal time, all with our trainer: ours, an LSTM, and models of other libraries.

Parts, each of which goes on where it was interrupted:
- pace: parameters, and the time of a training step of each side, measured in turns; nothing else looks at a clock.
- rates: one run for each pair of learning rates, on a seed of its own; the loss on the validation split chooses.
- race: runs with those rates, several seeds, scored on the test split with what they remember and without.
- table: all that --out holds, as table.md, race.json and race.png.

Every step of the way is an ablation in --out: txl ablate --import benchmarks/rivals --out DIR/TEXT/... goes on with one alone.
Start the same command twice for two cores: the second process takes other runs. `make rivals` makes the environment.
"""

import argparse
import json
import math
import shlex
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import rivals  # noqa: F401  # registers them
import torch
from common.harness import facts
from common.machine import describe

from transformer_xl.checkpoint.open_run import open_run
from transformer_xl.config.recipes import apply_overrides
from transformer_xl.console import markdown, say, table, warn
from transformer_xl.data.prepare import PreparedCorpus, prepare
from transformer_xl.errors import ConfigError, TxlError, one_line
from transformer_xl.files import locked, replace_file
from transformer_xl.pictures import line_style, new_figure, save_with_legend
from transformer_xl.process import keep_freed_memory
from transformer_xl.reading.reading import Reading
from transformer_xl.tools.ablation import Ablation
from transformer_xl.tools.budget import Pace, measure_paces, n_parameters
from transformer_xl.tools.comparison import score
from transformer_xl.tools.variants import AblationPlan, Variant, make_variants
from transformer_xl.tools.worker import Worker

RECIPES = Path(__file__).parent / "rivals" / "recipes"
RIVALS = ("lstm-ngrams", "x-transformers", "x-transformers-shift", "xlstm", "mistral")
SIDES = ("ours", "lstm", *RIVALS)
TEXTS = {
    "shakespeare": ("shakespeare-char", "shakespeare-small-lstm"),
    "enwik8": ("enwik8-byte", "enwik8-small-lstm"),
    "ptb": ("ptb-word", str(RECIPES / "ptb-lstm.toml")),
}
"""The recipes of ours and of the LSTM; those of the rivals are beside each other in `RECIPES`."""

PARTS = ("pace", "rates", "race", "table")
ALIKE = ("train.threads=1", "train.device=cpu", "train.precision=fp32")
RATES_SEED = 100
"""Of the runs that choose rates, so that no run of the race is among those that were chosen because they did well."""
VALIDATIONS = 4
"""Of each run, the last one included; they take time that does not count."""
MOST_APART = 0.05
"""Of parameters, from those of the first side."""


def main() -> None:
    options = parse_arguments()
    torch.set_num_threads(1)
    keep_freed_memory()
    try:
        for text in options.text if {"pace", "rates", "race"} & set(options.parts) else ():
            run(Race.of(options, text), options)
        if "table" in options.parts:
            write_table(options.out)
    except KeyboardInterrupt:
        say(f"interrupted; go on with: {shlex.join(['python', *sys.argv])}")
        sys.exit(130)
    except TxlError as error:
        sys.exit(f"race.py: error: {one_line(error)}")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/race"), metavar="DIR", help="default: %(default)s")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="default: all")
    parser.add_argument("--text", nargs="+", choices=TEXTS, default=list(TEXTS), help="default: all")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES), help="default: all")
    parser.add_argument(
        "--ours", nargs="+", default=[], metavar="[TEXT=]RECIPE", help="recipes of more sides; of all texts, or of one"
    )
    parser.add_argument("--minutes", nargs="+", type=float, default=[4, 16], help="of training for each run (default: 4 16)")
    parser.add_argument("--seeds", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--lr", nargs="+", type=float, default=[2.5e-3, 5e-3, 1e-2], help="of matrices (default: %(default)s)")
    parser.add_argument("--adamw-lr", nargs="+", type=float, default=[1.5e-3, 3e-3], help="of the rest (default: %(default)s)")
    parser.add_argument("--rate-minutes", type=float, help="of each run that tries rates (default: the least of --minutes)")
    parser.add_argument(
        "--corpus", nargs="+", default=[], metavar="[TEXT=]PATH", help="where the texts lie (default: $TXL_DATA)"
    )
    parser.add_argument("--tokens", type=int, help="score at most so many tokens, to try this out (default: all)")
    parser.add_argument("--set", nargs="+", default=[], metavar="SETTING", help="section.key=value laid over all recipes")
    parser.add_argument("--quiet", action="store_true", help="show tables and warnings only")
    return parser.parse_args()


def of_text(values: Sequence[str], text: str) -> list[str]:
    """Return the values of an option that are for this text (TEXT=VALUE), or else those for all."""
    parts = [value.rpartition("=") for value in values]
    if unknown := [head for head, _, _ in parts if head and head not in TEXTS]:
        raise ConfigError(f"there is no text '{unknown[0]}'; the texts are {', '.join(TEXTS)}")
    return [value for head, _, value in parts if head == text] or [value for head, _, value in parts if not head]


@dataclass
class Race:
    """The race on one text."""

    directory: Path
    sides: dict[str, Variant]
    tokens: int | None
    quiet: bool

    @classmethod
    def of(cls, options: argparse.Namespace, text: str) -> "Race":
        ours, lstm = TEXTS[text]
        recipes = {"ours": ours, "lstm": lstm, **{side: str(RECIPES / f"{text}-{side}.toml") for side in RIVALS}}
        chosen = {side: recipes[side] for side in options.sides}
        for recipe in of_text(options.ours, text):
            if (side := Path(recipe).stem) in SIDES:
                raise ConfigError(f"--ours '{recipe}' would be called '{side}', as a side is; give it another name")
            chosen[side] = recipe
        corpus = next(iter(of_text(options.corpus, text)), None)
        changes = [*ALIKE, *options.set]
        sides = {
            side: replace(make_variants([recipe], loss=["full"], overrides=changes, corpus=corpus)[0], name=side)
            for side, recipe in chosen.items()
        }
        return cls(options.out / text, sides, options.tokens, options.quiet)

    @cached_property
    def corpora(self) -> dict[str, PreparedCorpus]:
        return {side: prepare(variant.config.data, variant.config.tokenizer) for side, variant in self.sides.items()}

    def paces(self) -> dict[str, Pace]:
        """Return the time of a step of each side; those that are not known yet are measured in turns, and kept."""
        file = self.directory / "pace.json"
        self.directory.mkdir(parents=True, exist_ok=True)
        with locked(self.directory / "pace.lock", on_busy=lambda: say("another process measures; waiting", quiet=self.quiet)):
            known = {side: Pace(**pace) for side, pace in read_json(file).items()}
            if missing := [side for side in self.sides if side not in known]:
                say("measuring the time of a step of each side, in turn", quiet=self.quiet)
                configs = {side: self.sides[side].config for side in missing}
                known |= measure_paces(configs, self.corpora)
                write_json(file, {side: asdict(pace) for side, pace in known.items()})
        return known

    def pace_table(self) -> str:
        """Show parameters and pace of each side, and warn of a side with too many or too few."""
        paces, rows, first = self.paces(), [], 0
        for side, variant in self.sides.items():
            config = variant.config.train
            n = n_parameters(variant.config, self.corpora[side].tokenizer.vocab_size)
            first = first or n
            share = n / first - 1
            if abs(share) > MOST_APART:
                warn(f"{side} has {share:+.1%} parameters; this is no race at equal size")
            tokens = config.batch_size * config.tgt_len
            speed = tokens / paces[side].seconds
            times = [f"{1e3 * each:,.1f}" for each in (paces[side].seconds, paces[side].median)]
            rows.append([side, f"{n:,}", f"{share:+.1%}", f"{config.batch_size} x {config.tgt_len}", *times, f"{speed:,.0f}"])
        return table([["side", "parameters", "", "segments", "ms/step", "median", "tokens/s"], *rows])

    def ablation(self, folder: Path, side: str, variants: Sequence[Variant], *, minutes: float, seeds: int) -> Ablation:
        """Return an ablation of one side, whose variants all have its pace."""
        plan = AblationPlan(
            tuple(variants), seeds=seeds, minutes=minutes, validations=VALIDATIONS, lengths=(), tokens=self.tokens
        )
        ablation = Ablation(folder, plan)
        Worker(ablation, quiet=True).check()
        ablation.begin()
        if not ablation.stored_paces():
            paces = self.paces()
            with ablation.alone(lambda: None):
                ablation.save_paces({each.name: paces[side] for each in variants})
        return ablation

    def finish(self, ablation: Ablation) -> bool:
        """Train and score what is left, and say whether nothing is."""
        busy = Worker(ablation, quiet=self.quiet).go_on()
        for name in busy:
            say(f"another process is at {name}", quiet=self.quiet)
        return not busy

    def try_rates(self, side: str, rates: Sequence[tuple[float, float]], *, minutes: float) -> bool:
        """Train a side with each pair of rates."""
        variant = self.sides[side]
        variants = []
        for lr, adamw_lr in rates:
            changes = [f"optim.lr={lr}", f"optim.adamw_lr={adamw_lr}", f"train.seed={RATES_SEED}"]
            config = apply_overrides(variant.config.model_dump(), changes)
            variants.append(replace(variant, name=f"{side}-{lr:g}-{adamw_lr:g}", config=config))
        return self.finish(self.ablation(self.directory / "rates" / side, side, variants, minutes=minutes, seeds=1))

    def race(self, side: str, *, minutes: float, seeds: int) -> bool:
        """Train a side with the best of its rates, and score what its memory is worth."""
        best = best_rates(self.directory / "rates" / side)
        if best is None:
            warn(f"{side} has no rates tried yet (--parts rates), so those of its recipe are taken")
        changes = [f"optim.{name}={rate}" for name, rate in (best or {}).items()]
        config = apply_overrides(self.sides[side].config.model_dump(), changes)
        folder, variants = self.directory / f"{minutes:g}min" / side, [replace(self.sides[side], config=config)]
        ablation = self.ablation(folder, side, variants, minutes=minutes, seeds=seeds)
        done = self.finish(ablation)
        for trial in ablation.plan.trials:
            result, file = ablation.result(trial), without_memory_file(ablation, trial.name)
            if result is not None and result.get("done") and not file.exists():
                opened = open_run(ablation.path_of(trial))
                reading = Reading.of_run(opened.config).without_memory()
                write_json(file, score(opened, opened.text(limit=self.tokens), reading).as_dict())
        return done


def run(race: Race, options: argparse.Namespace) -> None:
    """Do the chosen parts of the race on a text."""
    print(facts({**describe(), "threads": "1", "text": race.directory.name}))
    print(race.pace_table())
    rates = [(lr, adamw_lr) for lr in options.lr for adamw_lr in options.adamw_lr]
    if "rates" in options.parts:
        for side in race.sides:
            race.try_rates(side, rates, minutes=options.rate_minutes or min(options.minutes))
        print(rates_table(race))
    if "race" in options.parts:
        for minutes in options.minutes:
            for side in race.sides:
                race.race(side, minutes=minutes, seeds=options.seeds)


def tried_rates(folder: Path) -> list[tuple[Variant, float | None]]:
    """Return what a side was tried with and its validation loss; None: it has none yet, or failed."""
    if not (folder / "ablation.json").exists():
        return []
    ablation = Ablation.open(folder)
    results = [(trial.variant, ablation.result(trial)) for trial in ablation.plan.trials]
    return [(variant, result["validation"]["loss"] if result and result.get("done") else None) for variant, result in results]


def best_rates(folder: Path) -> dict[str, float] | None:
    """Return the rates with the least validation loss; None: none were tried.

    Raises:
        ConfigError: some runs are not finished.
    """
    tried = tried_rates(folder)
    losses = [(loss, variant.config.optim) for variant, loss in tried if loss is not None]
    ablation = Ablation.open(folder) if tried else None
    if ablation and not all(Worker(ablation).is_done(trial) for trial in ablation.plan.trials):
        raise ConfigError(f"'{folder}' has runs that are not finished; let --parts rates finish them first")
    if not losses:
        return None
    _, optim = min(losses, key=lambda each: each[0])
    return {"lr": optim.lr, "adamw_lr": optim.adamw_lr or optim.lr}


def rates_table(race: Race) -> str:
    """Show the validation loss of all rates; the least of each side is marked."""
    rows = []
    for side in race.sides:
        tried = tried_rates(race.directory / "rates" / side)
        least = min((loss for _, loss in tried if loss is not None), default=None)
        for variant, loss in tried:
            optim = variant.config.optim
            shown = "-" if loss is None else f"{loss:.4f}{' *' if loss == least else ''}"
            rows.append([side, f"{optim.lr:g}", f"{optim.adamw_lr:g}", shown])
    return table([["side", "lr", "adamw_lr", "validation, nats"], *rows])


@dataclass
class Row:
    """A side on one text with one budget."""

    text: str
    minutes: float
    side: str
    recipe: str
    parameters: int
    lr: float
    adamw_lr: float | None
    step_seconds: float
    steps: int
    tokens: int
    unit: str
    scored: str
    nats: list[float]  # of each seed, as all lists here
    bits_per_character: list[float]
    nats_without_memory: list[float]

    @property
    def worth(self) -> list[float]:
        """What memory is worth."""
        return [without - own for without, own in zip(self.nats_without_memory, self.nats, strict=True)]


def finished(out: Path) -> Iterator[Row]:
    """Yield all sides of which runs are finished."""
    for plan in sorted(out.glob("*/*min/*/ablation.json")):
        ablation = Ablation.open(plan.parent)
        (variant,) = ablation.plan.variants
        results = [
            (result, read_json(file))
            for result in ablation.results(variant)
            if result.get("done") and (file := without_memory_file(ablation, result["run"])).exists()
        ]
        if not results:
            continue
        first, optim = results[0][0], variant.config.optim
        own = [result["scores"][0]["score"] for result, _ in results]
        yield Row(
            text=plan.parts[-4],
            minutes=ablation.plan.minutes or 0.0,
            side=variant.name,
            recipe=variant.recipe,
            parameters=first["parameters"],
            lr=optim.lr,
            adamw_lr=optim.adamw_lr,
            step_seconds=ablation.stored_paces()[variant.name].seconds,
            steps=first["steps"],
            tokens=first["tokens"],
            unit=first["unit"],
            scored=first["text"],
            nats=[score["loss"] for score in own],
            bits_per_character=[score["bpc"] for score in own],
            nats_without_memory=[without["loss"] for _, without in results],
        )


def write_table(out: Path) -> None:
    """Print the outcome, and write it as Markdown, JSON and a picture."""
    groups: dict[tuple[str, float], list[Row]] = {}
    for row in finished(out):
        groups.setdefault((row.text, row.minutes), []).append(row)
    if not groups:
        say(f"'{out}' holds no finished run")
        return
    parts = []
    for (text, minutes), rows in sorted(groups.items()):
        rows.sort(key=lambda row: (row.side != "ours", statistics.fmean(row.nats)))
        title, cells = f"{text}, {minutes:g} minutes: {rows[0].scored}", cells_of(rows)
        print(f"\n{title}\n{table(cells)}")
        parts.append(f"## {title}\n\n{markdown(cells)}\n")
    note = (
        "nats: mean ± standard error over the seeds; without: nothing is carried from segment to segment; worth: what that "
        "costs; difference: from the first row."
    )
    print(f"\n{note}")
    replace_file(out / "table.md", "\n".join([*parts, note, ""]).encode())
    rows = [row for group in groups.values() for row in group]
    write_json(out / "race.json", {"machine": describe(), "rows": [asdict(row) for row in rows]})
    say(f"picture: {draw(rows, out / 'race.png')}")


def cells_of(rows: Sequence[Row]) -> list[list[str]]:
    """Return the table of one text and budget."""
    words = rows[0].unit == "word"
    head = ["side", "parameters", "lr", "adamw_lr", "ms/step", "steps", "tokens", "seeds", "nats"]
    lines = [[*head, "perplexity" if words else "bits", "without", "worth", "difference"]]
    for row in rows:
        rates = [f"{row.lr:g}", f"{row.adamw_lr:g}"]
        counts = [f"{1e3 * row.step_seconds:,.1f}", f"{row.steps:,}", f"{row.tokens:,}", str(len(row.nats))]
        mean = statistics.fmean(row.nats)
        other = f"{math.exp(mean):,.1f}" if words else f"{statistics.fmean(row.bits_per_character):.4f}"
        difference = "" if row is rows[0] else with_error(mean - statistics.fmean(rows[0].nats), row.nats, rows[0].nats)
        line = [row.side, f"{row.parameters:,}", *rates, *counts, with_error(mean, row.nats), other]
        without = with_error(statistics.fmean(row.nats_without_memory), row.nats_without_memory)
        lines.append([*line, without, with_error(statistics.fmean(row.worth), row.worth), difference])
    return lines


def with_error(value: float, *samples: Sequence[float]) -> str:
    """Return a figure with its standard error, that of a difference from two samples; without, if one has a single seed."""
    text = f"{value:.4f}" if len(samples) == 1 else f"{value:+.4f}"
    if min(map(len, samples)) < 2:
        return text
    return f"{text} ± {math.sqrt(sum(standard_error(sample) ** 2 for sample in samples)):.4f}"


def standard_error(values: Sequence[float]) -> float:
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0


def draw(rows: Sequence[Row], path: Path) -> Path:
    """Draw nats against the budget, a panel for each text; of a single budget, side by side."""
    texts, sides = (list(dict.fromkeys(getattr(row, name) for row in rows)) for name in ("text", "side"))
    sides.sort(key=lambda side: ([*SIDES, side].index(side), side))
    figure = new_figure(width=4.2 * len(texts) + 1, height=6)
    panels = figure.subplots(1, len(texts), squeeze=False)[0]
    for axes, text in zip(panels, texts, strict=True):
        minutes = sorted({row.minutes for row in rows if row.text == text})
        for i, side in enumerate(sides):
            own = sorted((row for row in rows if (row.text, row.side) == (text, side)), key=lambda row: row.minutes)
            means, errors = [statistics.fmean(row.nats) for row in own], [standard_error(row.nats) for row in own]
            places = [row.minutes for row in own] if len(minutes) > 1 else [i] * len(own)
            axes.errorbar(places, means, errors, label=side, capsize=3, markersize=6, **line_style(i))
        if len(minutes) > 1:
            axes.set_xscale("log")
            axes.set_xticks(minutes, [f"{each:g}" for each in minutes])
            axes.minorticks_off()
            axes.set_xlabel("minutes of training on one core")
        else:
            axes.set_xticks([])
            axes.set_xlim(-0.7, len(sides) - 0.3)
            axes.set_xlabel(f"after {minutes[0]:g} minutes on one core")
        axes.set(title=text, ylabel="nats per token")
        axes.grid(alpha=0.3)
    return save_with_legend(figure, panels[-1], path)


def without_memory_file(ablation: Ablation, run: str) -> Path:
    return ablation.directory / "without-memory" / f"{run}.json"


def read_json(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}


def write_json(file: Path, values: Mapping[str, Any]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    replace_file(file, (json.dumps(values, indent=2) + "\n").encode())


if __name__ == "__main__":
    main()
