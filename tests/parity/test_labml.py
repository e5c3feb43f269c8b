"""labml's annotated Transformer-XL is this project's with Shaw's attention, pre-norm and a final norm, but for two biases.

Its scores are q·k + u·k + q·r + b, with a table of r and b for each layer. Its embeddings are not scaled, which a factor in
ours undoes. Its maps of values and of attention's output have biases, which are zero in the golden (make_goldens_labml.py).
"""

import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.parity.reading import GOLDENS, compare, read_golden
from transformer_xl.model.transformer_xl import TransformerXL
from transformer_xl.model_config import TransformerXLConfig

GOLDEN = GOLDENS / "labml" / "plain"
N_ROW = 32  # their table has those of the distances 0, 1, … at row 32, 31, …
LAYER = {
    "self_attn.output.weight": "attention.o_net.weight",
    "norm_self_attn.weight": "attention.layer_norm.weight",
    "norm_self_attn.bias": "attention.layer_norm.bias",
    "norm_ff.weight": "feed_forward.layer_norm.weight",
    "norm_ff.bias": "feed_forward.layer_norm.bias",
    "feed_forward.layer1.weight": "feed_forward.inner.weight",
    "feed_forward.layer1.bias": "feed_forward.inner.bias",
    "feed_forward.layer2.weight": "feed_forward.outer.weight",
    "feed_forward.layer2.bias": "feed_forward.outer.bias",
}
WHOLE = {
    "transformer.norm.weight": "final_norm.weight",
    "transformer.norm.bias": "final_norm.bias",
    "generator.weight": "softmax.weight",
    "generator.bias": "softmax.bias",
}


def ours(theirs: dict[str, Tensor], *, n_layer: int, scale: float) -> dict[str, Tensor]:
    """Give their weights or gradients our names and shapes; `scale` is what their embeddings are multiplied by."""
    prefixes = [f"transformer.layers.{i}." for i in range(n_layer)]
    found = {own: theirs[name] for name, own in WHOLE.items()} | {"embedding.weight": theirs["src_embed.weight"] * scale}
    for i, prefix in enumerate(prefixes):
        found |= {f"layers.{i}.{own}": theirs[prefix + name] for name, own in LAYER.items()}
        qkv = [theirs[f"{prefix}self_attn.{name}.linear.weight"] for name in ("query", "key", "value")]
        found[f"layers.{i}.attention.qkv_net.weight"] = torch.cat(qkv)
    tables = {"r_emb": "key_pos_embeddings", "r_bias": "key_pos_bias"}
    for own, name in tables.items():
        found[own] = torch.stack([theirs[f"{prefix}self_attn.{name}"][1 : N_ROW + 1] for prefix in prefixes])
    found["r_w_bias"] = torch.stack([theirs[f"{prefix}self_attn.query_pos_bias"] for prefix in prefixes])
    return found


def test_the_same_model_computes_the_same():
    """Log-probabilities, nats and memory of three segments, and every gradient, in float64."""
    golden = read_golden(GOLDEN / "expected64.safetensors")
    sizes = golden.hyperparameters
    config = TransformerXLConfig(
        vocab_size=sizes["n_vocab"], n_layer=sizes["n_layers"], n_head=sizes["heads"], d_model=sizes["d_model"],
        d_head=sizes["d_model"] // sizes["heads"], d_inner=sizes["d_ff"], mem_len=sizes["mem_len"], max_klen=N_ROW,
        attention="shaw", pre_lnorm=True, final_norm=True, tie_weight=False,
    )  # fmt: skip
    weights = load_file(GOLDEN / "checkpoint" / "model.safetensors")
    biases = [weight for name, weight in weights.items() if name.endswith(("output.bias", "value.linear.bias"))]
    assert len(biases) == 4 and not any(bias.any() for bias in biases)
    model = TransformerXL(config).double().eval()
    factor = sizes["d_model"] ** 0.5
    model.load_state_dict(ours(weights, n_layer=config.n_layer, scale=1 / factor))
    compare(model, golden, ours(golden.gradients, n_layer=config.n_layer, scale=factor), tolerance=1e-12)
