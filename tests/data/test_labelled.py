import copy
import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.tokenizers.cases import unigram
from transformer_xl.config.model import HeadConfig
from transformer_xl.config.run import TokenizerConfig
from transformer_xl.data.labelled import WINDOW, DocumentStream, LabelledStream, LabelledTexts, WeightedRows
from transformer_xl.data.labels import Example, balanced_weights, document_borders, labels_of
from transformer_xl.data.layout import CHOICE_LEN, Layout, batch_of
from transformer_xl.errors import ConfigError, CorpusError, TokenizerError
from transformer_xl.tokenizers.kinds import ByteTokenizer, CharTokenizer, SentencePieceTokenizer, train_tokenizer

BYTES = Layout(ByteTokenizer(), "transformer_xl")
NAMED = HeadConfig(kind="classification", labels=("bad", "good"))
NUMBER = HeadConfig(kind="regression")
CHOICE = HeadConfig(kind="choice")
SIZES = st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 40), st.integers(0, 5))


@pytest.fixture(scope="module")
def pieces() -> SentencePieceTokenizer:
    config = TokenizerConfig(kind="unigram", vocab_size=60)
    tokenizer = train_tokenizer(config, ["the cat sat on the mat and the dog sat on the cat\n" * 20])
    assert isinstance(tokenizer, SentencePieceTokenizer)
    return tokenizer


def _layout(tokenizer, max_len=None) -> Layout:
    return Layout(tokenizer, "xlnet", max_len=max_len)


def _texts(n: int, *, x: str = "x", label: float = 0.0, pair: str | None = None) -> LabelledTexts:
    """Return examples of which each has its own text and, as label, its own number."""
    examples = [Example(f"{i} " + x * (i * 7 % 11), pair, label=i + label, place=f"line {i}") for i in range(n)]
    return LabelledTexts(examples, BYTES, NUMBER)


def _same(one, other) -> bool:
    return all(torch.equal(a.nan_to_num(-1), b.nan_to_num(-1)) for a, b in zip(one.tensors, other.tensors, strict=True))


def _scored(batch) -> list[float]:
    return batch.labels[~batch.labels.isnan()].tolist()


