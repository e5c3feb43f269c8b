"""What the engine computes, whatever else it does: the bits of a decoder that does nothing else."""

import asyncio
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.server.conftest import BYTES, PIECE, ROWS, Start, decoder_of
from transformer_xl.generation.decoder import Decoder
from transformer_xl.generation.draft import Chosen, Ended, Event, Read
from transformer_xl.generation.sampling import Sampling
from transformer_xl.generation.stopping import Stopping
from transformer_xl.model.transformer_xl import TransformerXL
from transformer_xl.server.engine import Engine
from transformer_xl.server.jobs import Answer, Job, RefusalError, Session, Ticket, Writing

OWNER = "a" * 64


def ids(text: str) -> np.ndarray:
    return np.asarray(BYTES.encode(text), np.int64)


def writing(n: int = 5, seeds: tuple[int, ...] = (0,), **sampling: Any) -> Writing:
    return Writing(sampling=Sampling(**sampling), stopping=Stopping(), max_tokens=n, seeds=seeds)


class Waiter:
    """Takes the answers of a job, in any thread."""

    def __init__(self, engine: Engine, job: Job) -> None:
        self.answers: list[Answer] = []
        self.began = 0.0
        self._over = threading.Event()
        self._left = job.n_text
        self.ticket = engine.submit(job, self._tell)

    def _tell(self, answer: Answer) -> None:
        self.began = self.began or time.monotonic()
        self.answers.append(answer)
        if isinstance(answer, Chosen):
            self.ticket.n_taken += 1
        self._left -= isinstance(answer, Ended)
        if isinstance(answer, RefusalError) or self._left == 0:
            self._over.set()

    def wait(self) -> list[Answer]:
        assert self._over.wait(60), "the engine does not answer"
        if isinstance(self.answers[-1], RefusalError):
            raise self.answers[-1]
        return self.answers

    def tokens(self, index: int = 0) -> list[int]:
        return [each.token for each in self.wait() if isinstance(each, Chosen) and each.draft.label == index]


class Oracle:
    """A session as a decoder has it that does nothing else, in the row of its own; any row gives the same bits."""

    def __init__(self, model: TransformerXL) -> None:
        self.decoder: Decoder = decoder_of(model)
        self.tokens: list[int] = []

    def append(self, new: np.ndarray) -> None:
        if len(new) == 1:
            self.decoder.read([new.tolist(), *[[] for _ in range(ROWS - 1)]])
        else:
            for begin in range(0, len(new), PIECE):
                self.decoder.advance(0, new[begin : begin + PIECE])
        self.tokens += new.tolist()

    def written(self, tokens: list[int]) -> None:
        for token in tokens:
            self.decoder.read([[token], *[[] for _ in range(ROWS - 1)]])
        self.tokens += tokens

    def rewind(self, n: int) -> None:
        if n == len(self.tokens):
            self.decoder.reset()
            self.tokens = []
            return
        self.tokens = self.tokens[: len(self.tokens) - n]
        self.decoder.rewind(0, n + 1)
        self.decoder.read([[self.tokens[-1]], *[[] for _ in range(ROWS - 1)]])

    def state(self) -> dict[str, torch.Tensor]:
        return self.decoder.take(0).tensors


def same(engine: Engine, session: Session, oracle: Oracle) -> None:
    state, text = engine.call(lambda: engine.snapshot(session)).result(30)
    assert text.n_tokens == len(oracle.tokens)
    tail = list(text.tail)  # shorter after it went back, because what was before it is not kept
    assert tail == oracle.tokens[len(oracle.tokens) - len(tail) :] and len(tail) > min(400, len(oracle.tokens) - 1)
    if not oracle.tokens:
        assert state is None
        return
    assert state is not None
    expected = oracle.state()
    assert state.tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(state.tensors[name], tensor), name


def session_of(service: Any) -> Session:
    return asyncio.run(service.sessions.create(OWNER))


