"""The command `txl`: a thin file per command that parses, calls and prints. Nothing heavy is imported before a command runs."""

import io
import os
import sys

from cyclopts import App, CycloptsError

from transformer_xl.cli import (
    ablate,
    bench,
    bench_eval_speed,
    convert,
    corpus,
    evaluate,
    explain,
    generate,
    plan,
    plot,
    recl,
    train,
)
from transformer_xl.errors import LostContactError, ToldElsewhereError, TxlError, one_line
from transformer_xl.process import have_met, local_rank, rank
from transformer_xl.version import __version__

app = App(
    name="txl",
    version=__version__,
    help="""Transformer-XL: a language model that reads a stream of any length with a memory of fixed size.

Common uses:

    txl train
    txl train quickstart --corpus my.txt --out runs/mine
    txl eval runs/mine
    txl generate runs/mine --prompt "Once upon a time"
    txl convert transfo-xl-wt103 models/wt103
""",
    help_format="plaintext",
)
app.command(train.train)
app.command(evaluate.evaluate, name="eval")
app.command(explain.explain)
app.command(generate.generate)
app.command(convert.convert)
app.command(corpus.app)
app.command(bench.app)
bench.app.command(bench_eval_speed.eval_speed, name="eval-speed")
app.command(plan.plan)
app.command(ablate.ablate)
app.command(plot.plot)
app.command(recl.recl)


def main(arguments: list[str] | None = None) -> None:
    """Run `txl` and exit; errors that a user can mend are one line on stderr and status 1."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a model may write characters that a terminal cannot show
            stream.reconfigure(errors="replace")
    try:
        app(sys.argv[1:] if arguments is None else arguments, exit_on_error=False, print_error=False)
    except TxlError as error:
        if _speaks(error):
            print(f"txl: error: {one_line(error)}", file=sys.stderr)
        if isinstance(error, LostContactError):  # threads still wait for those who are gone, and would abort the exit
            sys.stderr.flush()
            os._exit(1)
        sys.exit(1)
    except CycloptsError as error:
        command = " ".join(["txl", *(error.command_chain or ())])
        if _speaks(error):
            print(f"txl: error: {one_line(error)} See {command} --help.", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print(file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is still buffered has nowhere to go
        sys.exit(0)


def _speaks(error: Exception) -> bool:
    """Say whether this process tells of an error: where there are several, the first one does for all, if it can know of it."""
    if not have_met():  # what all on a machine find wrong with the command that they were given
        return local_rank() == 0
    return rank() == 0 or not isinstance(error, (ToldElsewhereError, LostContactError))
