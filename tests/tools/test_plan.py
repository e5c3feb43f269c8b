"""A plan's counts against formulas, autograd and a measured step, and what follows: time, bytes sent, budget."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.forked import run_forked
from transformer_xl.batch import Batch
from transformer_xl.config.model import LstmConfig, TransformerXLConfig, VanillaConfig
from transformer_xl.config.recipes import load_recipe
from transformer_xl.config.run import RunConfig, TrainConfig
from transformer_xl.errors import ConfigError
from transformer_xl.model.lstm import Lstm
from transformer_xl.model.transformer_xl import TransformerXL
from transformer_xl.model.vanilla import Vanilla
from transformer_xl.tools.flops import blueprint_of, count_pass
from transformer_xl.tools.hardware import Hardware, gpu
from transformer_xl.tools.plan import USABLE, make_plan, plan_table, vocabulary

SIZES: dict[str, Any] = {"vocab_size": 32, "n_layer": 2, "d_model": 12, "n_head": 3, "d_head": 4, "d_inner": 14, "mem_len": 6}
SIZES["max_klen"] = 40
ROUND = Hardware("round", flops=1e12, bandwidth=1e11, memory=1e9, link=1e10, precision="fp32", origin="test")
CPU = replace(ROUND, name="cpu", on_cpu=True)


def run_config(*, model: dict[str, Any] | None = None, **train: Any) -> RunConfig:
    settings: dict[str, Any] = {"batch_size": 8, "tgt_len": 5, "max_steps": 100} | train
    return RunConfig(model=TransformerXLConfig(**SIZES | (model or {})), train=TrainConfig(**settings))


def test_operations_are_those_of_the_formula() -> None:
    """Two for each weight and token, and for each pair of query and key; the memory and distances are projected again."""
    L, D, A, F, V, T, M, B = 2, 12, 12, 14, 32, 5, 6, 3
    S = M + T
    cost = count_pass(blueprint_of(TransformerXLConfig(**SIZES)), rows=B, tgt_len=T)
    layer = B * T * (4 * D * A + 2 * D * F) + B * M * 2 * D * A + S * D * A + 3 * B * T * S * A
    forward = 2 * (L * layer + B * T * D * V)
    assert cost.forward == pytest.approx(forward / (B * T))
    # neither the memory nor the sinusoids of distances have gradients
    assert cost.backward == pytest.approx((2 * forward - 2 * L * (B * M * 2 * D * A + S * D * A)) / (B * T))


@pytest.mark.parametrize("attention", ["transformer_xl", "shaw", "vaswani", "rotary", "alibi"])
@pytest.mark.parametrize("segments", [1, 2])
def test_a_pass_keeps_what_a_real_one_keeps(attention: str, segments: int) -> None:
    config = TransformerXLConfig(**SIZES | {"attention": attention, "dropout": 0.0, "d_model": 16, "mem_len": 8})
    check_kept(TransformerXL(config), rows=4, tgt_len=8, segments=segments)


@pytest.mark.parametrize(
    "model",
    [
        lambda: Vanilla(VanillaConfig(vocab_size=32, n_layer=2, d_model=12, n_head=3, d_head=4, d_inner=14, max_len=8)),
        lambda: TransformerXL(TransformerXLConfig(**SIZES | {"cutoffs": (8, 16), "div_val": 2})),
    ],
)
def test_other_language_models_are_counted_too(model: Any) -> None:
    check_kept(model(), rows=4, tgt_len=8, segments=1, rel=0.2)


def check_kept(model: Any, *, rows: int, tgt_len: int, segments: int, rel: float = 0.12) -> None:
    known = {x.untyped_storage().data_ptr() for x in model.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(x: torch.Tensor) -> torch.Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage()
        return x

    mems, losses = model.eval().init_mems(rows), []
    known |= {x.untyped_storage().data_ptr() for x in mems.state_dict().values()}
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        for _ in range(segments):
            ids = torch.randint(29, (rows, tgt_len))
            out = model.loss(Batch(ids, ids), mems=mems, keep_graph=segments > 1)
            mems = out.mems
            losses.append(out.nll.sum())
    measured = sum(storage.nbytes() for place, storage in kept.items() if place not in known)
    counted = count_pass(blueprint_of(model.config), rows=rows, tgt_len=tgt_len, segments=segments).kept
    assert counted == pytest.approx(measured, rel=rel)


def test_an_lstm_is_counted() -> None:
    config = LstmConfig(vocab_size=32, n_layer=1, d_model=12)
    cost = count_pass(blueprint_of(config), rows=2, tgt_len=5)
    assert cost.forward == 2 * (8 * 12 * 12 + 12 * 32)
    assert cost.memory == sum(x.nbytes for x in Lstm(config).init_mems(2).state_dict().values())


def peak_settings(precision: str, model: dict[str, Any], train: dict[str, Any]) -> dict[str, Any]:
    sizes = {"vocab_size": 2000, "n_layer": 4, "d_model": 256, "n_head": 4, "d_head": 64, "d_inner": 1024, "mem_len": 128}
    training = {"batch_size": 8, "tgt_len": 128, "max_steps": 9}
    return {"precision": precision, "model": sizes | model, "train": training | train}


@pytest.mark.skipif(sys.platform != "linux", reason="the peak of a process is read from /proc, which only Linux has")
@pytest.mark.parametrize(
    "settings",
    [
        peak_settings("fp32", {"n_layer": 2}, {"batch_size": 4, "accumulate": 2}),
        pytest.param(peak_settings("fp32", {}, {"tbptt_segments": 3, "tgt_len": 64}), marks=pytest.mark.slow),
        pytest.param(peak_settings("bf16", {"dropatt": 0.1}, {}), marks=pytest.mark.slow),
    ],
)
def test_the_peak_of_a_step_is_within_a_fifth_of_the_plan(settings: dict[str, Any]) -> None:
    run = RunConfig(model=TransformerXLConfig(**settings["model"]), train=TrainConfig(**settings["train"]))
    planned = make_plan(run, replace(CPU, precision=settings["precision"])).memory.total
    # bytes, not times: other load on the machine makes no difference
    (peak,) = run_forked("tests.tools.peak_child:peak", 1, settings, timeout=600)
    assert 0.8 * planned <= peak <= 1.2 * planned


def test_time_is_operations_over_the_rate_that_is_reached() -> None:
    plan = make_plan(run_config(), ROUND)
    assert plan.compute_seconds == pytest.approx(plan.flops.flops * 40 / (1e12 * 0.3))
    assert plan.update_seconds == pytest.approx(7 * 4 * plan.parameters / 1e11)
    assert plan.tokens_per_second == pytest.approx(40 / (plan.compute_seconds + plan.update_seconds))
    assert make_plan(run_config(), CPU).compute_seconds == pytest.approx(plan.compute_seconds * 0.3 / 0.5)


def test_groups_devices_and_checkpointing_share_what_a_step_keeps() -> None:
    one, four = make_plan(run_config(), ROUND), make_plan(run_config(), ROUND, gpus=4)
    groups, again = make_plan(run_config(accumulate=4), ROUND), make_plan(run_config(checkpoint_layers=True), ROUND)
    assert four.memory.weights == one.memory.weights == 4 * one.parameters
    assert (four.memory.mems, groups.memory.mems) == (one.memory.mems // 4, one.memory.mems)
    assert four.memory.activations == groups.memory.activations < one.memory.activations / 3
    assert again.memory.activations < 0.8 * one.memory.activations
    ratio = (one.flops.flops + one.flops.forward) / one.flops.flops
    assert again.compute_seconds == pytest.approx(ratio * one.compute_seconds)


def test_processes_send_in_rings() -> None:
    plan = make_plan(run_config(accumulate=2, tbptt_segments=3), ROUND, gpus=4)
    ring = 0.75 * 4 * plan.parameters
    assert plan.sent == {"ddp": 2 * ring, "fsdp": 18 * ring}
    assert plan.send_seconds == 2 * ring / 1e10
    assert plan.step_seconds == max(plan.compute_seconds, plan.send_seconds) + plan.update_seconds
    shared = make_plan(run_config(parallel="fsdp"), ROUND, gpus=4)
    assert shared.send_seconds == 3 * ring / 1e10
    assert shared.memory.optimizer == -(-make_plan(run_config(), ROUND).memory.optimizer // 4)
    assert make_plan(run_config(batch_size=16), replace(ROUND, link=1e12), gpus=16).send_seconds > plan.send_seconds / 10


@pytest.mark.parametrize(
    ("limits", "tokens"),
    [
        ({"max_steps": 100}, 4000),
        ({"max_steps": 100, "max_tokens": 3000}, 3000),
        ({"max_steps": None, "max_epochs": 2}, None),
    ],
)
def test_budget(limits: dict[str, Any], tokens: int | None) -> None:
    plan = make_plan(run_config(**limits), ROUND)
    assert plan.tokens == tokens
    assert tokens or "in epochs: the length of the corpus tells" in plan_table(plan)


def test_a_budget_of_minutes() -> None:
    plan = make_plan(run_config(max_steps=None, max_minutes=2), ROUND)
    assert (plan.tokens or 0) / plan.tokens_per_second == pytest.approx(120)


def test_what_does_not_fit_says_so() -> None:
    plan = make_plan(run_config(), ROUND)
    full = replace(ROUND, memory=plan.memory.total / USABLE)
    assert make_plan(run_config(), full).fits
    scarce = make_plan(run_config(), replace(full, memory=0.99 * full.memory))
    assert not scarce.fits and "DOES NOT FIT into the" in plan_table(scarce)


def test_weights_are_divided_only_where_they_must_be() -> None:
    config = load_recipe("scale-1b", ["train.accumulate=16"])
    assert make_plan(config, gpu("h100", "auto"), gpus=64).layout.division == "ddp"
    assert make_plan(config, gpu("l4", "auto"), gpus=64).layout.division == "fsdp"


def test_lanes_that_cannot_be_divided() -> None:
    with pytest.raises(ConfigError, match=r"batch_size \(8\) must be a multiple of --gpus \(3\) .* such as 9"):
        make_plan(run_config(), ROUND, gpus=3)


@pytest.mark.parametrize("name", ["quickstart", "ablation-lm1b-shaw", "lstm-ptb", "vanilla-text8-12", "wt2", "scale-1b"])
def test_recipes_have_plans(name: str) -> None:
    plan = make_plan(load_recipe(name), gpu("h100", "auto"))
    lines = plan_table(plan).splitlines()
    assert len(lines) <= 36 and max(map(len, lines)) <= 120
    assert json.loads(json.dumps(plan.as_dict()))["parameters"] == plan.parameters


def test_scale_1b_is_what_the_documentation_shows() -> None:
    plan = make_plan(load_recipe("scale-1b"), gpu("h100", "auto"), gpus=64)
    assert (plan.parameters, plan.tokens) == (1_007_001_600, 1e12)
    figures = plan_table(plan).partition("\n\n")[0]
    assert figures in (Path(__file__).parents[2] / "docs" / "scaling.md").read_text(encoding="utf-8")


def test_an_xlnet_cannot_be_planned() -> None:
    with pytest.raises(ConfigError, match="only models of kinds transformer_xl, vanilla, lstm can be planned"):
        make_plan(load_recipe("xlnet-base"), ROUND)


def test_nvidias_figures_give_the_least_efficiency() -> None:
    """159,185 tokens/s on eight A100: see docs/scaling.md."""
    flops = make_plan(load_recipe("nvidia-wt103-large"), gpu("a100-40", "auto"), gpus=8).flops.flops
    assert flops * 159_185 / 8 / 312e12 == pytest.approx(0.12, abs=0.005)


@pytest.mark.parametrize(
    ("recipe", "changes", "expected"),
    [
        ("enwik8-base", ["model.vocab_size=300"], (300, "as set")),
        ("enwik8-byte", [], (256, "bytes")),
        ("scale-1b", ["model.vocab_size=none", "tokenizer.vocab_size=none"], (8192, "bpe, the default")),
        ("ptb", [], (10_000, "words of ptb")),
    ],
)
def test_where_the_size_of_a_vocabulary_comes_from(recipe: str, changes: list[str], expected: tuple[int, str]) -> None:
    assert vocabulary(load_recipe(recipe, changes)) == expected


def test_an_unknown_vocabulary_is_asked_for() -> None:
    with pytest.raises(ConfigError, match="say it with --set model"):
        vocabulary(load_recipe("ptb", ["data.corpus=mine.txt"]))
