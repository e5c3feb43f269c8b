"""Music as ids and back, by MidiTok (REMI, Huang and Yang 2020, arXiv:2002.00212).

A corpus of pieces, and a piece to listen to:

    pip install miditok music21
    python examples/chorales.py write chorales                    # Bach's chorales, which come with music21, as MIDI files
    python examples/chorales.py encode chorales chorales.npz      # each piece a document of ids
    txl train chorales.npz --out runs/chorales --set train.max_minutes=5
    txl eval runs/chorales --compare-memory
    txl generate runs/chorales --tokens 1000 --seed 1 --out piece.npy
    python examples/chorales.py decode piece.npy piece.mid

All instruments are one stream. Ids are those of the installed version of MidiTok, so encode and decode with the same one. For
the rights in the scores, see music21's corpus/license.txt.
"""

import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np


def tokenizer() -> Any:
    from miditok import REMI, TokenizerConfig  # pyright: ignore[reportMissingImports]

    return REMI(TokenizerConfig(use_programs=True, one_token_stream_for_programs=True, use_tempos=True, num_velocities=16))


def write(folder: str, most: str = "371") -> None:
    """Write chorales as MIDI files."""
    from music21 import corpus, repeat  # pyright: ignore[reportMissingImports]

    Path(folder).mkdir(parents=True, exist_ok=True)
    for number, score in enumerate(corpus.chorales.Iterator(1, int(most)), start=1):
        try:
            score.write("midi", Path(folder) / f"{number:03}.mid")
        except repeat.ExpanderException:  # repeat signs that music21 cannot resolve
            continue
        print(f"\r{number} of {most} chorales", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)


def encode(folder: str, out: str) -> None:
    """Turn the MIDI files of a folder into an array of ids each, in the order of their names."""
    from symusic import Score  # pyright: ignore[reportMissingImports]

    remi, pieces = tokenizer(), []
    for path in sorted(Path(folder).glob("*.mid")):
        try:
            score: Any = Score(path)
            pieces += [np.array(remi(score).ids, np.int32)] if score.note_num() else []
        except (RuntimeError, ValueError, KeyError, IndexError, TypeError) as error:
            print(f"left out: {path} is no MIDI file that can be read ({error})", file=sys.stderr)
    if not pieces:
        sys.exit(f"error: no piece of music in '{folder}'")
    np.savez(out, *pieces)
    print(f"{len(pieces)} pieces, {sum(map(len, pieces)):,} ids of {len(remi)}: {out}")


def decode(ids: str, out: str) -> None:
    """Turn an array of ids into a MIDI file; events that belong to no note are left out."""
    remi, piece = tokenizer(), None
    with suppress(ValueError):  # NumPy cannot read it
        piece = np.load(ids, allow_pickle=False)
    if not isinstance(piece, np.ndarray) or piece.ndim != 1 or not ((piece >= 0) & (piece < len(remi))).all():
        sys.exit(f"error: '{ids}' is no piece of ids from 0 to {len(remi) - 1}")
    remi.decode(piece.tolist()).dump_midi(out)


if __name__ == "__main__":
    commands = {"write": write, "encode": encode, "decode": decode}
    name, *arguments = sys.argv[1:] or [""]
    if name not in commands or len(arguments) not in ((1, 2) if name == "write" else (2,)):
        sys.exit(__doc__)
    commands[name](*arguments)
