"""What all routes share: the model and its tokens, sessions, jobs that run, whose a request is, and what errors look like."""

import asyncio
import math
import time
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import suppress
from functools import partial
from typing import Annotated, Any

import numpy as np
from fastapi import Depends, Request

from transformer_xl.generation.draft import Chosen, Ended, Event, Read
from transformer_xl.model.softmax import check_ids
from transformer_xl.server.engine import Engine, why_cancelled
from transformer_xl.server.jobs import Answer, Job, RefusalError, Session, Ticket
from transformer_xl.server.sessions import Sessions
from transformer_xl.server.wire import Error, Reply
from transformer_xl.tokenizers.base import Tokenizer

_PING_SECONDS = 15.0


class Model(Reply):
    """The model, as OpenAI describes one; `meta` holds its sizes."""

    id: str
    object: str = "model"
    created: int
    owned_by: str = "transformer_xl"
    meta: dict[str, Any]


class Service:
    """One server's engine and sessions. Its coroutines run in one event loop.

    Args:
        engine: computes.
        sessions: of this process.
        model: the name that clients give.
        chats: messages are read as lines of a text (`--chat-template plain`).
    """

    def __init__(self, engine: Engine, sessions: Sessions, *, model: str, chats: bool = False) -> None:
        self.engine, self.sessions, self.metrics, self.chats = engine, sessions, engine.metrics, chats
        decoder, tokenizer = engine.decoder, engine.tokenizer
        meta = {
            "mem_len": decoder.mem_len,
            "vocab_size": tokenizer.vocab_size,
            "tokenizer": tokenizer.kind,
            "precision": decoder.precision,
            "parameters": sum(p.numel() for p in decoder.model.parameters()),
            "model_sha256": engine.format.own.model,
            "rows": decoder.batch_size,
            "session_bytes": sessions.bytes_each,
        }
        self.model = Model(id=model, created=int(time.time()), meta=meta)
        self._told = deque[tuple[asyncio.Queue[tuple[Job, Answer]], Job, Answer]]()
        self.metrics.rows.set(decoder.batch_size)
        self.metrics.session_bytes.set(sessions.bytes_each)
        self.metrics.queue.set_function(lambda: engine.n_waiting)
        self.metrics.rows_busy.set_function(lambda: engine.n_busy)
        for state in ("row", "parked"):
            self.metrics.sessions.labels(state).set_function(partial(self._n_sessions, state))

    def _n_sessions(self, state: str) -> int:
        return sum(each.state == state for each in list(self.sessions.live.values()))

    @property
    def tokenizer(self) -> Tokenizer:
        """Of the model."""
        return self.engine.tokenizer

    def require_model(self, name: str | None) -> None:
        """Refuse another model's name."""
        if name not in (None, self.model.id):
            message = f"the model '{name[:100]}' does not exist; this server has '{self.model.id}'"
            raise RefusalError(404, message, code="model_not_found")

    def fingerprint(self, seed: int) -> str:
        """Return what decides the bytes of an answer: with the same one and the same request, it is the same."""
        decoder = self.engine.decoder
        return f"{self.engine.format.own.model[:12]}-{decoder.precision}-rows{decoder.batch_size}-seed{seed}"

    async def encode(self, text: str | list[int]) -> np.ndarray:
        """Return the token ids of a text, or ids as they are; TokenizerError for what is not in the vocabulary."""
        return await asyncio.to_thread(self._ids, text)

    def _ids(self, text: str | list[int]) -> np.ndarray:
        if isinstance(text, str):
            return np.asarray(self.tokenizer.encode(text), np.int64)
        ids = np.array(text, np.int64)
        check_ids(ids, vocab_size=self.tokenizer.vocab_size)
        return ids

    async def run(self, *jobs: Job) -> AsyncGenerator[tuple[Job, Event] | None, None]:
        """Run jobs, as many side by side as there are rows, and yield what happens; None where nothing has come for a while."""
        loop, answers, waiting = asyncio.get_running_loop(), asyncio.Queue[tuple[Job, Answer]](), deque(jobs)
        tickets, n_open, last = dict[Job, Ticket](), dict[Job, int](), dict[Job, float]()

        def tell(job: Job, answer: Answer) -> None:
            self._told.append((answers, job, answer))
            if len(self._told) == 1:  # only the engine tells, and one call takes all that it has told by then
                with suppress(RuntimeError):  # the loop has ended
                    loop.call_soon_threadsafe(self._deliver)

        try:
            while waiting or n_open:
                while waiting and len(n_open) < self.engine.decoder.batch_size:
                    job = waiting.popleft()
                    tickets[job], n_open[job] = self.engine.submit(job, partial(tell, job)), job.n_text
                try:
                    async with asyncio.timeout(_PING_SECONDS):  # wait_for may lose a cancellation
                        job, answer = await answers.get()
                except TimeoutError:
                    yield None
                    continue
                if isinstance(answer, RefusalError):
                    raise answer
                if isinstance(answer, Ended):
                    if answer.draft.reason == "interrupted":
                        raise why_cancelled(tickets[job])
                    n_open[job] -= 1
                    if not n_open[job]:
                        del n_open[job]
                elif isinstance(answer, Chosen):
                    now = time.monotonic()
                    tickets[job].n_taken += 1
                    histogram = self.metrics.between if job in last else self.metrics.first
                    histogram.observe(now - last.get(job, tickets[job].submitted))
                    last[job] = now
                self._count(answer)
                yield job, answer
        finally:
            for job in n_open:  # if any, nobody waits for them any more
                self.engine.cancel(tickets[job], "client")

    def _deliver(self) -> None:
        """Hand over what the engine has told since the last time."""
        while self._told:
            answers, job, answer = self._told.popleft()
            answers.put_nowait((job, answer))

    def _count(self, event: Event) -> None:
        """Count what was scored, and refuse what is no number, as after a file whose memory was made up."""
        tokens = event.scored if isinstance(event, Read) else (event,) if isinstance(event, Chosen) else ()
        known = [each.log_probability for each in tokens if each.log_probability is not None]
        if not all(map(math.isfinite, known)):
            raise RefusalError(409, "what the session remembers gives no numbers; delete it", code="not_finite")
        if isinstance(event, Read):
            self.metrics.scored(-sum(known), len(known))


ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {
        "model": Error,
        "description": "400: a field does not fit; 401: a valid key is needed; 403: the origin or the name of the host is not "
        "allowed, or the quota is full; 404: there is no such model, session or name; 408: the body comes too slowly; 409: the "
        "session is elsewhere (`at`), busy, or not what the call needs; 413: the body is too large; 415: it has another "
        "content type; 429: too many requests wait, see Retry-After",
    },
    "5XX": {
        "model": Error,
        "description": "500: a fault of the server; 501: it was started without this; 503: it is starting or ending, has no "
        "room, or another one has the session, see Retry-After; 504: it took longer than `timeout`; 507: the disk is full",
    },
}
"""Answers of every route."""

_EVENT = {
    "type": "object",
    "properties": {"data": {"type": "string", "contentMediaType": "application/json"}},
    "required": ["data"],
}
EVENTS: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {"schema": _EVENT}}}}
"""Answers of routes that send events where they are asked to."""


async def _service(request: Request) -> Service:
    return request.app.state.service


async def _owner(request: Request) -> str:
    return request.scope["state"]["owner"]


Serving = Annotated[Service, Depends(_service)]
Owner = Annotated[str, Depends(_owner)]


async def _opened(service: Serving, owner: Owner, session_id: str) -> Session:
    return await service.sessions.open(owner, session_id)


OpenedSession = Annotated[Session, Depends(_opened)]
"""The session in the path, from its file if it is not in memory."""
