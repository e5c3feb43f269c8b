"""Hidden states on the disk are those from which `evaluate` has its nats, and those of the layers of a model that is called."""

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.reading.test_stream import KINDS, model_of
from transformer_xl.errors import ConfigError
from transformer_xl.reading.evaluation import Reading, evaluate
from transformer_xl.reading.hidden import write_hidden_states

IDS = np.array([(7 * i * i + 3 * i) % 13 for i in range(20)], np.int32)


@pytest.mark.parametrize("kind", KINDS)
def test_the_softmax_has_the_nats_of_a_stream_from_them(kind: str, tmp_path: Path) -> None:
    model, path = model_of(kind), tmp_path / "states.npy"
    reading, steps = Reading(tgt_len=6, mem_len=model.mem_len), list[int]()
    shape = write_hidden_states(path, model, IDS, reading, on_tokens=steps.append)
    states = np.load(path)
    assert (states.shape, states.dtype, steps) == (shape, np.float32, [6, 6, 6, 2])
    with torch.no_grad():
        h_BTD, labels = torch.from_numpy(states[None, :-1]), torch.from_numpy(IDS[None, 1:].astype(np.int64))
        nats = model.softmax.nll(h_BTD, labels, model.embedding)[0].numpy()
    expected = evaluate(model, IDS, **vars(reading), per_token=True).token_nats
    assert expected is not None
    n = 18 if kind.endswith("al_rfou") or "zeros" in kind or kind.startswith("absolute") else 19
    # with positions from the segment's beginning a shorter last segment is another one
    np.testing.assert_allclose(nats[:n], expected[:n], atol=1e-5)


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_a_layer_is_that_of_the_public_call(layer: int, tmp_path: Path) -> None:
    model, path = model_of("transformer_xl"), tmp_path / "states.npy"
    write_hidden_states(path, model, IDS, Reading(tgt_len=20, mem_len=model.mem_len), layer=layer)
    with torch.no_grad():
        states, _ = model.hidden_states(torch.from_numpy(IDS[None].astype(np.int64)))
    assert np.array_equal(np.load(path), states[layer][0].numpy())


def test_what_cannot_be_written_leaves_an_earlier_file(tmp_path: Path) -> None:
    model, path = model_of("transformer_xl"), tmp_path / "states.npy"
    path.write_text("earlier")
    n_layer = len(model.layers)
    with pytest.raises(ConfigError, match=rf"^--layer \({n_layer + 1}\) must be from 0 to {n_layer}: this model has"):
        write_hidden_states(path, model, IDS, Reading(tgt_len=6, mem_len=4), layer=n_layer + 1)

    def stop(_: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_hidden_states(path, model, IDS, Reading(tgt_len=6, mem_len=4), on_tokens=stop)
    assert (path.read_text(), list(tmp_path.iterdir())) == ("earlier", [path])
