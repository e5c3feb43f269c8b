"""`txl score`: sums are those of `txl eval`, rows of words and tokens those of their lines, and pairs what BLiMP counts."""

import csv
import io
import json
import lzma
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.cli.conftest import Txl, pipe_of, save
from tests.helpers import TINY, random_weights, tiny_xlnet
from transformer_xl.checkpoint.open_run import open_run
from transformer_xl.checkpoint.run_directory import load
from transformer_xl.config.model import TransformerXLConfig
from transformer_xl.config.run import TokenizerConfig
from transformer_xl.generation.decoder import Decoder
from transformer_xl.model.transformer_xl import TransformerXL
from transformer_xl.reading.gaps import gap_nats
from transformer_xl.reading.reading import Reading
from transformer_xl.tokenizers.kinds import CharTokenizer, Tokenizer, WordTokenizer, train_tokenizer

TEXT = "The cat sat.\n\n\n  A \tdog \\ ran, é 日本\r\nand ran\n" * 4 + "to the end"
EXACT = ("--precision", "fp32")


def tokenizer_of(kind: str) -> Tokenizer:
    if kind == "char without line ends":
        return CharTokenizer(set(TEXT) - {"\n"})
    return train_tokenizer(TokenizerConfig.model_validate({"kind": kind, "vocab_size": 300 if kind == "bpe" else None}), [TEXT])


def save_model(kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    model = random_weights(TransformerXL(TransformerXLConfig(**{**TINY, "vocab_size": tokenizer.vocab_size})).eval())
    save(model, tokenizer, "model")


def table(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text), delimiter="\t", quoting=csv.QUOTE_NONE))


def total(rows: list[dict[str, Any]], column: str = "nats") -> float:
    return sum(float(row[column]) for row in rows if row[column] not in ("", None))


@pytest.mark.parametrize("kind", ["byte", "char", "word", "bpe"])
def test_sums_are_those_of_eval_and_words_those_of_lines(txl: Txl, workbench: Path, kind: str) -> None:
    save_model(kind)
    Path("some.txt.xz").write_bytes(lzma.compress(TEXT.encode()))
    how = ("--tgt-len", "8", *EXACT)
    whole = json.loads(txl("eval", "model", "--file", "some.txt.xz", "--batch-size", "1", "--json", *how).out)
    answers = {per: txl("score", "model", "some.txt.xz", "--per", per, *how) for per in ("line", "word", "token")}
    assert all(each.status == 0 for each in answers.values()), answers
    of = {per: table(each.out) for per, each in answers.items()}
    for per, rows in of.items():
        of_tokens = "nats_prefix" if per == "word" else "nats"
        assert total(rows, of_tokens) == pytest.approx(whole["nats"], rel=1e-7), per
        assert sum(int(row["tokens"]) for row in rows) == whole["tokens"]
        assert all(float(row["bits"]) == pytest.approx(float(row["nats"]) / math.log(2)) for row in rows if row["nats"])
    assert of["token"][0]["nats"] == "" and of["token"][0]["tokens"] == "0", "nothing predicts the first token"
    lines = TEXT.split("\n")
    shown = [line.removesuffix("\r").replace("\\", "\\\\").replace("\t", "\\t") for line in lines]
    assert [row["text"] for row in of["line"]] == shown
    assert [int(row["line"]) for row in of["line"]] == list(range(1, len(lines) + 1))
    for number, row in enumerate(of["line"], 1):
        for per in ("word", "token"):
            own = [each for each in of[per] if each["line"] == str(number)]
            assert [int(each[per]) for each in own] == list(range(1, len(own) + 1))
            # the last word ends, and no line end says so; three line ends are one piece, and the word before has its end
            if per == "token" or (number < len(lines) and kind != "bpe"):
                assert total(own) == pytest.approx(float(row["nats"] or 0), rel=1e-5, abs=1e-5), (per, number)
    assert (total(of["word"][-3:]) > total(of["word"][-3:], "nats_prefix")) == (kind != "word")
    words = [row["text"] for row in of["word"] if row["text"] != r"\n"]
    assert words == [word.replace("\\", "\\\\") for word in TEXT.split()]


