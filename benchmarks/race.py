"""A race of models at equal parameters and equal time, all with our trainer: ours, LSTMs, and models of other libraries.

Parts, each of which goes on where it was interrupted:
- pace: parameters, and the time of a training step of each side, measured in turns; nothing else looks at a clock.
- grid: the same trials for every side, on a seed of their own; the loss on the validation part chooses, in choices.json.
- race: runs with those choices, several seeds, each scored once on the test part with what it remembers and without.
- table: all that --out holds, as table.md, race.json and race.png.

Start the same command twice for two cores: the second process takes other runs. `make rivals` makes the environment.
"""

import argparse
import json
import math
import shlex
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import rivals  # noqa: F401  # registers them
import torch
from common.harness import facts
from common.machine import describe
from rivals.sides import GRIDS, SIDES, alternatives, choice, deeper, side_of

from transformer_xl.checkpoint.open_run import open_run
from transformer_xl.config.recipes import load_recipe
from transformer_xl.config.run import RunConfig
from transformer_xl.console import markdown, say, table, warn
from transformer_xl.data.corpora import choose_corpus
from transformer_xl.data.prepare import PreparedCorpus, prepare
from transformer_xl.errors import ConfigError, TxlError, one_line
from transformer_xl.files import locked, make_directories, replace_file
from transformer_xl.pictures import line_style, new_figure, save_with_legend
from transformer_xl.process import keep_freed_memory
from transformer_xl.reading.reading import Reading
from transformer_xl.tools.budget import measure_paces, n_parameters, steps_in
from transformer_xl.tools.comparison import score
from transformer_xl.training.display import Display
from transformer_xl.training.run import train


@dataclass(frozen=True)
class RaceText:
    """A text that is raced on."""

    recipe: str  # of ours, by name or path
    d_model: int  # of the rivals


TEXTS = {
    "shakespeare": RaceText("shakespeare-char", 192),
    "enwik8": RaceText("enwik8-byte", 192),
    "ptb": RaceText("ptb-word", 256),
    "poems": RaceText(str(Path(__file__).parent / "rivals" / "poems.toml"), 256),
}

PARTS = ("pace", "grid", "race", "table")
ALIKE = ("train.threads=1", "train.device=cpu", "train.precision=fp32", "train.sample_tokens=0", "eval.max_tokens=none")
GRID_SEED = 100
"""Of the runs that choose, so that no run of the race is among those that were chosen because they did well."""
MOST_APART = 0.05
"""Of parameters, from those of the first side."""


class _TakenError(Exception):
    """Another process has the run."""


