"""Hugging Face's XLNet models (transformers 4 and 5): settings and names.

What they compute differs from the original in one point: their "gelu" is the error function's, the original's is the tanh form,
"gelu_new" there. u, v and s are those of a layer, whatever `untie_r` says. One rate of dropout is used everywhere. A stream
begins without memory. With `bi_data`, the second half of every batch is read backward, whatever is in it: `backward_half` here.
What our `bi_data` says of training has no place there; the published models were trained so, and their files say false.

A checkpoint with another head than the language model's lacks the bias of the softmax; in one of the bare `XLNetModel`, names
do not begin with "transformer.", either. Heads of `XLNetForSequenceClassification`, `XLNetForMultipleChoice`,
`XLNetForQuestionAnswering` and `XLNetForTokenClassification` are ours, too. Their mean of all states counts padding, ours does
not.
"""

from collections.abc import Collection, Iterable, Mapping
from typing import Any, Literal

from transformer_xl.config.model import HeadConfig, XLNetConfig
from transformer_xl.config.settings import Positive
from transformer_xl.conversion.key_maps.entries import Entry, KeyMap, Part, Sizes, per_layer
from transformer_xl.conversion.key_maps.huggingface import OF_EVERY_MODEL
from transformer_xl.conversion.key_maps.xlnet_heads import longest, named, with_head
from transformer_xl.conversion.key_maps.xlnet_heads import notes_of as notes_of_head
from transformer_xl.conversion.values import Flag, Values
from transformer_xl.errors import ConfigError

MODEL_TYPE = "xlnet"
PREFIX = "transformer."


class XLNetValues(Values):
    """Settings that shape or initialize a model, and their values if they are missing in a `config.json`."""

    vocab_size: int = 32000
    d_model: Positive = 1024
    n_layer: int = 24
    n_head: Positive = 16
    d_head: int | None = None
    d_inner: int = 4096
    ff_activation: Literal["gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "relu2"] = "gelu"
    untie_r: Flag = True  # this and same_length mean the same for all models that are converted
    attn_type: Literal["bi"] = "bi"
    initializer_range: float = 0.02
    layer_norm_eps: float = 1e-12
    dropout: float = 0.1
    mem_len: int | None = 512
    reuse_len: int | None = None
    bi_data: Flag = False
    clamp_len: int | None = -1
    same_length: Flag = False
    tie_word_embeddings: Flag = True


class SummaryValues(Values):
    """Settings of a head that scores texts. Those of any type may be ones that ours cannot have."""

    summary_type: Any = "last"
    summary_use_proj: Flag = True
    summary_activation: Any = "tanh"
    summary_last_dropout: float = 0.1


_SETTINGS = {
    **{name: name for name in ("vocab_size", "n_layer", "d_model", "n_head", "d_inner", "dropout")},
    "layer_norm_eps": "layer_norm_epsilon",
    "initializer_range": "init_std",
    "tie_word_embeddings": "tie_weight",
    "bi_data": "backward_half",
}
"""Our name of each setting of theirs that has the same values."""

ACTIVATIONS: dict[str, Any] = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
}
"""Our name of each of theirs; the first of two is written."""

_WITHOUT_EFFECT = OF_EVERY_MODEL | {
    *("start_n_top", "end_n_top"),  # of heads, at prediction
    *("summary_type", "summary_use_proj", "summary_activation", "summary_last_dropout"),  # of heads, see `head_of`
    *("use_mems_eval", "use_mems_train", "output_past", "max_position_embeddings"),
    *("dropatt", "init", "init_range", "init_std"),  # of 2019; their code never read them
}
_OLD_NAMES = {
    "n_token": "vocab_size",
    "hidden_size": "d_model",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
}
_HEADS = (r"(sequence_summary|logits_proj|classifier|qa_outputs|start_logits|end_logits|answer_class)\..*",)

_HEAD = {
    **{f"summary.{name}": f"sequence_summary.summary.{name}" for name in ("weight", "bias")},
    **{f"scores.{name}": f"logits_proj.{name}" for name in ("weight", "bias")},
    **{f"start.{name}": f"start_logits.dense.{name}" for name in ("weight", "bias")},
    **{f"end_inner.{name}": f"end_logits.dense_0.{name}" for name in ("weight", "bias")},
    **{f"end_norm.{name}": f"end_logits.LayerNorm.{name}" for name in ("weight", "bias")},
    **{f"end.{name}": f"end_logits.dense_1.{name}" for name in ("weight", "bias")},
    **{f"answerable_inner.{name}": f"answer_class.dense_0.{name}" for name in ("weight", "bias")},
    "answerable.weight": "answer_class.dense_1.weight",
}
_TOKENS_HEAD = {f"scores.{name}": f"classifier.{name}" for name in ("weight", "bias")}
_CLASSES = {
    "classification": "XLNetForSequenceClassification",
    "multilabel": "XLNetForSequenceClassification",
    "regression": "XLNetForSequenceClassification",
    "choice": "XLNetForMultipleChoice",
    "span": "XLNetForQuestionAnswering",
    "tokens": "XLNetForTokenClassification",
}
PROBLEMS = {
    "classification": "single_label_classification",
    "multilabel": "multi_label_classification",
    "regression": "regression",
}
_LABEL = "LABEL"
"""What they call labels without a name, with a number."""

