"""What somebody meant who gave an option that a command does not have, or an argument too many."""

import difflib
from collections.abc import Iterator

from cyclopts import App, ArgumentCollection, UnknownOptionError, UnusedCliTokensError


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


def _settings() -> dict[str, str]:
    """Return how each setting is given, by its name without what it is a maximum or a number of."""
    from transformer_xl.config import RunConfig, settings_of

    given: dict[str, str] = {}
    for name, _, _ in settings_of(RunConfig()):
        given.setdefault(_key(name.rpartition(".")[2]), f"--set {name}=VALUE")
    return given


def _key(name: str) -> str:
    return name.removeprefix("max_").removeprefix("n_").replace("_", "-")
