"""What follows from the counts: time, bytes sent, budget, advice."""

import json
from dataclasses import replace
from typing import Any

import pytest

from tests.cost.cases import run_config
from transformer_xl.config.model import TransformerXLConfig
from transformer_xl.config.recipes import load_recipe, recipe_names
from transformer_xl.cost.display import plan_table
from transformer_xl.cost.hardware import Hardware, gpu, measured
from transformer_xl.cost.plan import USABLE, Traffic, count_traffic, make_plan
from transformer_xl.cost.work import with_vocabulary
from transformer_xl.errors import ConfigError

ROUND = Hardware(
    name="round",
    flops=1e12,
    bandwidth=1e11,
    memory=1e9,
    link=1e10,
    network=1e9,
    precision="bf16",
    origin="test",
    efficiency=0.5,
)


def test_time_is_operations_over_the_rate_that_is_reached() -> None:
    plan = make_plan(run_config(), ROUND)
    assert plan.tokens_per_step == 8 * 5
    assert plan.timing.compute == pytest.approx(plan.flops.needed * 40 / (1e12 * 0.5))
    assert plan.timing.update == pytest.approx(7 * 4 * plan.parameters / 1e11)
    assert plan.timing.send == 0
    assert plan.tokens_per_second == pytest.approx(40 / (plan.timing.compute + plan.timing.update))
    assert make_plan(run_config(), replace(ROUND, efficiency=0.25)).timing.compute == pytest.approx(2 * plan.timing.compute)


def test_checkpointing_takes_the_forward_pass_once_more() -> None:
    plain, again = (make_plan(run_config(checkpoint_layers=c), ROUND) for c in (False, True))
    ratio = (plain.flops.needed + plain.flops.forward) / plain.flops.needed
    assert again.timing.compute == pytest.approx(ratio * plain.timing.compute)


def test_devices_share_the_lanes() -> None:
    one, four = make_plan(run_config(), ROUND), make_plan(run_config(), ROUND, gpus=4)
    assert four.memory.weights == one.memory.weights
    assert four.memory.mems == one.memory.mems // 4
    assert four.tokens_per_step == one.tokens_per_step
    assert four.timing.compute < one.timing.compute / 3  # distances are projected by each of them


def test_segments_that_gradients_reach_through() -> None:
    one, three = make_plan(run_config(), ROUND), make_plan(run_config(tbptt_segments=3), ROUND)
    assert three.tokens_per_step == 3 * one.tokens_per_step
    assert three.memory.mems == one.memory.mems
    assert three.timing.compute > 3 * one.timing.compute  # gradients of two memories, too
    assert three.flops.needed == pytest.approx(three.timing.compute * 1e12 * 0.5 / 120)
    for name in ("activations", "logits", "lowered"):
        assert 1.5 < getattr(three.memory, name) / getattr(one.memory, name) < 4


@pytest.mark.parametrize("division", ["ddp", "fsdp"])
def test_shares_are_gathered_for_each_segment_whole_gradients_are_summed_once(division: Any) -> None:
    configs = run_config(), run_config(tbptt_segments=3, accumulate=2)
    one, six = (make_plan(config, ROUND, gpus=2, division=division) for config in configs)
    assert six.traffic.total == one.traffic.total * (6 if division == "fsdp" else 1)


def test_groups_of_lanes_keep_their_memories_and_share_the_rest() -> None:
    one, four = make_plan(run_config(), ROUND), make_plan(run_config(accumulate=4), ROUND)
    assert four.memory.mems == one.memory.mems
    assert four.memory.activations < one.memory.activations / 2


def test_an_average_is_as_large_as_the_weights() -> None:
    plain, averaged = make_plan(run_config(), ROUND), make_plan(run_config(average="ema"), ROUND)
    assert averaged.memory.optimizer == plain.memory.optimizer + plain.memory.weights


def test_between_machines_the_network_counts() -> None:
    inside, across = (make_plan(run_config(), ROUND, gpus=4, per_machine=n) for n in (4, 2))
    assert inside.timing.send == pytest.approx(inside.traffic.total / 1e10)
    assert across.timing.send == pytest.approx(across.traffic.total / 1e9)
    assert (inside.layout.machines, across.layout.machines) == (1, 2)
    seen = across.timing.send - across.timing.compute * 2 / 3  # what the backward pass does not hide
    assert across.timing.overlapped == pytest.approx(across.timing.compute + seen + across.timing.update)
    assert across.timing.serial == across.timing.compute + across.timing.send + across.timing.update
    assert "sending takes longer" in across.advice[-1]


def test_whole_gradients_hide_behind_the_last_pass_shares_behind_all() -> None:
    network = replace(ROUND, network=3e10)
    ddp, fsdp = (make_plan(run_config(accumulate=4), network, gpus=2, per_machine=1, division=d) for d in ("ddp", "fsdp"))
    assert ddp.timing.overlapped == pytest.approx(
        ddp.timing.compute + max(0, ddp.timing.send - ddp.timing.compute / 6) + ddp.timing.update
    )
    assert fsdp.timing.overlapped == pytest.approx(max(fsdp.timing.compute, fsdp.timing.send) + fsdp.timing.update)
    assert "--divide ddp" in make_plan(run_config(), ROUND, gpus=4, per_machine=1, division="fsdp").advice[-1]


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
    assert plan.budget.tokens == tokens
    if tokens:
        assert plan.budget.steps == tokens / 40
        assert plan.budget.seconds == tokens / plan.tokens_per_second
    else:
        assert "in epochs: the length of the corpus tells" in plan_table(plan)


