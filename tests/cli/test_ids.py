"""Commands on files of ids, and on runs that were trained on them."""

import json
from pathlib import Path

import numpy as np
import pytest

from tests.cli.conftest import Txl

SMALL = (
    "model.n_layer=1 model.d_model=8 model.d_inner=8 model.mem_len=4 train.batch_size=2 train.tgt_len=4 train.max_steps=2 "
    "train.sample_tokens=4"
)
OVERRIDES = [f"--set={setting}" for setting in SMALL.split()]


@pytest.fixture
def ids(workbench: Path) -> Path:
    np.save(workbench / "ids.npy", np.random.default_rng(0).integers(0, 30, 400).astype(np.uint8))
    (workbench / "few.jsonl").write_text('[1, 2, 3]\n{"ids": [29, 0]}\n')
    return workbench / "ids.npy"


@pytest.fixture
def run(txl: Txl, ids: Path) -> str:
    answer = txl("train", "ids.npy", *OVERRIDES)
    assert answer.status == 0, answer.err
    assert f"{ids} holds ids, which are read as they are (tokenizer.kind=ids)" in answer.err.splitlines()
    return "runs/ids"


@pytest.mark.usefixtures("nothing_drawn")
def test_scores_count_ids(txl: Txl, run: str) -> None:
    answer = txl("eval", run, "--compare-memory")
    assert "bits per id\n" in answer.out and "without memory" in answer.out and "bits per id (" in answer.out
    assert "character" not in answer.out and "byte" not in answer.out
    score = json.loads(txl("eval", run, "--file", "few.jsonl", "--json", "--per-token", "nats.tsv").out)
    assert (score["tokens"], score["n_characters"], score["n_bytes"], score["bpb"]) == (4, 4, None, None)
    rows = [line.split("\t") for line in Path("nats.tsv").read_text().splitlines()[1:]]
    assert [row[1] for row in rows] == ["2", "3", "29", "0"]
    assert [json.loads(row[3]) for row in rows] == ["2 ", "3 ", "29 ", "0 "]
    assert json.loads(txl("eval", run, "--corpus", "ids.npy", "--split", "valid", "--json").out)["tokens"] > 4
    answer = txl("explain", run, "ids.npy", "--most", "50", "--out", "page")
    assert answer.status == 0
    explained = json.loads(txl("explain", run, "few.jsonl", "--out", "page2", "--json").out)
    assert explained["n_characters"] == explained["tokens"] == 4
    assert json.loads(txl("explain", run, "ids.npy", "--most", "9", "--out", "page3", "--json").out)["n_characters"] == 8


def test_a_text_is_refused_by_a_run_on_ids_and_ids_by_one_on_text(txl: Txl, run: str) -> None:
    assert "text.txt': line 1 is not JSON" in txl("eval", run, "--file", "text.txt").complaint
    assert "has no ids, as tokenizer.kind=ids reads" in txl("eval", run, "--corpus", "text.txt").complaint
    assert (
        "ids.npy' holds ids, and this model's tokenizer (kind byte) reads text"
        in txl("eval", "run", "--file", "ids.npy").complaint
    )
    assert "ids.npy' holds ids, and this tokenizer reads text" in txl("eval", "run", "--corpus", "ids.npy").complaint
    np.save("more.npy", np.array([3, 30]))
    assert "more.npy': [1] is 30, and ids are from 0 to 29 here" in txl("eval", run, "--file", "more.npy").complaint


def test_numbers_are_written_on(txl: Txl, run: str) -> None:
    answer = txl("generate", run, "--prompt", "12 7\n9", "--tokens", "5", "--seed", "1")
    numbers = answer.out.split()
    assert numbers[:3] == ["12", "7", "9"] and len(numbers) == 8 and all(0 <= int(number) < 30 for number in numbers)
    Path("prompt.jsonl").write_text("[12, 7]\n[9]\n")
    of_file = txl("generate", run, "--prompt-file", "prompt.jsonl", "--tokens", "5", "--seed", "1", "--echo")
    assert of_file.out == answer.out
    assert "'30' at character 3 is no id of this vocabulary (0 … 29)" in txl("generate", run, "--prompt", "12 30").complaint
    assert txl("generate", run, "--tokens", "3", "--stop-token", "7", "-n", "2", "--json").status == 0


def test_a_corpus_of_ids_is_prepared_planned_and_ablated(txl: Txl, ids: Path) -> None:
    prepared = json.loads(txl("corpus", "prepare", "ids.npy", "--json").out)
    assert (prepared["vocab_size"], prepared["splits"]["train"]["documents"]) == (30, 1)
    assert "with a vocabulary of 99 (ids)" in txl("corpus", "prepare", "ids.npy", "--vocab-size", "99").out
    told = txl("corpus", "prepare", "ids.npy", "--tokenizer", "byte").complaint
    assert told == f"tokenizer.kind (byte) reads text, and '{ids}' holds ids; leave it out, or use ids"
    assert "how many ids 'ids.npy' has is known only" in txl("plan", "tiny.toml", "--set=data.corpus=ids.npy").complaint
    sized = txl("plan", "tiny.toml", "--set=data.corpus=ids.npy", "--set=tokenizer.vocab_size=30").out
    assert "ids, as set" in " ".join(sized.split())
    answer = txl(
        "ablate", "tiny.toml", "--corpus", "ids.npy", "--steps", "2", "--recurrence", "yes", "--out", "ablation", "--quiet"
    )
    assert answer.status == 0, answer.err
    assert json.loads(next(Path("ablation").rglob("config.json")).read_text())["tokenizer"]["kind"] == "ids"


def test_a_kind_that_is_told_and_cannot_read_ids(txl: Txl, ids: Path) -> None:
    answer = txl("train", "tiny.toml", "--corpus", "ids.npy", "--out", "new", "--set", "tokenizer.kind=word")
    assert answer.complaint == f"tokenizer.kind (word) reads text, and '{ids}' holds ids; leave it out, or use ids"
    assert not Path("new").exists()
    np.save("bad.npy", np.array([1.5, 2]))
    assert "bad.npy' holds float64, not integers" in txl("train", "bad.npy", *OVERRIDES).err


def test_what_is_written_goes_to_a_file(txl: Txl, run: str) -> None:
    how = ("generate", run, "--prompt", "12 7 9", "--tokens", "5", "--seed", "1")
    printed = [int(number) for number in txl(*how).out.split()]
    answer = txl(*how, "--out", "one.npy")
    assert (answer.out, np.load("one.npy").tolist()) == ("", printed)
    assert txl("eval", run, "--file", "one.npy").status == 0
    lines = [json.loads(line) for line in txl(*how, "-n", "2", "--json").out.splitlines()]
    texts = {each["sample"]: [int(number) for number in each["text"].split()] for each in lines}
    assert texts[0] == printed[3:] and len(texts[1]) == 5
    assert "--out 'two.npy' holds one text; print several with --json" in txl(*how, "-n2", "--out=two.npy").complaint
    assert "--out 'one.mid' must end in .npy" in txl(*how, "--out", "one.mid").complaint
    assert "--out 'no/one.npy': the directory" in txl(*how, "--out", "no/one.npy").complaint
    assert "leave --interactive, --json and --stream out" in txl(*how, "--json", "--out", "one.npy").complaint
