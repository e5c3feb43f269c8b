"""Train small Unigram models with SentencePiece, and write the ids that it and XLNet's code give to lines of text.

    python -m venv .venv-peer && .venv-peer/bin/pip install -r tests/parity/requirements-sentencepiece.txt
    .venv-peer/bin/python tests/parity/make_goldens_sentencepiece.py

The models learn from this project's documentation. With `--models DIRECTORY LINES`, it writes no goldens: it prints the ids of
the models in a directory for the lines of a JSON file.
"""

import argparse
import contextlib
import io
import json
import random
import sys
import tempfile
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import sentencepiece

GOLDENS = Path(__file__).resolve().parent / "goldens" / "sentencepiece"
DOCS = Path(__file__).resolve().parents[2] / "docs"
SPACE = "\u2581"

CONTROL = ["<cls>", "<sep>", "<pad>", "<mask>", "<eod>"]
USER_DEFINED = ["<eop>", ".", "(", ")", '"', "-", "–", "£", "€"]
COMPOSED = "àáâãäåçèéêëìíîïñòóôõöøùúûüýÿāăąćčďēěęğīįłńňōőřśşšţťūůűźżž각한글がギ"
COMPATIBLE = "ﬁﬂﬀ½¼¾①②ⅣℓÅ…ﾊﾟ！，０１２３ＡＢＣａｂｃ²³ªº㎏ﷺ㈠"
SPACES = "\t\xa0\u2003\u2028\u3000"
DROPPED = "\u200b\xad\x01\x7f\ufeff"
MODELS: dict[str, dict[str, Any]] = {
    "xlnet": {"control_symbols": CONTROL, "user_defined_symbols": USER_DEFINED, "character_coverage": 0.999, "vocab_size": 500},
    "bytes": {"byte_fallback": True, "remove_extra_whitespaces": False, "vocab_size": 600, "character_coverage": 0.99},
    "phrases": {"split_by_whitespace": False, "add_dummy_prefix": False, "vocab_size": 500},
}
ODD = (
    "the Theé1,x@-.\"'s \t\r_\x0b\x1c\x85\xa0\u2028Σß東``''()£€–½ﬁ①Åﷺ\u0301\u0308가힣ㄱ\u1100\u1161ｶﾞ"
    "\ufeff\u200b\u200d🙂👩‍👧\x00\x01\x7f\ufffd\u2581<>/0123456789,,İıΣς\U0001d400\u3000\xad…"
)
NUMBERS = ["1,", "12,", "1990,", "3,4,5,", "x1,000,", "²,", "٣,", "0", "00", "000", "1,000,000"]
WORDS = [
    "a",
    "<eop>",
    "<s>",
    "<cls>",
    "<unk>",
    SPACE,
    2 * SPACE,
    ",,",
    "``",
    "''",
    ".",
    "-",
    "a.b",
    "the",
    "of",
    "in",
    *NUMBERS,
]


def rules() -> str:
    """Return rules for characters: a few of those of nmt_nfkc, with which the model would be thirty times as large."""
    changed = {character: unicodedata.normalize("NFKC", character) for character in COMPATIBLE}
    changed |= {unicodedata.normalize("NFD", character): character for character in COMPOSED}
    changed |= {unicodedata.normalize("NFD", "ﾊﾟ"): unicodedata.normalize("NFKC", "ﾊﾟ")}
    changed |= dict.fromkeys(SPACES, " ") | dict.fromkeys(DROPPED, "")

    def points(text: str) -> str:
        return " ".join(f"{ord(character):X}" for character in text)

    return "".join(f"{points(source)}\t{points(target)}\n" for source, target in sorted(changed.items()) if source != target)


def documentation() -> Iterator[str]:
    for path in sorted(DOCS.glob("*.md")):
        yield from (line for line in path.read_text(encoding="utf-8").split("\n") if line.strip())


