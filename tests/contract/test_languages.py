"""README.zh.md says in Chinese what README.md says: the same code, commands, links and figures, in the same places."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
ENGLISH, CHINESE = ROOT / "README.md", ROOT / "README.zh.md"
SOURCE = ROOT / "src" / "transformer_xl"


def prose(document: Path) -> str:
    return re.sub(r"^```.*?^```$", "", document.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def code(document: Path) -> list[str]:
    """Return the fenced blocks without their comments, which are in the language of the page."""
    blocks = re.findall(r"^```.*?^```$", document.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    return [re.sub(r" {2,}# .*$", "", block, flags=re.MULTILINE) for block in blocks]


def spans(text: str) -> list[str]:
    return sorted(re.findall(r"`([^`]+)`", text))


def links(text: str) -> list[str]:
    found = re.findall(r"\]\(([^)]+)\)", text)
    return sorted(link for link in found if link not in (ENGLISH.name, CHINESE.name, "docs/own-text.zh.md"))  # Chinese alone


def numbers(text: str) -> list[str]:
    """Return what is written in digits, outside of code and addresses."""
    return sorted(re.findall(r"\d(?:[\d.,e-]*\d)?", re.sub(r"`[^`]+`|\]\([^)]+\)", "", text)))


def rows(document: Path) -> list[str]:
    return [line for line in prose(document).splitlines() if line.startswith("|")]


def test_both_have_the_same_code() -> None:
    assert len(code(ENGLISH)) > 3
    assert code(CHINESE) == code(ENGLISH)


def test_both_have_the_same_links() -> None:
    chinese = prose(CHINESE).replace("examples/notebook.zh.py", "examples/notebook.ipynb")  # each has its own
    assert links(chinese) == links(prose(ENGLISH))


def test_both_have_the_same_sections_of_the_same_length_in_code_and_tables() -> None:
    def shape(document: Path) -> list[str]:
        return [line[:2] for line in prose(document).splitlines() if line.startswith(("#", "|", "!"))]

    assert shape(CHINESE) == shape(ENGLISH)


def test_rows_of_tables_have_the_same_commands_links_and_numbers() -> None:
    assert len(rows(CHINESE)) == len(rows(ENGLISH)) > 20
    for chinese, english in zip(rows(CHINESE), rows(ENGLISH), strict=True):
        for part in (spans, links, numbers):
            assert part(chinese) == part(english), chinese
        assert len(chinese.split("|")) == len(english.split("|")), chinese
