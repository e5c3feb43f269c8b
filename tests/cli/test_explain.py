"""`txl explain`: a page from a run and a file, and one line for everything that cannot be explained."""

import json
import shutil

import pytest

from tests.explain.test_page import stored
from transformer_xl.checkpoint.run_directory import load
from transformer_xl.explain.attribution import attribute


def test_a_file_is_explained(txl, workbench):
    answer = txl("explain", "run", "text.txt", "--out", "out", "--most", "150")
    assert answer.status == 0, answer.err
    assert sorted(path.name for path in (workbench / "out").iterdir()) == [
        "along.png",
        "attention.png",
        "explain.json",
        "gain.png",
        "index.html",
    ]
    assert "only the first 150 of" in answer.err and "--most" in answer.err
    assert answer.out.startswith("149 tokens of text.txt: ") and "memory is worth" in answer.out
    assert answer.out.splitlines()[-1] == "open out/index.html"
    about, _ = stored((workbench / "out" / "index.html").read_text(encoding="utf-8"))
    assert about["name"] == "text.txt" and about["run"] == "run" and about["left_out"] > 0
    assert about["totals"]["tokens"] == 149
    for name in ("along.png", "attention.png", "gain.png"):
        assert (workbench / "out" / name).read_bytes().startswith(b"\x89PNG")


@pytest.mark.usefixtures("nothing_drawn")
def test_totals_are_those_of_eval(txl, workbench):
    (workbench / "short.txt").write_text((workbench / "text.txt").read_text()[:250])
    figures = json.loads(txl("explain", "run", "short.txt", "--json", "--precision", "fp32").out)
    assert (workbench / "short.txt.explained" / "index.html").is_file()
    expected = json.loads(
        txl("eval", "run", "--file", "short.txt", "--json", "--compare-memory", "--precision", "fp32", "--batch-size", "1").out
    )
    assert figures["tokens"] == expected["tokens"] and figures["n_characters"] == expected["n_characters"]
    assert figures["nats"] == pytest.approx(expected["nats"], rel=1e-5)
    assert figures["nats_without_memory"] == pytest.approx(expected["without_memory"]["nats"], rel=1e-5)
    assert figures["bpc"] == pytest.approx(expected["bpc"], rel=1e-5)
    assert figures["memory_is_worth_bpc"] == pytest.approx(expected["without_memory"]["bpc"] - expected["bpc"], abs=1e-5)


@pytest.mark.usefixtures("nothing_drawn")
def test_options_say_how_it_is_read(txl, workbench):
    short = workbench / "short.txt"
    short.write_text((workbench / "text.txt").read_text()[:80])
    answer = txl("explain", "run", "short.txt", "--tgt-len", "5", "--mem-len", "9", "--top", "3", "--out", "out")
    assert answer.status == 0, answer.err
    about, _ = stored((workbench / "out" / "index.html").read_text(encoding="utf-8"))
    assert (about["tgt_len"], about["mem_len"], about["top"]) == (5, 9, 3)
    answer = txl("explain", "run", "short.txt", "--mem-len", "0", "--out", "out")
    assert "nothing to compare with" in answer.out
    assert not stored((workbench / "out" / "index.html").read_text(encoding="utf-8"))[0]["remembers"]  # the page is replaced
    assert not (workbench / "out" / "gain.png").exists()  # of the explanation before


