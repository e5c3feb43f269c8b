"""Entities are those that seqeval reads by default, of any labels; broken schemes are found at the right word."""

import json
from pathlib import Path

import pytest

from transformer_xl.data.entities import entities_of, fault, name_entities, scheme_of

GOLDEN = json.loads((Path(__file__).parents[1] / "parity" / "goldens" / "seqeval" / "scores.json").read_text())


@pytest.mark.parametrize("scheme", GOLDEN["cases"])
def test_entities_are_those_of_seqeval(scheme):
    for case in GOLDEN["cases"][scheme]:
        for labels, expected in zip(case["said"], case["entities"], strict=True):
            found = entities_of(labels.split(" "))
            assert [[each.type, each.first, each.end - 1] for each in found] == expected


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        ("B-PER I-PER O", True),
        ("B I O", True),
        ("B-PER L-PER U-PER O", True),
        ("NOUN VERB O", False),
        ("B-PER X", False),
        ("O", False),
        ("B I E S M", False),
        ("0 1", False),
    ],
)
def test_labels_that_name_entities(labels, expected):
    assert name_entities(labels.split()) == expected


@pytest.mark.parametrize(
    ("sentences", "expected"),
    [
        (["B-A I-A O", "O B-A"], "BIO"),
        (["I-A I-A O", "I-A B-A"], "IOB1"),
        (["I-A I-A O", "O B-A"], "BIO"),  # obeys neither, and looks like the usual one
        (["B-A I-A", "I-A B-B"], "BIO"),
        (["B-A E-A O", "I-A"], "BIOES"),
        (["B-A L-A O", "U-A"], "BILOU"),
    ],
)
def test_schemes(sentences, expected):
    assert scheme_of([labels.split() for labels in sentences]) == expected


@pytest.mark.parametrize(
    ("labels", "scheme", "expected"),
    [
        ("B-A I-A O B-A B-B", "BIO", None),
        ("O I-A", "BIO", (1, "I-A follows O, but only B-A begins an entity")),
        ("I-A", "BIO", (0, "I-A is the first label, but only B-A begins an entity")),
        ("B-A I-B", "BIO", (1, "I-B follows B-A, but only B-B begins an entity")),
        ("I-A I-A B-A I-B O", "IOB1", None),
        ("I-A O B-A", "IOB1", (2, "B-A follows O, but in IOB1, as elsewhere in the file, it follows an entity of its type")),
        ("B-A I-A E-A S-A O", "BIOES", None),
        ("B-A O O", "BIOES", (0, "the entity of B-A is not ended by E-A")),
        ("B-A U-A", "BILOU", (0, "the entity of B-A is not ended by L-A")),
        ("B-A I-A", "BIOES", (1, "the entity of I-A is not ended by E-A")),
        ("B-A E-B", "BIOES", (0, "the entity of B-A is not ended by E-A")),
        ("S-A I-A E-A", "BIOES", (1, "I-A follows S-A, but only B-A begins an entity")),
        ("O E-A", "BIOES", (1, "E-A follows O, but only B-A begins an entity")),
        ("B-A I-A L-A U-A", "BILOU", None),
    ],
)
def test_faults(labels, scheme, expected):
    assert fault(labels.split(), scheme) == expected
