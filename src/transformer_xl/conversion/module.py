"""The authors' pickled `MemTransformerLM`: its settings and tensors, from the attributes of its modules."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from transformer_xl.conversion.key_maps.values import MAX_CLUSTERS
from transformer_xl.conversion.readers.inert import Stub, TensorRef
from transformer_xl.errors import CheckpointError

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
"""Setting: module and attribute that hold it."""


def read_module(tree: Any, weights: Path) -> tuple[dict[str, Any], dict[str, TensorRef]]:
    """Return settings and tensors of a model, which may be wrapped for several GPUs or half precision.

    Args:
        tree: content of a file.
        weights: that file, for messages.

    Raises:
        CheckpointError: not such a model.
    """
    module = tree
    while isinstance(module, Stub) and "n_token" not in module.state and len(_children(module)) == 1:
        (module,) = _children(module).values()
    if not isinstance(module, Stub) or "n_token" not in module.state:
        raise CheckpointError(
            f"'{weights}' is no pickled model of the authors'; weights alone do not say their settings, convert the model.pt"
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
    if not isinstance(borders, list) or not 1 <= len(borders) <= MAX_CLUSTERS:
        raise CheckpointError(f"'{weights}' has word_emb.cutoffs that are no list of 1 to {MAX_CLUSTERS} numbers")
    flags["cutoffs"] = borders[:-1]  # the last is the size of the vocabulary
    return flags | _ties(tensors, n_cluster=len(borders), one_table=flags["div_val"] == 1), tensors


def _children(module: Any) -> dict[str, Any]:
    children = module.state.get("_modules") if isinstance(module, Stub) else None
    return children if isinstance(children, dict) else {}


def _modules(module: Stub, name: str) -> Iterator[tuple[str, Stub]]:
    """Yield a module and those in it by the names that `named_modules` would give them."""
    yield name, module
    for child_name, child in _children(module).items():
        if isinstance(child, Stub):
            yield from _modules(child, f"{name}.{child_name}" if name else str(child_name))


def _own_tensors(module: Stub, prefix: str) -> Iterator[tuple[str, TensorRef]]:
    """Yield parameters and buffers by the names that `state_dict` would give them."""
    for kind in ("_parameters", "_buffers"):
        held = module.state.get(kind)
        for name, tensor in (held if isinstance(held, dict) else {}).items():
            if isinstance(tensor, TensorRef):
                yield (f"{prefix}.{name}" if prefix else str(name)), tensor


def _ties(tensors: Mapping[str, TensorRef], *, n_cluster: int, one_table: bool) -> dict[str, Any]:
    """Tell from their places what is tied, which no attribute says."""
    weights = _same_place(tensors, "crit.out_layers.0.weight", "word_emb.emb_layers.0.weight")
    projections = [
        _same_place(tensors, f"crit.out_projs.{i}", f"word_emb.emb_projs.{0 if one_table else i}") for i in range(n_cluster)
    ]
    return {"tie_weight": weights, "tie_projs": projections}


def _same_place(tensors: Mapping[str, TensorRef], a: str, b: str) -> bool:
    """True if two names stand for the same numbers in the file."""
    if a not in tensors or b not in tensors:
        return False
    places = [(t.path, t.offset, t.shape, t.stride, t.dtype) for t in (tensors[a], tensors[b])]
    return places[0] == places[1]