@pytest.mark.parametrize("kind", ["byte", "word", "bpe", "char without line ends"])
def test_a_line_alone_follows_a_line_end(txl: Txl, workbench: Path, kind: str) -> None:
    """Or a space where the vocabulary has none. All its tokens count, and lines that are read beside it make no difference."""
    save_model(kind)
    lines = [f"{'the cat and dog '[: 3 + n % 13]}ran" for n in range(40)]
    lines, before = ([*lines[:9], "", *lines[9:]], "\n") if "without" not in kind else (lines[:1], " ")
    Path("some.txt").write_text("\n".join(lines))
    answer = txl("score", "model", "some.txt", "--memory", "reset", "--json", "--batch-size", "8", *EXACT)
    rows = [json.loads(row) for row in answer.out.splitlines()]
    model, tokenizer = load("model")
    assert isinstance(model, TransformerXL) and [row["text"] for row in rows] == lines
    for number, row in enumerate(rows, 1):
        own = lines[number - 1] + "\n" * (number < len(lines))
        ids = np.concatenate([tokenizer.encode(before)[-1:], tokenizer.encode(own)])
        expected = float(Decoder(model).score([ids])[0][1:].double().sum())
        assert (row["line"], row["tokens"]) == (number, len(ids) - 1) and row["nats"] == pytest.approx(expected, rel=1e-5)


