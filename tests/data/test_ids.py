"""Files of ids are read as they are, and everything that is wrong with them is said in one line."""

import gzip
import io
import json
import pickle
import re
import tracemalloc
import zipfile
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from transformer_xl.config.recipes import load_recipe
from transformer_xl.config.run import DataConfig, TokenizerConfig
from transformer_xl.data import ids as id_files
from transformer_xl.data.corpora import find_corpus, switch_to_ids
from transformer_xl.data.ids import PACKED, document_border, id_file_size, is_id_file, read_ids
from transformer_xl.data.named import SPLITS
from transformer_xl.data.prepare import PreparedCorpus, prepare
from transformer_xl.data.text import file_text
from transformer_xl.data.text_files import FileRange
from transformer_xl.errors import ConfigError, CorpusError, TokenizerError, TxlError
from transformer_xl.tokenizers.ids import IdTokenizer
from transformer_xl.tokenizers.kinds import load_tokenizer, tokenizer_from_dict

DOCUMENTS = [[5, 0, 2], [7], [1, 1, 1, 6]]
Documents = list[list[int]]


def write_lines(path: Path, documents: Documents, form: str = "{}") -> Path:
    path.write_text("".join(form.replace("{}", json.dumps(ids)) + "\n" for ids in documents))
    return path


def write_npz(path: Path, documents: Documents, *, compressed: bool = False, types: Any = ("<u2", ">i8", "|u1")) -> Path:
    arrays = [np.array(ids, types[i % len(types)]) for i, ids in enumerate(documents)]
    (np.savez_compressed if compressed else np.savez)(path, *arrays)
    return path


def write_table(path: Path, documents: Documents) -> Path:
    np.save(path, np.array(documents, np.uint8))
    return path


def write_row(path: Path, documents: Documents) -> Path:
    np.save(path, np.array(documents[0], np.int32))
    return path


def documents_of(pieces: Any, tokenizer: IdTokenizer | None = None) -> Documents:
    found: Documents = []
    for piece in pieces:
        for chunk in read_ids(piece, tokenizer):
            if chunk.starts_document:
                found.append([])
            found[-1] += np.frombuffer(chunk.data, PACKED).tolist()
    return found


def of_split(prepared: PreparedCorpus, name: Any) -> Documents:
    split = prepared.splits[name]
    return [part.tolist() for part in np.split(split.ids[:], split.document_starts[1:])] if len(split.ids) else []


