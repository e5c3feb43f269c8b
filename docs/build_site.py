"""Build the site: `make site`. Its pages are those of the repository, in the same places, so that links work in both.

What is not written by hand is made here: the reference of commands from the command line itself, that of Python from the
docstrings of public names, the list of recipes from their files, and from all of these `llms.txt`, which lists the site for
programs, with each page as Markdown beside its HTML. Nothing is loaded from a network, neither now nor by a reader, and a page
works as a file, too.
"""

import html
import json
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from html.parser import HTMLParser
from itertools import groupby
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import transformer_xl
from transformer_xl.cli import app
from transformer_xl.config.recipes import load_recipe, recipe_names

ROOT = Path(__file__).parent.parent
OUT = ROOT / "build" / "site"
SHOWN = ("*.md", "docs/*.md", "docs/*.png", "benchmarks/*.md", "examples/**/*.*", "Dockerfile", "src/**/equation.py")
NOTEBOOKS = {
    "notebook": "The outputs are those of one run on two cores that other programs used too. `make notebook` repeats it.",
    "notebook.zh": "页中的输出来自一次运行，机器为双核，当时另有程序在运行。`make notebook` 会重新运行一遍。",
}
EXAMPLES = ROOT / "examples"
COLOR = "\x1b\\[[0-9;]*m"
ANNOTATED = OUT / "pages" / "docs" / "annotated"


def main() -> None:
    """Build it."""
    shutil.rmtree(OUT, ignore_errors=True)
    for path in sorted({path for pattern in SHOWN for path in ROOT.glob(pattern)}):
        copy(path, OUT / "pages" / path.relative_to(ROOT), r"^(```\w+) .+$", r"\1")  # what tests read is no language
    annotated()
    for name in NOTEBOOKS:
        (OUT / "pages" / "examples" / f"{name}.md").write_text(notebook(name), encoding="utf-8")
    for page in (OUT / "pages").rglob("*.md"):
        text = re.sub(r"(annotated/\w+)\.md", r"\1.html", page.read_text(encoding="utf-8"))
        page.write_text(re.sub(r"(examples/notebook(?:\.zh)?)\.(?:py|ipynb)\)", r"\1.md)", text), encoding="utf-8")
    for path in ROOT.glob("src/**/*.py"):
        copy(path, OUT / path.relative_to(ROOT), r"^( +Example):$", r"\1s:")  # as the style of Google spells it
    (OUT / "pages" / "docs" / "commands.md").write_text(commands(), encoding="utf-8")
    (OUT / "pages" / "docs" / "api.md").write_text(names(), encoding="utf-8")
    with (OUT / "pages" / "docs" / "recipes.md").open("a", encoding="utf-8") as page:
        page.write(recipes())
    shutil.copytree(ROOT / "docs" / "theme", OUT / "theme")
    shutil.copy(ROOT / "docs" / "site.toml", OUT / "zensical.toml")
    subprocess.run([sys.executable, "-m", "zensical", "build", "--clean", "--strict"], cwd=OUT, check=True)
    complete_search(OUT / "html")
    for page in (OUT / "pages").rglob("*.md"):
        if page.name != "api.md":  # of directives, which only the builder reads
            shutil.copy(page, OUT / "html" / page.relative_to(OUT / "pages"))
    (OUT / "html" / "llms.txt").write_text(llms(OUT / "html"), encoding="utf-8")
    check(OUT / "html")
    print(f"open {OUT / 'html' / 'index.html'}")


def annotated() -> None:
    """Make the annotated model, whose pages are built already."""
    subprocess.run([sys.executable, ROOT / "docs" / "annotate.py", ANNOTATED], check=True)
    for page in ANNOTATED.glob("*.html"):
        text = re.sub(r'href="\.\./((?:\.\./)+\w+(?:/\w+)*)\.md', r'href="\1.html', page.read_text(encoding="utf-8"))
        page.write_text(text.replace('href="../README.html', 'href="../index.html'), encoding="utf-8")


def notebook(name: str) -> str:
    """Return a notebook as a page: its cells, and after those of code what they printed and drew when `make notebook` ran."""
    _, *parts = re.split(r"^# %%(.*)\n", (EXAMPLES / f"{name}.py").read_text(encoding="utf-8"), flags=re.MULTILINE)
    ran = json.loads((EXAMPLES / "notebook.ipynb").read_text(encoding="utf-8"))["cells"]
    page = title = ""
    for kind, text, cell in zip(parts[::2], map(str.strip, parts[1::2]), ran, strict=True):
        if "markdown" in kind:
            page += re.sub("^# ?", "", text, flags=re.MULTILINE) + "\n\n"
            page += f"{NOTEBOOKS[name]} ([{name}.py]({name}.py))\n\n" if not title else ""
            title = "".join(re.findall(r"^# #+ (.+)", text, flags=re.MULTILINE)) or title
        else:
            page += f"```python\n{text}\n```\n\n{outputs(cell['outputs'], title)}"
    return page


def outputs(of: list[dict[str, Any]], title: str) -> str:
    """Return what a cell printed and drew as Markdown."""
    page = ""
    for is_picture, group in groupby(of, lambda output: "image/png" in output.get("data", {})):
        if is_picture:
            page += "".join(f"![{title}](data:image/png;base64,{each['data']['image/png'].strip()})\n\n" for each in group)
        else:
            text = "".join("".join(each.get("text") or each["data"]["text/plain"]) for each in group)
            page += f"```{{ .text .printed }}\n{re.sub(COLOR, '', text).rstrip()}\n```\n\n"
    return page


