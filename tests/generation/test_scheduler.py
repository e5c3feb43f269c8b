"""A scheduler: texts come, end, fail and are cancelled in some rows, and nothing of it shows in the others, to the last bit."""

import random
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import pytest
import torch

from tests.generation.test_decoder_rows import TEXT, feed, model_of
from tests.generation.test_writing import Spelled
from tests.helpers import tiny_model
from transformer_xl.errors import ConfigError, TokenizerError
from transformer_xl.generation import scheduler as scheduler_module
from transformer_xl.generation import scores as scores_module
from transformer_xl.generation.choice import choose_together
from transformer_xl.generation.decoder import Decoder
from transformer_xl.generation.draft import Chosen, Draft, Ended, Event, Read
from transformer_xl.generation.sampling import Sampling
from transformer_xl.generation.scheduler import Scheduler, write
from transformer_xl.generation.session_file import RowState
from transformer_xl.generation.stopping import Stopping
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


def begin(scheduler: Scheduler, draft: Draft, **how: Any) -> Draft:
    scheduler.submit(draft, **how)
    return draft


def of(events: Sequence[Any], draft: Draft) -> list[Any]:
    """The tokens of a text with their log-probabilities, and why it ended."""
    kept = [event for event in events if event.draft is draft and not isinstance(event, Read)]
    return [draft.reason if isinstance(event, Ended) else event[1:4] for event in kept]


def written(decoder: Decoder, draft: Draft, **how: Any) -> list[Any]:
    """What `of` returns of a text that a scheduler writes alone."""
    scheduler = Scheduler(decoder)
    begin(scheduler, draft, **how)
    return of(finish(scheduler), draft)


def ended(draft: Draft) -> tuple[Any, ...]:
    return draft.reason, draft.n_read, draft.n_written


def assert_same_state(one: RowState, other: RowState) -> None:
    assert one.tensors.keys() == other.tensors.keys()
    for name, x in one.tensors.items():
        assert torch.equal(x.nan_to_num(9e9), other.tensors[name].nan_to_num(9e9)), name


