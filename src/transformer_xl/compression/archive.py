"""Compressed files.

    "TXL1" · length of the header (4 bytes) · header (sealed JSON) · what the coder wrote · SHA-256 of all before (32 bytes)

Both sides must compute the same numbers to the last bit. So the header says what they depend on, and has a hash of the first
ones; `decompress` refuses a file if it finds others, before it writes anything. What is being written lies in OUT.part, and
what is known of the text in OUT.state, from which the same call goes on.
"""

import hashlib
import os
import platform
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Annotated, NoReturn

import numpy as np
import torch
from pydantic import Field

from transformer_xl.compression.codec import Bytes, Codec
from transformer_xl.compression.coder import Decoder, Encoder
from transformer_xl.config import OptimConfig
from transformer_xl.console import Bar, warn
from transformer_xl.errors import CheckpointError, ConfigError, CorpusError, one_line
from transformer_xl.files import canonical_json, locked, stray_name, sync_directory
from transformer_xl.generation.session_file import model_sha256
from transformer_xl.model.language_model import LanguageModel
from transformer_xl.model.transformer_xl import TransformerXL
from transformer_xl.model_config import TransformerXLConfig
from transformer_xl.seals import differences, seal, summary, unseal
from transformer_xl.settings import Natural, Settings
from transformer_xl.tensor_file import open_tensors, write_sealed_tensors
from transformer_xl.training.environment import computing_with, deterministic
from transformer_xl.untrusted import open_regular, parse_json, read_at
from transformer_xl.version import __version__

MODEL = TransformerXLConfig(
    vocab_size=256, n_layer=3, d_model=224, n_head=1, d_head=64, d_inner=512, mem_len=64, ngram_rows=(2176, 2176), dropout=0.0,
    pre_lnorm=True, final_norm=True, activation="relu2", shift="averages",
)  # fmt: skip
OPTIM = OptimConfig(
    optimizer="muon", lr=8e-3, adamw_lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1, clip=1.0,
    schedule="linear", warmup_steps=20, min_lr_ratio=0.2,
)  # fmt: skip
SEED, TGT_LEN, AGAIN = 0, 16, 32
MOST_LANES, LANE_BYTES = 16, 2048
"""A text has up to so many lanes, each of at least so many bytes."""

SAVE_SECONDS = 120.0
_MAGIC, _DIGEST, _CHUNK, _MOST_HEADER = b"TXL1", 32, 2**16, 2**16
Stopped = Callable[[], bool]


class Header(Settings):
    """What a compressed file says of itself."""

    size: Natural  # bytes of the text
    sha256: str  # of the text
    lanes: Annotated[int, Field(ge=1, le=MOST_LANES)]
    has_model: bool  # somebody gave one
    learns: bool
    numbers: dict[str, str]  # what they depend on