def complete_search(site: Path) -> None:
    """Let search find the annotated model and words in Chinese text, and work in a page that was opened as a file."""
    from annotate import LANGUAGES, read_passages

    index = json.loads((site / "search.json").read_text(encoding="utf-8"))
    index["config"]["lang"] = ["en", "zh"]
    for language, path in zip(LANGUAGES, (["Line by line", "The annotated model"], ["中文", "逐行读懂"]), strict=True):
        for passage in read_passages(language):
            part = f"#{passage.id}" if passage.level > 1 else ""
            text = html.escape(re.sub(r"\[([^\]]*)\][\[(][^\])]*[\])]|[*`$|]", r"\1", passage.text))
            item = {"location": f"docs/annotated/{language}.html{part}", "level": passage.level, "title": passage.title}
            index["items"].append(item | {"text": text, "path": path, "tags": []})
    (worker,) = site.glob("assets/javascripts/workers/search.*.js")
    shim = f"""if (location.protocol === "file:") {{ // browsers start no worker from a file, but from its text
  const worker = URL.createObjectURL(new Blob([{json.dumps(worker.read_text(encoding="utf-8"))}]))
  window.Worker = class extends Worker {{ constructor() {{ super(worker) }} }}
}}
"""
    written = json.dumps(index, ensure_ascii=False)
    for name, text in (("search.json", written), ("search.js", f"var __index = {written}"), ("iframe-worker.js", shim)):
        (site / name).write_text(text, encoding="utf-8")


class Page(HTMLParser):
    """What a page links to, what it loads, and the parts of it that a link can name."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: set[str] = set()
        self.loads: set[str] = set()
        self.parts: set[str] = {""}
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note what a tag has."""
        for name, value in attrs:
            if value and name == "id":
                self.parts.add(value)
            elif value and name in ("href", "src"):
                (self.links if tag == "a" else self.loads).add(value)


def check(site: Path) -> None:
    """Refuse links to files or parts of pages that the site does not have, and whatever a page would load from elsewhere."""
    site = site.resolve()
    pages = {path: Page(path) for path in sorted(site.rglob("*.html"))}
    for path, page in pages.items():
        for link in sorted(page.links | page.loads):
            file, _, part = unquote(link).partition("#")
            place = (site / file[1:] if file.startswith("/") else path.parent / file if file else path).resolve()
            place = place / "index.html" if file == "/" else place
            if re.match(r"[a-z]+:|//", link):
                if link in page.loads and not link.startswith("data:"):
                    raise SystemExit(f"build_site: {path.relative_to(site)} loads '{link}' from elsewhere")
            elif not place.is_file() or (place in pages and part not in pages[place].parts):
                raise SystemExit(f"build_site: {path.relative_to(site)} links to '{link}', which the site does not have")


def copy(path: Path, place: Path, pattern: str, instead: str) -> None:
    """Copy a file, with something replaced in text."""
    place.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix in (".md", ".py"):
        text = path.read_text(encoding="utf-8")
        place.write_text(re.sub(pattern, instead, text, flags=re.MULTILINE), encoding="utf-8")
    else:
        shutil.copy(path, place)


def commands() -> str:
    """Return the help of all commands as one page."""
    return re.sub(r"\A# txl\n", "# Commands\n", app.generate_docs())


def recipes() -> str:
    """Return a section for each recipe: what it is, where it comes from, and its file."""
    page = "\n## All recipes\n"
    for name in recipe_names():
        recipe = load_recipe(name)
        text = (ROOT / "src" / "transformer_xl" / "recipes" / f"{name}.toml").read_text(encoding="utf-8")
        page += f"\n### `{name}`\n\n{recipe.description}\n\n```toml\n{text}```\n"
    return page


def names() -> str:
    """Return a page of all public names, by the part of the package that they come from."""
    parts = defaultdict[str, list[str]](list)
    for name in transformer_xl.__all__:
        parts[getattr(transformer_xl, name).__module__.split(".")[1]].append(name)
    sections = [
        f"## {part}\n\n" + "".join(f"::: transformer_xl.{name}\n\n" for name in of) for part, of in sorted(parts.items())
    ]
    return "# Python\n\nAll names of `import transformer_xl as txl`.\n\n" + "".join(sections)


def llms(site: Path) -> str:
    """Return the list of a site for programs (https://llmstxt.org): its pages as docs/README.md has them, commands, names."""

    def entry(title: str, name: str, says: str, part: str = "") -> str:
        page = next((name + ending for ending in (".md", ".html") if (site / (name + ending)).is_file()), None)
        if page is None:
            raise SystemExit(f"build_site: llms.txt would list '{name}', which the site does not have")
        return f"- [{title}]({page}{part}): {says}\n"

    table = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| \[([^]]+)\.\w+\]\(([^)]+)\.\w+\).* \| (.+) \|$", table, re.MULTILINE)
    pages = [(title, f"docs/{name}".replace("docs/../", ""), says) for title, name, says in rows]
    pages.sort(key=lambda page: page[0] != "coding-agents")
    text = (
        f"# transformer_xl\n\n> {str(app.help).splitlines()[0]}\n\nEach page is here as Markdown and as HTML.\n\n## Pages\n\n"
    )
    text += entry("README", "README", "install, train on your own text, use it from Python")
    text += "".join(entry(*page) for page in pages)
    text += "\n## Commands\n\n"
    for command, part, says in re.findall(r"^\* \[`(\w+)`\]\((#[\w-]+)\): (.+)$", commands(), re.MULTILINE):
        text += entry(f"txl {command}", "docs/commands", says, part)
    text += "\n## Python\n\n"
    for name in transformer_xl.__all__:
        says = str(getattr(transformer_xl, name).__doc__).splitlines()[0]
        text += entry(f"txl.{name}", "docs/api", says, f"#transformer_xl.{name}")
    return text + "\n## Optional\n\n" + entry("CHANGELOG", "CHANGELOG", "what each version changed")


if __name__ == "__main__":
    main()
