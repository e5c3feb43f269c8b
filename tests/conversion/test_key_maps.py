"""Every table covers its models exactly and is its own way back, for configurations drawn at random."""

import json
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.helpers import examples
from transformer_xl.config.model import HeadConfig, ModelConfig, TransformerXLConfig, XLNetConfig
from transformer_xl.conversion.key_maps import authors, huggingface, nvidia, tensorflow, xlnet_huggingface, xlnet_tensorflow
from transformer_xl.conversion.key_maps.entries import Entry, KeyMap, Part
from transformer_xl.errors import CheckpointError, ConfigError
from transformer_xl.model.build import make_model
from transformer_xl.model.layers import activate

FORMATS = {"huggingface": huggingface, "authors": authors, "nvidia": nvidia, "tensorflow": tensorflow}
XLNETS = {"xlnet_huggingface": xlnet_huggingface, "xlnet_tensorflow": xlnet_tensorflow}
DEEP = {"attention": ["transformer_xl"], "untie_r": [False], "tie_weight": [True, False], "proj_same_dim": [True]}
CAN = {  # what each format can express
    "huggingface": DEEP | {"untie_r": [True, False]},
    "authors": DEEP | {"attention": ["transformer_xl", "shaw", "vaswani", "al_rfou"]},
    "nvidia": DEEP | {"attention": ["transformer_xl", "shaw", "vaswani", "al_rfou"]},
    "tensorflow": DEEP | {"untie_r": [True, False], "tie_weight": [True], "proj_same_dim": [True, False]},
}
FIXED: dict[str, dict[str, Any]] = {  # what each format means without saying
    "huggingface": {"zero_first_memory": True},
    "authors": {},
    "nvidia": {},
    "tensorflow": {"zero_first_memory": True, "same_length_besides_self": True, "layer_norm_epsilon": 1e-12},
}


@st.composite
def configs(draw: st.DrawFn, form: str) -> TransformerXLConfig:
    """Draw a configuration that a format can express, with odd sizes."""
    can = {name: draw(st.sampled_from(values)) for name, values in CAN[form].items()}
    vocab_size = draw(st.integers(2, 40))
    cutoffs = tuple(sorted(draw(st.sets(st.integers(1, vocab_size - 1), max_size=3))))
    div_val = draw(st.integers(1, 4))
    n_head, d_head = draw(st.integers(1, 4)), draw(st.integers(1, 6))
    d_model = 2 * draw(st.integers(1, 8))
    if can["attention"] == "al_rfou":
        assume(n_head * d_head % 2 == 0)
        d_model = n_head * d_head
    mem_len = draw(st.integers(0, 9))
    plain_tensorflow = form == "tensorflow" and not cutoffs and div_val == 1  # one projection for both directions
    return TransformerXLConfig(
        vocab_size=vocab_size,
        n_layer=draw(st.integers(1, 3)),
        d_model=d_model,
        n_head=n_head,
        d_head=d_head,
        d_inner=draw(st.integers(1, 20)),
        d_embed=max(draw(st.just(d_model) | st.integers(1, 20)), div_val ** len(cutoffs)),
        cutoffs=cutoffs,
        div_val=div_val,
        tie_projs=tuple(plain_tensorflow or draw(st.booleans()) for _ in range(len(cutoffs) + 1)),
        max_klen=mem_len + draw(st.integers(1, 9)) if can["attention"] in ("shaw", "al_rfou") else None,
        mem_len=mem_len,
        clamp_len=draw(st.none() | st.integers(1, 9)),
        same_length=mem_len > 0 and draw(st.booleans()),
        pre_lnorm=form != "tensorflow" and draw(st.booleans()),
        dropout=draw(st.sampled_from([0.0, 0.25])),
        dropatt=draw(st.sampled_from([0.0, 0.125])),
        **can,
        **FIXED[form],
    )


TASK_OF_THE_AUTHORS = ("model/classification_mnli/logit/kernel",)


