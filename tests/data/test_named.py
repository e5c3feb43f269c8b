from transformer_xl.data.corpora import corpus_names
from transformer_xl.data.named import NAMED, SPLITS


def test_table_is_complete() -> None:
    assert set(corpus_names()) == {*NAMED, "python-stdlib"}
    for corpus in NAMED.values():
        assert set(corpus.splits) == set(SPLITS)
        assert corpus.sources or corpus.how_to_get
        for source in corpus.sources:
            assert len(source.sha256) == 64
            assert bool(source.members) != bool(source.file)
            assert bool(source.members) == bool(source.unpacked_limit)
