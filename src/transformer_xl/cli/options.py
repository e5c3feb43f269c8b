"""Options that several commands share: their types, groups and checks."""

import math
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, get_args

from cyclopts import UNSET, App, ArgumentCollection, Parameter
from cyclopts.exceptions import CycloptsError, MissingArgumentError, UnknownOptionError, ValidationError
from cyclopts.validators import Number

from transformer_xl.console import warn
from transformer_xl.errors import ConfigError, counted, did_you_mean, nearest, one_line, shown

if TYPE_CHECKING:
    from transformer_xl.checkpoint.open_run import Opened
    from transformer_xl.data.labels import Example
    from transformer_xl.data.text import Text

Flag = Annotated[bool, Parameter(negative="", show_default=False)]
"""An option without a value and without a --no- form."""

Json = Annotated[bool, Parameter(name="--json", negative="", show_default=False)]
"""Whether JSON is printed; the parameter is called `json_`."""

Repeated = Annotated[list[str] | None, Parameter(negative="", consume_multiple=False)]
"""Values of an option that may be repeated, with one value each time."""

Overrides = Annotated[list[str] | None, Parameter(name="--set", negative="", consume_multiple=False)]
"""Settings laid over a recipe, such as train.steps=100; the parameter is called `set_`."""

Imports = Annotated[list[str] | None, Parameter(name="--import", negative="", consume_multiple=False)]
"""Modules that register kinds of one's own, see `import_kinds`; the parameter is called `import_`."""

Precision = Literal["auto", "fp32", "bf16", "fp16", "int8"]
"""The precision in which a model is used."""

FloatPrecision = Literal["auto", "fp32", "bf16", "fp16"]
"""The same for commands that cannot round weights to int8."""


def _recipes(context: object) -> list[str]:
    from transformer_xl.config.recipes import recipe_names

    return recipe_names()


def _tasks(context: object) -> list[str]:
    from transformer_xl.config.recipes import task_names

    return task_names()


RECIPES, TASKS = Parameter(completer=_recipes), Parameter(completer=_tasks)
"""Of an argument whose value may be the name of a recipe, or of a task: what a shell completes."""

_LARGEST = 2**63 - 1  # no library can hold more

Natural = Annotated[int, Parameter(validator=Number(gte=0, lte=_LARGEST))]
"""A whole number from 0 on."""

Positive = Annotated[int, Parameter(validator=Number(gte=1, lte=_LARGEST))]
"""A whole number from 1 on."""

Above0 = Annotated[float, Parameter(validator=Number(gt=0, lt=math.inf))]
"""A number above 0."""

Split = Literal["train", "valid", "test"]
"""A split of a corpus."""

Which = Literal["best", "last", "average"]
"""Which weights of a run."""


@Parameter(name="*")
@dataclass(frozen=True)
class Opening:
    """How a run or a model is opened.

    Args:
        device: auto, cpu, cuda, cuda:N or mps.
        checkpoint: which weights of a run: those with the best validation, the last, or the last average (train.average).
        import_: a module that registers your own kind of model: its name, or PATH/NAME.py; may be repeated.
    """

    device: str = "auto"
    checkpoint: Which = "best"
    import_: Imports = None

    def open(self, run: str | Path, *, on_damaged: Callable[[str], None] = warn, any_model: bool = False) -> "Opened":
        """Open a run, an exported model or a hub id; see `open_run`."""
        import_kinds(self.import_)
        from transformer_xl.checkpoint.open_run import open_run

        return open_run(run, which=self.checkpoint, device=self.device, on_damaged=on_damaged, any_model=any_model)


