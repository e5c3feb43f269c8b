"""`Decoder`: a model with the memory of what it has read, fed token by token or text by text."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from transformer_xl.errors import Bounds, CheckpointError, ConfigError, counted
from transformer_xl.generation.fastest import Compile, open_fastest
from transformer_xl.generation.inputs import Ids, Mask, RowIds, batch_ids, integers, one_id_per_row, ragged_ids, row_mask
from transformer_xl.generation.scores import Scores
from transformer_xl.generation.session_file import LAST, Origin, RowState, SessionFormat, check_origin, model_sha256
from transformer_xl.kernels.device import InferencePrecision, Precision, PrecisionName, check_precision, choose_precision
from transformer_xl.model.base import LanguageModel, check_reads_on
from transformer_xl.model.softmax import check_ids
from transformer_xl.reading.stream import KeptKeys, Stream, open_stream

_TGT_LEN = 64
"""Long enough that reading a prompt is as fast as the processor multiplies, short enough to cost little memory."""


class Decoder:
    """Read streams with a memory of fixed size; a token costs the same however much was read before.

    Rows start, stop and reset independently. Every token sees exactly the `mem_len` tokens before it (with `same_length` the
    model's window), so it makes no difference how a text is cut into pieces. Weights must not change while a decoder is
    in use, and only one thread at a time may call it.

    Args:
        model: put in evaluation mode.
        batch_size: rows, each a stream of its own.
        mem_len: positions of memory; None: the model's.
        tgt_len: longest piece read at once; longer input is read in pieces. None: 64, with al_rfou the training's.
        precision: of weights and memory. int8 rounds the weights to 255 steps per output, and keys and values are bf16. auto:
            fp32 or bf16, whichever steps faster here; on a GPU, what it multiplies natively.
        compile: compile the reading of single tokens, which takes some seconds and needs a C++ compiler. auto: if
            `expected_tokens` would take more than 20 s without, and it turns out to be faster; never on a GPU, where each step
            is one CUDA graph of fused kernels.
        expected_tokens: about how many tokens will be read one by one.
        on_compile: called before something is compiled, to tell a person who waits.

    Attributes:
        reason: why precision and compilation are what they are.

    Raises:
        ConfigError: sizes below 1, a precision or compilation that is impossible here, or a model that does not read on.

    Example:
        >>> from transformer_xl import TransformerXL, TransformerXLConfig
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
        on_compile: Callable[[], object] = lambda: None,
    ) -> None:
        check_reads_on(model)
        for name, size in (("batch_size", batch_size), ("tgt_len", tgt_len)):
            Bounds(1, whole=True, optional=name == "tgt_len").check(name, size)
        check_precision(precision)
        if compile not in (True, False, "auto"):
            raise ConfigError(f"compile ({compile!r}) must be True, False or 'auto'")
        same_length = False if mem_len == 0 else None  # without memory there is no window
        self.model = model.eval().with_context(mem_len=mem_len, same_length=same_length, ext_len=0)
        self.mem_len, self.batch_size = self.model.mem_len, batch_size
        self.tgt_len = tgt_len or model.trained_length or _TGT_LEN
        if self.model.keeps_keys and self.mem_len > 0:
            self._stream, self.reason = open_fastest(
                lambda chosen: cast(KeptKeys, self._open(chosen)),
                precision,
                model.device,
                compile=compile,
                expected_tokens=expected_tokens,
                on_compile=on_compile,
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
            option = "precision (int8)" if precision == "int8" else "compile (True)"
            raise ConfigError(
                f"{option} needs keys that stay the same, and {self.model.described} with mem_len ({self.mem_len}) has "
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
        """Keys and values of what was read, and the frozen weights; None for models whose keys cannot be kept."""
        return self._stream if isinstance(self._stream, KeptKeys) else None

    @property
    def compiled(self) -> bool:
        """Whether single tokens are read by compiled code."""
        return self.kept is not None and self.kept.reader.compiled

    @property
    def n_bytes(self) -> int:
        """Bytes of memory and position keys, which do not grow; 0 for models whose keys cannot be kept."""
        return 0 if self.kept is None else self.kept.memory.n_bytes + self.kept.reader.n_bytes

    def feed(self, ids: RowIds) -> Tensor:
        """Read on, and score what may come next.

        Args:
            ids: integers (B, T), a tensor of the next T ≥ 1 tokens of each row; or a list of B lists of any lengths, in which
                an empty one leaves its row as it is. Rows of a list, or of an array, are read one after another, so that the
                numbers of a row depend only on that row, to the last bit.

        Returns:
            Scores (B, V) of the token after the last one, at least in fp32 (log-probabilities with an adaptive softmax); NaN
            for rows that have read nothing yet.

        Raises:
            TokenizerError: an id outside the vocabulary; nothing has been read then.
            ValueError: ids of another shape, or no integers; nothing has been read then.

        After an interrupt, a row may have read only a part of its ids: reset it, or load an earlier session.
        """
        return self.read(ids).full()

    def read(self, ids: RowIds) -> Scores:
        """Read on as `feed` does, and return scores that compute rare clusters only on demand."""
        if not isinstance(ids, Tensor):
            rows = ragged_ids(ids, self.batch_size)
            check_ids(torch.cat(rows), vocab_size=self.model.vocab_size)
            return self._read_rows(rows)
        ids_BT = batch_ids(ids, self.batch_size)
        check_ids(ids_BT, vocab_size=self.model.vocab_size)
        if ids_BT.shape[1] == 1:
            self._step(ids_BT[:, 0], None)
        elif self._stream.together():
            self._hidden = self._stream.advance(ids_BT.to(self.model.device)).to(self._hidden.dtype)
        else:
            return self._read_rows(list(ids_BT))
        return self.scores

    @torch.no_grad()
    def score(self, ids: RowIds) -> list[Tensor]:
        """Read on, and return how surprising each token was.

        A row goes on afterwards as if it had read its ids by `read`. For models whose keys cannot be kept it takes much longer
        than `read`, because they read a whole segment for every token.

        Args:
            ids: a list of B lists of integers of any lengths, as for `feed`, or a tensor (B, T); rows are read one by one.

        Returns:
            For each row fp32 (T,), nats of its ids given all that the row read before, on the CPU. The first id has a score,
            too; it is NaN if the row had read nothing.

        Raises:
            TokenizerError: an id outside the vocabulary; nothing has been read then.
            ValueError: ids of another shape, or no integers; nothing has been read then.
        """
        rows = ragged_ids(ids.cpu().numpy() if isinstance(ids, Tensor) else ids, self.batch_size)
        check_ids(torch.cat(rows), vocab_size=self.model.vocab_size)
        return [torch.cat([torch.zeros(0), *self._nats(row, own)]) for row, own in enumerate(rows)]

    def _nats(self, row: int, ids: Tensor) -> Iterator[Tensor]:
        if len(ids) == 1:
            scores = self.scores_of(row)
            self._step(ids.expand(self.batch_size), torch.arange(self.batch_size) == row)
            yield -scores.log_probability(ids)
            return
        for piece in ids.split(self.tgt_len) if len(ids) else ():
            yield -self._advance_scored(row, piece).log_probability(piece)

    def advance(self, row: int, ids: Ids, *, scored: bool = False) -> Scores | None:
        """Read some tokens, or one, of one row as a segment, so that a long text can be read a piece at a time.

        If all pieces but the last have `tgt_len` tokens, they give the same bits as the whole text at once.

        Args:
            row: from 0 on.
            ids: integers (T,), at most `tgt_len` of them if they are scored.
            scored: also return what the model expected in the place of each token; the row reads the same bits.

        Returns:
            Scores of T rows, one for each token, given all before it; NaN for the first token that the row reads. None if they
            are not asked for.

        Raises:
            TokenizerError: an id outside the vocabulary; nothing has been read then.
            ValueError: a row that does not exist, or ids that are no integers or too many; nothing has been read then.
        """
        self._check_row(row)
        piece = integers(ids, "ids")
        check_ids(piece, vocab_size=self.model.vocab_size)
        if scored and len(piece) > self.tgt_len:
            raise ValueError(f"a piece of {len(piece)} tokens is longer than tgt_len ({self.tgt_len}); divide it")
        if scored:
            return self._advance_scored(row, piece)
        self._hidden = self._hidden.clone()  # earlier scores keep what they were made of
        self._advance(row, piece)
        return None

    def _advance_scored(self, row: int, piece: Tensor) -> Scores:
        self._hidden = self._hidden.clone()
        before = self._hidden[row : row + 1].clone()
        after = self._stream.read(piece.unsqueeze(0).to(self.model.device), rows=slice(row, row + 1))[0].to(before.dtype)
        self._hidden[row] = after[-1]
        return self._scores_of(torch.cat([before, after[:-1]]))

    def _advance(self, row: int, ids: Tensor) -> None:
        self._hidden[row] = self._stream.advance(ids.unsqueeze(0).to(self.model.device), rows=slice(row, row + 1))[0]

    def _read_rows(self, rows: Sequence[Tensor]) -> Scores:
        """Read int64 (T,) in each row, one row after another, but single tokens together."""
        alone = [len(own) == 1 for own in rows]
        if any(alone):  # whether a row steps depends only on its own tokens, too
            self._step(torch.tensor([int(own[0]) if len(own) else 0 for own in rows]), torch.tensor(alone))
        self._hidden = self._hidden.clone()  # earlier scores keep what they were made of
        for row, own in enumerate(rows):
            if len(own) > 1:
                self._advance(row, own)
        return self.scores

    def step(self, ids: Ids, *, active: Mask | None = None) -> Scores:
        """Read one token in each row: the fast path, in shapes that never change.

        Args:
            ids: integers (B,).
            active: bool (B,), rows that read; the others stay as they are. None: all.

        Returns:
            Scores of each row's next token.

        Raises:
            TokenizerError: an id outside the vocabulary; nothing has been read then.
            ValueError: ids of another shape, or no integers, or no such mask; nothing has been read then.
        """
        ids_B = one_id_per_row(ids, self.batch_size)
        check_ids(ids_B, vocab_size=self.model.vocab_size)
        self._step(ids_B, None if active is None else row_mask(active, self.batch_size, "active"))
        return self.scores

    def _step(self, ids: Tensor, active: Tensor | None) -> None:
        self._hidden = self._stream.step(ids.to(self._hidden.device), active, self._hidden).to(self._hidden.dtype)

    @property
    def scores(self) -> Scores:
        """Scores of each row's next token, after all that was read; NaN for rows that have read nothing."""
        return self._scores_of(self._hidden)

    def scores_of(self, row: int) -> Scores:
        """Return the scores of one row's next token, as scores of a single row."""
        return self._scores_of(self._hidden[row : row + 1].clone())

    def _scores_of(self, hidden: Tensor) -> Scores:
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
            ValueError: rows that are not such a mask; nothing has been forgotten then.
        """
        forget = torch.ones(self.batch_size, dtype=torch.bool)
        if rows is not None:
            forget = row_mask(rows, self.batch_size, "rows").cpu()
        self._stream.reset(forget)
        self._hidden = self._hidden.masked_fill(forget.to(self._hidden.device).unsqueeze(1), torch.nan)

    def take(self, row: int) -> RowState:
        """Return a copy of what one row has read: the positions that a later token can see, and no others.

        Args:
            row: from 0 on.

        Returns:
            A state for `put`; about n_layer x n x 2 x n_head x d_head numbers of the memory's type, with n at most `mem_len`.
            It names the model by a hash of its weights. The first call computes that in about a second per gigabyte.

        Raises:
            ValueError: a row that does not exist.
        """
        self._check_row(row)
        return RowState(self._take(row), self._terms(), model_sha256(self.model))

    def _take(self, row: int) -> dict[str, Tensor]:
        tensors = self._stream.take(row)
        if LAST in tensors:
            raise ValueError(f"a tensor of the model's memory cannot be called {LAST!r}; give it another name")
        return {**tensors, LAST: self._hidden[row].clone()}

    def put(self, row: int, state: RowState) -> None:
        """Let a row forget what it has read, and go on from what `take` returned.

        It goes on as the row that the state came from, to the last bit. The state may come from another row, and from another
        decoder of the same model and settings. Between decoders with different numbers of rows, pieces of text still
        give the same bits, but single tokens and scores are products of all rows, so a row's place may change how sums are
        rounded.

        Args:
            row: from 0 on.
            state: stays as it is.

        Raises:
            ValueError: a row that does not exist, or a state of another model or of a decoder with other settings; the row
                is then as it was.
        """
        self._check_row(row)
        check_origin(Origin(state.model, state.terms), Origin(model_sha256(self.model), self._terms()))
        self._check_state(state.tensors)
        rest, hidden = dict(state.tensors), self._hidden.clone()
        hidden[row] = rest.pop(LAST)
        self._stream.put(row, rest)
        self._hidden = hidden

    def reorder(self, sources: Ids) -> None:
        """Let each row go on from what another row has read, all at once; much faster than `take` and `put`.

        Args:
            sources: integers (B,), for each row the one that it goes on from, itself if it stays; several may go on from one.

        Raises:
            ValueError: not one row that exists for each row; all are then as they were.
        """
        rows_B = one_id_per_row(sources, self.batch_size).cpu()
        for row in rows_B.tolist():
            self._check_row(row)
        self._stream.reorder(rows_B)
        self._hidden = self._hidden[rows_B.to(self._hidden.device)]

    def n_rewindable(self, row: int) -> int:
        """Return by how many tokens a row can go back now; see `rewind`."""
        self._check_row(row)
        return self._stream.n_rewindable(row)

    def rewind(self, row: int, n: int) -> None:
        """Let a row go back by some tokens, exactly: it reads on as if it had never read them.

        Beyond the memory a ring keeps `slots` - `mem_len` - 1 positions (at least `tgt_len`), so a row goes back by that many
        tokens at most, and by no more than it has read since it was loaded or put. A row that has not read more than its ring
        holds can go back to its beginning, but not with a shift or n-grams. A model whose keys cannot be kept, such as an LSTM,
        cannot go back at all: take the row's state before, and put it back.

        The row's scores are unknown (NaN) until it reads on; if you need them, go back one token more and read it again.

        Args:
            row: from 0 on.
            n: tokens.

        Raises:
            ConfigError: more tokens than the row can go back; it is then as it was.
            ValueError: a row that does not exist.
        """
        most = self.n_rewindable(row)
        if not 0 <= n <= most:
            raise ConfigError(
                f"row {row} cannot go back by {counted(n, 'token')}, {most} are possible; "
                f"take(row) before reading, and put it back"
            )
        self._stream.rewind(row, n)
        if n:
            self._hidden = self._hidden.index_fill(0, torch.tensor([row], device=self._hidden.device), torch.nan)

    def _terms(self) -> dict[str, Any]:
        """Return what must be equal in a decoder that goes on with a row; JSON."""
        model = self.model
        terms = {"mem_len": model.mem_len, "tgt_len": self.tgt_len, "precision": self.precision, "clamp_len": model.clamp_len}
        terms |= {"same_length": model.same_length, "ext_len": model.ext_len, "window": model.window}
        return terms | {"n_slot": self.kept.memory.n_slot if self.kept else None}

    def _check_state(self, tensors: dict[str, Tensor]) -> None:
        """Refuse tensors that are not the state of a row."""
        rest = dict(tensors)
        last = rest.pop(LAST, None)
        if last is None or last.dtype != self._hidden.dtype or last.shape != self._hidden.shape[1:]:
            raise ValueError(f"tensor 'last' should be {self._hidden.dtype} {tuple(self._hidden.shape[1:])}")
        self._stream.check(rest)

    def _check_row(self, row: int) -> None:
        if not 0 <= row < self.batch_size:
            raise ValueError(f"row ({row}) must be one of 0 … {self.batch_size - 1}")

    def save(self, path: str | Path, *, note: Mapping[str, str] | None = None) -> None:
        """Write what was read as one file, a session, from which `load` goes on as if nothing had happened.

        The safetensors file has n_layer x S x 2 x n_head x d_head numbers of the memory's type, where S is the sum of what the
        rows remember, at most `mem_len` each, and also 4 x d_model + 16 bytes per row and some 170 per layer. For models whose
        keys cannot be kept, it has n_layer x `mem_len` x d_model numbers and 8 x `tgt_len` bytes per row. It is written under
        another name and renamed, so the path holds the old file or the new one; only one process at a time may save there. The
        first call hashes the model's weights, which takes about a second per gigabyte.

        Args:
            path: a file, which is replaced, or a new one in an existing directory.
            note: text to keep with it, such as a tokenizer's name.

        Raises:
            CheckpointError: the note is not text.
            OSError: the file cannot be written, or the path is a device or pipe; what it held before is intact.
        """
        self.session_format().save(path, [self.take(row) for row in range(self.batch_size)], note=note)

    def load(self, path: str | Path, *, accept: Callable[[Mapping[str, str]], object] | None = None) -> dict[str, str]:
        """Forget what was read, and load a session that `save` wrote, with as many rows or fewer; other rows begin anew.

        The next numbers are those that the saving decoder would have computed. They agree to the last bit if both decoders
        compile or neither does, on as many threads of the same processor. Nothing in the file is executed.

        Args:
            path: a session of the same weights, memory and precision.
            accept: called with the note before anything is loaded; an error that it raises leaves the decoder as it was.

        Returns:
            The note.

        Raises:
            OSError: the file cannot be read; the decoder is then as it was.
            CheckpointError: a damaged file, or a session of another model, decoder or precision (numbers would
                differ even if its keys could be converted); the decoder is then as it was.
        """
        rows, note = self.session_format().load(path)
        if len(rows) > self.batch_size:
            raise CheckpointError(
                f"session {str(path)!r} has {len(rows)} rows, more than this decoder ({self.batch_size}); "
                f"open it with Decoder(model, batch_size={len(rows)})"
            )
        if accept:
            accept(note)
        self.reset()
        for row, state in enumerate(rows):
            self.put(row, state)
        return note

    def session_format(self) -> SessionFormat:
        """Return what writes and reads files of rows of this decoder; other threads may use it while the decoder goes on."""
        empty = {name: x.narrow(1, 0, 0) if name in self._stream.by_position else x for name, x in self._take(0).items()}
        own = RowState({name: x.clone() for name, x in empty.items()}, self._terms(), model_sha256(self.model))
        return SessionFormat(own, self._stream.by_position, self._check_state)
