"""Losses of tokens that are predicted only from a given number of tokens before them, each computed once.

Tokens are scored in blocks of s, each read with the c tokens before it, from an empty memory, in the model's own way:

    transformer_xl   in segments, with the memory that it is given; the first segment is the short one, so that at every c
                     the scored tokens stand at the end of a segment
    lstm             from a zero state
    vanilla          in one segment; if it is longer than max_len, each token after the last max_len tokens, read anew

So the first token of a block has a context of exactly c tokens and the last one of c + s - 1; with s = 1 all have c.

`CachedLosses` keeps losses in memory, and on disk for the next time. A file holds the losses at one context: a float32 .npy of
n · s numbers, and its SHA-256 in 32 more bytes, so that nothing damaged is ever parsed. Its name is a hash of all that the
losses depend on: weights, text, places, and how the model reads.

Shapes: B blocks read side by side, T tokens of a segment, D d_model.
"""

import hashlib
import io
import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import torch

from transformer_xl.errors import ConfigError, CorpusError, TrainingError
from transformer_xl.files import make_directories, replace_file
from transformer_xl.generation.session_file import model_sha256
from transformer_xl.model.language_model import LanguageModel
from transformer_xl.model.softmax import check_ids
from transformer_xl.opening import Opened
from transformer_xl.reading.segments import Cut, windows
from transformer_xl.reading.stream import Stream, open_stream, scoring

FORMAT = 1  # of the file's layout, and of how contexts are counted and read
_HASH_BYTES = 32


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
    if model.carries_state:
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
    """Return whether the lengths of a model's segments and memory can be chosen."""
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
        view = model
        if model.keeps_keys and not (model.same_length or model.config.begins_with_zeros):
            # no more places than tokens before the last segment, because empty places of kept keys are multiplied, too
            view = model.with_context(mem_len=min(model.mem_len, max(n_read - tgt_len, 0)))
        stream = open_stream(view, batch_size, tgt_len=min(tgt_len, n_read))
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


def _score(stream: Stream, cut: Cut) -> np.ndarray:
    """Read a segment in the first rows, and return the nats of the scored columns."""
    h_BTD = stream.read(cut.ids.to(stream.model.device), rows=slice(len(cut.ids)))
    scored = cut.is_scored[0]
    return stream.nll(h_BTD[:, scored], cut.labels[:, scored].to(h_BTD.device)).float().cpu().numpy()


class CachedLosses:
    """Losses of one model on the same tokens, by context; see `context_losses` for the arguments.

    Without `directory`, losses are kept in memory only. `on_begin` is called with a context before its losses are computed.
    """

    def __init__(
        self,
        model: LanguageModel,
        token_ids: np.ndarray,
        blocks: Blocks,
        *,
        tgt_len: int,
        directory: Path | None = None,
        name: str = "model",
        batch_size: int = 32,
        warn: Callable[[str], object] = lambda message: None,
        on_begin: Callable[[int], object] = lambda context: None,
        on_tokens: Callable[[int], object] | None = None,
    ) -> None:
        self.model, self.ids, self.blocks, self.tgt_len, self.name = model, token_ids, blocks, tgt_len, name
        self._directory, self._batch_size = directory, batch_size
        self._warn, self._on_begin, self._on_tokens = warn, on_begin, on_tokens
        self.longest = longest_context(model, tgt_len=tgt_len, size=blocks.size)
        self._known: dict[int, np.ndarray] = {}

    def __call__(self, context: int) -> np.ndarray:
        """Return float32 (n · s,), nats of each scored token.

        A context beyond `self.longest` is not read, because its losses are those of `self.longest`.

        Raises:
            ConfigError: a context that reaches back beyond the beginning of the text.
            TrainingError: losses that are not finite.
        """
        if self.longest is not None:
            context = min(context, self.longest)
        if context not in self._known:
            self._known[context] = self._from_disk_or_model(context)
        return self._known[context]

    def _from_disk_or_model(self, context: int) -> np.ndarray:
        path = None
        if self._directory is not None:
            path = self._directory / f"{hashlib.sha256(f'{self._origin} {context}'.encode()).hexdigest()[:32]}.npy"
            if (losses := self._load(path)) is not None:
                return losses
        self._on_begin(context)
        losses = context_losses(
            self.model,
            self.ids,
            self.blocks,
            context=context,
            tgt_len=self.tgt_len,
            batch_size=self._batch_size,
            on_tokens=self._on_tokens,
        )
        if not np.isfinite(losses).all():
            raise TrainingError(
                f"'{self.name}' has losses that are not finite after {context:,} tokens of context; its weights are of no use, "
                "train it again with a lower optim.lr"
            )
        if path is not None:
            self._save(path, losses)
        return losses

    @cached_property
    def _origin(self) -> str:
        """All that the losses depend on besides the context, as JSON."""
        ids, starts = (np.ascontiguousarray(array, np.int64) for array in (self.ids, self.blocks.starts))
        texts = [hashlib.sha256(array.tobytes()).hexdigest() for array in (ids, starts)]
        model = self.model
        reading = [self.tgt_len, model.mem_len, model.clamp_len, model.same_length, model.ext_len]
        return json.dumps([FORMAT, model_sha256(model), *texts, self.blocks.size, *reading])

    def _load(self, path: Path) -> np.ndarray | None:
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            self._warn(f"'{path}' cannot be read ({error.strerror or error}); computing it again")
            return None
        content, digest = data[:-_HASH_BYTES], data[-_HASH_BYTES:]
        if hashlib.sha256(content).digest() == digest:
            with suppress(ValueError, EOFError):  # undamaged, but written by something else
                losses = np.lib.format.read_array(io.BytesIO(content), allow_pickle=False)
                if losses.dtype == np.float32 and losses.shape == (self.blocks.n_token,):
                    return losses
        self._warn(f"'{path}' is damaged; computing it again")
        return None

    def _save(self, path: Path, losses: np.ndarray) -> None:
        file = io.BytesIO()
        np.save(file, losses, allow_pickle=False)
        content = file.getvalue()
        try:
            make_directories(path.parent)
            replace_file(path, content + hashlib.sha256(content).digest())
        except OSError as error:
            self._warn(f"losses cannot be kept in '{path.parent}' ({error.strerror or error}); set TXL_CACHE to another place")
            self._directory = None
