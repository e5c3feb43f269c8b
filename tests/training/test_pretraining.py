"""An XLNet is pretrained on a text, validated in nats per target, resumed and scored; what cannot work is one line."""

import json
from pathlib import Path

import numpy as np
import pytest

from tests.training.helpers import Lines, differing, entries, run_bits, stop_at, write_text
from tests.world_cases import txl
from transformer_xl.checkpoint.run_directory import RunDirectory, load
from transformer_xl.config.model import XLNetConfig
from transformer_xl.config.recipes import load_recipe
from transformer_xl.errors import ConfigError, CorpusError
from transformer_xl.model.xlnet import XLNet
from transformer_xl.reading.reading import Reading
from transformer_xl.reading.targets import _LEAST_STEPS, filled_in, score_targets, scored_stream
from transformer_xl.training.run import train

SETTINGS = [
    "tokenizer.vocab_size=60",
    "model.n_layer=2",
    "model.d_model=16",
    "model.n_head=2",
    "model.d_head=8",
    "model.d_inner=24",
    "model.mem_len=12",
    "model.reuse_len=12",
    "train.tgt_len=24",
    "train.batch_size=4",
    "train.max_minutes=none",
    "train.max_steps=12",
    "train.eval_interval=6",
    "train.checkpoint_interval=6",
    "train.log_interval=4",
    "train.precision=fp32",
    "train.threads=1",
    "eval.max_tokens=100_000",
]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    write_text(path, n_words=2000)
    return path