@st.composite
def heads(draw: st.DrawFn, form: str, mem_len: int) -> HeadConfig | None:
    """Draw a head that a format can express; the authors' files say little of one."""
    at_the_authors = form == "xlnet_tensorflow"
    kinds = ["classification"] if at_the_authors else ["classification", "multilabel", "regression", "choice", "tokens"]
    kind: Any = draw(st.sampled_from([None, "span", *kinds]))
    if kind is None or kind == "span":
        return HeadConfig(kind=kind) if kind else None
    stem = "label" if at_the_authors else draw(st.sampled_from(["LABEL", "name"]))
    labels = [f"{stem}_{i}" for i in range(draw(st.integers(2, 5)))]
    if kind == "tokens":
        return HeadConfig(kind=kind, labels=tuple(labels), dropout=0.0, max_len=None if mem_len else 512)
    return HeadConfig(
        kind=kind,
        labels=tuple(labels) if kind in ("classification", "multilabel") else (),
        summary="last" if at_the_authors else draw(st.sampled_from(["last", "mean"])),
        projection=draw(st.booleans()),
        dropout=0.1 if at_the_authors else 0.25,
        max_len=None if mem_len else 512,
    )


@st.composite
def xlnets(draw: st.DrawFn, form: str) -> XLNetConfig:
    """Draw a configuration of an XLNet that a format can express, fine-tuned or not."""
    n_head, d_head = draw(st.integers(1, 4)), 2 * draw(st.integers(1, 4))
    dropout = 0.1 if form == "xlnet_tensorflow" else draw(st.sampled_from([0.0, 0.25]))
    by_form: dict[str, Any] = {"untie_r": draw(st.booleans()), "zero_first_memory": True, "mem_len": 0}
    d_model = 2 * draw(st.integers(1, 8))
    if form == "xlnet_huggingface":
        d_model = n_head * d_head
        by_form = {
            "mem_len": draw(st.integers(0, 9)),
            "reuse_len": draw(st.none() | st.integers(1, 9)),
            "clamp_len": draw(st.none() | st.integers(1, 9)),
            "layer_norm_epsilon": draw(st.sampled_from([1e-12, 1e-5])),
            "init_std": draw(st.sampled_from([0.02, 0.1])),
        }
    head = draw(heads(form, by_form["mem_len"]))
    if head and form == "xlnet_tensorflow":
        by_form["zero_first_memory"] = False
    return XLNetConfig(
        head=head,
        vocab_size=draw(st.integers(2, 40)),
        n_layer=draw(st.integers(1, 3)),
        d_model=d_model,
        n_head=n_head,
        d_head=d_head,
        d_inner=draw(st.integers(1, 20)),
        activation=draw(st.sampled_from(["gelu_tanh", "relu", *(["gelu", "relu2"] if form == "xlnet_huggingface" else [])])),
        tie_weight=draw(st.booleans()),
        dropout=dropout,
        dropatt=dropout,
        **by_form,
    )


def native_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        return {name: tuple(tensor.shape) for name, tensor in make_model(config).state_dict().items()}


@pytest.mark.parametrize("form", [*FORMATS, *XLNETS])
@settings(max_examples=examples(50))
@given(data=st.data())
def test_a_table_covers_the_model_exactly_and_is_its_own_way_back(form, data):
    config = data.draw(xlnets(form) if form in XLNETS else configs(form))
    task: dict[str, Any] = {"names": TASK_OF_THE_AUTHORS} if form == "xlnet_tensorflow" else {}
    key_map, shapes = {**FORMATS, **XLNETS}[form].key_map(config, **task), native_shapes(config)
    names = [name for entry in key_map.entries for name in entry.native]
    assert sorted(names) == sorted(shapes)  # each once
    parts = {part.name: part for part in key_map.parts()}
    every_name = [name for part in key_map.parts() for name in (part.name, *part.aliases)]
    assert len(every_name) == len(set(every_name))

    own = {name: torch.randn(shape) for name, shape in shapes.items()}
    foreign = {name: key_map.foreign(name, own.__getitem__) for name in parts}
    assert {name: tuple(tensor.shape) for name, tensor in foreign.items()} == {n: part.shape for n, part in parts.items()}
    again = {name: key_map.native(name, shapes, lambda part: foreign[part.name]) for name in shapes}
    for name, tensor in own.items():
        assert torch.equal(again[name], tensor), name
    for name, tensor in foreign.items():  # and the other way around
        assert torch.equal(key_map.foreign(name, again.__getitem__), tensor), name


