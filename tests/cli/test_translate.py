"""`txl translate`, and a run that learns pairs: what docs/translation.md shows, on a tiny model and a handful of pairs."""

import io
import json
import lzma
import re
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.cli.conftest import Txl, train_once
from tests.training.helpers import entries as log_of
from transformer_xl.checkpoint.open_run import open_run
from transformer_xl.generation import translate as translating
from transformer_xl.generation.decoder import Decoder
from transformer_xl.generation.translate import against_references, read_sources, translations

WORDS = {"red": "rot", "blue": "blau", "dog": "Hund", "cat": "Katze", "runs": "rennt", "sits": "sitzt"}
SETTINGS = """
    model.d_model=16 model.d_head=8 model.d_inner=24 model.dropout=0.0 model.mem_len=64 data.documents=lines
    data.shuffle=documents
    optim.lr=0.02 train.batch_size=8 train.tgt_len=24 train.max_steps=30 train.loss=answer train.label_smoothing=0.1
    train.reset_at_documents=true train.average=ema train.average_decay=0.9 train.eval_interval=15 train.checkpoint_interval=15
    train.sample_tokens=0 eval.max_tokens=none
"""
SETS = [f"--set={setting}" for setting in SETTINGS.split()]


@pytest.fixture(scope="module")
def learned(home: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run `learned`, pairs of sentences as `pairs/train.tsv` and `pairs/valid.tsv`, sources and references, eight each."""
    order = np.random.default_rng(0)
    lines = [f"{' '.join(one)}\t{' '.join(map(WORDS.__getitem__, one))}\n" for one in order.choice(list(WORDS), (105, 3))]
    place = tmp_path_factory.mktemp("pairs")
    (place / "pairs").mkdir()
    (place / "pairs" / "train.tsv").write_text("".join(lines[:100]))
    (place / "pairs" / "valid.tsv").write_text("".join(lines[100:]))
    (place / "sources.txt").write_text("".join(f"{line.split(chr(9))[0]}\n" for line in lines[100:]) + "\n \nred\n")
    (place / "references.txt").write_text("".join(line.split("\t")[1] for line in lines[100:]) + "\n\nrot\n")
    train_once(home, "tiny.toml", str(place / "pairs"), place / "learned", *SETS)
    return place


@pytest.fixture
def run(learned: Path, workbench: Path) -> Path:
    """All of it in the working directory."""
    shutil.copytree(learned, workbench, dirs_exist_ok=True)
    return Path("learned")


@pytest.fixture
def short_targets(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that has hardly learned writes on until it may not; that takes less time here."""
    monkeypatch.setattr(translating, "_LONGER", 0)
    monkeypatch.setattr(translating, "_MORE", 8)


@pytest.mark.usefixtures("short_targets")
def test_own_pairs_are_learned_scored_and_translated(txl: Txl, run: Path) -> None:
    entries = [each for each in log_of(run) if each["kind"] in ("valid", "final")]
    n_answer = sum(len(line.split("\t")[1]) for line in Path("pairs/valid.tsv").read_text().splitlines(keepends=True))
    assert {each["scored"] for each in entries} == {n_answer} and entries[-1]["loss"] < entries[0]["loss"]
    exact = ("--checkpoint", "last", "--precision", "fp32")
    score = json.loads(txl("eval", str(run), "--split", "valid", "--compare-memory", "--json", *exact).out)
    assert score["answer_tokens"] == n_answer
    assert score["loss"] == pytest.approx(entries[-1]["loss"], abs=1e-4)
    assert score["without_memory"]["loss"] == pytest.approx(entries[-1]["loss_without_memory"], abs=1e-4)
    of_file = json.loads(txl("eval", str(run), "--file", "pairs/valid.tsv", "--json", *exact).out)
    assert of_file["nats"] == pytest.approx(score["nats"]) and of_file["without_memory"] is None
    said = txl("eval", str(run), "--split", "valid", "--compare-memory", *exact).out
    assert f"each document by itself, memory of 64, fp32: {n_answer:,} answer tokens" in said
    assert re.search(r"^without memory [0-9.]+ nats per answer token, with it [0-9.]+: memory is worth ", said, re.M)

    answer = txl("translate", str(run), "--file", "sources.txt", "--precision", "fp32", "--batch-size", "3")
    assert answer.status == 0, answer
    found = answer.out.split("\n")[:-1]
    assert len(found) == 8 and found[5:7] == ["", ""] and all(found[:5])
    objects = txl("translate", str(run), "--file", "sources.txt", "--precision", "fp32", "--batch-size", "3", "--json").out
    assert [each["text"] for each in map(json.loads, objects.splitlines())] == found


def test_a_source_is_read_once_and_its_translation_is_what_beams_find(
    txl: Txl, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A line end ends it, and it has no tab; long sources come first, in the order that was given."""
    opened, n_read = open_run(run), []
    with torch.no_grad():
        opened.model.softmax.bias[ord("\t")] += 20  # the likeliest of all
    advance = Decoder.advance
    monkeypatch.setattr(Decoder, "advance", lambda self, row, ids: n_read.append(len(ids)) or advance(self, row, ids))
    lines = [b"red dog", b"", b"blue cat sits\r", b"cat"]
    sources = list(read_sources(lines, "here", opened.tokenizer))
    assert [bytes(source.ids.tolist()) for source in sources] == [b"red dog\t", b"\t", b"blue cat sits\t", b"cat\t"]
    found = list(translations(Decoder(opened.model, batch_size=8), opened.tokenizer, sources, beams=2))
    assert n_read == [14, 8, 4]
    assert [each.source for each in found] == ["red dog", "", "blue cat sits", "cat"]
    for each in found:
        assert "\t" not in each.text and "\n" not in each.text
    greedy = list(translations(Decoder(opened.model, batch_size=1), opened.tokenizer, sources, beams=1))
    decoder = Decoder(opened.model)
    scores, expected = decoder.read([sources[0].ids]), bytearray()
    while len(expected) < 36:
        logits = scores.full()[0]
        logits[ord("\t")] = -np.inf
        if (token := int(logits.argmax())) == ord("\n"):
            break
        expected.append(token)
        scores = decoder.step([token])
    assert greedy[0].text == expected.decode("utf-8", "replace").strip()
    assert greedy[0].is_whole == (len(expected) < 36)
    (short,) = translations(Decoder(opened.model, batch_size=1), opened.tokenizer, sources[:1], beams=1, reach=3)
    assert not short.is_whole and short.text == expected[:3].decode("utf-8", "replace").strip()
    with torch.no_grad():
        opened.model.softmax.bias[ord("\n")] += 40
    (ended,) = translations(Decoder(opened.model, batch_size=2), opened.tokenizer, sources[:1], beams=2)
    assert (ended.text, ended.is_whole) == ("", True)


@pytest.mark.usefixtures("short_targets")
def test_a_file_is_gone_on_with_and_compared_with_references(txl: Txl, run: Path) -> None:
    Path("sources.txt.xz").write_bytes(lzma.compress(Path("sources.txt").read_bytes()))
    command = ("translate", str(run), "--file", "sources.txt.xz", "--precision", "fp32", "--batch-size", "2", "--out")
    assert txl(*command, "whole.txt").err.splitlines()[-1].endswith("written to 'whole.txt'")
    whole = Path("whole.txt").read_bytes()
    assert txl(*command, "part.txt").status == 0
    Path("part.txt").write_bytes(whole[: len(whole) // 2])
    assert txl(*command, "part.txt", "--resume").status == 0
    assert Path("part.txt").read_bytes() == whole
    changed = txl(*command, "part.txt", "--resume", "--beams", "2").complaint
    assert "--beams 4" in changed and "--beams 2" in changed
    pytest.importorskip("sacrebleu", reason="the extra 'translation' is not installed")
    answer = txl(*command, "part.txt", "--resume", "--reference", "references.txt")
    bleu, chrf = answer.out.splitlines()
    assert bleu.startswith("BLEU ") and "tok:13a|smooth:exp|version:" in bleu and chrf.startswith("chrF ")
    lines = whole.decode().split("\n")[:-1]
    expected = against_references(lines, Path("references.txt").read_text().split("\n")[:-1])
    assert bleu == f"BLEU {expected['bleu']:.2f}  {expected['bleu_signature']}" and expected["sentences"] == 8
    assert chrf == f"chrF {expected['chrf']:.2f}  {expected['chrf_signature']}"
    objects = ("found.jsonl", "--reference", "references.txt", "--json")
    assert json.loads(txl(*command, *objects).out) == {"run": str(run), **expected}
    assert json.loads(txl(*command, *objects, "--resume").out) == {"run": str(run), **expected}


@pytest.mark.usefixtures("short_targets")
def test_standard_input_is_translated_line_by_line(txl: Txl, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("two.txt").write_text("red dog\nblue cat\n")
    with Path("two.txt").open() as given:
        monkeypatch.setattr(sys, "stdin", given)
        typed = txl("translate", str(run), "--precision", "fp32")
    assert typed.status == 0 and typed.out == txl("translate", str(run), "--file", "two.txt", "--precision", "fp32").out
    monkeypatch.setattr(sys, "stdin", None)
    assert txl("translate", str(run)).complaint == "standard input is closed; give --file"
    monkeypatch.setattr(sys, "stdin", io.StringIO())


def test_what_cannot_be_translated_is_refused(txl: Txl, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("tab.txt").write_text("fine\nred\tdog\n")
    Path("latin.txt").write_bytes(b"r\xe9d\n")
    Path("short.txt").write_text("rot\n")
    monkeypatch.setattr("transformer_xl.cli.translate.find_spec", lambda name: True)
    for options, complaint in {
        "translate learned --file tab.txt": "'tab.txt', line 2 has a tab, where its translation would begin",
        "translate learned --file latin.txt": "'latin.txt', line 1: byte 1 (0xe9) is not UTF-8; convert it (Latin-1: ",
        "translate learned --file missing.txt": "'missing.txt': No such file",
        "translate learned --file sources.txt --reference short.txt": "'sources.txt' has 8 and 'short.txt' 1 lines",
        "eval learned --dynamic sgd": "--dynamic is for streams; 'learned' has learned answers, and reads documents one by one",
        "eval learned --temperature 1.1": "--temperature is for streams; 'learned' has",
    }.items():
        assert txl(*options.split()).complaint.startswith(complaint), options
    monkeypatch.setattr("transformer_xl.cli.translate.find_spec", lambda name: None)
    refused = txl("translate", "learned", "--file", "sources.txt", "--reference", "references.txt").complaint
    assert refused == "--reference needs the sacrebleu package: pip install sacrebleu"


def test_answers_need_a_tab(txl: Txl, run: Path) -> None:
    Path("plain.txt").write_text("no question here\n" * 200)
    train = ("train", "tiny.toml", *SETS, "--out", "none", "--quiet", "--corpus")
    assert "no line of the training split has a tab, after which answers begin" in txl(*train, "plain.txt").complaint
    refused = txl(*train, "pairs", "--set", "tokenizer.kind=word").complaint
    assert refused == "a tokenizer of kind word has no id for a tab, after which answers begin; use bpe"
    assert not Path("none").exists()


@pytest.mark.usefixtures("short_targets")
def test_what_may_not_be_meant_is_warned_of(txl: Txl, run: Path) -> None:
    Path("one.txt").write_text("red dog runs\n")
    short = txl("translate", str(run), "--file", "one.txt", "--mem-len", "4")
    assert short.status == 0
    assert "line 1 has 13 tokens, more than the memory (4), so its beginning is forgotten; raise --mem-len" in short.err
    stream = txl("translate", "run", "--file", "one.txt")
    assert stream.status == 0 and "'run' was not trained on answers alone (train.loss=answer)" in stream.err
