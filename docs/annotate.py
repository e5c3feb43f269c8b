"""The annotated model (`make annotated`): prose of `docs/annotated` beside the lines of the model, a page per language.

A heading that ends with an anchor in backquotes begins a passage, whose lines stand at the right of the text under it:

    file.py                        the file's first line
    file.py::Class.method          the definition of a function, a class or a constant
    file.py::Class.method::start   the one line in it that begins so

A passage ends where the file's next one begins, and names in backquotes all that its lines define, so no new function goes
unnoticed. $…$ and $$…$$ are formulas, {{name:.2f}} a value of `cells.py`, a block "cell NAME" one of its cells and its output.
"""

import ast
import contextlib
import html
import io
import re
import string
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from markdown_it import MarkdownIt
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer

DOCS = Path(__file__).parent
PROSE = DOCS / "annotated"
PACKAGE = DOCS.parent / "src" / "transformer_xl"
LANGUAGES = ("en", "zh")
FILES = ("model/memory.py", "kernels/equation.py", "model/mask.py", "model/attention/block.py",
    "model/attention/relative.py", "model/attention/shaw.py", "model/layers.py", "model/transformer_xl.py", "model/adaptive.py",
    "model/attention/two_streams.py", "model/xlnet.py")  # fmt: skip
HEADING = re.compile(r"^(#{1,3}) (.+?)(?: `([\w/]+\.py(?:::[^`]+)?)`)?$")
CALLED_BY_TORCH = re.compile(r"__\w+__|forward|backward")  # who knows the class knows these


@dataclass
class Passage:
    """A heading, the text under it, and the lines beside it; `first` and `last` count from 1."""

    level: int
    title: str
    anchor: str | None
    text: str = ""
    path: str = ""
    first: int = 0
    last: int = 0

    @property
    def id(self) -> str:
        """What a link to the heading ends with, as on GitHub."""
        return re.sub(r"[^\w\- ]", "", f"{self.title} {self.anchor or ''}".strip().lower()).replace(" ", "-")


class Source:
    """A file of the model: its lines, and the first and the last line of each of its definitions."""

    def __init__(self, path: str) -> None:
        self.path, self.text = path, (PACKAGE / path).read_text(encoding="utf-8")
        self.lines = self.text.splitlines()
        self.spans: dict[str, tuple[int, int]] = {}
        self._define(ast.parse(self.text), "")

    def _define(self, parent: ast.AST, prefix: str) -> None:
        for node in ast.iter_child_nodes(parent):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
                self.spans[prefix + node.name] = first, node.end_lineno or first
            elif isinstance(node, ast.Assign) and not prefix and isinstance(node.targets[0], ast.Name):
                self.spans[node.targets[0].id] = node.lineno, node.end_lineno or node.lineno
            if isinstance(node, ast.ClassDef):
                self._define(node, f"{prefix}{node.name}.")

    def first_line(self, anchor: str) -> int:
        """Return the line, from 1, where an anchor's passage begins."""
        _, *parts = anchor.split("::", 2)
        if not parts:
            return 1
        if parts[0] not in self.spans:
            raise SystemExit(f"annotate: {anchor}: {self.path} defines no {parts[0]}")
        first, last = self.spans[parts[0]]
        if len(parts) == 1:
            return first
        found = [n for n in range(first, last + 1) if self.lines[n - 1].strip().startswith(parts[1])]
        if len(found) != 1:
            raise SystemExit(f"annotate: {anchor}: {len(found)} lines of {parts[0]} begin so, and one should")
        return found[0]


def read_passages(language: str) -> list[Passage]:
    """Return the passages of a language in the order of its text, without lines."""
    passages, in_block = [], False
    for line in (PROSE / f"{language}.md").read_text(encoding="utf-8").splitlines():
        in_block ^= line.startswith("```")
        if not in_block and (match := HEADING.match(line)):
            passages.append(Passage(len(match[1]), match[2], match[3]))
        elif passages:
            passages[-1].text += line + "\n"
    return passages


def place(passages: Sequence[Passage], sources: Mapping[str, Source]) -> None:
    """Give each passage with an anchor its lines; a SystemExit says which anchor or name does not fit."""
    for path, source in sources.items():
        own = [p for p in passages if p.anchor and p.anchor.split("::")[0] == path]
        if not own or own[0].anchor != path:
            raise SystemExit(f"annotate: {path}: its first passage must have the anchor `{path}`")
        starts = [source.first_line(str(p.anchor)) for p in own]
        if wrong := [p.anchor for p, before, first in zip(own[1:], starts, starts[1:], strict=False) if first <= before]:
            raise SystemExit(f"annotate: {wrong[0]}: the file's passage before it begins at a later line")
        for passage, first, after in zip(own, starts, [*starts[1:], len(source.lines) + 1], strict=True):
            passage.path, passage.first, passage.last = path, first, after - 1
            said = " ".join([str(passage.anchor), *re.findall(r"`([^`\n]+)`", passage.text)])
            for name in (n.rpartition(".")[2] for n, (line, _) in source.spans.items() if first <= line < after):
                if not CALLED_BY_TORCH.fullmatch(name) and not re.search(rf"\b{name}\b", said):
                    raise SystemExit(f"annotate: {passage.anchor}: the text does not name `{name}`, which its lines define")
    if unknown := [p.anchor for p in passages if p.anchor and not p.path]:
        raise SystemExit(f"annotate: {unknown[0]}: its file is not among FILES of docs/annotate.py")


