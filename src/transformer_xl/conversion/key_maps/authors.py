"""The authors' PyTorch models (`pytorch/mem_transformer.py` at 44781ed): settings and names.

The last class of their head is the first tail, so the rows of `cluster_weight` and `cluster_bias` are reversed.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from transformer_xl.config.model import TransformerXLConfig
from transformer_xl.conversion.key_maps import pytorch
from transformer_xl.conversion.key_maps.entries import KeyMap, Sizes
from transformer_xl.conversion.key_maps.pytorch import Names, PyTorchValues, positions, shared_entries
from transformer_xl.conversion.readers.tensors import TensorRef
from transformer_xl.conversion.readers.unpickle import Stub
from transformer_xl.conversion.values import Flag
from transformer_xl.errors import CheckpointError, ConfigError


def key_map(config: TransformerXLConfig) -> KeyMap:
    """Return the table of a model's tensors."""
    sizes = Sizes(config)
    entries = [*shared_entries(sizes, Names()), *positions(sizes, pytorch.attention_names(config).model)]
    return KeyMap(tuple(entries), ignored=("pos_emb.inv_freq",))


class Flags(PyTorchValues):
    """The arguments of `MemTransformerLM`, and `max_klen`."""

    n_token: int
    tie_weight: Flag
    attn_type: Annotated[int, Field(ge=0, le=3)]
    tgt_len: int = 0
    ext_len: int = 0
    max_klen: int | None = None


def config_of(flags: Mapping[str, Any]) -> TransformerXLConfig:
    """Translate the authors' settings."""
    given = Flags.of(flags)
    kind = {names.attn_type: kind for kind, names in pytorch.ATTENTION.items()}[given.attn_type]
    lengths = given.tgt_len + given.ext_len + given.mem_len
    return TransformerXLConfig(
        attention=kind,
        max_klen=(lengths if given.max_klen is None else given.max_klen) if pytorch.ATTENTION[kind].has_table else None,
        vocab_size=given.n_token,
        tie_weight=given.tie_weight,
        **given.fields(),
    )


_ARGUMENTS = (
    *("n_token", "n_layer", "n_head", "d_model", "d_head", "d_inner", "dropout", "dropatt", "tie_weight", "d_embed", "div_val"),
    *("tie_projs", "pre_lnorm", "tgt_len", "ext_len", "mem_len", "cutoffs", "same_length", "attn_type", "clamp_len"),
)
"""Arguments of `MemTransformerLM`, in its order."""


def flags_of(config: TransformerXLConfig, *, tgt_len: int) -> dict[str, Any]:
    """Return arguments that build the same model in the authors' code; `tgt_len` is the length of its training segments."""
    names, length = pytorch.attention_names(config), tgt_len
    if names.has_table and config.max_klen:  # it is tgt_len + mem_len long
        length = config.max_klen - config.mem_len
    if length < 1:
        what = f"max_klen ({config.max_klen}) - mem_len ({config.mem_len})" if names.has_table else "tgt_len"
        raise ConfigError(f"{what} ({length}) must be at least 1 for the authors' code")
    flags = pytorch.values_of(config) | {
        "n_token": config.vocab_size,
        "tie_weight": config.tie_weight,
        "tgt_len": length,
        "ext_len": 0,
        "attn_type": names.attn_type,
    }
    return {name: flags[name] for name in _ARGUMENTS}


_OF_MODEL = ("n_token", "n_layer", "d_model", "n_head", "d_head", "d_embed", "attn_type", "same_length", "clamp_len")
_OF_MODEL += ("tgt_len", "ext_len", "mem_len", "max_klen")
_OF_PARTS = {
    "cutoffs": ("word_emb", "cutoffs"),
    "div_val": ("word_emb", "div_val"),
    "d_inner": ("layers.0.pos_ff", "d_inner"),
    "dropout": ("layers.0.pos_ff", "dropout"),
    "pre_lnorm": ("layers.0.dec_attn", "pre_lnorm"),
    "dropatt": ("layers.0.dec_attn.dropatt", "p"),
}
"""For each setting, the module and its attribute that hold it."""


def read_module(tree: Any, weights: Path) -> tuple[dict[str, Any], dict[str, TensorRef]]:
    """Return the settings and tensors of a pickled model. It may be wrapped for several GPUs or for half precision."""
    module = tree
    while isinstance(module, Stub) and "n_token" not in module.state and len(_children(module)) == 1:
        (module,) = _children(module).values()
    if not isinstance(module, Stub) or "n_token" not in module.state:
        raise CheckpointError(
            f"'{weights}' is not a pickled model of the authors'; weights alone do not say their settings, convert the model.pt"
        )
    modules = dict(_modules(module, ""))
    if "crit" not in modules:
        raise CheckpointError(f"'{weights}' was trained with sample_softmax, which the authors' own code cannot run either")
    tensors = {name: tensor for prefix, each in modules.items() for name, tensor in _own_tensors(each, prefix)}
    flags = {name: module.state[name] for name in _OF_MODEL if name in module.state}
    for name, (part, attribute) in _OF_PARTS.items():
        if part not in modules or attribute not in modules[part].state:
            raise CheckpointError(f"'{weights}' is a model without {part}.{attribute}; is it the authors' MemTransformerLM?")
        flags[name] = modules[part].state[attribute]
    borders = flags["cutoffs"]
    if not isinstance(borders, list):
        raise CheckpointError(f"'{weights}' has word_emb.cutoffs that are no list")
    flags["cutoffs"] = borders[:-1]  # the last is the size of the vocabulary
    # no attribute says which weights are tied, but tied tensors have the same place in the file
    flags["tie_weight"] = _same_place(tensors, "crit.out_layers.0.weight", "word_emb.emb_layers.0.weight")
    flags["tie_projs"] = [
        _same_place(tensors, f"crit.out_projs.{i}", f"word_emb.emb_projs.{0 if flags['div_val'] == 1 else i}")
        for i in range(len(borders))
    ]
    return flags, tensors


def _children(module: Any) -> dict[str, Any]:
    children = module.state.get("_modules") if isinstance(module, Stub) else None
    return children if isinstance(children, dict) else {}


def _modules(module: Stub, name: str) -> Iterator[tuple[str, Stub]]:
    """Yield a module and all modules in it, with the names that `named_modules` would give them."""
    yield name, module
    for child_name, child in _children(module).items():
        if isinstance(child, Stub):
            yield from _modules(child, f"{name}.{child_name}" if name else str(child_name))


def _own_tensors(module: Stub, prefix: str) -> Iterator[tuple[str, TensorRef]]:
    """Yield parameters and buffers with the names that `state_dict` would give them."""
    for kind in ("_parameters", "_buffers"):
        held = module.state.get(kind)
        for name, tensor in (held if isinstance(held, dict) else {}).items():
            if isinstance(tensor, TensorRef):
                yield (f"{prefix}.{name}" if prefix else str(name)), tensor


def _same_place(tensors: Mapping[str, TensorRef], a: str, b: str) -> bool:
    """Return whether two tensors are the same numbers in the file."""
    return a in tensors and tensors[a] == tensors.get(b)
