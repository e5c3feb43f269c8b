"""Which parameter goes to which optimizer, what is decayed, and the shapes of the schedules."""

import json
import math
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.helpers import tiny_model
from tests.training import helpers
from transformer_xl.config.run import OptimConfig, RunConfig
from transformer_xl.errors import ConfigError
from transformer_xl.training.optim import OPTIMIZERS, Optimizers, Schedule, clipped

KINDS = get_args(OptimConfig.model_fields["optimizer"].annotation)
of_every_kind = pytest.mark.parametrize("kind", KINDS)


def names_of(optimizer: torch.optim.Optimizer, model: nn.Module) -> set[str]:
    owned = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    return {name for name, parameter in model.named_parameters() if parameter in owned}


def setting(key: str, optimizers: Optimizers, model: nn.Module) -> dict[str, float]:
    """Return the rate or the decay of each parameter."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    groups = [group for part in optimizers.parts for group in part.param_groups]
    return {names[parameter]: group[key] for group in groups for parameter in group["params"]}


def step(model: nn.Module, optimizers: Optimizers, rate: float = 1.0) -> None:
    optimizers.zero_grad()
    model(torch.arange(8).view(2, 4), labels=torch.ones(2, 4, dtype=torch.int64)).nll.sum().backward()
    optimizers.step(rate)


@pytest.mark.parametrize("shape", [{}, {"d_embed": 6, "tie_weight": False, "untie_r": True, "final_norm": True}])
@of_every_kind
def test_every_parameter_is_in_exactly_one_optimizer_and_moves(kind: Any, shape: dict[str, Any]) -> None:
    assert set(OPTIMIZERS) == set(KINDS)
    model = tiny_model(**shape)
    optimizers = Optimizers(model, OptimConfig(optimizer=kind, lr=0.1, weight_decay=0.1))
    owned = [p for part in optimizers.parts for group in part.param_groups for p in group["params"]]
    assert len(owned) == len({id(p) for p in owned}) == len(list(model.parameters()))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    step(model, optimizers)
    assert [name for name, p in model.named_parameters() if torch.equal(p, before[name])] == []


def test_muon_takes_the_matrices_of_the_layers_and_has_a_rate_of_its_own() -> None:
    model = tiny_model(d_embed=6, tie_weight=False)
    muon, adamw = Optimizers(model, OptimConfig(optimizer="muon", lr=0.3)).parts
    assert isinstance(muon, torch.optim.Muon)
    kinds = ("attention.qkv_net", "attention.r_net", "attention.o_net", "feed_forward.inner", "feed_forward.outer")
    assert names_of(muon, model) == {f"layers.{i}.{kind}.weight" for i in range(2) for kind in kinds}
    assert (muon.param_groups[0]["lr"], adamw.param_groups[0]["lr"]) == (0.3, 0.3)
    optimizers = Optimizers(model, OptimConfig(optimizer="muon", lr=0.3, adamw_lr=0.1))
    step(model, optimizers, rate=0.5)
    step(model, optimizers, rate=0.5)  # of the configured rate, not of the last one
    assert [g["lr"] for part in optimizers.parts for g in part.param_groups] == [0.15, 0.05, 0.05]


@pytest.mark.parametrize(
    "layout", [{"d_embed": 6, "tie_weight": False}, {"attention": "shaw", "max_klen": 9, "cutoffs": (4, 8)}]
)
@of_every_kind
def test_matrices_decay_or_the_layers_alone_or_everything(kind: Any, layout: dict[str, Any]) -> None:
    """What the model itself holds, such as slopes of positions, is no matrix, whatever its shape."""
    model = tiny_model(**layout)
    model.slopes = nn.Parameter(torch.zeros(2, 2))
    matrices = {name for name, p in model.named_parameters() if p.dim() == 2 and "." in name}
    layers = {name for name in matrices if name.startswith("layers.")}
    assert layers < matrices
    everything = {name for name, _ in model.named_parameters()}
    decayed: list[tuple[dict[str, Any], set[str]]] = [
        ({}, matrices),
        ({"decayed": "layers"}, layers),
        ({"decayed": "all"}, everything),
    ]
    for settings, expected in decayed:
        optimizers = Optimizers(model, OptimConfig(optimizer=kind, weight_decay=0.1, **settings))
        assert {name for name, decay in setting("weight_decay", optimizers, model).items() if decay > 0} == expected


@of_every_kind
def test_the_embedding_has_a_rate_of_its_own(kind: Any) -> None:
    model = tiny_model(cutoffs=(4, 8), div_val=2, tie_weight=False)
    config = OptimConfig(optimizer=kind, lr=0.5, adamw_lr=0.25 if kind == "muon" else None, embedding_lr_ratio=2.0)
    optimizers = Optimizers(model, config)
    step(model, optimizers, rate=0.1)
    step(model, optimizers, rate=0.1)
    rates = setting("lr", optimizers, model)
    common = 0.025 if kind == "muon" else 0.05
    for name, rate in rates.items():
        expected = 2 * common if name.startswith("embedding.") else common
        expected = 0.05 if kind == "muon" and name in names_of(optimizers.parts[0], model) else expected
        assert rate == pytest.approx(expected), name
    assert sum(name.startswith("embedding.") for name in rates) == 6  # tables and projections of three clusters


@pytest.mark.parametrize("kind", ["adamw", "adam", "muon"])
def test_adam_is_fused_where_it_can_be_and_computes_the_same(kind: Any) -> None:
    model, plain = tiny_model(), tiny_model()
    plain.load_state_dict(model.state_dict())
    config = OptimConfig(optimizer=kind, lr=0.01, weight_decay=0.1)
    fused, loop = Optimizers(model, config), Optimizers(plain, config)
    for group in fused.parts[-1].param_groups:
        assert group["fused"]
    for group in loop.parts[-1].param_groups:
        group["fused"] = False
    for _ in range(3):
        for one, other in zip(model.parameters(), plain.parameters(), strict=True):
            one.grad = torch.randn_like(one)
            other.grad = one.grad.clone()
        fused.step(1.0)
        loop.step(1.0)
    for (name, one), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6, msg=name)


def test_what_a_checkpoint_could_not_hold_is_refused() -> None:
    model = tiny_model()
    optimizers = Optimizers(model, OptimConfig(optimizer="sgd"))
    step(model, optimizers)
    optimizers.parts[0].state[model.get_parameter("layers.0.attention.o_net.weight")]["age"] = 1
    with pytest.raises(TypeError, match=r"SGD keeps age of layers\.0\.attention\.o_net\.weight as 1; keep it as a tensor"):
        optimizers.state_tensors()


def test_no_fused_update_is_asked_of_a_device_that_may_lack_it() -> None:
    optimizers = Optimizers(tiny_model().to("meta"), OptimConfig(optimizer="adamw"))
    assert not any(group["fused"] for group in optimizers.parts[0].param_groups)


@pytest.mark.parametrize("fused", [True, False])
def test_a_fused_update_counts_its_steps_beside_the_weights(fused: bool) -> None:
    """A checkpoint is read on the CPU; a fused update on another device refuses a count that stayed there."""
    model = tiny_model().to("meta")
    optimizers = Optimizers(model, OptimConfig(optimizer="adamw"))
    for group in optimizers.parts[0].param_groups:
        group["fused"] = fused
    optimizers.load_state_tensors(
        {"r_w_bias|step": torch.tensor(3.0), **{f"r_w_bias|{name}": torch.zeros(1, 3, 4) for name in ("exp_avg", "exp_avg_sq")}}
    )
    devices = {name: tensor.device.type for name, tensor in optimizers.state_tensors().items()}
    moments = dict.fromkeys(("r_w_bias|exp_avg", "r_w_bias|exp_avg_sq"), "meta")
    assert devices == {"r_w_bias|step": "meta" if fused else "cpu", **moments}


def test_a_run_may_go_on_without_momentum() -> None:
    buffers = {name: torch.zeros_like(parameter) for name, parameter in tiny_model().named_parameters()}
    state = {f"{name}|momentum_buffer": buffer for name, buffer in buffers.items()}
    for momentum in (0.0, 0.9):
        Optimizers(tiny_model(), OptimConfig(optimizer="sgd", momentum=momentum)).load_state_tensors(state)


@of_every_kind
def test_state_is_named_by_parameter_and_comes_back(kind: Any) -> None:
    model = tiny_model()
    config = OptimConfig(optimizer=kind, lr=0.1)
    optimizers = Optimizers(model, config)
    assert optimizers.state_tensors() == {}
    step(model, optimizers)
    state = optimizers.state_tensors()
    moments = {
        "sgd": {"momentum_buffer"},
        "muon": {"momentum_buffer", "exp_avg", "exp_avg_sq", "step"},
        "lamb": {"exp_avg", "exp_avg_sq"},
    }
    assert {name.rpartition("|")[2] for name in state} == moments.get(kind, {"exp_avg", "exp_avg_sq", "step"})
    assert {name.rpartition("|")[0] for name in state} == {name for name, _ in model.named_parameters()}

    again = Optimizers(model, config)
    again.load_state_tensors(state)
    loaded = again.state_tensors()
    assert loaded.keys() == state.keys()
    assert all(torch.equal(loaded[name], state[name]) for name in state)
    step(model, again)
    assert all(torch.equal(state[name], value) for name, value in optimizers.state_tensors().items()), "copies, not views"


class _Tuned(nn.Module):
    """Named as a model that is fine-tuned."""

    def __init__(self, backbone: nn.Module) -> None:
        super().__init__()
        self.backbone, self.head = backbone, nn.Linear(6, 2)


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_layers_have_rates_that_fall_towards_the_embedding(kind: Any) -> None:
    """Section A.4 of XLNet's paper: layer m of L has the rate l · αᴸ⁻ᵐ; embeddings have the lowest."""
    model = _Tuned(helpers.tiny_model(kind="xlnet", n_layer=3, final_norm=True))
    optimizers = Optimizers(model, OptimConfig(optimizer=kind, lr=0.1, weight_decay=0.01, layer_lr_decay=0.5))
    for name, rate in setting("lr", optimizers, model).items():
        factors = {"backbone.layers.0": 0.25, "backbone.layers.1": 0.5, "backbone.embedding": 0.125, "backbone.mask_emb": 0.125}
        factor = next((factor for begin, factor in factors.items() if name.startswith(begin)), 1.0)
        assert rate == pytest.approx(0.1 * factor), name
    decayed = {name for name, decay in setting("weight_decay", optimizers, model).items() if decay}
    assert decayed == {name for name, p in model.named_parameters() if p.dim() == 2}


