"""Nats of tokens are written as a table or an array."""

from pathlib import Path

import numpy as np
import pytest

from transformer_xl.data.tokenizers import ByteTokenizer
from transformer_xl.errors import CheckpointError
from transformer_xl.reading.token_nats import write_token_nats

IDS, NATS = np.array([*b"xa\n"], np.uint8), np.array([0.5, 2.25], np.float32)


def test_a_table_names_each_predicted_token(tmp_path: Path) -> None:
    write_token_nats(tmp_path / "nats.tsv", IDS, NATS, ByteTokenizer())
    assert (tmp_path / "nats.tsv").read_text() == 'position\tid\tnats\ttoken\n1\t97\t0.500000\t"a"\n2\t10\t2.250000\t"\\n"\n'


def test_an_array_has_nothing_but_nats(tmp_path: Path) -> None:
    write_token_nats(tmp_path / "nats.npy", IDS, NATS, ByteTokenizer())
    np.testing.assert_array_equal(np.load(tmp_path / "nats.npy", allow_pickle=False), NATS)


def test_a_place_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"^cannot write '.*': Is a directory; free disk space or choose another"):
        write_token_nats(tmp_path, IDS, NATS, ByteTokenizer())
