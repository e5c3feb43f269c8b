"""Pieces of words that a model of SentencePiece makes, such as XLNet's `spiece.model`, and learning such a model.

The library learns pieces, cuts text and says where the pieces are. Ours is what XLNet does before and after it, and decoding
id by id.

Reference: Kudo 2018, "Subword Regularization", section 3.2; Kudo and Richardson 2018, "SentencePiece"; zihangdai/xlnet
`prepro_utils.py`, `preprocess_text` and `encode_pieces`.
"""

import re
import unicodedata
from base64 import b64decode, b64encode
from collections.abc import Iterable, Iterator
from io import BytesIO
from pathlib import Path
from typing import Any, Literal

import numpy as np

from transformer_xl.config.run import TokenizerConfig
from transformer_xl.errors import TokenizerError, did_you_mean, one_line, shown
from transformer_xl.tokenizers.base import (
    LEARNING_BYTES,
    PieceDecoder,
    PieceTokenizer,
    StreamDecoder,
    Tokenizer,
    first_bytes,
    join_as_sentence,
    learned_size,
    require,
)
from transformer_xl.untrusted import is_unicode

SPACE = "\u2581"
"""What stands for a space inside of pieces."""

CONTROL = ("<unk>", "<s>", "</s>", "<cls>", "<sep>", "<pad>", "<mask>", "<eod>")
LINE_END = "<eop>"
USER_DEFINED = (LINE_END, ".", "(", ")", '"', "-", "–", "£", "€")
"""XLNet's special pieces: these are the ids from 0 on, unknown text first, then control pieces."""

_COVERAGE = 0.99995  # of the text by characters that get a piece, as XLNet's
_LINE = re.compile(r".{1,1000}(?: |$)|.{1000}")  # at most 4,000 bytes: of more than 4,192, the library skips a line
_RESERVED = "\u2585"  # a line with it is skipped, too
_UNKNOWN = "<unk>"  # is cut out of a text, so its characters would become unknown

_QUOTES = re.compile("``|''")
_PARTS = re.compile(r"``|''|\s+|\S")
_ASCII_STARTS = frozenset('!"#$%&()*+,-./:;?@[\\]^_`{|}~')  # ' = > are not among them in XLNet's own code
_SPACES = re.compile(r"\s")
_PLACE_IN_LIBRARY = re.compile(r"^[A-Z_]+: (src/\S+ \[.*\] ?)?")