@given(config=configs("huggingface"))
def test_settings_of_hugging_face_are_their_own_way_back(config):
    values = json.loads(json.dumps(huggingface.values_of(config)))
    assert huggingface.config_of(values) == config


@given(config=xlnets("xlnet_huggingface"))
def test_settings_of_an_xlnet_of_hugging_face_are_their_own_way_back(config):
    values = json.loads(json.dumps(xlnet_huggingface.values_of(config)))
    names = {part.name for part in xlnet_huggingface.key_map(config).parts()}
    assert xlnet_huggingface.config_of(values, names) == config


@given(config=xlnets("xlnet_tensorflow"))
def test_settings_of_the_authors_of_xlnet(config):
    shapes = {part.name: part.shape for part in xlnet_tensorflow.key_map(config, names=TASK_OF_THE_AUTHORS).parts()}
    found = xlnet_tensorflow.config_of(authors_values(config), shapes)
    assert found == config
    assert xlnet_tensorflow.key_map(found, names=shapes) == xlnet_tensorflow.key_map(config, names=TASK_OF_THE_AUTHORS)


def authors_values(config: XLNetConfig) -> dict[str, Any]:
    """Return the `xlnet_config.json` of a model."""
    same = {name: getattr(config, name) for name in ("n_layer", "d_model", "n_head", "d_head", "d_inner", "untie_r")}
    return same | {"n_token": config.vocab_size, "ff_activation": {"gelu_tanh": "gelu", "relu": "relu"}[config.activation]}


@given(config=configs("authors"), tgt_len=st.integers(1, 9))
def test_settings_of_the_authors_are_their_own_way_back(config, tgt_len):
    flags = json.loads(json.dumps(authors.flags_of(config, tgt_len=tgt_len)))
    assert authors.config_of(flags) == config
    assert flags["tgt_len"] == (tgt_len if config.max_klen is None else config.max_klen - config.mem_len)


@given(config=configs("nvidia"))
def test_settings_of_nvidia_count_one_key_more(config):
    expected = config.model_copy(update={"same_length_besides_self": True})
    assert nvidia.config_of(authors.flags_of(config, tgt_len=5)) == expected


@given(config=configs("tensorflow"))
def test_shapes_of_tensorflow_tell_the_table(config):
    key_map = tensorflow.key_map(config)
    found = tensorflow.config_of({part.name: part.shape for part in key_map.parts()}, "here")
    assert tensorflow.key_map(found) == key_map
    said = FIXED["tensorflow"] | {"untie_r": config.untie_r, "vocab_size": config.vocab_size, "cutoffs": config.cutoffs}
    assert {name: getattr(found, name) for name in said} == said


@pytest.mark.parametrize(
    ("d_embed", "div_val", "cutoffs"), [(11, 3, (3, 5)), (4096, 16, (3, 5, 7)), (30, 29, (3,)), (2, 2, (3,))]
)
def test_factors_between_widths_that_do_not_divide_are_found(d_embed, div_val, cutoffs):
    sizes = {"vocab_size": 9, "cutoffs": cutoffs, "d_model": 4, "d_embed": d_embed, "n_layer": 1}
    config = TransformerXLConfig(**sizes, div_val=div_val, tie_projs=(True,) * (len(cutoffs) + 1))
    shapes = {part.name: part.shape for part in tensorflow.key_map(config).parts()}
    found = tensorflow.config_of(shapes, "here")
    assert tensorflow.key_map(found) == tensorflow.key_map(config)
    assert found.div_val == div_val or len(cutoffs) == 1  # with two clusters several factors make the same


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("transformer/layer_0/rel_attn/qkv/kernel", None, "no complete set of tensors 'transformer/layer_"),
        ("transformer/adaptive_embed/lookup_table", (0, 4), "no complete set of tensors 'transformer/adaptive_embed"),
        ("transformer/r_w_bias", (3,), r"'transformer/r_w_bias' of 'here' must have 2 or 3 dimensions, not shape \(3,\)"),
    ],
)
def test_tensorflow_checkpoints_of_other_models(name, shape, message):
    config = TransformerXLConfig(vocab_size=9, d_model=4, n_layer=2)
    shapes = {part.name: part.shape for part in tensorflow.key_map(config).parts()} | {name: shape}
    with pytest.raises(CheckpointError, match=message):
        tensorflow.config_of({name: shape for name, shape in shapes.items() if shape}, "here")