_TRANSPOSED = {
    "attention.qkv_net.weight": (("rel_attn.q", "D n d"), ("rel_attn.k", "D n d"), ("rel_attn.v", "D n d")),
    "attention.r_net.weight": (("rel_attn.r", "D n d"),),
}
_AS_THEY_ARE = {
    "attention.o_net.weight": (("rel_attn.o", "D n d"),),
    "attention.layer_norm.weight": (("rel_attn.layer_norm.weight", "D"),),
    "attention.layer_norm.bias": (("rel_attn.layer_norm.bias", "D"),),
    "feed_forward.inner.weight": (("ff.layer_1.weight", "F D"),),
    "feed_forward.inner.bias": (("ff.layer_1.bias", "F"),),
    "feed_forward.outer.weight": (("ff.layer_2.weight", "D F"),),
    "feed_forward.outer.bias": (("ff.layer_2.bias", "D"),),
    "feed_forward.layer_norm.weight": (("ff.layer_norm.weight", "D"),),
    "feed_forward.layer_norm.bias": (("ff.layer_norm.bias", "D"),),
}


def prefix_of(names: Iterable[str]) -> str:
    """Return what the names of a checkpoint's tensors begin with: nothing, if it is one of the bare model."""
    return PREFIX if any(name.startswith(PREFIX) for name in names) else ""


def key_map(config: XLNetConfig, *, prefix: str = PREFIX) -> KeyMap:
    """Return the table of a model's tensors."""
    sizes = Sizes(config)
    softmax = ("lm_loss.weight",)
    entries = [
        Entry(
            ("embedding.weight",),
            (Part(f"{prefix}word_embedding.weight", sizes.shape("V D"), softmax if config.tie_weight else ()),),
        ),
        Entry(("mask_emb",), (Part(f"{prefix}mask_emb", (1, 1, config.d_model)),)),
        Entry(("softmax.bias",), (Part("lm_loss.bias", sizes.shape("V"), optional=True),)),
    ]
    if not config.tie_weight:
        has_task = config.head is not None
        entries.append(Entry(("softmax.weight",), (Part("lm_loss.weight", sizes.shape("V D"), optional=has_task),)))
    layer = prefix + "layer.{i}."
    entries += per_layer(sizes, _TRANSPOSED, layer, transposed=True)
    entries += per_layer(sizes, _AS_THEY_ARE, layer)
    for name in ("r_w_bias", "r_r_bias", "r_s_bias", "seg_embed"):
        shape = sizes.shape("n d") if name != "seg_embed" else (2, *sizes.shape("n d"))
        parts = tuple(Part(f"{layer.format(i=i)}rel_attn.{name}", shape) for i in range(config.n_layer))
        entries.append(Entry((name,), parts))
    names = _TOKENS_HEAD if config.head is not None and config.head.kind == "tokens" else _HEAD
    return KeyMap(tuple(with_head(config, entries, names)), left_out=_HEADS)


