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
        txl train
        txl train --corpus my.txt --out runs/mine
        txl train shakespeare-char --corpus DIR
        txl train --set train.max_minutes=10 --set model.n_layer=6
        txl train --resume --out runs/mine

    The first reads Python's standard library, the second any text: a file,
    a directory, or a glob in quotes. The third finds the recipe's corpus in
    DIR, so that nothing is downloaded. The last goes on exactly where a run
    stopped.

    Args:
        recipe: quickstart (the default), shakespeare-char, a published one (docs/recipes.md), or a TOML file of your own.
        corpus: name, file, directory or glob; or a directory that holds the recipe's named corpus.
        out: directory of the run. Default: runs/RECIPE.
        set_: section.key=value laid over the recipe; may be repeated.
        resume: go on with the run in --out; start it if there is none.
        quiet: show warnings only.
    """
    from transformer_xl.training.allocator import keep_freed_memory
    from transformer_xl.training.display import Display
    from transformer_xl.training.loop import train as run

    keep_freed_memory()
    display = Display(quiet=quiet)
    outcome = run(recipe, out=out, overrides=set_ or [], corpus=corpus, resume=resume, display=display)
    if not outcome.finished:
        sys.exit(130)
    if outcome.picture:
        display.say(f"loss curve: {outcome.picture}")
    display.say(f"next: txl eval {outcome.directory}    txl generate {outcome.directory} --prompt TEXT")
