"""Write Bach's chorales, which come with the package music21, as MIDI files: a corpus of music with one piece per document.

pip install 'transformer_xl[midi]' music21
python examples/chorales.py chorales
txl train chorales --out runs/chorales --set train.max_minutes=5
txl eval runs/chorales --compare-memory
txl generate runs/chorales --tokens 1000 --seed 1 --out piece.mid

For the rights in the scores, see music21's corpus/license.txt.
"""

import sys
from pathlib import Path


def main(folder: str, most: str = "371") -> None:
    from music21 import corpus, repeat  # pyright: ignore[reportMissingImports]

    Path(folder).mkdir(parents=True, exist_ok=True)
    for number, score in enumerate(corpus.chorales.Iterator(1, int(most)), start=1):
        try:
            score.write("midi", Path(folder) / f"{number:03}.mid")
        except repeat.ExpanderException:  # repeat signs that music21 cannot resolve
            continue
        print(f"\r{number} of {most} chorales", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)


if __name__ == "__main__":
    if not 2 <= len(sys.argv) <= 3:
        sys.exit(__doc__)
    main(*sys.argv[1:])
