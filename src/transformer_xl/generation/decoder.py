"""`Decoder`: a model with the memory of what it has read, fed token by token or text by text."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from transformer_xl.errors import ConfigError
from transformer_xl.generation.choice import Compile, fastest_stream
from transformer_xl.generation.given import (
    Ids,
    Mask,
    Rows,
    equally_many_for_each_row,
    one_flag_for_each_row,
    one_for_each_row,
    some_for_each_row,
)
from transformer_xl.generation.scores import Scores
from transformer_xl.generation.snapshot import Session, load_session, save_session
from transformer_xl.model.frozen import InferencePrecision
from transformer_xl.model.language_model import LanguageModel, describe_reading
from transformer_xl.model.precision import Precision, choose_precision
from transformer_xl.model.precision_names import PrecisionName, check_precision
from transformer_xl.model.reader import keeps_keys
from transformer_xl.model.token_ids import check_ids
from transformer_xl.model_config import ModelConfig, TransformerXLConfig
from transformer_xl.reading.stream import KeptKeys, Stream, open_stream


class Decoder:
    """Read streams with a memory of fixed size; the cost of a token does not grow with what was read.

    Rows start, stop and reset independently. Every token sees exactly the `mem_len` tokens before it (with `same_length` the
    model's window), so it makes no difference how a text is cut into pieces. Weights must not change while a decoder is in use.

    Args:
        model: put in evaluation mode.
        batch_size: rows, each a stream of its own.
        mem_len: positions of memory; None: the model's.
        tgt_len: longest piece read at once; longer input is read in pieces. None: 64, with al_rfou the training's.
        precision: of weights and memory. int8 rounds the weights to 255 steps per output; keys and values are bf16 then. auto:
            fp32 or bf16, whichever steps faster here.
        compile: compile the reading of single tokens, which takes some seconds and needs a C++ compiler. auto: where that can
            be expected to pay within `expected_tokens`, and turns out to.
        expected_tokens: about how many tokens will be read one by one.

    Attributes:
        reason: why precision and compilation are what they are.

    Raises:
        ConfigError: sizes below 1, or a precision or compilation that is impossible here.

    Example:
        >>> from transformer_xl.model_config import TransformerXLConfig
        >>> model = TransformerXL(TransformerXLConfig(vocab_size=4, n_layer=1, d_model=8, n_head=1, d_head=8, d_inner=8))
        >>> decoder = Decoder(model, batch_size=2)
        >>> decoder.feed([[0, 1, 2, 3], [2]]).shape
        torch.Size([2, 4])
    """

    def __init__(
        self,
        model: LanguageModel,
        *,
        batch_size: int = 1,
        mem_len: int | None = None,
        tgt_len: int | None = None,
        precision: PrecisionName = "fp32",
        compile: Compile = False,
        expected_tokens: int = 1000,
    ) -> None:
        for name, size in (("batch_size", batch_size), ("tgt_len", tgt_len)):
            if size is not None and size < 1:
                raise ConfigError(f"{name} ({size}) must be at least 1")
        check_precision(precision)
        same_length = False if mem_len == 0 else None  # of a window without memory nothing is left
        self.model = model.eval().with_context(mem_len=mem_len, same_length=same_length, ext_len=0)
        self.mem_len, self.batch_size = self.model.mem_len, batch_size
        self.tgt_len = tgt_len or _segment_length(model.config)
        if keeps_keys(self.model) and self.mem_len > 0:
            precisions: list[InferencePrecision] = ["fp32", "bf16"] if precision == "auto" else [precision]
            self._stream, self.reason = fastest_stream(
                lambda chosen: cast(KeptKeys, self._open(chosen)), precisions, compile=compile, expected_tokens=expected_tokens
            )
        else:
            chosen, self.reason = self._precision_of_reading_again(precision, compile)
            self._stream = self._open(chosen)
        self.precision: InferencePrecision = self._stream.precision
        wide = torch.promote_types(model.dtype, torch.float32)
        self._hidden = torch.full((batch_size, model.config.d_model), torch.nan, dtype=wide, device=model.device)

    def _open(self, precision: InferencePrecision) -> Stream:
        return open_stream(self.model, self.batch_size, tgt_len=self.tgt_len, precision=precision, token_by_token=True)

    def _precision_of_reading_again(self, precision: str, compile: Compile) -> tuple[Precision, str]:
        if precision == "int8" or compile is True:
            wish = "precision (int8)" if precision == "int8" else "compile (True)"
            raise ConfigError(
                f"{wish} needs keys that stay the same, and {describe_reading(self.model)} with mem_len ({self.mem_len}) has "
                "none; leave it out"
            )
        return choose_precision(precision, self.model.device)

    def __repr__(self) -> str:
        return (
            f"Decoder(batch_size={self.batch_size}, mem_len={self.mem_len}, precision='{self.precision}', "
            f"compiled={self.compiled}, n_bytes={self.n_bytes:_})"
        )

    @property
    def kept(self) -> KeptKeys | None:
        """Keys and values of what was read, and the frozen weights; None for models that are read again and again."""
        return self._stream if isinstance(self._stream, KeptKeys) else None

    @property
    def compiled(self) -> bool:
        """Whether single tokens are read by compiled code."""
        return self.kept is not None and self.kept.reader.compiled

    @property
    def n_bytes(self) -> int:
        """Bytes of memory and position keys, which do not grow; 0 for models that are read again and again."""
        return 0 if self.kept is None else self.kept.memory.n_bytes + self.kept.reader.n_bytes

    def feed(self, ids: Rows) -> Tensor:
        """Read on, and score what may come next.

        Args:
            ids: integers (B, T), a tensor of the next T ≥ 1 tokens of each row; or a list of B lists of any lengths, where an
                empty one leaves its row as it is. Rows of a list, or of an array, are read one after another, so that the
                numbers of a row depend on it alone, to the last bit.

        Returns:
            Scores (B, V) of the token after the last one, at least in fp32 (of an adaptive softmax: log-probabilities); NaN for
            rows that have read nothing yet.

        Raises:
            TokenizerError: an id outside the vocabulary; nothing has been read then.
            ValueError: ids of another shape, or no integers; nothing has been read then.

        If it is interrupted, a row may have read a part of its ids: reset it, or load an earlier session.
        """
        return self.read(ids).full()

    def read(self, ids: Rows) -> Scores:
        """Read on as `feed` does, and return scores of which rare clusters are computed only where they are asked for."""
        if not isinstance(ids, Tensor):
            rows = some_for_each_row(ids, self.batch_size)
            self._check(torch.cat(rows))
            return self._read_rows(rows)
        ids_BT = equally_many_for_each_row(ids, self.batch_size)
        self._check(ids_BT)
        if ids_BT.shape[1] == 1:
            self._step(ids_BT[:, 0], None)
        elif self._stream.together():
            self._hidden = self._stream.advance(ids_BT.to(self.model.device)).to(self._hidden.dtype)
        else:
            return self._read_rows(list(ids_BT))
        return self.scores

    def _read_rows(self, rows: Sequence[Tensor]) -> Scores:
        """Read int64 (T,) in each row, one row after another, but single tokens together."""
        alone = [len(own) == 1 for own in rows]
        if any(alone):  # whether a row steps is a matter of its own tokens, too
            self._step(torch.tensor([int(own[0]) if len(own) else 0 for own in rows]), torch.tensor(alone))
        self._hidden = self._hidden.clone()  # earlier scores keep what they were made of
        for row, own in enumerate(rows):
            if len(own) > 1:
                piece = own.unsqueeze(0).to(self.model.device)
                self._hidden[row] = self._stream.advance(piece, rows=slice(row, row + 1))[0]
        return self.scores

    def step(self, ids: Ids, *, active: Mask | None = None) -> Scores:
        """Read one token of each row: the fast path, in shapes that never change.

        Args:
            ids: integers (B,).
            active: bool (B,), rows that read; the others stay as they are. None: all.

        Returns:
            Scores of each row's next token.

        Raises:
            TokenizerError: an id outside the vocabulary; nothing has been read then.
            ValueError: ids of another shape, or no integers, or no such mask; nothing has been read then.
        """
        ids_B = one_for_each_row(ids, self.batch_size)
        self._check(ids_B)
        self._step(ids_B, None if active is None else one_flag_for_each_row(active, self.batch_size, "active"))
        return self.scores

    def _step(self, ids: Tensor, active: Tensor | None) -> None:
        hidden = self._stream.step(ids.to(self.model.device), active).to(self._hidden.dtype)
        if active is not None:
            hidden = torch.where(active.to(hidden.device).unsqueeze(1), hidden, self._hidden)
        self._hidden = hidden

    @property
    def scores(self) -> Scores:
        """Scores of each row's next token, after all that was read; NaN for rows that have read nothing."""
        hidden = self._hidden
        head, tails = self._stream.head(hidden)
        return Scores(
            head,
            tails=tails,
            compute_tail=lambda i, rows: self._stream.softmax.tail(i, hidden[rows], tails[rows, i]),
            borders=self._stream.softmax.borders,
        )

    def reset(self, rows: Mask | None = None) -> None:
        """Forget what was read; nothing of it is left in memory.

        Args:
            rows: bool (B,), True for rows that forget; None: all.

        Raises:
            ValueError: rows that are no such mask; nothing has been forgotten then.
        """
        forget = torch.ones(self.batch_size, dtype=torch.bool)
        if rows is not None:
            forget = one_flag_for_each_row(rows, self.batch_size, "rows").cpu()
        self._stream.reset(forget)
        self._hidden = self._hidden.masked_fill(forget.to(self._hidden.device).unsqueeze(1), torch.nan)

    def _check(self, ids: Tensor) -> None:
        check_ids(ids, vocab_size=self.model.config.vocab_size or 0)

    def save(self, path: str | Path, *, note: Mapping[str, str] | None = None) -> None:
        """Write what was read as one file, a session, from which `load` goes on as if nothing had happened.

        The file is a safetensors file of n_layer x S x 2 x n_head x d_head numbers of the memory's type, where S is the sum of
        what the rows remember, at most `mem_len` each; besides, of 4 x d_model + 16 bytes per row, and some 170 per layer. Of
        models that are read again and again it is n_layer x S x d_model numbers, and 8 x `tgt_len` bytes more per row. It is
        written aside and renamed, so the path holds the old file or the new one; one process at a time may save there. The
        first call hashes the model's weights, about a second per gigabyte.

        Args:
            path: a file, which is replaced, or a new one in an existing directory.
            note: text to keep with it, such as a tokenizer's name; at most a megabyte.

        Raises:
            CheckpointError: the file cannot be written; what the path held before is intact.
        """
        save_session(Path(path), self._session(), note=note or {})

    def load(self, path: str | Path, *, accept: Callable[[Mapping[str, str]], object] | None = None) -> dict[str, str]:
        """Forget what was read, and take over a session that `save` wrote.

        The next numbers are those that the saving decoder would have computed; to the last bit, if both compile or neither
        does, on as many threads of the same processor. Nothing in the file is executed.

        Args:
            path: a session of the same weights, rows, memory and precision, in a regular file.
            accept: called with the note before anything is taken over; an error that it raises leaves the decoder as it was.

        Returns:
            The note.

        Raises:
            CheckpointError: no such file, a damaged one, or a session of another model or decoder, or one of another precision
                (numbers would differ even where its keys could be converted); the decoder is then as it was.
        """
        state, note = load_session(Path(path), self._session())
        if accept:
            accept(note)
        self.load_state_dict(state)
        return note

    def state_dict(self) -> dict[str, Tensor]:
        """Return copies of all that was read, from which this decoder, or one opened alike, can go on."""
        return {name: x.clone() for name, x in self._session().state.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Forget what was read, and go on from what `state_dict` returned, which stays as it is.

        Args:
            state: names and tensors.

        Raises:
            ValueError: it is of a decoder that was opened otherwise; nothing is taken over then.
        """
        rest = dict(state)
        hidden = rest.pop(_HIDDEN, None)
        if hidden is None or hidden.shape != self._hidden.shape:
            raise ValueError(f"the state is not that of a decoder of {self.batch_size} rows of this model")
        self._stream.load_state_dict(rest)
        self._hidden = hidden.to(self.model.device, copy=True)

    def _session(self) -> Session:
        state = {**self._stream.state_dict(), _HIDDEN: self._hidden}
        return Session(state, self.model, tgt_len=self.tgt_len, precision=self.precision)


def _segment_length(config: ModelConfig) -> int:
    """Return how much to read at once; a table of positions tells how long the segments were in training."""
    if config.longest_segment:
        return config.longest_segment
    trained = (config.max_klen or 0) - config.mem_len if isinstance(config, TransformerXLConfig) else 0
    return trained if config.counts_from_end and trained > 0 else _TGT_LEN


_TGT_LEN = 64
"""Long enough that reading a prompt is as fast as the processor multiplies, short enough to cost little memory."""

_HIDDEN = "last"
"""Name in a session of what each row's scores are computed of."""