@of_every_kind
def test_what_is_stacked_over_layers_has_each_layers_rate(kind: Any) -> None:
    """Each layer's part moves by its factor of what it would have moved; moments are those of an undivided rate."""
    moved, states = [], []
    for decay in (1.0, 0.5):
        torch.manual_seed(0)
        model = _Tuned(helpers.tiny_model(kind="xlnet", n_layer=3, init_std=0.5))
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter)
        optimizers = Optimizers(model, OptimConfig(optimizer=kind, lr=0.01, weight_decay=0.1, layer_lr_decay=decay))
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizers.step(0.5)
        moved.append({name: p.detach() - before[name] for name, p in model.named_parameters()})
        states.append(optimizers.state_tensors())
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    for name in ("r_w_bias", "r_r_bias", "r_s_bias", "seg_embed"):
        plain, scaled = (each[f"backbone.{name}"] for each in moved)
        assert plain.abs().max() > 1e-4
        for layer, factor in enumerate((0.25, 0.5, 1.0)):
            torch.testing.assert_close(scaled[layer], factor * plain[layer], rtol=1e-4, atol=1e-6, msg=name)


def test_the_authors_decay_scales_gradients_of_layers_alone() -> None:
    """`get_train_op` of their model_utils.py: α to the power L - 1 - l, for names with "layer_l" in them."""
    torch.manual_seed(0)
    model = _Tuned(helpers.tiny_model(kind="xlnet", n_layer=3))
    config = OptimConfig(optimizer="sgd", momentum=0.0, lr=1.0, layer_lr_decay=0.5, layer_lr_decay_on="gradient")
    optimizers = Optimizers(model, config)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizers.step(1.0)
    for name, parameter in model.named_parameters():
        factor = {"backbone.layers.0": 0.25, "backbone.layers.1": 0.5}.get(name[: len("backbone.layers.0")], 1.0)
        torch.testing.assert_close(before[name] - parameter, torch.full_like(parameter, factor), rtol=1e-5, atol=1e-6, msg=name)


