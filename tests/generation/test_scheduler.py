"""A scheduler: texts come, end, fail and are cancelled in some rows, and nothing of it shows in the others, to the last bit."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.generation.test_decoder_rows import TEXT, feed, model_of
from tests.helpers import tiny_model
from transformer_xl.errors import ConfigError, TokenizerError
from transformer_xl.generation.decoder import Decoder
from transformer_xl.generation.requests import Chosen, Failed, Finished, Read, Request
from transformer_xl.generation.sampling import Sampling
from transformer_xl.generation.session_file import RowState
from transformer_xl.generation.writing import Scheduler, write

KINDS = ["transformer_xl", "shaw", "vaswani", "al_rfou", "lstm"]


class Undrawable(Sampling):
    """As where all that is left has the score -inf."""

    def choose(self, scores: Any, row: Any, history: Any = (), generator: Any = None) -> int:
        raise ConfigError("no token can be drawn")


def decoder_of(kind: str = "transformer_xl", **options: Any) -> Decoder:
    return Decoder(model_of(kind), **{"batch_size": 3, "tgt_len": 4, **options})


def finish(scheduler: Scheduler, *, most: int = 1000) -> list[Any]:
    """Tick until everything has ended."""
    events: list[Any] = []
    for _ in range(most):
        if scheduler.idle:
            return events
        events += scheduler.tick()
    raise AssertionError("it never ends")


def of(events: Sequence[Any], number: int) -> list[Any]:
    """The tokens of a text with their log-probabilities, and why it ended."""
    kept = [event for event in events if event.text == number and not isinstance(event, Read)]
    return [event.reason if isinstance(event, Finished) else (event[1], *event[2:4]) for event in kept]


def assert_same_state(one: RowState, other: RowState) -> None:
    assert one.tensors.keys() == other.tensors.keys()
    for name, x in one.tensors.items():
        assert torch.equal(x.nan_to_num(9e9), other.tensors[name].nan_to_num(9e9)), name


def ends_badly(token: int) -> None:
    raise RuntimeError(f"token {token} cannot be shown")


def bad_requests() -> list[Request]:
    three = iter([None] * 3)
    return [
        Request(prompt=TEXT[:6], seed=0, sampling=Undrawable()),
        Request(prompt=[1], seed=1, ends=ends_badly),
        Request(prompt=TEXT[:17], seed=2, ends=lambda _: next(three)),  # StopIteration with the fourth token
    ]


# --- a text is the same whatever happens beside it --------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("prompt", [[5], TEXT[:3], TEXT[:21]])
def test_a_text_is_the_same_whatever_comes_ends_fails_and_is_cancelled_beside_it(kind: str, prompt: list[int]) -> None:
    request = Request(prompt=prompt, seed=7, max_new_tokens=25, sampling=Sampling(repetition_penalty=1.2))
    for precision in ("fp32", "bf16"):
        alone, beside = decoder_of(kind, precision=precision), decoder_of(kind, precision=precision)
        scheduler = Scheduler(alone, likeliest=2)
        number = scheduler.submit(request, row=1, remember=True)
        expected = of(finish(scheduler), number)
        assert len(expected) == 26 and expected[-1] == "length"

        chance = random.Random(len(prompt))
        scheduler, events, number = Scheduler(beside, likeliest=2), [], -1
        for tick in range(60):
            if tick == 3:
                number = scheduler.submit(request, row=1, remember=True)
            for row in (0, 2):
                if row in scheduler.free_rows and chance.random() < 0.5:
                    good = Request(prompt=TEXT[tick : tick + chance.choice([1, 3, 9])], seed=tick, max_new_tokens=tick % 7)
                    scheduler.submit(chance.choice([good, *bad_requests()]), row=row)
            events += scheduler.tick()
            if chance.random() < 0.2 and (busy := {event.text for event in events} - {number}):
                scheduler.cancel(max(busy))
        assert of(events, number) == expected
        assert {Failed, Finished} < {type(event) for event in events}
        assert_same_state(beside.take(1), alone.take(1))


def test_pieces_count_from_the_beginning_of_the_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the row has read something before, and however many others read."""
    sizes: dict[int, list[int]] = {0: [], 1: [], 2: []}
    advance = Decoder.advance
    monkeypatch.setattr(Decoder, "advance", lambda self, row, ids: (sizes[row].append(len(ids)), advance(self, row, ids))[1])
    decoder = decoder_of()
    decoder.read([[], TEXT[:3], []])
    scheduler = Scheduler(decoder)
    scheduler.submit(Request(prompt=TEXT[:15], seed=0, max_new_tokens=9), row=1, go_on=True)
    scheduler.tick()
    scheduler.submit(Request(prompt=TEXT[:22], seed=1, max_new_tokens=2), row=0)
    ticks = [scheduler.tick() for _ in range(6)]
    assert sizes == {0: [4, 4, 4, 4, 4, 2], 1: [4, 4, 4, 3], 2: []}
    # each prompt is read by one piece a tick, and the other text does not wait for it
    assert [sum(isinstance(event, Chosen) and event.text == 0 for event in tick) for tick in ticks] == [0, 0, 1, 1, 1, 1]


