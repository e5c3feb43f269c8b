from typing import Any

import pytest
import torch

from tests.helpers import TINY, assert_close, random_weights
from transformer_xl.config.model import LstmConfig, TransformerXLConfig, VanillaConfig
from transformer_xl.errors import ConfigError
from transformer_xl.model.build import make_model
from transformer_xl.model.growth import with_rows

PLACES = torch.tensor([3, -1, 0, 1, 2, *range(4, 13), -1])
SIZES: dict[str, Any] = {name: TINY[name] for name in ("vocab_size", "n_layer", "d_model")}


@pytest.mark.parametrize(
    "config",
    [
        TransformerXLConfig(**TINY),
        TransformerXLConfig(**{**TINY, "tie_weight": False}),
        TransformerXLConfig(**{**TINY, "d_embed": 6}),
        LstmConfig(**SIZES),
        VanillaConfig(**SIZES, n_head=2, d_head=4, d_inner=7, max_len=9),
    ],
    ids=["tied", "untied", "projected", "lstm", "vanilla"],
)
def test_scores_of_old_tokens_stay(config: Any) -> None:
    old: Any = random_weights(make_model(config).eval())
    new: Any = with_rows(old, PLACES).eval()
    assert new.config == type(config)(**{**config.model_dump(), "vocab_size": 15})
    ids = torch.randint(13, (2, 9))
    ids_of = PLACES.argsort()[2:]  # where each old token is now
    expected, found = old(ids).logits, new(ids_of[ids]).logits
    assert_close("scores", found[..., ids_of], expected, 1e-6)
    vectors = old.embedding.weight if old.softmax.weight is None else old.softmax.weight
    assert_close("mean", new.softmax.bias[[1, 14]], old.softmax.bias.mean().expand(2), 1e-6)
    assert_close("mean", new.softmax.clusters(new.embedding)[0][0][1][[1, 14]], vectors.mean(0).expand(2, -1), 1e-6)
    assert_close("mean", new.embedding.weight[[1, 14]], old.embedding.weight.mean(0).expand(2, -1), 1e-6)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"cutoffs": (5,)}, r"--grow: in an adaptive softmax \(model.cutoffs\), new words would take"),
        ({"cutoffs": (5,), "div_val": 2}, r"--grow: in an adaptive softmax"),
        ({"ngram_rows": (20,)}, r"--grow: tables of n-grams \(model.ngram_rows\) are looked up by"),
    ],
)
def test_what_hangs_on_the_vocabulary_is_refused(changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        with_rows(make_model(TransformerXLConfig(**{**TINY, **changes})), PLACES)