def random_program(seed: int, n_round: int, start: Start, model: TransformerXL) -> int:
    """Append, generate, ask, fork, rewind, park, save and restore, on more sessions than rows, all at once.

    What each session remembers in the end is compared with a decoder that did nothing else. Returns the number of calls.
    """
    service = start(stored=True)
    n_call = 0
    engine, draw = service.engine, np.random.default_rng(seed)
    sessions = [session_of(service) for _ in range(2 * ROWS)]
    oracles = [Oracle(model) for _ in sessions]
    for _ in range(n_round):
        chosen = draw.choice(len(sessions), ROWS, replace=False)
        begun: list[tuple[int, str, Waiter, np.ndarray]] = []
        for i in chosen.tolist():
            what = str(draw.choice(["append", "generate", "ask"]))
            prompt = draw.integers(0, 256, int(draw.choice([1, 3, 8, 21]))) if what != "generate" else np.empty(0, np.int64)
            if what == "generate" and not oracles[i].tokens:
                continue
            writes = None if what == "append" else writing(int(draw.integers(1, 7)), seeds=(int(draw.integers(99)),))
            job = Job(owner=OWNER, prompt=prompt, writing=writes, session=sessions[i], forks=what == "ask")
            begun.append((i, what, Waiter(engine, job), prompt))
        n_call += len(begun) + 1
        for i, what, waiter, prompt in begun:
            tokens = waiter.tokens()
            if what != "ask":
                oracles[i].append(prompt) if len(prompt) else None
                oracles[i].written(tokens)
        i = int(draw.integers(len(sessions)))
        what = str(draw.choice(["rewind", "park", "fork", "nothing", "restore"]))
        if what == "rewind" and sessions[i].n_rewindable >= 1:
            n = int(draw.integers(1, sessions[i].n_rewindable + 1))
            engine.call(lambda s=sessions[i], n=n: engine.rewind(s, n)).result(30)
            oracles[i].rewind(n)
        elif what == "park":
            engine.call(lambda s=sessions[i]: engine.park(s)).result(30)
        elif what == "restore" and oracles[i].tokens:
            asyncio.run(service.sessions.save(sessions[i], name="x"))
            store = service.sessions.require_store()
            saved = store.read(OWNER, store.path(OWNER, "x", saved=True))
            engine.call(lambda s=sessions[i]: engine.park(s)).result(30)
            sessions[i].parked = saved.parked
            assert saved.text.n_tokens == len(oracles[i].tokens)
        elif what == "fork":
            j = int(draw.integers(len(sessions)))
            source = oracles[j]
            fork = asyncio.run(service.sessions.create(OWNER, source=sessions[j].id))
            engine.call(lambda s=sessions[i]: engine.release(s)).result(30)
            service.sessions.forget(sessions[i])
            sessions[i] = fork
            oracles[i] = Oracle(model)
            oracles[i].tokens = list(source.tokens)
            if source.tokens:
                oracles[i].decoder.put(0, source.decoder.take(0))
    for session, oracle in zip(sessions, oracles, strict=True):
        same(engine, session, oracle)
    assert sum(len(oracle.tokens) for oracle in oracles) > 100
    return n_call


@pytest.mark.parametrize("seed", range(2))
def test_random_programs_on_many_sessions_have_the_bits_of_one_alone(seed: int, start: Start, model: TransformerXL) -> None:
    random_program(seed, 30, start, model)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seed", "n_round"), [(0, 200), *(pytest.param(seed, 900, marks=pytest.mark.long) for seed in (1, 2, 3))]
)
def test_long_programs_have_the_bits_of_a_session_alone(seed: int, n_round: int, start: Start, model: TransformerXL) -> None:
    assert random_program(2 + seed, n_round, start, model) >= 3.6 * n_round


def test_texts_of_a_prompt_are_those_of_the_scheduler_alone(start: Start) -> None:
    engine = start().engine
    together = Waiter(engine, Job(owner=OWNER, prompt=ids("once upon a time"), writing=writing(6, seeds=(1, 2, 3, 4, 5))))
    for index, seed in enumerate((1, 2, 3, 4, 5)):
        alone = Waiter(engine, Job(owner=OWNER, prompt=ids("once upon a time"), writing=writing(6, seeds=(seed,))))
        assert together.tokens(index) == alone.tokens()
    assert sum(each.n for each in together.answers if isinstance(each, Read)) == 16, "the prompt is read once"
    assert [each.draft.n_written for each in together.answers if isinstance(each, Ended)] == [6] * 5


