"""Sessions are isolated: whatever is done to the rows of a decoder, each says what its own text alone would make it say.

A random sequence of everything that a decoder can be told is followed by three others:

- *fresh*: a new decoder of one row that reads the row's whole text since its last reset, at once; at most 1e-5 away;
- *shadow*: the same calls, but other tokens in all rows except one, the watched one; not a bit away;
- *alone*: only the calls that bring something for the watched row, with nothing in the others; not a bit away, for lists and
  steps. (Tensors of several tokens are read by one product for all rows, which may round otherwise than one for a row.)
"""

import copy
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test
from torch import Tensor

from tests.helpers import assert_close, examples, tiny_model
from transformer_xl.errors import TokenizerError
from transformer_xl.generation.decoder import Decoder
from transformer_xl.model.transformer_xl import TransformerXL
from transformer_xl.reading.stream import KeptKeys

MODELS: dict[str, dict[str, Any]] = {
    "paper": {},
    "adaptive": {"cutoffs": (4, 9), "div_val": 2, "same_length": True, "clamp_len": 3},
    "shaw": {"attention": "shaw", "max_klen": 4, "pre_lnorm": True},
    "rotary": {"attention": "rotary"},
    "alibi": {"attention": "alibi"},
    "zeros": {"zero_first_memory": True},
    "vaswani": {"attention": "vaswani"},
    "no memory": {"mem_len": 0},
}
B = 3
SEEDS = st.integers(0, 2**32)
FLAGS = st.lists(st.booleans(), min_size=B, max_size=B)


@cache
def model_of(name: str) -> TransformerXL:
    torch.manual_seed(0)
    return tiny_model(**MODELS[name])


def tokens(seed: int, *shape: int) -> Tensor:
    return torch.randint(0, 13, shape, generator=torch.Generator().manual_seed(seed))


