"""Write what the data functions of XLNet's authors make of small texts, for tests/data/test_targets.py and test_pairs.py.

Needs numpy and a checkout of https://github.com/zihangdai/xlnet at bbaa3a6, neither TensorFlow nor sentencepiece:

    python tests/parity/make_goldens_xlnet_data.py --checkout CHECKOUT

Their code runs as it is. What it imports is replaced: TensorFlow by the few functions of it that they call, in numpy; their
sources of random numbers by one that hands out the numbers of a list, which goes into the golden. No code of theirs is kept.

    rows.json    rows of `create_tfrecords`, and what the parser of `get_dataset` makes of them
    words.json   spans of `_sample_mask`, whose loop over a span looks at the present piece instead of at the first one
"""

import argparse
import json
import random
import sys
import types
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

GOLDENS = Path(__file__).parent / "goldens" / "xlnet_data"
PIECES = [
    "<unk>", "<s>", "</s>", "<cls>", "<sep>", "<pad>", "<mask>", "<eod>", "<eop>", ".", ",",
    "▁sea", "▁the", "▁wide", "▁calm", "▁a", "▁lamp", "▁is", "▁lit", "ing", "s", "ed", "er", "▁well", "▁know", "n", "▁1", "00",
]  # fmt: skip
PERIOD = PIECES.index(".")
NOT_NEEDED = ("absl", "absl.logging", "prepro_utils", "sentencepiece", "tensorflow")
CASES: dict[str, dict[str, Any]] = {
    "both directions": {
        "batch_size": 4, "tgt_len": 32, "reuse_len": 16, "perm_size": 8, "num_predict": 7, "mask_alpha": 4, "mask_beta": 1,
        "bi_data": True, "n_tokens": 201, "sentences": (1, 7),
    },
    "long sentences": {
        "batch_size": 2, "tgt_len": 48, "reuse_len": 24, "perm_size": 24, "num_predict": 11, "mask_alpha": 6, "mask_beta": 2,
        "bi_data": False, "n_tokens": 301, "sentences": (3, 45),
    },
    "short lanes": {
        "batch_size": 40, "tgt_len": 24, "reuse_len": 12, "perm_size": 4, "num_predict": 3, "mask_alpha": 2, "mask_beta": 1,
        "bi_data": True, "n_tokens": 513, "sentences": (1, 9),
    },
}  # fmt: skip


class Numbers:
    """Random numbers that are written down: in the place of `random`, of `numpy.random` and of `tf.random_shuffle`."""

    def __init__(self, seed: int) -> None:
        self._source = random.Random(seed)
        self.given: list[float] = []

    def random(self) -> float:
        """Return the next number; four digits are enough to tell what follows from it."""
        self.given.append(self._source.randrange(10_000) / 10_000)
        return self.given[-1]

    def choice(self, values, p=None):
        if p is not None:
            shares = np.cumsum(p)
            return values[int(np.searchsorted(shares / shares[-1], self.random(), side="right"))]
        return int(self.random() * values) if isinstance(values, int | np.integer) else values[int(self.random() * len(values))]

    def randint(self, low: int, high: int | None = None) -> int:
        """Return what numpy's function does if `high` is left out, or else Python's."""
        return int(self.random() * low) if high is None else low + int(self.random() * (high - low + 1))

    def shuffled(self, rows: np.ndarray) -> np.ndarray:
        return rows[np.argsort([self.random() for _ in rows], kind="stable")]


class Numpy:
    """numpy with other random numbers, and with the name `bool` that it had then."""

    def __init__(self, numbers: Numbers) -> None:
        self.random, self.bool = numbers, np.bool_

    def __getattr__(self, name: str):
        return getattr(np, name)


class Pieces:
    def IdToPiece(self, token_id: int) -> str:  # noqa: N802 (their name)
        return PIECES[token_id]


def tensorflow(numbers: Numbers, rows: list) -> types.SimpleNamespace:
    """Return the functions of TensorFlow that they call, in numpy; what is written goes into `rows`."""
    one = types.SimpleNamespace
    return one(
        int64=np.int64, int32=np.int32, float32=np.float32, bfloat16=None, bool=np.bool_,
        logging=one(info=lambda *_: None),
        keras=one(backend=one(is_sparse=lambda _: False)),
        train=one(
            Feature=lambda int64_list: int64_list, Int64List=lambda value: np.array(value, np.int64),
            Features=lambda feature: feature, Example=lambda features: one(SerializeToString=lambda: features),
        ),
        python_io=one(TFRecordWriter=lambda _: one(write=rows.append, close=lambda: None)),
        FixedLenFeature=lambda *_: None, parse_single_example=lambda serialized, features: dict(serialized),
        range=lambda n, dtype=np.int32: np.arange(n, dtype=dtype), random_shuffle=numbers.shuffled,
        reshape=np.reshape, transpose=np.transpose, concat=np.concatenate, ones=np.ones, zeros=np.zeros,
        cast=lambda values, dtype: values.astype(dtype), where=np.where, equal=np.equal,
        logical_not=np.logical_not, logical_or=np.logical_or, logical_and=np.logical_and,
        boolean_mask=lambda values, mask: values[mask], shape=np.shape,
        one_hot=lambda indices, depth, dtype: np.eye(depth, dtype=dtype)[indices],
    )  # fmt: skip


