"""Bytes to bits and back, with a model that learns while it reads.

A text is cut into B lanes, which are read side by side. Both sides do the same: predict the next byte of each lane, code its
bits, read it. After every T bytes of each lane the weights take a step on their nats, and then some on earlier bytes.

Shapes: B lanes, T bytes of a segment.
"""

import copy
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from transformer_xl.compression.coder import Decoder, Encoder
from transformer_xl.compression.counting import BitMixer
from transformer_xl.config import OptimConfig
from transformer_xl.model.language_model import LanguageModel
from transformer_xl.model.memory import Memory
from transformer_xl.reading.stream import open_stream
from transformer_xl.training.optim import Optimizers, Schedule, finite_norm

Bytes = NDArray[np.uint8]
Read = Callable[[int, int], Bytes]
"""Returns the bytes (B, n) at n places of all lanes, from a first place on."""


class Codec:
    """Codes the segments of a text one after another.

    Args:
        model: of bytes; a copy learns if `optim` is given.
        n_lane: B.
        tgt_len: T.
        optim: how it learns; None: its weights stay as they are.
        n_again: with each segment it also learns from so many bytes of each lane that came at any time before.
    """

    def __init__(self, model: LanguageModel, n_lane: int, *, tgt_len: int, optim: OptimConfig | None, n_again: int) -> None:
        self.model = copy.deepcopy(model).eval().requires_grad_(optim is not None)
        self.n_lane, self.tgt_len, self.optim, self.n_again = n_lane, tgt_len, optim, n_again
        self.mixer = BitMixer(n_lane)
        self.stream = open_stream(self.model, n_lane, tgt_len=1, token_by_token=True)
        self.mems: Memory = self.model.init_mems(n_lane)
        self.optimizers = None if optim is None else Optimizers(self.model, optim)
        self.place = 0  # bytes of each lane that are read
        self._last = torch.zeros(n_lane, dtype=torch.int64)

    @torch.no_grad()
    def code(self, coder: Encoder | Decoder, text: Bytes | None, own: Sequence[int]) -> Bytes:
        """Code the next bytes of all lanes, and return them.

        Args:
            coder: an encoder or a decoder.
            text: these bytes, (B, T); None: the decoder finds them out.
            own: for each place the number of lanes that have a byte there, the first ones; the others have ended and get zeros.
        """
        found = np.zeros((self.n_lane, len(own)), np.uint8)
        for t, n in enumerate(own):
            scores = self.stream.softmax.logits(self.stream.step(self._last))
            self.mixer.begin(scores.double().softmax(-1).numpy())
            for place in range(7, -1, -1):
                known = None if text is None else (text[:n, t] >> place & 1).tolist()
                bits = np.zeros(self.n_lane, np.int64)
                bits[:n] = coder.code(self.mixer.probability()[:n].tolist(), known)
                self.mixer.learn(bits)
            found[:, t] = self.mixer.end()
            self._last = torch.from_numpy(found[:, t].astype(np.int64))
        return found

    def learn(self, read: Read, progress: float) -> None:
        """Learn from the segment (B, T) that was coded last, and from an earlier one.

        Args:
            read: returns any bytes up to here.
            progress: share of the text before the segment, on which the learning rate depends.
        """
        begin, self.place = self.place, self.place + self.tgt_len
        if self.optimizers is None or self.optim is None:
            return
        nats, mems = self._nats(read, begin, self.tgt_len, self.mems)
        if (n := self.place - self.n_again) > 0:
            again = int(np.random.default_rng(self.place).integers(n))
            nats = nats + self._nats(read, again, self.n_again, None)[0]
        nats.backward()
        if finite_norm(self.model.parameters(), self.optim.clip)[1]:
            self.optimizers.step(Schedule(self.optim).factor(begin // self.tgt_len, progress))
            self.mems = mems
        self.optimizers.zero_grad()
        self.stream.refresh()

    def _nats(self, read: Read, begin: int, n: int, mems: Memory | None) -> tuple[Tensor, Memory]:
        """Return the mean nats of a segment of all lanes, and the memory after it."""
        text = torch.from_numpy(read(max(begin - 1, 0), n + (begin > 0)).astype(np.int64))
        ids = F.pad(text, (n + 1 - text.shape[1], 0))[:, :-1]  # nothing stands before the first byte
        out = self.model(ids, mems=mems, labels=text[:, -n:])
        assert out.nll is not None
        return out.nll.mean(), out.mems

    def state(self) -> dict[str, Tensor]:
        """Return all that has changed, for `restore`; the tensors are no copies."""
        parts: dict[str, Mapping[str, Tensor]] = {"counts": self.mixer.state(), "last": {"byte": self._last}}
        parts |= {f"row{row}": self.stream.take(row) for row in range(self.n_lane)}
        if self.optimizers:
            parts |= {"model": self.model.state_dict(), "mems": self.mems.state_dict()}
            parts["optimizer"] = self.optimizers.state_tensors()
        return {f"{part}.{name}": x for part, tensors in parts.items() for name, x in tensors.items()}

    def restore(self, saved: Mapping[str, Tensor], place: int) -> None:
        """Go on after `place` bytes of each lane from what `state` returned; ValueError or KeyError: it is of another codec."""

        def part(name: str) -> dict[str, Tensor]:
            return {key.partition(".")[2]: x for key, x in saved.items() if key.partition(".")[0] == name}

        self.place, self._last = place, saved["last.byte"]
        for name, own in self.mixer.state().items():
            own.copy_(saved[f"counts.{name}"])
        if self.optimizers:
            self.model.load_state_dict(part("model"))
            self.optimizers.load_state_tensors(part("optimizer"))
            self.mems = type(self.mems).from_state_dict(part("mems"))
            self.stream.refresh()
        for row in range(self.n_lane):
            self.stream.put(row, part(f"row{row}"))