MAP = KeyMap((Entry(("a", "b"), (Part("x", (2, 3), ("y", "z")),)),), ignored=("step|slot/.*",))


def test_tensors_are_found_under_all_their_names():
    assert MAP.locate({"x": (2, 3), "step": (), "slot/1": (7,)}, "f") == {"x": ["x"]}
    assert MAP.locate({"z": (2, 3), "y": (2, 3)}, "f") == {"x": ["y", "z"]}


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ({}, r"'f' lacks tensor 'x' \(2, 3\), which its settings call for"),
        ({"y": (3, 2)}, r"tensor 'y' of 'f' has shape \(3, 2\), its settings call for \(2, 3\)"),
        ({"x": (2, 3), "z": (2,)}, r"tensor 'z' of 'f' has shape \(2,\), its settings call for \(2, 3\)"),
        ({"x": (2, 3), "steps": ()}, "'f' holds tensor 'steps'"),
        ({"x": (2, 3), "a\nb": ()}, r"'f' holds tensor 'a\\nb' \(\), for which"),
    ],
)
def test_tensors_that_do_not_fit_are_named(shapes, message):
    with pytest.raises(CheckpointError, match=message):
        MAP.locate(shapes, "f")


def test_what_may_be_missing_or_is_left_out_is_noted():
    entries = (Entry(("a",), (Part("x", (2,)),)), Entry(("b",), (Part("y", (3,), ("z",), optional=True),)))
    key_map = KeyMap(entries, left_out=(r"head\..*",))
    assert key_map.locate({"x": (2,), "head.w": (7, 7)}, "f") == {"x": ["x"]}
    assert list(key_map.notes(["x", "z"])) == []
    left_out, missing = key_map.notes(["x", "head.w", "head.\x1b"])
    assert left_out == "left out, because heads of other tasks are not converted: 'head.\\x1b', 'head.w'"
    assert missing == "there is no tensor 'y', so 'b' is zeros"
    (many,) = key_map.notes(["z", *(f"head.{i:03}" for i in range(500))])
    assert many.endswith(" and 480 more")
    with pytest.raises(CheckpointError, match=r"tensor 'z' of 'f' has shape \(4,\)"):
        key_map.locate({"x": (2,), "z": (4,)}, "f")
    with pytest.raises(CheckpointError, match="lacks tensor 'x'"):
        key_map.locate({"y": (3,)}, "f")


def test_one_foreign_tensor_of_several_native_ones_is_cut_in_order():
    load = {"x": torch.arange(6.0).view(2, 3)}
    assert MAP.native("b", {"a": (4,), "b": (2,)}, lambda part: load[part.name]).tolist() == [4, 5]
    assert MAP.foreign("x", {"a": torch.arange(4.0), "b": torch.tensor([4.0, 5.0])}.__getitem__).equal(load["x"])


TAILS = TransformerXLConfig(vocab_size=9, cutoffs=(3, 5), d_model=4, n_layer=1, tie_projs=(False,) * 3)


@pytest.mark.parametrize("form", ["huggingface", "authors"])
@pytest.mark.parametrize(
    ("div_val", "expected"),
    [(1, {0: ("crit.out_projs.0", "crit.out_projs.2")}), (2, {0: ("crit.out_projs.0",), 1: (), 2: ("crit.out_projs.2",)})],
)
def test_shared_projections_have_two_names(form, div_val, expected):
    """With one table all clusters share its projection, else each that of its own table."""
    changes = {"d_embed": 8, "div_val": div_val, "tie_projs": (True, False, True)}
    parts = FORMATS[form].key_map(TAILS.model_copy(update=changes)).parts()
    found = {part.name.removeprefix("transformer."): part.aliases for part in parts if "emb_projs" in part.name}
    assert found == {f"word_emb.emb_projs.{i}": aliases for i, aliases in expected.items()}


