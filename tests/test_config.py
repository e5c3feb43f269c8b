"""Recipes and overrides: the settings that they make, and mistakes in one line with key, value and remedy."""

import re
from pathlib import Path
from typing import Any, get_args

import pytest

from transformer_xl.config.model import TransformerXLConfig
from transformer_xl.config.recipes import (
    apply_overrides,
    load_recipe,
    load_task,
    parse_override,
    recipe_names,
    settings_of,
    task_names,
)
from transformer_xl.config.run import DataConfig, OptimConfig, RunConfig, TrainConfig, merge
from transformer_xl.config.settings import REMOVED, REMOVED_DETAILS
from transformer_xl.errors import ConfigError, TxlError


@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_loads_and_says_what_it_is_for(name: str) -> None:
    config = load_recipe(name)
    assert config.name == name
    assert config.description
    assert config.source
    assert config.model.vocab_size is None  # comes from the tokenizer
    assert load_recipe(name, ["train.max_steps=3"]).train.max_steps == 3


def test_a_recipe_file_has_the_name_of_its_file(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text("[model]\nn_layer = 3\n")
    config = load_recipe(str(tmp_path / "mine.toml"), ["model.d_model=8"])
    assert (config.name, config.model.n_layer, config.model.d_model) == ("mine", 3, 8)


@pytest.mark.parametrize("name", task_names())
def test_every_task_is_a_run_without_its_model(name: str) -> None:
    values = load_task(name)
    assert values.keys() == {"name", "description", "source", "task", "optim", "train", "eval"}
    config = apply_overrides(values, ["task.patience=3"])
    assert config.task and config.task.patience == 3
    assert (config.name, config.train.sample_tokens) == (name, 0)


def test_a_task_may_be_a_file_and_says_its_kind(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('[task]\nkind = "regression"\n')
    assert load_task(str(file)) == {"name": "mine", "task": {"kind": "regression"}}
    for content in ("", "task = 3", "[task]\npatience = 3"):
        file.write_text(content)
        with pytest.raises(ConfigError, match=r"^task '.*mine.toml' does not say its kind; begin it with \[task\] and kind = "):
            load_task(str(file))
    for name, task in (("NER", "token-classification"), ("clasification", "classification")):
        with pytest.raises(ConfigError, match=rf"^unknown task '{name}'; did you mean '{task}'\?$"):
            load_task(name)


def test_settings_of_a_task_are_known_where_there_is_none() -> None:
    with pytest.raises(ConfigError, match=r"^--set 'patience=3' lacks its section; did you mean task\.patience\?$"):
        apply_overrides({}, ["patience=3"])
    assert ("task", None) in [(name, value) for name, value, _ in settings_of(RunConfig())]
    assert ("task.patience", 5) in [(name, value) for name, value, _ in settings_of(apply_overrides(load_task("squad"), []))]
    assert parse_override("task.patience=none") == {"task": {"patience": None}}


@pytest.mark.parametrize(
    ("override", "section", "key", "value"),
    [
        ("train.max_steps=7", "train", "max_steps", 7),
        (" train.max_steps = 7 ", "train", "max_steps", 7),
        ("optim.lr=1e-3", "optim", "lr", 1e-3),
        ("optim.clip=none", "optim", "clip", None),
        ("model.same_length=true", "model", "same_length", True),
        ("optim.betas=[0.5, 0.6]", "optim", "betas", (0.5, 0.6)),
        ("data.corpus=my file=1.txt", "data", "corpus", "my file=1.txt"),
        ('data.corpus="quoted"', "data", "corpus", "quoted"),
        ("train.average=none", "train", "average", "none"),
        ('data.shuffle="none"', "data", "shuffle", "none"),
    ],
)
def test_overrides(override: str, section: str, key: str, value: object) -> None:
    assert getattr(getattr(load_recipe("quickstart", [override]), section), key) == value


def test_none_can_be_said_of_every_setting_that_has_such_a_value() -> None:
    for section, field in RunConfig.model_fields.items():
        settings = field.annotation
        for key, setting in getattr(settings, "model_fields", {}).items():
            values = get_args(setting.annotation)
            if "none" in values or type(None) in values:
                expected = "none" if "none" in values else None
                assert parse_override(f"{section}.{key}=none") == {section: {key: expected}}


def test_later_overrides_win_and_tables_merge() -> None:
    config = load_recipe("quickstart", ["train.max_steps=1", "train.max_steps=2"])
    assert (config.train.max_steps, config.train.batch_size) == (2, load_recipe("quickstart").train.batch_size)
    assert merge({"a": {"b": 1}}, {"a": 3}) == {"a": 3}


def test_a_dumped_run_loads_back() -> None:
    config = load_recipe("quickstart", ["model.vocab_size=256"])
    assert RunConfig(**config.model_dump()) == config
    assert apply_overrides(config.model_dump(mode="json"), []) == config


def test_evaluation_reads_as_training_unless_told() -> None:
    config = load_recipe("quickstart")
    assert (config.eval_tgt_len, config.eval_mem_len) == (config.train.tgt_len, config.model.mem_len)
    config = load_recipe("quickstart", ["eval.tgt_len=3", "eval.mem_len=0"])
    assert (config.eval_tgt_len, config.eval_mem_len) == (3, 0)


def test_shorter_segments_of_evaluation_see_as_much_as_those_of_training() -> None:
    """Of quickstart's 64, with a memory of 128."""
    for mem_len, *overrides in (
        (184, "eval.tgt_len=8"),
        (164, "eval.tgt_len=8", "eval.ext_len=20"),
        (128, "eval.tgt_len=8", "eval.ext_len=100"),
        (128, "eval.tgt_len=64"),
        (128, "eval.tgt_len=100"),
        (90, "eval.tgt_len=8", "eval.mem_len=90"),
        (128, "eval.tgt_len=8", "model.same_length=true"),  # a token sees the same in segments of any length
        (128, "eval.tgt_len=8", "eval.same_length=true"),
        (184, "eval.tgt_len=8", "model.same_length=true", "eval.same_length=false"),
        (0, "eval.tgt_len=8", "model.mem_len=0"),
    ):
        assert load_recipe("quickstart", overrides).eval_mem_len == mem_len, overrides
    assert load_recipe("enwik8-small-lstm", ["eval.tgt_len=8"]).eval_mem_len == 1  # its state
    for name in recipe_names():  # those that set lengths for evaluation set both, so nothing changes for them
        config = load_recipe(name)
        assert config.eval_mem_len == (config.model.mem_len if config.eval.mem_len is None else config.eval.mem_len)


@pytest.mark.parametrize(
    ("settings", "values", "message"),
    [
        (TransformerXLConfig, {"d_model": 5}, r"^d_model \(5\) must be even, because its sinusoids come in pairs; use 6$"),
        (TransformerXLConfig, {"clamp_len": 0}, r"^clamp_len \(0\) must be"),
        (TransformerXLConfig, {"n_layer": "two"}, r"^n_layer \('two'\) must be a valid integer"),
        (TransformerXLConfig, {"init_std": float("nan")}, r"^init_std \(nan\) must be"),
        (TransformerXLConfig, {"cutoffs": (5, 3)}, r"cutoffs \(5, 3\) must .* between 0 and vocab_size \(None\)"),
        (TransformerXLConfig, {"cutoffs": (0, 3)}, r"cutoffs \(0, 3\) must increase"),
        (TransformerXLConfig, {"cutoffs": (5, 9), "vocab_size": 9}, r"cutoffs \(5, 9\) .* vocab_size \(9\)"),
        (TransformerXLConfig, {"cutoffs": (3, 5), "tie_projs": (True,)}, r"tie_projs \(True,\) must .* per cluster.*: 3"),
        (TransformerXLConfig, {"tie_projs": (True,), "proj_share_all_but_first": True}, "the same thing twice; use one"),
        (TransformerXLConfig, {"cutoffs": (3, 5), "div_val": 40}, r"div_val \(40\) leaves nothing of d_embed \(512\)"),
        (TransformerXLConfig, {"shift": "averages", "zero_first_memory": True}, r"shift \('averages'\) and zero_.* exclude"),
        (TransformerXLConfig, {"ngram_rows": [4], "zero_first_memory": True}, r"ngram_rows \(\[4\]\) and zero_.* exclude"),
        (TransformerXLConfig, {"ngram_rows": [0]}, "ngram_rows"),
        (TransformerXLConfig, {"ngram_rows": [4] * 9}, "ngram_rows"),
        (TransformerXLConfig, {"shift": "half"}, "shift"),
        (TransformerXLConfig, {"shift": "averages", "d_model": 12}, r"d_model \(12\) must be a multiple of 8.*; use 16"),
        (TransformerXLConfig, {"gate": "gru"}, r"gate \('gru'\) needs pre_lnorm \(False\)"),
        (DataConfig, {"split": (0.5, 0.1, 0.1)}, r"three shares of at least 0 .* \(these add up to 0.7\)"),
        (DataConfig, {"split": (0, 0.5, 0.5)}, "must be three shares"),
        (OptimConfig, {"lr": 0}, r"^lr \(0\) must be greater than 0$"),
        (TrainConfig, {}, "no budget: set one of max_steps, max_tokens, max_epochs, max_minutes"),
        (TrainConfig, {"max_steps": 1, "batch_size": 6, "accumulate": 4}, r"accumulate \(4\) must divide batch_size \(6\)"),
        (TrainConfig, {"max_steps": 1, "keep_checkpoints": 1}, r"^keep_checkpoints \(1\) must be greater than or equal to 2$"),
        (TrainConfig, {"max_steps": 1, "sample_tokens": 10**9}, r"^sample_tokens \(10+\) must be less than or equal to 10000$"),
        (RunConfig, {"model": {"d_modle": 4}}, r"^model: unknown key 'd_modle'; did you mean 'd_model'\?$"),
        (
            RunConfig,
            {"model": {"zero_first_memory": True}, "train": {"max_steps": 1, "reset_at_documents": True}},
            r"train.reset_at_documents \(True\) begins documents with an empty memory.*use one of them",
        ),
        (RunConfig, {"zzz": 1}, "^unknown key 'zzz'; known: base, compared_with, data, description, eval, model, "),
        (RunConfig, {"name": "../x"}, r"^name \('../x'\) must be a name without '/'"),
    ],
)
def test_mistakes(settings: Any, values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        settings(**values)
    assert "\n" not in str(caught.value)
    assert isinstance(caught.value, TxlError)


@pytest.mark.parametrize(
    ("recipe", "overrides", "message"),
    [
        ("quickstrat", [], r"^unknown recipe 'quickstrat'; did you mean 'quickstart'\?$"),
        ("", [], r"^unknown recipe ''; txl recipes lists all \d+$"),
        ("quickstart", ["train"], "^--set 'train' must have the form section.key=value, such as train.max_steps=1000$"),
        ("quickstart", ["train.max_step=3"], r"^train: unknown key 'max_step'; did you mean 'max_steps'\?$"),
        ("quickstart", ["train.max_steps.x=3"], "^--set 'train.max_steps.x=3' must have the form"),
        ("quickstart", ["." * 3000 + "=1"], r"^--set '\.+=1' must have the form"),
        ("quickstart", ["mem_len=2"], r"^--set 'mem_len=2' lacks its section; did you mean model.mem_len or eval.mem_len\?$"),
        ("quickstart", ["model=3"], r"^model \(3\) must be"),
        ("quickstart", ["train.seed=1" + "0" * 20], r"^train: seed .* must be less than 9223372036854775808$"),
        ("quickstart", ["model.cutoffs=[1" + "0" * 5000 + "]"], "^model: cutoffs "),
        ("quickstart", ["train.seed=" + "[" * 5000], r"^train: seed \('\[+.* must be a valid integer"),
        ("quickstart", ["train.max_minutes=none"], "no budget"),
    ],
)
def test_mistakes_in_recipes_and_overrides(recipe: str, overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        load_recipe(recipe, overrides)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"n_layer = ", "^recipe '.*' is not valid TOML: Invalid value"),
        (b"name = '\xff'", "^recipe '.*' is not valid TOML: 'utf-8' codec"),
        (b"a = " + b"[" * 5000, "is not valid TOML: maximum recursion depth"),
    ],
)
def test_mistakes_in_files(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "x.toml").write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        load_recipe(str(tmp_path / "x.toml"))


@pytest.mark.parametrize(
    ("setting", "used"),
    [
        ("model.beyond", "delta"),
        ("model.mem_lens", [8, 8, 8, 16]),
        ("model.shift", "token"),
        ("model.shift", "conv"),
        ("model.gate", "output"),
        ("model.mask_alpha", 4),
        ("model.mask_beta", 2),
        ("model.perm_size", 7),
        ("model.second_segment", "text"),
        ("train.tgt_len_start", 8),
        ("data.shuffle", "shards"),
    ],
)
def test_a_run_of_0_2_is_refused_only_if_it_used_what_is_gone(setting: str, used: Any) -> None:
    section, name = setting.split(".")
    plain = load_recipe("xlnet-quick" if name in ("mask_alpha", "mask_beta", "perm_size", "second_segment") else "quickstart")
    values = plain.model_dump(mode="json")
    if name in REMOVED:
        values[section] |= REMOVED | dict.fromkeys(REMOVED_DETAILS, 3)
        assert apply_overrides(values, []) == plain
    with pytest.raises(ConfigError) as caught:
        apply_overrides(merge(values, {section: {name: used}}), [])
    assert re.fullmatch(rf"{section}: {name} \(.*\) is a setting of 0\.2 that 0\.3 does not have; .*", str(caught.value))


def test_a_run_of_0_2_whose_targets_were_ordered_in_blocks_of_reuse_len_loads() -> None:
    plain = load_recipe("xlnet-quick", ["model.reuse_len=64"])
    assert apply_overrides(merge(plain.model_dump(), {"model": {"perm_size": 64}}), []) == plain


def test_a_position_of_memory_takes_two_states_or_key_value_and_the_key_of_a_distance() -> None:
    for d_head, numbers in ((9, 3 * 18), (2, 2 * 8)):
        assert TransformerXLConfig(n_layer=3, d_model=8, n_head=2, d_head=d_head).numbers_per_position == 3 * numbers
