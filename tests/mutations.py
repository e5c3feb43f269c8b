"""Break one line of the package at a time, and see whether the suite notices.

    python tests/mutations.py draw      # choose lines anew (the file of choices is committed, so this is rarely wanted)
    python tests/mutations.py run       # try all that still apply, and print which are no longer noticed

`mutations.jsonl` has a line for each: the function, its line before and after, and the test that noticed it first (null if none
did). A mutation applies as long as its function, wherever it stands now, holds that line exactly once. It is tried on a copy of
`src`, first with the test that noticed it before, then with the tests nearest to its file: those named after it, those that
import it, the others of its folder, and those of its part (`NEAR`), for at most four minutes. Lines were drawn by a seed from
what decides something: comparisons, sums, numbers, conditions, and calls for their effect; not from messages. Lines that left
the package since then left the list.

The suite of 0.2 noticed 133 of 150: kernels 19 of 20, model 19, training 18, server 16, conversion and checkpoints 18, reading
and generation 16, others 27 of 30.
"""

import argparse
import ast
import collections
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
CHOICES = Path(__file__).with_suffix(".jsonl")
PACKAGE = "transformer_xl"
SEED, MOST, LEAST, SECONDS = 7, 150, 20, 240
PARTS = {
    "kernels": ["kernels"],
    "model": ["model", "inference"],
    "training": ["training"],
    "server": ["server"],
    "conversion": ["conversion", "checkpoint"],
    "reading": ["reading", "generation"],
    "other": [""],
}
NEAR = {
    "kernels": ["tests/reference/test_equation.py", "tests/model/test_dropout.py", "tests/training/test_graph.py"],
    "model": ["tests/reference", "tests/model/test_transformer_xl.py", "tests/contract/test_kinds.py"],
    "training": ["tests/training/test_trainer.py", "tests/training/test_run.py"],
    "server": ["tests/server/test_engine.py", "tests/server/test_routes.py"],
    "conversion": ["tests/conversion/test_convert.py", "tests/checkpoint", "tests/training/test_run_damage.py"],
    "reading": ["tests/reading/test_stream.py", "tests/generation/test_decoder.py"],
    "other": ["tests/cli/test_process.py"],
}
SWAPS: dict[type, str] = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==", ast.Is: "is not", ast.IsNot: "is",
    ast.In: "not in", ast.NotIn: "in", ast.Add: "-", ast.Sub: "+", ast.Mult: "/", ast.Div: "*", ast.FloorDiv: "*", ast.Mod: "*",
    ast.And: "or", ast.Or: "and",
}  # fmt: skip


def part_of(path: str) -> str:
    return next(part for part, folders in PARTS.items() if any(path.startswith(folder) for folder in folders))


def sources(package: Path) -> list[Path]:
    return sorted(package.rglob("*.py"))


def functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Yield functions with their qualified names; those inside a function belong to it."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield prefix + node.name, node
        elif isinstance(node, ast.ClassDef):
            yield from functions(node, f"{prefix}{node.name}.")


def mutants(function: ast.AST, lines: list[str]) -> Iterator[tuple[int, int, int, str]]:
    """Yield (line, first column, last column, new text), all within one line."""

    def told(node: ast.AST) -> Iterator[ast.AST]:  # what decides something: neither messages nor types
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Raise | ast.Assert | ast.arguments | ast.JoinedStr | ast.AnnAssign):
                continue
            yield child
            yield from told(child)

    for node in told(function):
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            between = (node.left, node.comparators[0], node.ops[0])
        elif isinstance(node, ast.BinOp):
            between = (node.left, node.right, node.op)
        elif isinstance(node, ast.BoolOp):
            between = (node.values[0], node.values[1], node.op)
        elif isinstance(node, ast.Constant) and isinstance(node.value, int):
            new = str(not node.value) if isinstance(node.value, bool) else str(node.value + 1)
            yield node.lineno, node.col_offset, node.end_col_offset or 0, new
            continue
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            yield node.lineno, node.col_offset, node.operand.col_offset, ""
            continue
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and node.lineno == node.end_lineno:
            yield node.lineno, node.col_offset, node.end_col_offset or 0, "pass"
            continue
        elif isinstance(node, ast.IfExp | ast.If) and node.test.lineno == node.test.end_lineno:
            old = ast.get_source_segment("\n".join(lines), node.test)
            yield node.test.lineno, node.test.col_offset, node.test.end_col_offset or 0, f"not ({old})"
            continue
        else:
            continue
        left, right, operator = between
        start, end = left.end_col_offset or 0, right.col_offset
        if left.end_lineno == right.lineno and type(operator) in SWAPS and "(" not in lines[right.lineno - 1][start:end]:
            closing = lines[right.lineno - 1][start:end].count(")") * ")"
            yield right.lineno, start, end, f"{closing} {SWAPS[type(operator)]} "


def candidates() -> dict[str, list[dict[str, Any]]]:
    """Return all that could be chosen, by part."""
    found = collections.defaultdict(list)
    package = ROOT / "src" / PACKAGE
    for path in sources(package):
        text = path.read_text(encoding="utf-8")
        lines, name = text.splitlines(), path.relative_to(package).as_posix()
        for function, node in functions(ast.parse(text)):
            own = [line.strip() for line in lines[node.lineno - 1 : node.end_lineno]]
            for row, start, end, new in mutants(node, lines):
                line = lines[row - 1]
                if line.isascii() and own.count(line.strip()) == 1:
                    after = (line[:start] + new + line[end:]).strip()
                    choice = {"file": name, "function": function, "line": line.strip(), "instead": after, "noticed": None}
                    found[part_of(name)].append(choice)
    return found


