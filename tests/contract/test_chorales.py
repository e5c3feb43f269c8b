"""The example of music: MIDI becomes ids and comes back, and what is no music is left out."""

import runpy
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("miditok", reason="miditok is not installed")
symusic = pytest.importorskip("symusic")

EXAMPLE = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "chorales.py"))


def pitches(path: Path) -> list[int]:
    (track,) = symusic.Score(path).tracks
    return [note.pitch for note in track.notes]


def test_pieces_become_ids_and_come_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, own in {"a": [60, 62, 64], "b": [72, 71, 69, 60], "c": []}.items():
        score, track = symusic.Score(480), symusic.Track("one", 0, is_drum=False)
        for i, pitch in enumerate(own):
            track.notes.append(symusic.Note(480 * i, 480, pitch, 79))
        score.tracks.append(track)
        score.dump_midi(tmp_path / f"{name}.mid")
    (tmp_path / "d.mid").write_bytes(b"no music at all")
    EXAMPLE["encode"](str(tmp_path), str(tmp_path / "pieces.npz"))
    said = capsys.readouterr()
    assert said.out.startswith("2 pieces, ") and said.err.startswith(f"left out: {tmp_path / 'd.mid'} is no MIDI file")
    pieces = np.load(tmp_path / "pieces.npz")
    assert len(pieces) == 2
    for ids, own in zip(pieces.values(), ([60, 62, 64], [72, 71, 69, 60]), strict=True):
        np.save(tmp_path / "piece.npy", ids)
        EXAMPLE["decode"](str(tmp_path / "piece.npy"), str(tmp_path / "back.mid"))
        assert pitches(tmp_path / "back.mid") == own


def test_anything_that_a_model_may_write_becomes_a_file(tmp_path: Path) -> None:
    n_id = len(EXAMPLE["tokenizer"]())
    np.save(tmp_path / "random.npy", np.random.default_rng(0).integers(0, n_id, 300))
    EXAMPLE["decode"](str(tmp_path / "random.npy"), str(tmp_path / "random.mid"))
    assert (tmp_path / "random.mid").read_bytes().startswith(b"MThd")
    np.save(tmp_path / "wrong.npy", np.array([n_id]))
    with pytest.raises(SystemExit, match="is no piece of ids from 0 to"):
        EXAMPLE["decode"](str(tmp_path / "wrong.npy"), str(tmp_path / "wrong.mid"))
