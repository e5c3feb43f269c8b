"""The probabilities of words sum to 1: they are those of tokens and a word's end. Characters and spans have their tokens'."""

import io
import itertools
import math
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers import tiny_model
from tests.tokenizers.cases import TOKENIZERS
from transformer_xl.errors import ConfigError, CorpusError
from transformer_xl.generation.decoder import Decoder
from transformer_xl.model.transformer_xl import TransformerXL
from transformer_xl.reading.evaluation import evaluate
from transformer_xl.reading.reading import Reading
from transformer_xl.reading.rows import Borders, Line, ScoredLine, Span, read_spans, rows, span_rows, word_rows
from transformer_xl.reading.surprisal import alone, carried
from transformer_xl.tokenizers.kinds import CharTokenizer, Tokenizer, WordTokenizer

TEXT = "the cat sat on\nit's the mat, naïve x 東京\nthe end\n"
MEMORY = pytest.mark.parametrize("memory", ["carried", "reset"])
KINDS = pytest.mark.parametrize("kind", ["byte", "bpe", "unigram", "word", "sentences", "characters of the text", "adaptive"])


@cache
def reader_of(kind: str) -> tuple[TransformerXL, Tokenizer]:
    """A model that remembers whole texts, and a tokenizer."""
    tokenizer = CharTokenizer(set(TEXT)) if kind == "characters of the text" else TOKENIZERS.get(kind, TOKENIZERS["bpe"])
    sizes: dict[str, Any] = {"cutoffs": (40, 100), "div_val": 2} if kind == "adaptive" else {}
    return tiny_model(vocab_size=tokenizer.vocab_size, mem_len=200, **sizes), tokenizer


def scored(model: TransformerXL, tokenizer: Tokenizer, text: str, memory: str, **how: Any) -> Iterator[ScoredLine]:
    blocks, path = io.BytesIO(text.encode()), Path("text")
    reading = Reading(tgt_len=8, batch_size=3)
    return (alone if memory == "reset" else carried)(blocks, path, model, tokenizer, reading, **how)


def words(model: TransformerXL, tokenizer: Tokenizer, text: str, memory: str) -> list[dict[str, Any]]:
    borders = Borders(tokenizer)
    return list(word_rows(scored(model, tokenizer, text, memory, borders=borders), borders))


@MEMORY
def test_the_probabilities_of_all_words_sum_to_one(memory: str) -> None:
    """Of all that may follow a word: letters after any space, or a line end. What has no end yet counts with all it becomes."""
    tokenizer, most = CharTokenizer("ab \n"), 4
    model = tiny_model(vocab_size=4, mem_len=200)
    before = "\nba" if memory == "reset" else "ba"
    p_V = Decoder(model).feed([tokenizer.encode(before).tolist()])[0].double().softmax(-1)
    p_border = float(p_V[tokenizer.encode(" \n")].sum())

    def second(text: str) -> dict[str, Any]:
        return words(model, tokenizer, f"ba{text}", memory)[1]

    total = math.exp(-second(" " * most)["nats"])  # space that a word may follow
    for n_space in range(most):
        total += math.exp(-second(" " * n_space + "\n")["nats"])
        for letters in itertools.chain(*(itertools.product("ab", repeat=n) for n in range(1, most - n_space) if n_space)):
            total += math.exp(-second(" " * n_space + "".join(letters))["nats"])
        for letters in itertools.product("ab", repeat=most - n_space) if n_space else ():
            total += math.exp(-second(" " * n_space + "".join(letters))["nats_prefix"]) / p_border
    assert total == pytest.approx(1, abs=1e-5)
    of_the_same = [second(text) for text in (" ab", " ab\n", " ab b")]
    assert [row["nats"] for row in of_the_same] == pytest.approx([of_the_same[0]["nats"]] * 3, abs=1e-5)
    assert second(" aba")["nats_prefix"] > second(" ab")["nats_prefix"] > 0


def expected_words(
    model: TransformerXL, tokenizer: Tokenizer, text: str, before: np.ndarray
) -> Iterator[tuple[str, float, float]]:
    """Yield the words of a text without double spaces, by definition: reading token by token, and spelling the vocabulary."""
    spelled = [tokenizer.piece(i).decode("utf-8", "replace") for i in range(tokenizer.vocab_size)]
    is_all = isinstance(tokenizer, WordTokenizer)
    border = [i for i, piece in enumerate(spelled) if is_all or piece == "" or piece[0].isspace()]
    border = [i for i in border if piece_of_unknown(tokenizer) != i]
    ids, starts, _ = tokenizer.encode_with_offsets(text)
    log_p, decoder = [], Decoder(model)
    for token in [*before.tolist(), *ids.tolist()]:
        log_p.append(decoder.feed([[token]])[0].double().log_softmax(-1).numpy())
    log_p = log_p[len(before) - 1 :] if len(before) else [np.full(tokenizer.vocab_size, np.nan), *log_p]
    nats = [-log_p[i][token] for i, token in enumerate(ids.tolist())]

    def end_at(place: int) -> float:
        is_known = is_all or place == 0 or text[: starts[place] if place < len(ids) else len(text)].rstrip(" ").endswith("\n")
        return 0.0 if is_known else -float(np.logaddexp.reduce(log_p[place][border]))

    for word in re.finditer(r"\n|[^ \n]+", text):
        own = np.flatnonzero((starts >= word.start() - (text[word.start() - 1 : word.start()] == " ")) & (starts < word.end()))
        prefix = float(np.nansum(np.array(nats)[own]))
        yield word.group(), prefix + end_at(own[-1] + 1) - end_at(own[0]), prefix


