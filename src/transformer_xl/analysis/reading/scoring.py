"""Score a run on a split of its text, as `txl eval` does."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from transformer_xl.config import DataConfig, RunConfig
from transformer_xl.data.corpora import choose_corpus
from transformer_xl.data.named import SplitName
from transformer_xl.data.prepare import TokenSplit, prepare
from transformer_xl.data.tokenizers import Tokenizer
from transformer_xl.errors import CorpusError
from transformer_xl.evaluation import Score, evaluate, predicted_sizes
from transformer_xl.model.language_model import LanguageModel
from transformer_xl.model.precision import choose_device
from transformer_xl.model.precision_names import precision_of_segments


@dataclass(frozen=True)
class ScoredText:
    """A split, or its beginning.

    Attributes:
        what: in words.
        ids: of its tokens.
        n_characters: of the predicted text, all but the first token.
        n_bytes: the same.
        is_whole: whether it is the split.
    """

    what: str
    ids: np.ndarray
    n_characters: int
    n_bytes: int
    is_whole: bool = True


@dataclass(frozen=True)
class Reading:
    """How a text is read to score it.

    Attributes:
        length: positions before a segment that its tokens may see; the attention length.
        tgt_len: tokens per segment.
        mem_len: positions of memory.
        ext_len: tokens before each segment that are read again.
        batch_size: lanes read side by side.
    """

    length: int
    tgt_len: int
    mem_len: int
    ext_len: int
    batch_size: int


def split_of(
    config: RunConfig, tokenizer: Tokenizer, *, split: SplitName | None = None, corpus: str | None = None
) -> tuple[str, TokenSplit]:
    """Return a split of a run's corpus, and what it is in words.

    Args:
        config: of the run.
        tokenizer: of the run.
        split: None: test, or valid where there is none.
        corpus: another one, or the directory that holds the run's; None: the run's.

    Raises:
        CorpusError: no such split, or a corpus that cannot be read.
    """
    data = choose_corpus(config.data, corpus)
    splits = prepare(data, tokenizer).splits
    name = split or ("test" if len(splits["test"].ids) > 1 else "valid")
    if len(splits[name].ids) < 2:
        raise CorpusError(f"corpus '{data.corpus}' has no {name} split; choose another split or text")
    return f"{name} split of {data.corpus}", splits[name]


def text_of(
    config: RunConfig,
    tokenizer: Tokenizer,
    *,
    split: SplitName | None = None,
    corpus: str | None = None,
    limit: int | None = None,
) -> ScoredText:
    """Return a split of a run's corpus, or its beginning; see `split_of`.

    Args:
        config: of the run.
        tokenizer: of the run.
        split: None: test, or valid where there is none.
        corpus: another one, or the directory that holds the run's; None: the run's.
        limit: at most so many tokens of it; their characters and bytes are then in proportion.

    Raises:
        CorpusError: no such split, or a corpus that cannot be read.
    """
    what, whole = split_of(config, tokenizer, split=split, corpus=corpus)
    ids = whole.ids[: None if limit is None else limit + 1]
    share = len(ids) / len(whole.ids)
    sizes = {"n_characters": round(whole.n_characters * share), "n_bytes": round(whole.n_bytes * share)}
    n_characters, n_bytes = predicted_sizes(tokenizer.decode([int(ids[0])]), **sizes)
    of = f"first {len(ids) - 1:,} tokens of the " if share < 1 else ""
    return ScoredText(f"{of}{what}", np.asarray(ids), n_characters, n_bytes, is_whole=share == 1)


def text_difference(one: DataConfig, other: DataConfig) -> tuple[str, object, object] | None:
    """Return the first setting by which two runs have other texts, with both values; None: their texts are the same.

    Example:
        >>> text_difference(DataConfig(corpus="ptb"), DataConfig(corpus="text8"))
        ('corpus', 'ptb', 'text8')
    """
    for name in ("corpus", "split", "document_separator", "documents"):
        if getattr(one, name) != getattr(other, name):
            return name, getattr(one, name), getattr(other, name)
    return None


def own_reading(config: RunConfig) -> Reading:
    """Return how `txl eval` reads for this run."""
    return Reading(
        length=config.eval_mem_len + config.eval.ext_len,
        tgt_len=config.eval_tgt_len,
        mem_len=config.eval_mem_len,
        ext_len=config.eval.ext_len,
        batch_size=config.eval.batch_size,
    )


def score(
    model: LanguageModel,
    text: ScoredText,
    config: RunConfig,
    reading: Reading,
    *,
    per_token: bool = False,
    on_tokens: Callable[[int], object] | None = None,
) -> Score:
    """Score a text, in the precision that the run's device multiplies natively.

    Args:
        model: of the run; it is moved to the device.
        text: to score.
        config: of the run.
        reading: how.
        per_token: keep the nats of every token.
        on_tokens: called with the number of tokens just scored.
    """
    device = choose_device(config.train.device)
    return evaluate(
        model.to(device),
        text.ids,
        tgt_len=reading.tgt_len,
        mem_len=reading.mem_len,
        batch_size=reading.batch_size,
        same_length=config.eval.same_length if reading.mem_len else False,
        clamp_len=config.eval.clamp_len,
        ext_len=reading.ext_len,
        n_characters=text.n_characters,
        n_bytes=text.n_bytes,
        precision=precision_of_segments("auto", device),
        per_token=per_token,
        on_tokens=on_tokens,
    )