def prepared(corpus: Path | str, tmp_path: Path, *, vocab_size: int | None = None, **data: Any) -> PreparedCorpus:
    config = TokenizerConfig(kind="ids", vocab_size=vocab_size)
    return prepare(DataConfig(corpus=str(corpus), **data), config, cache=tmp_path / "cache", progress=False)


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("a.jsonl", write_lines),
        ("b.jsonl", lambda path, documents: write_lines(path, documents, '{"title": "[x]", "ids": {}}\n  ')),
        ("c.npz", write_npz),
        ("d.npz", lambda path, documents: write_npz(path, documents, compressed=True)),
    ],
)
@pytest.mark.parametrize("block", [8, 1 << 18])
def test_documents_of_any_length_are_kept(
    tmp_path: Path, name: str, write: Callable[[Path, Documents], Path], block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(id_files, "BLOCK_BYTES", block)
    path = write(tmp_path / name, DOCUMENTS)
    assert is_id_file(path)
    assert documents_of([FileRange(path)]) == DOCUMENTS


def test_arrays_of_one_and_two_axes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(id_files, "BLOCK_BYTES", 16)
    np.save(tmp_path / "one.npy", np.arange(9, dtype=">u4"))
    np.save(tmp_path / "two.npy", np.asfortranarray(np.arange(12).reshape(3, 4)))
    assert documents_of([FileRange(tmp_path / "one.npy")]) == [list(range(9))]
    assert documents_of([FileRange(tmp_path / "two.npy")]) == np.arange(12).reshape(3, 4).tolist()
    for text in ('{"text": "[1, 2]"}', "[]", '["a"]', "", "[true]", "1 2 3"):
        (tmp_path / "it.jsonl").write_text(text)
        assert not is_id_file(tmp_path / "it.jsonl")
    packed = tmp_path / "lines.jsonl.gz"
    packed.write_bytes(gzip.compress(b"[1, 2]\n\n[3]"))
    assert is_id_file(packed) and documents_of([FileRange(packed)]) == [[1, 2], [3]]


@given(
    st.lists(st.lists(st.integers(0, 255), min_size=1, max_size=9), min_size=1, max_size=20),
    st.sampled_from(["jsonl", "npz", "table", "row"]),
    st.sampled_from([(0.9, 0.05, 0.05), (0.5, 0.25, 0.25), (0.6, 0.4, 0)]),
)
def test_splits_have_all_ids_in_order_and_whole_documents_where_there_are_several(
    tmp_path_factory: pytest.TempPathFactory, documents: Documents, kind: str, shares: tuple[float, float, float]
) -> None:
    folder = tmp_path_factory.mktemp("ids")
    if kind == "table":
        documents = [(ids * 9)[:7] for ids in documents]
    elif kind == "row":
        documents = documents[:1]
    write = {"jsonl": write_lines, "npz": write_npz, "table": write_table, "row": write_row}[kind]
    path = write(folder / f"ids.{kind if kind in ('jsonl', 'npz') else 'npy'}", documents)
    splits = find_corpus(DataConfig(corpus=str(path), split=shares), hold_ids=True).splits
    found = {name: documents_of(splits[name]) for name in SPLITS}
    together = [ids for name in SPLITS for ids in found[name]]
    assert [*chain(*together)] == [*chain(*documents)]
    if len(documents) > 1 or kind == "jsonl":
        assert together == documents
    if len(documents) > 1:
        assert found["train"] and found["valid"]


def test_a_border_is_a_document_near_the_place(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "it.jsonl", [[1]] * 5)  # 4 bytes each
    assert [document_border(path, position, 0) for position in (1, 4, 5, 15, 16, 19)] == [4, 4, 4, 12, 16, 16]
    assert [document_border(path, 9, low) for low in (4, 8, 12, 16)] == [8, 12, 16, 20]  # there is one document at least
    assert id_file_size(path) == 20


def test_one_long_document_is_cut_by_the_shares(tmp_path: Path) -> None:
    np.save(tmp_path / "it.npy", np.arange(10_000) % 256)
    corpus = prepared(tmp_path / "it.npy", tmp_path, split=(0.8, 0.1, 0.1))
    assert [len(corpus.splits[name].ids) for name in SPLITS] == [8000, 1000, 1000]
    assert [*chain(*(of_split(corpus, name)[0] for name in SPLITS))] == (np.arange(10_000) % 256).tolist()
    assert corpus.tokenizer.vocab_size == 256
    assert corpus.splits["train"].n_characters == 8000
    assert all(split.document_starts.tolist() == [0] for split in corpus.splits.values())


def test_directories_are_divided_by_name_and_files_about_them_left_out(tmp_path: Path) -> None:
    folder = tmp_path / "corpus"
    folder.mkdir()
    (folder / "README.md").write_text("about")
    write_row(folder / "train.npy", [[1, 2, 9]])
    write_lines(folder / "valid.jsonl", [[3], [4, 5]])
    write_npz(folder / "test.npz", [[6, 7]])
    recipe = load_recipe("wt2-small", [f"data.corpus={folder}"])
    assert recipe.tokenizer.kind == "word"
    config = switch_to_ids(recipe, [f"data.corpus={folder}"])
    assert (config.tokenizer.kind, config.tokenizer.vocab_size) == ("ids", None)
    corpus = prepared(folder, tmp_path)
    assert [of_split(corpus, name) for name in SPLITS] == [[[1, 2, 9]], [[3], [4, 5]], [[6, 7]]]
    assert corpus.tokenizer.vocab_size == 10
    assert prepared(f"{folder}/[tv]*.*[yl]", tmp_path).tokenizer.vocab_size == 10
    (folder / "notes.txt").write_text("text")
    assert switch_to_ids(recipe, []).tokenizer.kind == "word"  # a directory of several things is text as before
    text = find_corpus(DataConfig(corpus=str(folder)))
    assert [file.name for file in text.files] == ["README.md", "notes.txt", "valid.jsonl"]
    assert [file.name for file in text.left_out] == ["test.npz", "train.npy"]
    assert prepared(folder, tmp_path).tokenizer.vocab_size == 10  # unless ids are asked for


def test_a_kind_that_is_told_counts(tmp_path: Path) -> None:
    array, lines = write_row(tmp_path / "it.npy", [[1, 2]]), write_lines(tmp_path / "it.jsonl", [[1, 2]])
    told = ["tokenizer.kind=char", f"data.corpus={lines}"]
    assert switch_to_ids(load_recipe("quickstart", told), told).tokenizer.kind == "char"
    told[1] = f"data.corpus={array}"
    with pytest.raises(ConfigError, match=r"tokenizer.kind \(char\) reads text, and '.*it.npy' holds ids; leave it out"):
        switch_to_ids(load_recipe("quickstart", told), told)
    told[0] = "tokenizer.kind=ids"
    assert switch_to_ids(load_recipe("quickstart", told), told).tokenizer.kind == "ids"
    sized = ["tokenizer.vocab_size=300", f"data.corpus={array}"]
    assert switch_to_ids(load_recipe("quickstart", sized), sized).tokenizer.vocab_size == 300
    for tokenizer in (TokenizerConfig(), TokenizerConfig(kind="word")):
        with pytest.raises(CorpusError, match=r"it.npy' holds ids, and this tokenizer reads text"):
            prepare(DataConfig(corpus=str(array)), tokenizer, cache=tmp_path / "cache")
    (tmp_path / "it.txt").write_text("1 2 3")
    with pytest.raises(CorpusError, match=r"it.txt' has no ids, as tokenizer.kind=ids reads: .npy"):
        prepared(tmp_path / "it.txt", tmp_path)


def saved(array: Any, **how: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, array, **how)
    return file.getvalue()


def claiming(shape: str, descr: str = "<i8") -> bytes:
    header = f"{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}, }}".ljust(117) + "\n"
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode() + bytes(16)


WHOLE = saved(np.arange(100))
WRONG: dict[str, tuple[str, bytes, str]] = {
    "floats": ("it.npy", saved(np.ones(3)), r"holds float64, not integers; save ids with a type such as np.int32"),
    "objects": ("it.npy", saved(np.array([1, None]), allow_pickle=True), r"numpy cannot read '.*it.npy' \(.*objects"),
    "pickle": ("it.npy", pickle.dumps([1, 2, 3]), r"numpy cannot read '.*' \(.*pickled .*\)"),
    "cube": ("it.npy", saved(np.ones((2, 2, 2), int)), r"has the shape \(2, 2, 2\); save rows, of the shape \(n,\) for one"),
    "no ids": ("it.npy", saved(np.ones((4, 0), int)), r"has the shape \(4, 0\)"),
    "cut": ("it.npy", WHOLE[:-5], r"numpy cannot read '.*it.npy' \(mmap length is greater than file size\); copy it"),
    "longer": ("it.npy", WHOLE + b"\0", r"it.npy' goes on behind the ids that its header counts"),
    "huge": ("it.npy", claiming(f"({10**15},)"), r"numpy cannot read '.*it.npy' \(mmap length"),
    "open brackets": ("it.npy", claiming("(((("), r"numpy cannot read"),
    "mark": ("it.jsonl", b"\xef\xbb\xbf[1, 2]\n", r"line 1 is not JSON: Unexpected UTF-8 BOM"),
    "negative": ("it.npy", saved(np.array([3, -1, 2])), r"it.npy': \[1\] is -1, and ids are from 0 to 2,147,483,646 here"),
    "too large": ("it.npy", saved(np.array([[0], [2**63]], np.uint64)), r"\[1, 0\] is an enormous integer, and ids are from 0"),
    "no zip": ("it.npz", b"PK nothing", r"numpy cannot read '.*it.npz'"),
    "line": ("it.jsonl", b"[1, 2]\n[3, x]\n", r"it.jsonl': line 2 is not JSON: "),
    "empty": ("it.jsonl", b"[1, 2]\n[]\n", r"line 2 has no ids"),
    "float": ("it.jsonl", b"[1, 2]\n[3, 1.0]\n", r"line 2, \[1\] is 1.0, not an integer"),
    "above": ("it.jsonl", b"[1]\n[99999999999999999999]\n", r"line 2, \[0\] is an enormous integer, and ids"),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_is_one_line(tmp_path: Path, what: str) -> None:
    name, content, said = WRONG[what]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(TxlError, match=said) as caught:
        prepared(tmp_path / name, tmp_path)
    assert "\n" not in str(caught.value)


def test_what_is_wrong_in_an_archive_is_named(tmp_path: Path) -> None:
    path = tmp_path / "it.npz"
    np.savez(path, pieces=np.array([1, 2]), more=np.array([[5, 5], [5, -3]]))
    with pytest.raises(CorpusError, match=r"it.npz': more\[1, 1\] is -3"):
        prepared(path, tmp_path)
    np.savez(path, pieces=np.array([1, 2]), more=np.array([0.5]))
    with pytest.raises(CorpusError, match=r"it.npz', array more holds float64"):
        prepared(path, tmp_path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("notes.txt", "text")
    with pytest.raises(CorpusError, match=r"it.npz', array notes.txt holds \|S4, not integers"):
        prepared(path, tmp_path)
    np.savez(path, np.arange(3000, dtype=np.int64))
    data = bytearray(path.read_bytes())
    entry = data.rindex(b"PK\x01\x02")  # of the directory at the end
    for place, value in ((8, 1), (10, 97)):  # the flag of encryption, and a method of compression
        other = bytearray(data)
        for begin in (entry + place, place - 2):
            other[begin] |= value
        path.write_bytes(other)
        with pytest.raises(CorpusError, match=r"numpy cannot read '.*it.npz' \(.*(encrypted|not supported)"):
            documents_of([FileRange(path)])
    data[2000] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorpusError, match=r"numpy cannot read '.*it.npz' \(Bad CRC-32"):
        documents_of([FileRange(path)])


def test_an_id_outside_a_given_vocabulary_is_placed(tmp_path: Path) -> None:
    np.save(tmp_path / "it.npy", np.array([[1, 2], [3, 300]] * 50))
    said = r"it.npy': \[1, 1\] is 300, and ids are from 0 to 299 here; correct it, or train with tokenizer.vocab_size=301"
    with pytest.raises(CorpusError, match=said):
        prepared(tmp_path / "it.npy", tmp_path, vocab_size=300)
    assert prepared(tmp_path / "it.npy", tmp_path, vocab_size=301).tokenizer.vocab_size == 301


def test_large_arrays_are_never_held_as_a_whole(tmp_path: Path) -> None:
    np.save(tmp_path / "it.npy", np.zeros(10_000_000, np.int64))
    tracemalloc.start()
    try:
        corpus = prepared(tmp_path / "it.npy", tmp_path)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert sum(len(split.ids) for split in corpus.splits.values()) == 10_000_000
    assert most < 8_000_000


PADDED = [[1, 2, 2, 9, 9], [2, 1, 9, 9, 9], [1, 2, 1, 2, 2], [3, 9, 9, 9, 9]]
"""The third row ends in 2 twice; most in 9, which stands nowhere else."""


def of_rows(name: str, rows: Documents, path: Path, *, dtype: Any = np.int16) -> Path:
    if name.endswith("jsonl"):
        return write_lines(path / name, rows)
    (np.save if name.endswith("npy") else np.savez)(path / name, np.array(rows, dtype))
    return path / name


def without(pad_id: int, rows: Documents) -> Documents:
    return [row[: max(i + 1 for i, token in enumerate(row) if token != pad_id)] for row in rows]


@pytest.mark.parametrize("name", ["it.npy", "it.npz", "it.jsonl"])
@pytest.mark.parametrize("block", [4, 1 << 18])
def test_padding_is_left_out_and_said(
    tmp_path: Path, name: str, block: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(id_files, "BLOCK_BYTES", block)
    rows = PADDED * 10 + [[9] * 5]  # the last one is nothing but padding
    path = of_rows(name, rows, tmp_path)
    data = DataConfig(corpus=str(path), split=(0.8, 0.1, 0.1))
    corpus = prepare(data, TokenizerConfig(kind="ids"), cache=tmp_path / "cache")
    said = f"95 of the 205 ids of '{path}' are 9 at the ends of rows, as padding is, and left out, an end mark of the same"
    assert capsys.readouterr().err.startswith(f"warning: {said} id, too; tokenizer.pad_id=none keeps them\n")
    assert list(chain(*(of_split(corpus, split) for split in SPLITS))) == without(9, rows[:-1])
    assert isinstance(corpus.tokenizer, IdTokenizer)
    assert (corpus.tokenizer.vocab_size, corpus.tokenizer.pad_id) == (4, 9)
    corpus.tokenizer.save(tmp_path / "tokenizer.json")
    again = load_tokenizer(tmp_path / "tokenizer.json")
    assert file_text(path, again).ids.tolist() == [*chain(*without(9, rows[:-1]))]
    kept = prepare(data, TokenizerConfig(kind="ids", pad_id=None), cache=tmp_path / "cache")
    assert list(chain(*(of_split(kept, split) for split in SPLITS))) == rows
    assert capsys.readouterr().err == ""
    again = tokenizer_from_dict(kept.tokenizer.to_dict())
    assert file_text(path, again).ids.tolist() == [*chain(*rows)] and prepare(data, again, cache=tmp_path / "told")
    assert capsys.readouterr().err == ""  # because it was told
    assert IdTokenizer(10).to_dict() == {"kind": "ids", "format": 1, "vocab_size": 10}  # as before there was padding
    file_text(path, IdTokenizer(10))
    said = capsys.readouterr().err
    assert "and read as text; tokenizer.pad_id=9, set for a training, leaves them out" in said


@pytest.mark.parametrize("name", ["it.npy", "it.jsonl"])
def test_padding_is_found_in_rows_that_are_sorted_by_length(tmp_path: Path, name: str) -> None:
    rows = [[1 + i % 3] * 8 if i < 400 else [1, 2, *[9] * 6] for i in range(1300)]
    corpus = prepare(DataConfig(corpus=str(of_rows(name, rows, tmp_path))), TokenizerConfig(kind="ids"), cache=tmp_path)
    assert list(chain(*(of_split(corpus, split) for split in SPLITS))) == without(9, rows)


def test_an_end_that_also_stands_elsewhere_is_learned_from_and_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [[0, 5, 0, 0], [7, 0, 0, 0], [1, 1, 1, 1]] * 9
    path = of_rows("it.npy", rows, tmp_path)
    data = DataConfig(corpus=str(path))
    corpus = prepare(data, TokenizerConfig(kind="ids"), cache=tmp_path / "cache")
    assert list(chain(*(of_split(corpus, split) for split in SPLITS))) == rows
    said = (
        "are 0 at the ends of rows, as padding is, and read as text; tokenizer.pad_id=0, set for a training, leaves them out\n"
    )
    assert said in capsys.readouterr().err
    corpus = prepare(data, TokenizerConfig(kind="ids", pad_id=0), cache=tmp_path / "cache")
    assert list(chain(*(of_split(corpus, split) for split in SPLITS))) == without(0, rows)
    of_rows("it.npy", [[5, 6, -1, -1], [7, -1, -1, -1], [7, 7, 7, -1]], tmp_path, dtype=np.int64)
    assert documents_of([FileRange(path)], IdTokenizer(8, -1)) == [[5, 6], [7], [7, 7, 7]]
    np.savez(tmp_path / "it.npz", np.zeros((3, 4), int), np.zeros((3, 6), int))  # something has to be left
    assert sum(len(split.ids) for split in prepared(tmp_path / "it.npz", tmp_path).splits.values()) == 30
    with pytest.raises(TokenizerError, match="pad_id is no integer"):
        IdTokenizer(8, 1.5)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    "rows",
    [
        [[1, 2, 3, 3], [2, 1, 3, 3], [1, 1, 3, 3]],  # all end in as much of it: the mark of an end
        [[1, 2, 3], [2, 1, 3], [1, 1, 1]],  # once, too
        [[1, 2, 9, 9], [2, 1, 3, 9, 9, 9], [1, 9, 9, 9]],  # no rectangle
        [[0, 0, 0, 0]] * 3,
        [[1, 2, 9, 9], [1, 9, 9, 9], [1, 2, 3, 4], [1, 2, 3, 5]],  # half of them
        [[4, 4, 9, 9, 9]],
    ],
)
def test_other_ends_are_kept_without_a_word(tmp_path: Path, rows: Documents, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_lines(tmp_path / "it.jsonl", rows)
    corpus = prepare(DataConfig(corpus=str(path)), TokenizerConfig(kind="ids"), cache=tmp_path / "cache")
    assert list(chain(*(of_split(corpus, split) for split in SPLITS))) == rows
    assert capsys.readouterr().err == ""


def test_ids_are_numbers_between_spaces() -> None:
    tokenizer = IdTokenizer(300)
    assert tokenizer.encode(" 12\n299  0").tolist() == [12, 299, 0]
    assert tokenizer.decode([12, 299, 0]) == "12 299 0 "
    assert [part.tolist() for part in tokenizer.encode_with_offsets(" 12\n299")] == [[12, 299], [1, 4], [3, 7]]
    wrong = {"1 300": "300' at character 2", "a": "'a' at", "-1": "'-1'", "1,2": "1,2", "²": "²", "9" * 99: "999"}
    for text, found in wrong.items():
        with pytest.raises(TokenizerError, match=re.escape(found)):
            tokenizer.encode(text)
    for size in (0, 2**31):
        with pytest.raises(TokenizerError, match=r"vocab_size is not from 1 to 2,147,483,647"):
            IdTokenizer(size)
