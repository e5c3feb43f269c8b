"""Losses of tokens that are predicted from a given number of tokens before them, and from nothing else.

Tokens are scored in blocks of s, each read with the c tokens before it, from an empty memory, in the model's own way:

    transformer_xl   in segments, with the memory that it is given; the first segment is the short one, so that the scored
                     tokens stand at the same place, the end of a segment, at every c
    lstm             from a zero state
    vanilla          in one segment; where it is longer than max_len, each token after the last max_len tokens, read anew

So the first token of a block has a context of exactly c tokens and the last one of c + s - 1; with s = 1 all have c.

Shapes: B blocks read side by side, W tokens of a window, S scored tokens of a block, D d_model.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from transformer_xl.errors import ConfigError, CorpusError
from transformer_xl.model.language_model import LanguageModel
from transformer_xl.model.lstm import Lstm
from transformer_xl.model.reader import Reader, keeps_keys
from transformer_xl.model.token_ids import check_ids


@dataclass(frozen=True)
class Blocks:
    """Which tokens of a text are scored.

    Attributes:
        starts: int64 (n,), place of the first scored token of each block.
        size: s, scored tokens of a block.
    """

    starts: np.ndarray
    size: int

    @property
    def n_token(self) -> int:
        """Scored tokens in all."""
        return len(self.starts) * self.size


def spread_blocks(n_id: int, *, longest: int, n_token: int, size: int) -> Blocks:
    """Spread blocks evenly over a text, so that each has `longest` tokens before it and none overlap.

    Args:
        n_id: tokens of the text.
        longest: the longest context that will be asked for.
        n_token: tokens to score, at most; fewer where the text has no room for them.
        size: scored tokens of a block.

    Raises:
        CorpusError: a text without room for one block.

    Example:
        >>> spread_blocks(100, longest=40, n_token=9, size=3).starts.tolist()
        [40, 60, 80]
    """
    room = n_id - longest
    if room < size:
        raise CorpusError(
            f"the text has {n_id:,} tokens, and a context of {longest:,} with {size:,} to score after it needs "
            f"{longest + size:,}; give a longer text, or a smaller --max-context"
        )
    n_block = min(max(1, n_token // size), room // size)
    return Blocks(longest + np.arange(n_block) * room // n_block, size)


def longest_context(model: LanguageModel, *, tgt_len: int, size: int) -> int | None:
    """Return the context beyond which the losses of a block stay the same; None: there is none.

    Args:
        model: as it is read, see `LanguageModel.with_context`.
        tgt_len: tokens per segment.
        size: scored tokens of a block.
    """
    if model.config.longest_segment:
        return model.config.longest_segment
    if isinstance(model, Lstm) and model.mem_len:
        return None
    scored = -(-size // tgt_len) * tgt_len  # the segments that the block lies in
    return scored + model.reach(tgt_len) - size + 1


@torch.no_grad()
def context_losses(
    model: LanguageModel,
    token_ids: np.ndarray,
    blocks: Blocks,
    *,
    context: int,
    tgt_len: int,
    batch_size: int = 32,
    on_tokens: Callable[[int], object] | None = None,
) -> np.ndarray:
    """Score blocks of tokens, each from the `context` tokens before it alone.

    Args:
        model: as it is read, see `LanguageModel.with_context`; its mode (training or not) is restored afterwards.
        token_ids: integers (N,); may be memory-mapped.
        blocks: what is scored.
        context: c, tokens before each block, at least 1.
        tgt_len: tokens per segment.
        batch_size: blocks read side by side.
        on_tokens: called with the number of tokens just scored, for progress bars.

    Returns:
        float32 (n · s,), nats of each scored token, block by block.

    Raises:
        ConfigError: sizes below 1, or a context that reaches back beyond the beginning of the text.
        TokenizerError: ids outside the model's vocabulary.
    """
    if min(context, tgt_len, batch_size) < 1:
        raise ConfigError(f"context ({context}), tgt_len ({tgt_len}) and batch_size ({batch_size}) must be at least 1")
    if context > blocks.starts.min():
        raise ConfigError(f"context ({context:,}) reaches beyond the text before the first block ({blocks.starts.min():,})")
    check_ids(token_ids, vocab_size=model.config.vocab_size or 0)
    was_training = model.training
    model.eval()
    score = _scorer(model, context=context, tgt_len=tgt_len, size=blocks.size)
    nats = np.empty((len(blocks.starts), blocks.size), np.float32)
    try:
        for first in range(0, len(nats), batch_size):
            starts = blocks.starts[first : first + batch_size]
            window_BW = token_ids[starts[:, None] + np.arange(-context, blocks.size)].astype(np.int64)
            nats[first : first + batch_size] = score(torch.from_numpy(window_BW).to(model.device)).float().cpu().numpy()
            if on_tokens:
                on_tokens(len(starts) * blocks.size)
    finally:
        model.train(was_training)
    return nats.reshape(-1)


_Scorer = Callable[[Tensor], Tensor]
"""Takes windows (B, c + S) whose last S tokens are scored, returns their nats (B, S)."""

_Rows = tuple[Callable[[Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]]
"""What reads the next segment of rows, and what scores the tokens that follow the states which that returned."""


def _scorer(model: LanguageModel, *, context: int, tgt_len: int, size: int) -> _Scorer:
    max_len = model.config.longest_segment
    if max_len is None:
        begin = _beginning(model, n_read=context + size - 1, tgt_len=tgt_len)
        return lambda window_BW: _in_segments(begin, window_BW, context=context, tgt_len=tgt_len)
    begin = _beginning_with_states(model)
    if context + size - 1 <= max_len:
        return lambda window_BW: _in_segments(begin, window_BW, context=context, tgt_len=max_len)

    def one_by_one(window_BW: Tensor) -> Tensor:
        windows = [window_BW[:, max(at - max_len, 0) : at + 1] for at in range(context, context + size)]
        return torch.cat([_in_segments(begin, each, context=each.shape[1] - 1, tgt_len=max_len) for each in windows], dim=1)

    return one_by_one


def _in_segments(begin: Callable[[int], _Rows], window_BW: Tensor, *, context: int, tgt_len: int) -> Tensor:
    """Read windows in segments that end with them, and score what follows the first `context` tokens."""
    read, nll = begin(len(window_BW))
    n_read = window_BW.shape[1] - 1
    borders = sorted({0, *range(n_read, 0, -tgt_len)})
    nats = []
    for first, end in itertools.pairwise(borders):
        h_BTD = read(window_BW[:, first:end])
        if end >= context:
            scored = max(first, context - 1)  # the first token to score follows it
            nats.append(nll(h_BTD[:, scored - first :], window_BW[:, scored + 1 : end + 1]))
    return torch.cat(nats, dim=1)


def _beginning(model: LanguageModel, *, n_read: int, tgt_len: int) -> Callable[[int], _Rows]:
    """Return what begins rows with an empty memory, given their number."""
    if not keeps_keys(model):
        return _beginning_with_states(model)
    if not model.same_length and not model.config.zero_first_memory:  # places that stay empty would be multiplied, too
        model = model.with_context(mem_len=min(model.mem_len, max(n_read - tgt_len, 0)))
    reader = Reader(model, tgt_len=min(tgt_len, n_read))

    def begin(n_row: int) -> _Rows:
        memory = reader.empty_memory(n_row)
        return (
            lambda ids: reader.read(ids, memory),
            lambda h, labels: reader.softmax.nll(h.flatten(0, 1), labels.flatten()).view(labels.shape),
        )

    return begin


def _beginning_with_states(model: LanguageModel) -> Callable[[int], _Rows]:
    """Return the same for models that cannot keep keys."""

    def begin(n_row: int) -> _Rows:
        mems = None

        def read(ids: Tensor) -> Tensor:
            nonlocal mems
            h_BTD, mems = model.read(ids, mems=mems)
            return h_BTD

        return read, lambda h, labels: model.softmax.nll(h, labels, model.embedding)

    return begin