def test_what_write_yields_is_what_a_scheduler_says() -> None:
    wanted = [Request(prompt=TEXT[i : i + 3 * i + 1], seed=i, max_new_tokens=5 * i % 12) for i in range(7)]
    queue, events = list(wanted), []
    scheduler = Scheduler(decoder_of(), sampling=Sampling(top_k=5), likeliest=1)
    while queue or not scheduler.idle:
        for _ in scheduler.free_rows[: len(queue)]:
            scheduler.submit(queue.pop(0))
        events += scheduler.tick()
    written = list(write(decoder_of(), wanted, sampling=Sampling(top_k=5), likeliest=1))
    for number in range(7):
        assert of(events, number) == of(written, number) != []


# --- failures ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", range(3))
def test_a_text_that_fails_ends_alone(bad: int) -> None:
    good = Request(prompt=TEXT[:11], seed=3, max_new_tokens=9)
    expected = []
    for row in range(3):
        scheduler = Scheduler(decoder_of(), likeliest=0)
        expected.append(of((scheduler.submit(good, row=row), finish(scheduler))[1], 0))
    decoder = decoder_of()
    scheduler = Scheduler(decoder, likeliest=0)
    numbers = [scheduler.submit(good), scheduler.submit(bad_requests()[bad]), scheduler.submit(good)]
    events = finish(scheduler)
    assert [of(events, 0), of(events, 2)] == [expected[0], expected[2]]
    (failed,) = (event for event in events if isinstance(event, Failed))
    kind, n_read, n_written = [(ConfigError, 6, 0), (RuntimeError, 1, 0), (StopIteration, 17, 3)][bad]
    assert (failed.text, type(failed.error), failed.n_read, failed.n_written) == (numbers[1], kind, n_read, n_written)
    # its row holds what was read and shown, and serves the next text as any other
    shown = [token for token, *_ in (entry for entry in of(events[: events.index(failed)], 1))]
    twin = decoder_of()
    feed(twin, 1, bad_requests()[bad].prompt)  # pyright: ignore[reportArgumentType]
    for token in shown:
        twin.step([token] * 3, active=[False, True, False])
    assert len(shown) == n_written
    assert_same_state(decoder.take(1), twin.take(1))
    again = scheduler.submit(good, row=1)
    assert of(finish(scheduler), again) == expected[1]


def test_a_row_that_failed_while_it_read_is_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    good = Request(prompt=TEXT[:30], seed=3, max_new_tokens=4)
    decoder, advance, calls = decoder_of(), Decoder.advance, iter(range(99))

    def full(self: Decoder, row: int, ids: Any) -> None:
        advance(self, row, ids)
        if row == 1 and next(calls) == 2:
            raise RuntimeError("out of memory")

    scheduler = Scheduler(decoder_of())
    expected = of((scheduler.submit(good), finish(scheduler))[1], 0)
    with monkeypatch.context() as patch:
        patch.setattr(Decoder, "advance", full)
        scheduler = Scheduler(decoder)
        for _ in range(2):
            scheduler.submit(good)
        events = finish(scheduler)
    (failed,) = (event for event in events if isinstance(event, Failed))
    assert (failed.text, str(failed.error), failed.n_read, failed.n_written) == (1, "out of memory", 8, 0)
    assert of(events, 0) == expected
    assert decoder.scores.full()[1].isnan().all()
    assert_same_state(decoder.take(1), decoder_of().take(1))