@pytest.mark.usefixtures("nothing_drawn")
def test_a_token_is_attributed_in_full(txl, workbench):
    asked = ("--tgt-len", "8", "--token", "21", "--contrast", "o", "--attributed", "1", "--precision", "fp32", "--out", "out")
    (workbench / "short.txt").write_text((workbench / "text.txt").read_text()[:250])
    answer = txl("explain", "run", "short.txt", *asked, "--json")
    assert answer.status == 0, answer.err
    found = json.loads(answer.out)["attribution"]
    model, tokenizer = load(workbench / "run")
    ids, (contrast,) = tokenizer.encode((workbench / "short.txt").read_text(encoding="utf-8")), tokenizer.encode("o")
    for method in ("leave-out", "gradient"):
        expected = attribute(model, ids, 20, contrast=int(contrast), method=method, tgt_len=8)
        assert found["tokens"] == (expected.places + 1).tolist()
        assert found[method] == pytest.approx(expected.nats.tolist(), abs=1e-6)
    assert (found["token"], found["contrast"], found["log_p"]) == (21, int(contrast), pytest.approx(expected.log_p, abs=1e-6))
    _, arrays = stored((workbench / "out" / "index.html").read_text(encoding="utf-8"))
    assert 20 in arrays["explained"] and len(arrays["explained"]) <= 16  # of two segments
    assert txl("explain", "run", "short.txt", *asked[:4], "--out", "out").out.splitlines()[-1] == "open out/index.html#t21"


def test_what_cannot_be_explained_is_one_line(txl, workbench):
    """What lies in the way is left alone."""
    shutil.copytree("run", "empty", ignore=shutil.ignore_patterns("step-*"))
    for name, content in {"one.txt": "t", "mine/index.html": "my page"}.items():
        (workbench / name).parent.mkdir(exist_ok=True)
        (workbench / name).write_text(content)
    tokenizer = load(workbench / "run")[1]
    symbols = [tokenizer.decode([token]) for token in tokenizer.encode((workbench / "text.txt").read_text()).tolist()]
    number = next(i for i, symbol in enumerate(symbols, 1) if i > 1 and symbol.isalpha())
    for arguments, complaint in {
        "run one.txt --out out": "'one.txt' has 1 token; at least 2 are needed",
        "run it --out out": "'it': No such file",
        "empty text.txt --out out": "checkpoint",
        "run text.txt --out mine": "--out 'mine' holds something that txl explain has not written",
        "run text.txt --out text.txt": "'text.txt': Not a directory; name a directory",
        "run text.txt --token 1": "token (1) must be from 2 to",
        "run text.txt --token 99999": "token (99999) must be from 2 to",
        "run text.txt --token 2 --contrast ab --json": "--contrast 'ab' is 2 tokens of this vocabulary; give the text of one",
        "run text.txt --contrast a --json": "--contrast needs --token and --json",
        "run text.txt --token 2 --contrast a": "--contrast needs --token and --json",
        f"run text.txt --token {number} --contrast {symbols[number - 1]} --json": f"is token {number} itself; name another",
        "run text.txt --top 101": 'Invalid value "101" for --top. Must be <= 100',
    }.items():
        assert complaint in txl("explain", *arguments.split()).complaint
    assert not (workbench / "out").exists() and (workbench / "mine" / "index.html").read_text() == "my page"


@pytest.mark.usefixtures("nothing_drawn")
def test_a_contrast_outside_the_vocabulary_is_refused_by_name(txl, workbench):
    words = ("--set", "tokenizer.kind=word", "--set", "tokenizer.vocab_size=10", "--set", "train.max_steps=2")
    assert txl("train", "tiny.toml", "--corpus", "text.txt", "--out", "words", "--quiet", *words).status == 0
    (workbench / "short.txt").write_text("the cat\n")
    asked = ("explain", "words", "short.txt", "--token", "2", "--json", "--contrast")
    assert txl(*asked, "zebra").complaint == "--contrast 'zebra' is not in the vocabulary"
    answer = txl(*asked, "<unk>")  # which may be asked for
    assert answer.status == 0 or "itself" in answer.err, answer.err


@pytest.mark.usefixtures("nothing_drawn")
def test_an_interrupted_explanation_leaves_the_one_before(txl, workbench, monkeypatch):
    assert txl("explain", "run", "text.txt", "--out", "out", "--most", "20").status == 0
    before = {path.name: path.read_bytes() for path in (workbench / "out").iterdir()}

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("transformer_xl.explain.explanation._score_tokens", interrupted)
        assert txl("explain", "run", "text.txt", "--out", "out").status == 130
    assert {path.name: path.read_bytes() for path in (workbench / "out").iterdir()} == before
