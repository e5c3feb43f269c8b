"""The example of a memory from outside: its matrix is that of plain loops, and it is saved and decoded like the others."""

import importlib
import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import transformer_xl as txl
from tests.training.helpers import resumed_losses
from transformer_xl.batch import Rows
from transformer_xl.config.model import KINDS
from transformer_xl.errors import ConfigError
from transformer_xl.kernels.equation import relative_attention
from transformer_xl.model.build import make_model
from transformer_xl.model.mask import Mask

SIZES: dict[str, Any] = {"vocab_size": 11, "n_layer": 2, "d_model": 8, "n_head": 2, "d_head": 4, "d_inner": 12, "mem_len": 3}


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "examples"))
    yield importlib.import_module("memory_matrix")
    del sys.modules["memory_matrix"], KINDS["memory_matrix"]


def model_of(example: Any, **changes: Any) -> Any:
    torch.manual_seed(1)
    model: Any = make_model(example.MatrixConfig(**{**SIZES, "init_std": 0.5, **changes})).double().eval()
    for layer in model.layers:
        torch.nn.init.uniform_(layer.scale, 0.5, 2.0)
    return model


def written(model: Any, states: list[torch.Tensor], layer: int, blocks: list[list[int]]) -> torch.Tensor:
    """The matrix of a row, (N, H, H + 1), after the states at some places were written, block after block."""
    block, N, H = model.layers[layer].attention, model.config.n_head, model.config.d_head
    matrix = torch.zeros(N, H, H + 1).double()
    for places in blocks:
        before = matrix.clone()
        for place in places:
            _, k, v = (block.qkv_net.weight @ states[layer][place]).view(3, N, H)
            for head in range(N):
                phi = torch.where(k[head] > 0, k[head], k[head].exp() - 1) + 1
                total = phi @ before[head]
                news = v[head] - (total[:H] / total[H] if total[H] > 0 else 0)
                matrix[head] += torch.outer(phi, torch.cat([news, torch.ones(1).double()]))
    return matrix


@torch.no_grad()
def test_what_leaves_the_memory_is_written_and_read_as_loops_do_it(example: Any) -> None:
    """Rows with padding, and where a document begins, which sees and keeps only itself; T = 2, 5, 4 after a memory of 3."""
    model = model_of(example)
    ids, starts = torch.randint(11, (4, 11)), torch.zeros(4, 11, dtype=torch.bool)
    starts[1, 6] = starts[3, 8] = True
    n_pad, states = torch.tensor([0, 0, 2, 0]), [[] for _ in range(SIZES["n_layer"])]
    mems: Any = None
    for piece, pad in ((slice(0, 2), None), (slice(2, 7), n_pad), (slice(7, 11), None)):
        rows = Rows(n_pad=pad, document_starts=starts[:, piece])
        own, new = model.hidden_states(ids[:, piece], mems=mems, rows=rows)
        assert isinstance(new, example.MatrixMems)
        mems, states = new, [[*before, h_BTD] for before, h_BTD in zip(states, own, strict=False)]
    joined = [torch.cat(each, dim=1) for each in states]
    for layer in range(SIZES["n_layer"]):
        for row, blocks in enumerate([[[0, 1, 2, 3], [4, 5, 6, 7]], [[6, 7]], [[0, 1], [4, 5, 6, 7]], []]):
            expected = written(model, [own[row] for own in joined], layer, blocks)
            torch.testing.assert_close(mems.matrices[layer][row], expected)
    assert mems.n_valid.tolist() == [3, 3, 3, 3]
    torch.testing.assert_close(joined[1][3, 8:], model.hidden_states(ids[3:, 8:])[0][1][0])

    layer: Any = model.layers[0]
    states, block = joined[0][0], layer.attention
    matrix = written(model, [states], 0, [[0, 1, 2, 3]])
    q, k, v = block.project(states[None, 7:], states[None, 4:7], None)
    positions = block.complete(model.positions(7)[0])
    mask = Mask(torch.zeros(1, 4, dtype=torch.int64), torch.tensor([7]))
    found = block.attend(q, k, v, mask=mask, positions=positions, backend=relative_attention)
    for t, head in itertools.product(range(4), range(2)):
        total = (torch.where(q[0, t, head] > 0, q[0, t, head], q[0, t, head].exp() - 1) + 1) @ matrix[head]
        mean = total[:-1] / total[-1]
        found[0, t, head] += layer.scale.view(2, 4)[head] * mean / (mean.square().mean() + 1e-6).sqrt()
    torch.testing.assert_close(joined[1][0, 7:], layer.feed_forward(block.add(states[None, 7:], found))[0])


def test_it_is_trained_saved_loaded_and_decoded(example: Any, tmp_path: Path) -> None:
    changes: dict[str, Any] = {"model": {"kind": "memory_matrix", "dropout": 0.2}, "train": {"checkpoint_layers": True}}
    changes["train"] |= {"tbptt_segments": 2, "reset_at_documents": True}
    losses = resumed_losses(2, 2, **changes)
    assert losses[-1] < losses[0]
    model = model_of(example).float()
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    ids = torch.randint(11, (9,))
    decoder, mems = txl.Decoder(again, batch_size=1, tgt_len=4), model.init_mems(1)
    for token in ids:
        logits, mems = (out := model(token[None, None], mems=mems)).logits, out.mems
        torch.testing.assert_close(decoder.feed([[int(token)]]).log_softmax(-1), logits[:, 0].log_softmax(-1))
    assert not any(x.requires_grad for x in mems.state_dict().values()), "a caller asks for gradients with keep_graph"
    emptied = mems.reset(torch.tensor([True])).state_dict()
    assert emptied.keys() == mems.state_dict().keys() and not any(x.any() for x in emptied.values())


def test_the_figure_is_printed(example: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["memory_matrix.py", "--steps", "1", "--distances", "10", "40"])
    example.main()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(", ")[0] for line in lines] == ["memory_matrix", "transformer_xl"]
    assert len({line.split(", ")[1] for line in lines}) == 1, "both keep as many bytes"


def test_settings_that_it_cannot_have_are_named(example: Any) -> None:
    with pytest.raises(ConfigError, match=r"model.kind=memory_matrix cannot work with model.shift=averages, model.mem_len=0$"):
        model_of(example, shift="averages", mem_len=0)
