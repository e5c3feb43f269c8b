"""labml's annotated Transformer-XL is this project's with Shaw's attention, pre-norm and a final norm, but for two biases.

Its scores are q·k + u·k + q·r + b, with a table of r and b for each layer. Its embeddings are not scaled, which a factor in
ours undoes. Its maps of values and of attention's output have biases, which are zero in one golden (make_goldens_labml.py), and
which a converted model does without.
"""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from tests.parity.reading import GOLDENS, compare, compare_outputs, read_golden
from transformer_xl.config.model import TransformerXLConfig
from transformer_xl.conversion.convert import convert
from transformer_xl.conversion.export import load_model
from transformer_xl.conversion.key_maps.labml import without_biases
from transformer_xl.errors import CheckpointError
from transformer_xl.model.transformer_xl import TransformerXL

PLAIN, TRAINED = (GOLDENS / "labml" / name for name in ("plain", "trained"))
FIRST = "transformer.layers.0."
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


def weights_of(golden: Path) -> dict[str, Tensor]:
    return torch.load(golden / "checkpoint" / "model.pth", weights_only=True)


def converted(source: Path, folder: Path) -> TransformerXL:
    convert(source, folder / "model", settings={"mem_len": 6})
    model = load_model(folder / "model")[0]
    assert isinstance(model, TransformerXL)
    return model


def test_the_same_model_computes_the_same(tmp_path):
    """Log-probabilities, nats and memory of three segments, and every gradient, in float64; and it is the converted one."""
    golden = read_golden(PLAIN / "expected64.safetensors")
    sizes = golden.hyperparameters
    config = TransformerXLConfig(
        vocab_size=sizes["n_vocab"], n_layer=sizes["n_layers"], n_head=sizes["heads"], d_model=sizes["d_model"],
        d_head=sizes["d_model"] // sizes["heads"], d_inner=sizes["d_ff"], mem_len=sizes["mem_len"], max_klen=N_ROW,
        attention="shaw", pre_lnorm=True, final_norm=True, tie_weight=False, dropout=0.0,
    )  # fmt: skip
    weights = weights_of(PLAIN)
    biases = [weight for name, weight in weights.items() if name.endswith(("output.bias", "value.linear.bias"))]
    assert len(biases) == 4 and not any(bias.any() for bias in biases)
    model = TransformerXL(config).double().eval()
    factor = sizes["d_model"] ** 0.5
    model.load_state_dict(ours(weights, n_layer=config.n_layer, scale=1 / factor))
    compare(model, golden, ours(golden.gradients, n_layer=config.n_layer, scale=factor), tolerance=1e-12)
    same = converted(PLAIN / "checkpoint", tmp_path)
    assert same.config == config
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(same.get_parameter(name), parameter, rtol=1e-15, atol=0)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-5)])
def test_a_trained_model_computes_the_same_without_its_biases(dtype, tolerance, tmp_path):
    """As `experiment.save_checkpoint` wrote it, and as users of today save a `state_dict`."""
    golden = read_golden(TRAINED / "expected64.safetensors")
    weights = weights_of(TRAINED)
    assert all(weights[FIRST + name].any() for name in ("self_attn.output.bias", "self_attn.value.linear.bias"))
    torch.save({name: weight.to(dtype) for name, weight in weights.items()}, tmp_path / "mine.pt")
    source = TRAINED / "checkpoint" if dtype == torch.float64 else tmp_path / "mine.pt"
    model = converted(source, tmp_path)
    assert next(model.parameters()).dtype == dtype
    compare_outputs(model.double(), golden, tolerance)


def attention(x_TD: Tensor, tensors: list[Tensor]) -> Tensor:
    """Compute theirs without positions: norm, maps with biases, one head."""
    gamma, beta, w_q, w_k, w_v, w_o, bias_v, bias_o = tensors
    z_TD = functional.layer_norm(x_TD, gamma.shape, gamma, beta)
    weight_TS = (z_TD @ w_q.T @ (z_TD @ w_k.T).T).softmax(-1)
    return weight_TS @ (z_TD @ w_v.T + bias_v) @ w_o.T + bias_o