def draw(leave_out: list[str]) -> list[dict[str, Any]]:
    """Choose `LEAST` of each part and the rest anywhere, at most one a function."""
    chance, chosen, seen = random.Random(SEED), [], set()
    pools = candidates()
    order = [part for part in PARTS if part != "other" for _ in range(LEAST)]
    order += ["other"] * (MOST - len(order))
    for part in order:
        pool = [c for c in pools[part] if (c["file"], c["function"]) not in seen and not c["file"].startswith(tuple(leave_out))]
        choice = chance.choice(pool)
        seen.add((choice["file"], choice["function"]))
        chosen.append(choice)
    return chosen


def place(choice: dict[str, Any], package: Path) -> tuple[Path, int] | None:
    """Return the file and the row (from 0) of the line to break, or None if it stands no more where it did, or twice."""
    found = []
    for path in sources(package):
        text = path.read_text(encoding="utf-8")
        if choice["line"] not in text:
            continue
        lines = text.splitlines()
        for function, node in functions(ast.parse(text)):
            if function == choice["function"]:
                rows = range(node.lineno - 1, node.end_lineno or 0)
                found += [(path, row) for row in rows if lines[row].strip() == choice["line"]]
    same = [spot for spot in found if spot[0].relative_to(package).as_posix() == choice["file"]]
    found = same or found
    return found[0] if len(found) == 1 else None


@cache
def test_files() -> dict[str, str]:
    return {p.relative_to(ROOT).as_posix(): p.read_text(encoding="utf-8") for p in sorted((ROOT / "tests").rglob("test_*.py"))}


def nearest(name: str) -> list[str]:
    """Return the test files nearest to a file of the package, the nearest first."""
    parts = name.removesuffix(".py").split("/")
    module, folder = ".".join([PACKAGE, *parts]), "/".join(["tests", *parts[:-1]])
    tests = test_files()
    named = [t for t in tests if t.startswith(f"{folder}/test_{parts[-1]}")]
    importing = sorted((t for t, text in tests.items() if f"{module} import" in text), key=lambda t: not t.startswith(folder))
    beside = [t for t in tests if len(parts) > 1 and t.startswith(folder + "/")]
    part = [t for near in NEAR[part_of(name)] for t in tests if t.startswith(near)]
    return list(dict.fromkeys([*named, *importing, *beside, *part]))


def attempt(choice: dict[str, Any]) -> str | None:
    """Return the test that notices a mutation, "gone" if it no longer applies, or None if no test notices it."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "src"
        shutil.copytree(ROOT / "src", copy, ignore=shutil.ignore_patterns("__pycache__"))
        spot = place(choice, copy / PACKAGE)
        if spot is None:
            return "gone"
        path, row = spot
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        lines[row] = lines[row].replace(choice["line"], choice["instead"])
        path.write_text("".join(lines), encoding="utf-8")
        before = choice["noticed"] or ""
        known = [before] if before and (ROOT / before.partition("::")[0]).exists() else []
        for tests in (known, nearest(path.relative_to(copy / PACKAGE).as_posix())):
            if tests and (by := noticed_by(tests, copy)):
                return by
    return None


def noticed_by(tests: list[str], source: Path) -> str | None:
    """Return the first test that fails, "time" if the tests hang, or None if all pass or there was no time for more."""
    command = [sys.executable, "-m", "pytest", "-qx", "-p", "no:cacheprovider", "-p", "no:randomly", "-W", "default", *tests]
    environment = {**os.environ, "PYTHONPATH": str(source), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    command += ["--timeout=120", "--no-header", "--tb=no", "-rfE"]
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    ) as process:
        try:
            printed, _ = process.communicate(timeout=SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            return None
    if process.returncode in (0, 5) or (process.returncode == 4 and "not found" in printed):
        return None
    failed = [line.partition(" ")[2] for line in printed.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    return failed[0].split(" - ")[0] if failed else tests[0]


def main() -> None:
    """Draw or run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["draw", "run"])
    parser.add_argument(
        "--leave-out", nargs="*", default=[], metavar="FILE", help="draw: beginnings of paths to draw nothing from"
    )
    parser.add_argument("--workers", type=int, default=2, help="run: how many at a time (2)")
    parser.add_argument("--keep", action="store_true", help="run: write which test noticed what into mutations.jsonl")
    parser.add_argument("--begin", type=int, default=0, help="run: leave out so many (0)")
    options = parser.parse_args()
    if options.action == "draw":
        write(draw(options.leave_out))
        return
    choices = [json.loads(line) for line in CHOICES.read_text(encoding="utf-8").splitlines()]
    counts: collections.Counter[tuple[str, str]] = collections.Counter()
    with ThreadPoolExecutor(options.workers) as pool:
        for choice, by in zip(choices[options.begin :], pool.map(attempt, choices[options.begin :]), strict=True):
            outcome = by if by == "gone" else "noticed" if by else "unnoticed"
            counts[part_of(choice["file"]), outcome] += 1
            if not by:
                print(f"{'NO LONGER ' if choice['noticed'] else ''}unnoticed: {choice['file']} {choice['function']}")
                print(f"  {choice['line']}\n  {choice['instead']}", flush=True)
            if options.keep and by != "gone":
                choice["noticed"] = by
                write(choices)
    for part in PARTS:
        print(f"{part:<12}" + ", ".join(f"{counts[part, how]} {how}" for how in ("noticed", "unnoticed", "gone")))


def write(choices: list[dict[str, Any]]) -> None:
    CHOICES.write_text("".join(json.dumps(choice) + "\n" for choice in choices), encoding="utf-8")


if __name__ == "__main__":
    main()