class TestLayout:
    def test_xlnet_rows_are_those_of_the_original(self, pieces):
        layout = _layout(pieces)
        sep, cls = pieces.id_of("<sep>"), pieces.id_of("<cls>")
        a, b = layout.encode("the cat"), layout.encode("the dog sat")
        (single,) = layout.rows(Example("the cat"))
        assert single.ids.tolist() == [*a, sep, cls]
        assert single.segments.tolist() == [0] * (len(a) + 1) + [2]
        (both,) = layout.rows(Example("the cat", "the dog sat"))
        assert both.ids.tolist() == [*a, sep, *b, sep, cls]
        assert both.segments.tolist() == [0] * (len(a) + 1) + [1] * (len(b) + 1) + [2]

        lines = layout.encode("the cat\nsat\n\n").tolist()
        assert lines == layout.encode("the cat sat").tolist() == pieces.encode("the cat sat").tolist()

    def test_other_models_read_lines(self):
        (row,) = BYTES.rows(Example(" a\nb\n", "c"))
        assert bytes(row.ids.tolist()) == b"a\nb\nc\n"
        assert row.segments.tolist() == [0] * 6
        layout = Layout(CharTokenizer(["a", "b", " "]), "transformer_xl")  # a space in place of line ends
        (row,) = layout.rows(Example("a", "b"))
        assert layout.tokenizer.decode(row.ids) == "a b "
        with pytest.raises(TokenizerError, match=r"^'x.tsv' line 7: "):
            layout.rows(Example("ac", place="'x.tsv' line 7"))

    @given(st.integers(0, 12), st.integers(0, 12), st.integers(5, 20))
    def test_the_longer_text_is_shortened_first(self, n_first, n_second, max_len):
        """The loop is the original's `_truncate_seq_pair`."""
        layout = Layout(ByteTokenizer(), "lstm", max_len=max_len)
        a, b = [*range(n_first)], [*range(100, 100 + n_second)]
        row = layout.row(np.array(a, np.int64), np.array(b, np.int64))
        while len(a) + len(b) > max_len - 2:
            (a if len(a) > len(b) else b).pop()
        assert row.ids.tolist() == [*a, 10, *b, 10]
        assert layout.length(n_first, n_second) == len(row.ids)

    @given(st.integers(0, 300), st.integers(0, 300), st.integers(5, 600))
    def test_a_choice_keeps_its_end(self, n_first, n_second, max_len):
        layout = Layout(ByteTokenizer(), "lstm", max_len=max_len)
        a, b = np.arange(2000, 2000 + n_first), np.arange(1000, 1000 + n_second)
        row = layout.row(a, b, is_choice=True).ids.tolist()
        assert len(row) == layout.length(n_first, n_second, is_choice=True) <= max_len
        cut = row.index(10)
        first, second = row[:cut], row[cut + 1 : -1]
        assert first == a[: len(first)].tolist()
        assert second == b[n_second - len(second) :].tolist()
        if n_first + n_second + 2 > max_len:
            assert len(second) == min(n_second, CHOICE_LEN, (max_len - 2) // 2)
            assert len(first) == min(n_first, max_len - 2 - len(second))
        else:
            assert (len(first), len(second)) == (n_first, n_second)

    def test_vocabularies_that_do_not_fit_are_refused(self, pieces):
        with pytest.raises(ConfigError, match="reads texts with <sep> and <cls>, which a vocabulary of kind 'byte' lacks"):
            _layout(ByteTokenizer())
        bare = unigram(["<unk>", "▁the"], [0, -1.0])
        with pytest.raises(ConfigError, match="reads texts with <sep> and <cls>: piece '<sep>' is not in the vocabulary"):
            _layout(bare)
        with pytest.raises(ConfigError, match=r"task.max_len \(4\) must be at least 5"):
            _layout(pieces, max_len=4)


class TestBatchOf:
    def test_padding_is_at_the_left(self, pieces):
        layout = _layout(pieces)
        rows = [layout.rows(Example(text)) for text in ("the", "the cat sat on the mat")]
        batch = batch_of(rows, torch.tensor([0, 1]))
        assert batch.n_pad.tolist() == [len(rows[1][0].ids) - len(rows[0][0].ids), 0]
        for i, (row,) in enumerate(rows):
            begin = int(batch.n_pad[i])
            assert batch.ids[i, begin:].tolist() == row.ids.tolist()
            assert batch.texts.segments[i, begin:].tolist() == row.segments.tolist()
            assert batch.texts.may_answer[i].tolist() == [False] * begin + [True] * len(row.ids)
        assert batch.ids.dtype == batch.n_pad.dtype == batch.texts.segments.dtype == torch.int64


class TestLabelledTexts:
    def test_rows_are_those_of_the_layout(self, pieces):
        examples = [
            Example(f"the cat {'sat ' * i}", choices=(f"the dog {'on ' * j}", "mat"), label=j % 2)
            for i in range(4)
            for j in range(4)
        ]
        layout = _layout(pieces, max_len=13)
        texts = LabelledTexts(examples, layout, CHOICE)
        for i, example in enumerate(examples):
            rows = layout.rows(example)
            length = max(len(row.ids) for row in rows)
            assert texts.lengths[i] == length
            batch = texts.batch(np.array([i]), np.array([True]), length)
            assert batch.ids.shape == batch.texts.segments.shape == batch.texts.may_answer.shape == (1, 2, length)
            for j, row in enumerate(rows):
                n_pad = int(batch.n_pad[0, j])
                assert batch.ids[0, j, n_pad:].tolist() == row.ids.tolist()
                assert batch.texts.segments[0, j, n_pad:].tolist() == row.segments.tolist()
            assert batch.labels.tolist() == [example.label]
        assert len(np.unique(texts._parts[:, 0])) == 4  # a passage is held once

    def test_what_does_not_fit_together_is_refused(self):
        with pytest.raises(CorpusError, match="no texts to learn from"):
            LabelledTexts([], BYTES, NUMBER)
        with pytest.raises(ConfigError, match="line 2: 1 text, but 2 in line 1"):
            LabelledTexts(
                [Example("a", "b", label=1.0, place="line 1"), Example("a", label=1.0, place="line 2")], BYTES, NUMBER
            )


class TestWeightedRows:
    def test_each_row_has_the_weight_of_its_class(self):
        examples = [Example("a" * (i % 5 + 1), label=("bad", "good")[i % 4 == 0]) for i in range(11)]  # 3 good, 8 bad
        texts = LabelledTexts(examples, BYTES, NAMED)
        rows = WeightedRows(texts, balanced_weights(labels_of(NAMED, examples), 2))
        assert rows.checksum == texts.checksum
        count = 0.0
        for batch in itertools.islice(LabelledStream(rows, batch_size=4, seed=0), 3):
            assert batch.texts.weights is not None
            for label, weight in zip(batch.labels.tolist(), batch.texts.weights.tolist(), strict=True):
                assert label == -100 or weight == pytest.approx((11 / 16, 11 / 6)[label])
                count += 0 if label == -100 else weight
        assert count == pytest.approx(11)

    def test_weights_are_those_of_scikit_learn(self):
        """`compute_class_weight("balanced")` of version 1.9, where all classes occur."""
        labels = torch.tensor([[2, 0, 0, 1], [0, 0, -100, -100]])
        assert balanced_weights(labels, 3).tolist() == pytest.approx([0.5, 2.0, 2.0])
        assert balanced_weights(labels, 4).tolist() == pytest.approx([0.5, 2.0, 2.0, 0.0])


class TestLabelledStream:
    @given(SIZES, st.integers(0, 3))
    def test_every_example_comes_once_in_an_epoch_whatever_the_number_of_processes(self, sizes, seed):
        n_row, world_size, n_example, _ = sizes
        texts, batch_size = _texts(n_example), n_row * world_size
        whole = LabelledStream(texts, batch_size=batch_size, seed=seed)
        ranks = [
            LabelledStream(texts, batch_size=batch_size, seed=seed, rank=r, world_size=world_size) for r in range(world_size)
        ]
        for epoch in range(2):
            seen = []
            for position in range(whole.segments_per_epoch):
                assert (whole.epoch, whole.position, whole.starts_epoch) == (epoch, position, position == 0)
                batch = next(whole)
                parts = [next(rank) for rank in ranks]
                joined = map(torch.cat, zip(*(part.tensors for part in parts), strict=True))
                assert _same(batch.map(lambda _, joined=joined: next(joined)), batch)
                assert len(batch.ids) == batch_size
                assert int(batch.n_pad.min()) == 0
                for row, n_pad, label in zip(batch.ids, batch.n_pad, batch.labels, strict=True):
                    if not label.isnan():
                        assert bytes(row[n_pad:].tolist()).split()[0] == str(int(label)).encode()
                seen += _scored(batch)
            assert sorted(seen) == list(range(n_example))

    @given(st.lists(st.integers(1, 5), min_size=1, max_size=12), st.integers(0, 90), st.integers(0, 5), st.booleans())
    def test_resuming_continues_exactly(self, sizes, steps, more, in_documents):
        def make() -> LabelledStream:
            return _documents(sizes, seed=1) if in_documents else LabelledStream(_texts(sum(sizes)), batch_size=3, seed=1)

        stream, resumed = make(), make()
        for _ in range(steps):
            next(stream)
        resumed.load_state_dict(copy.deepcopy(stream.state_dict()))
        for _ in range(more):
            assert _same(next(resumed), next(stream))
        assert (resumed.state_dict(), resumed.epochs) == (stream.state_dict(), stream.epochs)

    @pytest.mark.parametrize(
        ("other", "name"),
        [
            (lambda: LabelledStream(_texts(8), batch_size=2, seed=1), "n_examples"),
            (lambda: LabelledStream(_texts(9), batch_size=3, seed=1), "batch_size"),
            (lambda: LabelledStream(_texts(9), batch_size=2, seed=2), "seed"),
            (lambda: LabelledStream(_texts(9, x="y"), batch_size=2, seed=1), "checksum"),
            (lambda: LabelledStream(_texts(9, label=1.0), batch_size=2, seed=1), "checksum"),
            (lambda: LabelledStream(_texts(9, pair=""), batch_size=2, seed=1), "checksum"),
        ],
    )
    def test_another_text_or_layout_cannot_be_resumed(self, other, name):
        state = LabelledStream(_texts(9), batch_size=2, seed=1).state_dict()
        with pytest.raises(ConfigError, match=f"belongs to {name}"):
            other().load_state_dict(state)
        with pytest.raises(ConfigError, match="belongs to documents"):
            _documents([2, 2]).load_state_dict(_documents([3, 1]).state_dict())

    def test_examples_of_like_length_share_a_batch(self):
        rng = np.random.default_rng(0)
        n = 8 * WINDOW * 2 + 5
        examples = [Example("x" * int(size), label=0.0) for size in rng.integers(1, 200, n)]
        texts = LabelledTexts(examples, BYTES, NUMBER)
        batches = [next(stream) for stream in [LabelledStream(texts, batch_size=8, seed=0)] for _ in range(2 * WINDOW)]
        padding = sum(int(batch.n_pad.sum()) for batch in batches) / sum(batch.ids.numel() for batch in batches)
        assert padding < 0.02  # in order of drawing it is 0.44
        lengths = [batch.ids.shape[1] for batch in batches]
        assert lengths[:WINDOW] != sorted(lengths[:WINDOW])
        assert abs(np.corrcoef(lengths, range(2 * WINDOW))[0, 1]) < 0.3


def _documents(sizes: list[int], *, batch_size: int = 2, seed: int = 0, **lanes: int) -> DocumentStream:
    """Return documents of so many rows, of which each has its own text and, as label, its own number."""
    names = [name for name, n in enumerate(sizes) for _ in range(n)]
    examples = [Example(f"{i} " + "x" * (i * 7 % 11), label=float(i), document=str(name)) for i, name in enumerate(names)]
    texts = LabelledTexts(examples, BYTES, NUMBER)
    return DocumentStream(texts, document_borders(examples), batch_size=batch_size, seed=seed, **lanes)


class TestDocumentStream:
    @given(st.lists(st.integers(1, 5), min_size=1, max_size=12), st.integers(1, 3), st.integers(1, 3), st.integers(0, 3))
    def test_each_lane_reads_documents_row_by_row_and_all_of_them_once(self, sizes, n_row, world_size, seed):
        how = {"batch_size": n_row * world_size, "seed": seed}
        whole = _documents(sizes, **how)
        ranks = [_documents(sizes, rank=rank, world_size=world_size, **how) for rank in range(world_size)]
        firsts = np.cumsum([0, *sizes])
        for epoch in range(3):
            seen, last = [], [None] * (n_row * world_size)  # of each lane
            for position in range(whole.segments_per_epoch):
                assert (whole.epoch, whole.position, whole.starts_epoch) == (epoch, position, position == 0)
                batch = next(whole)
                joined = map(torch.cat, zip(*(next(rank).tensors for rank in ranks), strict=True))
                assert _same(batch.map(lambda _, joined=joined: next(joined)), batch)
                seen += _scored(batch)
                begins, n_pad = batch.rows.document_starts, batch.n_pad.tolist()
                assert begins is not None
                for lane, label in enumerate(batch.labels.tolist()):
                    if not math.isnan(label):
                        assert begins[lane].nonzero().flatten().tolist() == ([n_pad[lane]] if label in firsts else [])
                        assert label in firsts or last[lane] == label - 1
                    last[lane] = label
            assert sorted(seen) == list(range(sum(sizes)))

    def test_epochs_have_other_orders_and_as_many_steps_as_they_need(self):
        stream = _documents([1, 2, 3, 4, 9, 9], batch_size=3)
        orders, n_steps = set(), set()
        for epoch in range(9):
            n_steps.add(stream.segments_per_epoch)
            orders.add(tuple(label for _ in range(stream.segments_per_epoch) for label in _scored(next(stream))))
            assert stream.epochs == epoch + 1
        assert len(orders) == 9 and len(n_steps) > 1
        plain = [LabelledStream(_texts(40), batch_size=4, seed=seed) for seed in (0, 1)]
        assert len({tuple(label for _ in range(10) for label in _scored(next(stream))) for stream in plain for _ in "ab"}) == 4
