"""The annotated model: prose of `docs/annotated` beside the lines of the model, one self-contained page per language.

    python docs/annotate.py [DIRECTORY]      # default: docs/build/annotated

A heading that ends with an anchor in backquotes begins a passage, whose lines stand at the right of the text under it:

    file.py                        the file's first line
    file.py::Class.method          the definition of a function, a class or a constant
    file.py::Class.method::start   the one line in it that begins so

A passage ends where the file's next one begins. Its text has to name, in backquotes, all that the passage defines. So no line is
left out, and neither a new function nor a new name goes unnoticed. Other headings begin text without code.

In the text, $…$ and $$…$$ are formulas, {{name:.2f}} is a value of `cells.py`, a block "cell NAME" shows one of its cells with
what it printed, and a picture becomes part of the page.
"""

import ast
import contextlib
import html
import io
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import latex2mathml.converter
from markdown_it import MarkdownIt
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer

DOCS = Path(__file__).parent
PROSE = DOCS / "annotated"
MODEL = DOCS.parent / "src" / "transformer_xl" / "model"
LANGUAGES = ("en",)
FILES = ("memory.py", "attention/equation.py")
HEADING = re.compile(r"^(#{1,3}) (.+?)(?: `([\w/]+\.py(?:::[^`]+)?)`)?$")


class AnnotationError(Exception):
    """Text and code do not fit together; the message is one line."""


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


class Source:
    """A file of the model: its lines, where each of its names is defined, and the lines as HTML."""

    def __init__(self, path: str) -> None:
        self.path, text = path, (MODEL / path).read_text(encoding="utf-8")
        self.lines = text.splitlines()
        self.spans: dict[str, tuple[int, int]] = {}
        self._define(ast.parse(text), "")
        self.html = highlight(text, PythonLexer(stripnl=False), HtmlFormatter(nowrap=True)).splitlines()

    def _define(self, parent: ast.AST, prefix: str) -> None:
        for node in ast.iter_child_nodes(parent):
            names = []
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                names = [node.name]
            elif isinstance(node, ast.Assign | ast.AnnAssign) and not prefix:  # a constant
                names = [t.id for t in (node.targets if isinstance(node, ast.Assign) else [node.target]) if isinstance(t, ast.Name)]
            for name in names:
                first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ()))])
                self.spans[prefix + name] = first, node.end_lineno or first
            if isinstance(node, ast.ClassDef):
                self._define(node, f"{prefix}{node.name}.")

    def first_line(self, anchor: str) -> int:
        """Return the line, from 1, where an anchor's passage begins."""
        _, *parts = anchor.split("::", 2)
        if not parts:
            return 1
        if parts[0] not in self.spans:
            raise AnnotationError(f"{anchor}: {self.path} defines no {parts[0]}")
        first, last = self.spans[parts[0]]
        if len(parts) == 1:
            return first
        found = [n for n in range(first, last + 1) if self.lines[n - 1].strip().startswith(parts[1])]
        if len(found) != 1:
            raise AnnotationError(f"{anchor}: {len(found)} lines of {parts[0]} begin so, and one should")
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


def place(passages: list[Passage], sources: dict[str, Source]) -> None:
    """Give each passage with an anchor its lines; an AnnotationError says which anchor, file or name does not fit."""
    for path, source in sources.items():
        own = [p for p in passages if p.anchor and p.anchor.split("::")[0] == path]
        if not own or own[0].anchor != path:
            raise AnnotationError(f"{path}: its first passage must have the anchor `{path}`")
        starts = [source.first_line(p.anchor or "") for p in own]
        for passage, first, after in zip(own, starts, [*starts[1:], len(source.lines) + 1], strict=True):
            if after <= first:
                raise AnnotationError(f"{passage.anchor}: the file's next passage begins at line {after}, not after {first}")
            passage.path, passage.first, passage.last = path, first, after - 1
            said = " ".join([passage.anchor or "", *re.findall(r"`([^`\n]+)`", passage.title + passage.text)])
            for name in (n for n, (line, _) in source.spans.items() if first <= line < after):
                short = name.rpartition(".")[2]
                if not short.startswith("__") and not re.search(rf"\b{re.escape(short)}\b", said):
                    raise AnnotationError(f"{passage.anchor}: the text does not name `{short}`, which its lines define")
    unknown = [p.anchor for p in passages if p.anchor and not p.path]
    if unknown:
        raise AnnotationError(f"{unknown[0]}: its file is not among FILES of docs/annotate.py")


