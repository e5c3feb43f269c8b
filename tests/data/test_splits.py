from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transformer_xl.data import splits as splits_module
from transformer_xl.data.named import SPLITS
from transformer_xl.data.splits import is_cut_inside, splits_by_ratio
from transformer_xl.data.text_files import EVERY_LINE


@given(
    st.lists(st.integers(1, 50), min_size=1, max_size=30), st.sampled_from([(0.9, 0.05, 0.05), (0.5, 0.5, 0), (0.8, 0, 0.2)])
)
def test_ratio_covers_every_byte_once_in_order(sizes: list[int], shares) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(splits_module, "content_size", lambda path: sizes[int(path.name)])
        patch.setattr(splits_module, "code_point_border", lambda path, position: position)
        splits = splits_by_ratio([Path(str(i)) for i in range(len(sizes))], shares, None)
    pieces = [(int(p.path.name), p.start, p.stop or sizes[int(p.path.name)]) for split in SPLITS for p in splits[split]]
    assert [(file, i) for file, start, stop in pieces for i in range(start, stop)] == [
        (file, i) for file, size in enumerate(sizes) for i in range(size)
    ]
    assert all(not splits[split] for split, share in zip(SPLITS, shares, strict=True) if not share)
    if len(sizes) >= 3:
        assert all(splits[split] for split, share in zip(SPLITS, shares, strict=True) if share)


def test_a_line_that_is_most_of_a_text_is_cut(tmp_path) -> None:
    """The next line begins only at the end, but no split takes everything."""
    path = tmp_path / "text.txt"
    path.write_text("a" * 99 + "\n")
    pieces = [splits_by_ratio([path], (0.8, 0.1, 0.1), EVERY_LINE)[name] for name in SPLITS]
    assert [(piece.start, piece.stop) for (piece,) in pieces] == [(0, 80), (80, 90), (90, None)]


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([100] * 20, [18 * 100, 100, 100]),
        ([100] * 10, [800, 100, 100]),  # twice as much as asked for
        ([100] * 3, [270, 15, 15]),
        ([1000, 1, 1], [902, 50, 50]),
        ([1, 1, 1000], [902, 50, 50]),
        ([900, 50, 50], [900, 50, 50]),
    ],
)
def test_shares_are_kept_however_few_files_there_are(tmp_path: Path, sizes: list[int], expected: list[int]) -> None:
    files = [tmp_path / f"{i:02d}" for i in range(len(sizes))]
    for file, size in zip(files, sizes, strict=True):
        file.write_text("x" * size)
    splits = splits_by_ratio(files, (0.9, 0.05, 0.05), None)
    found = [sum((piece.stop or piece.path.stat().st_size) - piece.start for piece in splits[name]) for name in SPLITS]
    assert found == pytest.approx(expected, abs=1)
    assert is_cut_inside(splits) == (sizes not in ([100] * 20, [100] * 10, [900, 50, 50]))
