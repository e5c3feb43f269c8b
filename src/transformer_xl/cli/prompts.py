"""Prompts of `txl generate`: from the command line, files, or standard input."""

import contextlib
import io
import os
import re
import stat
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformer_xl.cli.lines import STDIN, open_pipe, warn_of_unknown
from transformer_xl.console import warn
from transformer_xl.errors import ConfigError, CorpusError, TokenizerError, did_you_mean
from transformer_xl.generation.seeds import check_seed
from transformer_xl.untrusted import parse_texts, where_cut

if TYPE_CHECKING:
    import numpy as np

    from transformer_xl.tokenizers.base import Tokenizer


@dataclass(frozen=True)
class Prompt:
    """A text to go on from."""

    ids: "np.ndarray"  # its tokens, (n,), int64
    origin: dict[str, str]  # how to name it in JSON: `prompt` with the text, or `prompt_file` with the name of its file
    seed: int | None = None  # its own seed, if it has one
    shown: bool = False  # whether it was typed, so that it is shown before what is written


@contextlib.contextmanager
def edited_lines() -> Iterator[None]:
    """Let a person edit lines, those that are typed early, too, and go back to earlier ones, where that is built in."""
    if isinstance(sys.stdin, io.TextIOWrapper):  # what is typed may be in another encoding
        sys.stdin.reconfigure(errors="replace")
    with contextlib.ExitStack() as at_end:
        if sys.stdin.isatty() and sys.stdout.isatty():  # else nobody edits, and the terminal itself ends lines
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401
                import termios

                before = termios.tcgetattr(sys.stdin)
                at_end.callback(termios.tcsetattr, sys.stdin, termios.TCSADRAIN, before)
                now = [*before[:3], before[3] & ~termios.ICANON, *before[4:]]  # or the terminal itself takes an early Ctrl-D
                termios.tcsetattr(sys.stdin, termios.TCSADRAIN, now)
        yield


def typed(text: str, tokenizer: "Tokenizer") -> Prompt:
    """Return a prompt from the command line."""
    try:
        data = text.encode("utf-8", "surrogateescape")  # the bytes that were typed, which a shell may have cut anywhere
    except UnicodeEncodeError:
        raise TokenizerError("it has half of a character (a lone surrogate); give the whole one") from None
    return Prompt(_ids(data, tokenizer), {"prompt": text}, shown=True)


def from_file(path: Path, tokenizer: "Tokenizer") -> Prompt:
    """Return a whole file, plain or compressed, of text or ids, as a prompt; `-` is standard input.

    Raises:
        CorpusError: the file is damaged, or the tokenizer cannot represent its text.
    """
    import numpy as np

    from transformer_xl.data.ids import PACKED, is_id_file, read_ids
    from transformer_xl.data.text_files import FileRange
    from transformer_xl.tokenizers.ids import IdTokenizer

    if isinstance(tokenizer, IdTokenizer) and path.is_file() and is_id_file(path):
        packed = b"".join(chunk.data for chunk in read_ids(FileRange(path), tokenizer))
        return Prompt(np.frombuffer(packed, PACKED).astype(np.int64), {"prompt_file": str(path)})
    data = _content(path)
    try:
        return Prompt(_ids(data, tokenizer), {"prompt_file": str(path)})
    except TokenizerError as error:
        raise CorpusError(f"{_name(path)}: {error}") from None


def _ids(data: bytes, tokenizer: "Tokenizer") -> "np.ndarray":
    """Return the ids of a prompt in UTF-8; a tokenizer of bytes reads any, and one warns of a part of a character."""
    if tokenizer.reads_bytes and (where := where_cut(data)):
        warn(f"the prompt {where} inside a character in UTF-8; the model reads the part of it that is there")
    ids = tokenizer.encode_bytes(data)
    warn_of_unknown(tokenizer, tokenizer.n_unknown(data.decode("utf-8", "ignore"), ids))
    return ids