by_layer = pytest.mark.parametrize(
    "settings",
    [{}, {"layer_lr_decay": 0.5}, {"layer_lr_decay": 0.5, "layer_lr_decay_on": "gradient"}],
    ids=["alike", "by rate", "by gradient"],
)


class Updated:
    """A model with layers of its own rates and stacked tensors, and what updates it."""

    def __init__(self, kind: Any, **settings: Any) -> None:
        torch.manual_seed(0)
        self.model = _Tuned(helpers.tiny_model(kind="xlnet", n_layer=3, init_std=0.5))
        self.optimizers = Optimizers(self.model, OptimConfig(optimizer=kind, lr=0.125, weight_decay=0.25, **settings))

    def step(self, rate: float | Tensor, found_inf: Tensor | None = None, *, seed: int = 1, spoilt: bool = False) -> None:
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator) * (math.nan if spoilt else 1)
        self.optimizers.step(rate, found_inf=found_inf)

    def tensors(self) -> dict[str, Tensor]:
        return {
            name: t.detach().clone()
            for name, t in (dict(self.model.named_parameters()) | self.optimizers.state_tensors()).items()
        }


@by_layer
@of_every_kind
def test_numbers_on_the_device_do_what_numbers_do(kind: str, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that the device forbids makes states and changes nothing, the first one and one between others."""
    monkeypatch.setattr("transformer_xl.training.muon.choose_precision", lambda *_: ("fp32", ""))
    plain, on_device, warmed = (Updated(kind, **settings) for _ in range(3))
    before = warmed.tensors()
    for _ in range(2):  # as what precedes a capture
        warmed.step(torch.tensor(1.0), torch.ones(()), spoilt=True)
    made = warmed.tensors()
    assert all(torch.equal(made[name], tensor) for name, tensor in before.items())
    assert not any(made[name].any() for name in made.keys() - before.keys())
    for seed, rate in enumerate((0.5, 1.0, 0.25, 0.125)):
        plain.step(rate, seed=seed)
        on_device.step(torch.tensor(rate), seed=seed)
        warmed.step(torch.tensor(rate), torch.zeros(()), seed=seed)
        before = warmed.tensors()
        warmed.step(torch.tensor(rate), torch.ones(()), spoilt=True)
        assert [name for name, tensor in warmed.tensors().items() if not torch.equal(tensor, before[name])] == []
    expected = plain.tensors()
    for each in (on_device, warmed):
        assert each.tensors().keys() == expected.keys() == made.keys()
        for name, tensor in each.tensors().items():
            assert tensor.dtype == expected[name].dtype
            tolerance = 0.0 if kind in ("adam", "adamw") else 1e-6
            torch.testing.assert_close(tensor, expected[name], rtol=tolerance, atol=tolerance, msg=name)


@pytest.mark.parametrize("kind", ["adam", "adamw", "muon"])
@pytest.mark.parametrize("found_inf", [None, torch.zeros(())], ids=["host decides", "device decides"])
def test_adam_counts_the_steps_of_a_cluster_from_its_first_token_on(kind: Any, found_inf: Tensor | None) -> None:
    """As in the authors' loop, where a gradient is None until then; it would be 0.58 of the step after three steps without.

    Cluster 1 begins at the second step, and cluster 2 at the fourth.
    """
    torch.manual_seed(0)
    models, config = [tiny_model(cutoffs=(4, 8), div_val=2) for _ in range(2)], OptimConfig(optimizer=kind, lr=0.1)
    models[1].load_state_dict(models[0].state_dict())
    ours, theirs = (Optimizers(model, config) for model in models)
    for i, token in enumerate((None, 4, None, 8, None, 8)):
        ids = torch.randint(4, (2, 5)) if token is None else torch.full((2, 5), token)
        for model, optimizers in zip(models, (ours, theirs), strict=True):
            optimizers.zero_grad()
            model(ids, labels=ids).nll.sum().backward()
        for name, parameter in models[1].named_parameters():
            if (name.endswith(".1") and i < 1) or (name.endswith(".2") and i < 3):
                assert parameter.grad is not None and not parameter.grad.any()
                parameter.grad = None
        ours.step(1.0, found_inf=found_inf)
        theirs.step(1.0, found_inf=found_inf)
        ours.load_state_tensors({name: tensor.clone() for name, tensor in ours.state_tensors().items()})  # as resumed
        for (name, parameter), own in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
            assert torch.equal(parameter, own), (i, name)
    kinds = ("embedding.tables", "embedding.projections", "softmax.biases", "softmax.projections")
    for cluster, n_step in ((1, 5.0), (2, 3.0)):
        assert [float(ours.state_tensors()[f"{each}.{cluster}|step"]) for each in kinds] == [n_step] * 4


class Reads(TorchDispatchMode):
    """Counts operations, and those that wait for a device to tell the host a number."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[str] = []
        self.n = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.n += "view" not in str(func) and not func.is_view and "profiler" not in str(func)
        if func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default, torch.ops.aten.nonzero.default):
            self.waits.append(str(func))
        return func(*args, **(kwargs or {}))


