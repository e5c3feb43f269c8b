"""A scheduler: texts come, end, fail and are cancelled in some rows, and nothing of it shows in the others, to the last bit."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from tests.generation.test_decoder_rows import TEXT, feed, model_of
from tests.helpers import tiny_model
from transformer_xl.errors import ConfigError, TokenizerError
from transformer_xl.generation import scores as scores_module
from transformer_xl.generation.choice import choose_together
from transformer_xl.generation.decoder import Decoder
from transformer_xl.generation.requests import Chosen, Event, Failed, Finished, Read, Request, seeded_generator
from transformer_xl.generation.sampling import Sampling
from transformer_xl.generation.session_file import RowState
from transformer_xl.generation.writing import Scheduler, write
from transformer_xl.model.transformer_xl import TransformerXL

KINDS = ["transformer_xl", "shaw", "vaswani", "al_rfou", "rotary", "lstm", "adaptive"]


UNDRAWABLE = Sampling(logit_bias=dict.fromkeys(range(13), -1e300))
"""In fp32 all scores are -inf then."""


@cache
def adaptive() -> TransformerXL:
    torch.manual_seed(0)
    return tiny_model(cutoffs=(4, 9), div_val=2)


def decoder_of(kind: str = "transformer_xl", **options: Any) -> Decoder:
    return Decoder(adaptive() if kind == "adaptive" else model_of(kind), **{"batch_size": 3, "tgt_len": 4, **options})


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
        Request(prompt=TEXT[:6], seed=0, sampling=UNDRAWABLE),
        Request(prompt=[1], seed=1, ends=ends_badly),
        Request(prompt=TEXT[:17], seed=2, ends=lambda _: next(three)),  # StopIteration with the fourth token
    ]


# --- a text is the same whatever happens beside it --------------------------------------------------------------------------


PROMPTS = [[5], TEXT[:3], TEXT[:21]]
EACH = [
    *((kind, "fp32", PROMPTS[i % 3]) for i, kind in enumerate(KINDS)),
    *(("transformer_xl", "fp32", prompt) for prompt in PROMPTS[1:]),
    *((kind, "bf16", PROMPTS[2]) for kind in ("transformer_xl", "vaswani", "lstm")),  # the three ways to read on
]


@pytest.mark.parametrize(("kind", "precision", "prompt"), EACH)
def test_a_text_is_the_same_whatever_comes_ends_fails_and_is_cancelled_beside_it(
    kind: str, precision: str, prompt: list[int]
) -> None:
    request = Request(prompt=prompt, seed=7, max_new_tokens=12, sampling=Sampling(repetition_penalty=1.2))
    alone, beside = decoder_of(kind, precision=precision), decoder_of(kind, precision=precision)
    scheduler = Scheduler(alone, likeliest=2)
    number = scheduler.submit(request, row=1, remember=True)
    expected = of(finish(scheduler), number)
    assert len(expected) == 13 and expected[-1] == "length"

    chance = random.Random(len(prompt))
    scheduler, events, number = Scheduler(beside, likeliest=2), [], -1
    for tick in range(30):
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


def fail(patch: pytest.MonkeyPatch, place: str, error: BaseException, *, at: int) -> None:
    """Let a shared part of step number `at` raise; `step` raises when all rows have read."""
    calls, whole = iter(range(99)), {"scores": Decoder.scores.fget, "_reports": Scheduler._reports, "step": Decoder.step}[place]

    def broken(self: Any, *args: Any, **options: Any) -> Any:
        value = whole(self, *args, **options)  # pyright: ignore[reportOptionalCall]
        if next(calls) == at:
            raise error
        return value

    owner = Scheduler if place == "_reports" else Decoder
    patch.setattr(owner, place, property(broken) if place == "scores" else broken)


@pytest.mark.parametrize("error", [RuntimeError("out of memory"), KeyboardInterrupt()])
@pytest.mark.parametrize(("place", "at", "n_written"), [("scores", 0, 0), ("_reports", 2, 2), ("step", 2, 3)])
def test_a_step_that_fails_ends_its_texts_and_no_other(
    place: str, at: int, n_written: int, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows 0 and 2 write while row 1 reads a long prompt."""
    short = [Request(prompt=TEXT[:3], seed=seed, max_new_tokens=9) for seed in (0, 1)]
    long = Request(prompt=TEXT[:30], seed=2, max_new_tokens=9)
    scheduler = Scheduler(decoder_of(), likeliest=2)
    expected = of((scheduler.submit(long, row=1), finish(scheduler))[1], 0)
    anew = of((scheduler.submit(short[0], row=2), finish(scheduler))[1], 1)

    decoder, events = decoder_of(), []
    scheduler = Scheduler(decoder, likeliest=2)
    for row, request in ((0, short[0]), (1, long), (2, short[1])):
        scheduler.submit(request, row=row)
    with monkeypatch.context() as patch:
        fail(patch, place, error, at=at)
        for _ in range(at):
            events += scheduler.tick()
        if isinstance(error, Exception):
            events += (last := scheduler.tick())
            failed = [event for event in last if isinstance(event, Failed)]
            assert failed == [(0, error, 3, n_written), (2, error, 3, n_written)]
            assert failed == last[-2:]
            # what was made before is returned
            kinds = [Chosen, Chosen] if place == "step" else []
            assert [type(event) for event in last[:-2]] == [Read] * (3 if at == 0 else 1) + kinds
        else:
            with pytest.raises(KeyboardInterrupt):
                scheduler.tick()
    assert scheduler.free_rows == [0, 2]
    assert scheduler.cancel(0) is None and scheduler.cancel(2) is None
    for row in (0, 2):
        assert_same_state(decoder.take(row), decoder_of().take(0))
    again = scheduler.submit(short[0], row=2)
    events += finish(scheduler)
    assert of(events, 1) == expected and of(events, again) == anew