def bad_drafts() -> list[Draft]:
    return [
        Draft(TEXT[:6], seed=0, sampling=UNDRAWABLE),
        Draft([1], seed=1, tokenizer=Spelled(1, then=None)),
        Draft(TEXT[:17], seed=2, tokenizer=Spelled(20, then=None)),  # the prompt, and three more
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
    sampling = Sampling(repetition_penalty=1.2)
    draft, same = (Draft(prompt, seed=7, max_new_tokens=12, sampling=sampling, likeliest=2, remember=True) for _ in range(2))
    alone, beside = decoder_of(kind, precision=precision), decoder_of(kind, precision=precision)
    expected = written(alone, same, row=1)
    assert len(expected) == 13 and expected[-1] == "length"

    chance = random.Random(len(prompt))
    scheduler, events, others = Scheduler(beside), [], []
    for tick in range(30):
        if tick == 3:
            scheduler.submit(draft, row=1)
        for row in (0, 2):
            if row in scheduler.free_rows and chance.random() < 0.5:
                text = TEXT[tick : tick + chance.choice([1, 3, 9])]
                good = Draft(text, seed=tick, max_new_tokens=tick % 7, likeliest=2)
                others.append(begin(scheduler, chance.choice([good, *bad_drafts()]), row=row))
        events += scheduler.tick()
        if chance.random() < 0.2 and others:
            scheduler.cancel(others[-1])
    assert of(events, draft) == expected
    assert {"failed", "length", "interrupted"} <= {other.reason for other in others}
    assert_same_state(beside.take(1), alone.take(1))


def test_pieces_count_from_the_beginning_of_the_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the row has read something before, and however many others read."""
    sizes: dict[int, list[int]] = {0: [], 1: [], 2: []}
    advance = Decoder.advance
    monkeypatch.setattr(
        Decoder, "advance", lambda self, row, ids, **_: (sizes[row].append(len(ids)), advance(self, row, ids))[1]
    )
    decoder = decoder_of()
    decoder.read([[], TEXT[:3], []])
    scheduler = Scheduler(decoder)
    other = begin(scheduler, Draft(TEXT[:15], seed=0, max_new_tokens=9), row=1, go_on=True)
    scheduler.tick()
    scheduler.submit(Draft(TEXT[:22], seed=1, max_new_tokens=2), row=0)
    ticks = [scheduler.tick() for _ in range(6)]
    assert sizes == {0: [4, 4, 4, 4, 4, 2], 1: [4, 4, 4, 3], 2: []}
    # each prompt is read by one piece a tick, and the other text does not wait for it
    assert [sum(isinstance(event, Chosen) and event.draft is other for event in tick) for tick in ticks] == [0, 0, 1, 1, 1, 1]


# --- failures ---------------------------------------------------------------------------------------------------------------


def good() -> Draft:
    return Draft(TEXT[:11], seed=3, max_new_tokens=9, likeliest=0)


@pytest.mark.parametrize("bad", range(3))
def test_a_text_that_fails_ends_alone(bad: int) -> None:
    expected = [written(decoder_of(), good(), row=row) for row in range(3)]
    decoder = decoder_of()
    scheduler = Scheduler(decoder)
    first, failing, last = (begin(scheduler, draft) for draft in (good(), bad_drafts()[bad], good()))
    events = finish(scheduler)
    assert [of(events, first), of(events, last)] == [expected[0], expected[2]]
    kind, n_read, n_written = [(ConfigError, 6, 0), (RuntimeError, 1, 0), (RuntimeError, 17, 3)][bad]
    shown = [token for token, *_ in of(events, failing)[:-1]]
    assert (type(failing.error), failing.reason, failing.n_read, len(shown)) == (kind, "failed", n_read, n_written)
    # its row holds what was read and shown, and serves the next text as any other
    twin = decoder_of()
    feed(twin, 1, bad_drafts()[bad].ids.tolist())
    for token in shown:
        twin.step([token] * 3, active=[False, True, False])
    assert_same_state(decoder.take(1), twin.take(1))
    again = begin(scheduler, good(), row=1)
    assert of(finish(scheduler), again) == expected[1]


@pytest.mark.parametrize("error", [RuntimeError("out of memory"), KeyboardInterrupt()])
def test_a_row_that_failed_while_it_read_is_empty(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    drafts = [Draft(TEXT[:30], seed=3, max_new_tokens=4) for _ in range(3)]
    decoder, advance, calls = decoder_of(), Decoder.advance, iter(range(99))

    def full(self: Decoder, row: int, ids: Any, **_: Any) -> None:
        advance(self, row, ids)
        if row == 1 and next(calls) == 2:
            raise error

    expected, events = written(decoder_of(), drafts[2]), []
    monkeypatch.setattr(Decoder, "advance", full)
    scheduler = Scheduler(decoder)
    for draft in drafts[:2]:
        scheduler.submit(draft)
    for _ in range(2):
        events += scheduler.tick()
    if isinstance(error, Exception):
        events += scheduler.tick()
    else:
        with pytest.raises(KeyboardInterrupt):
            scheduler.tick()
    why = (error, "failed") if isinstance(error, Exception) else (None, None)
    assert (drafts[1].error, *ended(drafts[1])) == (*why, 8, 0)
    assert scheduler.free_rows == [1, 2]
    assert decoder.scores.full()[1].isnan().all()
    assert_same_state(decoder.take(1), decoder_of().take(1))
    assert of([*events, *finish(scheduler)], drafts[0]) == expected


def fail(patch: pytest.MonkeyPatch, place: str, error: BaseException, *, at: int) -> None:
    """Let a shared part of step number `at` raise; `step` raises when all rows have read."""
    calls = iter(range(99))
    whole = {"scores": Decoder.scores.fget, "_reported": scheduler_module._reported, "step": Decoder.step}[place]

    def broken(*args: Any, **options: Any) -> Any:
        value = whole(*args, **options)  # pyright: ignore[reportOptionalCall]
        if next(calls) == at:
            raise error
        return value

    owner = scheduler_module if place == "_reported" else Decoder
    patch.setattr(owner, place, property(broken) if place == "scores" else broken)


@pytest.mark.parametrize("error", [RuntimeError("out of memory"), KeyboardInterrupt()])
@pytest.mark.parametrize(("place", "at", "n_written"), [("scores", 0, 0), ("_reported", 2, 3), ("step", 2, 3)])
def test_a_step_that_fails_ends_its_texts_and_no_other(
    place: str, at: int, n_written: int, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows 0 and 2 write while row 1 reads a long prompt."""

    def short(seed: int) -> Draft:
        return Draft(TEXT[:3], seed=seed, max_new_tokens=9, likeliest=2)

    def long() -> Draft:
        return Draft(TEXT[:30], seed=2, max_new_tokens=9, likeliest=2)

    scheduler = Scheduler(decoder_of())
    before = begin(scheduler, long(), row=1)
    expected = of(finish(scheduler), before)
    before = begin(scheduler, short(0), row=2)
    anew = of(finish(scheduler), before)

    decoder, events = decoder_of(), []
    scheduler = Scheduler(decoder)
    first, reading, last = (begin(scheduler, draft, row=row) for row, draft in enumerate((short(0), long(), short(1))))
    with monkeypatch.context() as patch:
        fail(patch, place, error, at=at)
        for _ in range(at):
            events += scheduler.tick()
        if isinstance(error, Exception):
            events += (tick := scheduler.tick())
            assert [event.draft for event in tick[-2:] if isinstance(event, Ended)] == [first, last]
            assert [(draft.error, *ended(draft)) for draft in (first, last)] == [(error, "failed", 3, n_written)] * 2
            # what was made before is returned
            kinds = [Chosen, Chosen] if place == "step" else []
            assert [type(event) for event in tick[:-2]] == [Read] * (3 if at == 0 else 1) + kinds
        else:
            with pytest.raises(KeyboardInterrupt):
                scheduler.tick()
    assert scheduler.free_rows == [0, 2]
    assert scheduler.cancel(first) is None and scheduler.cancel(last) is None
    for row in (0, 2):
        assert_same_state(decoder.take(row), decoder_of().take(0))
    again = begin(scheduler, short(0), row=2)
    events += finish(scheduler)
    assert of(events, reading) == expected and of(events, again) == anew


def test_a_step_that_fails_leaves_texts_that_have_ended_and_scores_are_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """A text whose row still reads its last token has not ended: `take` would not return all of it."""
    decoder, stopping = decoder_of(), Stopping(tokens=range(13))
    scheduler = Scheduler(decoder)
    drafts = [Draft(TEXT[:3], seed=seed, max_new_tokens=1, remember=seed == 1) for seed in range(2)]
    drafts.append(Draft(TEXT[:3], seed=2, stopping=stopping, remember=True))
    for draft in drafts:
        scheduler.submit(draft)
    with monkeypatch.context() as patch:
        fail(patch, "step", error := RuntimeError("out of memory"), at=0)
        events = scheduler.tick()
    assert [type(event) for event in events] == [Read] * 3 + [Chosen, Ended, Chosen, Ended, Ended]
    assert [draft.reason for draft in drafts] == ["length", "failed", "stop"]
    assert events[-1].draft is drafts[1] and drafts[1].error is error and scheduler.idle
    twin = decoder_of()
    for row in (0, 2):
        feed(twin, row, TEXT[:3])
        assert_same_state(decoder.take(row), twin.take(row))
    assert_same_state(decoder.take(1), decoder_of().take(1))
    with pytest.raises(TokenizerError, match="the prompt is empty"):
        scheduler.submit(Draft([], seed=0), row=1, go_on=True)


def test_write_raises_the_error_of_a_step_and_a_consumer_that_stops_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def wanted() -> list[Draft]:
        return [Draft(TEXT[:9], seed=seed, max_new_tokens=9) for seed in range(2)]

    for place in ("scores", "_reported", "step"):
        for error in (RuntimeError("out of memory"), KeyboardInterrupt()):
            with monkeypatch.context() as patch, pytest.raises(type(error)):
                fail(patch, place, error, at=0)
                list(write(decoder_of(), wanted()))
    decoder, twin = decoder_of(), decoder_of()
    events = write(decoder, wanted()[:1])
    while not isinstance(next(events), Chosen):
        pass
    del events
    feed(twin, 0, TEXT[:9])
    assert_same_state(decoder.take(0), twin.take(0))


def test_a_prompt_may_be_changed_once_a_draft_is_made_of_it() -> None:
    expected = written(decoder_of(), Draft(TEXT[:11], seed=3))
    prompt = torch.tensor(TEXT[:11])
    draft = Draft(prompt, seed=3)
    prompt[:] = 0
    assert written(decoder_of(), draft) == expected


REFUSED: list[tuple[dict[str, Any], dict[str, Any], type[Exception], str]] = [
    ({"prompt": []}, {}, TokenizerError, "the prompt is empty; give at least one token"),
    ({"prompt": []}, {"go_on": True, "row": 1}, TokenizerError, "the prompt is empty"),  # the row has read nothing
    ({"prompt": []}, {"state": "empty"}, TokenizerError, "the prompt is empty"),
    ({}, {"n_read": 1}, ValueError, r"^n_read \(1\) must leave some .*, and needs a state"),
    *(({"prompt": [1, 2]}, {"state": "empty", "n_read": n}, ValueError, "must leave some of the 2") for n in (-1, 2)),
    ({"prompt": [1, 13]}, {}, TokenizerError, "token id 13 is outside the vocabulary"),
    ({"prompt": [1.5]}, {}, ValueError, r"prompt, \[1.5\], must be integers"),
    ({"prompt": [[1, 2]]}, {}, ValueError, "must be the token ids of one text"),
    ({"sampling": Sampling(logit_bias={99: 1.0})}, {}, ConfigError, "outside the vocabulary"),
    ({"stopping": Stopping(tokens=[13])}, {}, ConfigError, "stop token id 13 is outside the vocabulary"),
    ({"stopping": Stopping(strings=["a"])}, {}, ConfigError, "a stop string .* needs the tokenizer"),
    *(({}, {"row": row}, ValueError, r"^row .* is not free \(free: \[1, 2\]\)") for row in (0, 3, -1)),
    *(({}, how, ValueError, "^go_on continues") for how in ({"go_on": True}, {"state": "full", "go_on": True, "row": 1})),
    ({}, {"state": "other"}, ValueError, "it was read by another model"),
    ({}, {"state": "longer"}, ValueError, "it is of another decoder: tgt_len"),
]


def test_what_cannot_begin_is_refused_at_once_and_changes_nothing() -> None:
    decoders = {"empty": decoder_of(), "full": decoder_of(), "longer": decoder_of(tgt_len=8)}
    decoders["other"] = Decoder(tiny_model(), batch_size=3, tgt_len=4)
    feed(decoders["full"], 0, TEXT[:9])
    scheduler = Scheduler(decoder_of())
    first, second = (Draft(TEXT[:11], seed=3, max_new_tokens=9) for _ in range(2))
    scheduler.submit(first)
    events = scheduler.tick()
    for draft, options, error, match in REFUSED:
        if "state" in options:
            options = {**options, "state": decoders[options["state"]].take(0)}
        with pytest.raises(error, match=match):
            scheduler.submit(Draft(**{"prompt": [1], "seed": 0, **draft}), **options)
        assert scheduler.free_rows == [1, 2]
    with pytest.raises(TypeError, match=r"^a text to write is a Draft, not a list; give Draft\(token_ids, seed=0\)$"):
        scheduler.submit([1, 2])  # type: ignore
    with pytest.raises(ValueError, match="a draft is written once, and this one has begun"):
        scheduler.submit(first)
    scheduler.submit(second)
    scheduler.submit(good())
    with pytest.raises(ValueError, match="tick until a text ends"):
        scheduler.submit(good())
    events += finish(scheduler)
    assert of(events, first) == of(events, second) and len(of(events, first)) == 10


def test_drafts_that_are_interrupted_while_one_is_read_end_and_no_other_begins() -> None:
    """Row 0 has text 2 by then."""
    begun: list[Draft] = []
    n_read: list[tuple[int, int]] = []

    def drafts() -> Iterator[Draft]:
        for number, (n, most) in enumerate([(1, 1), (1, 99), (30, 9), (1, 9), (1, 9)]):
            if len(n_read) < 5:
                begun.append(Draft(TEXT[:n], seed=number, max_new_tokens=most))
                yield begun[-1]

    ends: list[Draft] = []
    for event in write(Decoder(model_of("transformer_xl"), batch_size=2, tgt_len=4), drafts()):
        if isinstance(event, Read):
            n_read.append((begun.index(event.draft), event.n))
        ends += [event.draft] if isinstance(event, Ended) else []
        for draft in begun if len(n_read) >= 5 else ():
            draft.interrupt()
    assert n_read == [(0, 1), (1, 1), (2, 4), (2, 4), (2, 4)] and sorted(map(begun.index, ends)) == [0, 1, 2]
    assert [ended(draft) for draft in begun] == [("length", 1, 1), ("interrupted", 1, 3), ("interrupted", 12, 0)]


def test_an_interrupted_draft_still_has_the_token_of_a_step() -> None:
    """And its row reads it, if it is to be remembered."""
    drafts = [Draft(TEXT[:3], seed=seed, max_new_tokens=9, remember=True) for seed in range(3)]
    decoder, tokens = decoder_of(), dict[Draft, list[int]]()
    for event in write(decoder, drafts):
        if isinstance(event, Chosen):
            tokens.setdefault(event.draft, []).append(event.token)
            for draft in drafts if len(tokens[drafts[0]]) == 4 else ():
                draft.interrupt()
    assert [ended(draft) for draft in drafts] == [("interrupted", 3, 4)] * 3
    for row, draft in enumerate(drafts):
        twin = decoder_of()
        feed(twin, row, TEXT[:3])
        for token in tokens[draft]:
            twin.step([token] * 3, active=[other == row for other in range(3)])
        assert_same_state(decoder.take(row), twin.take(row))


# --- cancelling, and rows that go on ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "n_ticks"), [*(("transformer_xl", n) for n in (0, 1, 3)), *((kind, 6) for kind in KINDS)])
def test_a_cancelled_text_leaves_its_row_with_what_was_read_and_shown(kind: str, n_ticks: int) -> None:
    decoder, twin = decoder_of(kind), decoder_of(kind)
    scheduler = Scheduler(decoder)
    # prompts in 4 pieces, the last with the first token
    draft, other = (begin(scheduler, Draft(TEXT[:14], seed=1, max_new_tokens=99), row=row) for row in (2, 1))
    events = [event for _ in range(n_ticks) for event in scheduler.tick()]
    assert scheduler.cancel(draft) is not None
    assert ended(draft) == ("interrupted", min(14, 4 * n_ticks), max(0, n_ticks - 3))
    for first in range(0, draft.n_read, 4):
        twin.advance(2, TEXT[first : min(first + 4, draft.n_read)])
    shown = [token for token, *_ in of(events, draft)]
    for token in shown:
        twin.step([token] * 3, active=[False, False, True])
    assert len(shown) == draft.n_written
    assert_same_state(decoder.take(2), twin.take(2))
    assert scheduler.free_rows == [0, 2] and not scheduler.idle
    assert scheduler.cancel(draft) is None and scheduler.cancel(Draft([1], seed=0)) is None
    assert scheduler.cancel(other) is not None and scheduler.idle and scheduler.tick() == []


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_goes_on_from_a_state_with_the_same_bits(kind: str) -> None:
    """In another scheduler, next to other texts."""
    n_first = 6
    expected = written(decoder_of(kind), Draft(TEXT[:10], seed=5, max_new_tokens=20, likeliest=2), row=1)

    decoder = decoder_of(kind)
    begun = Draft(TEXT[:10], seed=5, max_new_tokens=n_first, likeliest=2, remember=True)
    first = written(decoder, begun, row=1)
    state = decoder.take(1)
    feed(decoder, 1, [1, 2, 3])  # it is a copy

    scheduler = Scheduler(decoder_of(kind))
    scheduler.submit(Draft(TEXT[:3], seed=0))  # it is writing when the other one comes
    scheduler.submit(Draft(TEXT[:17], seed=0), row=2)
    rest = Draft([], seed=5, max_new_tokens=20 - n_first, likeliest=2)
    rest.generator = begun.generator
    events = scheduler.tick()
    scheduler.submit(rest, row=1, state=state)
    while 1 not in scheduler.free_rows:
        events += scheduler.tick()
    assert [*first[:-1], *of(events, rest)] == expected


def test_a_text_goes_on_from_what_its_row_remembers() -> None:
    decoder, twin = decoder_of(), decoder_of()
    feed(twin, 1, TEXT[:9])
    feed(twin, 1, TEXT[20:26])
    scheduler = Scheduler(decoder)
    scheduler.submit(Draft(TEXT[:9], seed=0, max_new_tokens=0, remember=True), row=1)
    finish(scheduler)
    scheduler.submit(Draft(TEXT[20:26], seed=1, max_new_tokens=0), row=1, go_on=True)
    finish(scheduler)
    assert_same_state(decoder.take(1), twin.take(1))
    scheduler.submit(Draft(TEXT[:9], seed=0, max_new_tokens=0), row=1)  # without, it begins anew
    finish(scheduler)
    fresh = decoder_of()
    feed(fresh, 1, TEXT[:9])
    assert_same_state(decoder.take(1), fresh.take(1))


@pytest.mark.parametrize("remember", [False, True])
def test_the_last_token_is_read_only_if_it_is_to_be_remembered(remember: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    steps, step = [], Decoder.step
    monkeypatch.setattr(Decoder, "step", lambda self, *a, **k: (steps.append(1), step(self, *a, **k))[1])
    scheduler = Scheduler(decoder_of())
    scheduler.submit(Draft([1, 2], seed=0, max_new_tokens=8, remember=remember))
    finish(scheduler)
    assert len(steps) == 7 + remember


def test_one_piece_a_tick_and_every_prompt_in_the_end() -> None:
    """What is short comes first, one piece in four goes to those that wait longest, and no bit depends on the order."""
    drafts, alone = ([Draft((TEXT * 9)[:n], seed=i, max_new_tokens=3) for i, n in enumerate((90, 5, 61))] for _ in range(2))
    expected = [written(decoder_of(), draft) for draft in alone]
    scheduler = Scheduler(decoder_of())
    for draft in drafts:
        scheduler.submit(draft)
    events: list[Event] = []
    turns: list[int] = []
    while not scheduler.idle:
        events += (tick := scheduler.tick(pieces=1))
        read = [drafts.index(event.draft) for event in tick if isinstance(event, Read)]
        assert len(read) <= 1
        turns += read
    assert turns.index(1) <= 2 and 0 in turns[:8] and 2 in turns[:8]
    assert [of(events, draft) for draft in drafts] == expected


def events_of(draft: Draft) -> list[Event]:
    scheduler = Scheduler(decoder_of())
    scheduler.submit(draft)
    return finish(scheduler)


@pytest.mark.parametrize("n", [1, 4, 11])
def test_the_tokens_of_a_prompt_are_scored_and_the_text_stays_the_same(n: int) -> None:
    plain = events_of(Draft(TEXT[:n], seed=0, max_new_tokens=4, likeliest=2))
    events = events_of(Draft(TEXT[:n], seed=0, max_new_tokens=4, likeliest=2, score_prompt=True))
    scored = [each for event in events if isinstance(event, Read) for each in event.scored]
    assert [each[1:] for each in events if isinstance(each, Chosen)] == [each[1:] for each in plain if isinstance(each, Chosen)]
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

    monkeypatch.setattr("transformer_xl.generation.scheduler.choose_together", noted)
    settings = [Sampling(), Sampling(top_k=3), Sampling(repetition_penalty=1.2)]

    def drafts() -> list[Draft]:
        return [Draft(TEXT[i : i + 5], seed=i, max_new_tokens=8, sampling=settings[i // 2], likeliest=1) for i in range(6)]

    alone = [written(decoder_of(batch_size=7), draft, row=row) for row, draft in enumerate(drafts())]
    scheduler, several = Scheduler(decoder := decoder_of(batch_size=7)), drafts()
    for draft in several:
        scheduler.submit(draft)
    failing = begin(scheduler, drafts()[0])
    together.clear()
    events = scheduler.tick()
    while len(decoder._hidden.isnan().any(1).nonzero()):
        events += scheduler.tick()
    assert decoder.kept is not None
    decoder.kept.memory.values[0][:, 6] = torch.nan
    events += finish(scheduler)
    assert max(together) == 3
    assert [of(events, draft) for draft in several] == alone
    assert failing.reason == "failed" and "no token can be drawn" in str(failing.error)