@pytest.mark.parametrize("n_prefix", [2, 100])
def test_prompts_that_begin_alike_have_the_texts_of_prompts_read_whole(n_prefix: int, start: Start) -> None:
    """Some at once and some one after another, with several texts each, and with more beginnings than are kept."""
    plain, keeping, draw = start().engine, start(n_prefix=n_prefix).engine, np.random.default_rng(n_prefix)
    stems = [draw.integers(0, 256, 45) for _ in range(2)]
    kept = 0
    for seed in range(12):
        stem = stems[int(draw.integers(2))][: int(draw.integers(1, 46))]
        prompt = np.concatenate([stem, draw.integers(0, 256, int(draw.integers(1, 20)))])
        texts = writing(4, seeds=(seed, seed + 50)[: 1 + seed % 2], repetition_penalty=1.3)
        job = Job(owner=OWNER, prompt=prompt, writing=texts, likeliest=2)
        pairs = [(Waiter(plain, job), Waiter(keeping, job)) for _ in range(1 + seed % 3)]
        for expected, waiter in pairs:
            for side in (waiter, expected):
                side.wait()
            for index in range(job.n_text):
                written, alone = (
                    [each[1:] for each in side.answers if isinstance(each, Chosen) and each.draft.label == index]
                    for side in (waiter, expected)
                )
                assert written == alone, "with log-probabilities, to the last bit"
            n_read, whole = (sum(each.n for each in side.answers if isinstance(each, Read)) for side in (waiter, expected))
            assert n_read <= whole == len(prompt)
            kept += whole - n_read
    assert kept >= 4 * PIECE


def test_the_next_prompt_is_read_from_where_it_differs(start: Start) -> None:
    """The last whole piece of a prompt, and the place where two of them part, are kept; of the same owner only."""
    engine, text = start(n_prefix=10).engine, ids("0123456701234567012345670123456")
    other = np.concatenate([text[:17], ids("and now for something else")])

    def kept(prompt: np.ndarray, owner: str = OWNER, **more: Any) -> int:
        answers = Waiter(engine, Job(owner=owner, prompt=prompt, **more)).wait()
        n_read = sum(each.n for each in answers if isinstance(each, Read))
        (end,) = (each for each in answers if isinstance(each, Ended))
        assert end.draft.n_read == len(prompt)
        return len(prompt) - n_read

    assert kept(text) == 0
    assert kept(np.append(text[:-1], 5)) == 24, "the last piece and no more is read"
    assert kept(np.concatenate([text, text])) == 24, "and what comes after it"
    assert [kept(other), kept(np.append(other[:20], 5))] == [0, 16], "where it left the first, from the second time on"
    assert kept(text, owner="b" * 64) == 0, "keys share nothing"
    assert kept(text, score=True) == 0, "each of its tokens has a score"
    assert [kept(text[:n]) for n in (9, 9, 8)] == [0, 8, 0], "some tokens are read, so that what follows is known"


def test_scores_of_a_prompt_are_those_of_a_decoder(start: Start, model: TransformerXL) -> None:
    engine, text = start().engine, ids("a text that is longer than a piece")
    waiter = Waiter(engine, Job(owner=OWNER, prompt=text, score=True, likeliest=3))
    scored = [chosen for each in waiter.wait() if isinstance(each, Read) for chosen in each.scored]
    assert [each.token for each in scored] == text.tolist() and scored[0].log_probability is None
    (nats, *_) = decoder_of(model).score([text.tolist(), *[[] for _ in range(ROWS - 1)]])
    assert [-each.log_probability for each in scored[1:] if each.log_probability] == pytest.approx(nats[1:].tolist(), abs=1e-6)
    for each in scored[1:]:
        assert len(each.likeliest) == 3 and max(value for _, value in each.likeliest) == each.likeliest[0][1]
        assert dict(each.likeliest).get(each.token, each.log_probability) == each.log_probability, "the same float"


