"""What is known of speeds survives processes, damage and other people's files; what is worth trying follows from it."""

import json
import math
import multiprocessing
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers import tiny_model
from transformer_xl.generation import speeds
from transformer_xl.generation.speeds import KeptSpeeds, Speeds, keep_compiled_code

KNOWN = Speeds(eager=0.003, compiled=0.001, ready=2.0)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TXL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def kept(*, n_row: int = 1, tgt_len: int = 8, precision: Any = "fp32", **sizes: Any) -> KeptSpeeds:
    return KeptSpeeds(tiny_model(**sizes), n_row=n_row, tgt_len=tgt_len, precision=precision)


def the_file(cache: Path) -> Path:
    (file,) = (cache / "speeds").iterdir()
    return file


def test_speeds_are_found_again_by_the_same_and_by_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    assert kept().load() == Speeds()
    kept().keep(KNOWN)
    assert kept().load() == KNOWN
    others = [kept(n_row=2), kept(tgt_len=9), kept(precision="bf16"), kept(mem_len=6), kept(n_layer=3)]
    others.append(KeptSpeeds(tiny_model().with_context(mem_len=9), n_row=1, tgt_len=8, precision="fp32"))
    others.append(KeptSpeeds(tiny_model().to(torch.bfloat16), n_row=1, tgt_len=8, precision="fp32"))
    for name, value in (("__version__", "9"), ("device_name", lambda device: "another")):
        with monkeypatch.context() as patch:
            patch.setattr(speeds, name, value)
            others.append(kept())
    for name, value in (("__version__", "9"), ("get_num_threads", lambda: 99)):
        with monkeypatch.context() as patch:
            patch.setattr(torch, name, value)
            others.append(kept())
    assert [other.load() for other in others] == [Speeds()] * len(others)


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: b"",
        lambda content: content[:-9],
        lambda content: b"[1]",
        lambda content: content.replace(b'"fp32"', b'"int8"'),
        lambda content: content.replace(b'"eager":0.003', b'"eager":-1'),
        lambda content: content.replace(b'"eager":0.003', b'"eager":true'),
        lambda content: content.replace(b'"eager":0.003', b'"eager":1e300'),
        lambda content: content.replace(b'"eager":0.003', b'"eager":0'),
        lambda content: content.replace(b'"compiled":0.001', b'"compiled":1e-320'),
        lambda content: content.replace(b'"spent":0.0', b'"spent":null'),
        lambda content: content.replace(b'"spent"', b'"other"'),
        lambda content: content.replace(b'"seconds":{', b'"seconds":2,"more":{'),
    ],
)
def test_a_damaged_or_foreign_file_counts_as_none_and_is_replaced(cache: Path, damage: Any) -> None:
    kept().keep(KNOWN)
    content = the_file(cache).read_bytes()
    the_file(cache).write_bytes(damage(content))
    assert the_file(cache).read_bytes() != content
    assert kept().load() == Speeds()
    kept().keep(KNOWN)
    assert kept().load() == KNOWN and the_file(cache).read_bytes() == content


def test_where_nothing_can_be_written_nothing_is_kept(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.write_text("a file in place of the directory")
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    kept().keep(KNOWN)
    keep_compiled_code()
    assert kept().load() == Speeds() and "TORCHINDUCTOR_CACHE_DIR" not in os.environ


def test_compiled_code_is_kept_beside_them_unless_a_place_is_named(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "elsewhere")
    keep_compiled_code()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "elsewhere"
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    keep_compiled_code()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(cache / "compiled") and (cache / "compiled").is_dir()


def _keep_often(own: KeptSpeeds, eager: float) -> None:
    for _ in range(100):
        own.keep(Speeds(eager=eager))


def test_two_processes_may_write_at_once(cache: Path) -> None:
    writers = [multiprocessing.get_context("fork").Process(target=_keep_often, args=(kept(), x)) for x in (1.0, 2.0)]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        assert kept().load().eager in (None, 1.0, 2.0)
    assert [writer.exitcode for writer in writers] == [0, 0]
    assert kept().load().eager in (1.0, 2.0) and json.loads(the_file(cache).read_bytes())


def test_the_verdict_that_compiled_code_is_slower_is_doubted_after_a_week() -> None:
    now, week = time.time(), 7 * 86_400
    slower = Speeds(eager=0.001, compiled=0.002, ready=2.0)
    for seconds, believed in ((60, True), (week - 60, True), (week + 60, False), (-3600, False)):
        kept().keep(Speeds(**(vars(slower) | {"compared": now - seconds})))
        assert (kept().load().compiled == 0.002) == believed and kept().load().eager == 0.001
    kept().keep(KNOWN)  # that it is faster is doubted whenever it is used
    assert kept().load() == KNOWN


def test_what_steps_take_follows_from_the_figures() -> None:
    assert KNOWN.seconds(1000, compiled=False) == 3.0 and KNOWN.seconds(1000, compiled=True) == 3.0
    assert Speeds().seconds(1, compiled=False) == Speeds(eager=1.0).seconds(1, compiled=True) == math.inf
    assert Speeds(eager=1.0, compiled=0.5).seconds(2, compiled=True) == 3.0  # two seconds are a guess


def test_compilation_is_tried_once_eager_steps_of_all_texts_take_long() -> None:
    eager = Speeds(eager=0.002)
    assert not eager.worth_trying(10_000) and eager.worth_trying(10_001)
    after = eager.after(4_000, 8.0, compiled=False)
    assert after == Speeds(eager=0.002, spent=8.0)
    assert not after.worth_trying(6_000) and after.worth_trying(6_001)
    assert not Speeds(eager=1.0, compiled=2.0).worth_trying(10**9)


def test_a_text_says_how_fast_the_machine_is_for_both_ways() -> None:
    assert KNOWN.after(1000, 6.0, compiled=False) == Speeds(eager=0.006, compiled=0.002, ready=2.0)
    assert KNOWN.after(1000, 2.0, compiled=True) == Speeds(eager=0.006, compiled=0.002, ready=2.0)
    assert Speeds(eager=1.0).after(10, 30.0, compiled=True) == Speeds(eager=1.0)


def test_only_finding_compiled_code_again_says_how_long_that_takes() -> None:
    first = kept().compare(0.003, 0.001, 20.0, first=True)
    assert first == kept().load() and first.ready is None and time.time() - first.compared < 60
    assert kept().compare(0.003, 0.001, 0.1, first=False).ready is None
    assert kept().compare(0.003, 0.001, 2.5, first=True).ready == 2.5
    assert kept().compare(0.003, 0.001, 0.1, first=False).ready == 2.5
