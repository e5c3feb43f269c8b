"""`txl train`."""

import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter


def train(
    recipe: str | None = None,
    /,
    *,
    corpus: str | None = None,
    out: Path | None = None,
    set_: Annotated[list[str] | None, Parameter(name="--set", negative="", consume_multiple=False)] = None,
    resume: Annotated[bool, Parameter(negative="")] = False,
    quiet: Annotated[bool, Parameter(negative="")] = False,
) -> None:
    """Train a model on text, score it and write with it.

    Ctrl-C finishes the step, saves, and says how to go on.

    Common uses:
        txl train                                            recipe quickstart, Python's standard library
        txl train --corpus my.txt --out runs/mine            any text: a file, a directory, or a glob in quotes
        txl train shakespeare-char --corpus DIR              DIR holds the recipe's corpus, so nothing is downloaded
        txl train --set train.max_minutes=10 --set model.n_layer=6
        txl train --resume --out runs/mine                   go on where it stopped, exactly

    Args:
        recipe: name of a recipe, or a TOML file. Default: quickstart.
        corpus: name, file, directory or glob; or a directory that holds the recipe's named corpus.
        out: directory of the run. Default: runs/RECIPE.
        set_: section.key=value laid over the recipe; may be repeated.
        resume: go on with the run in --out; start it if there is none.
        quiet: show warnings only.
    """
    from transformer_xl.training.display import Display
    from transformer_xl.training.loop import train as run

    display = Display(quiet=quiet)
    outcome = run(recipe, out=out, overrides=set_ or [], corpus=corpus, resume=resume, display=display)
    if not outcome.finished:
        sys.exit(130)
    if outcome.picture:
        display.say(f"loss curve: {outcome.picture}")
    display.say(f"next: txl eval {outcome.directory}    txl generate {outcome.directory} --prompt TEXT")