def test_a_step_that_fails_leaves_texts_that_have_ended_and_scores_are_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """A text whose row still reads its last token has not ended: `take` would not return all of it."""
    decoder, stops = decoder_of(), frozenset(range(13))
    scheduler = Scheduler(decoder)
    scheduler.submit(Request(prompt=TEXT[:3], seed=0, max_new_tokens=1), row=0)
    scheduler.submit(Request(prompt=TEXT[:3], seed=1, max_new_tokens=1), row=1, remember=True)
    scheduler.submit(Request(prompt=TEXT[:3], seed=2, stop_tokens=stops), row=2, remember=True)
    with monkeypatch.context() as patch:
        fail(patch, "step", error := RuntimeError("out of memory"), at=0)
        events = scheduler.tick()
    assert [type(event) for event in events] == [Read] * 3 + [Chosen, Finished, Chosen, Finished, Failed]
    assert events[-1] == (1, error, 3, 1) and scheduler.idle
    twin = decoder_of()
    for row in (0, 2):
        feed(twin, row, TEXT[:3])
        assert_same_state(decoder.take(row), twin.take(row))
    assert_same_state(decoder.take(1), decoder_of().take(1))
    with pytest.raises(TokenizerError, match="the prompt is empty"):
        scheduler.submit(Request(prompt=[], seed=0), row=1, go_on=True)


def test_write_raises_the_error_of_a_step_and_a_consumer_that_stops_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = [Request(prompt=TEXT[:9], seed=seed, max_new_tokens=9) for seed in range(2)]
    for place in ("scores", "_reports", "step"):
        for error in (RuntimeError("out of memory"), KeyboardInterrupt()):
            with monkeypatch.context() as patch, pytest.raises(type(error)):
                fail(patch, place, error, at=0)
                list(write(decoder_of(), wanted, sampling=Sampling()))
    decoder, twin = decoder_of(), decoder_of()
    events = write(decoder, wanted[:1], sampling=Sampling())
    next(events)
    del events
    feed(twin, 0, TEXT[:9])
    assert_same_state(decoder.take(0), twin.take(0))


