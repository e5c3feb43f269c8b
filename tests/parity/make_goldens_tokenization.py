"""Write the ids that the authors' code and Hugging Face 4.35.2 give to small texts, for tests/data/test_vocabulary.py.

Needs torch, transformers==4.35.2, sacremoses and a checkout of https://github.com/kimiyoung/transformer-xl:

    python tests/parity/make_goldens_tokenization.py --authors CHECKOUT
    python tests/parity/make_goldens_tokenization.py --authors CHECKOUT --corpora DIRECTORY

The second form also writes counts and hashes of the ids of real corpora: ptb, wikitext-2, the beginnings of enwik8 and text8.
"""

import argparse
import hashlib
import json
import lzma
import sys
import tempfile
import warnings
from itertools import chain
from pathlib import Path

GOLDENS = Path(__file__).parent / "goldens" / "tokenization"

WIKI = (
    "\n = Lighthouse = \n\n The keeper lit 1 @,@ 000 lamps ; each burned for 2 @.@ 5 hours . \n"
    ' A well @-@ known <unk> wrote : " The Sea " ( 1901 ) . \n\n = = History = = \n'
    "\tIt stood\ttwo\xa0doors\u2003away\u2028down .\n"
    "The word <eos> may be written , and so may <formula> .\r\nOld files\rend lines so .\x0bOr \x1c so .\n"
)
NEWS = "The market rose 2.5 percent .\n\n  Nobody \t knew why , said <UNK> and <S> .\nÉtienne left\nToo early"
BYTES = "<page>\n\t<title>Café</title>\r\n\n naïve 東京 🙂 \x85\x1c</page>\n".encode() + b"\xff\x00"
LETTERS = " the sea  was Calm\tand\nwide  zero one Σ_ end \n"
CHARACTERS = "  Two words\n\nand More  \n\tend"
RUNNING = [
    "The keeper lit 1,000 lamps; each burned for 2.5 hours.",
    "A well-known writer (born 1901) said: \"The sea's wide, isn't it?\"",
    "It cost $5,000.75, or £3.50 - about 10% more… <unk> and <eos> stay, <formula>too.",
    "  odd \t whitespace\xa0and\u2003more  ",
    "Brackets [like these], {these} & <those> @ 3:45 p.m. on Jan. 5.",
    "The Jones' house; dogs' bowls 'quoted words' ``so'' and „so“.",
    "1,2,3 and 1.2.3 and v1.2,x -5,000,000.123 a-b-c x<unk>y <EOS> <S>",
    "UPPER lower Straße Σίσυφος İstanbul 東京 は 大きい。 R&D http://example.org/a-b x@y.org",
    "ends with a dash - and... dots . . .",
    "",
    "   ",
]
GERMAN = ["Der Leuchtturm kostete 1.000,50 Euro, z.B. „viel“ - oder?", "Das ist's: Nord-Ostsee-Kanal."]


def authors_case(root: Path, name: str, dataset: str, texts: list[str], vocab_file: str | None = None) -> dict:
    """Run the authors' Corpus, as their training does, on three files."""
    from data_utils import get_lm_corpus

    directory = root / name
    directory.mkdir()
    for split, text in zip(("train", "valid", "test"), texts, strict=True):
        (directory / f"{split}.txt").write_bytes(text.encode())
    if vocab_file is not None:
        (directory / "1b_word_vocab.txt").write_text(vocab_file, encoding="utf-8")
    corpus = get_lm_corpus(str(directory), dataset)
    return case(name, corpus.vocab, dataset, [flat(corpus.train), flat(corpus.valid), flat(corpus.test)])


def case(name: str, vocab, dataset: str | None, ids: list) -> dict:
    state = {key: value for key, value in vars(vocab).items() if key not in ("counter", "sym2idx", "vocab_file")}
    return {"name": name, "dataset": dataset, "state": state, "ids": ids}


def flat(encoded) -> list[int] | None:
    """Return the ids of one split: a tensor, or one tensor per sentence; file names have none."""
    if isinstance(encoded, list):
        return list(chain.from_iterable(map(flat, encoded))) if encoded else None
    return encoded.tolist()


def prepared_bytes(data: bytes) -> str:
    """Do what the script does by which the authors prepare enwik8: numbers, but line ends as they are."""
    return " ".join("\n" if value == 10 else str(value) for value in data)


def prepared_letters(text: str) -> str:
    """Do what the authors' prep_text8.py does."""
    return " ".join("_" if character == " " else character for character in text.strip())