def main() -> None:
    options = parse_arguments()
    torch.set_num_threads(1)
    keep_freed_memory()
    try:
        for text in options.text if {"pace", "grid", "race"} & set(options.parts) else ():
            run(Race(options, text), options)
        if "table" in options.parts:
            write_table(options.out)
    except KeyboardInterrupt:
        say(f"interrupted; go on with: {shlex.join(['python', *sys.argv])}")
        sys.exit(130)
    except (TxlError, OSError) as error:
        sys.exit(f"race.py: error: {one_line(error)}")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/race"), metavar="DIR", help="default: %(default)s")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="default: all")
    parser.add_argument("--text", nargs="+", choices=TEXTS, default=list(TEXTS), help="default: all")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES), help="default: all")
    parser.add_argument("--minutes", nargs="+", type=float, default=[4, 16], help="of training for each run (default: 4 16)")
    parser.add_argument("--seeds", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--choices", type=Path, metavar="FILE", help="what the grids chose (default: choices.json in --out)")
    parser.add_argument(
        "--corpus", nargs="+", default=[], metavar="[TEXT=]PATH", help="where the texts lie (default: $TXL_DATA)"
    )
    parser.add_argument("--rounds", type=int, default=5, help="turns of each side in which its step is timed (default: 5)")
    parser.add_argument("--tokens", type=int, help="score at most so many tokens, to try this out (default: all)")
    parser.add_argument("--set", nargs="+", default=[], metavar="SETTING", help="section.key=value laid over all sides")
    parser.add_argument("--quiet", action="store_true", help="show tables and warnings only")
    return parser.parse_args()


def of_text(values: Sequence[str], text: str) -> str | None:
    """Return the value of an option that is for this text (TEXT=VALUE), or else the one for all; None: there is none."""
    parts = [value.rpartition("=") for value in values]
    if unknown := [head for head, _, _ in parts if head and head not in TEXTS]:
        raise ConfigError(f"there is no text '{unknown[0]}'; the texts are {', '.join(TEXTS)}")
    chosen = {head: value for head, _, value in parts}
    return chosen.get(text, chosen.get(""))


class Race:
    """The race on one text, in a directory that several processes share."""

    def __init__(self, options: argparse.Namespace, text: str) -> None:
        self.directory, self.text, self.tokens, self.quiet = options.out / text, text, options.tokens, options.quiet
        self.parts, self.budgets, self.rounds = options.parts, sorted(options.minutes), options.rounds
        self.choices_file = options.choices or options.out / "choices.json"
        recipe = load_recipe(TEXTS[text].recipe, [*ALIKE, *options.set])
        self.ours = recipe.model_copy(update={"data": choose_corpus(recipe.data, of_text(options.corpus, text))})
        if self.ours.data.corpus == "tinyshakespeare":
            raise ConfigError("its validation and test are one text; --corpus shakespeare=input.txt divides the last tenth")
        self.sides = {side: self.first(side) for side in options.sides}

    @cached_property
    def corpus(self) -> PreparedCorpus:
        return prepare(self.ours.data, self.ours.tokenizer)

    @property
    def vocab_size(self) -> int:
        return self.corpus.tokenizer.vocab_size

    def first(self, side: str) -> RunConfig:
        """Return a side as it is before anything is tried."""
        return side_of(self.ours, side, d_model=TEXTS[self.text].d_model, vocab_size=self.vocab_size)

    @cached_property
    def paces(self) -> dict[str, float]:
        """Return the time of a step of all that a grid may try; what is not known yet is measured in turns, and kept."""
        file = self.directory / "pace.json"
        make_directories(self.directory)
        with locked(self.directory / "pace.lock", on_busy=lambda: say("another process measures; waiting", quiet=self.quiet)):
            known: dict[str, float] = read_json(file)
            shapes = {timed(each): each for side in self.sides for each in self.shapes(side)}
            if missing := {name: config for name, config in shapes.items() if name not in known}:
                say("measuring the time of a step of each side, in turn", quiet=self.quiet)
                known |= measure_paces(missing, dict.fromkeys(missing, self.corpus), rounds=self.rounds)
                write_json(file, known)
        return known

    def shapes(self, side: str) -> Iterator[RunConfig]:
        """Yield a side, and all that is made of it as far as a step takes another time."""
        begun = self.sides[side]
        yield begun
        if "grid" in self.parts:
            n = n_parameters(begun, self.vocab_size)
            for more in GRIDS["short"]["layers"]:
                shape = deeper(begun, int(more), n, self.vocab_size)
                yield from (shape.changed(model={"dropout": rate}) for rate in GRIDS["short"]["dropout"])
        else:
            yield from filter(None, (self.chosen(side, minutes=minutes) for minutes in self.budgets))

    def pace_table(self) -> str:
        """Show parameters and pace of each side, and warn of a side with too many or too few."""
        paces, rows, first = self.paces, [], 0
        for side, config in self.sides.items():
            n = n_parameters(config, self.vocab_size)
            first = first or n
            share = n / first - 1
            if abs(share) > MOST_APART:
                warn(f"{side} has {share:+.1%} parameters; this is no race at equal size")
            seconds, train = paces[timed(config)], config.train
            figures = [f"{train.batch_size} x {train.tgt_len}", f"{1e3 * seconds:,.1f}"]
            speed = f"{train.batch_size * train.tgt_len / seconds:,.0f}"
            rows.append([side, f"{n:,}", f"{share:+.1%}", *figures, speed])
        return table([["side", "parameters", "", "segments", "ms/step", "tokens/s"], *rows])

    def trained(self, config: RunConfig, path: Path, *, minutes: float, seed: int) -> dict[str, Any]:
        """Train a run, or go on where it was interrupted, and return its steps, tokens and loss on the validation part."""
        n_step = steps_in(minutes, self.paces[timed(config)])
        unlimited = {"max_minutes": None, "max_tokens": None, "max_epochs": None}
        config = config.changed(train=unlimited | {"max_steps": n_step, "eval_interval": n_step, "seed": seed})
        outcome = train(config, out=path, resume=True, display=_Progress(name=path.name, quiet=self.quiet))
        if outcome.stopped_by:
            raise KeyboardInterrupt(outcome.stopped_by)
        assert outcome.score
        return {"steps": outcome.step, "tokens": outcome.tokens, "validation": outcome.score.loss}

    def tried(self, side: str, config: RunConfig, *, minutes: float) -> float:
        """Return the validation loss of a trial of a grid; one that fails has an infinite one."""
        path = self.directory / "grid" / f"{minutes:g}min" / side / name_of(config)
        with self.claimed(path) as file:
            if not file.exists():
                try:
                    found = self.trained(config, path, minutes=minutes, seed=GRID_SEED)
                except TxlError as error:
                    found = {"validation": math.inf, "failed": one_line(error)}
                write_json(file, found | choice(config))
            loss = read_json(file)["validation"]
        say(f"{self.text}, {minutes:g} minutes, {side}, {path.name}: {loss:.4f}", quiet=self.quiet)
        return loss

    def search(self, side: str, *, minutes: float, begin: RunConfig, grid: str) -> RunConfig:
        """Return the best settings of a side for a budget, each step of the grid beginning at the best of the one before."""
        best = begin
        for step in GRIDS[grid]:
            tried = alternatives(best, step, grid, self.vocab_size)
            losses = [self.tried(side, config, minutes=minutes) for config in tried]
            best = tried[losses.index(min(losses))]
        return best

    def choose(self, side: str) -> None:
        """Search settings of a side for each budget, and note them."""
        config = self.sides[side]
        for i, minutes in enumerate(self.budgets):
            config = self.search(side, minutes=minutes, begin=config, grid="long" if i else "short")
            with locked(self.choices_file.with_suffix(".lock"), on_busy=lambda: None):
                choices = read_json(self.choices_file)
                choices.setdefault(self.text, {}).setdefault(f"{minutes:g}", {})[side] = choice(config)
                write_json(self.choices_file, choices)

    def chosen(self, side: str, *, minutes: float) -> RunConfig:
        """Return a side with what its grid chose.

        Raises:
            ConfigError: nothing is chosen yet.
        """
        found = read_json(self.choices_file).get(self.text, {}).get(f"{minutes:g}", {}).get(side)
        if found is None:
            raise ConfigError(
                f"'{self.choices_file}' has no choice for {side}, {self.text}, {minutes:g}; --parts grid makes it"
            )
        return self.sides[side].changed(**found)

    def race(self, side: str, *, minutes: float, seed: int) -> None:
        """Train a side as it was chosen, and score it once on the test part, with its memory and without."""
        config = self.chosen(side, minutes=minutes)
        if config is None:
            say(f"'{self.choices_file}' has no choice yet for {self.text}, {minutes:g} minutes, {side}; --parts grid makes it")
            return
        path = self.directory / f"{minutes:g}min" / side / f"seed{seed}"
        with self.claimed(path) as file:
            if file.exists():
                return
            found = self.trained(config, path, minutes=minutes, seed=seed)
            opened = open_run(path)
            text, reading = opened.text(limit=self.tokens), Reading.of_run(opened.config)
            scores = [score(opened, text, each) for each in (reading, reading.without_memory())]
            facts = {"side": side, "text": self.text, "minutes": minutes, "unit": opened.tokenizer.kind, "scored": text.what}
            sizes = {"parameters": n_parameters(config, self.vocab_size), "step_seconds": self.paces[timed(config)]}
            nats = {"nats": scores[0].loss, "bits_per_character": scores[0].bpc, "nats_without_memory": scores[1].loss}
            write_json(file, facts | sizes | found | nats | choice(config))
        say(f"{self.text}, {minutes:g} minutes, {side}, seed {seed}: {nats['nats']:.4f} nats", quiet=self.quiet)

    @contextmanager
    def claimed(self, path: Path) -> Iterator[Path]:
        """Hold a run while the block runs, and give the file of its result; `_TakenError` if another process has it."""

        def give_up() -> None:
            raise _TakenError(path.name)

        make_directories(path.parent)
        with locked(path.with_name(f".{path.name}.lock"), on_busy=give_up):
            yield path.with_name(f"{path.name}.json")


class _Progress(Display):
    """The display of one of many runs: its progress, with its name."""

    def say(self, text: str) -> None:
        pass

    def show(self, text: str, *, title: str) -> None:
        pass


def name_of(config: RunConfig) -> str:
    """Return the name of a trial, by what grids change."""
    optim, model = config.optim, config.model
    return f"lr{optim.lr:g}-decay{optim.weight_decay:g}-dropout{model.dropout:g}-layers{model.n_layer}"


def timed(config: RunConfig) -> str:
    """Return what the time of a step depends on."""
    return f"{config.name}-layers{config.model.n_layer}" + ("-dropout" if config.model.dropout else "")


def run(race: Race, options: argparse.Namespace) -> None:
    """Do the chosen parts of the race on a text."""
    print(facts({**describe(), "threads": "1", "text": race.text}))
    print(race.pace_table())
    for side in race.sides if "grid" in options.parts else ():
        try:
            race.choose(side)
        except _TakenError as taken:
            say(f"another process is at {side}, {taken}; start again to see what it chose")
    if "race" in options.parts:
        for minutes in race.budgets:
            for seed in range(1, options.seeds + 1):
                for side in race.sides:
                    try:
                        race.race(side, minutes=minutes, seed=seed)
                    except _TakenError as taken:
                        say(f"another process is at {side}, {taken}")


@dataclass
class Row:
    """A side on one text with one budget; lists have an entry for each seed."""

    text: str
    minutes: float
    side: str
    unit: str
    scored: str
    parameters: int
    step_seconds: float
    steps: int
    tokens: int
    model: dict[str, Any]
    optim: dict[str, float]
    validation: list[float]
    nats: list[float]
    bits_per_character: list[float]
    nats_without_memory: list[float]

    @property
    def worth(self) -> list[float]:
        """What memory is worth."""
        return [without - own for without, own in zip(self.nats_without_memory, self.nats, strict=True)]


def finished(out: Path) -> Iterator[Row]:
    """Yield all sides of which runs are finished."""
    folders = {file.parent for file in out.glob("*/*min/*/seed*.json")}
    for folder in sorted(folders):
        runs = [read_json(file) for file in sorted(folder.glob("seed*.json"))]
        lists = ("validation", "nats", "bits_per_character", "nats_without_memory")
        values: dict[str, Any] = {field.name: runs[0][field.name] for field in fields(Row)}
        values.update({name: [run[name] for run in runs] for name in lists})
        yield Row(**values)


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
    head = ["side", "parameters", "layers", "lr", "decay", "ms/step", "steps", "tokens", "seeds", "nats"]
    lines = [[*head, "perplexity" if words else "bits", "without", "worth", "difference"]]
    for row in rows:
        chosen = [str(row.model["n_layer"]), f"{row.optim['lr']:g}", f"{row.optim['weight_decay']:g}"]
        counts = [f"{1e3 * row.step_seconds:,.1f}", f"{row.steps:,}", f"{row.tokens:,}", str(len(row.nats))]
        mean = statistics.fmean(row.nats)
        other = f"{math.exp(mean):,.1f}" if words else f"{statistics.fmean(row.bits_per_character):.4f}"
        difference = "" if row is rows[0] else with_error(mean - statistics.fmean(rows[0].nats), row.nats, rows[0].nats)
        line = [row.side, f"{row.parameters:,}", *chosen, *counts, with_error(mean, row.nats), other]
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


def read_json(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}


def write_json(file: Path, values: Mapping[str, Any]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    replace_file(file, (json.dumps(values, indent=2) + "\n").encode())


if __name__ == "__main__":
    main()
