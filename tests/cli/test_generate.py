"""`txl generate`: prompts from everywhere, texts in every form, a memory in a file, and every mistake in one line."""

import contextlib
import io
import itertools
import json
import math
import os
import re
import shlex
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tests.cli.conftest import Txl, pipe_of, save, train_once
from tests.helpers import TINY
from transformer_xl.checkpoint.run_directory import load
from transformer_xl.cli.lines import open_pipe
from transformer_xl.cli.printers import StreamPrinter
from transformer_xl.config.model import TransformerXLConfig
from transformer_xl.config.run import TokenizerConfig
from transformer_xl.console import Bar
from transformer_xl.generation.beam import Hypothesis, beam_search
from transformer_xl.generation.decoder import Decoder
from transformer_xl.generation.seeds import text_seed
from transformer_xl.generation.session_file import describe_session
from transformer_xl.model.transformer_xl import TransformerXL
from transformer_xl.tokenizers.kinds import train_tokenizer


def figures(err: str) -> str:
    """The one line at the end."""
    (line,) = err.splitlines()
    return line


def lines(out: str) -> list[dict]:
    return [json.loads(line) for line in out.splitlines()]


@pytest.fixture(scope="module")
def char_run(home: Path) -> Path:
    """A run over an alphabet without line end and digits."""
    (home / "letters.txt").write_text("the cat sat on the mat " * 200)
    settings = ("--set", "tokenizer.kind=char", "--set", "train.max_steps=2")
    return train_once(home, "tiny.toml", "letters.txt", home / "letters", *settings)


def test_a_typed_prompt_is_repeated_and_gone_on_from(txl: Txl) -> None:
    texts = [txl("generate", "run", "--prompt", "naïve ж—", "--tokens", "40", "--seed", seed).out for seed in "112"]
    assert texts[0] == texts[1] != texts[2]
    assert texts[0].startswith("naïve ж—")
    assert texts[0].endswith("\n")
    assert txl("generate", "run", "--prompt", "the", "--tokens", "0").out == "the\n"
    alone = txl("generate", "run", "--prompt", "naïve ж—", "--tokens", "40", "--seed", "1", "--no-echo").out
    assert "naïve ж—" + alone == texts[0]


def test_a_line_at_the_end_says_what_was_done_how_fast_and_by_what(txl: Txl) -> None:
    answer = txl("generate", "run", "--prompt", "the cat", "--tokens", "5", "--seed", "7")
    assert re.fullmatch(r"read 7 tokens in .*, wrote 5 tokens in .*; fp32, not compiled \(.+\); seed 7", figures(answer.err))
    assert txl("generate", "run", "--prompt", "the cat", "--tokens", "5", "--quiet").err == ""
    unseeded = [txl("generate", "run", "--tokens", "30") for _ in range(2)]
    assert unseeded[0].out != unseeded[1].out
    seed = re.findall(r"seed (\d+)$", figures(unseeded[0].err))[0]
    assert txl("generate", "run", "--tokens", "30", "--seed", seed).out == unseeded[0].out


def test_a_file_of_any_length_is_read_as_it_is_and_not_repeated(txl: Txl, workbench: Path) -> None:
    options = ("--tokens", "9", "--temperature", "0", "--mem-len", "4")
    text = (workbench / "text.txt").read_text(encoding="utf-8")
    written = txl("generate", "run", "--prompt-file", "text.txt", *options).out
    assert txl("generate", "run", "--prompt", text, *options).out == text + written
    assert txl("generate", "run", "--prompt-file", "text.txt", "--echo", *options).out == text + written