@by_layer
@of_every_kind
def test_a_step_with_tensors_never_waits_and_learning_rates_stay_where_they_are(kind: str, settings: dict[str, Any]) -> None:
    each, rate, found_inf = Updated(kind, **settings), torch.tensor(0.5), torch.ones(())
    each.step(rate, found_inf)

    def rates() -> list[Tensor]:
        return [group["lr"] for part in each.optimizers.parts for group in part.param_groups]

    addresses = [lr.data_ptr() for lr in rates()]
    with Reads() as reads:
        norm = clipped(each.model.parameters(), 1.0)
        each.optimizers.step(rate.fill_(0.25), found_inf=1 - norm.isfinite().float())
    assert reads.n and reads.waits == []
    assert [lr.data_ptr() for lr in rates()] == addresses
    assert max(map(float, rates())) == 0.125 * 0.25
    each.step(1.0)  # and with a number they are numbers again
    assert max(lr for lr in rates()) == 0.125 and all(isinstance(lr, float) for lr in rates())


def test_muon_takes_few_operations_for_many_matrices() -> None:
    """The same number for 3 layers and 6."""
    counts = []
    for n_layer in (3, 6):
        model = tiny_model(n_layer=n_layer)
        optimizers = Optimizers(model, OptimConfig(optimizer="muon"))
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizers.step(torch.tensor(1.0), found_inf=torch.zeros(()))
        n_shape = len({p.shape for group in optimizers.parts[0].param_groups for p in group["params"]})
        with Reads() as reads:
            optimizers.parts[0].step()
        counts.append(reads.n)
    assert counts[0] == counts[1] <= 40 * n_shape, counts


