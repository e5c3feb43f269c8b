"""Commands that read tokens show a bar on a terminal, and end as they do elsewhere."""

import pytest

from tests.cli.conftest import Txl


@pytest.mark.parametrize(
    "command",
    [
        "eval run --json",
        "explain run text.txt --out explained --most 50",
        "plot run --against memory --lengths 0,8",
    ],
)
@pytest.mark.usefixtures("nothing_drawn")
def test_a_bar_is_shown(txl: Txl, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # which rich takes for a terminal
    monkeypatch.setattr("transformer_xl.console.DRAW_SECONDS", 0)
    answer = txl(*command.split())
    assert answer.status == 0
    assert "%" in answer.err and "\x1b[" in answer.err
    if command.startswith("explain"):
        parts = answer.err.split("attributing", maxsplit=1)
        assert "100%" in parts[0] and "left" in parts[1], "each of both tasks is counted from 0 on"
