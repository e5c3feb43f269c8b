"""A file imports only from layers below its own, or from its own folder."""

import ast
from functools import cache
from pathlib import Path

import transformer_xl

ROOT = Path(transformer_xl.__file__).parent
LAYERS = [
    {"version", "errors", "process", "console"},
    {"files", "untrusted"},
    {"world", "pictures", "hub", "manifest"},
    {"tensor_file", "kernels"},
    {"config", "batch"},
    {"tokenizers"},
    {"model", "data"},
    {"inference"},
    {"reading"},
    {"checkpoint"},
    {"generation", "conversion"},
    {"tasks"},
    {"training", "huggingface", "onnx"},
    {"tools", "explain", "server"},
    {"cli"},
    {"__main__"},
]
PACKAGE = "transformer_xl"
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}


@cache
def parsed(path):
    """Return the imports of a file, at any depth of it, and those of its top level."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    anywhere, at_once = (
        [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)] for nodes in (ast.walk(tree), tree.body)
    )
    return anywhere, at_once


def imports(path):
    return parsed(path)[0]


def imported_roots(path):
    """Return the first parts of all that a file imports."""
    modules = {alias.name.split(".")[0] for node in imports(path) if isinstance(node, ast.Import) for alias in node.names}
    return modules | {(node.module or "").split(".")[0] for node in imports(path) if isinstance(node, ast.ImportFrom)}


def imported_parts(path):
    """Yield the first part below `transformer_xl` of everything a file imports, at any depth of the file."""
    for node in imports(path):
        names = []
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            base = node.module or ""
            names = [f"{base}.{alias.name}" for alias in node.names] if base == "transformer_xl" else [base]
        else:
            names = [alias.name for alias in node.names]
        for name in names:
            parts = name.split(".")
            if parts[0] == "transformer_xl":
                yield parts[1] if len(parts) > 1 else PACKAGE


def test_imports_point_downwards():
    """What the package itself imports when it is imported is the version alone, so that nothing imports itself through it."""
    wrong, seen = [], 0
    for path in sorted(ROOT.rglob("*.py")):
        own = path.relative_to(ROOT).parts[0].removesuffix(".py")
        if own == "__init__":
            continue
        assert own in LEVEL, f"{path} belongs to no layer; add its folder to LAYERS and to docs/design.md"
        for part in imported_parts(path):
            seen += 1
            if part not in LEVEL:
                wrong.append(f"{path.relative_to(ROOT)} imports the package itself, or what is not a module of it: {part}")
            elif part != own and LEVEL[part] >= LEVEL[own]:
                wrong.append(f"{path.relative_to(ROOT)} imports {part}")
    assert seen > 50
    assert not wrong, "\n".join(wrong)


def module_name(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(["transformer_xl", *(parts[:-1] if parts[-1] == "__init__" else parts)])


def imported_at_once(path):
    """Yield the modules that Python imports before it has run a file: not those of functions or of `if TYPE_CHECKING`."""
    for node in parsed(path)[1]:
        if isinstance(node, ast.ImportFrom):
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        else:
            yield from (alias.name for alias in node.names)


def test_importing_a_file_never_imports_it_again():
    """No circles, `__init__` files included: importing a module imports the packages that it lies in."""
    paths = {module_name(path): path for path in sorted(ROOT.rglob("*.py"))}
    needs = {}
    for name, path in paths.items():
        wanted = {module for module in imported_at_once(path) if module in paths}
        wanted |= {parent for module in wanted for parent in parents(module) if parent in paths}
        needs[name] = wanted - {name, *parents(name)}
    assert needs["transformer_xl"] == {"transformer_xl.version"}
    done = set()

    def visit(name, way):
        assert name not in way, " imports ".join([*way[way.index(name) :], name])
        if name not in done:
            for other in sorted(needs[name]):
                visit(other, [*way, name])
            done.add(name)

    for name in paths:
        visit(name, [])
    assert len(done) == len(paths)


def parents(module):
    parts = module.split(".")
    return [".".join(parts[:i]) for i in range(1, len(parts))]


def test_models_know_nothing_of_training_files_or_commands():
    banned = {"argparse", "cyclopts", "rich", "transformers", "pickle"}
    for path in sorted((ROOT / "model").rglob("*.py")):
        found = imported_roots(path) & banned
        assert not found, f"{path}: {found}"


def test_nothing_executes_files():
    for path in sorted(ROOT.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        for call in ("torch.load(", "pickle.load", "pickle.Unpickler(", "eval(", "exec("):
            found = [line for line in text.splitlines() if call in line and ".eval(" not in line and "def " not in line]
            assert not found, f"{path}: {found}"


def test_one_file_unpickles():
    """Whatever can rebuild objects from bytes is imported by the reader of foreign pickles, and by nothing else."""
    banned = {"pickle", "_pickle", "pickletools", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        if modules := imported_roots(path) & banned:
            found[path.relative_to(ROOT).as_posix()] = modules
    assert found == {"conversion/readers/unpickle.py": {"pickle"}}