def test_standard_input_and_bytes_that_are_no_text(txl: Txl, workbench: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_model("byte")
    Path("latin.txt").write_bytes("caf\u00e9 noir\r\n\u00fc".encode("latin-1"))
    answer = txl("score", "model", "latin.txt", "--per", "word", *EXACT)
    assert "warning: 'latin.txt' is not UTF-8, and its bytes are read as they are" in answer.err
    assert [row["text"] for row in table(answer.out)] == ["caf?", "noir", r"\n", "?"]
    for per in ("line", "word"):
        assert "\\u" not in txl("score", "model", "latin.txt", "--per", per, "--json", *EXACT).out  # no lone surrogates
    for how in (("--memory", "carried"), ("--memory", "reset")):
        expected = txl("score", "model", "text.txt", *how, *EXACT).out
        with Path("text.txt").open() as file:
            monkeypatch.setattr("sys.stdin", file)
            assert txl("score", "model", "-", *how, *EXACT).out == expected
        with pipe_of(Path("text.txt").read_bytes()) as path:
            assert txl("score", "model", path, *how, *EXACT).out == expected


@pytest.mark.parametrize("memory", ["carried", "reset"])
def test_a_file_that_is_gone_on_with_is_the_same_to_the_last_byte(txl: Txl, workbench: Path, memory: str) -> None:
    save_model("word")
    Path("some.txt").write_text(TEXT)
    for per in ("line", "word"):
        out = Path(f"{per}.tsv")
        command = ("score", "model", "some.txt", "--memory", memory, "--per", per, "--batch-size", "3", "--out", str(out))
        said, whole = txl(*command).err, out.read_bytes()
        n_row = len(whole.splitlines()) - 1  # without the names of columns
        assert re.search(rf"^{n_row} lines in .* written to '{out}'$", said, re.MULTILINE), said
        two_rows = len(b"".join(whole.splitlines(keepends=True)[:3]))  # one less than are read at first, and the names
        for n in (0, 1, two_rows, len(whole) // 2, len(whole)):
            out.write_bytes(whole[:n])
            assert txl(*command, "--resume").status == 0
            assert out.read_bytes() == whole
    refused = txl("score", "model", "some.txt", "--memory", memory, "--out", "line.tsv", "--resume")
    assert "'line.tsv' was begun with" in refused.complaint


@pytest.mark.parametrize("memory", ["carried", "reset"])
def test_characters_and_spans_are_sums_of_tokens(txl: Txl, workbench: Path, memory: str) -> None:
    save_model("bpe")
    text = "The cat\nran 日本 and"
    Path("some.txt").write_text(text)
    Path("spans.tsv").write_text("0 4\n4 7\n4 14\n12 14\n")
    how = ("some.txt", "--memory", memory, *EXACT)
    tokens, characters = (table(txl("score", "model", *how, "--per", per).out) for per in ("token", "char"))
    assert "".join(row["text"] for row in characters) == text.replace("\n", r"\n")
    assert total(characters) == pytest.approx(total(tokens), rel=1e-6)
    answer = txl("score", "model", *how, "--spans", "spans.tsv", "--out", "some.tsv")
    assert answer.err.splitlines()[-1].startswith("4 spans, ")
    spans = table(Path("some.tsv").read_text())
    assert [row["text"] for row in spans] == ["The ", "cat", r"cat\nran 日本", "日本"]
    of_cat = [row for row in tokens if row["text"] == " cat"]
    assert total(spans[1:2]) == pytest.approx(total(of_cat))
    Path("spans.tsv").write_text("0 4\n")
    for other in ("--per=line", "--spans=spans.tsv"):
        assert "'some.tsv' was begun with" in txl("score", "model", *how, other, "--out", "some.tsv", "--resume").complaint


def test_a_vocabulary_that_loses_places_scores_lines_and_tokens(txl: Txl, workbench: Path) -> None:
    tokenizer = WordTokenizer(["<unk>", "<eos>", "the", "cat"], moses="en")
    save(random_weights(TransformerXL(TransformerXLConfig(**{**TINY, "vocab_size": 4})).eval()), tokenizer, "moses")
    Path("some.txt").write_text("the cat\n")
    Path("spans.tsv").write_text("0 4\n")
    for option in ("--per word", "--per char", "--spans spans.tsv"):
        answer = txl("score", "moses", "some.txt", *option.split())
        assert answer.complaint.startswith("this tokenizer (kind word) does not keep the place of its tokens"), answer


def nats_alone(text: str) -> float:
    model, tokenizer = load("model")
    assert isinstance(model, TransformerXL)
    ids = np.concatenate([tokenizer.encode("\n"), tokenizer.encode(text)])
    return float(Decoder(model).score([ids])[0][1:].double().sum())


def test_pairs_count_ties_half(txl: Txl, workbench: Path) -> None:
    """Sentences of the same tokens are equally probable, whatever is read beside them."""
    save_model("word")
    pairs = [("The cat sat.", "A dog ran"), ("A dog ran", "The cat sat."), ("the unknown", "the strange"), ("the", "end ran")]
    expected = [0.5 if n == 2 else float(nats_alone(good) < nats_alone(bad)) for n, (good, bad) in enumerate(pairs)]
    beside = [{"sentence_good": good, "sentence_bad": bad, "sentence": "The"} for good, bad in pairs]
    Path("beside.jsonl").write_text("".join(json.dumps(each) + "\n" for each in beside))
    Path("named.tsv").write_text("bad\tx\tgood\n" + "".join(f"{bad}\t0\t{good}\n" for good, bad in pairs))
    Path("plain.tsv").write_text("".join(f"{good}\t{bad}\n" for good, bad in pairs))
    Path("plain.csv").write_text("".join(f"{good},{bad}\n" for good, bad in pairs))
    for name in ("beside.jsonl", "named.tsv", "plain.tsv", "plain.csv"):
        answer = txl("score", "model", name, "--pairs", "--batch-size", "2", "--out", f"{name}.out", *EXACT)
        assert answer.out.startswith(f"accuracy {sum(expected) / 4:.4f} (4 pairs, 1 tie counted half, fp32"), answer
        rows = table(Path(f"{name}.out").read_text())
        assert [float(row["credit"]) for row in rows] == expected
        assert [(row["good"], row["bad"]) for row in rows] == pairs
        assert float(rows[0]["nats_good"]) == pytest.approx(nats_alone(pairs[0][0]), rel=1e-5)
    assert json.loads(txl("score", "model", "plain.tsv", "--pairs", "--json", *EXACT).out)["ties"] == 1
    with pipe_of(Path("plain.tsv").read_bytes()) as path:
        assert json.loads(txl("score", "model", path, "--pairs", "--json", *EXACT).out)["ties"] == 1


def test_blimp_is_the_mean_of_its_files(txl: Txl, workbench: Path) -> None:
    save_model("word")
    Path("blimp/data").mkdir(parents=True)
    right, wrong = sorted(["The cat sat.", "A dog ran"], key=nats_alone)
    for name, pairs in {"one": [(right, wrong)] * 3, "two": [(wrong, right)]}.items():
        objects = [{"sentence_good": good, "sentence_bad": bad, "pairID": "0"} for good, bad in pairs]
        Path(f"blimp/data/{name}.jsonl").write_text("".join(json.dumps(each) + "\n" for each in objects))
    found = json.loads(txl("score", "model", "blimp", "--data", "blimp", "--json").out)
    assert (found["accuracy"], found["n"], found["files"]) == (0.5, 4, {"one": 1.0, "two": 0.0})
    shown = txl("score", "model", "blimp", "--data", "blimp/data").out
    assert shown.startswith("file  accuracy\none     1.0000\ntwo     0.0000\naccuracy 0.5000 (mean of 2 files, 4 pairs")


def test_choices_are_ranked_as_whole_texts(txl: Txl, workbench: Path) -> None:
    save_model("word")
    texts = [["The cat sat", "The dog sat", "The end sat"], ["A dog ran", "A dog The"], ["A A ran", "A A ran"]]
    nats = [[nats_alone(text) for text in each] for each in texts]
    best = [each.index(min(each)) for each in nats]
    Path("gaps.tsv").write_text("The _ sat\tcat\tdog\tend\nA dog\tran\tThe\nA _ ran\tA\tA\n")
    gaps = [
        {"text": "The _ sat", "choices": ["cat", "dog", "end"], "answer": best[0]},
        {"text": "A", "question": "dog _", "options": ["ran", "The"], "label": "AB"[1 - best[1]]},
        {"text": "A _ ran", "choices": ["A", "A"], "answer": 1.0},
    ]
    Path("gaps.jsonl").write_text("".join(json.dumps(each) + "\n" for each in gaps[::2]))
    Path("race.jsonl").write_text(json.dumps(gaps[1]) + "\n")
    answer = txl("score", "model", "gaps.tsv", "--choices", "--batch-size", "2", *EXACT)
    assert "\nno accuracy (7 choices, 0 answers, fp32, " in answer.err, answer  # after the warning of "dog"
    rows = table(answer.out)
    assert [row["text"] for row in rows] == [text for each in texts for text in each]
    assert [float(row["nats"]) for row in rows] == pytest.approx([x for each in nats for x in each], rel=1e-5)
    ranks = [1 + sum(y < x for y in each) for each in nats[:2] for x in each] + [1, 1]
    assert [(row["file"], int(row["item"]), int(row["choice"])) for row in rows] == [
        ("gaps", i, k) for i, each in enumerate(texts, 1) for k in range(len(each))
    ]
    assert [int(row["rank"]) for row in rows] == ranks
    assert {row["credit"] for row in rows} == {""}
    answer = txl("score", "model", "gaps.jsonl", "--choices", "--json", "--out", "found.jsonl", *EXACT)
    figures = json.loads(answer.out)
    assert (figures["accuracy"], figures["choices"], figures["answers"]) == (0.75, 5, 2)
    found = [json.loads(line) for line in Path("found.jsonl").read_text().splitlines()]
    assert [row["credit"] for row in found] == [*(1.0 if k == best[0] else None for k in range(3)), None, 0.5]
    assert txl("score", "model", "race.jsonl", "--choices", *EXACT).err.startswith("accuracy 0.0000 (2 choices, 1 answer, fp32")
    Path("race.jsonl").write_text(json.dumps({**gaps[1], "text": "The _ end ."}))  # only the question has a gap
    rows = table(txl("score", "model", "race.jsonl", "--choices", *EXACT).out)
    assert [row["text"] for row in rows] == ["The _ end . dog ran", "The _ end . dog The"]
    whole = Path("found.jsonl").read_bytes()
    Path("found.jsonl").write_bytes(whole[: whole.index(b"\n") + 9])
    assert txl("score", "model", "gaps.jsonl", "--choices", "--out", "found.jsonl", "--resume", *EXACT).status == 0
    assert Path("found.jsonl").read_bytes() == whole


def test_what_a_vocabulary_lacks_is_counted_once_for_all_texts(txl: Txl, workbench: Path) -> None:
    save_model("word")
    (workbench / "choices.tsv").write_text("The cat _ .\tzebra\tyak\nThe <unk> _\tran\tsat.\n")
    answer = txl("score", "model", "choices.tsv", "--choices")
    warnings = [line for line in answer.err.splitlines() if line.startswith("warning")]
    assert warnings == ["warning: the vocabulary lacks 4 words of the text; the model reads <unk> instead"]  # twice "."
    assert [row["rank"] for row in table(answer.out)][:2] == ["1", "1"]
    (workbench / "lines.txt").write_text("The cat\nThe yak\n<unk> ran\n")
    for options in ((), ("--memory", "reset"), ("--per", "token")):
        assert txl("score", "model", "lines.txt", *options).err.count("lacks 1 word of the text") == 1, options
    (workbench / "lines.txt").write_text("The cat\n<unk> ran\n")
    assert "lacks" not in txl("score", "model", "lines.txt").err


def test_nats_of_counts_stand_beside_lines(txl: Txl, workbench: Path) -> None:
    """Of the same tokens, by how often they stand in the run's training text."""
    Path("some.txt").write_text("the end\n\nwords")
    counts = np.bincount(open_run("run").text(split="train").ids, minlength=256) + 1.0
    costs = -np.log(counts / counts.sum())
    for memory, first in (("reset", 0), ("carried", 1)):
        rows = table(txl("score", "run", "some.txt", "--unigram", "--memory", memory).out)
        expected = [
            costs[list(line.encode())[first if i == 0 else 0 :]].sum() for i, line in enumerate(["the end\n", "\n", "words"])
        ]
        assert [float(row["nats_unigram"]) for row in rows] == pytest.approx(expected)
        assert list(rows[0]) == ["line", "nats", "bits", "tokens", "nats_unigram", "text"]


def test_an_xlnet_scores_each_text_by_itself(txl: Txl, workbench: Path) -> None:
    tokenizer = train_tokenizer(TokenizerConfig(kind="unigram", vocab_size=60), [TEXT * 5])
    model = tiny_xlnet(vocab_size=tokenizer.vocab_size)
    save(model, tokenizer, "model")
    lines = ["The cat sat.\n", "\n", "ran to the end"]
    Path("some.txt").write_text("".join(lines))
    nats = [each.sum() for each in gap_nats(model, map(tokenizer.encode, lines), tokenizer, Reading())]
    rows = table(txl("score", "model", "some.txt", *EXACT).out)
    assert [float(row["nats"]) for row in rows if row["nats"]] == pytest.approx([x for x in nats if x], rel=1e-4)
    of_words = table(txl("score", "model", "some.txt", "--per", "word", *EXACT).out)
    assert total(of_words) == pytest.approx(sum(nats), rel=1e-5)
    assert all(row["nats"] == row["nats_prefix"] for row in of_words)
    good, bad = (
        float(next(gap_nats(model, [tokenizer.encode(text)], tokenizer, Reading())).sum()) for text in ("The cat", "A dog")
    )
    Path("blimp").mkdir()
    Path("blimp/one.jsonl").write_text(json.dumps({"sentence_good": "The cat", "sentence_bad": "A dog"}))
    found = json.loads(txl("score", "model", "blimp", "--data", "blimp", "--json", "--out", "pairs.jsonl", *EXACT).out)
    assert found["accuracy"] == float(good < bad)
    row = json.loads(Path("pairs.jsonl").read_text())
    assert [row["nats_good"], row["nats_bad"]] == pytest.approx([good, bad], rel=1e-5)
    for command, complaint in {
        "some.txt --memory carried": "--memory carried needs a model that reads on, and 'model', an XLNet, fills gaps; leave",
        "lambada": "lambada needs a model that reads on, and 'model', an XLNet, fills gaps; leave it out",
        "some.txt --precision int8": "precision int8 is for models that read from left to right",
    }.items():
        assert txl("score", "model", *command.split()).complaint.startswith(complaint)


def test_lambada_asks_for_the_last_word(txl: Txl, workbench: Path, tmp_path: Path) -> None:
    """With the space before it; all its tokens must be the likeliest ones."""
    save_model("bpe")
    model, tokenizer = load("model")
    assert isinstance(model, TransformerXL)
    texts = ["A dog\nand the cat", "the end", "to the dog and ran"]
    (tmp_path / "data/lambada").mkdir(parents=True)
    content = "".join(json.dumps({"sentence": "A cat", "text": text}) + "\n" for text in texts)
    (tmp_path / "data/lambada/test.jsonl.xz").write_bytes(lzma.compress(content.encode()))
    found = json.loads(txl("score", "model", "lambada", "--json", "--out", "words.jsonl", *EXACT).out)
    expected, right = [], []
    for text in texts:
        ids = np.concatenate([tokenizer.encode("\n"), tokenizer.encode(text)])
        n = len(tokenizer.encode(text)) - len(tokenizer.encode(text.rpartition(" ")[0]))
        expected.append(float(Decoder(model).score([ids])[0][-n:].double().sum()))
        decoder, likeliest = Decoder(model), []
        for token in ids[:-1].tolist():
            likeliest.append(int(decoder.feed([[token]])[0].argmax()))
        right.append(likeliest[-n:] == ids[-n:].tolist())
    assert found["ppl"] == pytest.approx(math.exp(sum(expected) / 3), rel=1e-4)
    assert found["accuracy"] == sum(right) / 3
    rows = [json.loads(row) for row in Path("words.jsonl").read_text().splitlines()]
    assert [row["text"] for row in rows] == ["cat", "end", "ran"]
    assert [row["nats"] for row in rows] == pytest.approx(expected, rel=1e-4)


def test_mistakes_take_one_line(txl: Txl, workbench: Path) -> None:
    save_model("char")
    Path("empty.txt").write_text("")
    Path("three.tsv").write_text("a\tb\tc\n")
    Path("one.tsv").write_text("a\n")
    Path("gaps.tsv").write_text("A _ ran\tdog\tcat\nA _ and a _ ran\tdog\tcat\n")
    Path("head.tsv").write_text("Text\tchoice1\tchoice2\nA _ ran\tdog\tcat\n")
    Path("latin.txt").write_bytes(b"The cat\nsat \xe9")
    Path("strange.txt").write_text("The cat\nz\n")
    Path("gap.tsv").write_text("A\tdog\nA\n")
    Path("spans.tsv").write_text("0\t3\n4\t99\n")
    Path("answer.jsonl").write_text('{"text": "The _", "choices": ["cat", "dog"], "answer": "C"}\n')
    Path("qqp.jsonl").write_text('{"sentence1": "A dog", "sentence2": "The cat"}\n')
    which = "'{}': which sentence is the better one? its columns are"
    for command, complaint in {
        "empty.txt": "'empty.txt' has no text; give another",
        "one.tsv --spans empty.txt": "'empty.txt' has no spans; give another",
        "latin.txt": "'latin.txt': byte 12 (0xe9) is not UTF-8; convert it",
        "latin.txt --memory reset": "'latin.txt': byte 12 (0xe9) is not UTF-8; convert it",
        "strange.txt --memory reset": "'strange.txt', from byte 8 on: character z (U+007A) is not in the tokenizer's",
        "empty.txt --pairs": "'empty.txt' has no text; give another",
        "three.tsv --pairs": f"{which.format('three.tsv')} 'a', 'b', 'c'; give two sentences a line, the better first",
        "one.tsv --pairs": "'one.tsv': which sentence is the better one? it has one column; give two sentences a line",
        "qqp.jsonl --pairs": f"{which.format('qqp.jsonl')} 'sentence1', 'sentence2'",
        "ids.npy": "'ids.npy' is an array of ids, not lines of text; txl eval --file scores it",
        ". --pairs": "'.' is a directory, pipe or device; give a file",
        "gap.tsv --pairs": "'gap.tsv' line 2: it has 1 column, but line 1 has 2; is a tab missing?",
        "blimp --data nowhere": "blimp: no .jsonl files in 'nowhere'; get them from https://github.com/",
        "text.txt --data x": "--data is for blimp and lambada; give one of these names instead of 'text.txt'",
        "three.tsv --pairs --per word": "--per is for the lines of a text; leave it out with --pairs",
        "one.tsv --spans spans.tsv --per word": "--spans says itself what has a row; leave out --per",
        "one.tsv --spans spans.tsv": "span 1 (0 to 3) reaches beyond the text's 2 characters",
        "one.tsv --spans one.tsv": "'one.tsv' line 1: 'a' is no span; write two numbers, start and end",
        "blimp --pairs": "'blimp': No such file",
        "one.tsv --pairs --choices": "--pairs and --choices: give one of them",
        "one.tsv --choices": "'one.tsv' line 1: it has 0 choices, not two or more",
        "gap.tsv --choices": "'gap.tsv' line 1: it has 1 choice, not two or more",
        "gaps.tsv --choices": "'gaps.tsv' line 2: it has 2 gaps _; give one",
        "head.tsv --choices": "'head.tsv' line 1 holds names of columns; leave it out",
        "empty.txt --choices": "'empty.txt' has no text; give another",
        "answer.jsonl --choices": "'answer.jsonl' line 1: label 'C' is none of its 2 choices; they are 0 to 1, or A to B",
        "one.tsv --unigram": "'model' is a model without a training text, whose tokens --unigram counts; give a run",
        "one.tsv --unigram --per word": "--unigram is for lines; leave out --per and --spans",
    }.items():
        answer = txl("score", "model", *command.split(), "--out", "rows.tsv")
        assert answer.complaint.startswith(complaint), (command, answer)
        left = list(workbench.glob("rows.tsv*"))
        assert not left or Path("rows.tsv").stat().st_size  # an empty one, or its origin alone, is of no use
        for path in workbench.glob("rows.tsv*"):
            path.unlink()