FLAGS = authors.flags_of(TransformerXLConfig(vocab_size=9, n_layer=1, tie_projs=(False,)), tgt_len=4)
FILES: dict[str, Any] = {
    "huggingface": lambda change: huggingface.config_of({"model_type": "transfo-xl"} | change),
    "authors": lambda change: authors.config_of(FLAGS | change),
    "xlnet_huggingface": lambda change: xlnet_huggingface.config_of({"model_type": "xlnet"} | change),
    "xlnet_tensorflow": lambda change: xlnet_tensorflow.config_of(
        authors_values(XLNetConfig(vocab_size=9, n_layer=1)) | change, {}
    ),
}


@pytest.mark.parametrize(
    ("form", "change", "message"),
    [
        ("huggingface", {"model_type": "gpt2"}, r"model_type \('gpt2'\) must be 'transfo-xl'"),
        ("huggingface", {"auto_map": {"AutoModel": "evil--module.Model"}}, "unknown key 'auto_map'; "),
        ("huggingface", {"n_layers": 3}, "unknown key 'n_layers'; did you mean 'n_layer'"),
        ("huggingface", {"attn_type": 1}, r"attn_type \(1\)"),
        ("huggingface", {"untie_r": 0.0}, r"untie_r \(0.0\) must be a valid boolean"),
        ("huggingface", {"untie_r": 2}, r"untie_r \(2\) must be a valid boolean"),
        ("huggingface", {"vocab_size": 10, "n_token": 12}, r"vocab_size is 10 and, under another name, 12"),
        ("huggingface", {"sample_softmax": 5}, r"sample_softmax \(5\)"),
        ("huggingface", {"tie_projs": True}, r"tie_projs \(true\)"),
        ("huggingface", {"d_model": "8"}, r"d_model \('8'\) must be a valid integer"),
        ("huggingface", {"dropout": float("nan")}, r"dropout \(nan\)"),
        ("huggingface", {"cutoffs": list(range(1, 10**6))}, "cutoffs .* should have at most 100 items"),
        ("authors", {"attn_type": 4}, r"attn_type \(4\)"),
        ("authors", {"n_token": 9.0}, r"n_token \(9.0\) must be a valid integer"),
        ("xlnet_huggingface", {"attn_type": "uni"}, r"attn_type \('uni'\) must be 'bi'"),
        ("xlnet_huggingface", {"ff_activation": "silu"}, r"ff_activation \('silu'\)"),
        ("xlnet_huggingface", {"n_head": 15}, r"d_model \(1024\) must be n_head \(15\) times d_head"),
        ("xlnet_huggingface", {"auto_map": {"AutoModel": "evil--module.Model"}}, "unknown key 'auto_map'; "),
        ("xlnet_tensorflow", {"ff_activation": "gelu_new"}, r"ff_activation \('gelu_new'\) must be 'gelu' or 'relu'"),
        ("xlnet_tensorflow", {"mem_len": 3}, "unknown key 'mem_len'; "),
    ],
)
def test_settings_that_cannot_be_are_one_line(form, change, message):
    with pytest.raises(ConfigError, match=message) as error:
        FILES[form](change)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 700


@pytest.mark.parametrize("name", authors_values(XLNetConfig(vocab_size=9, n_layer=1)))
def test_no_setting_of_the_authors_of_xlnet_is_guessed(name):
    values = authors_values(XLNetConfig(vocab_size=9, n_layer=1))
    del values[name]
    with pytest.raises(ConfigError, match=f"^{name}: Field required"):
        xlnet_tensorflow.config_of(values, {})


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [("gelu", "gelu"), ("gelu_new", "gelu_tanh"), ("gelu_pytorch_tanh", "gelu_tanh"), ("relu", "relu"), ("relu2", "relu2")],
)
def test_names_of_activations_mean_what_they_mean_at_hugging_face(theirs, ours):
    """The same function, although the authors of XLNet call another one gelu."""
    activations = pytest.importorskip("transformers.activations", reason="the extra 'hf' is not installed")
    x = torch.linspace(-4, 4, 101, dtype=torch.float64)
    config = xlnet_huggingface.config_of({"ff_activation": theirs})
    assert config.activation == ours
    torch.testing.assert_close(activate(x, config.activation), activations.ACT2FN[theirs](x), rtol=0, atol=1e-15)