def run_cells() -> tuple[dict[str, tuple[str, str]], dict[str, Any]]:
    """Run `cells.py`; return the code and the output of each cell by name, and the values that they leave."""
    _, *parts = re.split(r"^# %% (\w+)\n", (PROSE / "cells.py").read_text(encoding="utf-8"), flags=re.MULTILINE)
    cells, values = {}, {"__name__": "cells"}
    for name, code in zip(parts[::2], parts[1::2], strict=True):
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(compile(code, f"cell {name} of cells.py", "exec"), values)
        cells[name] = code.strip(), printed.getvalue().rstrip()
    return cells, values


def make_renderer(cells: Mapping[str, tuple[str, str]], values: Mapping[str, Any]) -> Callable[[str], str]:
    """Return a function from the text of a passage to HTML."""

    def fence(tokens: Any, i: int, *_: Any) -> str:
        name = tokens[i].info.removeprefix("cell ")
        if name not in cells:
            raise SystemExit(f"annotate: {name}: docs/annotated/cells.py has no such cell")
        code, printed = highlight(cells[name][0], PythonLexer(), HtmlFormatter(nowrap=True)), html.escape(cells[name][1])
        return f'<div class="cell"><pre class="code">{code}</pre><pre class="out">{printed}</pre></div>'

    def image(tokens: Any, i: int, *_: Any) -> str:
        svg = (PROSE / tokens[i].attrs["src"]).read_text(encoding="utf-8")
        return f'<span class="figure" role="img" aria-label="{html.escape(tokens[i].content)}">{svg}</span>'

    markdown, references = MarkdownIt("commonmark", {"html": False}).enable("table"), {}
    markdown.renderer.rules |= {"fence": fence, "image": image}  # pyright: ignore[reportAttributeAccessIssue]

    def render(text: str) -> str:
        formulas: list[str] = []

        def keep(match: re.Match[str]) -> str:
            formulas.append(convert((match[1] or match[2]).strip(), display="block" if match[1] else "inline"))
            return f"\x02{len(formulas) - 1}\x03"

        text = re.sub(r"\$\$(.+?)\$\$|\$([^$\n]+)\$", keep, text, flags=re.DOTALL)
        text = re.sub(r"\{\{(\w+)(?::([^}]*))?\}\}", lambda m: format(values[m[1]], m[2] or ""), text)
        page = re.sub(r'href="(\w+)\.md"', r'href="\1.html"', markdown.render(text, references))
        page = page.replace('href="../', 'href="../../')
        return re.sub("\x02(\\d+)\x03", lambda m: formulas[int(m[1])], page)

    return render


def make_page(language: str, sources: Mapping[str, Source], render: Callable[[str], str]) -> str:
    """Return the page of a language."""
    place(passages := read_passages(language), sources)
    code = {path: highlight(s.text, PythonLexer(stripnl=False), HtmlFormatter(nowrap=True)) for path, s in sources.items()}
    rows = []
    for p in passages:
        row = f'<div class="prose"><h{p.level}>{MarkdownIt().renderInline(p.title)}</h{p.level}>{render(p.text)}</div>'
        if p.path:
            own = list(zip(code[p.path].splitlines(), sources[p.path].lines, strict=True))[p.first - 1 : p.last]
            lines = "".join(f'<span style="--in: {len(t) - len(t.lstrip())}ch">{line}\n</span>' for line, t in own)
            pre = f'<pre class="code" style="counter-reset: line {p.first - 1}">{lines}</pre>'
            row += f'<div class="lines"><header>{p.path} <small>{p.first}–{p.last}</small></header>{pre}</div>'
        rows.append(f'<section id="{p.id}" class="{"row" if p.path else "wide"}">{row}</section>')
    rows[0] += "".join(["<nav>", *(f'<a href="#{p.id}">{p.title}</a>' for p in passages if p.level == 2), "</nav>"])
    light, dark = (HtmlFormatter(style=style).get_style_defs(".code") for style in ("default", "github-dark"))
    template = string.Template((PROSE / "page.html").read_text(encoding="utf-8"))
    return template.substitute(language=language, title=passages[0].title, light=light, dark=dark, body="\n".join(rows))


def main() -> None:
    """Write both pages, or say in one line what does not fit."""
    directory = Path(*sys.argv[1:]) if len(sys.argv) > 1 else DOCS / "build" / "annotated"
    sources, render = {path: Source(path) for path in FILES}, make_renderer(*run_cells())
    pages = {language: make_page(language, sources, render) for language in LANGUAGES}
    directory.mkdir(parents=True, exist_ok=True)
    for language, page in pages.items():
        (directory / f"{language}.html").write_text(page, encoding="utf-8")
        print(f"{directory / language}.html: {len(page.encode()) / 1000:.0f} kB")


if __name__ == "__main__":
    main()