def shape(step: int, progress: float, **settings: Any) -> float:
    return Schedule(OptimConfig(**settings)).factor(step, progress)


LOW = {"min_lr_ratio": 0.1}
COSINE_OF_A_QUARTER = 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi / 4))


@pytest.mark.parametrize(
    ("settings", "factors"),
    [
        ({"schedule": "constant"}, {(999, 0.0): 1.0, (999, 0.5): 1.0, (999, 1.0): 1.0}),
        ({"schedule": "linear", **LOW}, {(999, 0.0): 1.0, (999, 0.5): 0.55, (999, 1.0): 0.1, (999, 1.2): 0.1}),
        ({"schedule": "cosine", **LOW}, {(999, 0.25): COSINE_OF_A_QUARTER, (999, 0.5): 0.55, (999, 7.0): 0.1}),
        ({"schedule": "plateau", **LOW}, {(999, 0.0): 1.0, (999, 1.0): 1.0}),
        ({"schedule": "inv_sqrt", "warmup_steps": 100}, {(99, 0.0): 1.0, (399, 0.0): 0.5, (9999, 0.0): 0.1}),
        ({"schedule": "inv_sqrt", "warmup_steps": 100, "min_lr_ratio": 0.2}, {(9999, 0.0): 0.2}),
        ({"schedule": "inv_sqrt"}, {(3, 0.0): 0.5}),
    ],
)
def test_shapes_of_schedules(settings: dict[str, Any], factors: dict[tuple[int, float], float]) -> None:
    """By (steps before, share of the budget)."""
    assert {at: shape(*at, **settings) for at in factors} == pytest.approx(factors)


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine", "plateau"])
def test_warm_up_is_linear_and_never_zero(kind: str) -> None:
    factors = [shape(step, 0.0, schedule=kind, warmup_steps=4) for step in range(6)]
    assert factors == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