def many(path: Path, tokenizer: "Tokenizer") -> list[Prompt]:
    """Return all prompts of a file: one per line, or JSON lines {"prompt": …, "seed": …}.

    JSON lines are recognized by the file's ending .jsonl, .ndjson or .json, or by the first line.

    Raises:
        CorpusError: as for `from_file`, or a line is not a prompt.
    """
    from transformer_xl.untrusted import not_utf8

    try:
        text = _content(path).decode("utf-8")
    except UnicodeDecodeError as error:
        raise CorpusError(f"{_name(path)}: {not_utf8(error)}") from None
    lines = [(number, line) for number, line in enumerate(text.split("\n"), start=1) if line.strip()]
    if not lines:
        raise CorpusError(f"{_name(path)} holds no prompt; write one a line, or leave --prompts out")
    as_json = path.suffix in (".jsonl", ".ndjson", ".json") or re.match(r'\s*\{\s*"', lines[0][1]) is not None
    prompts = []
    for number, line in lines:
        place = f"{_name(path)}, line {number}"
        value = parse_texts(line.encode(), place) if as_json else {"prompt": line.removesuffix("\r")}
        try:
            fields = _fields(value)
            ids = tokenizer.encode(fields["prompt"])
            if len(ids) == 0:
                raise TokenizerError("the prompt is empty; give at least one token, of text that the tokenizer keeps")
        except (TokenizerError, CorpusError) as error:
            raise CorpusError(f"{place}: {error}") from None
        prompts.append(Prompt(ids, {"prompt": fields["prompt"]}, seed=fields.get("seed"), shown=True))
    warn_of_unknown(tokenizer, sum(tokenizer.n_unknown(prompt.origin["prompt"], prompt.ids) for prompt in prompts))
    return prompts


def beginning(tokenizer: "Tokenizer") -> Prompt:
    """Return a prompt to begin with: a line end, else a space, else the first token of the vocabulary."""
    import numpy as np

    separator = tokenizer.separator
    if separator == "\n":
        return Prompt(tokenizer.encode("\n"), {"prompt": "\n"})
    ids = tokenizer.encode(separator) if separator else np.zeros(1, np.int64)
    text = tokenizer.decode(ids.tolist())
    warn(f"this vocabulary has no line end, so the text begins after {text!r}; choose another beginning with --prompt")
    return Prompt(ids, {"prompt": text})


def nothing() -> Prompt:
    """Return a prompt without tokens, to go on from what was read before."""
    import numpy as np

    return Prompt(np.zeros(0, np.int64), {})


def is_piped() -> bool:
    """Return whether standard input is a pipe or a file; callers may leave other kinds of it open without writing."""
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
    except (OSError, ValueError, AttributeError):
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISREG(mode)


def _content(path: Path) -> bytes:
    from transformer_xl.data.text_files import FileRange, read_blocks

    if path != STDIN and path.is_fifo():
        with os.fdopen(open_pipe(path), "rb") as pipe:
            return pipe.read()
    if path != STDIN:
        return b"".join(read_blocks(FileRange(path)))
    if sys.stdin is None:
        raise CorpusError("standard input is closed; give a file instead of -")
    return sys.stdin.buffer.read()


def _name(path: Path) -> str:
    return "standard input" if path == STDIN else f"'{path}'"


def _fields(fields: Any) -> dict[str, Any]:
    if not isinstance(fields, dict) or not isinstance(fields.get("prompt"), str):
        raise CorpusError('it has no "prompt" that is text; write {"prompt": "text"}')
    for name in fields.keys() - {"prompt", "seed"}:
        raise CorpusError(f"{name!r} is not known; {did_you_mean(name, ['prompt', 'seed'])}")
    seed = fields.get("seed")
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
        raise CorpusError(f"seed ({seed!r}) must be a whole number")
    try:
        return fields | {"seed": None if seed is None else check_seed(seed)}
    except ConfigError as error:
        raise CorpusError(str(error)) from None