def test_the_published_settings_of_xlnet():
    """As the files of the base model have them, at Hugging Face and at the authors'."""
    at_hugging_face = {
        **{"architectures": ["XLNetLMHeadModel"], "attn_type": "bi", "bi_data": False, "bos_token_id": 1, "clamp_len": -1},
        **{"d_head": 64, "d_inner": 3072, "d_model": 768, "dropout": 0.1, "end_n_top": 5, "eos_token_id": 2},
        **{"ff_activation": "gelu", "initializer_range": 0.02, "layer_norm_eps": 1e-12, "mem_len": None, "n_head": 12},
        **{"model_type": "xlnet", "n_layer": 12, "pad_token_id": 5, "reuse_len": None, "same_length": False},
        **{"start_n_top": 5, "summary_activation": "tanh", "summary_last_dropout": 0.1, "summary_type": "last"},
        **{"summary_use_proj": True, "task_specific_params": {}, "untie_r": True, "vocab_size": 32000},
    }
    at_the_authors = {"d_head": 64, "d_inner": 3072, "d_model": 768, "ff_activation": "gelu", "n_head": 12, "n_layer": 12}
    at_the_authors |= {"n_token": 32000, "untie_r": True}
    expected = XLNetConfig(vocab_size=32000, mem_len=0)
    assert xlnet_huggingface.config_of(at_hugging_face) == expected.model_copy(update={"activation": "gelu"})
    assert xlnet_tensorflow.config_of(at_the_authors, {}) == expected.model_copy(update={"zero_first_memory": True})
    _, note = xlnet_huggingface.notes_of(at_hugging_face, xlnet_huggingface.config_of(at_hugging_face))
    assert "--set activation=gelu_tanh" in note


def test_what_hugging_face_leaves_out_has_its_defaults():
    config = huggingface.config_of({})
    assert (config.n_layer, config.d_model, config.mem_len, config.clamp_len) == (18, 1024, 1600, 1000)
    assert (config.cutoffs, config.div_val, config.tie_projs) == ((20000, 40000, 200000), 4, (False, True, True, True))
    assert (config.untie_r, config.tie_weight, config.same_length, config.zero_first_memory) == (True,) * 4


def test_old_names_and_short_forms_of_hugging_face():
    old = {"n_token": 9, "tie_weight": False, "cutoffs": [3, 5], "proj_share_all_but_first": False, "d_model": 4, "d_embed": 16}
    config = huggingface.config_of({**old, "clamp_len": 0, "mem_len": -1, "adaptive": True, "torch_dtype": "float32"})
    assert (config.vocab_size, config.tie_weight, config.tie_projs) == (9, False, (False, False, False))
    assert (config.clamp_len, config.mem_len, config.same_length) == (None, 0, False)
    assert huggingface.config_of(old | {"vocab_size": 9, "n_token": 9}).vocab_size == 9
    short = {**old, "tie_projs": [True]}
    assert huggingface.config_of(short).tie_projs == (True, False, False)


def test_lengths_of_the_authors():
    assert authors.config_of(FLAGS | {"attn_type": 1, "ext_len": 2, "mem_len": 5}).max_klen == 4 + 2 + 5
    assert authors.config_of(FLAGS | {"attn_type": 1, "mem_len": 5, "max_klen": 7}).max_klen == 7  # reset_length keeps it
    none = authors.config_of(FLAGS | {"mem_len": 0, "same_length": 1, "clamp_len": 0, "pre_lnorm": 1})
    assert (none.same_length, none.clamp_len, none.pre_lnorm, none.max_klen) == (False, None, True, None)


@pytest.mark.parametrize("form", ["huggingface", "authors", "nvidia"])
def test_a_kind_of_attention_that_no_other_program_has(form):
    with pytest.raises(ConfigError, match=r"attention \('toy'\) is a kind that no other program has; it cannot be converted"):
        FORMATS[form].key_map(TransformerXLConfig(vocab_size=9, n_layer=1, attention="toy"))
