"""Texts of jobs in OpenAI's shapes: completions, whole or as they come."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from transformer_xl.generation.draft import Chosen
from transformer_xl.reading.rows import whole_characters
from transformer_xl.server.jobs import End, Job, Piece, Progress
from transformer_xl.server.service import Service
from transformer_xl.server.wire import Logprobs, Reply, WritingFields


class Logs(Reply):
    """Tokens with their log-probabilities, as in OpenAI's completions."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class Choice(Reply):
    """A text that was written."""

    index: int
    text: str
    logprobs: Logs | None
    finish_reason: str | None


class SaidMessage(Reply):
    """What the assistant says."""

    role: str
    content: str
    refusal: None = None


class ChatChoice(Reply):
    """A message that was written."""

    index: int
    message: SaidMessage
    logprobs: dict[str, Any] | None
    finish_reason: str | None


class PromptDetails(Reply):
    """What of the prompts had been read before."""

    cached_tokens: int


class Usage(Reply):
    """How many tokens were read and written."""

    prompt_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens: int
    total_tokens: int


class _Written(Reply):
    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str
    usage: Usage


class CompletionAnswer(_Written):
    """Texts, as in OpenAI's completions."""

    choices: list[Choice]


class ChatAnswer(_Written):
    """Messages, as in OpenAI's chats."""

    choices: list[ChatChoice]


_OVER = object()
"""Says that nothing more comes of a job."""


class Completion:
    """The texts of some jobs, as they come or whole."""

    prefix, object, object_of_chunks = "cmpl", "text_completion", "text_completion"

    def __init__(self, service: Service, body: WritingFields, jobs: list[Job], echoes: list[str] | None = None) -> None:
        self._service, self._body, self._jobs, self._echoes = service, body, jobs, echoes or []
        self._n = [len(job.writing.seeds) if job.writing else 1 for job in jobs]
        self._first = [sum(self._n[:i]) for i in range(len(jobs))]
        self._n_read = self._n_kept = self._n_written = 0

    async def whole(self) -> dict[str, Any]:
        """Return the choices and the usage."""
        parts: dict[int, list[dict[str, Any]]] = {}
        async for choice in self._choices():
            if choice is not None:
                parts.setdefault(choice["index"], []).append(choice)
        choices = [self._whole(_joined(parts[index])) for index in sorted(parts)]
        return {"object": self.object, "choices": choices, "usage": self._usage()}

    async def chunks(self, about: dict[str, Any]) -> AsyncGenerator[dict[str, Any] | None, None]:
        """Yield the bodies of a stream."""
        about = about | {"object": self.object_of_chunks}
        async for choice in self._choices():
            yield None if choice is None else about | {"choices": [self._part(choice)]}
        options = self._body.stream_options
        if options and options.include_usage:
            yield about | {"choices": [], "usage": self._usage()}

    def _whole(self, choice: dict[str, Any]) -> dict[str, Any]:
        return choice

    def _part(self, choice: dict[str, Any]) -> dict[str, Any]:
        """Return what is new of a choice as it is shown in a stream."""
        return choice

    def _usage(self) -> dict[str, Any]:
        read, written = self._n_read, self._n_written
        details = {"cached_tokens": self._n_kept}
        return {
            "prompt_tokens": read,
            "prompt_tokens_details": details,
            "completion_tokens": written,
            "total_tokens": read + written,
        }

    async def _choices(self) -> AsyncGenerator[dict[str, Any] | None, None]:
        """Yield what is new of any text, of as many jobs side by side as there are rows."""
        if len(self._jobs) == 1:
            async with aclosing(self._of_job(0)) as choices:
                async for choice in choices:
                    yield choice
            return
        queue: asyncio.Queue[Any] = asyncio.Queue(64)
        side_by_side = asyncio.Semaphore(self._service.engine.decoder.batch_size)

        async def one(place: int) -> None:
            try:
                async with side_by_side, aclosing(self._of_job(place)) as choices:
                    async for choice in choices:
                        await queue.put(choice)
                await queue.put(_OVER)
            except Exception as error:
                await queue.put(error)

        tasks = [asyncio.ensure_future(one(place)) for place in range(len(self._jobs))]
        n_open = len(tasks)
        try:
            while n_open:
                came = await queue.get()
                if isinstance(came, Exception):
                    raise came
                if came is _OVER:
                    n_open -= 1
                else:
                    yield came
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _of_job(self, place: int) -> AsyncGenerator[dict[str, Any] | None, None]:
        job, first = self._jobs[place], self._first[place]
        n = self._body.likeliest
        logs = [None if n is None else Logprobs(self._service.tokenizer, n) for _ in range(self._n[place])]
        scored: list[Chosen] = []
        echoed = not self._echoes

        async with aclosing(self._service.run(job)) as answers:
            async for each in answers:
                if isinstance(each, (Piece, End)) and not echoed:
                    echoed = True
                    for i, log in enumerate(logs):
                        yield _choice(first + i, self._echoes[place], log.of(scored) if log and job.score else None)
                if each is None:
                    yield None
                elif isinstance(each, Progress):
                    scored += each.scored
                elif isinstance(each, Piece):
                    log = logs[each.index]
                    logprobs = log.of([each.token], [each.text]) if log else None
                    yield _choice(first + each.index, whole_characters(each.text), logprobs)
                elif isinstance(each, End):
                    self._n_read += each.n_read
                    self._n_kept += each.n_kept
                    self._n_written += each.n_written
                    reason = "stop" if each.reason == "stop" else "length"
                    yield _choice(first + each.index, whole_characters(each.rest), None, reason)


