"""What becomes of a session while others read and write in it, told to who watches."""

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from typing import TYPE_CHECKING, Any

from transformer_xl.generation.session import TextState
from transformer_xl.generation.stopping import Transcript
from transformer_xl.server.jobs import RefusalError, no_session
from transformer_xl.server.service import Service
from transformer_xl.server.sessions import Store

if TYPE_CHECKING:
    from transformer_xl.data.tokenizers import Tokenizer

_LOOK_SECONDS = 0.1
_FILE_SECONDS = 1.0
_PING_SECONDS = 15.0


class Watcher:
    """Compares the end of a text with what it was when it was looked at last.

    Args:
        tokenizer: of the model.
        since: how many tokens the one who watches knows; None: all that there are at the first look.
    """

    def __init__(self, tokenizer: "Tokenizer", since: int | None = None) -> None:
        self._tokenizer, self._n, self._tail = tokenizer, since, list[int]()
        self._transcript: Transcript | None = None

    def look(self, n_tokens: int, tail: Sequence[int]) -> dict[str, Any] | None:
        """Return what is new; None: nothing."""
        tail, is_first = list(tail), self._transcript is None
        if self._n is None:
            self._n, self._tail = n_tokens, tail
        begin, old_begin = n_tokens - len(tail), self._n - len(self._tail)
        end = min(n_tokens, self._n)
        common = range(max(begin, old_begin), end)
        same = next((i for i in common if tail[i - begin] != self._tail[i - old_begin]), end)
        rewound, missed = self._n - same, max(0, begin - same)
        new = tail[max(same - begin, 0) :]
        self._n, self._tail = n_tokens, tail
        if not (is_first or rewound or missed or new):
            return None
        if self._transcript is None or rewound or missed:
            self._transcript = Transcript(self._tokenizer, tail[: len(tail) - len(new)])
        text = "".join(self._transcript.push(token) for token in new)
        news: dict[str, Any] = {"n_tokens": n_tokens, "tokens": new, "text": text}
        return news | ({"rewound": rewound} if rewound else {}) | ({"missed": missed} if missed else {})


async def watch(
    service: Service, owner: str, name: str, since: int | None = None
) -> AsyncGenerator[dict[str, Any] | None, None]:
    """Yield what becomes of a session, until it is deleted or the server ends; None where nothing has come for a while.

    A session that is only a file is not loaded for this; its file is looked at.

    Raises:
        RefusalError: there is no such session, or no more.
    """
    watcher, told = Watcher(service.tokenizer, since), time.monotonic()
    with service.watching(owner):
        async for news in _news(service, owner, name, watcher):
            if news or time.monotonic() - told >= _PING_SECONDS:
                yield news
                told = time.monotonic()


async def _news(service: Service, owner: str, name: str, watcher: Watcher) -> AsyncGenerator[dict[str, Any] | None, None]:
    """Look again and again."""
    while True:
        if service.engine.is_draining:
            raise RefusalError(503, "the server is shutting down", code="shutting_down", retry_after=5)
        session, pause = service.sessions.find(owner, name), _LOOK_SECONDS
        if session is not None:
            news = watcher.look(*await service.end_of(session))
        else:
            path, pause = service.sessions.file_of(owner, name), _FILE_SECONDS
            note = None if path is None else await asyncio.to_thread(Store.note, path)
            if note is None:
                raise no_session()
            text = TextState.of_note(note, vocab_size=service.tokenizer.vocab_size)
            news = watcher.look(text.n_tokens, text.tail)
        yield news
        await asyncio.sleep(pause)