def config_of(values: Mapping[str, Any], names: Collection[str] = ()) -> XLNetConfig:
    """Translate a `config.json`; refuse other models and unknown settings. The names are those of all tensors."""
    given = XLNetValues.of_file(values, without_effect=_WITHOUT_EFFECT, old_names=_OLD_NAMES)
    if given.d_model % given.n_head or given.d_head not in (None, given.d_model // given.n_head):
        raise ConfigError(f"d_model ({given.d_model}) must be n_head ({given.n_head}) times d_head ({given.d_head})")
    mem_len = _length(given.mem_len) or 0
    return XLNetConfig(
        **{ours: getattr(given, theirs) for theirs, ours in _SETTINGS.items()},
        d_head=given.d_model // given.n_head,
        activation=ACTIVATIONS[given.ff_activation],
        dropatt=given.dropout,
        mem_len=mem_len,
        reuse_len=_length(given.reuse_len),
        clamp_len=_length(given.clamp_len),
        head=head_of(values, names, mem_len=mem_len),
    )


def head_of(values: Mapping[str, Any], names: Collection[str], *, mem_len: int) -> HeadConfig | None:
    """Return the settings of the head that tensors of these names have; None: there is none, or not one of ours."""
    if "start_logits.dense.weight" in names:
        return HeadConfig(kind="span")
    if "classifier.weight" in names:
        labels = named(values, _LABEL)
        return HeadConfig(kind="tokens", labels=labels, dropout=0.0, max_len=longest(mem_len)) if len(labels) > 1 else None
    if "logits_proj.weight" not in names:
        return None
    given = SummaryValues.of(values)
    activation = "tanh" if given.summary_use_proj else None
    if given.summary_type not in ("last", "mean") or (given.summary_activation or None) != activation:
        return None
    kind, labels = _kind_of(values)
    if kind is None:
        return None
    return HeadConfig(
        kind=kind,
        labels=labels,
        summary=given.summary_type,
        projection=given.summary_use_proj,
        dropout=given.summary_last_dropout,
        max_len=longest(mem_len),
    )


def _kind_of(values: Mapping[str, Any]) -> tuple[Any, tuple[str, ...]]:
    """Return the kind of a head with scores of texts, and its labels; None: not one of ours."""
    if values.get("architectures") == [_CLASSES["choice"]]:
        return "choice", ()
    labels, problem = named(values, _LABEL), values.get("problem_type")
    if problem is None:
        problem = PROBLEMS["regression" if len(labels) == 1 else "classification"]
    if problem == PROBLEMS["regression"]:
        return ("regression" if len(labels) == 1 else None), ()
    if problem == PROBLEMS["classification"] and len(labels) > 1:
        return "classification", labels
    return ("multilabel", labels) if problem == PROBLEMS["multilabel"] and labels else (None, ())


def notes_of(values: Mapping[str, Any], config: XLNetConfig) -> list[str]:
    """Return what users should know of a converted model, a line each; `values` are those of `config_of`."""
    notes = [*([] if config.mem_len else [no_memory(config)]), *notes_of_head(config, _LABEL)]
    if config.head is not None and config.head.kind == "regression" and not values.get("architectures"):
        notes.append("a head of one score is taken for a regression; --set head.kind=choice if it was taught multiple choice")
    if config.backward_half:
        notes.append(
            "bi_data: the second half of every batch is read backward, as there; --set backward_half=false reads all forward"
        )
    if config.activation == "gelu" and values.get("ff_activation", "gelu") == "gelu":
        notes.append(
            "'gelu' is the error function's at Hugging Face; the published models were trained with the tanh form, which "
            "--set activation=gelu_tanh gives back"
        )
    return notes


def no_memory(config: XLNetConfig) -> str:
    """Return what users are told of a model that keeps no memory."""
    unsaid = "nothing says how long a memory is, so the model keeps none"
    if config.head is None:
        return f"{unsaid}; --set mem_len=384 gives it one, as it was trained with"
    if config.head.max_len is None:
        return f"{unsaid}, as it was fine-tuned"
    return (
        f"{unsaid}, as it was fine-tuned, and reads {config.head.max_len} tokens of a text at most; "
        "--set mem_len=384 --set head.max_len=none reads longer ones with memory"
    )


def _length(length: int | None) -> int | None:
    """Return a number of tokens; None where there is none, which they write as null, 0 or -1."""
    return length if length and length > 0 else None


def values_of(config: XLNetConfig) -> dict[str, Any]:
    """Return a `config.json` for the same model, which Hugging Face's code must be able to express."""
    activations = {ours: theirs for theirs, ours in reversed(ACTIVATIONS.items())}
    values = {theirs: getattr(config, ours) for theirs, ours in _SETTINGS.items()} | {
        "d_head": config.d_head,
        "ff_activation": activations[config.activation],
        "untie_r": True,
        "attn_type": "bi",
        "mem_len": config.mem_len or None,
        "reuse_len": config.reuse_len,
        "use_mems_eval": config.mem_len > 0,
        "clamp_len": -1 if config.clamp_len is None else config.clamp_len,
        "same_length": False,
    }
    head = config.head
    architecture = "XLNetLMHeadModel" if head is None else _CLASSES[head.kind]
    own = {} if head is None else _values_of_head(head)
    return {"model_type": MODEL_TYPE, "architectures": [architecture]} | values | own


def _values_of_head(head: HeadConfig) -> dict[str, Any]:
    """Return what a `config.json` says of a head."""
    if head.kind == "span":
        return {}
    labels = dict(enumerate(head.labels or (f"{_LABEL}_0",)))
    names = {"id2label": {str(i): label for i, label in labels.items()}, "label2id": {label: i for i, label in labels.items()}}
    if head.kind == "tokens":
        return names
    values: dict[str, Any] = {
        "summary_type": head.summary,
        "summary_use_proj": head.projection,
        "summary_activation": "tanh" if head.projection else "",
        "summary_last_dropout": head.dropout,
    }
    return values if head.kind == "choice" else values | names | {"problem_type": PROBLEMS[head.kind]}
