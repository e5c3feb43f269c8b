"""The public names are those of the README, and the recipes and documents that are shipped work."""

import importlib
import inspect
import itertools
import pkgutil
import re
import runpy
from dataclasses import is_dataclass
from pathlib import Path

import pytest
from pydantic import BaseModel

import transformer_xl as txl
from tests.cli.command_lines import commands
from transformer_xl.cli import app
from transformer_xl.config.recipes import recipe_names

ROOT = Path(__file__).parents[2]
NAMES = {
    "AttentionKind", "Cache", "Decoder", "Draft", "Dynamic", "Example", "Execution", "LanguageModel", "Lstm", "LstmConfig",
    "Mems", "ModelOutput", "Order", "Reader", "Rows", "RunConfig", "Sampling", "Scheduler", "TaskModel",
    "TransformerXL", "TransformerXLBody", "TransformerXLConfig", "TxlError", "Vanilla", "VanillaConfig", "XLNet",
    "XLNetConfig", "attribute", "beam_search", "convert", "evaluate", "finetune", "generate", "load", "load_recipe", "predict",
    "prepare", "register_attention", "register_model", "train",
}  # fmt: skip


def test_public_names_are_frozen():
    assert set(txl.__all__) == NAMES
    for name in NAMES:
        assert getattr(txl, name).__doc__, name
    with pytest.raises(AttributeError, match="module 'transformer_xl' has no attribute 'Transformer'"):
        _ = txl.Transformer


def documented(owner):
    """Return what the `Args:` section of a docstring describes."""
    _, _, rest = inspect.cleandoc(owner.__doc__ or "").partition("Args:\n")
    section = itertools.takewhile(lambda line: not line or line.startswith("    "), rest.splitlines())
    return {found.group(1) for line in section if (found := re.match(r"    \*{0,2}(\w+)(?: \([^)]*\))?:", line))}


def public_callables():
    for name in sorted(NAMES):
        owner = getattr(txl, name)
        if inspect.isfunction(owner):
            yield name, owner, owner
        elif inspect.isclass(owner):
            if not issubclass(owner, (BaseModel, Exception)) and not is_dataclass(owner) and "__init__" in vars(owner):
                yield name, owner, owner.__init__
            for method, function in inspect.getmembers(owner, inspect.isroutine):
                own = (getattr(function, "__module__", None) or "").startswith("transformer_xl")
                if own and not method.startswith("_") and "\n" in (function.__doc__ or ""):
                    yield f"{name}.{method}", function, function


def test_docstrings_of_public_names_describe_all_arguments():
    wrong, seen = [], 0
    for name, owner, function in public_callables():
        parameters = set(inspect.signature(function).parameters) - {"self", "cls"}
        seen += bool(parameters)
        if parameters != documented(owner):
            wrong.append(f"{name}: {sorted(parameters ^ documented(owner))}")
    assert seen > 30
    assert not wrong, "\n".join(wrong)


def public_methods():
    """Yield the public methods and properties of the package's public classes, except for those that override something."""
    for info in pkgutil.walk_packages(txl.__path__, "transformer_xl."):
        try:
            module = importlib.import_module(info.name)
        except ImportError:  # an extra is not installed
            continue
        for owner in [owner for _, owner in inspect.getmembers(module, inspect.isclass) if owner.__module__ == info.name]:
            for name, method in list(vars(owner).items()):
                place, overrides = f"{owner.__qualname__}.{name}", any(name in vars(base) for base in owner.__mro__[1:])
                function = next((getattr(method, key) for key in ("__func__", "fget", "func") if hasattr(method, key)), method)
                if (
                    inspect.isfunction(function)
                    and function.__name__ == name
                    and not overrides
                    and not re.search(r"\b_", place)
                ):
                    yield f"{info.name}.{place}", function


def test_public_methods_that_override_nothing_have_docstrings():
    methods = list(public_methods())
    assert len(methods) > 500
    assert [place for place, function in methods if not function.__doc__] == []


def test_documents_name_no_command_or_recipe_that_does_not_exist():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE))
    known = {name.split()[0] for name, _ in commands(app)}
    documents = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
    for document in documents:
        text = document.read_text(encoding="utf-8")
        assert set(re.findall(r"`make ([a-z-]+)", text)) <= targets, document
        assert set(re.findall(r"^\$? ?txl ([a-z]+)", text, flags=re.MULTILINE)) <= known, document
        assert set(re.findall(r"txl train ([a-z0-9]+-[a-z0-9-]+)", text)) <= set(recipe_names()), document


