"""What those are told who watch a session."""

import json
import random
import threading
import time
from collections import deque
from typing import Any

import httpx
import pytest
import uvicorn

from tests.server.conftest import BYTES, Start
from tests.server.test_routes import PROMPT, Serve, session
from transformer_xl.server.app import make_app
from transformer_xl.server.watching import Watcher


def test_what_is_told_makes_up_the_text() -> None:
    """A watcher that looks now and then knows the end of the text, whatever was added and taken back meanwhile."""
    draw = random.Random(0)
    for _ in range(200):
        kept = draw.choice([8, 16])
        text = [draw.randrange(3) for _ in range(draw.randrange(6))]
        since = draw.choice([None, 0, len(text), len(text) + 2])
        watcher, known = Watcher(BYTES, since), list[int | None](text if since is None else [*text, None, None][:since])
        for look in range(8):
            news = watcher.look(len(text), deque(text, maxlen=kept))
            assert news or look, "the first look tells where the text is"
            if news:
                known = known[: len(known) - news.get("rewound", 0)] + [None] * news.get("missed", 0) + news["tokens"]
                assert news["n_tokens"] == len(text)
            assert len(known) == len(text)
            assert all(mine in (None, its) for mine, its in zip(known, text, strict=True)), (
                "None: missed, and gone back to since"
            )
            n_new = len(news["tokens"]) if news else 0
            assert known[len(known) - n_new :] == text[len(text) - n_new :]
            n_change = draw.choice([0, 0, 1, 2, 30])
            for _ in range(n_change):
                if n_change < 30 and draw.random() < 0.4 and text:  # what is rewritten beyond the tail cannot be seen
                    del text[-draw.randint(1, min(3, len(text))) :]
                else:
                    text.append(draw.randrange(3))


def test_parts_of_characters_wait_for_the_rest() -> None:
    watcher, text = Watcher(BYTES), list("né".encode())
    assert watcher.look(2, text[:2]) == {"n_tokens": 2, "tokens": [], "text": ""}
    assert watcher.look(3, text) == {"n_tokens": 3, "tokens": [0xA9], "text": "é"}
    assert watcher.look(3, text) is None
    assert watcher.look(1, text[:1]) == {"n_tokens": 1, "tokens": [], "text": "", "rewound": 2}


def told(lines: Any, until: int) -> list[dict[str, Any]]:
    """Take events until one says that the session has so many tokens."""
    found, number = list[dict[str, Any]](), ""
    for line in lines:
        if line.startswith("id: "):
            number = line.removeprefix("id: ")
        elif line.startswith("data: "):
            found.append(json.loads(line.removeprefix("data: ")))
            assert number == str(found[-1].get("n_tokens", number))
            if found[-1].get("n_tokens") == until:
                return found
    return found


@pytest.mark.timeout(60)
def test_a_session_is_watched_while_others_write_in_it(start: Start) -> None:
    """Over a real socket, because a test client hands over no event before the last."""
    config = uvicorn.Config(make_app(start(stored=True)), port=0, log_config=None, ws="none")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            time.sleep(0.01)
        url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
        with httpx.Client(base_url=url, timeout=20) as client:
            one = session(client)
            client.post(f"{one}/append", json={"text": PROMPT})
            with client.stream("GET", f"{one}/events") as answer:
                lines = answer.iter_lines()
                assert told(lines, len(PROMPT)) == [{"n_tokens": len(PROMPT), "tokens": [], "text": ""}]
                client.post(f"{one}/append", json={"text": " And then"})
                news = told(lines, len(PROMPT) + 9)
                assert "".join(each["text"] for each in news) == " And then"
                client.post(f"{one}/rewind", json={"n": 5})
                assert told(lines, len(PROMPT) + 4)[-1]["rewound"] == 5
            with client.stream("GET", f"{one}/events", headers={"Last-Event-ID": str(len(PROMPT))}) as answer:
                lines = answer.iter_lines()
                assert told(lines, len(PROMPT) + 4)[0]["text"] == " And", "a client that comes back gets the rest"
                client.delete(one)
                assert told(lines, -1)[-1]["error"]["code"] == "not_found"
    finally:
        server.should_exit = True
        thread.join()


def test_who_may_watch(serve: Serve) -> None:
    client = serve()
    one = session(client)
    assert client.get(f"/v1/sessions/w1-{'0' * 32}/events").status_code == 404
    assert client.get(f"{one}/events", headers={"Last-Event-ID": "-1"}).status_code == 400
