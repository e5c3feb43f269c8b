"""The errors that users see: one line that names the value and the remedy.

Every error that the package raises on purpose derives from `TxlError`. The command line prints its message on one line and
exits with status 1, so a traceback always means a bug in the package.
"""

import difflib
import errno
import json
import math
import os
import reprlib
import unicodedata
from collections.abc import Callable, Iterable
from contextlib import suppress
from numbers import Integral, Real
from pathlib import Path
from typing import Any, NamedTuple

_LONGEST = 600  # characters of a message
_MOST_NAMES = 12  # that a message lists

_REMEDIES = {
    errno.ENAMETOOLONG: "give a shorter name",
    errno.ENOSPC: "free disk space",
    errno.EDQUOT: "free disk space or raise the quota",
    errno.EFBIG: "raise the limit of file sizes",
    errno.EROFS: "mount it writable",
    errno.EACCES: "check its permissions",
    errno.EPERM: "check its permissions",
    errno.EIO: "check the disk",
    errno.ELOOP: "mend the link that leads to itself",
    errno.EMFILE: "raise the limit of open files",
    errno.EISDIR: "name a file",
    errno.ENOTDIR: "name a directory",
    errno.EEXIST: "choose another name",
    errno.ENOTEMPTY: "choose another name",
    errno.EADDRINUSE: "choose another port",
}


class TxlError(Exception):
    """Base class of all errors that a user can fix."""


class ConfigError(TxlError, ValueError):
    """A recipe, key or value that cannot work."""


class NotFiniteError(ConfigError):
    """Scores of a model are not finite numbers."""


class CorpusError(TxlError):
    """A corpus that is unknown, or a text that is empty, damaged or not what its name promises."""


class TokenizerError(TxlError, ValueError):
    """Text or ids that the tokenizer cannot represent, or a tokenizer that does not fit."""


class CheckpointError(TxlError):
    """A run, model or checkpoint that is missing, damaged, does not fit or cannot be stored."""


class TrainingError(TxlError):
    """Training that cannot continue, for example after too many steps without a finite gradient."""


class LostContactError(TrainingError):
    """Another process died or did not answer in time."""


class ToldElsewhereError(TxlError):
    """An error that ends this process and that the first process reports."""


class Bounds(NamedTuple):
    """What a number may be; without a greatest one, it is finite."""

    least: float
    most: float | None = None
    above: bool = False  # the least number is not one of them
    whole: bool = False
    optional: bool = False  # None is allowed, too

    def check(self, name: str, value: Any) -> None:
        """Raise a `ConfigError` unless a value is a number that lies within, or a None that is allowed."""
        if not self._contain(value):
            raise ConfigError(f"{name} ({value!r}) must be {self}")

    def _contain(self, value: Any) -> bool:
        if value is None:
            return self.optional
        if isinstance(value, bool) or not issubclass(type(value), Integral if self.whole else Real):
            return False
        least = value > self.least if self.above else value >= self.least
        return least and (value < math.inf if self.most is None else value <= self.most)

    def __str__(self) -> str:
        most = "finite" if self.most is None else f"at most {self.most}"
        return f"{'above' if self.above else 'at least'} {self.least} and {most}{', a whole number' if self.whole else ''}"


def one_line(error: object) -> str:
    """Return an error or its message on one line; of a very long one, which may quote what was typed, beginning and end."""
    text = " ".join(str(error).split())
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST // 2]} … {text[-_LONGEST // 2 :]}"


def shown(value: object) -> str:
    """Return a name or value of unknown origin for a message: quoted, short, and on one line.

    Example:
        >>> print(shown(10**5000), shown("a" * 1000)[:9], shown([1] * 1000))
        an enormous integer 'aaaaaaaa [1, 1, 1, 1, 1, 1, ...]
    """
    return "an enormous integer" if is_enormous(value) else _short.repr(value)


def named(character: str) -> str:
    r"""Return a character for a message: itself, if it can be seen alone, and its code point.

    Example:
        >>> print(named("龘"), named("\u0301"), named("\n"), named("\ud800"))
        龘 (U+9F98) ◌́ (U+0301) '\n' (U+000A) '\ud800' (U+D800)
    """
    alone = f"◌{character}" if unicodedata.combining(character) else character
    return f"{alone if alone.isprintable() and not alone.isspace() else repr(character)} (U+{ord(character):04X})"


def written(value: object) -> str:
    """Return a setting's value as `--set` takes it.

    Example:
        >>> print(written(()), written((2176, 8)), written(True), written(None), written("linear"))
        [] [2176, 8] true none 'linear'
    """
    return "none" if value is None else json.dumps(value) if isinstance(value, bool | tuple | list) else repr(value)


def counted(n: int, noun: str) -> str:
    """Return a number of things.

    Example:
        >>> counted(1, "token"), counted(1024, "token")
        ('1 token', '1,024 tokens')
    """
    return f"{n:,} {noun}{'s' * (n != 1)}"


def is_enormous(value: object) -> bool:
    """Return whether a value is an integer of more than 64 bits."""
    return isinstance(value, int) and not -(2**63) <= value < 2**63