def headings(page: Path) -> set[str]:
    """Return what a link can name in a page: its headings, without code, in lower case and with hyphens."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    titles = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", re.sub(r"\]\(.*?\)", "", title).lower()).strip().replace(" ", "-") for title in titles}


def test_relative_links_of_documents_lead_somewhere():
    for document in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/*.md")]:
        for link in re.findall(r"\]\(([^)\s]+)\)", document.read_text(encoding="utf-8")):
            file, _, part = link.partition("#")
            page = document.parent / file if file else document
            if "://" not in link:
                assert page.exists(), f"{document.name}: {link}"
                assert not part or page.suffix != ".md" or part in headings(page), f"{document.name}: {link}"


def test_the_site_has_every_page():
    text = (ROOT / "docs" / "site.toml").read_text(encoding="utf-8")
    named = set(re.findall(r'"([\w/.-]+\.md)"', text))
    written = {f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")}
    made = {"docs/commands.md", "docs/api.md", "examples/notebook.md", "examples/notebook.zh.md"}
    assert named - made == {path for path in named if (ROOT / path).is_file()}
    assert written <= named
    annotated = re.findall(r'"docs/(annotated/\w+)\.html"', text)  # built before the site is
    assert [f"docs/{page}.md" for page in annotated] == ["docs/annotated/en.md", "docs/annotated/zh.md"]


@pytest.mark.parametrize(
    ("page", "why"),
    [
        ('<img alt="" src="../lost.png">', "links to '../lost.png', which"),
        ('<a href="../">', "links to '../', which"),  # a directory is no page where pages are files
        ('<a href="../index.html#lost">', "links to '../index.html#lost', which"),
        ('<a href="#lost">', "links to '#lost', which"),
        ('<script src="https://unpkg.com/iframe-worker/shim">', "loads 'https://unpkg.com/iframe-worker/shim' from elsewhere"),
    ],
)
def test_the_site_refuses_links_to_what_it_does_not_have(page: str, why: str, tmp_path: Path):
    check = runpy.run_path(str(ROOT / "docs" / "build_site.py"))["check"]
    (tmp_path / "docs").mkdir()
    (tmp_path / "index.html").write_text(
        '<a href="docs/page.html#部分">1</a> <a class=x href=https://arxiv.org/abs/1901.02860>2</a>'
    )
    (tmp_path / "docs" / "page.html").write_text('<a id=部分 href=../index.html>1</a> <a href="/">2</a>')
    check(tmp_path)
    (tmp_path / "docs" / "page.html").write_text(f"<h2 id=部分></h2>{page}")
    with pytest.raises(SystemExit, match=re.escape(f"docs/page.html {why}")):
        check(tmp_path)


def test_search_of_the_site_knows_chinese_and_works_in_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(ROOT / "docs")
    (tmp_path / "assets" / "javascripts" / "workers").mkdir(parents=True)
    (tmp_path / "assets" / "javascripts" / "workers" / "search.1.min.js").write_text('"use strict"')
    (tmp_path / "search.json").write_text('{"config": {"lang": ["en"]}, "items": []}')
    runpy.run_path(str(ROOT / "docs" / "build_site.py"))["complete_search"](tmp_path)
    index = (tmp_path / "search.json").read_text(encoding="utf-8")
    assert (tmp_path / "search.js").read_text(encoding="utf-8") == f"var __index = {index}"
    assert '"lang": ["en", "zh"]' in index
    assert "注意力头" in index
    assert r'new Blob(["\"use strict\""])' in (tmp_path / "iframe-worker.js").read_text(encoding="utf-8")


def test_the_site_shows_every_recipe():
    page = runpy.run_path(str(ROOT / "docs" / "build_site.py"))["recipes"]()
    assert re.findall("^### `(.+)`$", page, flags=re.MULTILINE) == recipe_names()


def test_the_list_for_programs_has_every_page_command_and_name(tmp_path: Path):
    llms = runpy.run_path(str(ROOT / "docs" / "build_site.py"))["llms"]
    made = [ROOT / "docs" / "api.html", ROOT / "docs" / "commands.md", ROOT / "docs" / "annotated" / "en.html"]
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), ROOT / "examples" / "notebook.md", *made]
    for page in pages:
        (tmp_path / page.relative_to(ROOT)).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / page.relative_to(ROOT)).touch()
    text = llms(tmp_path)
    assert re.match(r"# transformer_xl\n\n> Transformer-XL: .+\n\n[^#]+\n\n## Pages\n\n- \[README\]\(README.md\): ", text)
    listed = {link.partition("#")[0] for link in re.findall(r"^- \[.+\]\(([^)]+)\): .+$", text, flags=re.MULTILINE)}
    assert {f"docs/{path.name}" for path in ROOT.glob("docs/*.md")} - {"docs/README.md"} <= listed
    assert all((tmp_path / link).is_file() for link in listed)
    names = re.findall(r"^- \[(?:txl )?([\w.]+)\]", text, flags=re.MULTILINE)
    assert {f"txl.{name}" for name in NAMES} | {name.split()[0] for name, _ in commands(app)} <= set(names)
    (tmp_path / "docs" / "training.md").unlink()
    with pytest.raises(SystemExit, match=r"^build_site: llms.txt would list 'docs/training', which the site does not have$"):
        llms(tmp_path)


@pytest.mark.parametrize(
    ("name", "said"), [("notebook", "The outputs are those of one run"), ("notebook.zh", "页中的输出来自一次运行")]
)
def test_the_site_shows_what_the_notebook_printed_and_drew(name: str, said: str):
    page = runpy.run_path(str(ROOT / "docs" / "build_site.py"))["notebook"](name)
    assert page.count(said) == 1
    assert "data:image/png;base64," in page
    printed = re.findall(r"^``` ?\{ \.text \.printed \}\n(.*?)```", page, flags=re.DOTALL | re.MULTILINE)
    assert any(" parameters, " in text for text in printed) and not any("\x1b" in text for text in printed)