@pytest.mark.parametrize("kind", ["cosine", "linear"])
def test_decay_begins_beneath_warm_up_or_after_it(kind: str) -> None:
    def factors(*steps: int, **settings: Any) -> list[float]:
        common = {"schedule": kind, "warmup_steps": 100, **LOW}
        return [shape(step, step / 1000, **common | settings) for step in steps]

    after = {"decay_after_warmup": True}
    assert factors(0, 49, 99, 100, 550, 1000, 2000, **after) == pytest.approx([0.01, 0.5, 1.0, 1.0, 0.55, 0.1, 0.1])
    assert factors(500) == pytest.approx([0.55]) and factors(99)[0] < 0.99
    assert factors(0, 300, 1000, warmup_steps=0, **after) == factors(0, 300, 1000, warmup_steps=0)
    longer = factors(999, 1000, warmup_steps=4000, **after)  # than the whole run
    assert longer == pytest.approx([0.25, 0.25], rel=1e-2)


@pytest.mark.parametrize("after", [False, True])
def test_warm_up_over_a_share_of_the_budget(after: bool) -> None:
    """Whatever the budget is, warm-up ends at the same share of it, and of 1,000 steps at the same step as by number."""
    settings = {"schedule": "linear", "decay_after_warmup": after}
    for step in (1, 49, 99, 100, 101, 550, 999):
        by_share = shape(step, step / 1000, warmup_share=0.1, **settings)
        assert by_share == pytest.approx(shape(step, step / 1000, warmup_steps=100, **settings), rel=1e-3), step
    assert shape(0, 0.0, warmup_share=0.1, **settings) == 0.0
    with pytest.raises(ConfigError, match=r"optim: warmup_steps \(3\) and warmup_share \(0\.1\) both warm up; use one"):
        RunConfig(optim={"warmup_steps": 3, "warmup_share": 0.1})  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("offset", [0.0, -4.0])
def test_plateau_lowers_the_rate_after_patience(offset: float) -> None:
    """What is better by less than 1e-4 of the best is no improvement; a metric with its sign changed is a loss, too."""
    schedule = Schedule(OptimConfig(schedule="plateau", min_lr_ratio=0.2))
    factors = []
    for loss in (3.0, 2.0, 2.5, 2.0, 1.9999, 1.9, *[2.0] * 9):
        schedule.validated(loss + offset)
        factors.append(schedule.factor(0, 0.0))
    assert factors == [*[1.0] * 4, *[0.5] * 4, *[0.25] * 3, *[0.2] * 4]


def test_plateau_leaves_changes_below_1e_8_alone() -> None:
    schedule = Schedule(OptimConfig(schedule="plateau", lr=3e-8))
    for loss in [1.0] * 20:
        schedule.validated(loss)
    assert schedule.factor(0, 0.0) == 0.5  # half of 3e-8 is another rate, a quarter is not 1e-8 away


def test_schedule_state_comes_back_before_and_after_the_first_validation() -> None:
    config = OptimConfig(schedule="plateau", min_lr_ratio=0.3)
    for losses in ([], [3.0], [3.0, 4.0], [3.0, 4.0, 4.0, 4.0], [3.0] * 9):
        schedule, again = Schedule(config), Schedule(config)
        for loss in losses:
            schedule.validated(loss)
        again.load_state_dict(json.loads(json.dumps(schedule.state_dict())))
        for loss in (2.0, 3.0, 3.0, 3.0):
            assert again.factor(0, 0.0) == schedule.factor(0, 0.0) and again.state_dict() == schedule.state_dict()
            schedule.validated(loss)
            again.validated(loss)


def test_gradients_are_clipped_to_the_norm_and_measured_before() -> None:
    parameters = [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(1))]
    for clip, scale in ((1.0, 1 / 5), (None, 1.0), (10.0, 1.0)):
        parameters[0].grad, parameters[1].grad = torch.tensor([0.0, 3.0]), torch.tensor([4.0])
        assert float(clipped(iter(parameters), clip)) == 5.0
        torch.testing.assert_close(parameters[1].grad, torch.tensor([4.0 * scale]))
    parameters[0].grad = torch.tensor([0.0, math.nan])
    assert clipped(iter(parameters), 1.0).isnan()
