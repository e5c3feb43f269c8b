"""The authors' PyTorch models (`pytorch/mem_transformer.py` at 44781ed): settings and names.

Their head scores tail i in the i-th column from its end, so the rows of `cluster_weight` and `cluster_bias` are reversed.
"""

from collections.abc import Mapping
from typing import Any

from transformer_xl.conversion.key_maps.entries import KeyMap
from transformer_xl.conversion.key_maps.layout import Layout
from transformer_xl.conversion.key_maps.pytorch import embedding, layers, positions, shared_projections, softmax
from transformer_xl.conversion.key_maps.values import integer, integers, number, one_of, truth, truths
from transformer_xl.errors import ConfigError
from transformer_xl.model_config import AttentionKind, TransformerXLConfig

KINDS = tuple(AttentionKind)
"""In the order of `attn_type`."""


def key_map(config: TransformerXLConfig) -> KeyMap:
    """Return the table of a model's tensors."""
    layout = Layout.of(config)
    entries = [
        *embedding(
            layout,
            prefix="",
            vector_aliases=["crit.out_layers.{i}.weight"] if layout.tied else [],
            projection_aliases=shared_projections(layout, "crit.out_projs.{i}"),
        ),
        *layers(layout, prefix=""),
        *positions(layout),
        *softmax(
            layout,
            vectors="crit.out_layers.{i}.weight",
            biases="crit.out_layers.{i}.bias",
            projections="crit.out_projs.{i}",
            reversed_tails=True,
        ),
    ]
    return KeyMap(tuple(entries), ignored=("pos_emb.inv_freq",))


def config_of(flags: Mapping[str, Any]) -> TransformerXLConfig:
    """Translate the authors' settings: arguments of `MemTransformerLM` (and `max_klen`), by their names there.

    Raises:
        ConfigError: values that cannot work.
    """
    kind = KINDS[one_of(flags, "attn_type", tuple(range(len(KINDS))))]
    mem_len, clamp_len = integer(flags, "mem_len"), integer(flags, "clamp_len")
    max_klen = None
    if kind in (AttentionKind.SHAW, AttentionKind.AL_RFOU):
        lengths = integer(flags, "tgt_len") + integer(flags, "ext_len") + mem_len
        max_klen = integer({"max_klen": lengths, **flags}, "max_klen")
    cutoffs = integers(flags, "cutoffs")
    return TransformerXLConfig(
        attention=kind,
        max_klen=max_klen,
        vocab_size=integer(flags, "n_token"),
        n_layer=integer(flags, "n_layer"),
        d_model=integer(flags, "d_model"),
        n_head=integer(flags, "n_head"),
        d_head=integer(flags, "d_head"),
        d_inner=integer(flags, "d_inner"),
        d_embed=integer(flags, "d_embed"),
        dropout=number(flags, "dropout"),
        dropatt=number(flags, "dropatt"),
        mem_len=mem_len,
        clamp_len=clamp_len if clamp_len > 0 else None,
        same_length=truth(flags, "same_length") and mem_len > 0,
        pre_lnorm=truth(flags, "pre_lnorm"),
        tie_weight=truth(flags, "tie_weight"),
        cutoffs=cutoffs,
        div_val=integer(flags, "div_val"),
        tie_projs=truths(flags, "tie_projs", length=len(cutoffs) + 1),
    )


def flags_of(config: TransformerXLConfig, *, tgt_len: int) -> dict[str, Any]:
    """Translate back: the arguments that build the authors' model of the same shape.

    Args:
        config: of a model that the authors' code can express.
        tgt_len: of their training, which a table of positions is cut by.
    """
    return {
        "n_token": config.vocab_size,
        "n_layer": config.n_layer,
        "n_head": config.n_head,
        "d_model": config.d_model,
        "d_head": config.d_head,
        "d_inner": config.d_inner,
        "dropout": config.dropout,
        "dropatt": config.dropatt,
        "tie_weight": config.tie_weight,
        "d_embed": config.d_embed or config.d_model,
        "div_val": config.div_val,
        "tie_projs": list(config.tied_projections),
        "pre_lnorm": config.pre_lnorm,
        "tgt_len": _training_length(config, tgt_len),
        "ext_len": 0,
        "mem_len": config.mem_len,
        "cutoffs": list(config.cutoffs),
        "same_length": config.same_length,
        "attn_type": KINDS.index(config.attention),
        "clamp_len": -1 if config.clamp_len is None else config.clamp_len,
    }


def _training_length(config: TransformerXLConfig, tgt_len: int) -> int:
    """Return the `tgt_len` of the originals; together with `mem_len` it is the length of a table of positions."""
    length = config.max_klen - config.mem_len if config.max_klen else tgt_len
    if length < 1:
        what = f"max_klen ({config.max_klen}) - mem_len ({config.mem_len})" if config.max_klen else "tgt_len"
        raise ConfigError(f"{what} ({length}) must be at least 1 for the authors' code")
    return length