def test_a_budget_of_minutes() -> None:
    plan = make_plan(run_config(max_steps=None, max_minutes=2), ROUND)
    assert plan.budget.seconds == pytest.approx(120)


def test_what_does_not_fit_is_told_the_cheapest_remedy_that_helps() -> None:
    plan = make_plan(run_config(batch_size=64), ROUND, gpus=2)
    assert plan.fits
    fixed = plan.memory.weights + plan.memory.gradients + plan.memory.optimizer
    for part, remedy in ((0.7, "with train.accumulate=2 it takes"), (0.3, "with train.accumulate=")):
        room = (fixed + part * (plan.memory.total - fixed)) / USABLE
        advice = make_plan(run_config(batch_size=64), replace(ROUND, memory=room), gpus=2, division="ddp").advice[0]
        assert advice.startswith("does not fit: ")
        assert remedy in advice
    scarce = make_plan(run_config(batch_size=64), replace(ROUND, memory=0.9 * fixed), gpus=32, division="ddp").advice[0]
    assert "--divide fsdp" in scarce
    hopeless = make_plan(run_config(batch_size=64), replace(ROUND, memory=1000), gpus=2).advice[0]
    assert "take more GPUs or a smaller model" in hopeless


def test_a_remedy_is_a_remedy() -> None:
    plan = make_plan(load_recipe("scale-1b"), gpu("h100", "auto"), gpus=8)
    assert not plan.fits
    (advice,) = plan.advice
    changes = [word.rstrip(",") for word in advice.split() if word.startswith("train.")]
    assert changes
    assert make_plan(load_recipe("scale-1b", changes), gpu("h100", "auto"), gpus=8, division=plan.layout.division).fits


def test_checkpointing_that_is_not_needed() -> None:
    assert "fits without train.checkpoint_layers" in make_plan(run_config(checkpoint_layers=True), ROUND).advice[0]


def test_weights_are_divided_only_where_they_must_be() -> None:
    config = load_recipe("scale-1b", ["train.accumulate=16"])
    assert make_plan(config, gpu("h100", "auto"), gpus=64).layout.division == "ddp"
    assert make_plan(config, gpu("l4", "auto"), gpus=64).layout.division == "fsdp"


def test_lanes_that_cannot_be_divided() -> None:
    message = r"batch_size \(8\) must be a multiple of --gpus \(3\) times train.accumulate \(1\), such as 9"
    with pytest.raises(ConfigError, match=message):
        make_plan(run_config(), ROUND, gpus=3)


@pytest.mark.parametrize("name", sorted(recipe_names()))
def test_every_recipe_whose_vocabulary_is_known_has_a_plan(name: str) -> None:
    config = load_recipe(name)
    if not isinstance(config.model, TransformerXLConfig):
        with pytest.raises(ConfigError, match=rf"only transformer_xl models can be planned, and '{name}' is of kind"):
            make_plan(config, gpu("h100", config.train.precision))
        return
    try:
        with_vocabulary(config)
    except ConfigError:
        config = load_recipe(name, ["model.vocab_size=10000"])
    plan = make_plan(config, gpu("h100", config.train.precision))
    lines = plan_table(plan).splitlines()
    assert len(lines) <= 36
    assert max(map(len, lines)) <= 120
    assert json.loads(json.dumps(plan.as_dict()))["parameters"] == plan.parameters
    assert plan.memory.total > 0


def test_scale_1b_is_a_billion_parameters_and_a_trillion_tokens() -> None:
    plan = make_plan(load_recipe("scale-1b"), gpu("h100", "auto"), gpus=64)
    assert 0.95e9 < plan.parameters < 1.05e9
    assert plan.budget.tokens == 1e12


def test_the_cited_efficiency_follows_from_nvidias_figures() -> None:
    """159,185 tokens/s on eight A100, and 59,961 of the base model on one: see docs/scaling.md."""
    for name, gpus, rate, efficiency in (("nvidia-wt103-large", 8, 159_185, 0.12), ("nvidia-wt103-base", 1, 59_961, 0.10)):
        flops = make_plan(load_recipe(name), gpu("a100-40", "auto"), gpus=gpus).flops.needed
        assert flops * rate / gpus / 312e12 == pytest.approx(efficiency, abs=0.005)


def test_measured_hardware_counts_what_a_cpu_does() -> None:
    hardware = measured("cpu", flops=1e11, bandwidth=1e10, memory=1e10, precision="fp32", on_cpu=True)
    plan = make_plan(run_config(), hardware)
    assert (plan.backend, plan.hardware.efficiency, plan.precision) == ("matmul", 0.5, "fp32")


def test_processes_send_in_rings() -> None:
    assert count_traffic(1000, n_process=1, division="ddp", n_pass=3) == Traffic(0, 0)
    assert count_traffic(1000, n_process=4, division="ddp", n_pass=3) == Traffic(reduced=2 * 0.75 * 4000)
    assert count_traffic(1000, n_process=4, division="fsdp", n_pass=3) == Traffic(3 * 0.75 * 4000, 2 * 3 * 0.75 * 4000)
