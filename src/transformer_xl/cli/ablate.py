"""`txl ablate`."""

import json
import shlex
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cyclopts import Parameter

from transformer_xl.cli.options import Above0, Flag, Imports, Json, Overrides, Positive, import_kinds, names_of, numbers_of
from transformer_xl.console import progress, say
from transformer_xl.errors import ConfigError

if TYPE_CHECKING:
    from transformer_xl.tools.ablation import Ablation
    from transformer_xl.tools.table import Table
    from transformer_xl.tools.variants import AblationPlan

_VALIDATIONS = 10
"""Validations of each run, for its curve, unless --set says how many."""


@Parameter(name="*")
@dataclass(frozen=True)
class _PlanOptions:
    """What is compared, and how: the plan of an ablation, which no option changes later.

    Args:
        recurrence: yes, no or both; no: a model without memory.
        attention: kinds such as shaw,rotary (txl settings), with commas between.
        loss: full, half or both; half: learn only from the later half of each segment.
        steps: budget of each run in steps.
        minutes: budget of each run in minutes of training. Default: the recipe's own budget.
        seeds: train each variant this many times, with other random numbers. Default: 1.
        set_: section.key=value, overrides all recipes; may be repeated.
        corpus: name, file, directory or glob; or a directory that holds the recipes' named corpus.
        lengths: attention lengths to score besides that of txl eval, with commas between. Default: several from 0 on.
        tokens: score at most this many tokens of the test split.
    """

    recurrence: str | None = None
    attention: str | None = None
    loss: str | None = None
    steps: Positive | None = None
    minutes: Above0 | None = None
    seeds: Positive | None = None
    set_: Overrides = None
    corpus: str | None = None
    lengths: str | None = None
    tokens: Positive | None = None

    def plan(self, recipes: Sequence[str]) -> "AblationPlan":
        """Return the plan of an ablation of recipes."""
        from transformer_xl.tools.variants import AblationPlan, axes, make_variants

        if self.steps is not None and self.minutes is not None:
            raise ConfigError(f"--steps ({self.steps}) and --minutes ({self.minutes:g}) are two budgets; give one of them")
        texts = {axis: getattr(self, axis) for axis in axes()}
        values = {axis: names_of(axis, text, axes()[axis]) if text else None for axis, text in texts.items()}
        has_own_validations = any(change.partition("=")[0].strip() == "train.eval_interval" for change in self.set_ or ())
        return AblationPlan(
            make_variants(recipes, **values, overrides=self.set_ or (), corpus=self.corpus),
            seeds=self.seeds or 1,
            steps=self.steps,
            minutes=self.minutes,
            validations=None if has_own_validations else _VALIDATIONS,
            lengths=None if self.lengths is None else tuple(sorted(numbers_of("lengths", self.lengths, least=0))),
            tokens=self.tokens,
        )