def test_write_raises_the_error_of_a_text(monkeypatch: pytest.MonkeyPatch) -> None:
    for request, error in zip(bad_requests()[:2], (ConfigError, RuntimeError), strict=True):
        with pytest.raises(error):
            list(write(decoder_of(), [Request(prompt=[1], seed=0), request], sampling=Sampling()))
    monkeypatch.delattr(Decoder, "advance")
    with pytest.raises(AttributeError, match="advance"):
        list(write(decoder_of(), [Request(prompt=[1], seed=0), Request(prompt=[1, 2], seed=0)], sampling=Sampling()))


@pytest.mark.parametrize(
    ("request_", "options", "error", "match"),
    [
        ({"prompt": []}, {}, TokenizerError, "the prompt is empty; give at least one token"),
        ({"prompt": []}, {"go_on": True, "row": 2}, TokenizerError, "the prompt is empty"),  # the row has read nothing
        ({"prompt": []}, {"state": "empty"}, TokenizerError, "the prompt is empty"),
        ({"prompt": [1, 13]}, {}, TokenizerError, "token id 13 is outside the vocabulary"),
        ({"prompt": [1.5]}, {}, ValueError, r"prompt, \[1.5\], must be the token ids of one text; tokenizer.encode"),
        ({"prompt": [[1, 2]]}, {}, ValueError, "must be the token ids of one text"),
        ({"prompt": "text"}, {}, ValueError, "prompt, 'text', must be the token ids of one text"),
        ({"sampling": Sampling(logit_bias={99: 1.0})}, {}, ConfigError, "outside the vocabulary"),
        ({}, {"row": 0}, ValueError, r"row \(0\) is not free \(free: \[1, 2\]\); tick until a text ends"),
        ({}, {"row": 3}, ValueError, r"row \(3\) must be at least 0 and at most 2"),
        ({}, {"row": -1}, ValueError, r"row \(-1\) must be at least 0 and at most 2"),
        ({}, {"go_on": True}, ValueError, "go_on needs a row: the first free one may remember somebody else's text"),
        ({}, {"state": "full", "go_on": True}, ValueError, "not from both; leave one out"),
        ({}, {"state": "other"}, ValueError, "the state is of the model"),
        ({}, {"state": "longer"}, ValueError, "decoder with other settings: tgt_len"),
    ],
)
def test_what_cannot_begin_is_refused_at_once_and_changes_nothing(
    request_: dict[str, Any], options: dict[str, Any], error: type[Exception], match: str
) -> None:
    good = Request(prompt=TEXT[:11], seed=3, max_new_tokens=9)
    decoders = {"empty": decoder_of(), "full": decoder_of(), "longer": decoder_of(tgt_len=8)}
    decoders["other"] = Decoder(tiny_model(), batch_size=3, tgt_len=4)
    feed(decoders["full"], 0, TEXT[:9])
    if "state" in options:
        options = {**options, "state": decoders[options["state"]].take(0)}
    scheduler = Scheduler(decoder_of())
    scheduler.submit(good)
    events = scheduler.tick()
    with pytest.raises(error, match=match):
        scheduler.submit(Request(**{"prompt": [1], "seed": 0, **request_}), **options)
    assert scheduler.free_rows == [1, 2]
    assert scheduler.submit(good) == 1
    events += finish(scheduler)
    assert of(events, 0) == of(events, 1) and len(of(events, 0)) == 10
    for _ in range(3):
        scheduler.submit(good)
    with pytest.raises(ValueError, match="no row is free; tick until a text ends"):
        scheduler.submit(good)
    with pytest.raises(ConfigError, match="outside the vocabulary"):
        Scheduler(decoder_of(), sampling=Sampling(logit_bias={99: 1.0}))


