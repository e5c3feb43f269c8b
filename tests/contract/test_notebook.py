"""The notebook runs, is the same in both languages, and teaches with the public names alone."""

import json
import re
import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
BOTH = ("notebook.py", "notebook.zh.py")


def cells(name: str) -> list[tuple[str, str]]:
    """Return kind ("markdown" or "code") and content of each cell of a percent script."""
    _, *parts = re.split(r"^# %%(.*)$", (EXAMPLES / name).read_text(encoding="utf-8"), flags=re.MULTILINE)
    pairs = zip(parts[::2], parts[1::2], strict=True)
    return [("markdown" if "[markdown]" in head else "code", content.strip()) for head, content in pairs]


def test_both_languages_have_the_same_code_in_the_same_places() -> None:
    english, chinese = map(cells, BOTH)
    assert [kind for kind, _ in english] == [kind for kind, _ in chinese]
    for (kind, ours), (_, theirs) in zip(english, chinese, strict=True):
        assert (ours == theirs) == (kind == "code"), ours[:80]


def test_the_outputs_shown_are_those_of_these_cells() -> None:
    ran = json.loads((EXAMPLES / "notebook.ipynb").read_text(encoding="utf-8"))["cells"]
    assert [(cell["cell_type"], "".join(cell["source"])) for cell in ran] == [
        (kind, re.sub("^# ?", "", content, flags=re.MULTILINE) if kind == "markdown" else content)
        for kind, content in cells("notebook.py")
    ]
    assert not any(output["output_type"] == "error" for cell in ran for output in cell.get("outputs", ()))


def test_only_public_names_are_used() -> None:
    code = "\n".join(content for kind, content in cells("notebook.py") if kind == "code")
    assert re.findall(r"^.*import.*transformer_xl.*$|^.*transformer_xl.*import.*$", code, re.MULTILINE) == [
        "import transformer_xl as txl"
    ]


def test_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    import matplotlib.pyplot as plt

    text = "".join(f"{i} is {i * i}, and a half of that is {i * i / 2}.\n" for i in range(1000))
    (tmp_path / "tinyshakespeare").mkdir()
    (tmp_path / "tinyshakespeare" / "input.txt").write_text(text)
    for name, value in {"TXL_DATA": ".", "TXL_CACHE": "cache", "TXL_STEPS": "3", "MPLBACKEND": "Agg"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    plt.switch_backend("Agg")
    shown: list[int] = []
    monkeypatch.setattr(plt, "show", lambda: shown.extend(plt.get_fignums()) or plt.close("all"))
    found = runpy.run_path(str(EXAMPLES / "notebook.py"))
    assert len(shown) == 6, "each cell shows its own picture"
    said = capsys.readouterr().out
    assert re.search(r"memory is worth -?\d\.\d{4} nats per byte", said)
    assert "the same scores to the last bit: True" in said
    first, _, last = (line.split(" nats")[0] for line in said.splitlines() if line.startswith(("as it is", "backwards")))
    assert first == last
    assert float(said.rsplit("reading again: ", 1)[1]) < 1e-4
    assert found["attention"].sum(-1) == pytest.approx(1, abs=1e-4)
