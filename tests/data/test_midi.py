"""Music becomes ids and comes back; what is no music is said in one line."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from transformer_xl.config import DataConfig, RunConfig, TokenizerConfig
from transformer_xl.data import midi
from transformer_xl.data.corpora import choose_tokenizer
from transformer_xl.data.ids import IdTokenizer
from transformer_xl.data.named import SPLITS
from transformer_xl.data.prepare import prepare
from transformer_xl.data.tokenizers import load_tokenizer
from transformer_xl.errors import ConfigError, CorpusError, TokenizerError
from transformer_xl.opening import file_text

EVENTS = ("Bar", "Pitch_60", "Pitch_61")


def write_piece(path: Path, pitches: list[int], *, velocity: int = 79) -> Path:
    """A piece of quarter notes."""
    symusic = pytest.importorskip("symusic", reason="the extra 'midi' is not installed")
    score = symusic.Score(480)
    track = symusic.Track("one", 0, is_drum=False)
    for i, pitch in enumerate(pitches):
        track.notes.append(symusic.Note(480 * i, 480, pitch, velocity))
    score.tracks.append(track)
    score.dump_midi(path)
    return path


def test_without_its_package_music_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "miditok", None)
    midi._remi.cache_clear()
    (tmp_path / "a.mid").write_bytes(b"MThd")
    with pytest.raises(ConfigError, match=r"music needs the package miditok: pip install 'transformer_xl\[midi\]'"):
        prepare(DataConfig(corpus=str(tmp_path)), TokenizerConfig(kind="ids"), cache=tmp_path / "cache", progress=False)


def test_events_have_one_id_each(tmp_path: Path) -> None:
    tokenizer = IdTokenizer(3, events=EVENTS)
    tokenizer.save(tmp_path / "tokenizer.json")
    loaded = load_tokenizer(tmp_path / "tokenizer.json")
    assert isinstance(loaded, IdTokenizer) and loaded.events == EVENTS
    assert loaded.fingerprint != IdTokenizer(3).fingerprint
    with pytest.raises(TokenizerError, match="its events are more or fewer than its ids"):
        IdTokenizer(4, events=EVENTS)


def test_a_directory_of_pieces_is_a_corpus(tmp_path: Path) -> None:
    pytest.importorskip("miditok", reason="the extra 'midi' is not installed")
    midi._remi.cache_clear()
    music = tmp_path / "music"
    music.mkdir()
    pieces = [[60, 62, 64], [65, 67], [72, 71, 69, 60]]
    for i, pitches in enumerate(pieces):
        write_piece(music / f"{i}.mid", pitches)
    config = choose_tokenizer(RunConfig(data=DataConfig(corpus=str(music))), [])
    assert config.tokenizer.kind == "ids"
    corpus = prepare(config.data, config.tokenizer, cache=tmp_path / "cache", progress=False)
    tokenizer: Any = corpus.tokenizer
    assert tokenizer.events == midi.midi_events()
    for name, pitches in zip(SPLITS, pieces, strict=True):
        split = corpus.splits[name]
        assert split.document_starts.tolist() == [0]
        names = [tokenizer.events[index] for index in split.ids[:]]
        assert [event for event in names if event.startswith("Pitch_")] == [f"Pitch_{pitch}" for pitch in pitches]
    text = file_text(music / "2.mid", tokenizer)
    assert text.ids.tolist() == corpus.splits["test"].ids[:].tolist()
    midi.write_midi(tmp_path / "back.mid", text.ids.tolist(), tokenizer.events)
    assert midi.read_midi(tmp_path / "back.mid", tokenizer.events).tolist() == text.ids.tolist()
    # in another order, names mean the same
    turned = tokenizer.events[::-1]
    ids = midi.read_midi(tmp_path / "back.mid", turned)
    assert (len(turned) - 1 - ids).tolist() == text.ids.tolist()
    midi.write_midi(tmp_path / "turned.mid", ids.tolist(), turned)
    assert (tmp_path / "turned.mid").read_bytes() == (tmp_path / "back.mid").read_bytes()


def test_what_is_no_music_is_one_line(tmp_path: Path) -> None:
    pytest.importorskip("miditok", reason="the extra 'midi' is not installed")
    midi._remi.cache_clear()
    path, events = tmp_path / "a.mid", midi.midi_events()
    whole = write_piece(path, [60, 62]).read_bytes()
    with pytest.raises(CorpusError, match=r"a.mid' is music, and the ids of this tokenizer are not events"):
        file_text(path, IdTokenizer(9))
    with pytest.raises(CorpusError, match=r"a.mid' has the event .*, which this tokenizer lacks"):
        midi.read_midi(path, EVENTS)
    for content in (b"", b"no music at all", whole[:40]):
        path.write_bytes(content)
        with pytest.raises(CorpusError, match=r"a.mid' is no MIDI file that can be read \(") as caught:
            midi.read_midi(path, events)
        assert "\n" not in str(caught.value)
    write_piece(path, [])
    with pytest.raises(CorpusError, match=r"a.mid' has no notes; leave it out"):
        midi.read_midi(path, events)
    with pytest.raises(ConfigError, match="this version of MidiTok lacks the event Bar;"):
        midi.write_midi(tmp_path / "b.mid", [0], EVENTS)
    assert not (tmp_path / "b.mid").exists()


def test_anything_that_a_model_may_write_becomes_a_file(tmp_path: Path) -> None:
    pytest.importorskip("miditok", reason="the extra 'midi' is not installed")
    midi._remi.cache_clear()
    events = midi.midi_events()
    for seed in range(5):
        ids = np.random.default_rng(seed).integers(0, len(events), 300).tolist()
        midi.write_midi(tmp_path / "random.mid", ids, events)
        assert (tmp_path / "random.mid").read_bytes().startswith(b"MThd")