def run_cells() -> tuple[dict[str, tuple[str, str]], dict[str, Any]]:
    """Run `cells.py`; return the code and the output of each cell by name, and the values that they leave."""
    _, *parts = re.split(r"^# %% (\w+)\n", (PROSE / "cells.py").read_text(encoding="utf-8"), flags=re.MULTILINE)
    values: dict[str, Any] = {"__name__": "cells"}
    cells = {}
    for name, code in zip(parts[::2], parts[1::2], strict=True):
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(compile(code, f"cells.py, cell {name}", "exec"), values)
        cells[name] = code.strip(), printed.getvalue().rstrip()
    return cells, values


def make_renderer(cells: dict[str, tuple[str, str]], values: dict[str, Any]) -> Any:
    """Return a function from the text of a passage to HTML."""
    markdown = MarkdownIt("commonmark").enable("table")

    def fence(tokens: Any, i: int, *_: Any) -> str:
        kind, _, name = tokens[i].info.partition(" ")
        if kind != "cell":
            return f"<pre>{html.escape(tokens[i].content)}</pre>"
        if name not in cells:
            raise AnnotationError(f"cell {name}: there is none in docs/annotated/cells.py")
        code, printed = cells[name]
        code = highlight(code, PythonLexer(), HtmlFormatter(nowrap=True))
        return f'<div class="cell"><pre class="code">{code}</pre><pre class="out">{html.escape(printed)}</pre></div>'

    def image(tokens: Any, i: int, *_: Any) -> str:
        svg = (PROSE / tokens[i].attrs["src"]).read_text(encoding="utf-8")
        return f'<span class="figure" role="img" aria-label="{html.escape(tokens[i].content)}">{svg}</span>'

    markdown.renderer.rules |= {"fence": fence, "image": image}  # pyright: ignore[reportAttributeAccessIssue]

    def render(text: str) -> str:
        formulas: list[str] = []

        def keep(match: re.Match[str]) -> str:
            display = "block" if match[1] else "inline"
            formulas.append(latex2mathml.converter.convert((match[1] or match[2]).strip(), display=display))
            return f"\x02{len(formulas) - 1}\x03"

        text = re.sub(r"\$\$(.+?)\$\$|\$([^$\n]+)\$", keep, text, flags=re.DOTALL)
        text = re.sub(r"\{\{(\w+)(?::([^}]*))?\}\}", lambda m: format(values[m[1]], m[2] or ""), text)
        page = re.sub("\x02(\\d+)\x03", lambda m: formulas[int(m[1])], markdown.render(text))
        return re.sub(r'href="(\w+)\.md"', r'href="\1.html"', page).replace('href="../', 'href="../../')

    return render


def make_page(language: str, sources: dict[str, Source], render: Any) -> str:
    """Return the page of a language."""
    passages = read_passages(language)
    place(passages, sources)
    rows, contents = [], []
    for n, p in enumerate(passages):
        title = MarkdownIt().renderInline(p.title)
        if p.level == 2:
            contents.append(f'<a href="#p{n}">{title}</a>')
        prose = f'<div class="prose"><h{p.level}>{title}</h{p.level}>{render(p.text)}</div>'
        if p.path:
            lines = "".join(f"<span>{line}\n</span>" for line in sources[p.path].html[p.first - 1 : p.last])
            head = f"<header>{p.path} <small>{p.first}–{p.last}</small></header>"
            prose += f'<div class="lines">{head}<pre class="code" style="counter-reset: n {p.first - 1}">{lines}</pre></div>'
        rows.append(f'<section id="p{n}" class="{"row" if p.path else "wide"}">{prose}</section>')
    rows.insert(1, f"<nav>{''.join(contents)}</nav>")
    colors = HtmlFormatter(style="friendly").get_style_defs(".code")
    dark = HtmlFormatter(style="github-dark").get_style_defs(".code")
    style = f"{colors}\n@media screen and (prefers-color-scheme: dark) {{ {dark} }}\n"
    style += (PROSE / "page.css").read_text(encoding="utf-8")
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1"><style>{style}</style>'
    title = f"<title>{html.escape(passages[0].title)}</title>"
    return f'<!doctype html><html lang="{language}"><head>{head}{title}</head><body>{"".join(rows)}</body></html>\n'


def main() -> None:
    """Write both pages, or say in one line what does not fit."""
    directory = Path(sys.argv[1]) if len(sys.argv) > 1 else DOCS / "build" / "annotated"
    try:
        sources = {path: Source(path) for path in FILES}
        render = make_renderer(*run_cells())
        pages = {language: make_page(language, sources, render) for language in LANGUAGES}
    except AnnotationError as error:
        sys.exit(f"annotate: {error}")
    directory.mkdir(parents=True, exist_ok=True)
    for language, page in pages.items():
        (directory / f"{language}.html").write_text(page, encoding="utf-8")
        print(f"{directory / language}.html: {len(page.encode()) / 1000:.0f} kB")


if __name__ == "__main__":
    main()
