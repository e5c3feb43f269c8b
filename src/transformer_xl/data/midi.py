"""Music as ids: MIDI files to events and back, by MidiTok (REMI, Huang and Yang 2020, arXiv:2002.00212).

All instruments are one stream. A tokenizer keeps the names of the events, so ids mean the same in whatever order a version of
MidiTok numbers them.
"""

from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from transformer_xl.errors import ConfigError, CorpusError, one_line
from transformer_xl.files import whole_file

BAR = "Bar_None"
"""The event with which a piece begins."""


@cache
def _remi() -> Any:
    try:
        from miditok import REMI, TokenizerConfig  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise ConfigError("music needs the package miditok: pip install 'transformer_xl[midi]'") from None
    return REMI(TokenizerConfig(use_programs=True, one_token_stream_for_programs=True, use_tempos=True, num_velocities=16))


def is_midi_file(path: Path) -> bool:
    """Return whether a file has the name of a piece of music."""
    return path.suffix.lower() in (".mid", ".midi")


def midi_events() -> tuple[str, ...]:
    """Return the names of all events, in order of id."""
    return tuple(sorted(_remi().vocab, key=_remi().vocab.__getitem__))


def read_midi(path: Path, events: Sequence[str]) -> np.ndarray:
    """Return the ids of a piece, shape (n,), int64.

    Raises:
        CorpusError: the file is no music, has no notes, or has other events.
    """
    remi, ids = _remi(), {event: index for index, event in enumerate(events)}
    if not ids:
        raise CorpusError(f"'{path}' is music, and the ids of this tokenizer are not events; train one on .mid files")
    from symusic import Score  # pyright: ignore[reportMissingImports]

    try:
        score: Any = Score(path)
        names = remi(score).tokens if score.note_num() else []
    except (RuntimeError, ValueError, KeyError, IndexError, TypeError) as error:
        raise CorpusError(f"'{path}' is no MIDI file that can be read ({one_line(error)}); leave it out") from None
    if not names:
        raise CorpusError(f"'{path}' has no notes; leave it out")
    if unknown := next((name for name in names if name not in ids), None):
        raise CorpusError(
            f"'{path}' has the event {unknown}, which this tokenizer lacks; it is from another version of MidiTok"
        )
    return np.array([ids[name] for name in names], np.int64)


def write_midi(path: Path, ids: Iterable[int], events: Sequence[str]) -> None:
    """Write the notes of ids as a MIDI file; events that belong to no note are left out.

    Raises:
        ConfigError: the ids are not events that this version of MidiTok knows.
    """
    remi, names = _remi(), [events[index] for index in ids]
    if unknown := next((name for name in names if name not in remi.vocab), None):
        raise ConfigError(f"this version of MidiTok lacks the event {unknown}; install the one that read the corpus")
    score = remi.decode([remi.vocab[name] for name in names])
    with whole_file(path) as stray:
        score.dump_midi(stray)