def attention_tensors(D: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    maps = [draw(D, D) * D**-0.5 for _ in range(4)]
    return [1 + 0.3 * draw(D), 0.3 * draw(D), *maps, draw(D), draw(D)]


def test_biases_move_into_the_norm_and_the_maps():
    tensors, x_TD = attention_tensors(16), torch.randn(7, 16, dtype=torch.float64)
    gamma, beta, joined, w_o = without_biases("layer.", tensors)
    moved = [gamma, beta, *joined.chunk(3), w_o, torch.zeros(16).double(), torch.zeros(16).double()]
    torch.testing.assert_close(attention(x_TD, moved), attention(x_TD, tensors), rtol=1e-11, atol=1e-11)
    assert (beta / gamma).sum().item() == pytest.approx(16)


def test_biases_that_have_no_place_to_go():
    tensors = attention_tensors(4)
    tensors[0][2] = 1e-9
    with pytest.raises(
        CheckpointError, match=r"^'layer.norm_self_attn.weight' is 1.0e-09 somewhere, too near to 0 to work the bias"
    ):
        without_biases("layer.", tensors)
    tensors = attention_tensors(4)
    tensors[5][3] = 0
    with pytest.raises(
        CheckpointError, match=r"^'layer.self_attn.output.bias' is out of reach of 'layer.self_attn.output.weight'"
    ):
        without_biases("layer.", tensors)
    tensors[6:] = [torch.zeros(4), torch.zeros(4)]
    assert all(torch.equal(one, other) for one, other in zip(without_biases("", tensors)[1:4:2], tensors[1::4], strict=True))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"src_embed.weight": torch.ones(4)}, "tensor 'src_embed.weight' of 2 dimensions is missing, which every"),
        ({FIRST + "feed_forward.layer1.bias": None}, "layers.0.feed_forward.layer1.bias' of 1 dimensions is missing"),
        ({FIRST + "self_attn.output.bias": None}, "lacks tensor 'transformer.layers.0.self_attn.output.bias'"),
        ({FIRST + "feed_forward.linear_v.weight": torch.ones(2)}, "holds tensor 'transformer.layers.0.feed_forward.linear_v.w"),
        ({"generator.bias": 3}, "holds a int as 'generator.bias', where a tensor is expected"),
    ],
)  # fmt: skip
def test_other_models_are_refused(change, message, tmp_path):
    state = {name: value for name, value in (weights_of(PLAIN) | change).items() if value is not None}
    torch.save(state, tmp_path / "model.pth")
    with pytest.raises(CheckpointError, match=message):
        convert(tmp_path / "model.pth", tmp_path / "model", settings={"mem_len": 6})
    assert not (tmp_path / "model").exists()


def test_the_length_of_memory_must_be_said(tmp_path):
    with pytest.raises(CheckpointError, match=r"model.pth' is labml's, which does not say .* add --set mem_len=… \(32 in its"):
        convert(TRAINED / "checkpoint", tmp_path / "model")


def test_the_vocabulary_is_that_of_the_text(tmp_path):
    text = "".join(sorted(map(chr, range(ord("A"), ord("A") + 30)))) + "\n"
    (tmp_path / "text.txt").write_bytes(text.replace("\n", "\r\n").encode())
    found = convert(TRAINED / "checkpoint", tmp_path / "model", vocabulary=tmp_path / "text.txt", settings={"mem_len": 6})
    assert found.tokenizer is not None and found.kind == "labml"
    assert found.tokenizer.encode("\nA").tolist() == [0, 1]
    assert json.loads((tmp_path / "model" / "tokenizer.json").read_text())["kind"] == "char"
    (tmp_path / "other.txt").write_text(text + "é")
    with pytest.raises(CheckpointError, match=r"the vocabulary of '.*other.txt' has 32 tokens, the model 31"):
        convert(TRAINED / "checkpoint", tmp_path / "other", vocabulary=tmp_path / "other.txt", settings={"mem_len": 6})