_short = reprlib.Repr()
_short.maxstring = _short.maxother = _short.maxlong = 100


def message_of(error: Exception) -> str:
    """Return an error's message. One of the system says what was refused, why, what to do, and what lies beside a missing file.

    Example:
        >>> message_of(OSError(errno.ENOSPC, "No space left on device", "model.pt"))
        "'model.pt': No space left on device; free disk space"
        >>> message_of(FileNotFoundError(errno.ENOENT, "No such file or directory", "nowhere/a.txt"))
        "'nowhere/a.txt': No such file or directory; there is no directory 'nowhere'"
    """
    if not isinstance(error, OSError):
        return str(error)
    names = [os.fsdecode(name) for name in (error.filename, error.filename2) if isinstance(name, (str, bytes, os.PathLike))]
    remedy = _REMEDIES.get(error.errno or 0, "")
    if error.errno == errno.ENOENT and names:
        path = Path(names[0])
        gone = next((each for each in reversed(path.parents) if not os.path.lexists(each)), path)
        near = beside(gone, os.path.lexists, lists=False).removeprefix("; ")
        remedy = near if gone == path else f"there is no directory '{gone}'{near and f', {near}'}"
    where = " to ".join(f"'{name}'" for name in names)
    return f"{where}{where and ': '}{error.strerror or error}{remedy and f'; {remedy}'}"


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that is probably meant: one begins as the other does, or few letters before the ending differ.

    Example:
        >>> nearest("quickstrat", ["quickstart", "shakespeare-char"]), nearest("mem-length", ["same-length", "mem-len"])
        ('quickstart', 'mem-len')
        >>> nearest("nothing.txt", ["o.txt", "one.txt"])
    """
    options, ending = sorted(known), Path(name).suffix
    begin = [each for each in options if min(len(each), len(name)) > 2 and (each.startswith(name) or name.startswith(each))]
    stems, stem = {each.removesuffix(ending): each for each in begin or options}, name[:_LONGEST].removesuffix(ending)
    cutoff = 0.0 if begin else 0.65 if len(stem) == 3 else 0.7  # one letter of three
    close = difflib.get_close_matches(stem, stems, n=1, cutoff=cutoff)
    return stems[close[0]] if close else None


def did_you_mean(name: str, known: Iterable[str], *, listed_by: str = "", word: Callable[[str], str] = str) -> str:
    """Return a clause for an error message: the known name that is near, else all of them, or of very many what lists them.

    Args:
        name: the unknown name.
        known: the names that there are.
        listed_by: the command that lists them; "": none does.
        word: what stands for a name in the message.

    Example:
        >>> did_you_mean("quickstrat", ["quickstart", "shakespeare-char"])
        "did you mean 'quickstart'?"
        >>> did_you_mean("zzz", ["b", "a"])
        'known: a, b'
        >>> did_you_mean("zzz", [f"z{i}" for i in range(20)], listed_by="txl zs")
        'txl zs lists all 20'
    """
    options = sorted(known)
    if near := nearest(name, options):
        return f"did you mean '{word(near)}'?"
    if len(options) > _MOST_NAMES and listed_by:
        return f"{listed_by} lists all {len(options)}"
    more = f" and {len(options) - _MOST_NAMES:,} more" if len(options) > _MOST_NAMES else ""
    return f"known: {', '.join(map(word, options[:_MOST_NAMES]))}{more}"


def beside(path: Path, holds: Callable[[Path], bool], *, also: Path | None = None, lists: bool = True) -> str:
    """Return a clause for an error message that proposes what there is instead of `path`, there or in `also`."""
    others: dict[str, str] = {}
    for folder in (also, path.parent):
        with suppress(OSError):  # no such directory, or one that must not be listed
            entries = [other for other in folder.iterdir() if other != path and holds(other)] if folder else []
            others |= {other.name: str(other) for other in entries}
    if others and (lists or nearest(path.name, others)):
        return f"; {did_you_mean(path.name, others, word=others.__getitem__)}"
    return ""


_SIGNS = ("allocate", "out of memory", "ALLOC_FAILED", "size calculation overflowed", "Overflow when unpacking")


def lacks_memory(error: BaseException) -> bool:
    """Return whether memory ran out, or a size overflowed before it could; torch has a class of its own for GPUs only."""
    return isinstance(error, (MemoryError, OverflowError)) or any(sign in str(error) for sign in _SIGNS)


def no_memory(error: BaseException) -> str:
    """Return that memory ran out, and torch's own words about it: of a GPU, how much of it is free.

    Example:
        >>> no_memory(RuntimeError("CUDA out of memory. Tried to allocate 2 GiB. GPU 0 has 1 GiB free. Process 7 has"))
        'not enough memory (CUDA out of memory. Tried to allocate 2 GiB. GPU 0 has 1 GiB free)'
    """
    said = ". ".join(one_line(error).split(". ")[:3]).rstrip(".")
    return f"not enough memory{said and f' ({said})'}"