def load(source: str, numbers: Numbers, rows: list, **flags) -> Any:
    """Run their file, without what it imports, and return it as a module."""
    theirs: Any = types.ModuleType("data_utils")
    with mock.patch.dict(sys.modules, {name: mock.MagicMock() for name in NOT_NEEDED}):
        exec(compile(source, "data_utils.py", "exec"), vars(theirs))
    theirs.np, theirs.random, theirs.tf = Numpy(numbers), numbers, tensorflow(numbers, rows)
    theirs.FLAGS = types.SimpleNamespace(uncased=False, num_core_per_host=1, **flags)
    return theirs


def text(n_tokens: int, n_words: tuple[int, int], seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Draw sentences that end with a period; return their ids and the alternating bit of each sentence."""
    source = random.Random(seed)
    ids, bits, bit = [], [], True
    while len(ids) < n_tokens:
        words = [source.randrange(PERIOD + 1, len(PIECES)) for _ in range(source.randint(*n_words))]
        ids += [*words, PERIOD]
        bits += [bit] * (len(words) + 1)
        bit = not bit
    return np.array(ids[:n_tokens]), np.array(bits[:n_tokens])


def rows_of(source: str, name: str, case: dict[str, Any], seed: int) -> dict[str, Any]:
    numbers = Numbers(seed)
    written, draws, parsers = [], [], []
    names = ("mask_alpha", "mask_beta", "num_predict", "reuse_len", "bi_data")
    theirs = load(source, numbers, written, **{name: case[name] for name in names})
    split = theirs._split_a_and_b

    def begin_row(*args, **kwargs):
        numbers.given = []
        draws.append(numbers.given)
        return split(*args, **kwargs)

    theirs._split_a_and_b = begin_row
    theirs.parse_files_to_dataset = lambda parser, **_: parsers.append(parser)
    ids, bits = text(case["n_tokens"], case["sentences"], seed)
    batch_size, tgt_len = case["batch_size"], case["tgt_len"]
    theirs.create_tfrecords("", "", [ids, bits], batch_size, tgt_len, case["bi_data"], Pieces())
    assert len(draws) == len(written), "a row was drawn and not written"
    theirs.get_dataset(
        {"batch_size": batch_size}, 1, 1, "train", [], 0, tgt_len, case["reuse_len"], case["perm_size"],
        case["mask_alpha"], case["mask_beta"], False, case["num_predict"],
    )  # fmt: skip
    rows = []
    for row, numbers.given in zip(written, draws, strict=True):
        parsed = parsers[0](row)
        n_target = int(parsed["target_mask"].sum())
        rows.append({
            "draws": numbers.given,
            "ids": row["input"].tolist(),
            "segment_ids": row["seg_id"].tolist(),
            "is_random": not row["label"][0],
            "targets": parsed["target_mapping"].argmax(1)[:n_target].tolist(),
            "labels": parsed["target"][:n_target].tolist(),
            "perm_mask": np.packbits(parsed["perm_mask"].astype(bool)).tobytes().hex(),
        })  # fmt: skip
        assert (parsed["input_k"] == row["input"]).all()
    assert {row["is_random"] for row in rows} == {False, True}
    starts = [theirs._is_start_piece(piece) for piece in PIECES]
    layout = {key: value for key, value in case.items() if key not in ("n_tokens", "sentences")}
    return {
        "name": name, "layout": layout, "text": ids.tolist(), "word_starts": starts, "period": PERIOD, "sep": 4, "cls": 3,
        "rows": rows,
    }  # fmt: skip


def words(source: str) -> list[dict[str, Any]]:
    """Let the corrected loop choose spans, in both directions, without a number that has to be reached."""
    asked = "_is_start_piece(sp.IdToPiece(seg[{}].item())):\n        cnt_ngram"
    assert source.count(asked.format("beg")) == 1
    source = source.replace(asked.format("beg"), asked.format("end"))
    cases = []
    for seed in range(24):
        numbers = Numbers(seed)
        theirs = load(source, numbers, [], mask_alpha=3, mask_beta=1)
        ids, _ = text(40 + seed, (2, 6), seed)
        backward = bool(seed % 2)
        mask = theirs._sample_mask(Pieces(), ids, reverse=backward)
        starts = [theirs._is_start_piece(PIECES[i]) for i in ids]
        cases.append(
            {
                "starts": [*map(int, starts)],
                "backward": backward,
                "draws": numbers.given,
                "chosen": np.flatnonzero(mask).tolist(),
            }
        )
    return cases


def write(name: str, values: object) -> None:
    content = json.dumps(values, ensure_ascii=True) + "\n"
    assert len(content) < 100_000, (name, len(content))
    GOLDENS.mkdir(parents=True, exist_ok=True)
    (GOLDENS / name).write_text(content, encoding="ascii")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkout", type=Path, required=True, help="checkout of the authors' repository")
    source = (parser.parse_args().checkout / "data_utils.py").read_text(encoding="utf-8")
    write("rows.json", [rows_of(source, name, case, seed) for seed, (name, case) in enumerate(CASES.items())])
    write("words.json", words(source))


if __name__ == "__main__":
    main()