class SentencePieceTokenizer(PieceTokenizer):
    """Cuts lines into the pieces of a model of SentencePiece, of whatever type: unigram, BPE, characters or words.

    Args:
        model: content of the model's file, in base 64.
        normalization: what is changed before all else. "spaces": all white space is space. "xlnet": the same, once between
            words, two backticks or apostrophes become a quotation mark, and characters are taken apart and lose their accents;
            and afterwards, a piece that ends in a comma after a digit is cut again without the comma. "none": nothing.
        lower_case: fold case; needs "xlnet".
        keep_accents: leave characters as they are; needs "xlnet".
        line_end: the piece for a line end; None: line ends have no id.
    """

    kind = "unigram"

    def __init__(
        self,
        model: str,
        *,
        normalization: Literal["none", "spaces", "xlnet"] = "none",
        lower_case: bool = False,
        keep_accents: bool = False,
        line_end: str | None = None,
    ) -> None:
        known = ("none", "spaces", "xlnet")
        require(normalization in known, f"normalization ({shown(normalization)}) is not one of {', '.join(known)}")
        require(normalization == "xlnet" or not (lower_case or keep_accents), "lower_case and keep_accents need 'xlnet'")
        self.model, self.normalization, self.line_end = model, normalization, line_end
        self.lower_case, self.keep_accents = lower_case, keep_accents
        self._library, self.pieces = _loaded(model)
        self._ids = {piece: token_id for token_id, piece in enumerate(self.pieces)}
        self._unknown: int = self._library.unk_id()
        require(line_end is None or line_end in self.pieces, f"line_end ({shown(line_end)}) is not one of its pieces")
        require(line_end is None or self._ids[line_end] != self._unknown, "line_end stands for unknown text")
        self._line_end = np.array([] if line_end is None else [self._ids[line_end]], np.int64)
        # XLNet looks up the ids of pieces that it has, which are others only for these
        self._by_name = np.array(
            [token_id == self._unknown or _ends_in_digit_comma(piece) for token_id, piece in enumerate(self.pieces)]
        )
        self._by_name &= normalization == "xlnet"
        spaced = self._library.normalize("a  b")
        is_mark = " " not in spaced and not spaced.endswith(SPACE)
        require(is_mark, "it writes spaces after words, or as spaces; only models with a mark before words are read")
        self.drops_first_space = spaced.startswith(SPACE) or 2 * SPACE not in spaced
        self.drops_first_spaces = 2 * SPACE not in spaced
        super().__init__(list(map(self._text_of, range(len(self.pieces)))))

    @property
    def unknown_id(self) -> int | None:
        return self._unknown

    def _text_of(self, token_id: int) -> bytes:
        piece = self.pieces[token_id]
        if piece == self.line_end:
            return b"\n"
        if token_id == self._unknown:
            return self._library.decode([token_id]).encode()
        if self._library.is_byte(token_id):
            return bytes([int(piece[3:5], 16)])
        return b"" if self._library.is_control(token_id) else piece.replace(SPACE, " ").encode()

    @property
    def loses(self) -> str:
        has_bytes = self._library.is_byte(self._library.piece_to_id("<0x00>"))
        lost = [] if has_bytes else [f"characters outside the vocabulary (they become {self.pieces[self._unknown]})"]
        lost += ["line ends"] if self.line_end is None else []
        loses_space = self.drops_first_spaces or self.normalization != "none"
        lost += ["the amount and kind of space between words"] if loses_space else []
        if self.normalization == "xlnet":
            lost += [] if self.keep_accents else ["accents and other forms of the same characters"]
            lost += ["case"] if self.lower_case else []
        lost += ["characters that the model changes"] if self.normalization == "none" else []
        return f"{join_as_sentence(lost)}." if lost else ""

    def id_of(self, piece: str) -> int:
        """Return the id of a piece, such as `<sep>`.

        Raises:
            TokenizerError: there is no such piece.
        """
        if piece not in self._ids:
            special = [control for token_id, control in enumerate(self.pieces) if self._library.is_control(token_id)]
            raise TokenizerError(f"piece {shown(piece)} is not in the vocabulary; {did_you_mean(piece, special)}")
        return self._ids[piece]

    def starts_word(self) -> np.ndarray:
        """Return for each id whether its piece begins a word, as XLNet's spans of targets do, shape (vocab_size,), bool.

        Those are pieces that begin with U+2581 or "<", and single ASCII punctuation except `'`, `=` and `>`.
        Reference: zihangdai/xlnet `data_utils.py`, `_is_start_piece`.
        """
        return np.array([piece.startswith((SPACE, "<")) or piece in _ASCII_STARTS for piece in self.pieces])

    def begins_word(self) -> np.ndarray:
        begins = super().begins_word()
        begins[self._unknown] = False  # the library writes spaces around what stands for characters anywhere
        return begins

    def encode(self, text: str) -> np.ndarray:
        lines: list[np.ndarray] = []
        for line in map(self._changed, lines_of(text)):
            ids = self._library.encode(line, return_type="numpy")  # a list of lines would start threads each time
            if self._by_name[ids].any():
                pieces = self._library_says(line, str)
                ids = [token_id for piece in pieces for token_id, _ in self._parts(piece)]
            lines += [self._line_end, np.asarray(ids, np.int64)]
        return np.concatenate(lines[1:])

    def encode_with_offsets(self, text: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        rows: list[tuple[int, int, int]] = []
        offset = 0
        for line in lines_of(text):
            if offset:
                rows += [(token_id, offset - 1, offset) for token_id in self._line_end.tolist()]
            changed, begins, stops = self._aligned(line)
            places = [*begins.tolist(), len(line)]
            for token_id, start, end in self._spans(changed):
                # up to where the next one begins: dropped characters belong to the piece beside them
                stop = int(stops[end - 1]) if end > start else places[start]
                rows.append((token_id, offset + places[start], offset + stop))
            offset += len(line) + 1
        ids, starts, ends = np.array(rows, np.int64).reshape(-1, 3).T
        return ids, starts, ends

    def _changed(self, line: str) -> str:
        if self.normalization == "xlnet":
            return xlnet_text(line, lower_case=self.lower_case, keep_accents=self.keep_accents)
        return _SPACES.sub(" ", line) if self.normalization == "spaces" else line

    def _aligned(self, line: str) -> tuple[str, np.ndarray, np.ndarray]:
        if self.normalization == "xlnet":
            return xlnet_aligned(line, lower_case=self.lower_case, keep_accents=self.keep_accents)
        return self._changed(line), np.arange(len(line)), np.arange(1, len(line) + 1)

    def _spans(self, line: str) -> list[tuple[int, int, int]]:
        """Return the pieces of a line after XLNet's changes: id, and the places of its characters in that line."""
        cut = self._library_says(line, "offset_mapping")
        spans: list[tuple[int, int, int]] = []
        for token_id, piece, (start, end) in zip(cut["ids"], cut["pieces"], cut["offsets"], strict=True):
            parts = self._parts(piece) if self.normalization == "xlnet" else [(token_id, piece)]
            n_left = sum(len(text) for _, text in parts)
            for part_id, text in parts:
                n_left -= len(text)
                stop = max(start, end - n_left)
                text = "\0" if self._library.is_byte(part_id) else text  # its name is no text
                spans.append((part_id, *_without_space(line, text, start, stop)))
                start = stop
        return spans

    def _library_says(self, line: str, return_type: Any) -> Any:
        try:
            return self._library.encode(line, return_type=return_type)
        except UnicodeDecodeError:
            raise TokenizerError("the model changes this text into what is not UTF-8; restore it from a copy") from None

    def _parts(self, piece: str) -> list[tuple[int, str]]:
        """Return ids and texts of what XLNet makes of a piece: it cuts off a comma after a digit, and finds ids by texts."""
        texts: list[str] = [piece]
        if _ends_in_digit_comma(piece):
            texts = self._library_says(piece[:-1].replace(SPACE, ""), str)
            if texts and not piece.startswith(SPACE):  # the space is that before a line
                texts[:1] = [rest for rest in [texts[0].removeprefix(SPACE)] if rest]
            texts.append(",")
        return [(self._ids.get(text, self._unknown), text) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        return Tokenizer.decode(self, ids)  # a piece may mean another text at the beginning of a line

    def stream(self) -> StreamDecoder:
        return _Decoder(self)


class _Decoder(PieceDecoder):
    """Leaves out the space at the beginning of each line."""

    def __init__(self, tokenizer: SentencePieceTokenizer) -> None:
        super().__init__(tokenizer)
        self._owner = tokenizer
        self._at_start = True

    def push_known(self, token_id: int) -> str:
        owner, piece, data = self._owner, self._owner.pieces[token_id], self._pieces[token_id]
        if self._at_start and data and token_id != owner._unknown:
            data = data[1:] if piece.startswith(SPACE) and owner.drops_first_space else data
            self._at_start = not data and owner.drops_first_spaces
        elif data:
            self._at_start = False
        if piece == owner.line_end:
            self._at_start = True
        return self._bytes.decode(data)


def xlnet_text(text: str, *, lower_case: bool = False, keep_accents: bool = False) -> str:
    """Return a text as XLNet reads it: single spaces, plain quotes, no accents."""
    text = _QUOTES.sub('"', " ".join(text.split()))
    if not keep_accents and not text.isascii():
        text = "".join([sign for sign in unicodedata.normalize("NFKD", text) if not unicodedata.combining(sign)])
    return text.lower() if lower_case else text


def xlnet_aligned(text: str, *, lower_case: bool = False, keep_accents: bool = False) -> tuple[str, np.ndarray, np.ndarray]:
    """Return the same as `xlnet_text`, and the place of each of its characters in the original: starts and ends."""
    parts = list(_PARTS.finditer(text, len(text) - len(text.lstrip()), len(text.rstrip())))
    written = [xlnet_text(part.group(), keep_accents=keep_accents) if part.group().strip() else " " for part in parts]
    changed, sizes = "".join(written), np.array([len(each) for each in written], np.int64)
    places = np.repeat(np.array([part.span() for part in parts], np.int64).reshape(-1, 2), sizes, axis=0)
    if lower_case:  # that of a sigma depends on its neighbors, but not how many characters it has
        sizes = np.array([len(sign.lower()) for sign in changed], np.int64)
        changed, places = changed.lower(), np.repeat(places, sizes, axis=0)
    return changed, places[:, 0], places[:, 1]


def read_spiece(
    path: Path,
    *,
    normalization: Literal["none", "xlnet"] = "xlnet",
    lower_case: bool = False,
    keep_accents: bool = False,
    line_end: str | None = None,
) -> SentencePieceTokenizer:
    """Read a model that SentencePiece trained, such as XLNet's `spiece.model`; for the arguments see `SentencePieceTokenizer`.

    The defaults are those of XLNet's published models; the file's own way is "none".
    """
    model = b64encode(Path(path).read_bytes()).decode()
    return SentencePieceTokenizer(
        model, normalization=normalization, lower_case=lower_case, keep_accents=keep_accents, line_end=line_end
    )


def _loaded(model: str) -> tuple[Any, tuple[str, ...]]:
    from sentencepiece import SentencePieceNormalizer, SentencePieceProcessor

    try:
        data = b64decode(model, validate=True)
        library = SentencePieceProcessor.from_proto(data)
        library.normalize(library.decode([library.unk_id()]) + "a  b")  # its settings, too, must be UTF-8
        pieces = tuple(map(library.id_to_piece, range(library.vocab_size())))
        spacing = SentencePieceNormalizer(model_proto=data).serialized_normalizer_spec()
    except (RuntimeError, ValueError) as error:  # among them is what is no UTF-8 or base 64
        reason = _PLACE_IN_LIBRARY.sub("", one_line(error)) or "it is damaged, or of another kind"
        raise TokenizerError(f"unusable tokenizer: sentencepiece cannot read it ({reason}); restore the file") from None
    # the library reads a file that was cut after a piece as if it were whole
    require(spacing, "it ends before its settings")
    return library, pieces


def lines_of(text: str) -> list[str]:
    """Return the lines of a text; refuse what is not Unicode."""
    if not is_unicode(text):
        raise TokenizerError("text with a lone surrogate is not Unicode; use tokenizer.kind=byte")
    return text.split("\n")


def _ends_in_digit_comma(piece: str) -> bool:
    return len(piece) > 1 and piece[-1] == "," and piece[-2].isdigit()


def _without_space(line: str, piece: str, start: int, end: int) -> tuple[int, int]:
    """Return the place of a piece without space before it; one that begins inside of a character has that character's."""
    has_text = bool(piece.strip(SPACE))
    while piece.startswith(SPACE) and start < end - (not has_text) and (line[start].isspace() or line[start] == SPACE):
        start += 1
    end = min(len(line), max(end, start + has_text))
    # a piece that ends inside of a character, after dropped ones: the library ends it before that character
    while has_text and piece.isprintable() and end < len(line) and not any(map(str.isprintable, line[start:end])):
        end += 1
    return start, end


def train_unigram(config: TokenizerConfig, texts: Iterable[str]) -> SentencePieceTokenizer:
    """Learn pieces from texts: see `train_tokenizer`. The same text gives the same pieces."""
    from sentencepiece import SentencePieceTrainer

    size = learned_size(config)
    if config.normalization != "xlnet" and (config.lower_case or config.keep_accents):
        raise TokenizerError("tokenizer.lower_case and keep_accents of unigram need tokenizer.normalization=xlnet; set it")
    lines = list(_lines(config, first_bytes(texts, LEARNING_BYTES)))
    if not lines:
        raise TokenizerError("no words to learn pieces from; give a corpus that is not empty")
    model = BytesIO()
    try:
        SentencePieceTrainer.train(
            sentence_iterator=iter(lines),
            model_writer=model,
            model_type="unigram",
            vocab_size=size,
            hard_vocab_limit=False,  # a short text has fewer pieces
            character_coverage=_COVERAGE,
            byte_fallback=config.byte_fallback,
            control_symbols=list(CONTROL[3:]),
            user_defined_symbols=list(USER_DEFINED),
            normalization_rule_name="identity",
            split_by_unicode_script=False,  # words are cut into fewer pieces so
            num_threads=1,  # each number of threads gives other pieces
            minloglevel=2,
        )
    except RuntimeError as error:
        n_special = len(CONTROL) + len(USER_DEFINED) + 256 * config.byte_fallback
        n_characters = len(set("".join(lines)) - set(USER_DEFINED))
        raise TokenizerError(
            f"sentencepiece learns no pieces from this text ({one_line(error)}); give more of it, or raise "
            f"tokenizer.vocab_size ({size}): there are {n_special} special pieces, and {n_characters} characters in the text"
        ) from None
    return SentencePieceTokenizer(
        b64encode(model.getvalue()).decode(),
        normalization=config.normalization,
        lower_case=config.lower_case,
        keep_accents=config.keep_accents,
        line_end=LINE_END,
    )


def _lines(config: TokenizerConfig, texts: Iterable[str]) -> Iterator[str]:
    """Yield lines as the tokenizer will change them, long ones in pieces."""
    for text in texts:
        for line in lines_of(text):
            if config.normalization == "xlnet":
                line = xlnet_text(line, lower_case=config.lower_case, keep_accents=config.keep_accents)
            yield from _LINE.findall(" ".join(line.replace(_RESERVED, " ").replace(_UNKNOWN, "<unk >").split()))
