"""What is shown of a group."""

from pathlib import Path

from transformer_xl.analysis.recl.measure import EffectiveLength, Recl
from transformer_xl.analysis.recl.report import draw_recl, misleading_lengths, recl_table

FOUND = Recl(
    lengths={
        "better": {0.1: EffectiveLength(40, at_least=True), 1.0: EffectiveLength(20, at_least=False)},
        "noisy": {0.1: EffectiveLength(25, at_least=False), 1.0: EffectiveLength(20, at_least=False)},
        "short": {0.1: EffectiveLength(20, at_least=False), 1.0: EffectiveLength(20, at_least=False)},
    },
    gains={
        "better": {0.1: {40: 0.2}, 1.0: {40: 0.001}},
        "noisy": {0.1: {40: 0.1}, 1.0: {40: 0.0}},
        "short": {0.1: {40: 0.0}, 1.0: {40: 0.0}},
    },
    losses={"better": {20: 2.0, 40: 1.5}, "noisy": {20: 2.0, 40: 2.25}, "short": {20: 2.0, 40: 3.0}},
)


def test_table() -> None:
    lines = recl_table(FOUND, {"better": 1000, "noisy": 7, "short": 12345}, title="group 1").splitlines()
    assert lines == [
        "group 1  parameters  r = 0.1  r = 1",
        "better        1,000     ≥ 40     20",
        "noisy             7       25     20",
        "short        12,345       20     20",
    ]


def test_gains_beside_losses_are_named() -> None:
    """Of a length of 25, which the step to 40 led to; `short` is as short as the first context, so nothing is wrong with it."""
    (line,) = misleading_lengths(FOUND)
    assert line.startswith("noisy has a mean loss of 2.0000 nats after 20 tokens and of 2.2500 after 25: what it gains ")


def test_picture_of_thresholds_alone(tmp_path: Path) -> None:
    """Where nothing else is drawn, matplotlib would set limits that are equal, and warn, which is an error here."""
    short = EffectiveLength(20, at_least=False)
    alone = Recl(lengths={"own": {1.0: short}}, gains={"own": {1.0: {}}}, losses={"own": {20: 1.0}})
    draw_recl(tmp_path / "recl.svg", [alone, alone], threshold=1e-4, title="a title")
    assert "<!-- own: 20 -->" in (tmp_path / "recl.svg").read_text()


def test_picture(tmp_path: Path) -> None:
    picture = tmp_path / "recl.svg"
    draw_recl(picture, [FOUND, FOUND], threshold=0.01, title="a title")
    text = picture.read_text()
    for label in (
        "<!-- group 2, r = 0.1 -->",
        "<!-- better: ≥ 40 -->",
        "<!-- noisy: 25 -->",
        "<!-- a title -->",
        "<!-- 1.0% -->",
    ):
        assert label in text, label