def test_an_interrupt_while_a_prompt_is_read_ends_that_text_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    good = Request(prompt=TEXT[:11], seed=3, max_new_tokens=9)
    scheduler = Scheduler(decoder_of())
    expected = of((scheduler.submit(good, row=0), finish(scheduler))[1], 0)
    decoder, advance = decoder_of(), Decoder.advance

    def interrupted(self: Decoder, row: int, ids: Any) -> None:
        advance(self, row, ids)
        if row == 1:
            raise KeyboardInterrupt

    scheduler = Scheduler(decoder)
    for row in (0, 1):
        scheduler.submit(good, row=row)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Decoder, "advance", interrupted)
        scheduler.tick()
    assert scheduler.free_rows == [1, 2]
    assert_same_state(decoder.take(1), decoder_of().take(1))
    assert of(finish(scheduler), 0) == expected


def test_a_tick_is_not_called_from_inside_and_nothing_changes() -> None:
    good = Request(prompt=TEXT[:11], seed=3, max_new_tokens=9)
    scheduler = Scheduler(decoder_of())
    expected = [of((scheduler.submit(good, row=row), finish(scheduler))[1], row) for row in (0, 1)]
    decoder, messages = decoder_of(), []
    scheduler = Scheduler(decoder)

    def ends(token: int) -> None:
        for call in (lambda: scheduler.submit(good), lambda: scheduler.cancel(0), scheduler.tick):
            with pytest.raises(
                RuntimeError, match=r"^\w+ was called from inside a tick .*; call it after the tick$"
            ) as refused:
                call()
            messages.append(str(refused.value).split()[0])

    numbers = [scheduler.submit(good), scheduler.submit(replace(good, ends=ends))]
    events = finish(scheduler)
    assert [of(events, number) for number in numbers] == expected
    assert messages == ["submit", "cancel", "tick"] * 9
    uncaught = scheduler.submit(replace(good, ends=lambda _: scheduler.cancel(0)))  # pyright: ignore[reportArgumentType]
    *_, failed = finish(scheduler)
    assert isinstance(failed, Failed) and failed.text == uncaught and isinstance(failed.error, RuntimeError)
    assert scheduler.submit(good) == 3  # after a tick, all is as before


def test_a_prompt_may_be_changed_after_it_was_submitted() -> None:
    scheduler = Scheduler(decoder_of())
    expected = of((scheduler.submit(Request(prompt=TEXT[:11], seed=3)), finish(scheduler))[1], 0)
    prompt = torch.tensor(TEXT[:11])
    scheduler = Scheduler(decoder_of())
    scheduler.submit(Request(prompt=prompt, seed=3))
    prompt[:] = 0
    assert of(finish(scheduler), 0) == expected