# --- cancelling, and rows that go on ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n_ticks", [0, 1, 3, 6, 9])
def test_a_cancelled_text_leaves_its_row_with_what_was_read_and_shown(kind: str, n_ticks: int) -> None:
    request = Request(prompt=TEXT[:14], seed=1, max_new_tokens=99)  # in 4 pieces, the last with the first token
    decoder, twin = decoder_of(kind), decoder_of(kind)
    scheduler = Scheduler(decoder)
    numbers = [scheduler.submit(request, row=row) for row in (2, 1)]
    events = [event for _ in range(n_ticks) for event in scheduler.tick()]
    end = scheduler.cancel(numbers[0])
    assert end is not None and end[:4] == (numbers[0], "interrupted", min(14, 4 * n_ticks), max(0, n_ticks - 3))
    for first in range(0, end.n_read, 4):
        twin.advance(2, TEXT[first : min(first + 4, end.n_read)])
    shown = [token for token, *_ in of(events, numbers[0])]
    for token in shown:
        twin.step([token] * 3, active=[False, False, True])
    assert len(shown) == end.n_written
    assert_same_state(decoder.take(2), twin.take(2))
    assert scheduler.free_rows == [0, 2] and not scheduler.idle
    assert scheduler.cancel(numbers[0]) is None and scheduler.cancel(99) is None
    assert scheduler.cancel(numbers[1]) is not None and scheduler.idle and scheduler.tick() == []


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n_first", [1, 6])
def test_a_text_goes_on_from_a_state_with_the_same_bits(kind: str, n_first: int) -> None:
    """In another scheduler, next to other texts."""
    request = Request(prompt=TEXT[:10], seed=5, max_new_tokens=20)
    whole = Scheduler(decoder_of(kind), likeliest=2)
    expected = of((whole.submit(request, row=1), finish(whole))[1], 0)

    generator, decoder = torch.Generator().manual_seed(5), decoder_of(kind)
    scheduler = Scheduler(decoder, likeliest=2)
    scheduler.submit(replace(request, max_new_tokens=n_first, generator=generator), row=1, remember=True)
    first = of(finish(scheduler), 0)
    state = decoder.take(1)
    feed(decoder, 1, [1, 2, 3])  # it is a copy

    scheduler = Scheduler(decoder_of(kind), likeliest=2)
    scheduler.submit(Request(prompt=TEXT[:3], seed=0))  # it is writing when the other one comes
    scheduler.submit(Request(prompt=TEXT[:17], seed=0), row=2)
    rest = replace(request, prompt=[], max_new_tokens=20 - n_first, generator=generator)
    events = scheduler.tick()
    number = scheduler.submit(rest, row=1, state=state)
    while 1 not in scheduler.free_rows:
        events += scheduler.tick()
    assert [*first[:-1], *of(events, number)] == expected


def test_a_text_goes_on_from_what_its_row_remembers() -> None:
    decoder, twin = decoder_of(), decoder_of()
    feed(twin, 1, TEXT[:9])
    feed(twin, 1, TEXT[20:26])
    scheduler = Scheduler(decoder)
    scheduler.submit(Request(prompt=TEXT[:9], seed=0, max_new_tokens=0), row=1, remember=True)
    finish(scheduler)
    scheduler.submit(Request(prompt=TEXT[20:26], seed=1, max_new_tokens=0), row=1, go_on=True)
    finish(scheduler)
    assert_same_state(decoder.take(1), twin.take(1))
    scheduler.submit(Request(prompt=TEXT[:9], seed=0, max_new_tokens=0), row=1)  # without, it begins anew
    finish(scheduler)
    fresh = decoder_of()
    feed(fresh, 1, TEXT[:9])
    assert_same_state(decoder.take(1), fresh.take(1))