class Chat(Completion):
    """The same as messages of an assistant."""

    prefix, object, object_of_chunks = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, service: Service, body: WritingFields, jobs: list[Job]) -> None:
        super().__init__(service, body, jobs)
        self._named, self._begun = set[int](), set[int]()  # which choices have a role, and which have text

    def _whole(self, choice: dict[str, Any]) -> dict[str, Any]:
        message = {"role": "assistant", "content": choice["text"].lstrip(), "refusal": None}
        return {**_as_chat(choice), "message": message}

    def _part(self, choice: dict[str, Any]) -> dict[str, Any]:
        index, text = choice["index"], choice["text"]
        if index not in self._begun:  # the model writes a space after "assistant:"
            text = text.lstrip()
        if text:
            self._begun.add(index)
        delta = {"content": text} if index in self._named else {"role": "assistant", "content": text}
        self._named.add(index)
        return {**_as_chat(choice), "delta": delta}


def _as_chat(choice: dict[str, Any]) -> dict[str, Any]:
    """Return what a choice has besides its text, in the shape of chats."""
    logs = choice["logprobs"]
    if logs is not None:
        columns = (logs[name] for name in ("tokens", "token_logprobs", "top_logprobs"))
        logs = {"content": [_token(*each) for each in zip(*columns, strict=True)]}
    return {"index": choice["index"], "logprobs": logs, "finish_reason": choice["finish_reason"]}


def _token(text: str, value: float, top: dict[str, float] | None = None) -> dict[str, Any]:
    """Return a token with its log-probability in the shape of chats."""
    raw = bytes.fromhex(text.removeprefix("bytes:").replace("\\x", "")) if text.startswith("bytes:\\x") else text.encode()
    own = {"token": text, "logprob": value, "bytes": list(raw)}
    return own if top is None else own | {"top_logprobs": [_token(each, its) for each, its in top.items()]}


def _choice(index: int, text: str, logprobs: dict[str, Any] | None, reason: str | None = None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}


def _joined(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a text as a whole; its last part says why it ended."""
    logs = [part["logprobs"] for part in parts if part["logprobs"]]
    logprobs = {name: [value for log in logs for value in log[name]] for name in logs[0]} if logs else None
    return parts[-1] | {"text": "".join(part["text"] for part in parts), "logprobs": logprobs}