@pytest.mark.parametrize(
    ("request_", "options", "error", "match"),
    [
        ({"prompt": []}, {}, TokenizerError, "the prompt is empty; give at least one token"),
        ({"prompt": []}, {"go_on": True, "row": 1}, TokenizerError, "the prompt is empty"),  # the row has read nothing
        ({"prompt": []}, {"state": "empty"}, TokenizerError, "the prompt is empty"),
        ({"prompt": [1, 13]}, {}, TokenizerError, "token id 13 is outside the vocabulary"),
        ({"prompt": [1.5]}, {}, ValueError, r"prompt, \[1.5\], must be integers"),
        ({"prompt": [[1, 2]]}, {}, ValueError, "must be the token ids of one text"),
        ({"prompt": [[1], [2, 3]]}, {}, ValueError, "must be integers"),
        ({"sampling": Sampling(logit_bias={99: 1.0})}, {}, ConfigError, "outside the vocabulary"),
        *(({}, {"row": row}, ValueError, r"^row .* is not free \(free: \[1, 2\]\)") for row in (0, 3, -1)),
        *(({}, how, ValueError, "^go_on continues") for how in ({"go_on": True}, {"state": "full", "go_on": True, "row": 1})),
        ({}, {"state": "other"}, ValueError, "it was read by another model"),
        ({}, {"state": "longer"}, ValueError, "it is of another decoder: tgt_len"),
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
    with pytest.raises(error, match=match) as refused:
        scheduler.submit(Request(**{"prompt": [1], "seed": 0, **request_}), **options)
    assert "\n" not in str(refused.value)
    assert scheduler.free_rows == [1, 2]
    assert scheduler.submit(good) == 1
    events += finish(scheduler)
    assert of(events, 0) == of(events, 1) and len(of(events, 0)) == 10
    for _ in range(3):
        scheduler.submit(good)
    with pytest.raises(ValueError, match="tick until a text ends"):
        scheduler.submit(good)
    with pytest.raises(ConfigError, match="outside the vocabulary"):
        Scheduler(decoder_of(), sampling=Sampling(logit_bias={99: 1.0}))


def test_write_ends_all_texts_in_order_when_interrupted_while_one_is_read() -> None:
    """Row 0 has text 2 by then; and no other text begins."""
    begun, n_read = [], []

    def requests() -> Iterator[Request]:
        for number, (n, most) in enumerate([(1, 1), (1, 99), (30, 9), (1, 9), (1, 9)]):
            begun.append(number)
            yield Request(prompt=TEXT[:n], seed=number, max_new_tokens=most)

    decoder = Decoder(model_of("transformer_xl"), batch_size=2, tgt_len=4)
    events = list(
        write(
            decoder,
            requests(),
            sampling=Sampling(),
            on_read=lambda text, n: n_read.append((text, n)),
            interrupted=lambda: len(n_read) >= 5,
        )
    )
    assert n_read == [(0, 1), (1, 1), (2, 4), (2, 4), (2, 4)] and begun == [0, 1, 2]
    assert [event[:4] for event in events if isinstance(event, Finished)] == [
        (0, "length", 1, 1),
        (1, "interrupted", 1, 3),
        (2, "interrupted", 12, 0),
    ]


# --- cancelling, and rows that go on ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "n_ticks"), [*(("transformer_xl", n) for n in (0, 1, 3, 6, 9)), *((kind, n) for kind in KINDS[1:] for n in (1, 6))]
)
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


@pytest.mark.parametrize(("kind", "n_first"), [*((kind, 6) for kind in KINDS), ("transformer_xl", 1), ("vaswani", 1)])
def test_a_text_goes_on_from_a_state_with_the_same_bits(kind: str, n_first: int) -> None:
    """In another scheduler, next to other texts."""
    request = Request(prompt=TEXT[:10], seed=5, max_new_tokens=20)
    whole = Scheduler(decoder_of(kind), likeliest=2)
    expected = of((whole.submit(request, row=1), finish(whole))[1], 0)

    generator, decoder = seeded_generator(5), decoder_of(kind)
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
    assert [event for event in events if isinstance(event, Read)] == [(0, 4, ()), (1, 1, ()), (0, 4, ()), (0, 1, ())]
    ends = {event.text: event for event in events if isinstance(event, Finished)}
    assert [ends[i][1:4] for i in range(2)] == [("length", 9, 0), ("length", 1, 1)]


def test_one_piece_a_tick_and_every_prompt_in_the_end() -> None:
    """What is short comes first, one piece in four goes to those that wait longest, and no bit depends on the order."""
    requests = [Request(prompt=(TEXT * 9)[:n], seed=i, max_new_tokens=3) for i, n in enumerate((90, 5, 61))]
    alone = [events_of(request) for request in requests]
    scheduler = Scheduler(decoder_of())
    numbers = [scheduler.submit(request) for request in requests]
    found: list[list[Event]] = [[] for _ in requests]
    turns: list[int] = []
    while not scheduler.idle:
        events = scheduler.tick(pieces=1)
        read = [event.text for event in events if isinstance(event, Read)]
        assert len(read) <= 1
        turns += read
        for event in events:
            found[numbers.index(event.text)].append(event)
    assert turns.index(1) <= 2 and 0 in turns[:8] and 2 in turns[:8]
    for own, expected in zip(found, alone, strict=True):
        assert [e.token for e in own if isinstance(e, Chosen)] == [e.token for e in expected if isinstance(e, Chosen)]


def events_of(request: Request) -> list[Event]:
    scheduler = Scheduler(decoder_of())
    scheduler.submit(request)
    return finish(scheduler)


@pytest.mark.parametrize("n", [1, 4, 11])
def test_the_tokens_of_a_prompt_are_scored_and_the_text_stays_the_same(n: int) -> None:
    plain = events_of(Request(prompt=TEXT[:n], seed=0, max_new_tokens=4, likeliest=2))
    events = events_of(Request(prompt=TEXT[:n], seed=0, max_new_tokens=4, likeliest=2, score_prompt=True))
    scored = [each for event in events if isinstance(event, Read) for each in event.scored]
    assert [each for each in events if isinstance(each, Chosen)] == [each for each in plain if isinstance(each, Chosen)]
    assert [each.token for each in scored] == list(TEXT[:n]) and scored[0].log_probability is None
    decoder = decoder_of()
    (nats, *_) = decoder.score([list(TEXT[:n]), *[[] for _ in range(decoder.batch_size - 1)]])
    for each, expected in zip(scored[1:], nats.tolist()[1:], strict=True):
        assert each.log_probability == pytest.approx(-expected, abs=1e-5)
        assert len(each.likeliest) == 2 and dict(each.likeliest).get(each.token, each.log_probability) == each.log_probability


def test_what_a_gpu_draws_together_is_what_each_text_draws_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some with other settings, one that the CPU draws, and one that fails."""
    monkeypatch.setattr(scores_module, "_DRAWING", ("cpu",))
    monkeypatch.setattr(scores_module, "_WORTH_DRAWING", 2)
    together: list[int] = []

    def noted(scores: Any, rows: Any, sampling: Sampling, generators: Any) -> Any:
        together.append(len(rows))
        return choose_together(scores, rows, sampling, generators)

    monkeypatch.setattr("transformer_xl.generation.writing.choose_together", noted)
    settings = [Sampling(), Sampling(top_k=3), Sampling(repetition_penalty=1.2)]
    requests = [Request(prompt=TEXT[i : i + 5], seed=i, max_new_tokens=8, sampling=settings[i // 2]) for i in range(6)]
    alone = []
    for row, request in enumerate(requests):
        scheduler = Scheduler(decoder_of(batch_size=7))
        alone.append(of((scheduler.submit(request, row=row), finish(scheduler))[1], 0))
    scheduler = Scheduler(decoder := decoder_of(batch_size=7), likeliest=1)
    numbers = [scheduler.submit(request) for request in requests]
    failing = scheduler.submit(requests[0])
    together.clear()
    events = scheduler.tick()
    while len(decoder._hidden.isnan().any(1).nonzero()):
        events += scheduler.tick()
    assert decoder.kept is not None
    decoder.kept.memory.values[0][:, 6] = torch.nan
    events += finish(scheduler)
    assert max(together) == 3
    for number, expected in zip(numbers, alone, strict=True):
        assert [x[0] if isinstance(x, tuple) else x for x in of(events, number)] == [
            x[0] if isinstance(x, tuple) else x for x in expected
        ]
    (failed,) = (event for event in events if isinstance(event, Failed))
    assert failed.text == failing and "no token can be drawn" in str(failed.error)