def test_a_prompt_is_piped_in(txl: Txl, workbench: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = ("--tokens", "30", "--seed", "1")
    expected = txl("generate", "run", "--prompt", "the\n", "--no-echo", *options).out
    (workbench / "piped").write_bytes(b"the\n")
    for arguments in ((), ("--prompt-file", "-")):
        with (workbench / "piped").open() as file:
            monkeypatch.setattr(sys, "stdin", file)
            assert txl("generate", "run", *arguments, *options).out == expected
    with pipe_of(b"the\n") as path:
        assert txl("generate", "run", "--prompt-file", path, *options).out == expected
    nothing = txl("generate", "run", "--prompt", "\n", "--no-echo", *options).out
    for empty in (Path(os.devnull), workbench / "empty"):
        (workbench / "empty").touch()
        with empty.open() as file:
            monkeypatch.setattr(sys, "stdin", file)
            assert txl("generate", "run", *options).out == nothing
    monkeypatch.setattr(sys, "stdin", None)
    assert txl("generate", "run", *options).out == nothing
    assert "standard input is closed" in txl("generate", "run", "--prompt-file", "-").complaint
    with pipe_of(b"") as path, os.fdopen(open_pipe(Path(path))) as pipe:
        assert os.get_blocking(pipe.fileno()), "who is late to write is waited for"
    os.mkfifo("unused")
    assert txl("generate", "run", "--prompts", "unused").complaint.startswith("'unused' holds no prompt")


def test_several_texts_come_in_order_with_their_seeds(txl: Txl, workbench: Path) -> None:
    answer = txl("generate", "run", "--prompt", "the", "--tokens", "9", "-n", "3", "--seed", "7", "--stop", "t")
    parts = re.split(r"=== (\d) \(seed (\d+)\) ===\n", answer.out)[1:]
    assert parts[::3] == ["1", "2", "3"]
    assert parts[1::3] == [str(text_seed(7, 0, sample)) for sample in range(3)]
    for seed, text in zip(parts[1::3], parts[2::3], strict=True):
        assert text.startswith("the")
        assert text == txl("generate", "run", "--prompt", "the", "--tokens", "9", "--seed", seed, "--stop", "t").out


def test_texts_come_in_order_and_json_lines_as_they_are_finished(txl: Txl) -> None:
    command = ("generate", "run", "--prompt", "the", "--tokens", "30", "-n", "6", "--seed", "2", "--stop", " ")
    as_json = lines(txl(*command, "--json").out)
    assert [line["sample"] for line in as_json] != sorted(line["sample"] for line in as_json)
    assert [line["tokens"] for line in as_json] == sorted(line["tokens"] for line in as_json)
    texts = {line["sample"]: f"=== {line['sample'] + 1} (seed {line['seed']}) ===\nthe{line['text']}" for line in as_json}
    out = "".join(texts[sample].removesuffix("\n") + "\n" for sample in range(6))
    assert txl(*command).out.encode("utf-8", "replace") == out.encode("utf-8", "replace")


@pytest.mark.parametrize("name", ["many.jsonl", "many.txt", "-"])
def test_many_prompts_give_a_json_line_each(txl: Txl, workbench: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = ["{the} cat  sat", "ж —", "a"]
    as_json = "\n".join(json.dumps({"prompt": prompt} | ({"seed": 5} if prompt == "a" else {})) for prompt in prompts)
    content = ("\n\n".join(prompts) if name == "many.txt" else as_json) + "\n"
    if name == "-":
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content.encode())))
    else:
        Path(name).write_text(content, encoding="utf-8")
    options = ("--tokens", "12", "--json", "--stop", "a", "--seed", "3")
    answer = txl("generate", "run", "--prompts", name, "-n", "2", "--batch-size", "3", *options)
    assert answer.err == ""
    found = sorted(lines(answer.out), key=lambda line: (line["prompt_index"], line["sample"]))
    assert [(line["prompt_index"], line["sample"], line["prompt"]) for line in found] == [
        (index, sample, prompt) for index, prompt in enumerate(prompts) for sample in range(2)
    ]
    for line in found:
        own = line["prompt"] == "a" and name != "many.txt"
        assert line["seed"] == text_seed(5 if own else 3, 0 if own else line["prompt_index"], line["sample"])
    for line in found if name == "many.jsonl" else ():
        alone = ("--prompt", line["prompt"], "--seed", str(line["seed"]))
        (same,) = lines(txl("generate", "run", *options[:-2], *alone).out)
        timeless = {"prompt_index": line["prompt_index"], "sample": line["sample"], "seconds": 0, "tokens_per_second": 0}
        assert same | timeless == line | timeless
    assert {line["finish"] for line in found} == {"stop", "length"}
    assert {line["stopped_by"] for line in found} == {"a", None}


def test_json_has_the_log_probabilities_that_evaluation_finds(txl: Txl, workbench: Path) -> None:
    """With a memory that reaches over the whole text, where both see the same."""
    wide = ("--mem-len", "60")
    answer = txl("generate", "run", "--prompt", "the", "--tokens", "30", "--json", "--logprobs", "2", "--seed", "1", *wide)
    (line,) = lines(answer.out)
    assert (line["prompt"], line["prompt_tokens"], line["tokens"], line["finish"]) == ("the", 3, 30, "length")
    assert line["tokens_per_second"] > 0 < line["seconds"]
    tokens = [entry["token"] for entry in line["logprobs"]]
    (workbench / "whole.txt").write_bytes(b"the" + bytes(tokens))
    assert bytes(tokens).decode("utf-8", "replace").startswith(line["text"][:-1].partition("\ufffd")[0])
    scored = txl("eval", "run", "--file", "whole.txt", "--per-token", "nats.tsv", "--precision", "fp32", *wide)
    assert scored.status == 0
    nats = [float(row.split("\t")[2]) for row in (workbench / "nats.tsv").read_text(encoding="utf-8").splitlines()[1:]]
    assert [-entry["logprob"] for entry in line["logprobs"]] == pytest.approx(nats[2:], abs=1e-4)
    for entry in line["logprobs"]:
        first, second = entry["likeliest"]
        assert 0 >= first["logprob"] >= second["logprob"] >= math.log(1 / 256)
        assert entry["logprob"] <= first["logprob"]
        assert first["token_text"] == load("run")[1].decode([first["token"]])


def test_streamed_json_has_a_line_for_each_token_too(txl: Txl) -> None:
    options = ("--prompt", "the", "--tokens", "6", "--seed", "2", "--json")
    *tokens, last = lines(txl("generate", "run", *options, "--stream").out)
    (whole,) = lines(txl("generate", "run", *options).out)
    assert txl("generate", "run", *options[:-1], "--no-stream").out == txl("generate", "run", *options[:-1]).out
    assert len(tokens) == 6
    assert all(set(token) == {"prompt_index", "sample", "text", "token"} for token in tokens)
    assert last["text"] == whole["text"]
    assert whole["text"].startswith("".join(token["text"] for token in tokens))
    *tokens, last = lines(txl("generate", "run", *options, "--stream", "--logprobs", "0").out)
    assert [token["logprob"] for token in tokens] == [entry["logprob"] for entry in last["logprobs"]]


def test_texts_end_at_stop_strings_and_stop_tokens(txl: Txl) -> None:
    letters = ("--bias", "97=9", "--bias", "b=9", "--bias", '"c"=9')
    options = ("--prompt", "x", "--no-echo", "--seed", "1", "--tokens", "100", *letters)
    whole = txl("generate", "run", *options, "--top-k", "3").out
    assert set(whole) == set("abc\n") and len(whole) == 101
    for stop in (whole[49:53], whole[20:25], whole[80:90]):
        assert txl("generate", "run", *options, "--top-k", "3", "--stop", stop).out == whole[: whole.index(stop)] + "\n"
    (line,) = lines(txl("generate", "run", *options, "--top-k", "3", "--stop-token", "c", "--json").out)
    assert line["text"] + "c" == whole[: whole.index("c") + 1]
    assert (line["finish"], line["stopped_by"]) == ("stop", ord("c"))
    banned = txl("generate", "run", *options, "--top-k", "3", "--bias", "a=-inf").out
    assert "a" not in banned


