"""Runs and saved models of an earlier release still load: the same ids for a text, and the same nats."""

import json
from pathlib import Path

import pytest
import torch

import transformer_xl as txl

GOLDENS = Path(__file__).parent / "goldens" / "release_0_2"
WRITTEN = sorted(path for name in ("run", "saved") for path in GOLDENS.glob(f"*/{name}"))


@pytest.mark.parametrize("path", WRITTEN, ids=lambda path: "-".join(path.parts[-2:]))
def test_what_0_2_wrote_loads(path: Path) -> None:
    expected = json.loads((path.parent / "expected.json").read_text(encoding="utf-8"))
    model, tokenizer = txl.load(path)
    assert tokenizer is not None
    assert list(tokenizer.encode(expected["text"])) == expected["ids"]
    assert tokenizer.decode(expected["ids"]) == tokenizer.decode(tokenizer.encode(expected["text"]))
    ids_BT = torch.tensor([expected["ids"]])
    with torch.no_grad():
        nats_T = model(ids_BT[:, :-1], labels=ids_BT[:, 1:]).nll[0]
    torch.testing.assert_close(nats_T, torch.tensor(expected["nats"]), rtol=1e-5, atol=1e-5)


def test_each_way_to_save_is_there() -> None:
    assert len(WRITTEN) == 9