class Sessions(RuleBasedStateMachine):
    """Rows of one decoder, and what each of them has been given."""

    n_calls = 0
    """Of all sequences together."""

    def __init__(self) -> None:
        super().__init__()
        self.n_own_calls = 0
        self.directory = tempfile.TemporaryDirectory()
        self.texts: list[list[int]] = [[] for _ in range(B)]
        self.broken = [False] * B
        self.is_exact = True
        self.saved: list[dict[str, Any]] = []

    def teardown(self) -> None:
        self.directory.cleanup()

    @initialize(name=st.sampled_from(sorted(MODELS)), watched=st.integers(0, B - 1), tgt_len=st.integers(1, 9))
    def begin(self, name: str, watched: int, tgt_len: int) -> None:
        self.model, self.watched, self.tgt_len = model_of(name), watched, tgt_len
        self.decoder, self.shadow, self.alone = (self.new() for _ in range(3))
        self.only = torch.arange(B) == watched

    def new(self, batch_size: int = B) -> Decoder:
        return Decoder(self.model, batch_size=batch_size, tgt_len=self.tgt_len)

    @rule(lengths=st.lists(st.integers(0, 7), min_size=B, max_size=B).filter(any), seed=SEEDS)
    def feed_lists(self, lengths: list[int], seed: int) -> None:
        ids = tokens(seed, B, 7)
        lists, others = ([x[:n].tolist() for x, n in zip(source, lengths, strict=True)] for source in (ids, self.other(ids)))
        self.decoder.feed(lists)
        self.shadow.feed(others)
        own = lists[self.watched]
        if own:
            self.alone.feed([own if row == self.watched else [] for row in range(B)])
        self.check(lists)

    @rule(tgt_len=st.integers(1, 12), seed=SEEDS)
    def feed_tensor(self, tgt_len: int, seed: int) -> None:
        ids = tokens(seed, B, tgt_len)
        self.decoder.feed(ids)
        self.shadow.feed(self.other(ids))
        if tgt_len == 1:
            self.alone.step(ids[:, 0], active=self.only)
        self.is_exact = self.is_exact and tgt_len == 1
        self.check(ids.tolist())

    @rule(active=st.none() | FLAGS, seed=SEEDS)
    def step(self, active: list[bool] | None, seed: int) -> None:
        ids, mask = tokens(seed, B), torch.ones(B, dtype=torch.bool) if active is None else torch.tensor(active)
        self.decoder.step(ids, active=None if active is None else mask)
        self.shadow.step(self.other(ids), active=None if active is None else mask)
        if mask[self.watched]:
            self.alone.step(ids, active=self.only)
        self.check([[int(own)] if reads else [] for own, reads in zip(ids, mask, strict=True)])

    @rule(forget=st.none() | FLAGS)
    def reset(self, forget: list[bool] | None) -> None:
        rows = torch.ones(B, dtype=torch.bool) if forget is None else torch.tensor(forget)
        for decoder in (self.decoder, self.shadow):
            decoder.reset(None if forget is None else rows)
        self.alone.reset(rows)
        for row in rows.nonzero().flatten().tolist():
            self.texts[row], self.broken[row] = [], False
        self.is_exact = self.is_exact or bool(rows[self.watched])
        self.check([[]] * B)
        if isinstance(self.decoder._stream, KeptKeys) and not self.model.config.zero_first_memory:
            memory = self.decoder._stream.memory
            assert all(x[:, rows].count_nonzero() == 0 for x in (*memory.keys, *memory.values)), "something is left"

    @precondition(lambda self: isinstance(self.decoder._stream, KeptKeys))
    @rule(row=st.integers(0, B - 1), wrong=st.sampled_from([float("nan"), float("inf")]))
    def break_row(self, row: int, wrong: float) -> None:
        """A row goes wrong; no other may, and it heals when it is reset."""
        streams = self.decoder._stream
        assert isinstance(streams, KeptKeys)
        for x in (*streams.memory.keys, *streams.memory.values):
            x[:, row] = wrong
        self.broken[row] = True
        self.check([[]] * B)

    @rule(seed=SEEDS, row=st.integers(0, B - 1), wrong=st.sampled_from([-1, 13]))
    def feed_what_is_no_token(self, seed: int, row: int, wrong: int) -> None:
        lists = tokens(seed, B, 4).tolist()
        lists[row][-1] = wrong
        for ids in (lists, torch.tensor(lists)):
            with pytest.raises(TokenizerError, match="outside the vocabulary"):
                self.decoder.feed(ids)
        self.check([[]] * B)

    @rule()
    def save(self) -> None:
        folder = Path(self.directory.name) / str(len(self.saved))
        folder.mkdir()
        for name in ("decoder", "shadow", "alone"):
            getattr(self, name).save(folder / name)
        said = [getattr(self, name).scores.full() for name in ("decoder", "shadow", "alone")]
        kept = {name: copy.deepcopy(getattr(self, name)) for name in ("texts", "broken", "is_exact")}
        self.saved.append({"folder": folder, "said": said, "kept": kept})
        self.check([[]] * B)

    @precondition(lambda self: bool(self.saved))
    @rule(which=st.integers(0, 99), into_new=st.booleans())
    def load(self, which: int, into_new: bool) -> None:
        saved = self.saved[which % len(self.saved)]
        for name, said in zip(("decoder", "shadow", "alone"), saved["said"], strict=True):
            decoder = self.new() if into_new else getattr(self, name)
            decoder.load(saved["folder"] / name)
            assert torch.equal(decoder.scores.full().nan_to_num(9.0), said.nan_to_num(9.0))
            setattr(self, name, decoder)
        for name, value in copy.deepcopy(saved["kept"]).items():
            setattr(self, name, value)
        self.check([[]] * B)

    def other(self, ids: Tensor) -> Tensor:
        """The same tokens in the watched row, and other ones elsewhere."""
        changed = (ids + 1 + ids % 7) % 13
        changed[self.watched] = ids[self.watched]
        return changed

    def check(self, read: list[list[int]]) -> None:
        """Compare every row after a call that brought `read`."""
        Sessions.n_calls += 1
        self.n_own_calls += 1
        scores, row = self.decoder.scores.full(), self.watched
        if not self.broken[row]:
            actual = scores[row].nan_to_num(9.0)
            assert torch.equal(actual, self.shadow.scores.full()[row].nan_to_num(9.0)), "other rows' tokens were seen"
            if self.is_exact:
                assert torch.equal(actual, self.alone.scores.full()[row].nan_to_num(9.0)), "other rows' calls were seen"
        for row, own in enumerate(read):
            self.texts[row] += own
            text = self.texts[row]
            if self.broken[row]:
                continue
            if not text:
                assert scores[row].isnan().all()
            elif own or self.n_own_calls % 10 == 0:
                assert_close(f"row {row}", scores[row], self.new(1).feed([text])[0], 1e-5)


QUIET = {"deadline": None, "suppress_health_check": list(HealthCheck)}


def test_rows_are_isolated() -> None:
    run_state_machine_as_test(Sessions, settings=settings(max_examples=examples(30), stateful_step_count=20, **QUIET))


@pytest.mark.faults
@pytest.mark.long
@pytest.mark.timeout(1800)
def test_rows_are_isolated_for_ten_thousand_calls() -> None:
    Sessions.n_calls = 0
    run_state_machine_as_test(Sessions, settings=settings(max_examples=examples(280), stateful_step_count=50, **QUIET))
    assert Sessions.n_calls >= 10_000
