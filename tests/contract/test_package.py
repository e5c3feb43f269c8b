"""What others get: a wheel and its source, the Dockerfile, and how to cite it."""

import json
import os
import re
import socket
import subprocess
import sys
import tarfile
import time
import tomllib
import urllib.request
import zipfile
from pathlib import Path

import pytest

import transformer_xl as txl

ROOT = Path(__file__).parents[2]
TOOLS = Path(os.environ.get("TXL_PACKAGE_TOOLS", ROOT / ".venv-package" / "bin"))
SMALL = ("train.max_steps=4", "train.batch_size=2", "eval.max_tokens=2_000", "train.sample_tokens=8")
KEY = "a-key-for-this-test-only"


def run(*command: str | Path, cwd: Path = ROOT, **variables: str) -> str:
    done = subprocess.run(list(map(str, command)), cwd=cwd, env={**os.environ, **variables}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


@pytest.fixture
def tools() -> Path:
    if not TOOLS.exists():
        pytest.skip(f"the environment of '{TOOLS}' does not exist; `make package` sets it up")
    return TOOLS


def test_the_citation_has_this_version_and_the_paper() -> None:
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert str(citation["version"]) == txl.__version__
    assert citation["references"][0]["url"] == "https://arxiv.org/abs/1901.02860"


def test_the_dockerfile_is_pinned_keeps_no_secret_and_runs_as_nobody_special() -> None:
    lines = (ROOT / "Dockerfile").read_text(encoding="utf-8").splitlines()
    bases = [line.split()[1] for line in lines if line.startswith("FROM ")]
    assert len(set(bases)) == 1 and re.fullmatch(r"python:3\.\d+-slim-\w+", bases[0])
    assert lines.index("USER 1000") < next(i for i, line in enumerate(lines) if line.startswith("RUN txl train quickstart"))
    assert not [line for line in lines if re.match(r"(ARG|ENV) .*(KEY|TOKEN|SECRET|PASSWORD)", line)]
    copied = [word for line in lines if line.startswith("COPY ") for word in line.split()[1:-1]]
    assert all((ROOT / name).exists() for name in copied)


@pytest.mark.slow
def test_papers_pass_their_linters(tools: Path) -> None:
    run(tools / "hadolint", "Dockerfile")
    assert "valid" in run(tools / "cffconvert", "--validate", "-i", "CITATION.cff")


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_what_is_built_trains_and_serves_without_the_source(tools: Path, tmp_path: Path) -> None:
    """Build the source archive, from it the wheel, install that into an environment of its own, and follow the Dockerfile.

    It trains and generates with the requirements of the core alone.
    """
    run(tools / "python", "-m", "build", "--no-isolation", "--outdir", tmp_path / "dist")
    (archive,), (wheel,) = (tmp_path / "dist").glob("*.tar.gz"), (tmp_path / "dist").glob("*.whl")
    tracked = set(run("git", "ls-files", "--cached", "--others", "--exclude-standard").splitlines())
    with tarfile.open(archive) as tar:
        names = {name.partition("/")[2] for name in tar.getnames()}
    assert names - {"PKG-INFO"} == tracked
    with zipfile.ZipFile(wheel) as file:
        own = {f"src/{name}" for name in file.namelist() if ".dist-info/" not in name}
    assert own == {name for name in tracked if name.startswith("src/transformer_xl/")}

    run(sys.executable, "-m", "venv", tmp_path / "clean")
    bin_, home = tmp_path / "clean" / "bin", tmp_path / "home"
    install = (bin_ / "python", "-m", "pip", "--quiet", "install", "--no-compile", "-c", ROOT / "constraints.txt")
    run(*install, wheel)
    home.mkdir()
    clean = {"PATH": f"{bin_}:{os.defpath}", "PYTHONPATH": "", "HOME": str(home), "TXL_CACHE": str(home / "cache")}
    clean |= {"MINUTES": "1"}
    assert run("txl", "--version", cwd=home, **clean).strip() == txl.__version__
    recipes = sorted(path.stem for path in (ROOT / "src" / "transformer_xl" / "recipes").glob("*.toml"))
    listed = run("txl", "recipes", "--json", cwd=home, **clean).splitlines()
    assert sorted(json.loads(line)["name"] for line in listed) == recipes
    steps = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    (training,) = re.findall(r"^RUN (txl train .*)$", steps, re.MULTILINE)
    run("sh", "-c", f"{training} --set {' --set '.join(SMALL)}", cwd=home, **clean)
    assert len(run("txl", "generate", "runs/quickstart", "--tokens", "8", "--seed", "1", cwd=home, **clean)) > 1

    run(*install, f"{wheel}[serve]")
    command, check = (json.loads(re.findall(rf"^{what} (\[.*\])$", steps, re.MULTILINE)[0]) for what in ("CMD", ".*CMD"))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        clean |= {"PORT": str(free.getsockname()[1]), "TXL_API_KEY": KEY}
    with subprocess.Popen(command, cwd=home, env={**os.environ, **clean}) as server:
        try:
            until = time.monotonic() + 60
            while subprocess.run(check, cwd=home, env={**os.environ, **clean}, capture_output=True).returncode:
                assert server.poll() is None and time.monotonic() < until, "it does not become ready"
                time.sleep(0.2)
            with urllib.request.urlopen(f"http://localhost:{clean['PORT']}/") as page:
                assert b"<html" in page.read()
        finally:
            server.terminate()
    assert server.returncode == 0


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(1800)
def test_every_extra_can_be_installed(tmp_path: Path) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    run(sys.executable, "-m", "venv", tmp_path / "clean")
    python = tmp_path / "clean" / "bin" / "python"
    for extra in ["", *sorted(extras)]:
        what = f".[{extra}]" if extra else "."
        run(python, "-m", "pip", "--quiet", "install", "--no-compile", "-c", "constraints.txt", "-e", what)
        run(python, "-m", "pip", "check")
