"""Losses of a model by context, each computed once: kept in memory, and on disk for the next time.

A file holds the losses at one context: a float32 .npy of n · s numbers, and its SHA-256 in 32 more bytes, so that nothing
damaged is ever parsed. Its name is a hash of what the losses depend on: weights, text, places, how the model reads.
"""

import hashlib
import io
import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np

from transformer_xl.analysis.recl.context_losses import Blocks, context_losses, longest_context
from transformer_xl.errors import TrainingError
from transformer_xl.files import replace_file
from transformer_xl.generation.session_file import model_sha256
from transformer_xl.model.language_model import LanguageModel

FORMAT = 1  # of the file's layout, and of how contexts are counted and read
_HASH_BYTES = 32


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
        warn: Callable[[str], object] | None = None,
        on_begin: Callable[[int], object] | None = None,
        on_tokens: Callable[[int], object] | None = None,
    ) -> None:
        self.model, self.ids, self.blocks, self.tgt_len, self.name = model, token_ids, blocks, tgt_len, name
        self._directory, self._batch_size = directory, batch_size
        self._warn, self._on_begin, self._on_tokens = warn, on_begin, on_tokens
        self.longest = longest_context(model, tgt_len=tgt_len, size=blocks.size)
        self._known: dict[int, np.ndarray] = {}
        self._origin: str | None = None

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
        path = None if self._directory is None else self._directory / f"{self._key(context)}.npy"
        kept = None if path is None else self._load(path)
        if kept is not None:
            return kept
        if self._on_begin:
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

    def _key(self, context: int) -> str:
        if self._origin is None:
            ids, starts = (np.ascontiguousarray(array, np.int64) for array in (self.ids, self.blocks.starts))
            texts = [hashlib.sha256(array.tobytes()).hexdigest() for array in (ids, starts)]
            view = self.model
            reading = [self.tgt_len, view.mem_len, view.clamp_len, view.same_length, view.ext_len]
            self._origin = json.dumps([FORMAT, model_sha256(view), *texts, self.blocks.size, *reading])
        return hashlib.sha256(f"{self._origin} {context}".encode()).hexdigest()[:32]

    def _load(self, path: Path) -> np.ndarray | None:
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            self._tell(f"'{path}' cannot be read ({error.strerror or error}); computing it again")
            return None
        content, digest = data[:-_HASH_BYTES], data[-_HASH_BYTES:]
        if hashlib.sha256(content).digest() == digest:
            with suppress(ValueError, EOFError):  # sound, but written by something else
                losses = np.lib.format.read_array(io.BytesIO(content), allow_pickle=False)
                if losses.dtype == np.float32 and losses.shape == (self.blocks.n_token,):
                    return losses
        self._tell(f"'{path}' is damaged; computing it again")
        return None

    def _save(self, path: Path, losses: np.ndarray) -> None:
        file = io.BytesIO()
        np.save(file, losses, allow_pickle=False)
        content = file.getvalue()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(path, content + hashlib.sha256(content).digest())
        except OSError as error:
            self._tell(f"losses cannot be kept in '{path.parent}' ({error.strerror or error}); set TXL_CACHE to another place")
            self._directory = None

    def _tell(self, message: str) -> None:
        if self._warn:
            self._warn(message)
