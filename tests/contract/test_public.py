"""The public names are those of the README, and the recipes and documents that are shipped work."""

import re
from pathlib import Path

import pytest

import transformer_xl as txl
from transformer_xl.config import load_recipe, recipe_names

ROOT = Path(__file__).parents[2]
NAMES = {
    "Decoder", "Mems", "ModelOutput", "RunConfig", "Score", "SegmentStream", "TransformerXL", "TransformerXLConfig", "TxlError",
    "evaluate", "generate", "load", "load_recipe", "prepare", "train",
}  # fmt: skip


def test_public_names_are_frozen():
    assert set(txl.__all__) == NAMES
    for name in NAMES:
        assert getattr(txl, name).__doc__, name


def test_unknown_public_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'transformer_xl' has no attribute 'Transformer'"):
        _ = txl.Transformer


@pytest.mark.parametrize("name", recipe_names())
def test_recipe_loads_and_its_model_takes_a_step(name):
    config = load_recipe(name)
    assert config.description and config.source, "a recipe says what it is for and where its settings come from"
    small = {"n_layer": 1, "d_model": 16, "n_head": 2, "d_head": 8, "d_inner": 16, "mem_len": 4, "d_embed": None}
    model = txl.TransformerXL(txl.TransformerXLConfig(**{**config.model.model_dump(), **small, "vocab_size": 11}))
    import torch

    ids = torch.randint(11, (2, 6))
    out = model(ids, labels=ids)
    out = model(ids, mems=out.mems, labels=ids)
    out.nll.sum().backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in model.parameters())


def test_documents_name_no_command_or_recipe_that_does_not_exist():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE))
    commands = {"train", "eval", "generate", "corpus"}
    documents = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
    for document in documents:
        text = document.read_text(encoding="utf-8")
        assert set(re.findall(r"`make ([a-z-]+)", text)) <= targets, document
        assert set(re.findall(r"^\$? ?txl ([a-z]+)", text, flags=re.MULTILINE)) <= commands, document
        assert set(re.findall(r"txl train ([a-z]+-[a-z-]+)", text)) <= set(recipe_names()), document


def test_relative_links_of_documents_lead_somewhere():
    for document in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]:
        for link in re.findall(r"\]\(([^)#]+)\)", document.read_text(encoding="utf-8")):
            if "://" not in link:
                assert (document.parent / link).exists(), f"{document.name}: {link}"
