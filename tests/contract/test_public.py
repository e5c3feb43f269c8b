"""The public names are those of the README, and the recipes and documents that are shipped work."""

import re
from pathlib import Path

import pytest

import transformer_xl as txl
from transformer_xl.config import recipe_names

ROOT = Path(__file__).parents[2]
NAMES = {
    "AttentionKind", "Converted", "Decoder", "KeyValueMemory", "LanguageModel", "Lstm", "LstmConfig", "Mems", "ModelOutput",
    "Reader", "RunConfig", "Score", "SegmentStream", "TransformerXL", "TransformerXLConfig", "TxlError", "Vanilla",
    "VanillaConfig", "convert", "evaluate", "generate", "load", "load_recipe", "prepare", "train",
}  # fmt: skip


def test_public_names_are_frozen():
    assert set(txl.__all__) == NAMES
    for name in NAMES:
        assert getattr(txl, name).__doc__, name


def test_unknown_public_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'transformer_xl' has no attribute 'Transformer'"):
        _ = txl.Transformer


def test_documents_name_no_command_or_recipe_that_does_not_exist():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE))
    commands = {"train", "eval", "generate", "convert", "corpus", "bench", "plan", "recl", "ablate", "explain", "plot"}
    documents = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
    for document in documents:
        text = document.read_text(encoding="utf-8")
        assert set(re.findall(r"`make ([a-z-]+)", text)) <= targets, document
        assert set(re.findall(r"^\$? ?txl ([a-z]+)", text, flags=re.MULTILINE)) <= commands, document
        assert set(re.findall(r"txl train ([a-z0-9]+-[a-z0-9-]+)", text)) <= set(recipe_names()), document


def test_relative_links_of_documents_lead_somewhere():
    for document in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]:
        for link in re.findall(r"\]\(([^)#]+)\)", document.read_text(encoding="utf-8")):
            if "://" not in link:
                assert (document.parent / link).exists(), f"{document.name}: {link}"
