"""What somebody meant who gave an unknown option: another option, or a setting."""

import difflib

from cyclopts import UnknownOptionError


def unknown_option(error: UnknownOptionError) -> str:
    """Return a message that names the nearest option, or the nearest setting if the command takes settings."""
    option = (error.token.keyword or error.token.value).partition("=")[0][:100]
    options = [name for argument in error.argument_collection if argument.parse for name in argument.names]
    own = {name.lstrip("-"): name for name in options if name[:2] == "--"}
    known = {**(_settings() if "set" in own else {}), **own}
    nearest = difflib.get_close_matches(_key(option.lstrip("-").replace("_", "-")), known, n=1, cutoff=0.7)
    return f"Unknown option {option}{f'; did you mean {known[nearest[0]]}?' if nearest else '.'}"


def _settings() -> dict[str, str]:
    """Return how each setting is given, by its name without what it is a maximum or a number of."""
    from transformer_xl.config.recipes import settings_of
    from transformer_xl.config.run import RunConfig

    given: dict[str, str] = {}
    for name, _, _ in settings_of(RunConfig()):
        given.setdefault(_key(name.rpartition(".")[2].replace("_", "-")), f"--set {name}=VALUE")
    return given


def _key(name: str) -> str:
    return name.removeprefix("max-").removeprefix("n-")