@dataclass(frozen=True)
class Setup:
    """With what a text is compressed.

    Attributes:
        model: predicts bytes; None: a new one.
        learns: the model learns while it reads.
    """

    model: LanguageModel | None = None
    learns: bool = True

    def codec(self, n_lane: int) -> Codec:
        """Return a codec at the beginning of a text."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(SEED)
            model = self.model or TransformerXL(MODEL)
        return Codec(model, n_lane, tgt_len=TGT_LEN, optim=OPTIM if self.learns else None, n_again=AGAIN)

    def numbers(self, n_lane: int) -> dict[str, str]:
        """Return what the numbers depend on, and a hash of the first ones, which shows what nobody has thought of."""
        codec, encoder = self.codec(n_lane), Encoder()
        found = {"transformer_xl": __version__, "torch": torch.__version__, "numpy": np.__version__}
        found["processor"] = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
        found["model"] = model_sha256(codec.model)
        text = np.random.default_rng(0).integers(97, 123, (n_lane, 2 * TGT_LEN)).astype(np.uint8)
        for begin in (0, TGT_LEN):
            codec.code(encoder, text[:, begin : begin + TGT_LEN], [n_lane] * TGT_LEN)
            codec.learn(lambda first, n: text[:, first : first + n], 0.0)
        digest = hashlib.sha256(encoder.written)
        for weight in codec.model.state_dict().values():
            digest.update(weight.numpy().data)
        return found | {"first numbers": digest.hexdigest()}


@dataclass(frozen=True)
class _Lanes:
    """A text in a file, cut into lanes of one length; the last ones may be shorter."""

    path: Path
    file: FileIO
    size: int
    n_lane: int

    @property
    def length(self) -> int:
        """Bytes of the first lane."""
        return -(-self.size // self.n_lane)

    def n_own(self, place: int) -> int:
        """Return how many lanes have a byte at a place; they are the first ones."""
        return -(-(self.size - place) // self.length)

    def read(self, begin: int, n: int) -> Bytes:
        """Return bytes (B, n) from a place on, zeros where lanes have ended."""
        found = np.zeros((self.n_lane, n), np.uint8)
        for lane in range(self.n_lane):
            first = lane * self.length + begin
            own = read_at(self.path, self.file, first, max(min(n, self.size - first), 0))
            found[lane, : len(own)] = np.frombuffer(own, np.uint8)
        return found

    def write(self, begin: int, text: Bytes) -> None:
        """Write bytes (B, n) from a place on."""
        for lane, own in enumerate(text):
            first = lane * self.length + begin
            self.file.seek(first)
            self.file.write(own[: max(self.size - first, 0)].tobytes())


class _Work(ExitStack):
    """An output that grows beside its place, held by one process, and a codec that goes on where it was stopped."""

    def __init__(self, out: Path, header: Header, setup: Setup, does: str) -> None:
        super().__init__()
        self.out, self.job = out, {"does": does, **header.model_dump()}
        self.part, self._state = (out.with_name(f"{out.name}.{name}") for name in ("part", "state"))
        self.enter_context(locked(out.with_name(f"{out.name}.lock"), on_busy=self._refuse))
        self.file = self.enter_context(FileIO(os.open(self.part, os.O_RDWR | os.O_CREAT, 0o666), "r+b"))
        self.coder: list[int] | None = None  # state that was saved; None: nothing
        self.written = 0
        if self._state.exists():
            codec = setup.codec(header.lanes)
            try:
                self._restore(codec)
                self.codec = codec
                return
            except (CheckpointError, OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
                warn(f"'{self._state}' is of no use, so this begins anew: {one_line(error)}")
                self._state.unlink(missing_ok=True)  # what it belongs to is overwritten from here on
        self.codec = setup.codec(header.lanes)

    def _refuse(self) -> NoReturn:
        raise ConfigError(f"another process writes '{self.out}'; wait for it, or choose another place")

    def _restore(self, codec: Codec) -> None:
        with open_tensors(self._state) as saved:
            about = parse_json(saved.metadata["about"].encode())
            if about["job"] != self.job or self.part.stat().st_size < about["written"]:
                raise ValueError("it is of another text, model or version")
            codec.restore(saved.load(), about["place"])
        self.coder, self.written = about["coder"], about["written"]

    def run(self, coder: Encoder | Decoder, text: _Lanes, bar: Bar, stopped: Stopped) -> bool:
        """Code segment by segment; return whether it came to the end."""
        what = "compressing" if isinstance(coder, Encoder) else "decompressing"
        bar.begin(what, text.size, done=self.codec.place * text.n_lane)
        saved = time.monotonic()
        while (begin := self.codec.place) < text.length:
            end = min(begin + TGT_LEN, text.length)
            own = [text.n_own(place) for place in range(begin, end)]
            if isinstance(coder, Encoder):
                self.codec.code(coder, text.read(begin, end - begin), own)
                self.file.write(coder.written)
                coder.written.clear()
                bar.note(f"{8 * self.file.tell() / min(end * text.n_lane, text.size):.3f} bits per byte")
            else:
                text.write(begin, self.codec.code(coder, None, own))
            bar.advance(sum(own))
            if end == text.length:
                break
            self.codec.learn(text.read, begin / text.length)
            if (stops := stopped()) or time.monotonic() - saved > SAVE_SECONDS:
                self.save(coder.state, self.file.tell() if isinstance(coder, Encoder) else text.size)
                saved = time.monotonic()
            if stops:
                return False
        return True

    def save(self, coder: list[int], written: int) -> None:
        """Save the state between two segments, whole or not at all."""
        os.fsync(self.file.fileno())
        about = {"job": self.job, "place": self.codec.place, "coder": coder, "written": written}
        tensors, stray = self.codec.state(), stray_name(self._state)
        stray.unlink(missing_ok=True)
        content = {name: (x.dtype, x.shape) for name, x in tensors.items()}
        write_sealed_tensors(stray, content, tensors.__getitem__, metadata={"about": canonical_json(about).decode()})
        stray.replace(self._state)

    def finish(self) -> None:
        """Put the output into its place."""
        os.fsync(self.file.fileno())
        self.part.replace(self.out)
        self._state.unlink(missing_ok=True)
        sync_directory(self.out.absolute().parent)


def compress(source: Path, out: Path, setup: Setup, *, bar: Bar, stopped: Stopped = lambda: False) -> int | None:
    """Compress a file.

    Args:
        source: any regular file.
        out: where the result goes, whole or not at all.
        setup: with what.
        bar: shows progress in bytes.
        stopped: whether to save the state and to return after the present segment; the same call goes on.

    Returns:
        Bytes of the result; None: it was stopped.

    Raises:
        CheckpointError: the source cannot be read.
        ConfigError: another process writes to `out`.
        CorpusError: the source has changed while it was read.
    """
    file, size = open_regular(source)
    with file, _computing():
        sha256, n_lane = _sha256(file), max(1, min(MOST_LANES, size // LANE_BYTES))
        facts = {"has_model": setup.model is not None, "learns": setup.learns}
        header = Header(size=size, sha256=sha256, lanes=n_lane, numbers=setup.numbers(n_lane), **facts)
        with _Work(out, header, setup, "compress") as work:
            encoder = Encoder(work.coder)
            work.file.truncate(work.written)
            work.file.seek(work.written)
            if work.coder is None:
                sealed = seal(header.model_dump())
                work.file.write(_MAGIC + len(sealed).to_bytes(4, "little") + sealed)
            if not work.run(encoder, _Lanes(source, file, size, n_lane), bar, stopped):
                return None
            work.file.write(encoder.written + encoder.end())
            if _sha256(file) != sha256:
                raise CorpusError(f"'{source}' has changed while it was read; compress it again")
            work.file.write(bytes.fromhex(_sha256(work.file)))
            work.finish()
            return out.stat().st_size


def decompress(
    source: Path, out: Path, model: LanguageModel | None = None, *, bar: Bar, stopped: Stopped = lambda: False
) -> int | None:
    """Decompress what `compress` wrote; the arguments are like those of it.

    Returns:
        Bytes of the text; None: it was stopped.

    Raises:
        CheckpointError: the file is not of this kind, was cut or altered, or other bytes come out than went in.
        ConfigError: it needs a model, another one or none; other numbers are computed here; there is no room for the text;
            another process writes to `out`.
    """
    file, size = open_regular(source)
    with file:
        header, begin = _open(source, file, size)
        if header.has_model != (model is not None):
            what = (
                "was compressed with a model; name it by --model" if header.has_model else "needs no model; leave --model out"
            )
            raise ConfigError(f"'{source}' {what}")
        if header.size > shutil.disk_usage(out.absolute().parent).free:
            raise ConfigError(f"'{source}' holds {header.size:,} bytes, and the disk has no room for them; free disk space")
        setup = Setup(model, header.learns)
        with _computing():
            if other := list(differences(header.numbers, setup.numbers(header.lanes))):
                raise ConfigError(
                    f"'{source}' cannot be decompressed here, where other numbers are computed: {summary(other)}; "
                    "use the machine, versions and model of its compression"
                )
            with _Work(out, header, setup, "decompress") as work:
                place = begin + (work.coder[-1] if work.coder else 0)
                decoder = Decoder(_bytes(file, place, size - _DIGEST), work.coder)
                work.file.truncate(header.size)
                if not work.run(decoder, _Lanes(work.part, work.file, header.size, header.lanes), bar, stopped):
                    return None
                if _sha256(work.file) != header.sha256:
                    raise CheckpointError(f"other bytes come out of '{source}' than went in (SHA-256), so nothing is written")
                work.finish()
                return header.size


@contextmanager
def _computing() -> Iterator[None]:
    """Compute with one thread: for so few bytes at a time a second one gains nothing, and waits for busy cores."""
    with computing_with(1), deterministic(True):
        yield


def _open(source: Path, file: FileIO, size: int) -> tuple[Header, int]:
    """Return the header of a compressed file, and where the coder's bytes begin; CheckpointError: a byte of it has changed."""
    least = len(_MAGIC) + 4 + _DIGEST
    if size < least or read_at(source, file, 0, len(_MAGIC)) != _MAGIC:
        raise CheckpointError(f"'{source}' is no file that txl compress wrote, or only a part of one; name one")
    if bytes.fromhex(_sha256(file, size - _DIGEST)) != read_at(source, file, size - _DIGEST, _DIGEST):
        raise CheckpointError(f"'{source}' was cut or altered (SHA-256); restore it from a copy")
    length = int.from_bytes(read_at(source, file, len(_MAGIC), 4), "little")
    try:
        if length > min(_MOST_HEADER, size - least):
            raise ValueError(f"it has {length:,} bytes")
        return Header(**unseal(read_at(source, file, len(_MAGIC) + 4, length))), len(_MAGIC) + 4 + length
    except ValueError as error:
        raise CheckpointError(f"the header of '{source}' is not sound: {error}; it may be of another version") from None


def _bytes(file: FileIO, begin: int, end: int) -> Iterator[int]:
    """Yield the bytes of a file, which are read chunk by chunk."""
    file.seek(begin)
    while begin < end and (chunk := file.read(min(_CHUNK, end - begin))):
        begin += len(chunk)
        yield from chunk


def _sha256(file: FileIO, size: int | None = None) -> str:
    """Return the hash of a file or of its beginning, and stand after it."""
    left = file.seek(0, os.SEEK_END) if size is None else size
    digest, _ = hashlib.sha256(), file.seek(0)
    while left > 0 and (chunk := file.read(min(_CHUNK, left))):
        digest.update(chunk)
        left -= len(chunk)
    return digest.hexdigest()
