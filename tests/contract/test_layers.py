"""A file imports only from layers below its own, or from its own folder."""

import ast
from pathlib import Path

import transformer_xl

ROOT = Path(transformer_xl.__file__).parent
LAYERS = [
    {"version", "errors", "ranks", "console", "allocator"},
    {"files"},
    {"world", "pictures"},
    {"settings"},
    {"model_config"},
    {"config"},
    {"model", "data"},
    {"checkpoint", "reading", "texts"},
    {"opening"},
    {"evaluation", "generation", "conversion"},
    {"training", "huggingface", "onnx", "speed", "planning"},
    {"analysis"},
    {"cli"},
    {"__main__"},
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}


def imported_parts(path):
    """Yield the first part below `transformer_xl` of everything a file imports, at any depth of the file."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = []
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            base = node.module or ""
            names = [f"{base}.{alias.name}" for alias in node.names] if base == "transformer_xl" else [base]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        for name in names:
            parts = name.split(".")
            if parts[0] == "transformer_xl" and len(parts) > 1 and parts[1] in LEVEL:
                yield parts[1]


def test_imports_point_downwards():
    wrong, seen = [], 0
    for path in sorted(ROOT.rglob("*.py")):
        own = path.relative_to(ROOT).parts[0].removesuffix(".py")
        if own == "__init__":
            continue
        assert own in LEVEL, f"{path} belongs to no layer; add its folder to LAYERS and to docs/design.md"
        for part in imported_parts(path):
            seen += 1
            if part != own and LEVEL[part] >= LEVEL[own]:
                wrong.append(f"{path.relative_to(ROOT)} imports {part}")
    assert seen > 50
    assert not wrong, "\n".join(wrong)


def test_models_know_nothing_of_training_files_or_commands():
    banned = {"argparse", "cyclopts", "rich", "transformers", "pickle"}
    for path in sorted((ROOT / "model").rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        modules = {alias.name.split(".")[0] for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
        modules |= {(node.module or "").split(".")[0] for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        assert not modules & banned, f"{path}: {modules & banned}"


def test_nothing_executes_files():
    for path in sorted(ROOT.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        for call in ("import pickle", "torch.load(", "eval(", "exec("):
            found = [line for line in text.splitlines() if call in line and ".eval(" not in line and "def " not in line]
            assert not found, f"{path}: {found}"


def test_one_file_unpickles():
    """Whatever can rebuild objects from bytes is imported by the child that reads foreign pickles, and by nothing else."""
    banned = {"pickle", "_pickle", "pickletools", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        modules = {alias.name.split(".")[0] for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
        modules |= {(node.module or "").split(".")[0] for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        if modules & banned:
            found[path.relative_to(ROOT).as_posix()] = modules & banned
    assert found == {"conversion/readers/pickle_child.py": {"pickle"}}
