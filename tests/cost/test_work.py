"""The model that is counted, and its vocabulary."""

from typing import ClassVar, Literal

import pytest

from transformer_xl.config.model import AttentionConfig, TransformerXLConfig
from transformer_xl.config.recipes import load_recipe
from transformer_xl.cost.work import build, with_vocabulary, zipf_shares
from transformer_xl.errors import ConfigError


def test_vocabularies() -> None:
    for name, size in (("enwik8-base", 256), ("wt103-base", 267_735), ("scale-1b", 65_536), ("shakespeare-char", 65)):
        assert with_vocabulary(load_recipe(name))[0].vocab_size == size
    assert with_vocabulary(load_recipe("wt103-base", ["model.vocab_size=300_000"]))[0].vocab_size == 300_000
    with pytest.raises(ConfigError, match=r"how many words 'mine.txt' has .*--set model.vocab_size=N"):
        with_vocabulary(load_recipe("wt103-base", ["data.corpus=mine.txt"]))


def test_parameters_are_counted_without_allotting_them() -> None:
    settings, _ = with_vocabulary(load_recipe("wt103-large"))
    model = build(settings)
    assert sum(p.numel() for p in model.parameters()) == 285_170_506
    assert {p.device.type for p in model.parameters()} == {"meta"}


def test_shares_of_zipfs_law_are_those_of_the_sum() -> None:
    weights = [1 / k for k in range(1, 1001)]
    shares = zipf_shares((100, 400), 1000)
    expected = [sum(weights[a:b]) / sum(weights) for a, b in ((0, 100), (100, 400), (400, 1000))]
    assert shares == pytest.approx(expected, rel=1e-3)


def test_a_kind_of_model_that_nobody_has_counted_is_not_planned() -> None:
    """Kinds registered by others may attend and remember positions, too, and be another model all the same."""

    class OtherConfig(AttentionConfig):
        kind: ClassVar[str] = "other"
        remembers: ClassVar[Literal["positions", "state", "nothing"]] = "positions"

    class HeirConfig(TransformerXLConfig):
        kind: ClassVar[str] = "heir"

    config = load_recipe("quickstart")
    for kind in (OtherConfig, HeirConfig):
        other = config.model_copy(update={"model": kind(n_layer=1, d_model=8, n_head=1, d_head=8, d_inner=8)})
        with pytest.raises(ConfigError, match=rf"only transformer_xl models can be planned, .* kind '{kind.kind}'"):
            with_vocabulary(other)
    assert with_vocabulary(config)[0].kind == "transformer_xl"
