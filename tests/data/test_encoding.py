import gzip

import pytest

from transformer_xl.data.encoding import encode_file
from transformer_xl.data.tokenizers import ByteTokenizer, CharTokenizer
from transformer_xl.errors import CorpusError


def test_a_compressed_file_is_read_as_its_text(tmp_path) -> None:
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"one\r\ntwo"))
    ids, data = encode_file(tmp_path / "a.txt.gz", ByteTokenizer())
    assert bytes(ids.tolist()) == data == b"one\r\ntwo"


def test_files_that_cannot_be_encoded_are_named(tmp_path) -> None:
    with pytest.raises(CorpusError, match=r"cannot read '.*gone.txt': no such file"):
        encode_file(tmp_path / "gone.txt", ByteTokenizer())
    (tmp_path / "other.txt").write_text("abx")
    with pytest.raises(CorpusError, match=r"other.txt': .*x"):
        encode_file(tmp_path / "other.txt", CharTokenizer("ab"))
