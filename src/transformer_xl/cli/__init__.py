"""The command `txl`: each command is a file that parses, calls and prints. Nothing heavy is imported before a command runs."""

import io
import os
import sys
from typing import Any, Literal

from cyclopts import App, CycloptsError, Group, MissingArgumentError, UnknownOptionError, UnusedCliTokensError

from transformer_xl.cli import (
    ablate,
    bench,
    convert,
    corpus,
    evaluate,
    explain,
    generate,
    info,
    plan,
    plot,
    predict,
    recipes,
    score,
    serve,
    train,
    translate,
)
from transformer_xl.cli.options import check_values, missing_value, unknown_option
from transformer_xl.console import say
from transformer_xl.errors import (
    LostContactError,
    ToldElsewhereError,
    TxlError,
    lacks_memory,
    message_of,
    no_memory,
    one_line,
    shown,
)
from transformer_xl.process import have_met, local_rank, rank, wait_for_reporter
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
    suppress_keyboard_interrupt=False,  # `_call` says a word
    config=check_values,
)


def completion(shell: Literal["bash", "zsh", "fish"], /) -> None:
    """Print a script that completes commands, options, recipes and files in a shell.

    Common uses:
        source <(txl completion bash)  # in ~/.bashrc
        txl completion zsh > ~/.zfunc/_txl  # with fpath+=~/.zfunc before compinit
        txl completion fish > ~/.config/fish/completions/txl.fish

    Args:
        shell: bash, zsh or fish.
    """
    script = app.generate_completion(shell=shell)
    print(script.replace("complete -F", "complete -o default -F"))  # bash: a file where nothing else is known


_GROUPS: dict[str, dict[str, Any]] = {
    "Train": {
        "train": train.train,
        "finetune": train.finetune,
        "corpus": corpus.app,
        "recipes": recipes.recipes,
        "settings": recipes.settings,
        "plan": plan.plan,
    },
    "Use": {
        "generate": generate.generate,
        "serve": serve.serve,
        "predict": predict.predict,
        "translate": translate.translate,
        "score": score.score,
    },
    "Understand": {
        "info": info.info,
        "eval": evaluate.evaluate,
        "explain": explain.explain,
        "ablate": ablate.ablate,
        "plot": plot.plot,
        "bench": bench.bench,
    },
    "Convert": {"convert": convert.convert},
    "This program": {"completion": completion},
}
_USAGE = {
    **{"train": "[RECIPE or TEXT]", "finetune": "[RUN]", "settings": "[RECIPE]", "plan": "[RECIPE]"},
    **{"predict": "RUN [FILE]", "ablate": "[RECIPE...]", "plot": "[RUN...]"},
}
"""What stands for an argument that may be left out, where cyclopts writes [ARGS]."""


def _register() -> None:
    for place, (title, commands) in enumerate(_GROUPS.items()):
        group = Group(title, sort_key=place)
        for order, (name, command) in enumerate(commands.items()):
            app.command(command, name=name)
            app[name].group, app[name].sort_key = group, order
    for name, argument in _USAGE.items():
        app[name].usage = f"Usage: txl {name} [OPTIONS] {argument}"
    for name in ("--help", "--version"):
        app[name].group = app["completion"].group


_register()


def main(arguments: list[str] | None = None) -> None:
    """Run `txl` and exit; an error that the user can mend is one line on stderr and status 1.

    If nobody reads standard output any more, as after `head`, that is no error: a command ends where it writes to it, with
    status 0. Standard error that nobody reads takes nothing from the result; what `txl train` does then, see docs/training.md.
    """
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:  # it was closed, and the next file that is opened would take its place
            nowhere = os.open(os.devnull, os.O_RDWR)
            if name != "stdin":  # whoever reads it says that it is closed
                setattr(sys, name, os.fdopen(nowhere, "w"))
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a model may write characters that a terminal cannot show
            stream.reconfigure(errors="replace")
    try:
        _call(arguments)
        status = None
    except SystemExit as end:
        # rich, which writes the help, ends with 1
        status = 0 if isinstance(end.__context__, BrokenPipeError) else end.code
    sys.exit(_written(status))


def _call(arguments: list[str] | None) -> None:
    try:
        app(sys.argv[1:] if arguments is None else arguments, exit_on_error=False, print_error=False)
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        sys.exit(0)
    except (TxlError, OSError) as error:
        _complain(error, message_of(error))
        if isinstance(error, LostContactError):  # threads still wait for lost processes, and would abort the exit
            sys.stderr.flush()
            os._exit(1)
        sys.exit(1)
    except CycloptsError as error:
        if isinstance(error.__cause__, TxlError):  # of options that are a dataclass
            _complain(error.__cause__, message_of(error.__cause__))
            sys.exit(1)
        command = " ".join(["txl", *(error.command_chain or ())])
        what: object = error
        if isinstance(error, UnknownOptionError):
            what = unknown_option(error)
        elif isinstance(error, MissingArgumentError):
            what = missing_value(error)
        elif isinstance(error, UnusedCliTokensError):
            what = f"Too many arguments: nothing takes {', '.join(map(shown, error.unused_tokens or ()))}."
        _complain(error, f"{what} See {command} --help.")
        sys.exit(2)
    except KeyboardInterrupt as stop:
        say(f"{chr(10) * sys.stderr.isatty()}interrupted {stop}".rstrip(), quiet=rank() > 0)
        sys.exit(130)
    except (MemoryError, OverflowError, RuntimeError, TypeError) as error:
        if not lacks_memory(error):
            raise
        _complain(error, f"{no_memory(error)} for what was asked; lower its numbers, such as --mem-len or --batch-size")
        sys.exit(1)


def _written(status: str | int | None) -> str | int | None:
    """Write what is still buffered, and return the exit status; when Python exits, an error would be a traceback."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError as error:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())  # discard it
            if stream is sys.stdout and not status and not isinstance(error, BrokenPipeError):
                say(f"txl: error: cannot write to standard output: {message_of(error)}")
                status = 1
    return status


def _complain(error: Exception, message: str) -> None:
    if _prints(error):
        say(f"txl: error: {one_line(message)}")
    else:
        wait_for_reporter()


def _prints(error: Exception) -> bool:
    """Return whether this process prints an error: of several processes the first one does, if it knows of the error."""
    if not have_met():  # all processes of a machine find the same fault in their command
        return local_rank() == 0
    return rank() == 0 or not isinstance(error, (ToldElsewhereError, LostContactError))
