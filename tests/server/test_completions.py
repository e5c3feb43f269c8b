"""Chats: messages become lines of a text, and what is written becomes a message."""

import asyncio
import threading
from collections import defaultdict
from typing import Any

import pytest
from starlette.requests import Request

from tests.server.conftest import BYTES, PIECE, Start
from tests.server.test_routes import PROMPT, Serve, complete, events
from transformer_xl.server.completions import Completion, CompletionRequest
from transformer_xl.server.jobs import Ticket

MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": [{"type": "text", "text": "Who "}, {"type": "text", "text": "are you?"}]},
]
AS_TEXT = "system: Be short.\nuser: Who are you?\nassistant:"


def test_a_chat_is_a_completion_of_its_lines(serve: Serve) -> None:
    """But for the space after who speaks."""
    client = serve(chats=True)
    drawn = {"max_tokens": 2, "seed": 0, "n": 64}
    made = client.post("/v1/chat/completions", json={"messages": MESSAGES, "model": "tiny", **drawn}).json()
    plain = complete(client, prompt=AS_TEXT, **drawn)
    texts = [each["text"] for each in plain["choices"]]
    assert any(text != text.lstrip() != "" for text in texts)
    expected = [{"role": "assistant", "content": text.lstrip(), "refusal": None} for text in texts]
    assert [each["message"] for each in made["choices"]] == expected
    assert made["object"] == "chat.completion" and made["id"].startswith("chatcmpl-") and made["usage"] == plain["usage"]
    assert made["system_fingerprint"] == plain["system_fingerprint"] + "-chat-plain", "a template was used"
    streamed = [""] * 64
    for chunk in events(client.post("/v1/chat/completions", json={"messages": MESSAGES, "stream": True, **drawn}).text)[:-1]:
        (choice,) = chunk["choices"]
        streamed[choice["index"]] += choice["delta"]["content"]
    assert streamed == [text.lstrip() for text in texts]


def test_a_chat_goes_on_from_what_was_read_of_it_before(serve: Serve) -> None:
    client = serve(chats=True, n_prefix=10)
    body: dict[str, Any] = {"messages": list(MESSAGES), "max_tokens": 5}
    first = client.post("/v1/chat/completions", json=body).json()
    said = {"role": "assistant", "content": first["choices"][0]["message"]["content"]}
    body["messages"] += [said, {"role": "user", "content": "Go on."}]
    second = client.post("/v1/chat/completions", json=body).json()
    cached = [each["usage"]["prompt_tokens_details"]["cached_tokens"] for each in (first, second)]
    assert cached == [0, first["usage"]["prompt_tokens"] // PIECE * PIECE]
    assert second["usage"]["prompt_tokens"] > first["usage"]["prompt_tokens"]


def test_a_chat_streams(serve: Serve) -> None:
    client = serve(chats=True)
    body = {"messages": MESSAGES, "max_completion_tokens": 12, "seed": 4, "logprobs": True, "top_logprobs": 2}
    whole = client.post("/v1/chat/completions", json=body).json()["choices"][0]
    answer = client.post("/v1/chat/completions", json={**body, "stream": True, "stream_options": {"include_usage": True}})
    *chunks, usage, done = events(answer.text)
    assert done == "[DONE]" and usage["usage"]["completion_tokens"] == 12
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    deltas = [chunk["choices"][0] for chunk in chunks]
    assert deltas[0]["delta"]["role"] == "assistant" and all("role" not in each["delta"] for each in deltas[1:])
    assert "".join(each["delta"]["content"] for each in deltas) == whole["message"]["content"]
    assert [each["finish_reason"] for each in deltas] == [None] * (len(deltas) - 1) + ["length"]
    tokens = [token for each in deltas if each["logprobs"] for token in each["logprobs"]["content"]]
    assert tokens == whole["logprobs"]["content"] and len(tokens) == 12
    for token in tokens:
        assert token["token"] in [each["token"] for each in token["top_logprobs"]] and len(token["bytes"]) == 1


def test_a_chat_ends_where_somebody_else_speaks(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    client = serve(chats=True)
    free = complete(client, prompt=AS_TEXT, max_tokens=60, seed=4)["choices"][0]["text"]
    mark = next(letter for letter in free[5:] if letter.isascii() and letter.isprintable())
    monkeypatch.setattr("transformer_xl.server.completions.CHAT_STOPS", (mark,))
    made = client.post("/v1/chat/completions", json={"messages": MESSAGES, "max_tokens": 60, "seed": 4}).json()["choices"][0]
    assert made["finish_reason"] == "stop" and made["message"]["content"] == free[: free.index(mark)].lstrip()


def test_what_a_chat_refuses(serve: Serve) -> None:
    client = serve(chats=True)
    for body, name in [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]}, "type"),
        ({"messages": MESSAGES, "tools": []}, "tools"),
        ({"messages": MESSAGES, "top_logprobs": 2}, "logprobs"),
        ({"messages": MESSAGES, "logprobs": 2}, "logprobs"),
    ]:
        answer = client.post("/v1/chat/completions", json=body)
        assert answer.status_code == 400 and name in answer.json()["error"]["message"], answer.text
    answer = serve().post("/v1/chat/completions", json={"messages": MESSAGES})
    assert answer.status_code == 501 and "--chat-template plain" in answer.json()["error"]["message"]


def test_null_is_what_was_left_out(serve: Serve) -> None:
    client = serve()
    plain = complete(client, prompt=PROMPT, max_tokens=5, seed=2)
    nulls = dict.fromkeys(("n", "stream", "stop", "echo", "logprobs", "temperature", "best_of", "logit_bias", "user", "suffix"))
    nulls.pop("suffix")
    assert complete(client, prompt=PROMPT, max_tokens=5, seed=2, **nulls)["choices"] == plain["choices"]


def test_a_text_ends_with_its_connection(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """At once, not when what makes it is collected; the client leaves while something is sent."""
    service, ends = start(), list[str]()
    cancel = service.engine.cancel
    monkeypatch.setattr(service.engine, "cancel", lambda ticket, by: (ends.append(by), cancel(ticket, by)))

    async def main() -> None:
        sending, scope = asyncio.Event(), {"type": "http", "asgi": {"spec_version": "2.3"}}

        async def receive() -> dict[str, str]:
            await sending.wait()
            return {"type": "http.disconnect"}

        async def send(message: dict[str, Any]) -> None:
            if message["type"] == "http.response.body":
                sending.set()
                await asyncio.Event().wait()

        body = CompletionRequest(prompt=PROMPT, max_tokens=1000, stream=True)
        job = body.job("me", BYTES.encode(PROMPT), 0)
        answer = await Completion(service, body, [job], seed=0).answer(Request(scope, receive))
        await answer(scope, receive, send)  # pyright: ignore[reportArgumentType]
        assert ends == ["client"]

    asyncio.run(main())


def test_each_count_of_a_text_is_changed_by_one_thread(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    client, threads = serve(), defaultdict[str, set[int]](set)

    def write(ticket: Ticket, name: str, value: object) -> None:
        if name in vars(ticket):
            threads[name].add(threading.get_ident())
        object.__setattr__(ticket, name, value)

    monkeypatch.setattr(Ticket, "__setattr__", write)
    complete(client, prompt=PROMPT, max_tokens=5)
    assert len(threads) > 1 and all(len(each) == 1 for each in threads.values()), threads
