"""Losses of tokens that are predicted only from a given number of tokens before them.

Tokens are scored in blocks of s, each read with the c tokens before it, from an empty memory, in the model's own way:

    transformer_xl   in segments, with the memory that it is given; the first segment is the short one, so that at every c
                     the scored tokens stand at the end of a segment
    lstm             from a zero state
    vanilla          in one segment; if it is longer than max_len, each token after the last max_len tokens, read anew

So the first token of a block has a context of exactly c tokens and the last one of c + s - 1; with s = 1 all have c.

Shapes: B blocks read side by side, T tokens of a segment, D d_model.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch

from transformer_xl.errors import ConfigError, CorpusError
from transformer_xl.model.language_model import LanguageModel
from transformer_xl.model.softmax import check_ids
from transformer_xl.opening import Opened
from transformer_xl.reading.segments import Cut, windows
from transformer_xl.reading.stream import Stream, open_stream, scoring


@dataclass(frozen=True)
class Blocks:
    """Which tokens of a text are scored."""

    starts: np.ndarray  # int64 (n,), place of the first scored token of each block
    size: int  # s, scored tokens of a block

    @property
    def n_token(self) -> int:
        """Scored tokens in all."""
        return len(self.starts) * self.size


def spread_blocks(n_id: int, *, longest: int, n_token: int, size: int) -> Blocks:
    """Spread blocks evenly over a text of `n_id` tokens, each with room for a context of `longest` before it.

    At most `n_token` tokens are scored, and fewer if the text has no room for them.

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
    """Return the context beyond which the losses of a block of `size` tokens stay the same; None: there is none."""
    if model.config.longest_segment:
        return model.config.longest_segment
    if model.config.remembers == "state" and model.mem_len:
        return None
    scored = -(-size // tgt_len) * tgt_len  # the segments that the block lies in
    return scored + model.reach(tgt_len) - size + 1


def open_reading(opened: Opened, *, tgt_len: int | None = None, mem_len: int | None = None) -> tuple[LanguageModel, int]:
    """Return a model as `txl eval` reads with it, and tokens per segment.

    Only a model that remembers positions can have another `tgt_len` or `mem_len`. Without memory, a segment is all that is read
    at once, even if fewer tokens are scored at a time.
    """
    if not remembers_positions(opened):
        tgt_len = mem_len = None
    own = opened.reading(mem_len=mem_len)
    segment = own.tgt_len if own.mem_len else own.tgt_len + own.ext_len
    return replace(own, ext_len=0).view(opened.model), tgt_len or segment


def remembers_positions(opened: Opened) -> bool:
    """Say whether the lengths of a model's segments and memory can be chosen."""
    return opened.config.model.remembers == "positions"


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
    """Score blocks of tokens, each only from the `context` tokens before it; return nats block by block, float32 (n · s,).

    The model has the context that it is read with, see `LanguageModel.with_context`. `batch_size` blocks are read at once.

    Raises:
        ConfigError: sizes below 1, or a context that reaches back beyond the beginning of the text.
        TokenizerError: ids outside the model's vocabulary.
    """
    if min(context, tgt_len, batch_size) < 1:
        raise ConfigError(f"context ({context}), tgt_len ({tgt_len}) and batch_size ({batch_size}) must be at least 1")
    if context > blocks.starts.min():
        raise ConfigError(f"context ({context:,}) reaches beyond the text before the first block ({blocks.starts.min():,})")
    check_ids(token_ids, vocab_size=model.config.vocab_size or 0)
    max_len, size = model.config.longest_segment, blocks.size
    parts = [(0, size, context)]  # offset of the first token of a part, tokens of it, and tokens before it
    if max_len is not None:
        tgt_len = max_len
        if context + size - 1 > max_len:
            parts = [(j, 1, min(context + j, max_len)) for j in range(size)]
    nats = np.empty((len(blocks.starts), size), np.float32)
    with scoring(model):
        n_read = max(before + n - 1 for _, n, before in parts)
        stream = open_stream(_shortened(model, max(n_read - tgt_len, 0)), batch_size, tgt_len=min(tgt_len, n_read))
        everything = torch.ones(batch_size, dtype=torch.bool)
        for first in range(0, len(nats), batch_size):
            starts = blocks.starts[first : first + batch_size]
            for offset, n, before in parts:
                stream.reset(everything)
                cuts = windows(token_ids, starts + offset, size=n, context=before, tgt_len=tgt_len)
                own = np.concatenate([_score(stream, each) for each in cuts], axis=1)
                nats[first : first + batch_size, offset : offset + n] = own
            if on_tokens:
                on_tokens(len(starts) * size)
    return nats.reshape(-1)


def _shortened(model: LanguageModel, n_before: int) -> LanguageModel:
    """Return a model whose memory has at most as many places as tokens come before the last segment.

    Otherwise empty places of kept keys would be multiplied, too.
    """
    if not model.keeps_keys or model.same_length or model.config.begins_with_zeros:
        return model
    return model.with_context(mem_len=min(model.mem_len, n_before))


def _score(stream: Stream, cut: Cut) -> np.ndarray:
    """Read a segment in the first rows, and return the nats of the scored columns."""
    h_BTD = stream.read(cut.ids.to(stream.model.device), rows=slice(len(cut.ids)))
    scored = cut.is_scored[0]
    return stream.nll(h_BTD[:, scored], cut.labels[:, scored].to(h_BTD.device)).float().cpu().numpy()
