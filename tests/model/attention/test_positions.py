"""Rotary positions and ALiBi beside other programs, in bf16, and with lengths that training did not have."""

from typing import Any

import pytest
import torch

from tests.helpers import assert_close, gradients, tiny_model
from transformer_xl.batch import Rows
from transformer_xl.errors import ConfigError
from transformer_xl.kernels.device import Precision, autocast
from transformer_xl.kernels.rotation import turned, turns
from transformer_xl.model.attention.alibi import slopes
from transformer_xl.model.memory import Mems
from transformer_xl.model.transformer_xl import TransformerXL

CPU = torch.device("cpu")
KINDS = ["rotary", "alibi"]


def test_queries_and_keys_turn_as_in_transformers() -> None:
    llama = pytest.importorskip("transformers.models.llama.modeling_llama", reason="transformers is not installed")
    from transformers import LlamaConfig

    config = LlamaConfig(hidden_size=24, num_attention_heads=3, max_position_embeddings=5000)
    positions = torch.tensor([[0, 1, 2, 17, 400, 4000]])
    q, k = torch.randn(2, 1, 6, 3, 8)
    cos, sin = llama.LlamaRotaryEmbedding(config)(q, positions)
    theirs = llama.apply_rotary_pos_emb(q.transpose(1, 2), k.transpose(1, 2), cos, sin)
    ours = turns(positions[0], 8, torch.float32)
    for x, expected in zip((q, k), theirs, strict=True):
        own = turned(x, *(part.unsqueeze(1) for part in ours))
        assert_close("turned", own, expected.transpose(1, 2), 1e-3)  # their angles are fp32, and 4000 of them is far


@pytest.mark.parametrize("n_head", [1, 2, 3, 7, 8, 12, 20])
def test_slopes_are_those_of_bloom(n_head: int) -> None:
    bloom = pytest.importorskip("transformers.models.bloom.modeling_bloom", reason="transformers is not installed")
    theirs = bloom.build_alibi_tensor(torch.ones(1, 2), n_head, torch.float32)[:, 0, 1]
    assert slopes(n_head) == pytest.approx(theirs.tolist(), rel=1e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
def test_bf16_costs_little(kind: str, weights: torch.dtype) -> None:
    """Under autocast and with weights of bf16, over a memory, with the gradients of all weights."""
    model, narrow = (tiny_model(attention=kind, d_model=32, d_head=16) for _ in range(2))
    narrow.load_state_dict(model.state_dict())
    narrow = narrow.to(weights)
    ids = torch.randint(13, (2, 40))
    results = []
    below: Precision = "bf16" if weights == torch.float32 else "fp32"
    runs: list[tuple[TransformerXL, Precision]] = [(model, "fp32"), (narrow, below)]
    for each, precision in runs:
        mems, total = each.init_mems(2), torch.zeros(())
        for part in ids.split(8, dim=1):
            with autocast(CPU, precision):
                out = each(part[:, :-1], mems=mems, labels=part[:, 1:])
            mems, total = out.mems, total + out.nll.float().mean()
        total.backward()
        results.append((total.item(), each.get_parameter("layers.0.attention.qkv_net.weight").grad))
    (loss, gradient), (narrow_loss, narrow_gradient) = results
    assert 0 < abs(loss - narrow_loss) < 0.05 * loss
    assert gradient is not None and narrow_gradient is not None
    cosine = torch.nn.functional.cosine_similarity(gradient.flatten(), narrow_gradient.float().flatten(), dim=0)
    assert cosine > 0.98


@pytest.mark.parametrize("kind", KINDS)
def test_a_gpu_and_a_cpu_compute_the_same_in_different_ways(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs and all gradients by PyTorch's own attention, and by batched products; rows of different ages."""
    model = tiny_model(attention=kind).double()
    mems = Mems.concatenate([model(torch.randint(13, (1, n)), mems=model.init_mems(1)).mems for n in (1, 4, 9)])
    ids, results = torch.randint(13, (3, 7)), []
    for matmul in (True, False):
        if not matmul:
            monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
        model.zero_grad()
        out = model(ids, mems=mems, rows=Rows(n_pad=torch.tensor([0, 2, 0])))
        out.logits[:, 2:].square().sum().backward()
        results.append({"logits": out.logits[:, 2:].detach(), **gradients(model)})
    for name, right in results[0].items():
        assert_close(name, results[1][name], right, 1e-12)


@pytest.mark.parametrize(
    "options",
    [
        *({"attention": kind} for kind in ("transformer_xl", "vaswani", *KINDS)),
        {"attention": "shaw", "max_klen": 12},
        {"attention": "al_rfou", "max_klen": 12, "n_head": 2, "d_head": 5},
        {"shift": "averages", "d_model": 16},
        {"shift": "averages", "d_model": 16, "mem_len": 2},
        {"attention": "vaswani", "shift": "averages", "d_model": 16},
    ],
    ids=str,
)
def test_padding_does_not_change_a_row_after_a_full_memory(options: dict[str, Any]) -> None:
    """Its memory moves up to its text, with its positions, and what it leaves behind is not seen."""
    model = tiny_model(**{"mem_len": 6, "n_layer": 2, **options}).double()
    mems = model(torch.randint(13, (3, 30)), mems=model.init_mems(3)).mems
    ids, n_pad = torch.randint(13, (3, 5)), torch.tensor([0, 2, 4])
    with torch.no_grad():
        padded = model(ids, mems=mems, rows=Rows(n_pad=n_pad))
        assert padded.logits.isfinite().all(), "padding sees at least itself"
        for row, n in enumerate(n_pad.tolist()):
            alone = model(ids[row : row + 1, n:], mems=mems.select(slice(row, row + 1)))
            assert_close("logits", padded.logits[row, n:], alone.logits[0], 1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_a_longer_memory_at_evaluation_sees_what_one_long_segment_sees(kind: str) -> None:
    """One layer, whose memory is of embeddings: 30 positions of memory and 10 tokens are a segment of 40."""
    model = tiny_model(attention=kind, n_layer=1, mem_len=3).double()
    ids = torch.randint(13, (2, 40))
    with torch.no_grad():
        longer = model.with_context(mem_len=30)
        mems = longer(ids[:, :30]).mems
        assert_close("logits", longer(ids[:, 30:], mems=mems).logits, model(ids).logits[:, 30:], 1e-12)


def test_rotary_positions_are_not_limited() -> None:
    message = r"clamp_len \(7\) must be none: attention 'rotary' tells all distances apart$"
    model = tiny_model(attention="rotary")
    with pytest.raises(ConfigError, match="^" + message):
        model.with_context(clamp_len=7)
    assert tiny_model(attention="alibi").with_context(clamp_len=7).clamp_len == 7