def test_a_prompt_and_a_stop_may_begin_with_a_hyphen(txl: Txl) -> None:
    answer = txl("generate", "run", "--prompt", "- the", "--stop", "-", "--bias", "-=30", "--tokens", "9")
    assert (answer.status, answer.out) == (0, "- the\n")


def test_sampling_options_reach_the_sampling(txl: Txl) -> None:
    def text(*options: str) -> str:
        return txl("generate", "run", "--prompt", "x", "--tokens", "30", "--seed", "3", *options).out

    plain = text()
    for options in ("--top-k 2", "--top-p 0.1", "--min-p 0.5", "--temperature 3", "--repetition-penalty 2"):
        assert text(*options.split()) != plain
    penalty = ("--repetition-penalty", "2")
    assert text(*penalty, "--repetition-window", "1") != text(*penalty)
    assert text(*penalty, "--repetition-window", "none") == text(*penalty, "--repetition-window", "1000")
    assert text("--max-tokens", "10") == text("--tokens", "10")
    assert len(text("--top-k", "1")) == len(text("--temperature", "0")) == 32


def test_precision_and_compilation(txl: Txl) -> None:
    for precision in ("bf16", "int8"):
        answer = txl("generate", "run", "--prompt", "x", "--tokens", "3", "--precision", precision, "--compile", "no")
        assert f"; {precision}, not compiled" in figures(answer.err)
    assert txl("generate", "run", "--tokens", "3", "--precision", "auto").status == 0


def test_without_line_end_a_text_begins_with_a_space(txl: Txl, char_run: Path) -> None:
    answer = txl("generate", str(char_run), "--tokens", "30", "--seed", "1")
    assert answer.err.splitlines()[0] == (
        "warning: this vocabulary has no line end, so the text begins after ' '; choose another beginning with --prompt"
    )
    assert answer.out == txl("generate", str(char_run), "--prompt", " ", "--tokens", "30", "--seed", "1").out[1:]
    assert len(answer.out) == 31


def test_control_characters_are_spelled_out_on_a_terminal(txl: Txl, monkeypatch: pytest.MonkeyPatch) -> None:
    command = ("generate", "run", "--prompt", "\x1b[31mé\x07\r\x7f\tx\x9b\n", "--tokens", "0")
    assert txl(*command).out == "\x1b[31mé\x07\r\x7f\tx\x9b\n"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert txl(*command).out == "\\x1b[31mé\\x07\\x0d\\x7f\tx\\x9b\n"


def test_characters_that_cannot_be_shown_are_replaced(txl: Txl) -> None:
    """A byte model may write half of a surrogate pair, which no encoding has."""
    answer = txl("generate", "run", "--prompt-file", "surrogate", "--tokens", "0", "--echo")
    assert answer.status == 1
    Path("surrogate").write_bytes(b"x\xed\xa0\x80A\xc3")
    answer = txl("generate", "run", "--prompt-file", "surrogate", "--tokens", "0", "--echo")
    assert (answer.status, answer.out) == (0, "x?A\ufffd\n")