def import_kinds(places: Sequence[str] | None) -> None:
    """Import modules that register kinds of attention or of model. Only a command names such a module, never a file.

    Args:
        places: names of modules that are installed; or files (`PATH/NAME.py`) and packages (`PATH/NAME`), which may import what
            lies beside them. A place with a slash or the suffix .py is a path.
    """
    for place in places or ():
        name, file = place, None
        if place.endswith(".py") or "/" in place or os.sep in place:
            path = Path(place).absolute()
            name, file = path.stem, path if path.suffix == ".py" else path / "__init__.py"
            if not file.is_file():
                raise ConfigError(f"--import {shown(place)} cannot be imported: there is no file '{file}'")
            sys.path.append(str(path.parent))  # last, so that nothing there takes the place of an installed module
        try:
            module = import_module(name)
        except Exception as error:  # the code of others may raise anything
            hint = "; a file is given as ./NAME.py" if isinstance(error, ModuleNotFoundError) and file is None else ""
            raise ConfigError(f"--import {shown(place)} failed: {type(error).__name__}: {one_line(error)}{hint}") from None
        if file and not file.samefile(getattr(module, "__file__", None) or "."):
            raise ConfigError(f"--import {shown(place)} is called like another module, '{name}'; give it another name")


@Parameter(name="*")
@dataclass(frozen=True)
class TextChoice:
    """Which text is read.

    Args:
        split: train, valid or test. Default: test, or valid where there is none.
        corpus: another corpus than the run's, or a directory that holds the run's named corpus.
        file: score this file, of text, plain or compressed, or of ids, instead of a split.
    """

    split: Split | None = None
    corpus: str | None = None
    file: Path | None = None

    def text(self, opened: "Opened") -> "Text":
        """Return the text, in tokens of the opened model."""
        if self.file is not None and (self.split is not None or self.corpus is not None):
            raise ConfigError("--file scores a whole file; leave --split and --corpus out")
        return opened.text(file=self.file, split=self.split, corpus=self.corpus)

    def labelled(self, opened: "Opened") -> "tuple[str, Iterable[Example]]":
        """Return texts with labels for a fine-tuned model, and what they are: by default its run's test or validation file.

        If a run has no validation file, what was held out of its training file is another split than what was learned from.
        """
        from transformer_xl.data.task_texts import find_files, read_task
        from transformer_xl.tasks.predict import read_texts

        if self.corpus is not None:
            raise ConfigError(f"'{opened.source}' is fine-tuned; give a file with labels by --file instead of --corpus")
        task = opened.config.task
        files = find_files(task) if task and self.file is None else None
        if task and files and not files.valid and self.split in ("train", "valid"):
            head = opened.config.model.head
            texts = read_task(task, seed=opened.config.train.seed, known_labels=head.labels if head else ())
            chosen, what = (texts.train, "learned from") if self.split == "train" else (texts.valid, "held out")
            examples = (each.example if task.kind == "span" else each for each in chosen)
            return f"the {counted(len(chosen), 'text')} of '{files.train}' that were {what}", examples
        wanted = (self.split,) if self.split else ("test", "valid")
        found = self.file or next((file for name in wanted if files and (file := getattr(files, name))), None)
        if found is None:
            held = ""
            if files and not files.valid:
                held = f": it was validated on texts held out of '{files.train}' (--split valid)"
            raise ConfigError(
                f"'{opened.source}' has no file of its own to {wanted[0]} on{held}; give one with labels by --file"
            )
        return str(found), read_texts(found, opened, labelled=True)


@Parameter(name="*")
@dataclass(frozen=True)
class ReadingChoice:
    """How a text is read, by the attributes of `Reading`. Options that are None are taken from the run.

    Args:
        tgt_len: tokens per segment; this alone changes no mem_len. Default: as in training.
        mem_len: positions of memory. Default: as in training.
        batch_size: lanes read side by side; 1 reads strictly from beginning to end. Default: the recipe's.
        same_length: give every query the same number of keys.
        clamp_len: largest distance; larger ones count as this one.
        ext_len: tokens before each segment that are read again with it instead of being remembered.
        precision: of the matrix products; auto: whichever the processor computes fast; int8 rounds the weights.
    """

    tgt_len: Positive | None = None
    mem_len: Natural | None = None
    batch_size: Positive | None = None
    same_length: bool | None = None
    clamp_len: Positive | None = None
    ext_len: Natural | None = None
    precision: Precision = "auto"