@pytest.fixture(scope="module")
def run(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "whole"
    train("xlnet-quick", out=folder, corpus=str(text), overrides=SETTINGS)
    return folder


def test_a_run_validates_in_nats_per_target_and_fills_gaps(run: Path) -> None:
    found = entries(run)
    valid = [entry for entry in found if entry["kind"] == "valid"]
    assert [entry["step"] for entry in valid] == [6, 12]
    assert all(0 < entry["loss"] < 6 for entry in valid)
    assert all(entry["scored"] == entry["split_tokens"] for entry in valid)
    (final,) = [entry for entry in found if entry["kind"] == "final"]
    assert final["loss"] != final["loss_without_memory"]
    samples = [entry["text"] for entry in found if entry["kind"] == "sample"]
    assert len(samples) == 2
    assert all(" [" in line and ("right]" in line or "it is" in line) for line in samples[0].splitlines())
    assert (run / "loss.png").stat().st_size > 0


@pytest.mark.usefixtures("no_picture")
def test_a_stopped_run_goes_on_with_the_same_targets_and_orders(run: Path, text: Path, tmp_path: Path) -> None:
    train("xlnet-quick", out=tmp_path / "cut", corpus=str(text), overrides=SETTINGS, display=stop_at(8))
    train(out=tmp_path / "cut", resume=True, display=Lines())
    assert differing(run_bits(run), run_bits(tmp_path / "cut")) == ["steps"]  # it has saved where it stopped


def test_scores_are_the_same_every_time_and_for_any_number_of_rows_nearly(run: Path, text: Path) -> None:
    model, tokenizer = load(run)
    assert isinstance(model, XLNet)
    config = RunDirectory(run).config()
    ids = tokenizer.encode(text.read_text())[:800]
    one, again = (score_targets(model, scored_stream(config, ids, tokenizer)) for _ in range(2))
    assert (one.nats, one.tokens) == (again.nats, again.tokens)
    shortened = score_targets(model, scored_stream(config, ids, tokenizer), limit=1)
    assert 0 < shortened.tokens < one.tokens
    without = score_targets(model, scored_stream(config, ids, tokenizer), Reading(mem_len=0))
    assert without.tokens == one.tokens
    assert without.nats != one.nats
    assert not model.training
    assert filled_in(model, next(scored_stream(config, ids, tokenizer)), tokenizer, precision="fp32", most=3).count("\n") == 2


def test_a_short_text_is_scored_in_fewer_rows(run: Path, text: Path) -> None:
    config, tokenizer = RunDirectory(run).config().changed(eval={"batch_size": 8}), RunDirectory(run).tokenizer()
    ids = tokenizer.encode(text.read_text())
    enough = 8 * _LEAST_STEPS * config.train.tgt_len
    long = np.tile(ids, -(-enough // len(ids)))
    rows = [next(scored_stream(config, long[:n], tokenizer)).ids.shape[0] for n in (enough, enough - 1, enough // 2 - 1)]
    assert rows == [8, 4, 2]


@pytest.mark.usefixtures("no_picture")
def test_a_part_of_the_validation_split_is_called_one(text: Path, tmp_path: Path) -> None:
    display = Lines()
    overrides = [*SETTINGS, "train.max_steps=1", "eval.max_tokens=50"]
    train("xlnet-quick", out=tmp_path / "run", corpus=str(text), overrides=overrides, display=display)
    (final,) = [entry for entry in entries(tmp_path / "run") if entry["kind"] == "final"]
    assert final["scored"] < final["split_tokens"] / 2
    assert final["bpc"] is None
    assert any(f"the first {final['scored']} of about {final['split_tokens']} targets" in line for line in display.said)


def test_eval_says_what_memory_is_worth_and_generate_what_it_cannot(run: Path, text: Path) -> None:
    done = txl("eval", str(run), "--split", "valid", "--compare-memory", "--precision", "fp32", "--json")
    assert done["status"] == 0, done["err"]
    found = json.loads(done["out"])
    (final,) = [entry for entry in entries(run) if entry["kind"] == "final"]
    assert found["targets"] == final["scored"]
    assert found["loss"] == pytest.approx(final["loss"], abs=1e-5)
    assert found["without_memory"]["loss"] == pytest.approx(final["loss_without_memory"], abs=1e-5)
    done = txl("eval", str(run), "--file", str(text))
    assert "nats per target" in done["out"]
    refused = {
        ("generate", str(run), "--prompt", "a"): "is an XLNet, which fills gaps with both sides in sight",
        ("eval", str(run), "--tgt-len", "8"): "--tgt-len is for models that read from left to right",
        ("explain", str(run), str(text), "--out", str(run / "page")): "is an XLNet",
    }
    for arguments, message in refused.items():
        done = txl(*arguments)
        assert done["status"] == 1
        assert message in done["err"]
        assert len(done["err"].strip().splitlines()) == 1, done["err"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("tokenizer.kind=byte", "needs pieces with <sep> and <cls>, which a vocabulary of kind 'byte' lacks"),
        ("model.reuse_len=24", r"reuse_len \(24\) must be at"),
        ("model.num_predict=40", "num_predict"),
        ("train.batch_size=3", "must be even"),
        ("train.varlen=true", "train.varlen .* does not go with model.kind"),
        ("train.temporal_penalty=0.1", "train.temporal_penalty .* does not go with model.kind"),
        ("optim.lr_by_length=true", "optim.lr_by_length .* does not go with model.kind"),
        ("eval.ext_len=3", "eval.ext_len .* does not go with model.kind"),
        ("train.batch_size=4000", "text too short"),
        ("data.split=[0.999,0.001,0]", "^validation split: [0-9]+ tokens are too few to score"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_written(change: str, message: str, text: Path, tmp_path: Path) -> None:
    with pytest.raises((ConfigError, CorpusError), match=message) as error:
        train("xlnet-quick", out=tmp_path / "run", corpus=str(text), overrides=[*SETTINGS, change])
    assert "\n" not in str(error.value)
    assert not (tmp_path / "run" / "config.json").exists()


def test_published_recipes_have_the_rows_of_the_authors() -> None:
    for name in ("xlnet-base", "xlnet-large", "xlnet-large-v1"):
        config = load_recipe(name)
        model = config.model.completed(vocab_size=32_000, tgt_len=config.train.tgt_len)
        assert isinstance(model, XLNetConfig)
        assert (model.reuse_len, model.num_predict, model.mem_len) == (256, 85, 384)
        assert model.bi_data
