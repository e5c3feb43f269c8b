"""Music as ids and back, by MidiTok (REMI, Huang and Yang 2020, arXiv:2002.00212).

A corpus of pieces, and a piece to listen to:

    pip install miditok music21
    python examples/chorales.py write chorales                    # Bach's chorales, which come with music21, as MIDI files
    python examples/chorales.py encode chorales chorales.npz      # each piece a document of ids
    txl train chorales.npz --out runs/chorales --set train.max_minutes=5
    txl eval runs/chorales --compare-memory
    txl generate runs/chorales --tokens 1000 --seed 1 --out piece.npy
    python examples/chorales.py decode piece.npy piece.mid

A piece of your own goes on if the model has learned its tokens; a velocity, tempo or duration that the corpus lacks becomes the
nearest one that it has:

    python examples/chorales.py prompt mine.mid chorales.npz mine.npy
    txl generate runs/chorales --prompt-file mine.npy --tokens 500 --echo --out piece.npy

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


def ids_of(path: Path, remi: Any) -> list[int]:
    """Return the ids of a MIDI file; ValueError if it cannot be read."""
    from symusic import Score  # pyright: ignore[reportMissingImports]

    try:
        score: Any = Score(path)
        return remi(score).ids if score.note_num() else []
    except (RuntimeError, ValueError, KeyError, IndexError, TypeError) as error:
        raise ValueError(f"{path} is no MIDI file that can be read ({error})") from None


def encode(folder: str, out: str) -> None:
    """Turn the MIDI files of a folder into an array of ids each, in the order of their names."""
    remi, pieces = tokenizer(), []
    for path in sorted(Path(folder).glob("*.mid")):
        try:
            ids = ids_of(path, remi)
        except ValueError as error:
            print(f"left out: {error}", file=sys.stderr)
            continue
        pieces += [np.array(ids, np.int32)] if ids else []
    if not pieces:
        sys.exit(f"error: no piece of music in '{folder}'")
    np.savez(out, *pieces)
    print(f"{len(pieces)} pieces, {sum(map(len, pieces)):,} ids of {len(remi)}: {out}")


def number(token: str) -> float:
    """Return the value of a token, such as 90 of Velocity_90, and 1.25 of Duration_1.2.8, a beat and two eighths of one."""
    kind, _, value = token.partition("_")
    if kind != "Duration":
        return float(value)
    beats, parts, resolution = map(int, value.split("."))
    return beats + parts / resolution


def prompt(midi: str, corpus: str, out: str) -> None:
    """Turn a MIDI file into ids that a corpus has: a model has learned nothing about others, or knows no such id."""
    remi = tokenizer()
    with np.load(corpus, allow_pickle=False) as pieces:
        known = {remi[int(i)]: int(i) for i in np.unique(np.concatenate(list(pieces.values())))}
    try:
        tokens = [remi[i] for i in ids_of(Path(midi), remi)]
    except ValueError as error:
        sys.exit(f"error: {error}")
    nearest = {}
    for token in sorted(set(tokens) - known.keys()):
        kind = token.partition("_")[0]
        alike = [each for each in known if each.startswith(f"{kind}_")]
        if kind not in ("Velocity", "Tempo", "Duration") or not alike:
            sys.exit(f"error: '{midi}' has {token}, and '{corpus}' has none; leave it out, or train with it")
        nearest[token] = min(alike, key=lambda each, token=token: abs(number(each) - number(token)))
        print(f"{token} is not in '{corpus}': {nearest[token]} instead", file=sys.stderr)
    np.save(out, np.array([known[nearest.get(token, token)] for token in tokens], np.int32))


def decode(ids: str, out: str) -> None:
    """Turn an array of ids into a MIDI file; events that belong to no note are left out."""
    remi, piece = tokenizer(), None
    with suppress(ValueError):  # NumPy cannot read it
        piece = np.load(ids, allow_pickle=False)
    if not isinstance(piece, np.ndarray) or piece.ndim != 1 or not ((piece >= 0) & (piece < len(remi))).all():
        sys.exit(f"error: '{ids}' is no piece of ids from 0 to {len(remi) - 1}")
    remi.decode(piece.tolist()).dump_midi(out)


if __name__ == "__main__":
    commands = {"write": write, "encode": encode, "prompt": prompt, "decode": decode}
    name, *arguments = sys.argv[1:] or [""]
    if name not in commands or len(arguments) not in {"write": (1, 2), "prompt": (3,)}.get(name, (2,)):
        sys.exit(__doc__)
    commands[name](*arguments)
