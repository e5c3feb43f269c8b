"""Entities as labels of words write them: B- begins one, I- is inside, E- ends it, S- is all of it, O is none.

| scheme | labels | an entity of two words, and one of one |
|---|---|---|
| BIO (also called IOB2) | B- I- O | B-X I-X, B-X |
| IOB1, of CoNLL-2003's files | B- I- O | I-X I-X, I-X; B- only begins one right after another of its type |
| BIOES; BILOU, with L- and U- for E- and S- | B- I- E- S- O | B-X E-X, S-X |

What a model predicts may contradict its scheme. Entities are then read as seqeval reads them by default, and `conlleval` of
CoNLL-2000 before it: a word goes on with the entity of the word before if its label is I- or E- of the same type and the one
before is B- or I-; any other label but O begins an entity.
"""

import re
from collections.abc import Collection, Sequence
from typing import Literal, NamedTuple

Scheme = Literal["BIO", "IOB1", "BIOES", "BILOU"]

_LABEL = re.compile(r"O|[BIESLU](-.*)?", re.DOTALL)
_BILOU = {"L": "E", "U": "S"}
_AS_BIO = {"E": "I", "S": "B"}


class Entity(NamedTuple):
    """Some words in a row that have a type."""

    type: str  # "_" if labels have none
    first: int  # index of its first word
    end: int  # of the word after its last


def name_entities(labels: Collection[str]) -> bool:
    """Return whether these labels write entities; plain ones, such as parts of speech, do not.

    Example:
        >>> name_entities(["B-PER", "I-PER", "O"]), name_entities(["NOUN", "O"])
        (True, False)
    """
    tags = [label[:1] for label in labels if _LABEL.fullmatch(label)]
    return len(tags) == len(labels) and any(tag != "O" for tag in tags)


def odd_label(labels: Collection[str]) -> str | None:
    """Return a label that writes no entity, where O and others with B- do; None: there is none.

    Example:
        >>> odd_label(["B-PER", "O", "b-PER"]), odd_label(["NOUN", "O"])
        ('b-PER', None)
    """
    if "O" not in labels or not any(label.startswith("B-") for label in labels):
        return None
    return next((label for label in labels if not _LABEL.fullmatch(label)), None)


def entities_of(labels: Sequence[str]) -> list[Entity]:
    """Return the entities of a sentence's labels, whether or not they obey a scheme.

    Example:
        >>> entities_of(["B-PER", "I-PER", "O", "I-LOC"])
        [Entity(type='PER', first=0, end=2), Entity(type='LOC', first=3, end=4)]
    """
    found: list[Entity] = []
    before = ("O", "_")
    for i, (tag, kind) in enumerate(map(_parts, labels)):
        if tag in "IE" and before[0] in "BI" and kind == before[1]:
            found[-1] = found[-1]._replace(end=i + 1)
        elif tag != "O":
            found.append(Entity(kind, i, i + 1))
        before = tag, kind
    return found


def as_bio(labels: Sequence[str]) -> tuple[str, ...]:
    """Return labels of BIOES or BILOU as those of BIO, which write the same entities; others as they are.

    Example:
        >>> as_bio(["B-PER", "E-PER", "S-LOC", "O", "Else"])
        ('B-PER', 'I-PER', 'B-LOC', 'O', 'Else')
    """
    return tuple(_AS_BIO.get(_parts(label)[0], label[0]) + label[1:] if _LABEL.fullmatch(label) else label for label in labels)


def scheme_of(sentences: Sequence[Sequence[str]]) -> Scheme:
    """Return the scheme of the labels of sentences: that which they all obey, or else the one that they look like."""
    tags = {label[0] for labels in sentences for label in labels}
    if ends := tags & set("ELSU"):
        return "BILOU" if ends <= set("LU") else "BIOES"
    is_iob1 = any(fault(labels, "BIO") for labels in sentences) and not any(fault(labels, "IOB1") for labels in sentences)
    return "IOB1" if is_iob1 else "BIO"


def fault(labels: Sequence[str], scheme: Scheme) -> tuple[int, str] | None:
    """Return the index of the first word whose label breaks the scheme, and why; None: all obey it.

    Example:
        >>> fault(["O", "I-PER"], "BIO")
        (1, 'I-PER follows O, but only B-PER begins an entity')
    """
    before, before_label = ("O", "_"), "O"
    for i, label in enumerate([*labels, "O"]):
        tag, kind = _parts(label)
        is_open = before[0] in "BI"
        goes_on = tag in "IE" and is_open and kind == before[1]
        after = f"follows {before_label}" if i else "is the first label"
        if scheme in ("BIOES", "BILOU") and is_open and not goes_on:
            end = "E" if scheme == "BIOES" else "L"
            return i - 1, f"the entity of {before_label} is not ended by {end}{before_label[1:]}"
        if scheme == "IOB1" and tag == "B" and not (is_open and kind == before[1]):
            return i, f"{label} {after}, but in IOB1, as elsewhere in the file, it follows an entity of its type"
        if scheme != "IOB1" and tag in "IE" and not goes_on:
            return i, f"{label} {after}, but only B{label[1:]} begins an entity"
        before, before_label = (tag, kind), label
    return None


def _parts(label: str) -> tuple[str, str]:
    """Return B, I, E, S or O, and the type."""
    return _BILOU.get(label[0], label[0]), label[2:] or "_"
