"""What is timed on both sides is what is counted; figures, table and picture follow from it."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from tests.cost.clock import Clock
from tests.helpers import TINY
from transformer_xl.config import load_recipe
from transformer_xl.cost import eval_speed
from transformer_xl.cost.display import Figures, eval_speed_table
from transformer_xl.cost.eval_speed import Sides, Times, count_parameters, eval_speed_figures, make_sides, run, with_length
from transformer_xl.errors import ConfigError
from transformer_xl.model_config import TransformerXLConfig, VanillaConfig

CPU = torch.device("cpu")
WIDTH = 12  # of all heads together
LENGTH, SEGMENT, STRIDE = 10, 4, 3
TEXT = np.arange(13)


def sides(config: dict[str, Any] | None = None, **options: Any) -> Sides:
    settings: dict[str, Any] = {"lengths": [LENGTH], "precision": "fp32", "tgt_len": SEGMENT, "stride": STRIDE, "device": CPU}
    return make_sides(TransformerXLConfig(**(TINY | (config or {}))), TEXT, **(settings | options))


@pytest.mark.parametrize(
    ("config", "clamp_len"),
    [({}, None), ({}, 5), ({"n_layer": 1}, 5), ({"d_embed": 6}, 5), ({"same_length_besides_self": True}, 5)],
    ids=str,
)
def test_what_is_timed_is_what_torch_counts(config: dict[str, Any], clamp_len: int | None) -> None:
    """Operations stand for seconds. Besides what is needed, plain code computes what is hidden."""
    both = sides(config, clamp_len=clamp_len)
    entry = Times(LENGTH)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        run(both, [entry], n_round=2, clock=counter.get_total_flops)
    figures = eval_speed_figures(entry, both)
    n_layer = both.ours.config.n_layer
    later = n_layer * 2 * 2 * WIDTH * LENGTH * (LENGTH - 1) // 2  # keys after a query, in both products
    n_slot = 16
    told_apart = min(LENGTH, LENGTH if clamp_len is None else clamp_len + 1)
    padded = n_slot if clamp_len is None else clamp_len + SEGMENT  # with places for what is further away from the first token
    unseen = n_layer * 2 * WIDTH * (2 * (n_slot - LENGTH) + padded - told_apart)
    assert entry.vanilla == [figures["vanilla_flops"] + later] * 2
    assert entry.ours == [figures["our_flops"] + unseen] * 2
    assert entry.strided == pytest.approx([figures["stride"]["flops_ratio"] * figures["our_flops"] + later / STRIDE] * 2)
    assert figures["flops_ratio"] == figures["vanilla_flops"] / figures["our_flops"]


def test_the_sizes_are_the_same_and_so_is_the_number_of_parameters() -> None:
    config = load_recipe("enwik8-base").model.completed(vocab_size=204, tgt_len=512)
    assert isinstance(config, TransformerXLConfig)
    both = make_sides(config, TEXT, lengths=[800, 3800], precision="fp32", tgt_len=128, device=torch.device("meta"))
    vanilla = both.vanilla.config
    assert vanilla.max_len == 3800
    for name in set(VanillaConfig.model_fields) & set(TransformerXLConfig.model_fields):
        assert getattr(vanilla, name) == (0 if name == "mem_len" else getattr(config, name)), name
    counted = count_parameters(both, max_len=512)
    assert counted == {"ours": 41_055_436, "vanilla": 41_055_436 - 2 * 512, "vanilla_positions": 12 * 512 * 512}
    assert abs(counted["vanilla"] / counted["ours"] - 1) < 0.05
    whole = sum(p.numel() for p in both.vanilla.parameters())
    assert whole - counted["vanilla"] == 12 * (3800 - 512) * 512


@pytest.mark.parametrize("besides_self", [False, True])
def test_a_token_sees_as_many_positions_on_both_sides(besides_self: bool) -> None:
    both = sides({"same_length_besides_self": besides_self}, clamp_len=3)
    model = with_length(both.ours, 7)
    assert (model.window, model.clamp_len) == (7, 3)


def test_the_sides_take_turns_at_all_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[tuple[str, int]] = []

    class Runner:
        def __init__(self, sides: Sides, length: int) -> None:
            self.length = length

        def read_anew(self, n_predicted: int) -> None:
            done.append((f"anew {n_predicted}", self.length))
            clock.pass_(self.length)

        def read_on(self, n_segment: int) -> None:
            done.append((f"on {n_segment}", self.length))
            clock.pass_(0.5 * n_segment)

    clock = Clock()
    monkeypatch.setattr(eval_speed, "_Runner", Runner)
    times, said = [Times(7), Times(9)], []
    run(sides(lengths=[7, 9]), times, n_round=2, clock=clock, report=said.append)
    one = [[("anew 1", n), ("anew 3", n), ("on 1", n), ("on 2", n)] for n in (7, 9)]
    assert done == [*one[0], *one[1]] * 2
    assert said[1:3] == ["round 1 of 2, attention length 9", "round 2 of 2, attention length 7"]
    assert times[0] == Times(7, vanilla=[7, 7], ours=[0.125, 0.125], strided=[7 / 3, 7 / 3])
    assert times[1].slowdowns(times[1].vanilla) == [72, 72]


def test_without_a_stride_nothing_is_strided() -> None:
    both, entry = sides(stride=None), Times(LENGTH)
    run(both, [entry], n_round=1)
    assert not entry.strided
    assert min(entry.vanilla + entry.ours) > 0
    assert "stride" not in eval_speed_figures(entry, both)
    assert "every" not in eval_speed_table([eval_speed_figures(entry, both)])


def test_a_stride_is_part_of_what_is_read() -> None:
    assert sides(stride=LENGTH).stride == LENGTH
    with pytest.raises(ConfigError, match=r"stride \(11\) must be at most the shortest attention length \(10\)"):
        sides(stride=LENGTH + 1)


def test_what_is_read_is_of_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    both, seen = sides(), []
    read = type(both.vanilla).read
    monkeypatch.setattr(type(both.vanilla), "read", lambda self, ids: seen.append(ids) or read(self, ids))
    both = replace(both, text=np.array([2, 2, 5]))
    run(both, [Times(LENGTH)], n_round=1)
    assert {int(i) for ids in seen for i in ids.flatten()} == {2, 5}


def test_bf16_is_of_both() -> None:
    both, entry = sides(precision="bf16"), Times(LENGTH)
    seen = []
    both.vanilla.layers[0].register_forward_hook(lambda *_: seen.append(torch.is_autocast_enabled("cpu")))
    run(both, [entry], n_round=1)
    assert seen == [True, True]
    products = [module for module in both.vanilla.modules() if isinstance(module, torch.nn.Linear)]
    assert {module.weight.dtype for module in products} == {torch.bfloat16}, "converted for every token"


def measured() -> list[Figures]:
    both = sides()
    known, other = Times(10, [2.0, 4.0, 3.0], [0.01, 0.01, 0.01], [0.5, 0.5, 0.5]), Times(800, [20.0], [0.01], [1.0])
    return [eval_speed_figures(entry, both) for entry in (known, other)]


def test_figures() -> None:
    first, second = measured()
    assert (first["length"], first["rounds"], first["published_slowdown"]) == (10, 3, None)
    assert first["vanilla_seconds"] == {"median": 3.0, "min": 2.0, "max": 4.0}
    assert first["slowdown"] == pytest.approx({"median": 300, "min": 200, "max": 400})
    assert first["stride"]["slowdown"]["median"] == 50
    assert (second["published_slowdown"], second["rounds"]) == (363, 1)