def ablate(
    *recipes: str,
    options: _PlanOptions = _PlanOptions(),
    out: Path | None = None,
    recl: Positive | None = None,
    import_: Imports = None,
    dry_run: Flag = False,
    quiet: Flag = False,
    json_: Json = False,
) -> None:
    """Train variants of recipes with equal budgets, and compare their scores in one table.

    By default, a single recipe is compared with and without recurrence, with all
    kinds of attention, and learning from all tokens or half of them. Ctrl-C loses
    nothing: the same command continues, and so does --out alone. The same
    command in a second terminal takes a share of the work.

    Common uses:
        txl ablate quickstart --minutes 3 --dry-run
        txl ablate quickstart --minutes 3
        txl ablate quickstart --recurrence yes,no --seeds 3 --minutes 3
        txl ablate ptb-small --attention transformer_xl,shaw --steps 2000
        txl ablate mine.toml other.toml --minutes 10 --out runs/mine-or-other
        txl ablate --out runs/ablate-quickstart

    A time budget becomes a number of steps: the time of a step is measured first,
    for all variants in turn, and each variant gets as many steps as fit. So
    other load on the machine changes no result. See docs/analysis.md.

    Args:
        recipes: names (txl recipes) or TOML files, of any kind of model.
        options: what is compared, and how.
        out: directory of the ablation. Default: runs/ablate-RECIPE.
        recl: also tell how far back each variant uses its context, in steps of a twentieth up to this many tokens.
        import_: a module that registers your own kinds: its name, or PATH/NAME.py; may be repeated.
        dry_run: print variants, parameters, steps and time; write nothing.
        quiet: show warnings and the table only.
        json_: print one JSON object.
    """
    import_kinds(import_)
    if recl is not None and recl % 20:
        raise ConfigError(f"--recl ({recl}) must be a multiple of 20, such as 400: the context grows in twenty steps")
    ablation = _ablation(recipes, options, out)
    from transformer_xl.tools.worker import Worker

    worker = Worker(ablation, quiet=quiet)
    worker.check()
    if dry_run:
        from transformer_xl.tools.table import forecast_text

        rows = worker.forecast()
        print(json.dumps({"out": str(ablation.directory), "variants": rows}) if json_ else forecast_text(ablation, rows))
        return
    ablation.begin()
    try:
        busy = worker.go_on()
    except KeyboardInterrupt as stop:
        again = ["txl", "ablate", *(part for place in import_ or () for part in ("--import", place))]
        say(f"interrupted; go on with: {shlex.join([*again, '--out', str(ablation.directory)])}")
        sys.exit(128 + (stop.args[0] if stop.args else signal.SIGINT))
    _conclude(ablation, busy, recl=recl, json_=json_, quiet=quiet)


def _ablation(recipes: Sequence[str], options: _PlanOptions, out: Path | None) -> "Ablation":
    """Return a new ablation, or without recipes the one in `out`, whose plan no option may change."""
    from transformer_xl.model.pretrained import RUNS
    from transformer_xl.process import keep_freed_memory
    from transformer_xl.tools.ablation import Ablation

    keep_freed_memory()
    if recipes:
        plan = options.plan(recipes)
        directory = out or RUNS / "-".join(["ablate", *dict.fromkeys(each.recipe for each in plan.variants)])
        ablation = Ablation(directory, plan)
        ablation.check_directory()
        return ablation
    if out is None:
        raise ConfigError("name a recipe, such as txl ablate quickstart --minutes 3, or with --out an ablation that goes on")
    if given := [name for name, value in vars(options).items() if value]:
        option = given[0].rstrip("_")
        raise ConfigError(f"--{option} is part of a plan, and '{out}' has its own; name the recipe, too, or leave it out")
    return Ablation.open(out)


def _conclude(ablation: "Ablation", busy: list[str], *, recl: int | None, json_: bool, quiet: bool) -> None:
    """Write the table, print it and the effective lengths, and say what is missing."""
    from transformer_xl.files import replace_file
    from transformer_xl.tools.table import as_markdown, as_text, lengths_text, make_table

    table = make_table(ablation)
    with ablation.alone(lambda: None):
        replace_file(ablation.directory / "table.md", as_markdown(table).encode())
    if json_:
        facts = {"recl": _effective_lengths(ablation, table, recl, quiet=quiet)} if recl else {}
        print(json.dumps({"out": str(ablation.directory), **asdict(table), "busy": busy, **facts}))
        return
    print(as_text(table))
    if recl:
        print(f"\n{lengths_text(_effective_lengths(ablation, table, recl, quiet=quiet), most=recl)}")
    if busy:
        print(f"Another process is at {', '.join(busy)}; it makes the table of all when it ends.")


def _effective_lengths(ablation: "Ablation", table: "Table", max_context: int, *, quiet: bool) -> dict[str, dict[float, int]]:
    """Return the relative effective context length of each variant, by share of the tokens."""
    from transformer_xl.tools.recl import ablation_lengths

    if table.compared != "loss":
        why = table.why_not or "vocabularies differ"
        raise ConfigError(f"--recl compares losses of the same tokens, and {why}; leave it out")
    with progress("contexts", None, hidden=quiet) as bar:
        return ablation_lengths(ablation, max_context=max_context, on_tokens=bar.advance)
