"""How runs are read with other attention lengths."""

from pathlib import Path

from transformer_xl.config.recipes import load_recipe
from transformer_xl.config.run import RunConfig
from transformer_xl.reading.reading import Reading
from transformer_xl.tools.lengths import lengths_of, readings, trained_length


def of_kind(kind: str, **model: object) -> RunConfig:
    values = load_recipe("quickstart").model_dump()
    return RunConfig(**{**values, "model": {"kind": kind, "d_model": 8, **model}})


def test_with_recurrence_the_length_is_that_of_memory() -> None:
    config = load_recipe("quickstart", ["eval.tgt_len=32", "eval.ext_len=3"])
    found = readings(config, [128, 0])
    expected = [Reading(32, 0, 0, 8, precision="auto"), Reading(32, 125, 3, 8, precision="auto")]
    assert found == expected, "what is read again is part of the length"
    assert [reading.length for reading in readings(config)] == [0, 64, 128, 256, 512]


def test_the_runs_own_reading_is_one_of_them() -> None:
    for overrides in ([], ["model.mem_len=0"], ["eval.ext_len=64", "eval.mem_len=64"]):
        config = load_recipe("quickstart", overrides)
        assert Reading.of_run(config) in readings(config)


def test_without_recurrence_text_is_read_again() -> None:
    config = load_recipe("quickstart", ["model.mem_len=0"])
    assert trained_length(config) == 64
    assert lengths_of(config) == [0, 32, 64, 128, 256]
    assert readings(config, [32]) == [Reading(64, 0, 32, 8, precision="auto")]


def test_a_vanilla_model_reads_no_more_than_its_positions() -> None:
    config = of_kind("vanilla", max_len=64)
    found = readings(config, [0, 48, 64, 500])
    assert [reading.length for reading in found] == [0, 48]
    assert {reading.tgt_len + reading.ext_len for reading in found} == {64}
    assert {reading.tgt_len * reading.batch_size for reading in found} == {64 * 8}
    assert [reading.length for reading in readings(config)] == [0, 32, 48]


def test_an_lstm_has_no_length(tmp_path: Path) -> None:
    assert readings(of_kind("lstm"), [0, 8]) == []
