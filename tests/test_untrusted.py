"""Files of unknown origin: regular ones, and JSON that holds numbers."""

import json
import os
from pathlib import Path

import pytest

from transformer_xl.errors import CheckpointError
from transformer_xl.untrusted import open_regular, parse_json, read_json, read_json_object


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"n_layer": NaN}', "is not valid JSON: NaN is not a number; restore"),
        ('{"n_layer": ' + "9" * 5000 + "}", "is not valid JSON: Exceeds the limit"),
        ("[1]", "is not a JSON object"),
        ("", "is not valid JSON: Expecting value"),
        ("{}{}", "is not valid JSON: Extra data"),
        ("[" * 100_000, "is not valid JSON: it is nested too deep"),
        ('{"a": "\xff"}'.encode("latin-1"), "is not valid JSON: 'utf-8' codec"),
    ],
    ids=range(7),
)
def test_unsound_settings_are_refused_in_one_line(text: str | bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(CheckpointError, match=message) as error:
        read_json_object(path)
    assert "config.json'" in str(error.value)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 400


def test_sound_json_is_read_as_json_reads_it(tmp_path: Path) -> None:
    values = {"a": [1, 2.5, -0.0, 1e-300, True, None, "é\ud800 [{,:"], "b": {"c": {}}, "d": json.loads("[" * 62 + "]" * 62)}
    (tmp_path / "x.json").write_text(json.dumps(values))
    assert repr(read_json(tmp_path / "x.json")) == repr(values)
    assert parse_json(b"[1, 2]") == [1, 2]


def test_a_pipe_a_device_and_a_directory_are_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero"), tmp_path):
        with pytest.raises(CheckpointError, match=f"'{path}' is not a regular file, but a directory, pipe or device; give"):
            open_regular(path)


def test_a_link_is_followed(tmp_path: Path) -> None:
    """The cache of Hugging Face consists of links."""
    (tmp_path / "blob").write_text("[1]")
    (tmp_path / "x.json").symlink_to("blob")
    file, size = open_regular(tmp_path / "x.json")
    with file:
        assert (file.read(), size) == (b"[1]", 3)