@pytest.mark.parametrize("remember", [False, True])
def test_the_last_token_is_read_only_if_it_is_to_be_remembered(remember: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    steps, step = [], Decoder.step
    monkeypatch.setattr(Decoder, "step", lambda self, *a, **k: (steps.append(1), step(self, *a, **k))[1])
    scheduler = Scheduler(decoder_of())
    scheduler.submit(Request(prompt=[1, 2], seed=0, max_new_tokens=8), remember=remember)
    finish(scheduler)
    assert len(steps) == 7 + remember


def test_events_say_what_was_read() -> None:
    scheduler = Scheduler(decoder_of())
    assert scheduler.idle and scheduler.free_rows == [0, 1, 2] and scheduler.tick() == []
    scheduler.submit(Request(prompt=TEXT[:9], seed=0, max_new_tokens=0))
    scheduler.submit(Request(prompt=TEXT[:1], seed=0, max_new_tokens=1))
    events = finish(scheduler)
    assert [event for event in events if isinstance(event, Read)] == [(0, 4), (1, 1), (0, 4), (0, 1)]
    ends = {event.text: event for event in events if isinstance(event, Finished)}
    assert [ends[i][1:4] for i in range(2)] == [("length", 9, 0), ("length", 1, 1)]


@pytest.mark.parametrize("part", ["decoder.step", "decoder.scores", "reports"])
def test_a_step_that_fails_ends_its_texts_and_no_other(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the failure nobody knows what those rows have read, so they are empty; a row that reads its prompt goes on."""
    decoder = decoder_of()
    scheduler = Scheduler(decoder, likeliest=1)
    writing = [scheduler.submit(Request(prompt=TEXT[:3], seed=seed, max_new_tokens=5)) for seed in (0, 1)]
    scheduler.tick()
    reading = scheduler.submit(Request(prompt=TEXT[:14], seed=2, max_new_tokens=3))

    def fail(*_: Any, **__: Any) -> Any:
        raise MemoryError("full")

    with monkeypatch.context() as patch:
        if part == "reports":
            patch.setattr(scheduler, "_reports", fail)
        else:
            name = part.removeprefix("decoder.")
            patch.setattr(type(decoder), name, property(fail) if name == "scores" else fail)
            scheduler._scores = None if name == "scores" else scheduler._scores
        events = scheduler.tick()
    failed = [event for event in events if isinstance(event, Failed)]
    assert [event.text for event in failed] == writing
    assert all(str(event.error) == "full" for event in failed)
    assert scheduler.free_rows == [0, 1]
    empty = decoder_of().take(0)
    for row in scheduler.free_rows:
        assert_same_state(decoder.take(row), empty)
    alone = Scheduler(decoder_of(), likeliest=1)
    alone.submit(Request(prompt=TEXT[:14], seed=2, max_new_tokens=3), row=2)
    expected = [event.token for event in finish(alone) if isinstance(event, Chosen)]
    assert [event.token for event in finish(scheduler) if isinstance(event, Chosen) and event.text == reading] == expected


@pytest.mark.parametrize("call", ["submit", "cancel", "tick"])
def test_a_request_must_not_call_the_scheduler_that_asks_it(call: str) -> None:
    scheduler = Scheduler(decoder_of())
    calls: dict[str, Callable[[], object]] = {
        "submit": lambda: scheduler.submit(Request(prompt=[1], seed=0)),
        "cancel": lambda: scheduler.cancel(0),
        "tick": scheduler.tick,
    }

    def ends(token: int) -> None:
        calls[call]()

    scheduler.submit(Request(prompt=TEXT[:3], seed=0, max_new_tokens=4))
    scheduler.submit(Request(prompt=TEXT[:3], seed=1, max_new_tokens=4, ends=ends))
    events = finish(scheduler)
    (failed,) = (event for event in events if isinstance(event, Failed))
    assert failed.text == 1
    assert "must not call the scheduler that asks it" in str(failed.error)
    assert [event.text for event in events if isinstance(event, Finished)] == [0]
    assert scheduler.submit(Request(prompt=[1], seed=0, max_new_tokens=1)) == 2  # and after the tick it may be called


def test_a_number_of_likeliest_tokens_is_checked_at_once() -> None:
    with pytest.raises(ConfigError, match=r"likeliest \(-1\) must be at least 0"):
        Scheduler(decoder_of(), likeliest=-1)