def authors(root: Path) -> list[dict]:
    from utils.vocabulary import Vocab

    news_words = "<S> 9\n</S> 8\n<UNK> 7\nThe\nmarket extra\nthe\nrose\nThe\npercent\n.\n,\nsaid\nand\nleft\nearly\n"
    cases = [
        authors_case(root, "wt103", "wt103", [WIKI, " The Sea \n", "\n"]) | {"texts": [WIKI, " The Sea \n", "\n"]},
        authors_case(root, "ptb", "ptb", [WIKI, " New Words\n", "No end\n"]) | {"texts": [WIKI, " New Words\n", "No end\n"]},
        authors_case(root, "lm1b", "lm1b", ["", NEWS + "\n", "\n"], news_words) | {"texts": [None, NEWS + "\n", "\n"]},
    ]
    raw = [BYTES, b"a\n\nb", b"\n"]
    cases.append(authors_case(root, "enwik8", "enwik8", list(map(prepared_bytes, raw))))
    cases[-1]["texts"] = [data.decode("latin-1") for data in raw]
    letters = [LETTERS, "calm  sea", "x"]
    cases.append(authors_case(root, "text8", "text8", list(map(prepared_letters, letters))))
    cases[-1]["texts"] = [text.strip() for text in letters]
    path = root / "plain.txt"
    for name, options, text in (
        ("unknown words", {"special": ["<eos>", "<unk>"], "min_freq": 2, "lower_case": True}, WIKI),
        ("characters", {"delimiter": "", "lower_case": False}, CHARACTERS),
        ("lower-case characters", {"delimiter": "", "lower_case": True, "special": ["<unk>"]}, CHARACTERS),
    ):
        path.write_bytes(text.encode())
        vocab = Vocab(**options)
        lines = options.get("delimiter") != ""
        vocab.count_file(str(path))
        vocab.build_vocab()
        cases.append(case(name, vocab, None, [flat(vocab.encode_file(str(path), ordered=True, add_eos=lines))]))
        cases[-1]["texts"] = [text]
    return cases


def huggingface(root: Path) -> list[dict]:
    """Run Hugging Face's tokenizer on running text."""
    warnings.filterwarnings("ignore")
    import transformers

    assert transformers.__version__ == "4.35.2", transformers.__version__
    cases = []
    for name, texts, options in (
        ("english", RUNNING, {}),
        ("lower case", RUNNING, {"lower_case": True}),
        ("german", GERMAN, {"language": "de"}),
    ):
        words = ["<eos>", "<unk>", "<formula>"]
        path = root / "vocab.txt"
        path.write_text("\n".join(words) + "\n", encoding="utf-8")
        tokenizer = transformers.TransfoXLTokenizer(vocab_file=str(path), **options)
        found = sorted({word for text in texts for word in tokenizer.tokenize(text)} - set(words))
        words += [word for index, word in enumerate(found) if index % 9]  # so that some are unknown
        path.write_text("\n".join(words) + "\n", encoding="utf-8")
        tokenizer = transformers.TransfoXLTokenizer(vocab_file=str(path), **options)
        rows = []
        for text in texts:
            tokens = tokenizer.tokenize(text)
            rows.append({"text": text, "tokens": tokens, "ids": tokenizer.encode(text)})
            known = tokenizer.convert_ids_to_tokens(rows[-1]["ids"])
            rows[-1]["written"] = tokenizer.convert_tokens_to_string(known)
        state = {
            key: getattr(tokenizer, key) for key in ("idx2sym", "lower_case", "delimiter", "unk_idx", "never_split", "language")
        }
        cases.append({"name": name, "vocab_txt": path.read_text(encoding="utf-8"), "state": state, "rows": rows})
    return cases


def corpora(root: Path, source: Path) -> dict:
    """Return counts and hashes (of little-endian int64) of the authors' ids of real corpora."""
    import numpy as np
    from data_utils import get_lm_corpus

    def read(path: str) -> bytes:
        return lzma.decompress((source / path).read_bytes())

    files = {
        "ptb": [read(f"ptb/{name}.txt.xz") for name in ("train", "valid", "test")],
        "wt2": [read(f"wikitext-2/wiki.{name}.tokens.xz") for name in ("train", "valid", "test")],
    }
    enwik8, text8 = (
        read("enwik8-prefix/enwik8.first4154037.xz")[:1_000_000],
        read("text8-prefix/text8.first6877825.xz")[:1_000_000],
    )
    files["enwik8"] = [prepared_bytes(part).encode() for part in split(enwik8)]
    files["text8"] = [prepared_letters(part.decode()).encode() for part in split(text8)]
    found = {}
    for dataset, parts in files.items():
        directory = root / f"real-{dataset}"
        directory.mkdir()
        for name, data in zip(("train", "valid", "test"), parts, strict=True):
            (directory / f"{name}.txt").write_bytes(data)
        corpus = get_lm_corpus(str(directory), dataset)
        words = "\n".join(corpus.vocab.idx2sym).encode()
        found[dataset] = {"n_words": len(corpus.vocab), "words_sha256": hashlib.sha256(words).hexdigest()}
        for name in ("train", "valid", "test"):
            ids = np.array(getattr(corpus, name).tolist(), "<i8")
            found[dataset][name] = {"n_tokens": len(ids), "sha256": hashlib.sha256(ids.tobytes()).hexdigest()}
    return found


def split(data: bytes) -> list[bytes]:
    """Return train, valid and test parts of the first million bytes."""
    return [data[:800_000], data[800_000:900_000], data[900_000:1_000_000]]


def write(name: str, values) -> None:
    content = json.dumps(values, indent=1, ensure_ascii=True) + "\n"
    assert len(content) < 100_000, (name, len(content))
    GOLDENS.mkdir(parents=True, exist_ok=True)
    (GOLDENS / name).write_text(content, encoding="ascii")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--authors", type=Path, required=True, help="checkout of the authors' repository")
    parser.add_argument("--corpora", type=Path, help="directory of real corpora")
    args = parser.parse_args()
    sys.path.insert(0, str(args.authors / "pytorch"))
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        if args.corpora:
            write("corpora.json", corpora(root, args.corpora))
        write("authors.json", authors(root))
        write("huggingface.json", huggingface(root))


if __name__ == "__main__":
    main()