def test_a_cancelled_text_is_remembered_as_far_as_it_was_shown(start: Start, model: TransformerXL) -> None:
    service = start()
    session = session_of(service)
    oracle = Oracle(model)
    for n in (1, 4, 9):
        waiter = Waiter(service.engine, Job(owner=OWNER, prompt=ids("ab"), writing=writing(10_000), session=session))
        while sum(isinstance(each, Chosen) for each in waiter.answers) < n:
            pass
        service.engine.cancel(waiter.ticket, "stopped")
        tokens = waiter.tokens()
        assert n <= len(tokens) < 10_000
        oracle.append(ids("ab"))
        oracle.written(tokens)
        same(service.engine, session, oracle)
    assert session.busy is None and service.engine.is_idle


def test_a_busy_session_refuses_another_call_and_answers_questions(start: Start) -> None:
    service = start()
    session = session_of(service)
    waiter = Waiter(service.engine, Job(owner=OWNER, prompt=ids("ab"), writing=writing(100_000), session=session))
    while len(waiter.answers) < 3:
        pass
    with pytest.raises(RefusalError, match="the session is busy; wait until its call has ended"):
        service.engine.submit(Job(owner=OWNER, prompt=ids("x"), session=session), print)
    with pytest.raises(RefusalError, match="the session is busy; wait until its call has ended"):
        service.engine.call(lambda: service.engine.rewind(session, 1)).result(30)
    asked = Waiter(service.engine, Job(owner=OWNER, prompt=ids("x?"), writing=writing(3), session=session, forks=True))
    assert len(asked.tokens()) == 3
    service.engine.cancel(waiter.ticket, "stopped")
    waiter.wait()


def test_more_than_the_queue_holds_is_refused_at_once(start: Start) -> None:
    engine = start(queue=4, per_owner=3).engine
    running = [Waiter(engine, Job(owner=OWNER, prompt=ids("a"), writing=writing(100_000))) for _ in range(ROWS)]
    while any(len(each.answers) < 2 for each in running):
        pass
    waiting = [Waiter(engine, Job(owner=OWNER, prompt=ids("a"), writing=writing(2))) for _ in range(3)]
    with pytest.raises(RefusalError, match="3 requests of this key wait already; ask again later") as caught:
        engine.submit(Job(owner=OWNER, prompt=ids("a")), print)
    assert (caught.value.status, 1 <= (caught.value.retry_after or 0) <= 60) == (429, True)
    other = Waiter(engine, Job(owner="b" * 64, prompt=ids("a"), writing=writing(2)))
    with pytest.raises(RefusalError, match=r"^4 requests wait already"):
        engine.submit(Job(owner="b" * 64, prompt=ids("a")), print)
    engine.cancel(running[0].ticket, "stopped")
    other.wait()
    for each in running[1:]:
        engine.cancel(each.ticket, "stopped")
    for each in (*running, *waiting):
        each.wait()
    assert all(other.began < each.began for each in waiting[1:]), "owners take turns"


def test_a_text_that_fails_ends_alone(start: Start) -> None:
    service = start()
    long = Waiter(service.engine, Job(owner=OWNER, prompt=ids("a"), writing=writing(300)))
    session = session_of(service)
    empty = Waiter(service.engine, Job(owner=OWNER, prompt=ids(""), writing=writing(3), session=session))
    with pytest.raises(RefusalError, match="the prompt is empty"):
        empty.wait()
    banned = Waiter(service.engine, Job(owner=OWNER, prompt=ids("a"), writing=writing(3, logit_bias={999: 1.0})))
    with pytest.raises(RefusalError, match="token id 999"):
        banned.wait()
    assert len(long.tokens()) == 300 and session.busy is None


