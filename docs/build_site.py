"""Build the site: `make site`. Its pages are those of the repository, in the same places, so that links work in both.

What is not written by hand is made here: the reference of commands from the command line itself, and that of Python from the
docstrings of public names. Nothing is loaded from a network, neither now nor by a reader.
"""

import re
import shutil
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from urllib.parse import unquote

import transformer_xl
from transformer_xl.cli import app

ROOT = Path(__file__).parent.parent
OUT = ROOT / "build" / "site"
SHOWN = ("*.md", "docs/*.md", "docs/*.png", "benchmarks/README.md", "examples/**/*.*", "Dockerfile", "src/**/equation.py")
ANNOTATED = OUT / "pages" / "docs" / "annotated"


def main() -> None:
    """Build it."""
    shutil.rmtree(OUT, ignore_errors=True)
    for path in sorted({path for pattern in SHOWN for path in ROOT.glob(pattern)}):
        copy(path, OUT / "pages" / path.relative_to(ROOT), r"^(```\w+) .+$", r"\1")  # what tests read is no language
    annotated()
    for path in ROOT.glob("src/**/*.py"):
        copy(path, OUT / path.relative_to(ROOT), r"^( +Example):$", r"\1s:")  # as the style of Google spells it
    (OUT / "pages" / "docs" / "commands.md").write_text(commands(), encoding="utf-8")
    (OUT / "pages" / "docs" / "api.md").write_text(names(), encoding="utf-8")
    shutil.copy(ROOT / "docs" / "site.toml", OUT / "zensical.toml")
    subprocess.run([sys.executable, "-m", "zensical", "build", "--clean", "--strict"], cwd=OUT, check=True)
    check(OUT / "html")
    print(f"open {OUT / 'html' / 'index.html'}")


def annotated() -> None:
    """Make the annotated model, whose pages are built already, and have all others link to those."""
    subprocess.run([sys.executable, ROOT / "docs" / "annotate.py", ANNOTATED], check=True)
    for page in ANNOTATED.glob("*.html"):
        text = re.sub(r'href="\.\./\.\./(\w+)\.md', r'href="../\1/', page.read_text(encoding="utf-8"))
        known = {path.stem for path in (ROOT / "docs").glob("*.md")}
        if lost := sorted(set(re.findall(r'href="\.\./(\w*)', text)) - known):
            raise SystemExit(f"build_site: {page.name} links to '{lost[0]}', and the site has no such page in docs")
        page.write_text(text.replace('href="../README/', 'href="../'), encoding="utf-8")
    for page in (OUT / "pages").rglob("*.md"):
        text = page.read_text(encoding="utf-8")
        page.write_text(re.sub(r"(annotated/\w+)\.md", r"\1.html", text), encoding="utf-8")


def check(site: Path) -> None:
    """Refuse links to files that the site does not have: zensical looks at those between pages of Markdown alone."""
    for page in sorted(site.rglob("*.html")):
        for link in sorted(set(re.findall(r'<[^>]+ (?:href|src)="?([^"\s>#?]+)', page.read_text(encoding="utf-8")))):
            place = site / link[1:] if link.startswith("/") else page.parent / unquote(link)
            if not (re.match(r"[a-z]+:|//", link) or place.is_file() or (place / "index.html").is_file()):
                raise SystemExit(f"build_site: {page.relative_to(site)} links to '{link}', which the site does not have")


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


def names() -> str:
    """Return a page of all public names, by the part of the package that they come from."""
    parts = defaultdict[str, list[str]](list)
    for name in transformer_xl.__all__:
        parts[getattr(transformer_xl, name).__module__.split(".")[1]].append(name)
    sections = [
        f"## {part}\n\n" + "".join(f"::: transformer_xl.{name}\n\n" for name in of) for part, of in sorted(parts.items())
    ]
    return "# Python\n\nAll names of `import transformer_xl as txl`.\n\n" + "".join(sections)


if __name__ == "__main__":
    main()
