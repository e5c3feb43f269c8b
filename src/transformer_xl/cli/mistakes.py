"""What somebody meant who gave an unknown option, a value of another type, or an argument too many."""

import difflib
from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin

from cyclopts import App, ArgumentCollection, CoercionError, UnknownOptionError, UnusedCliTokensError

from transformer_xl.errors import one_line

_WORDS = {int: "a whole number", float: "a number", bool: "no value"}


def commands(app: App, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ArgumentCollection]]:
    """Yield the name of each command, such as "corpus list", and its arguments."""
    for name in app:
        if name.startswith("-"):
            continue
        if app[name].default_command:
            yield " ".join([*path, name]), app[name].assemble_argument_collection()
        yield from commands(app[name], (*path, name))


def unknown_option(error: UnknownOptionError, app: App) -> str:
    """Return a message that names the nearest option or setting, or else the commands that have the option."""
    option = (error.token.keyword or error.token.value).partition("=")[0][:100]
    own = {name.lstrip("-"): name for argument in error.argument_collection for name in argument.names if name[:2] == "--"}
    meant = {**(_settings() if "set" in own else {}), **own}
    nearest = difflib.get_close_matches(_key(option.lstrip("-").replace("-", "_")), meant, n=1, cutoff=0.7)
    if nearest:
        return f"unknown option {option}; did you mean {meant[nearest[0]]}?"
    others = [f"txl {name}" for name, arguments in commands(app) if any(option in each.names for each in arguments)]
    whose = f"; it belongs to {', '.join(others)}" if others else ""
    return f"unknown option {option}{whose}."


def left_over(error: UnusedCliTokensError) -> str:
    """Return a message that names the arguments that a command has no place for."""
    names = ", ".join(f"'{name[:100]}'" for name in (error.unused_tokens or [])[:3])
    return f"{names}: more arguments than the command takes."


def wrong_value(error: CoercionError) -> str:
    """Return a message that says in words what an option takes; of types without words here, cyclopts' own."""
    wanted = _in_words(error.target_type)
    if error.token is None or error.token.keyword is None or not all(wanted):
        return one_line(error)
    *some, last = wanted
    takes = f"{', '.join(some)} or {last}" if some else last
    value, names = error.token.value[:100], [word.strip("'") for word in wanted if word.startswith("'")]
    nearest = difflib.get_close_matches(value, names, n=1)
    meant = f"; did you mean '{nearest[0]}'?" if nearest else "."
    return f"{error.token.keyword} takes {takes}, not '{value}'{meant}"


def _in_words(wanted: Any) -> list[str]:
    """Return what a type hint allows; an empty string stands for a type that has no words here."""
    if get_origin(wanted) is Literal:
        return [f"'{name}'" for name in get_args(wanted)]
    alternatives = [each for each in get_args(wanted) if each is not type(None)]
    return [word for each in alternatives for word in _in_words(each)] or [_WORDS.get(wanted, "")]


def _settings() -> dict[str, str]:
    """Return how each setting is given, by its name without what it is a maximum or a number of."""
    from transformer_xl.config.recipes import settings_of
    from transformer_xl.config.run import RunConfig

    given: dict[str, str] = {}
    for name, _, _ in settings_of(RunConfig()):
        given.setdefault(_key(name.rpartition(".")[2]), f"--set {name}=VALUE")
    return given


def _key(name: str) -> str:
    return name.removeprefix("max_").removeprefix("n_").replace("_", "-")