def test_a_text_whose_reader_is_far_behind_ends(start: Start, model: TransformerXL, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformer_xl.server import engine as module

    monkeypatch.setattr(module, "_AHEAD", 8)
    service = start()
    session, answers = session_of(service), list[Answer]()
    job = Job(owner=OWNER, prompt=ids("ab"), writing=writing(100_000), session=session, streams=True)
    ticket = service.engine.submit(job, answers.append)
    other = Waiter(service.engine, Job(owner=OWNER, prompt=ids("a"), writing=writing(200)))
    assert len(other.tokens()) == 200, "who reads goes on"
    end = answers[-1]
    assert isinstance(end, Ended) and end.draft.reason == "interrupted" and ticket.cancelled == "slow_reader"
    shown = [each.token for each in answers if isinstance(each, Chosen)]
    assert len(shown) == 9
    oracle = Oracle(model)
    oracle.append(ids("ab"))
    oracle.written(shown)
    same(service.engine, session, oracle)


def test_a_reader_who_has_taken_all_is_not_behind(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    service, tickets = start(), list[Ticket]()
    submit = service.engine.submit

    def kept(job: Job, tell: Callable[[Answer], object]) -> Ticket:
        tickets.append(submit(job, tell))
        return tickets[-1]

    async def take(job: Job) -> list[Answer]:
        return [told[1] async for told in service.run(job) if told]

    monkeypatch.setattr(service.engine, "submit", kept)
    for streams in (True, False):
        answers = asyncio.run(take(Job(owner=OWNER, prompt=ids("ab"), writing=writing(20), streams=streams)))
        assert sum(isinstance(answer, Chosen) for answer in answers) == 20
    assert [ticket.n_told - ticket.n_taken for ticket in tickets] == [0, 0]


def test_an_answer_that_is_not_streamed_has_no_slow_reader(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformer_xl.server import engine as module

    monkeypatch.setattr(module, "_AHEAD", 0)
    engine, answers = start().engine, list[Answer]()
    engine.submit(Job(owner=OWNER, prompt=ids("ab"), writing=writing(100)), answers.append)
    assert len(Waiter(engine, Job(owner=OWNER, prompt=ids("a"), writing=writing(200))).tokens()) == 200
    end = answers[-1]
    assert isinstance(end, Ended) and (end.draft.reason, end.draft.n_written) == ("length", 100)


def test_a_fault_of_ours_is_told_and_the_thread_goes_on(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = start().engine

    def fail(**_: Any) -> None:
        raise RuntimeError("ours")

    with monkeypatch.context() as patch:
        patch.setattr(engine._scheduler, "tick", fail)
        with pytest.raises(RefusalError, match=r"computing failed \(RuntimeError\)"):
            Waiter(engine, Job(owner=OWNER, prompt=ids("a"), writing=writing(3))).wait()
    texts = Waiter(engine, Job(owner=OWNER, prompt=ids("a"), writing=writing(10**6, seeds=(1, 2, 3))))
    while engine.n_busy < 3:
        time.sleep(0.01)
    with monkeypatch.context() as patch:
        patch.setattr(engine._scheduler, "tick", fail)
        with pytest.raises(RefusalError, match=r"computing failed \(RuntimeError\)"):
            texts.wait()
        engine.call(lambda: None).result(10)
    assert sum(isinstance(each, RefusalError) for each in texts.answers) == 1, "told once, however many texts it has"
    assert len(Waiter(engine, Job(owner=OWNER, prompt=ids("a"), writing=writing(3))).tokens()) == 3
    assert engine.is_healthy and engine.is_idle


def test_only_a_tick_that_does_not_end_is_stuck(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, later = start().engine, 0.0
    ticking, goes_on = threading.Event(), threading.Event()
    tick = engine._scheduler.tick

    def slow_tick(**options: Any) -> list[Event]:
        ticking.set()
        assert goes_on.wait(60)
        return tick(**options)

    monkeypatch.setattr("transformer_xl.server.engine._IDLE_SECONDS", 60.0)
    monkeypatch.setattr(engine._scheduler, "tick", slow_tick)
    engine.call(lambda: None).result(10)
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + later, time=time.time)
    monkeypatch.setattr("transformer_xl.server.engine.time", clock)
    later = 60.0
    waiter = Waiter(engine, Job(owner=OWNER, prompt=ids("a"), writing=writing(3)))
    assert ticking.wait(60) and engine.n_busy
    begins = engine.is_healthy
    later += 11
    stuck = not engine.is_healthy
    goes_on.set()
    assert len(waiter.tokens()) == 3 and engine.is_healthy
    assert begins, "it was idle for a minute before"
    assert stuck


def test_a_job_that_comes_while_rows_are_cleared_begins_at_once(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, clear = start().engine, Engine._clear
    waiters: list[Waiter] = []

    def slow_clear(self: Engine, rows: list[int]) -> None:
        if not waiters:
            waiters.append(Waiter(engine, Job(owner=OWNER, prompt=ids("b"), writing=writing(3))))
        clear(self, rows)

    monkeypatch.setattr("transformer_xl.server.engine._IDLE_SECONDS", 60.0)
    monkeypatch.setattr(Engine, "_clear", slow_clear)
    Waiter(engine, Job(owner=OWNER, prompt=ids("a"), writing=writing(3))).wait()
    while not waiters:
        time.sleep(0.01)
    begin = time.monotonic()
    waiters[0].wait()
    assert time.monotonic() - begin < 30, "it does not wait until somebody looks again"


def test_what_takes_too_long_is_ended(start: Start) -> None:
    engine = start().engine
    waiter = Waiter(engine, Job(owner=OWNER, prompt=ids("a"), writing=writing(10**6), timeout=0.2))
    end = waiter.wait()[-1]
    assert isinstance(end, Ended) and end.draft.reason == "interrupted" and waiter.ticket.cancelled == "timeout"


def test_rows_hold_nothing_of_texts_that_are_over(start: Start) -> None:
    service = start()
    session = session_of(service)
    Waiter(service.engine, Job(owner=OWNER, prompt=ids("secret"), session=session)).wait()
    Waiter(service.engine, Job(owner=OWNER, prompt=ids("another"), writing=writing(3))).wait()
    asyncio.run(service.sessions._end(session))

    def held() -> list[int]:
        decoder = service.engine.decoder
        return [int(decoder.take(row).tensors["n_valid"]) for row in range(ROWS)]

    while any(service.engine.call(held).result(30)):
        pass
    assert session.parked is None and session.id not in service.sessions.live


def test_a_call_that_nobody_waits_for_any_more_ends_nothing(start: Start) -> None:
    engine = start().engine
    engine.call(lambda: threading.Event().wait(0.1))
    engine.call(lambda: 1).cancel()
    assert engine.call(lambda: 2).result(30) == 2


def test_a_session_that_waits_gives_its_row_to_who_is_first(start: Start, model: TransformerXL) -> None:
    """Or all would wait for each other."""
    service = start()
    engine, sessions = service.engine, [session_of(service) for _ in range(ROWS)]
    for session in sessions:
        Waiter(engine, Job(owner=OWNER, prompt=ids("ab"), session=session)).wait()
    held = engine.call(lambda: threading.Event().wait(0.2))
    first = Waiter(engine, Job(owner=OWNER, prompt=ids("first"), writing=writing(3)))
    after = [Waiter(engine, Job(owner=OWNER, prompt=ids("cd"), session=session)) for session in sessions]
    held.result(30)
    for each in (first, *after):
        each.wait()
    for session in sessions:
        oracle = Oracle(model)
        oracle.append(ids("ab"))
        oracle.append(ids("cd"))
        same(engine, session, oracle)


def test_a_question_to_a_session_that_is_gone_has_no_answer(start: Start) -> None:
    service = start()
    session = session_of(service)
    Waiter(service.engine, Job(owner=OWNER, prompt=ids("ab"), session=session)).wait()
    service.engine.call(lambda: service.engine.release(session)).result(30)
    asked = Waiter(service.engine, Job(owner=OWNER, prompt=ids("x"), session=session, forks=True, score=True))
    with pytest.raises(RefusalError, match="no such session"):
        asked.wait()


def test_what_waits_for_a_session_that_is_deleted_is_told_so(start: Start) -> None:
    service = start()
    engine, session = service.engine, session_of(service)
    running = [Waiter(engine, Job(owner=OWNER, prompt=ids("a"), writing=writing(100_000))) for _ in range(ROWS)]
    while any(len(each.answers) < 2 for each in running):
        time.sleep(0.001)
    waiting = Waiter(engine, Job(owner=OWNER, prompt=ids("a"), session=session))
    engine.call(lambda: engine.release(session)).result(30)
    engine.cancel(running[0].ticket, "stopped")
    with pytest.raises(RefusalError, match="no such session"):
        waiting.wait()
    assert session.row is None, "it does not come back"
    for each in running:
        engine.cancel(each.ticket, "stopped")
