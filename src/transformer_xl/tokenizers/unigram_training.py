"""Pieces and their probabilities, learned from a text by SentencePiece.

Reference: Kudo 2018, "Subword Regularization", section 3.2.
"""

import re
from base64 import b64encode
from collections.abc import Iterable, Iterator
from io import BytesIO

from transformer_xl.config.run import TokenizerConfig
from transformer_xl.errors import TokenizerError, one_line
from transformer_xl.tokenizers.bpe import first_bytes
from transformer_xl.tokenizers.normalization import xlnet_text
from transformer_xl.tokenizers.unigram import SentencePieceTokenizer, lines_of

DEFAULT_UNIGRAM_SIZE = 8192
"""Vocabulary size of a Unigram tokenizer if the configuration has none."""

UNIGRAM_TRAINING_BYTES = 16 << 20
"""A Unigram tokenizer learns its pieces from this many bytes at the beginning of the text."""

CONTROL = ("<unk>", "<s>", "</s>", "<cls>", "<sep>", "<pad>", "<mask>", "<eod>")
LINE_END = "<eop>"
USER_DEFINED = (LINE_END, ".", "(", ")", '"', "-", "–", "£", "€")
"""XLNet's special pieces: these are the ids from 0 on, unknown text first, then control pieces."""

_N_BYTES = 256
_MOST_PIECES = 2**18
_COVERAGE = 0.99995  # of the text by characters that get a piece, as XLNet's
_LINE = re.compile(r".{1,1000}(?: |$)|.{1000}")  # at most 4,000 bytes: of more than 4,192, the library skips a line
_RESERVED = "\u2585"  # a line with it is skipped, too
_UNKNOWN = "<unk>"  # is cut out of a text, so its characters would become unknown


def train_unigram(config: TokenizerConfig, texts: Iterable[str]) -> SentencePieceTokenizer:
    """Learn pieces from texts: see `train_tokenizer`. The same text gives the same pieces."""
    from sentencepiece import SentencePieceTrainer

    size = DEFAULT_UNIGRAM_SIZE if config.vocab_size is None else config.vocab_size
    if size > _MOST_PIECES:
        raise TokenizerError(f"tokenizer.vocab_size ({size}) must be at most {_MOST_PIECES:,} for unigram; lower it")
    if config.normalization != "xlnet" and (config.lower_case or config.keep_accents):
        raise TokenizerError("tokenizer.lower_case and keep_accents of unigram need tokenizer.normalization=xlnet; set it")
    lines = list(_lines(config, first_bytes(texts, UNIGRAM_TRAINING_BYTES)))
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
        n_special = len(CONTROL) + len(USER_DEFINED) + _N_BYTES * config.byte_fallback
        n_characters = len(set("".join(lines)) - set(USER_DEFINED))
        if size >= n_special + n_characters:
            raise TokenizerError(
                f"sentencepiece learns no pieces from this text ({one_line(error)}); give more of it"
            ) from None
        raise TokenizerError(
            f"tokenizer.vocab_size ({size}) is too small for {n_special} special pieces and the text's {n_characters} "
            "characters; raise it"
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
