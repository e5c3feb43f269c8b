"""The annotated model (docs/annotate.py): text and code belong together, in both languages, and its pages need nothing else."""

import html
import importlib.util
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType
from urllib.parse import unquote

import pytest
import torch

for package in ("latex2mathml", "markdown_it", "pygments"):
    pytest.importorskip(package, reason=f"{package} is not installed; it comes with the extra docs")

ROOT = Path(__file__).parents[2]
PROSE = ROOT / "docs" / "annotated"


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("annotate", ROOT / "docs" / "annotate.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


annotate = load()


@pytest.fixture(scope="module")
def built() -> tuple[dict[str, str], dict]:
    """The pages, and what the cells leave behind."""
    cells, values = annotate.run_cells()
    sources = {path: annotate.Source(path) for path in annotate.FILES}
    render = annotate.make_renderer(cells, values)
    return {language: annotate.make_page(language, sources, render) for language in annotate.LANGUAGES}, values


class Lines(HTMLParser):
    """The lines of code of a page by file, as a reader sees them, and its links and ids."""

    def __init__(self) -> None:
        super().__init__()
        self.shown: dict[str, list[str]] = {}
        self.ids, self.links, self.loaded = [], [], []
        self.path, self.within = "", []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.ids += [given["id"]] if "id" in given else []
        self.links += [given["href"]] if tag == "a" else []
        self.loaded += [tag] if tag in ("link", "img", "iframe") or "src" in given else []
        if tag in ("header", "small", "pre"):
            self.within.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if self.within and tag == self.within[-1]:
            self.within.pop()
            self.path = "" if tag == "pre" else self.path

    def handle_data(self, data: str) -> None:
        if self.within == ["header"]:
            self.path = data.strip()
        elif self.within == ["pre"] and self.path:
            self.shown.setdefault(self.path, [""])[-1] += data


@pytest.mark.parametrize("language", annotate.LANGUAGES)
def test_every_line_stands_there_once_and_in_order(built, language):
    page = Lines()
    page.feed(built[0][language])
    assert list(page.shown) == list(annotate.FILES)
    for path, (text,) in page.shown.items():
        assert text == (annotate.PACKAGE / path).read_text(encoding="utf-8"), path
    indents = re.findall(r'<span style="--in: (\d+)ch">(?:<span class="\w+">)?( *)', built[0][language])  # of wrapped lines
    assert len(indents) > 1000 and all(int(n) == len(spaces) for n, spaces in indents)


@pytest.mark.parametrize("language", annotate.LANGUAGES)
def test_links_lead_somewhere_and_nothing_is_loaded(built, language):
    page = Lines()
    page.feed(built[0][language])
    assert len(page.ids) == len(set(page.ids))
    assert page.loaded == [] and "@import" not in built[0][language] and "url(" not in built[0][language]
    inside = [link for link in page.links if link.startswith("#")]
    assert len(inside) > 20 and {unquote(link.removeprefix("#")) for link in inside} <= set(page.ids)
    for link in re.findall(r"\]\(([^)#:]+)\)", (PROSE / f"{language}.md").read_text(encoding="utf-8")):
        assert (PROSE / link).is_file(), link


@pytest.mark.parametrize("language", annotate.LANGUAGES)
def test_no_formula_is_left_as_it_was_typed(built, language):
    """As one that is broken over two lines would be, or one with columns that the converter does not know."""
    prose = re.sub(r"<pre.*?</pre>", "", built[0][language], flags=re.DOTALL)
    assert re.findall(r".{30}(?:\$|&amp;).{30}", prose) == []


def test_both_languages_say_the_same():
    """The same passages, cells and pictures in the same order, and in each as many formulas, rows, items and links."""
    english, chinese = map(annotate.read_passages, annotate.LANGUAGES)
    assert [(p.level, p.anchor) for p in english] == [(p.level, p.anchor) for p in chinese]
    alike = (
        r"^```cell \w+",
        r"\]\(\w+\.svg\)",
        r"\{\{.+?\}\}",
        r"\[xl(?:net)?\]",
        r"^\$\$",
        r"^(?:\||- |\d+\. |> \*\*)",
        r"\]\((?:#|\.\.)",
    )
    for one, other in zip(english, chinese, strict=True):
        for what in alike:
            assert re.findall(what, one.text, re.M) == re.findall(what, other.text, re.M), (one.title, what)
        assert set(re.findall(r"`([^`\n]+)`", one.text)) == set(re.findall(r"`([^`\n]+)`", other.text)), one.title


@pytest.mark.parametrize("language", annotate.LANGUAGES)
def test_names_in_the_text_exist(language):
    """Whatever stands in backquotes and looks like a name is one, in the package or in the cells."""
    files = [PROSE / "cells.py", *(ROOT / "src" / "transformer_xl").rglob("*.py")]
    known = set(re.findall(r"\w+", " ".join(path.read_text(encoding="utf-8") for path in files)))
    text = re.sub(r"```.*?```", "", (PROSE / f"{language}.md").read_text(encoding="utf-8"), flags=re.S)
    names = {name for code in re.findall(r"`([^`\n]+)`", text) for name in re.findall(r"[A-Za-z_]\w{2,}", code)}
    assert len(names) > 100 and names - known == set()


def test_what_the_text_says_of_the_cells_holds(built):
    values = built[1]
    assert values["with_memory"] < 0.8 < values["guess"] < values["without_memory"]
    assert list(values["felt"].values()) == ["." * (28 - n) + "#" * n for n in (2 * 8 + 4, 8 + 6 + 4, 2 * (8 - 1) + 1)]
    terms = {name: term.flip(0) for name, term in values["terms"].items()}  # by distance
    assert terms["(b) q r"].argmax() == terms["(d) v r"].argmax() == terms["sum    "].argmax() == 5
    parts = terms["(a) q k"] + terms["(b) q r"] + terms["(c) u k"] + terms["(d) v r"]
    assert torch.allclose(parts, terms["sum    "], atol=1e-4)
    assert torch.stack([values["attended"][0, 0, i, 3 + i] for i in range(4)]).min() > 0.5  # the key 5 before each
    assert torch.equal(values["letters"], values["stream"][0, 4:12])


@pytest.mark.parametrize("language", annotate.LANGUAGES)
def test_speeds_are_those_of_the_results(language):
    """How many times longer a vanilla model takes, by attention length, as the paper and our benchmark have measured it."""
    text = (PROSE / f"{language}.md").read_text(encoding="utf-8")
    figures = re.findall(
        r"^\| [\d,]+ \| ([\d,]+) \|.* \*\*([\d,]+)\*\* \([^|]+\|$", (ROOT / "docs" / "results.md").read_text(), re.M
    )
    assert len(figures) == 4
    for measured in zip(*figures, strict=True):
        shares = (int(n.replace(",", "")) / keys for n, keys in zip(measured, (800, 1800, 2800, 3800), strict=True))
        row, below = (re.escape(" | ".join(values)) for values in (measured, [f"{share:.2f}" for share in shares]))
        assert re.search(rf"\| {row} \|\n.*\| {below} \|", text)


def moved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, old: str, new: str) -> str:
    """Return what the generator says when a line of the model has changed."""
    shutil.copytree(annotate.PACKAGE, tmp_path / "package")
    file = tmp_path / "package" / path
    text = file.read_text(encoding="utf-8")
    assert old in text
    file.write_text(text.replace(old, new), encoding="utf-8")
    monkeypatch.setattr(annotate, "PACKAGE", tmp_path / "package")
    with pytest.raises(SystemExit) as caught:
        annotate.place(annotate.read_passages("en"), {name: annotate.Source(name) for name in annotate.FILES})
    return str(caught.value)


