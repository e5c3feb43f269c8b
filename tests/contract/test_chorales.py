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


def write(path: Path, pitches: list[int], *, velocity: int = 79, program: int = 0, tempo: float | None = None) -> None:
    score, track = symusic.Score(480), symusic.Track("one", program, is_drum=False)
    for i, pitch in enumerate(pitches):
        track.notes.append(symusic.Note(480 * i, 480, pitch, velocity))
    score.tracks.append(track)
    if tempo:
        score.tempos.append(symusic.Tempo(0, qpm=tempo))
    score.dump_midi(path)


def test_pieces_become_ids_and_come_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, own in {"a": [60, 62, 64], "b": [72, 71, 69, 60], "c": []}.items():
        write(tmp_path / f"{name}.mid", own)
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


def test_a_prompt_gets_the_nearest_velocity_and_tempo_that_the_corpus_has(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without them, its ids would be ones that the model has never seen."""
    corpus, out = tmp_path / "pieces.npz", tmp_path / "mine.npy"
    (tmp_path / "corpus").mkdir()
    for name, velocity, tempo in (("a", 79, 120.0), ("b", 95, 200.0)):
        write(tmp_path / "corpus" / f"{name}.mid", [60, 62, 64], velocity=velocity, tempo=tempo)
    EXAMPLE["encode"](str(tmp_path / "corpus"), str(corpus))
    slow, *_ = np.load(corpus).values()
    write(tmp_path / "mine.mid", [62, 60, 64], velocity=30, tempo=77.0)
    EXAMPLE["prompt"](str(tmp_path / "mine.mid"), str(corpus), str(out))
    said = capsys.readouterr().err.splitlines()
    assert [line.partition(" is not in ")[0].partition("_")[0] for line in said] == ["Tempo", "Velocity"]
    assert sorted(np.load(out)) == sorted(slow)
    for name, token in (("violin", "Program_40"), ("high", "Pitch_61")):
        write(tmp_path / f"{name}.mid", [61 if name == "high" else 60], program=40 if name == "violin" else 0)
        with pytest.raises(SystemExit, match=f"error: '.*{name}.mid' has {token}, and '.*pieces.npz' has none; leave it out"):
            EXAMPLE["prompt"](str(tmp_path / f"{name}.mid"), str(corpus), str(out))
    with pytest.raises(SystemExit, match="is no MIDI file that can be read"):
        EXAMPLE["prompt"](str(corpus), str(corpus), str(out))