def test_a_long_prompt_shows_how_far_it_is_read(txl: Txl, workbench: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("long.txt").write_text("the cat " * 600)
    command = ("generate", "run", "--prompt-file", "long.txt", "--tokens", "0")
    monkeypatch.setenv("FORCE_COLOR", "1")  # which rich takes for a terminal
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr("transformer_xl.console.DRAW_SECONDS", 0)
    shown = txl(*command).err
    assert "reading" in shown and "tokens/s" in shown and "%" in shown
    assert "reading" not in txl(*command, "--quiet").err
    assert "reading" not in txl("generate", "run", "--prompt", "short", "--tokens", "0").err
    happened: list[str] = []

    @contextlib.contextmanager
    def noted(*_: Any, **__: Any) -> Iterator[Bar]:
        yield Bar()
        happened.append("the bar is gone")

    monkeypatch.setattr("transformer_xl.cli.printers.progress", noted)
    monkeypatch.setattr(StreamPrinter, "token", lambda *_: happened.append("text"))
    txl(*command[:-1], "1")
    assert happened == ["the bar is gone", "text"]


def test_a_book_is_read_once_and_asked_later(txl: Txl, workbench: Path) -> None:
    text = (workbench / "text.txt").read_text(encoding="utf-8")
    options = ("--tokens", "40", "--seed", "1", "--temperature", "0.2")
    answer = txl("generate", "run", "--prompt-file", "text.txt", "--tokens", "0", "--memory", "book")
    assert (answer.status, answer.out) == (0, "")
    assert figures(answer.err).startswith(f"read {len(text.encode()):,} tokens in ")
    before = Path("book").read_bytes()
    whole = txl("generate", "run", "--prompt", text + " the end", *options).out
    for _ in range(2):
        asked = txl("generate", "run", "--prompt", " the end", "--memory", "book", "--read-only", *options)
        assert text + asked.out == whole
        assert Path("book").read_bytes() == before
    first = txl("generate", "run", "--prompt", " the end", "--memory", "book", *options).out
    assert text + first == whole
    assert Path("book").read_bytes() != before
    second = txl("generate", "run", "--memory", "book", *options).out
    (line,) = lines(txl("generate", "run", "--prompt", text + " the end", "--json", "--logprobs", "0", *options).out)
    data = text.encode() + b" the end" + bytes(entry["token"] for entry in line["logprobs"])
    Path("all").write_bytes(data)
    assert txl("generate", "run", "--prompt-file", "all", *options).out == second
    assert second != first.removeprefix(" the end")


def test_many_questions_each_go_on_from_what_is_remembered(txl: Txl, monkeypatch: pytest.MonkeyPatch) -> None:
    """None knows of the others: asked alone, with its seed, each has the same answer."""
    assert txl("generate", "run", "--prompt-file", "text.txt", "--tokens", "0", "--memory", "book").status == 0
    before = Path("book").read_bytes()
    Path("many.txt").write_text("the end\nthe cat\n")
    command = ("generate", "run", "--memory", "book", "--read-only", "--tokens", "20")
    sampling = ("--temperature", "3", "--repetition-penalty", "2")
    many = ("--prompts", "many.txt", "-n", "2", "--seed", "4")
    found = lines(txl(*command, *sampling, *many, "--json").out)
    assert [(line["prompt"], line["sample"]) for line in found] == [
        (prompt, sample) for prompt in ("the end", "the cat") for sample in range(2)
    ]
    assert [line["seed"] for line in found] == [text_seed(4, index, sample) for index in range(2) for sample in range(2)]
    for line in found:
        alone = ("--prompt", line["prompt"], "--seed", str(line["seed"]), "--json")
        (same,) = lines(txl(*command, *sampling, *alone).out)
        assert (same["text"], same["tokens"], same["finish"]) == (line["text"], 20, "length")
        (elsewhere,) = lines(txl("generate", "run", "--tokens", "20", *sampling, *alone).out)
        assert elsewhere["text"] != line["text"]
    answer = txl(*command, *sampling, *many)
    shown = [f"=== {i} (seed {line['seed']}) ===\n{line['prompt']}{line['text']}" for i, line in enumerate(found, start=1)]
    assert answer.out.encode() == "".join(each.removesuffix("\n") + "\n" for each in shown).encode("utf-8", "replace")
    assert figures(answer.err).startswith("read 28 tokens in ")
    assert " wrote 80 tokens in " in answer.err
    assert Path("book").read_bytes() == before
    step = Decoder.step

    def replacing(self: Decoder, *arguments: Any, **options: Any) -> object:
        Path("book").write_bytes(b"something else")
        return step(self, *arguments, **options)

    monkeypatch.setattr(Decoder, "step", replacing)
    assert txl(*command, *sampling, *many).out == answer.out, "all go on from what was there at first"


@pytest.mark.parametrize("options", [("--read-only",), ()])
def test_a_text_may_complete_a_character_that_is_remembered(txl: Txl, options: tuple[str, ...]) -> None:
    Path("begun").write_bytes(b"caf\xc3")
    assert txl("generate", "run", "--prompt-file", "begun", "--tokens", "0", "--memory", "book").status == 0
    (line,) = lines(txl("generate", "run", "--memory", "book", "--bias", "169=90", "--tokens", "2", "--json", *options).out)
    assert line["text"] == "é\ufffd"


def test_a_memory_brings_its_settings(txl: Txl) -> None:
    command = ("generate", "run", "--prompt", "the", "--tokens", "3", "--memory", "book")
    assert txl(*command, "--precision", "bf16", "--mem-len", "3").status == 0
    again = txl(*command)
    assert again.status == 0
    assert "; bf16, " in figures(again.err)
    assert txl(*command, "--precision", "auto", "--mem-len", "3").status == 0
    before = Path("book").read_bytes()
    assert (
        "--precision (fp32): 'book' was read with bf16; leave --precision out" in txl(*command, "--precision", "fp32").complaint
    )
    assert "--mem-len (9): 'book' was read with 3; leave --mem-len out" in txl(*command, "--mem-len", "9").complaint
    assert Path("book").read_bytes() == before


def test_what_is_wrong_with_a_memory_is_said_and_the_file_stays(txl: Txl, workbench: Path, char_run: Path) -> None:
    command = ("generate", "run", "--prompt", "the", "--tokens", "3", "--memory", "book")
    assert txl(*command).status == 0
    good = Path("book").read_bytes()
    other = txl("generate", str(char_run), "--prompt", "the", "--memory", "book")
    assert "'book' does not fit: it was read by another model" in other.complaint
    assert Path("book").read_bytes() == good
    Path("book").write_bytes(good[:-50])
    assert "'book' is no sound safetensors file" in txl(*command).complaint
    Path("book").write_text("no session")
    assert "'book' is no sound safetensors file" in txl(*command).complaint
    assert Path("book").read_text() == "no session"
    assert txl("generate", "run", "--prompt", "", "--memory", "new").complaint.startswith(
        "--prompt '' is empty; give some text"
    )
    assert not Path("new").exists()
    assert list(workbench.glob("*.tmp*")) == []


@pytest.mark.parametrize(
    ("command", "complaint"),
    [
        ("run --prompt=", "--prompt '' is empty; give some text, or leave --prompt out to begin a new one"),
        ("run --prompt-file empty.txt", "the prompt is empty; give at least one token"),
        ("run --prompt-file gone.txt", "'gone.txt': No such file"),
        ("run --prompts empty.txt", "'empty.txt' holds no prompt; write one a line"),
        ("run --prompts latin.txt", "'latin.txt': byte 3 (0xe9) is not UTF-8; convert it (Latin-1: iconv"),
        ("run --prompts bad1.txt", "bad1.txt', line 1: it is not JSON: "),
        ("run --prompts bad2.jsonl", "'bad2.jsonl', line 3: 'sed' is not known; did you mean 'seed'?"),
        ("run --prompts bad3.jsonl", "'bad3.jsonl', line 1: it has no \"prompt\" that is text"),
        ("run --prompts bad7.jsonl", r"'bad7.jsonl', line 1: 'a \ud800' ends in half of a character"),
        ("run --prompts bad4.jsonl", "'bad4.jsonl', line 1: seed ('1') must be a whole number"),
        ("run --prompts bad5.jsonl", "'bad5.jsonl', line 1: seed (-1) must be between 0 and 2^64 - 1"),
        ("run --prompts bad6.jsonl", "'bad6.jsonl', line 2: the prompt is empty"),
        ("run --prompt a --prompts text.txt", "--prompt, --prompt-file and --prompts: give one"),
        ("run --bias x", "--bias 'x' is not TOKEN=NUMBER"),
        ("run --bias =3", "--bias '=3' is not TOKEN=NUMBER"),
        ("run --bias x=much", "--bias 'x=much' is not TOKEN=NUMBER"),
        ("run --bias the=3", "--bias 'the' is 3 tokens ([116, 104, 101]) for this model, not one"),
        ("run --bias ٣=3", " is 2 tokens ([217, 163]) for this model, not one; give the token's id"),  # no number here
        ('run --bias "\\"=3', '--bias "\\": not text in JSON'),
        ("run --logprobs 2", "--logprobs are printed with --json only; add --json"),
        ("run --length-penalty 2", "--length-penalty compares texts of a beam search; add --beams"),
        ("run --read-only", "--read-only says what to do with the FILE of --memory"),
        ("run -n 2 --temperature 0", "--n (2) with --temperature 0 writes the same text again and again"),
        ("run -n 2 --stream", "--stream shows one text; with several, leave it out or add --json"),
        ("run --memory gone --read-only", "'gone'"),
        ("run --memory no/where", "--memory 'no/where': the directory "),
        ("run --memory run", "--memory 'run' is a directory"),
        ("run --memory new --n 2", "--memory remembers one text; with --n or --prompts add --read-only"),
        ("run --memory new --prompts text.txt", "--memory remembers one text; with --n or --prompts add --read-only"),
        ("run --interactive --json", "--interactive writes one text as it comes"),
        ("run --interactive 0<&-", "--interactive needs standard input, which is closed"),
        ("run --beams 2 --temperature 1 --seed 3 --bias a=2", "leave --temperature, --seed, --bias out"),
        ("run --beams 2 --stop the --interactive --memory new --stream", "leave --stop, --interactive, --memory, --stream out"),
        ("run --beams 2 --json --logprobs 1", "leave --logprobs out"),
        ("run --beams 2 --out new.npy", "leave --out out"),
    ],
)
def test_errors_are_one_line_and_leave_nothing(
    txl: Txl, workbench: Path, monkeypatch: pytest.MonkeyPatch, command: str, complaint: str
) -> None:
    (workbench / "empty.txt").touch()
    (workbench / "latin.txt").write_bytes(b"caf\xe9 " * 4)
    bad = ["", '\n{"prompt": "a"}\n{"prompt": "b", "sed": 1}', '{"text": "a"}']
    bad += [
        '{"prompt": "a", "seed": "1"}',
        '{"prompt": "a", "seed": -1}',
        '{"prompt": "a"}\n{"prompt": ""}',
        r'{"prompt": "a \ud800 b"}',
    ]
    for number, content in enumerate(bad, start=1):
        (workbench / f"bad{number}.jsonl").write_text(content)
    (workbench / "bad1.txt").write_text(' { "prompt": "a", "seed": }\n')  # it begins as JSON, so it is no text
    before = {path: path.stat().st_mtime_ns for path in workbench.rglob("*")}
    if command.endswith(" 0<&-"):
        monkeypatch.setattr(sys, "stdin", None)
    answer = txl("generate", *command.removesuffix(" 0<&-").split())
    assert answer.status == 1
    assert complaint in answer.complaint
    assert answer.out == ""
    assert before == {path: path.stat().st_mtime_ns for path in workbench.rglob("*")}


def interrupt(monkeypatch: pytest.MonkeyPatch, *, step: int, times: int = 1) -> None:
    """Ctrl-C while the decoder makes a step, counted from 0 on."""
    original, steps = Decoder.step, itertools.count()

    def interrupted(self: Decoder, *arguments: Any, **options: Any) -> object:
        for _ in range(times if next(steps) == step else 0):
            signal.raise_signal(signal.SIGINT)
        return original(self, *arguments, **options)

    monkeypatch.setattr(Decoder, "step", interrupted)


def test_ctrl_c_ends_many_texts_in_good_order(txl: Txl, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was written of unfinished ones is printed, others do not begin, and the figures count what was done."""
    command = ("generate", "run", "--prompt", "the", "--tokens", "12", "-n", "9", "--batch-size", "2", "--seed", "2")
    whole = lines(txl(*command, "--json").out)
    with monkeypatch.context() as patch:
        interrupt(patch, step=15)
        answer = txl(*command, "--json")
    assert (answer.status, answer.err) == (130, "")
    found = lines(answer.out)
    assert [(line["sample"], line["finish"]) for line in found] == [
        (0, "length"),
        (1, "length"),
        (2, "interrupted"),
        (3, "interrupted"),
    ]
    for line, all_of_it in zip(found, whole, strict=False):
        assert all_of_it["text"].startswith(line["text"].rstrip("\ufffd"))
        assert (line["seed"], line["prompt_tokens"]) == (all_of_it["seed"], 3)
        assert 0 < line["seconds"] < 60
    assert [line["tokens"] for line in found] == [12, 12, 6, 6]  # each text ends with the token after it
    with monkeypatch.context() as patch:
        interrupt(patch, step=15)
        answer = txl(*command)
    heads = [f"=== {i} (seed {line['seed']}{', interrupted' * (i > 2)}) ===\nthe" for i, line in enumerate(found, start=1)]
    shown = [(head + line["text"]).removesuffix("\n") + "\n" for head, line in zip(heads, found, strict=True)]
    assert (answer.status, answer.out.encode()) == (130, "".join(shown).encode("utf-8", "replace"))
    assert re.match(r"interrupted; read 12 tokens in .* wrote 36 tokens in .*; seed 2$", figures(answer.err))


@pytest.mark.parametrize("options", [("-n", "9"), ("-n", "9", "--memory", "book", "--read-only"), ("--memory", "book")])
def test_a_second_ctrl_c_aborts_at_once(txl: Txl, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...]) -> None:
    assert txl("generate", "run", "--prompt", "a cat", "--tokens", "0", "--memory", "book").status == 0
    before = Path("book").read_bytes()
    interrupt(monkeypatch, step=7, times=2)
    answer = txl("generate", "run", "--prompt", "the", "--tokens", "100000", "--json", *options)
    assert (answer.status, answer.out, answer.err.strip()) == (130, "", "interrupted")
    assert Path("book").read_bytes() == before
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("memory", [(), ("--memory", "book"), ("--memory", "book", "--read-only")])
def test_ctrl_c_ends_one_text_in_good_order(txl: Txl, monkeypatch: pytest.MonkeyPatch, memory: tuple[str, ...]) -> None:
    assert txl("generate", "run", "--prompt", "a cat", "--tokens", "0", "--memory", "book").status == 0
    before = Path("book").read_bytes()
    command = ("generate", "run", "--prompt", "the", "--seed", "2", *memory)
    interrupt(monkeypatch, step=7)
    answer = txl(*command, "--tokens", "10000")
    saved = "; 17 tokens saved to book" if memory[-1:] == ("book",) else ""
    assert re.match(rf"interrupted; read 3 tokens in .* wrote 9 tokens in .*; seed 2{saved}$", figures(answer.err))
    assert answer.status == 130
    if memory[-1:] == ("book",):
        assert describe_session(Path("book"))["note"]["tokens"] == str(5 + 3 + 9)
        Path("book").write_bytes(before)
    assert Path("book").read_bytes() == before
    assert answer.out == txl(*command, "--tokens", "9").out
    Path("book").write_bytes(before)
    interrupt(monkeypatch, step=7)
    (line,) = lines(txl(*command, "--tokens", "10000", "--json").out)
    assert (line["finish"], line["tokens"]) == ("interrupted", 9)


def test_texts_that_end_with_ctrl_c_ended_as_they_would_have(txl: Txl, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever writes interrupted texts again writes none that is whole."""
    options = "--prompt the -n 4 --batch-size 4 --seed 1 --json --tokens 24 --stop e"
    command = ("generate", "run", *options.split())
    whole = {line["sample"]: line for line in lines(txl(*command).out)}
    assert "stop" in {line["finish"] for line in whole.values()}
    for step in range(0, max(line["tokens"] for line in whole.values()), 3):
        with monkeypatch.context() as patch:
            interrupt(patch, step=step)
            found = lines(txl(*command).out)
        for line in found:
            is_whole = line["tokens"] == whole[line["sample"]]["tokens"]
            assert line["finish"] == (whole[line["sample"]]["finish"] if is_whole else "interrupted")


@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_while_saving(txl: Txl, monkeypatch: pytest.MonkeyPatch, times: int) -> None:
    """What was shown is saved all the same; a second one keeps the old file."""
    command = ("generate", "run", "--prompt", "the", "--tokens", "4", "--memory", "book")
    assert txl(*command).status == 0
    before, save = Path("book").read_bytes(), Decoder.save

    def interrupted(self: Decoder, *arguments: Any, **options: Any) -> None:
        for _ in range(times):
            signal.raise_signal(signal.SIGINT)
        save(self, *arguments, **options)

    monkeypatch.setattr(Decoder, "save", interrupted)
    assert txl(*command).status == 130
    if times == 1:
        assert describe_session(Path("book"))["note"]["tokens"] == str(2 * (3 + 4))
    else:
        assert Path("book").read_bytes() == before


def test_ctrl_c_that_is_ignored_stays_ignored(txl: Txl, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in the background of a shell."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        interrupt(monkeypatch, step=3)
        (line,) = lines(txl("generate", "run", "--prompt", "the", "--tokens", "9", "--json").out)
        assert (line["finish"], line["tokens"]) == ("length", 9)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_texts_can_be_written_outside_the_main_thread(txl: Txl) -> None:
    answers = []
    thread = threading.Thread(target=lambda: answers.append(txl("generate", "run", "--prompt", "the", "--tokens", "3")))
    thread.start()
    thread.join()
    assert answers[0].status == 0


@pytest.mark.parametrize("several", [(), ("-n", "9"), ("--memory", "book", "--read-only", "-n", "9")])
def test_ctrl_c_while_a_prompt_is_read(txl: Txl, monkeypatch: pytest.MonkeyPatch, several: tuple[str, ...]) -> None:
    """It ends there, and is counted as far as it was read."""
    assert txl("generate", "run", "--prompt", "a cat", "--tokens", "0", "--memory", "book").status == 0
    Path("long.txt").write_text("the cat " * 500)
    monkeypatch.setattr(Bar, "advance", lambda self, n: signal.raise_signal(signal.SIGINT))
    answer = txl("generate", "run", "--prompt-file", "long.txt", *several)
    assert answer.status == 130
    assert re.fullmatch(r"interrupted; read 64 tokens in [^;]*", figures(answer.err))
    assert len(answer.out.splitlines()) == (1 if several else 0)
    (line,) = lines(txl("generate", "run", "--prompt-file", "long.txt", "--json", *several).out)
    assert (line["text"], line["prompt_tokens"], line["tokens"], line["finish"]) == ("", 64, 0, "interrupted")


def test_ctrl_c_while_a_prompt_is_read_leaves_a_memory_as_it_was(txl: Txl, monkeypatch: pytest.MonkeyPatch) -> None:
    command = ("generate", "run", "--memory", "book", "--prompt")
    assert txl(*command, "a cat").status == 0
    before = Path("book").read_bytes()
    monkeypatch.setattr(Bar, "advance", lambda self, n: signal.raise_signal(signal.SIGINT))
    answer = txl(*command, "the " * 500)
    assert (answer.status, answer.err.strip()) == (130, "stopped reading; book stays as it was")
    assert Path("book").read_bytes() == before


def test_a_character_the_model_does_not_know(txl: Txl, char_run: Path, workbench: Path) -> None:
    (workbench / "cats.txt").write_text("the\n5 cats")
    not_there = "character 5 (U+0035) is not in the tokenizer's"
    assert f"'cats.txt', line 2: {not_there}" in txl("generate", str(char_run), "--prompts", "cats.txt").complaint
    assert "'cats.txt': character" in txl("generate", str(char_run), "--prompt-file", "cats.txt").complaint
    assert f"--bias '5x': {not_there}" in txl("generate", str(char_run), "--bias", "5x=1").complaint


@pytest.mark.parametrize(("kind", "what"), [("word", "word"), ("unigram", "piece")])
def test_what_a_vocabulary_lacks_of_prompts_is_counted(txl: Txl, workbench: Path, kind: str, what: str) -> None:
    tokenizer = train_tokenizer(
        TokenizerConfig.model_validate({"kind": kind, "vocab_size": 40}), ["the cat sat on the mat\n" * 9]
    )
    save(TransformerXL(TransformerXLConfig(**{**TINY, "vocab_size": tokenizer.vocab_size})), tokenizer, "model")
    (workbench / "prompts.txt").write_text("the 鼠\nthe cat\n龘 sat 鼠\n")
    name = {"word": "<unk>", "unigram": "⁇"}[kind]
    for n, prompt in ((1, ("--prompt", "the 龘")), (3, ("--prompts", "prompts.txt")), (3, ("--prompt-file", "prompts.txt"))):
        err = txl("generate", "model", *prompt, "--tokens", "1").err
        told = f"warning: the vocabulary lacks {n} {what}{'s' * (n > 1)} of the text; the model reads {name} instead"
        assert err.count("warning") == err.count(told) == 1, err
    assert "lacks" not in txl("generate", "model", "--prompt", "the cat", "--tokens", "1").err


def test_a_prompt_that_is_cut_inside_a_character_says_so(txl: Txl, char_run: Path, workbench: Path) -> None:
    """What a shell passes on of it, lone surrogates, are its bytes again; a model of bytes reads them, others cannot."""
    parts = {"ends": "the 龘".encode()[:-1], "begins": "龘 the".encode()[1:]}
    for where, part in parts.items():
        (workbench / "part.txt").write_bytes(part)
        typed = os.fsdecode(part)
        for source in (("--prompt-file", "part.txt"), ("--prompt", typed)):
            answer = txl("generate", "run", *source, "--tokens", "0", "--no-echo", "--json")
            assert answer.status == 0
            assert f"warning: the prompt {where} inside a character in UTF-8; the model reads the part" in answer.err
            assert lines(answer.out)[0]["prompt_tokens"] == len(part)
            assert "warning" not in txl("generate", "run", *source[:1], "text.txt", "--tokens", "0").err
            refused = txl("generate", str(char_run), *source)
            assert f" is not UTF-8; the text {where} inside a character; cut it between two" in refused.complaint
            assert refused.complaint.startswith("--prompt: byte ") == (source[0] == "--prompt")
    half = "--prompt: it has half of a character (a lone surrogate); give the whole one"
    assert txl("generate", "run", "--prompt", "the \ud800").complaint == half


DOCUMENT = Path(__file__).parents[2] / "docs" / "generating.md"


def test_the_examples_of_the_document_run(txl: Txl, workbench: Path) -> None:
    Path("runs").mkdir()
    Path("run").rename("runs/books")
    for text in ("chapter1.txt", "book.txt", "many.txt"):
        Path(text).write_text("It was the cat.\n" * 5)
    Path("many.jsonl").write_text('{"prompt": "It was", "seed": 7}\n{"prompt": "Then"}\n')
    document = DOCUMENT.read_text(encoding="utf-8")
    blocks = re.findall(r"^```(sh|python) run\n(.*?)^```", document, re.MULTILINE | re.DOTALL)
    assert {language for language, _ in blocks} == {"sh", "python"}
    for language, code in blocks:
        if language == "python":
            exec(compile(code, DOCUMENT.name, "exec"), {"__name__": "document"})
            continue
        for command in code.splitlines():
            program, *arguments = shlex.split(command)
            assert program == "txl"
            answer = txl(*arguments)
            assert (command, answer.status) == (command, 0)


# sessions: what goes on from call to call, and what of a file is believed


def written_by(txl: Txl, run: Path, *options: str) -> tuple[str, int, str]:
    """What a call writes, the seed that it reports, and why it ended."""
    (line,) = lines(txl("generate", str(run), *options, "--json").out)
    return line["text"], line["seed"], line["finish"]


def test_a_text_written_in_two_calls_is_that_written_in_one(txl: Txl, char_run: Path) -> None:
    command, options = ("generate", str(char_run)), ("--temperature", "1")
    prompt = ("--prompt", "the", "--no-echo", "--seed", "1")
    whole = txl(*command, *prompt, *options, "--tokens", "100").out.removesuffix("\n")
    first = txl(*command, *prompt, *options, "--tokens", "50", "--memory", "book")
    assert figures(first.err).endswith("; seed 1; 53 tokens saved to book")
    second = txl(*command, *options, "--tokens", "50", "--memory", "book")
    assert figures(second.err).endswith("; seed 1, continued; 103 tokens saved to book")
    assert first.out.removesuffix("\n") + second.out.removesuffix("\n") == whole
    assert len(whole) == 100


def test_a_seed_and_read_only_begin_anew(txl: Txl, char_run: Path) -> None:
    assert txl("generate", str(char_run), "--prompt", "the", "--seed", "1", "--tokens", "20", "--memory", "book").status == 0
    saved = Path("book").read_bytes()

    def go_on(*options: str) -> tuple[str, int, str]:
        Path("book").write_bytes(saved)
        return written_by(txl, char_run, "--memory", "book", "--tokens", "40", *options)

    kept, anew = go_on(), go_on("--seed", "1")
    assert kept == go_on() and kept[1] == 1
    assert anew[0] != kept[0]
    assert anew == go_on("--seed", "1", "--read-only")
    asked = [go_on("--read-only") for _ in range(2)]
    assert len({kept[0], asked[0][0], asked[1][0]}) == 3
    assert asked[0] == go_on("--seed", str(asked[0][1]))


def forge(path: str, **terms: object) -> None:
    """Change what a session says that it was read with."""
    with safe_open(path, "pt") as file:
        about = json.loads(file.metadata()["transformer_xl.session"])
    text = json.dumps(about | {"decoder": about["decoder"] | terms})
    save_file(load_file(path), path, {"transformer_xl.session": text})


def test_a_file_that_asks_for_a_huge_memory_is_refused_with_the_bytes(txl: Txl) -> None:
    command = ("generate", "run", "--tokens", "3", "--memory", "book")
    assert txl(*command, "--prompt", "the cat", "--mem-len", "4000").status == 0
    answer = txl(*command)  # a long memory of which little is used
    assert (answer.status, describe_session(Path("book"))["decoder"]["mem_len"]) == (0, 4000)
    forge("book", mem_len=10**12)
    assert re.search(r"^reading with mem_len 1,000,000,000,000, .* takes [0-9.]+ TB, and ", txl(*command).complaint)
    for mem_len in (-1, [4000], 10**4000):
        forge("book", mem_len=mem_len)
        assert "is of another decoder: mem_len (" in txl(*command).complaint
    forge("book", mem_len=4000)
    assert txl(*command).status == 0


# beam search


def test_beams_find_what_the_library_finds_and_print_the_best(txl: Txl, workbench: Path) -> None:
    (workbench / "many.txt").write_text("the cat\nIt was\na\n")
    options = ("--prompts", "many.txt", "--beams", "3", "-n", "2", "--tokens", "6", "--length-penalty", "0.5")
    options += ("--stop-token", " ", "--bias", "e=-inf", "--batch-size", "2")
    model, tokenizer = load(workbench / "run")
    prompts = [tokenizer.encode(line) for line in ("the cat", "It was", "a")]
    stop, banned = (tokenizer.encode(text).tolist() for text in (" ", "e"))
    found = beam_search(
        Decoder(model, batch_size=6), prompts, beams=3, n=2, max_new_tokens=6, stop_tokens=stop, banned_tokens=banned,
        length_penalty=0.5,
    )  # fmt: skip
    told = lines(txl("generate", "run", *options, "--json").out)
    assert {(line["prompt_index"], line["sample"]) for line in told} == set(itertools.product(range(3), range(2)))
    for line in told:
        each = found[line["prompt_index"]][line["sample"]]
        assert line["prompt"] == ("the cat", "It was", "a")[line["prompt_index"]]
        assert line["text"] == tokenizer.decode(each.tokens)
        assert (line["tokens"], line["prompt_tokens"]) == (len(each.tokens), len(prompts[line["prompt_index"]]))
        assert line["log_probability"] == pytest.approx(each.log_probability, abs=1e-3)
        assert line["score"] == pytest.approx(each.score, abs=1e-3)
        assert (line["finish"], line["stopped_by"]) == (("length", None) if each.stop_token is None else ("stop", stop[0]))
    answer = txl("generate", "run", *options)
    by_number = sorted(told, key=lambda line: (line["prompt_index"], line["sample"]))
    assert answer.out == "".join(
        f"=== {number} (score {line['score']:.3f}) ===\n{line['prompt']}{line['text']}\n"
        for number, line in enumerate(by_number, start=1)
    )
    assert re.fullmatch(
        r"searched for 3 prompts with 3 beams in [\d.]+ s \([\d.]+ s each\); fp32, not compiled \(.+\)", figures(answer.err)
    )


def test_one_beam_writes_what_temperature_0_writes(txl: Txl) -> None:
    options = ("generate", "run", "--prompt", "the c", "--tokens", "20")
    answer = txl(*options, "--beams", "1")
    assert answer.out == txl(*options, "--temperature", "0").out
    assert answer.out.startswith("the c")
    assert "searched for 1 prompt with 1 beam in" in answer.err
    assert txl(*options, "--beams", "1", "--quiet", "--no-echo").out == answer.out.removeprefix("the c")


@pytest.mark.parametrize("as_json", [True, False])
def test_ctrl_c_keeps_what_a_search_has_found(
    txl: Txl, workbench: Path, monkeypatch: pytest.MonkeyPatch, as_json: bool
) -> None:
    """The first two texts of three: one that is found sooner waits for the one before."""
    (workbench / "many.txt").write_text("the cat\nIt was\na\n")
    options = ("generate", "run", "--prompts", "many.txt", "--beams", "2", "--tokens", "9", "--batch-size", "2")
    whole = txl(*options).out
    interrupt(monkeypatch, step=10)
    answer = txl(*options, *(["--json"] if as_json else []))
    assert answer.status == 130
    if as_json:
        assert [line["prompt"] for line in lines(answer.out)] == ["the cat", "It was"]
    else:
        assert answer.out == whole[: whole.index("=== 3 (")]
        assert figures(answer.err).startswith("interrupted; searched for 2 prompts with 2 beams in")


def test_ctrl_c_prints_what_waited_for_a_text_that_is_not_found(
    txl: Txl, workbench: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any, on_found: Callable[[int, list[Hypothesis]], object], **__: Any) -> None:
        on_found(1, [Hypothesis((97,), -1.0, -1.0)])
        signal.raise_signal(signal.SIGINT)

    (workbench / "many.txt").write_text("the\ncat\n")
    monkeypatch.setattr("transformer_xl.generation.beam.beam_search", interrupted)
    answer = txl("generate", "run", "--prompts", "many.txt", "--beams", "1")
    assert (answer.status, answer.out) == (130, "=== 2 (score -1.000) ===\ncata\n")