_MOST_DIGITS = 18  # of a number that fits into 64 bits


def numbers_of(option: str, text: str, *, least: int = 1) -> list[int]:
    """Return the numbers that an option lists, each once."""
    parts = [part.strip() for part in text.split(",")]
    if any(len(part) > _MOST_DIGITS for part in parts):
        raise ConfigError(f"--{option} '{text}' must be numbers of at most {_MOST_DIGITS} digits with commas between")
    if not all(part.isdecimal() and int(part) >= least for part in parts):
        raise ConfigError(f"--{option} '{text}' must be numbers of at least {least} with commas between, such as 1,4,16")
    return list(dict.fromkeys(map(int, parts)))


def names_of(option: str, text: str, known: Sequence[str]) -> list[str]:
    """Return the names that an option lists, each once."""
    chosen = [part.strip() for part in text.split(",")]
    for name in chosen:
        if name not in known:
            raise ConfigError(f"unknown --{option} '{name}'; {did_you_mean(name, known)}")
    return list(dict.fromkeys(chosen))


def check_values(app: App, commands: Sequence[str], arguments: ArgumentCollection) -> None:
    """Refuse an empty value, as of an unset variable, and a whole number with a point, which the parser would round.

    As a path, nothing would be the working directory. Only a prompt may be empty.
    """
    options = {name for argument in arguments for name in argument.names if name.startswith("-")}
    for argument in arguments:
        typed = [token.value for token in argument.tokens if token.implicit_value is UNSET]
        if "" in typed and argument.name != "--prompt":
            raise ValidationError(argument=argument, value="", exception_message="It must not be empty.")
        if option := next((value for value in typed if value in options), None):
            name = argument.name
            raise CycloptsError(msg=f"{name} needs a value; for one that is called like an option, write {name}={option}.")
        if int in (argument.hint, *get_args(argument.hint)) and (wrong := [value for value in typed if "." in value]):
            raise ValidationError(argument=argument, value=wrong[0], exception_message="It must be a whole number.")


_ELSEWHERE = {
    **dict.fromkeys(("length", "max-length", "max-new-tokens"), "tokens"),
    **{"learning-rate": "lr", "num-samples": "n", "output": "out", "unit": "per"},
}
"""What options are called in other programs, or in other commands."""


def unknown_option(error: UnknownOptionError) -> str:
    """Return a message that names the nearest option, or the nearest setting if the command takes settings."""
    option = (error.token.keyword or error.token.value).partition("=")[0][:100]
    options = [name for argument in error.argument_collection if argument.parse for name in argument.names]
    own = {name.lstrip("-"): name for name in options if name[:2] == "--"}
    known = {**(_settings() if "set" in own else {}), **own}
    name = option.lstrip("-").replace("_", "-")
    near = usual if (usual := _ELSEWHERE.get(name)) in known else nearest(_key(name), known)
    return f"Unknown option {option}{f'; did you mean {known[near]}?' if near else '.'}"


def missing_value(error: MissingArgumentError) -> str:
    """Return a message that names the argument without a value."""
    name = error.argument.name if error.argument else "an argument"
    return f"{name} needs a value." if name.startswith("-") else f"{name} is missing."


def _settings() -> dict[str, str]:
    """Return how each setting is given, by its name without what it is a maximum or a number of."""
    from transformer_xl.config.recipes import setting_names

    given: dict[str, str] = {}
    for name in setting_names():
        given.setdefault(_key(name.rpartition(".")[2].replace("_", "-")), f"--set {name}=VALUE")
    return given


def _key(name: str) -> str:
    return name.removeprefix("max-").removeprefix("n-")