@pytest.mark.parametrize(
    ("path", "old", "new", "message"),
    [
        ("model/memory.py", "def join(", "def joined(", "annotate: model/memory.py::join: model/memory.py defines no join"),
        (
            "model/memory.py", "class Mems(", "def forget():\n    pass\n\n\nclass Mems(",
            "annotate: model/memory.py::Memory.detach: the text does not name `forget`, which its lines define",
        ),
        (
            "kernels/equation.py", "    if positions.r is", "    if is_relative and positions.r is",
            "annotate: kernels/equation.py::relative_weights::if positions.r: 0 lines of relative_weights begin so, "
            "and one should",
        ),
    ],
)  # fmt: skip
def test_it_says_where_text_and_code_part(tmp_path, monkeypatch, path, old, new, message):
    assert moved(tmp_path, monkeypatch, path, old, new) == message


def test_it_says_which_passages_are_out_of_order():
    passages = annotate.read_passages("en")
    at = next(i for i, p in enumerate(passages) if p.anchor == "model/memory.py::join")
    passages[at], passages[at + 1] = passages[at + 1], passages[at]
    with pytest.raises(
        SystemExit, match=r"^annotate: model/memory\.py::join: the file's passage before it begins at a later line$"
    ):
        annotate.place(passages, {name: annotate.Source(name) for name in annotate.FILES})


def test_a_cell_or_a_file_that_is_not_there():
    with pytest.raises(SystemExit, match=r"^annotate: nothing: docs/annotated/cells\.py has no such cell$"):
        annotate.make_renderer({}, {})("```cell nothing\n```\n")
    with pytest.raises(SystemExit, match=r"^annotate: model/gates\.py: its file is not among FILES of docs/annotate\.py$"):
        annotate.place([annotate.Passage(3, "Gates", "model/gates.py")], {})
    with pytest.raises(
        SystemExit, match=r"^annotate: model/memory\.py: its first passage must have the anchor `model/memory\.py`$"
    ):
        annotate.place([], {"model/memory.py": annotate.Source("model/memory.py")})


def test_a_formula_survives_markdown():
    assert 'display="block"' in annotate.make_renderer({}, {})("$$a\n+ b$$")
    page = annotate.make_renderer({}, {"x": 0.5})("Let $a_1 * b_2 * c$ be {{x:.2f}} <of it>.")
    assert "<em>" not in page and page.count("<msub>") == 2 and "0.50" in page and html.escape("<of it>") in page
