"""Use a server as openai-python does, and print what came in JSON.

Runs in the environment of requirements.txt; `test_clients.py` starts it with the address of a server of one row and a queue
of one, and a key. Any warning is an error.

    .venv-clients/bin/python -W error tests/server/clients/peer_openai.py http://127.0.0.1:8080 KEY
"""

import asyncio
import json
import sys
import threading
import time
from typing import Any

import openai

URL, KEY = sys.argv[1] + "/v1", sys.argv[2]
sent: list[tuple[str, float]] = []
answered: list[int] = []
retry_after: list[str | None] = []
PROMPT = "Once upon a time"
LONG: dict[str, Any] = {"model": "tiny", "prompt": PROMPT, "max_tokens": 1_000_000}


def note_request(request: Any) -> None:
    sent.append((request.url.path, time.monotonic()))


def note_answer(answer: Any) -> None:
    answered.append(answer.status_code)
    retry_after.append(answer.headers.get("retry-after"))


hooks = {"request": [note_request], "response": [note_answer]}
client = openai.OpenAI(base_url=URL, api_key=KEY, http_client=openai.DefaultHttpxClient(event_hooks=hooks))


def begin() -> None:
    sent.clear(), answered.clear(), retry_after.clear()


def error_of(call: Any) -> dict[str, Any]:
    """Return what the client raises, and what it sent for that."""
    begin()
    try:
        call()
    except openai.APIStatusError as error:
        found = {"class": type(error).__name__, "status": error.status_code, "code": error.code, "type": error.type}
        return found | {"message": error.message, "n_sent": len(sent)}
    return {"class": None, "n_sent": len(sent)}


def until_free() -> bool:
    """Wait until no row is used any more."""
    for _ in range(500):
        text = client.get("/../metrics", cast_to=str)
        if "txl_rows_busy 0.0" in text and "txl_queue_requests 0.0" in text:
            return True
        time.sleep(0.02)
    return False


def completions() -> dict[str, Any]:
    made = client.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=7, seed=3, n=2, logprobs=2, temperature=0.7, top_p=0.9, logit_bias={"97": 1}
    )
    again = client.completions.create(
        model="tiny", prompt=list(PROMPT.encode()), max_tokens=7, seed=3, n=2, temperature=0.7, top_p=0.9, logit_bias={"97": 1}
    )
    lists = client.completions.create(model="tiny", prompt=["a", "b", "c"], max_tokens=2, seed=3, stop=["\n"])
    by_ids = client.completions.create(model="tiny", prompt=[[97], [98, 99]], max_tokens=1, echo=True, logprobs=1)
    ours = client.completions.create(model="tiny", prompt="a", max_tokens=2, extra_body={"top_k": 5, "min_p": 0.1})
    logs = made.choices[0].logprobs
    assert logs and made.usage
    return {
        "object": made.object,
        "texts": [each.text for each in made.choices],
        "again": [each.text for each in again.choices],
        "reasons": [each.finish_reason for each in made.choices],
        "logs": [
            len(logs.tokens or []),
            len(logs.token_logprobs or []),
            len(logs.top_logprobs or []),
            len(logs.text_offset or []),
        ],
        "usage": made.usage.to_dict(),
        "lists": [each.index for each in lists.choices],
        "echoed": [each.text[:n] for each, n in zip(by_ids.choices, (1, 2), strict=True)],
        "ours": len(ours.choices),
        "fingerprint": made.system_fingerprint,
    }


def models() -> dict[str, Any]:
    return {"listed": [each.id for each in client.models.list()], "retrieved": client.models.retrieve("tiny").id}


def streams() -> dict[str, Any]:
    body: dict[str, Any] = {"model": "tiny", "prompt": PROMPT, "max_tokens": 9, "seed": 5}
    whole = client.completions.create(**body)
    chunks = list(client.completions.create(**body, stream=True, stream_options={"include_usage": True}))
    *parts, last = chunks
    assert whole.usage and last.usage
    return {
        "whole": whole.choices[0].text,
        "parts": "".join(each.choices[0].text for each in parts),
        "reason": parts[-1].choices[0].finish_reason,
        "last": [last.choices, last.usage.to_dict() == whole.usage.to_dict()],
    }


def cancels() -> dict[str, Any]:
    stream = client.completions.create(**LONG, stream=True)
    got = [next(iter(stream)).choices[0].text for _ in range(2)]
    stream.close()
    free = until_free()

    async def leaves() -> int:
        async with openai.AsyncOpenAI(base_url=URL, api_key=KEY) as other:
            n = 0
            async with await other.completions.create(**LONG, stream=True) as stream:
                async for _ in stream:
                    n += 1
                    if n == 3:
                        break
            task = asyncio.ensure_future(other.completions.create(**LONG))
            await asyncio.sleep(0.3)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            return n

    return {"got": len(got), "free": free, "asynchronous": asyncio.run(leaves()), "free again": until_free()}


def errors() -> dict[str, Any]:
    session = client.post("/sessions", body={}, cast_to=object)
    url = f"/sessions/{session['id']}"  # pyright: ignore[reportIndexIssue]
    client.post(f"{url}/append", body={"text": "abc", "at": 0}, cast_to=object)
    stranger = client.with_options(api_key="a-key-that-nobody-has-made")
    late = {"prompt": PROMPT, "max_tokens": 1_000_000, "timeout": 0.3}
    return {
        "model": error_of(lambda: client.completions.create(model="nope", prompt="a")),
        "range": error_of(lambda: client.completions.create(model="tiny", prompt="a", temperature=-1)),
        "field": error_of(lambda: client.completions.create(model="tiny", prompt="a", suffix="b")),
        "key": error_of(lambda: stranger.completions.create(model="tiny", prompt="a")),
        "moved": error_of(lambda: client.post(f"{url}/append", body={"text": "abc", "at": 0}, cast_to=object)),
        "chat": error_of(lambda: client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "a"}])),
        "late": error_of(lambda: client.post("/completions", body=late, cast_to=object)),
        "embeddings": error_of(lambda: client.embeddings.create(model="tiny", input="a")),
    }


def refused() -> dict[str, Any]:
    """A full queue: 429 with Retry-After, which the client obeys; and full memory, 503."""
    body = {**LONG, "max_tokens": 2000}
    streams = [client.completions.create(**body, stream=True)]
    next(iter(streams[0]))
    thread = threading.Thread(target=lambda: streams.append(client.completions.create(**body, stream=True)))
    thread.start()  # it waits for the row
    for _ in range(500):
        if "txl_queue_requests 1.0" in client.get("/../metrics", cast_to=str):
            break
        time.sleep(0.02)
    found: dict[str, Any] = {"full": error_of(lambda: client.with_options(max_retries=1).completions.create(**body))}
    found["full"] |= {"answers": list(answered), "retry_after": list(retry_after), "waited": sent[-1][1] - sent[0][1]}
    streams[0].close()
    thread.join(30)
    streams[1].close()
    made = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=2)
    n = 0
    while n < 1000 and "class" not in found.get("memory", {}):
        n += 1
        one = error_of(lambda: client.with_options(max_retries=1).post("/sessions", body={}, cast_to=object))
        if one["class"]:
            found["memory"] = one | {"retry_after": list(retry_after), "waited": sent[-1][1] - sent[0][1]}
    return found | {"afterwards": len(made.choices), "free": until_free()}


if __name__ == "__main__":
    checks = (models, completions, streams, cancels, errors, refused)
    with client:
        print(json.dumps({"version": openai.__version__} | {each.__name__: each() for each in checks}))
