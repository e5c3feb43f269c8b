"""The XLNet authors' TensorFlow models (`modeling.py` and `xlnet.py` at bbaa3a6): settings and names.

The settings are those of `xlnet_config.json`; a directory of their training calls the same file `config.json`. Their "gelu" is
the tanh form, and layer norms add 1e-12. How long a memory is belongs to a call there. If there is one, a stream begins after
`mem_len` zero vectors that the model attends to; their fine-tuning has none.

Matrices are transposed: (in, out). Fine-tuned checkpoints lack the vector of targets and the bias of the softmax. They do not
say what the head's labels are called, nor what it summarizes: the last state by default.
"""

import re
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, Literal

from transformer_xl.config.model import HeadConfig, XLNetConfig
from transformer_xl.conversion.key_maps.entries import Entry, KeyMap, Part, Shape, Sizes, per_layer
from transformer_xl.conversion.key_maps.xlnet_heads import longest, numbered, with_head
from transformer_xl.conversion.key_maps.xlnet_heads import notes_of as notes_of_head
from transformer_xl.conversion.key_maps.xlnet_huggingface import no_memory
from transformer_xl.conversion.values import Flag, Values

SETTINGS_FILES = ("xlnet_config.json", "config.json")


class AuthorsValues(Values):
    """The settings of `xlnet_config.json`."""

    n_token: int
    n_layer: int
    d_model: int
    n_head: int
    d_head: int
    d_inner: int
    ff_activation: Literal["gelu", "relu"]
    untie_r: Flag


_ROOT = "model/transformer/"
_IGNORED = ("global_step", "beta[12]_power", r".*/(Adam(_1)?|adam_[mv])", r".*/ExponentialMovingAverage")
_HEADS = (
    r"model/(?!transformer/|lm_loss/).*",  # the summary, and logits of a task, whose name is in that of the variable
    r"(start_logits|end_logits|answer_class|logits)/.*",
)


def _dense(ours: str, theirs: str) -> dict[str, str]:
    """Return the names of a map's weights and biases."""
    return {f"{ours}.weight": f"{theirs}/kernel", f"{ours}.bias": f"{theirs}/bias"}


_SPAN = {
    **_dense("start", "start_logits/dense"),
    **_dense("end_inner", "end_logits/dense_0"),
    **{"end_norm.weight": "end_logits/LayerNorm/gamma", "end_norm.bias": "end_logits/LayerNorm/beta"},
    **_dense("end", "end_logits/dense_1"),
    **_dense("answerable_inner", "answer_class/dense_0"),
    "answerable.weight": "answer_class/dense_1/kernel",
}
_SUMMARY = "model/sequnece_summary/summary"  # as they spell it
_CHOICE = "logits/dense"
_TEXT = r"(model/(classification|regression)_[^/]+/logit)/kernel"
_LABEL = "label"

_TRANSPOSED = {
    "attention.qkv_net.weight": (
        ("rel_attn/q/kernel", "D n d"),
        ("rel_attn/k/kernel", "D n d"),
        ("rel_attn/v/kernel", "D n d"),
    ),
    "attention.r_net.weight": (("rel_attn/r/kernel", "D n d"),),
    "feed_forward.inner.weight": (("ff/layer_1/kernel", "D F"),),
    "feed_forward.outer.weight": (("ff/layer_2/kernel", "F D"),),
}
_AS_THEY_ARE = {
    "attention.o_net.weight": (("rel_attn/o/kernel", "D n d"),),
    "attention.layer_norm.weight": (("rel_attn/LayerNorm/gamma", "D"),),
    "attention.layer_norm.bias": (("rel_attn/LayerNorm/beta", "D"),),
    "feed_forward.inner.bias": (("ff/layer_1/bias", "F"),),
    "feed_forward.outer.bias": (("ff/layer_2/bias", "D"),),
    "feed_forward.layer_norm.weight": (("ff/LayerNorm/gamma", "D"),),
    "feed_forward.layer_norm.bias": (("ff/LayerNorm/beta", "D"),),
}


def is_xlnet(names: Iterable[str]) -> bool:
    """Return whether variables of these names are those of an XLNet."""
    return any(name.startswith(_ROOT) for name in names)


def key_map(config: XLNetConfig, *, names: Iterable[str] = ()) -> KeyMap:
    """Return the table of a model's tensors; the names are those of all variables; one of them may belong to a task."""
    sizes = Sizes(config)
    entries = [
        Entry(("embedding.weight",), (Part(f"{_ROOT}word_embedding/lookup_table", sizes.shape("V D")),)),
        Entry(("mask_emb",), (Part(f"{_ROOT}mask_emb/mask_emb", (1, 1, config.d_model), optional=True),)),
        Entry(("softmax.bias",), (Part("model/lm_loss/bias", sizes.shape("V"), optional=True),)),
        *per_layer(sizes, _TRANSPOSED, _ROOT + "layer_{i}/", transposed=True),
        *per_layer(sizes, _AS_THEY_ARE, _ROOT + "layer_{i}/"),
        Entry(("seg_embed",), (Part(f"{_ROOT}seg_embed", (config.n_layer, 2, *sizes.shape("n d"))),)),
    ]
    if not config.tie_weight:
        entries.append(Entry(("softmax.weight",), (Part("model/lm_loss/weight", sizes.shape("V D")),)))
    shape = sizes.shape("L n d" if config.untie_r else "n d")
    entries += [Entry((name,), (Part(_ROOT + name, shape),)) for name in ("r_w_bias", "r_r_bias", "r_s_bias")]
    text = _dense("summary", _SUMMARY) | _dense("scores", _scores(names) or _CHOICE)
    return KeyMap(tuple(with_head(config, entries, text | _SPAN, transposed=True)), _IGNORED, _HEADS)


def config_of(values: Mapping[str, Any], shapes: Mapping[str, Shape]) -> XLNetConfig:
    """Translate an `xlnet_config.json`; the shapes are those of all variables."""
    given, head = AuthorsValues.of_file(values), head_of(shapes)
    return XLNetConfig(
        vocab_size=given.n_token,
        **given.model_dump(include={"n_layer", "d_model", "n_head", "d_head", "d_inner", "untie_r"}),
        activation="gelu_tanh" if given.ff_activation == "gelu" else "relu",
        tie_weight="model/lm_loss/weight" not in shapes,
        mem_len=0,
        zero_first_memory=head is None,
        head=head,
    )


def head_of(shapes: Mapping[str, Shape]) -> HeadConfig | None:
    """Return the settings of the head that these variables have; None: there is none, or there are several."""
    if "start_logits/dense/kernel" in shapes:
        return HeadConfig(kind="span")
    make, scores = partial(HeadConfig, projection=f"{_SUMMARY}/kernel" in shapes, max_len=longest(0)), _scores(shapes)
    if scores is None:
        return make(kind="choice") if f"{_CHOICE}/kernel" in shapes else None
    if scores.startswith("model/regression_"):
        return make(kind="regression")
    labels = numbered(_LABEL, (0, *shapes[f"{scores}/kernel"])[-1])
    return make(kind="classification", labels=labels) if len(labels) > 1 else None


def _scores(names: Iterable[str]) -> str | None:
    """Return where the scores of classes or a number are; None: there are none, or several."""
    found = [match[1] for match in (re.fullmatch(_TEXT, name) for name in names) if match]
    return found[0] if len(found) == 1 else None


def notes_of(config: XLNetConfig) -> list[str]:
    """Return what users should know of a converted model, a line each."""
    return [*([] if config.mem_len else [no_memory(config)]), *notes_of_head(config, _LABEL)]