def lines() -> list[str]:
    """Return lines of the documentation, of odd characters, of commas after digits, and some long ones."""
    draw = random.Random(1)
    chosen = draw.sample([line for line in documentation() if len(line) < 110], 55)
    chosen += ["".join(draw.choices(ODD, k=draw.randrange(28))) for _ in range(75)]
    chosen += [" ".join(draw.choices(WORDS, k=draw.randrange(1, 12))) for _ in range(50)]
    chosen += ["".join(chr(draw.randrange(0x20, 0xD800)) for _ in range(9)) for _ in range(9)]
    chosen += ["", " ", "  a  b ", SPACE, f"{SPACE} ", f"a{SPACE} ", "(a)", "aaaa" * 9, "ab" * 20, "00 000 " * 12, "' ''`` `"]
    return chosen


def train(name: str, folder: Path) -> None:
    written = io.BytesIO()
    with tempfile.TemporaryDirectory() as directory, contextlib.chdir(directory):  # the model names the file of its rules
        Path("rules.tsv").write_text(rules(), encoding="utf-8")
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=documentation(),
            model_writer=written,
            normalization_rule_tsv="rules.tsv",
            model_type="unigram",
            num_threads=1,
            minloglevel=2,
            **MODELS[name],
        )
    (folder / f"{name}.model").write_bytes(written.getvalue())


def xlnet_text(text: str, *, lower: bool, keep_accents: bool) -> str:
    """Do what XLNet's `preprocess_text` does."""
    text = " ".join(text.split()).replace("``", '"').replace("''", '"')
    if not keep_accents:
        text = "".join(c for c in unicodedata.normalize("NFKD", text) if not unicodedata.combining(c))
    return text.lower() if lower else text


def xlnet_ids(model: Any, text: str) -> list[int]:
    """Do what XLNet's `encode_ids` does."""
    pieces: list[str] = []
    for piece in model.encode_as_pieces(text):
        if not (len(piece) > 1 and piece[-1] == "," and piece[-2].isdigit()):
            pieces.append(piece)
            continue
        again = model.encode_as_pieces(piece[:-1].replace(SPACE, ""))
        if piece[0] != SPACE and again[0][0] == SPACE:
            again = again[1:] if again[0] == SPACE else [again[0][1:], *again[1:]]
        pieces += [*again, ","]
    return [model.piece_to_id(piece) for piece in pieces]


def answers(model: Any, text: str) -> dict[str, Any]:
    """Return ids, places and written text of SentencePiece, and ids of XLNet: plain, in lower case, with accents."""
    ids = model.encode(text)
    return {
        "ids": ids,
        "places": model.encode(text, return_type="offset_mapping")["offsets"],
        "written": model.decode(ids),
        "xlnet": xlnet_ids(model, xlnet_text(text, lower=False, keep_accents=False)),
        "lower": xlnet_ids(model, xlnet_text(text, lower=True, keep_accents=False)),
        "accents": xlnet_ids(model, xlnet_text(text, lower=False, keep_accents=True)),
    }


def all_answers(folder: Path, texts: list[str]) -> dict[str, list[dict[str, Any]]]:
    models = {path.stem: sentencepiece.SentencePieceProcessor(model_file=str(path)) for path in sorted(folder.glob("*.model"))}
    return {name: [answers(model, text) for text in texts] for name, model in models.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", nargs=2, type=Path, metavar=("DIRECTORY", "LINES"))
    args = parser.parse_args()
    if args.models:
        folder, texts = args.models
        json.dump(all_answers(folder, json.loads(texts.read_text(encoding="utf-8"))), sys.stdout)
        return
    GOLDENS.mkdir(parents=True, exist_ok=True)
    for name in MODELS:
        train(name, GOLDENS)
    texts = lines()
    for name, rows in all_answers(GOLDENS, texts).items():
        kept = [row if name == "xlnet" else {key: row[key] for key in ("ids", "places", "written")} for row in rows]
        content = json.dumps([{"text": text, **row} for text, row in zip(texts, kept, strict=True)], separators=(",", ":"))
        content = content.replace('},{"text"', '},\n{"text"') + "\n"
        assert len(content) < 100_000, (name, len(content))
        (GOLDENS / f"{name}.json").write_text(content, encoding="ascii")


if __name__ == "__main__":
    main()