def piece_of_unknown(tokenizer: Tokenizer) -> int | None:
    return getattr(tokenizer, "_unknown", None)


@MEMORY
@KINDS
def test_words_cost_what_their_tokens_and_their_end_cost(kind: str, memory: str) -> None:
    model, tokenizer = reader_of(kind)
    found = words(model, tokenizer, TEXT, memory)
    before = tokenizer.encode(tokenizer.separator)[-1:]
    texts = TEXT.splitlines(keepends=True) if memory == "reset" else [TEXT]
    expected = [
        word for text in texts for word in expected_words(model, tokenizer, text, before if memory == "reset" else before[:0])
    ]
    assert [row["text"] for row in found] == [text for text, _, _ in expected]
    for row, (text, nats, prefix) in zip(found, expected, strict=True):
        if row["tokens"]:
            assert (row["nats"], row["nats_prefix"]) == pytest.approx((nats, prefix), rel=1e-4, abs=1e-5), text
            assert row["bits"] == pytest.approx(row["nats"] / math.log(2))
        else:
            assert row["nats"] is row["nats_prefix"] is row["bits"] is None and memory == "carried" and row is found[0]


@pytest.mark.parametrize("kind", ["byte", "bpe", "unigram", "word"])
def test_a_text_cut_anywhere_has_the_same_rows(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A word that two parts of a text share, or that ends where one does, is one word."""
    model, tokenizer = reader_of(kind)
    text = TEXT.replace("\n", "  ") + "the"
    whole = words(model, tokenizer, text, "carried")
    monkeypatch.setattr("transformer_xl.reading.surprisal.CHUNK_BYTES", 7)
    parts = words(model, tokenizer, text, "carried")
    if kind == "bpe":  # forms other tokens before a cut
        assert [(row["line"], row["word"]) for row in parts] == [(1, i + 1) for i in range(len(parts))]
        assert [row["text"] for row in parts] == [row["text"] for row in whole]
    else:
        assert parts == whole and len(parts) == len(text.split())


@MEMORY
@pytest.mark.parametrize("kind", ["byte", "word"])
@pytest.mark.parametrize("attention", ["al_rfou", "transformer_xl"])
def test_asking_for_the_end_changes_no_token(attention: str, kind: str, memory: str) -> None:
    """Where positions count from a segment's end, one more token in the last segment would."""
    tokenizer = TOKENIZERS[kind]
    how: dict[str, Any] = {"d_model": 12, "mem_len": 8, "max_klen": 16}
    model = tiny_model(vocab_size=tokenizer.vocab_size, attention=attention, **how)
    text = TEXT + "the cat"
    plain = [line.nats for line in scored(model, tokenizer, text, memory)]
    asked = list(scored(model, tokenizer, text, memory, borders=Borders(tokenizer)))
    nats = np.concatenate(plain)
    np.testing.assert_array_equal(np.concatenate([line.nats for line in asked]), nats)
    going_on = scored(model, tokenizer, text + "x", memory, borders=Borders(tokenizer))
    ends, longer = (np.concatenate([line.ends for line in lines if line.ends is not None]) for lines in (asked, going_on))
    assert ends[-1] == pytest.approx(longer[-2], rel=1e-5)
    assert (ends[-1] > 0) == (kind == "byte")
    per_word = sum(row["nats_prefix"] or 0.0 for row in words(model, tokenizer, text, memory))
    assert per_word == pytest.approx(float(np.nansum(nats, dtype=np.float64)), rel=1e-12)
    if memory == "carried":
        ids = np.concatenate([line.line.ids for line in asked])
        np.testing.assert_array_equal(nats[1:], evaluate(model, ids, tgt_len=8, per_token=True).token_nats)


def test_no_word_of_a_vocabulary_without_spaces() -> None:
    with pytest.raises(ConfigError, match="--per word: no token of this vocabulary begins a word or ends a line; use"):
        Borders(CharTokenizer("ab"))


def test_unknown_pieces_do_not_begin_words() -> None:
    """The library writes them as " ⁇ ", but they stand for characters in words, too."""
    tokenizer = TOKENIZERS["unigram"]
    begins = tokenizer.begins_word()
    for token, piece in enumerate(map(tokenizer.piece, range(tokenizer.vocab_size))):
        assert begins[token] == (piece[:1] in (b" ", b"\n", b"") and b"\xe2\x81\x87" not in piece)
    assert b" \xe2\x81\x87 " in map(tokenizer.piece, range(tokenizer.vocab_size))


@KINDS
def test_characters_have_their_tokens_and_make_up_the_text(kind: str) -> None:
    model, tokenizer = reader_of(kind)
    found = list(rows(scored(model, tokenizer, TEXT, "reset"), "char", tokenizer))
    by_token = list(rows(scored(model, tokenizer, TEXT, "reset"), "token", tokenizer))
    assert sum(row["nats"] for row in found) == pytest.approx(sum(row["nats"] for row in by_token))
    assert sum(row["tokens"] for row in found) == len(by_token)
    assert "".join(row["text"] for row in found) == TEXT
    texts, line = [row["text"] for row in found], TEXT.splitlines()[1]
    if kind in ("byte", "characters of the text"):
        assert texts == list(TEXT)
        assert [row["tokens"] for row in found] == [len(each.encode()) if kind == "byte" else 1 for each in TEXT]
    if kind == "bpe":
        assert "東" in line and {" the", " cat"} <= set(texts)
    numbers = [(row["line"], row["char"]) for row in found]
    assert numbers == [(n, i + 1) for n in (1, 2, 3) for i in range(sum(row["line"] == n for row in found))]


def test_characters_that_share_a_token_have_one_row() -> None:
    """Whether it is whole, or begins or ends inside of one."""
    columns = {"starts": [0, 0, 1, 3, 3, 6], "stops": [1, 2, 3, 3, 5, 7]}
    line = Line(1, "東京都ab cd"[:7], np.arange(6), *map(np.array, columns.values()))
    each = ScoredLine(line, np.array([1, 2, 4, 8, 16, 32], np.float32))
    found = list(rows([each], "char", CharTokenizer("x")))
    assert [(row["text"], row["nats"], row["tokens"]) for row in found] == [("東京都", 7, 3), ("ab", 24, 2), (" c", 32, 1)]


@MEMORY
def test_a_span_has_the_tokens_that_begin_in_it(memory: str, tmp_path: Path) -> None:
    model, tokenizer = reader_of("bpe")
    spans = [(0, len(TEXT)), (3, 7), (4, 7), (4, 9), (14, 16), (30, 31), (len(TEXT) - 1, len(TEXT))]
    (tmp_path / "spans").write_text("".join(f"{start}\t{end}\r\n" for start, end in spans))
    found = list(span_rows(scored(model, tokenizer, TEXT, memory), read_spans(tmp_path / "spans")))
    nats = np.concatenate([each.nats for each in scored(model, tokenizer, TEXT, memory)])
    starts = np.concatenate([tokenizer.encode_with_offsets(TEXT)[1]])
    for i, (row, (start, end)) in enumerate(zip(found, spans, strict=True)):
        own = nats[(starts >= start) & (starts < end)]
        assert (row["span"], row["start"], row["end"], row["text"]) == (i + 1, start, end, TEXT[start:end])
        assert row["tokens"] == (~np.isnan(own)).sum()
        assert row["nats"] == pytest.approx(np.nansum(own), rel=1e-6) if row["tokens"] else row["nats"] is None
    assert found[2]["text"] == "cat" and found[2]["nats"] == found[1]["nats"], "a space before a piece is no token of its own"


@pytest.mark.parametrize(
    ("content", "complaint"),
    {
        "3 x\n": "line 1: '3 x' is no span; write two numbers, start and end, with space between",
        "0 1\n\n": "line 2: '' is no span",
        "-1 2": "line 1: '-1 2' is no span",
        "3 5\n2 4\n": "line 2: 2 4: spans need starts in ascending order; sort the lines",
        "3 3\n": "line 1: 3 3: spans need an end after the start",
    }.items(),
)
def test_what_is_no_span_is_named(content: str, complaint: str, tmp_path: Path) -> None:
    (tmp_path / "spans").write_text(content)
    with pytest.raises(CorpusError, match=re.escape(complaint)):
        list(read_spans(tmp_path / "spans"))


def test_spans_end_with_the_text() -> None:
    line = ScoredLine(Line(1, "abc", *np.array([[0, 1, 2], [0, 1, 2], [1, 2, 3]])), np.ones(3, np.float32))
    assert next(span_rows([line], [Span(1, 1, 3)]))["nats"] == 2
    for span in (Span(1, 1, 4), Span(1, 7, 8)):
        with pytest.raises(CorpusError, match=rf"span 1 \({span.start} to {span.end}\) reaches beyond the text's 3 characters"):
            list(span_rows([line], [span]))
