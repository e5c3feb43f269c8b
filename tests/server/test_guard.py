"""Who may ask, from where, how much and how slowly: all of it is decided before a route sees anything."""

import asyncio
import hashlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fastapi.routing import APIRoute

from tests.server.conftest import Start
from transformer_xl.errors import ConfigError
from transformer_xl.server.app import ROUTERS, Server, make_app
from transformer_xl.server.guard import LOCAL_OWNER, OPEN, check_address, read_keys
from transformer_xl.server.jobs import Job, RefusalError, Session
from transformer_xl.server.service import Service
from transformer_xl.server.sessions import Sessions
from transformer_xl.server.store import most_leases

Serve = Callable[..., Any]
ONE, TWO = "first-key-of-sixteen-letters", "second-key-of-sixteen-letters"
KEYS = tuple(hashlib.sha256(key.encode()).hexdigest() for key in (ONE, TWO))


GONE = "no such session; GET /v1/sessions lists yours"


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def test_every_route_but_the_open_ones_asks_for_a_key(serve: Serve) -> None:
    client = serve(keys=KEYS)
    paths = [
        (route.path, sorted(route.methods or ())[0])
        for router in ROUTERS
        for route in router.routes
        if isinstance(route, APIRoute)
    ]
    assert len(paths) > 20
    for path, method in paths:
        path = path.replace("{session_id}", "w1-" + "0" * 32).replace("{name:path}", "x").replace("{name}", "x")
        status = client.request(method, path, headers={"content-type": "application/json"}).status_code
        assert (status == 401) == (path not in OPEN), (path, status)
        wrong = client.request(method, path, headers={"content-type": "application/json", **bearer("wrong" * 9)})
        assert (wrong.status_code == 401) == (path not in OPEN)
    assert client.get("/openapi.json").status_code == 401
    assert client.get("/v1/models", headers=bearer(TWO)).status_code == 200
    assert client.get("/v1/models", headers={"x-api-key": ONE}).status_code == 200
    assert client.get(f"/v1/models?api_key={ONE}").status_code == 401


def test_a_foreign_session_is_an_unknown_one(serve: Serve) -> None:
    client = serve(keys=KEYS, stored=True)
    own = client.post("/v1/sessions", json={}, headers=bearer(ONE)).json()["id"]
    client.post(f"/v1/sessions/{own}/append", json={"text": "secret"}, headers=bearer(ONE))
    client.post(f"/v1/sessions/{own}/save", json={"name": "x"}, headers=bearer(ONE))
    client.post(f"/v1/sessions/{own}/save", json={}, headers=bearer(ONE))
    unknown = f"w1-{'0' * 32}"
    for name in (own, unknown):
        for method, what, body in [
            ("GET", "", None),
            ("DELETE", "", None),
            ("POST", "/append", {"text": "a"}),
            ("POST", "/ask", {"text": "a"}),
            ("POST", "/fork", {}),
            ("DELETE", "/run", None),
        ]:
            answer = client.request(method, f"/v1/sessions/{name}{what}", json=body, headers=bearer(TWO))
            assert (answer.status_code, answer.json()["error"]["message"]) == (404, GONE), (name, method, what)
    assert client.get("/v1/sessions", headers=bearer(TWO)).json()["data"] == []
    assert client.get("/v1/saved", headers=bearer(TWO)).json()["data"] == []
    assert client.post("/v1/sessions", json={"from": {"saved": "x"}}, headers=bearer(TWO)).status_code == 404
    assert client.post("/v1/sessions", json={"from": {"session": own}}, headers=bearer(TWO)).status_code == 404
    assert client.get(f"/v1/sessions/{own}", headers=bearer(ONE)).json()["n_tokens"] == 6


def test_foreign_pages_and_names_are_refused(serve: Serve) -> None:
    client = serve(origins=("https://good.example",))
    body = {"content": "a"}
    assert client.post("/tokenize", json=body, headers={"origin": "http://localhost"}).status_code == 200
    assert (
        client.post("/tokenize", json=body, headers={"origin": "https://evil.example"}).json()["error"]["code"] == "bad_origin"
    )
    allowed = client.post("/tokenize", json=body, headers={"origin": "https://good.example"})
    assert allowed.headers["access-control-allow-origin"] == "https://good.example"
    asked = client.options("/tokenize", headers={"origin": "https://good.example", "access-control-request-method": "POST"})
    assert asked.status_code == 200 and "authorization" in asked.headers["access-control-allow-headers"]
    assert "access-control-allow-origin" not in client.get("/v1/models", headers={"origin": "https://evil.example"}).headers
    for host in ("evil.example", "127.0.0.1.evil.example", "localhost.evil.example:80", ""):
        assert client.get("/v1/models", headers={"host": host}).json()["error"]["code"] == "bad_host", host
    for host in ("127.0.0.1:8080", "localhost", "[::1]:9"):
        assert client.get("/v1/models", headers={"host": host}).status_code == 200, host


def test_bodies_have_a_type_and_a_size(serve: Serve) -> None:
    client = serve()
    simple = client.post("/v1/completions", content='{"prompt": "a"}', headers={"content-type": "text/plain"})
    assert (simple.status_code, simple.json()["error"]["code"]) == (415, "bad_type")
    assert client.post("/tokenize", json={"content": "a" * (2 << 20)}).status_code == 413
    chunks = (b"[" + b"1," * 10_000 for _ in range(200))
    chunked = client.post("/tokenize", content=chunks, headers={"content-type": "application/json"})
    assert chunked.status_code == 413
    assert client.post("/tokenize", content="{", headers={"content-type": "application/json"}).status_code == 400


def test_the_page_runs_nothing_foreign(serve: Serve) -> None:
    client = serve(keys=KEYS)
    for path in ("/", "/page.css", "/page.js"):
        answer = client.get(path)
        assert answer.status_code == 200 and "default-src 'none'" in answer.headers["content-security-policy"]
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert "http://" not in answer.text and "https://" not in answer.text
    assert "innerHTML" not in client.get("/page.js").text
    assert sum(len(client.get(path).content) for path in ("/", "/page.css", "/page.js")) < 60_000


def test_both_languages_of_the_page_say_the_same_things(serve: Serve) -> None:
    page = serve().get("/page.js").text
    table = page[page.index("const WORDS = {") : page.index("\n};")]
    english, chinese = table.split("  zh: {")
    keys = [[word.split(":")[0].strip() for word in _pairs(part)] for part in (english.split("  en: {")[1], chinese)]
    assert keys[0] == keys[1] and len(keys[0]) > 50
    used = {part.split('"')[0] for part in serve().get("/").text.split('data-t="')[1:]}
    assert used <= set(keys[0])


def _pairs(text: str) -> list[str]:
    import re

    return re.findall(r'(\w+): "(?:[^"\\]|\\.)*"', text)


def test_keys_are_read_from_a_file_of_ones_own(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"# mine\n{ONE}\n\n{TWO}\n")
    file.chmod(0o644)
    with pytest.raises(ConfigError, match=r"^--api-key-file '.*' can be read by others; chmod 600"):
        read_keys(file)
    file.chmod(0o600)
    assert read_keys(file) == KEYS
    file.write_bytes(b"\xef\xbb\xbf" + f"{ONE}\r\n{TWO}\r\n".encode())  # as some editors write it
    assert read_keys(file) == KEYS
    file.write_text("short\n")
    with pytest.raises(ConfigError, match="a key of fewer than 16 characters"):
        read_keys(file)
    with pytest.raises(ConfigError, match=r"^--host 0.0.0.0 lets other machines in; give --api-key-file FILE, or leave"):
        check_address("0.0.0.0", ())
    check_address("0.0.0.0", KEYS)


@contextmanager
def listening(service: Service, **more: Any) -> Iterator[tuple[str, int]]:
    """A server with a socket of its own, in a thread."""
    server = Server(service, make_app(service, **more), host="127.0.0.1", port=0, grace=1.0)
    thread = threading.Thread(target=server.run_until_ended)
    service.engine.start = lambda: None  # it has been started  # pyright: ignore[reportAttributeAccessIssue]
    thread.start()
    try:
        yield server.socket.getsockname()[:2]
    finally:
        server.should_exit = True
        thread.join(20)
        assert not thread.is_alive()


def sent(address: tuple[str, int], data: bytes, *, seconds: float = 10.0) -> bytes:
    with socket.create_connection(address, timeout=seconds) as connection:
        connection.sendall(data)
        found = b""
        while part := connection.recv(1 << 16):
            found += part
        return found


def test_slow_and_endless_requests_hold_up_nobody(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformer_xl.server import app, guard

    monkeypatch.setattr(app, "_HEADER_SECONDS", 0.5)
    monkeypatch.setattr(guard, "_BODY_SECONDS", 0.5)
    with listening(start()) as address:
        head = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        begin = time.monotonic()
        assert sent(address, b"GET / HTTP/1.1\r\nHost: localhost\r\nX-Slow: ") == b"", "closed without a word"
        assert sent(address, b"") == b""
        assert b" 408 " in sent(address, head + b"Content-Length: 100\r\n\r\n{").split(b"\r\n")[0]
        assert time.monotonic() - begin < 8
        endless = sent(address, b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 100_000)
        assert b" 400 " in endless.split(b"\r\n")[0] or b" 431 " in endless.split(b"\r\n")[0]
        huge = sent(address, head + b"Content-Length: 999999999999\r\n\r\n")
        assert b" 413 " in huge.split(b"\r\n")[0]
        body = json.dumps({"content": "abc"}).encode()
        asked = head + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(body) + body
        assert b"[97,98,99]" in sent(address, asked)


def test_silent_connections_leave_room_for_others(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformer_xl.server import app

    monkeypatch.setattr(app, "_MOST_CONNECTIONS", 20)
    monkeypatch.setattr(app, "_MOST_REQUESTS", 25)
    with listening(start()) as address, ExitStack() as held:
        for _ in range(40):
            held.enter_context(socket.create_connection(address, timeout=10))
        asked = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
        assert b" 200 " in sent(address, asked).split(b"\r\n")[0]


def test_a_client_that_has_said_all_gets_its_answer(start: Start) -> None:
    body = json.dumps({"prompt": "a", "max_tokens": 1000}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with listening(start()) as address, socket.create_connection(address, timeout=20) as connection:
        connection.sendall(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        connection.shutdown(socket.SHUT_WR)
        answer = b"".join(iter(lambda: connection.recv(1 << 16), b""))
    assert b"HTTP/1.1 200 " in answer and b'"completion_tokens":1000' in answer


def test_a_body_that_is_none_has_one_answer(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    with listening(start()) as address:
        told = sent(address, b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n")
    assert told.count(b"HTTP/1.1") == 1 and b" 400 " in told.split(b"\r\n")[0]
    assert "Traceback" not in caplog.text


def test_a_body_that_breaks_after_its_answer_is_no_failure(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    head = b"POST /nowhere HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    with listening(start()) as address, socket.create_connection(address, timeout=10) as connection:
        connection.sendall(head)
        answer = b""
        while not answer.endswith(b"}}"):  # head and body may come apart
            answer += connection.recv(1 << 16)
        assert b" 415 " in answer.split(b"\r\n")[0], "before the body has come"
        connection.sendall(b"no chunk\r\n")
        assert connection.recv(1 << 16) == b"", "closed, and no second answer"
    assert "Invalid HTTP request" in caplog.text
    assert "Traceback" not in caplog.text


def test_answers_are_sent_at_once(start: Start) -> None:
    """A second small packet must not wait until the first is acknowledged, which takes 40 ms on a connection that is kept."""
    service = start()
    server = Server(service, make_app(service), host="127.0.0.1", port=0, grace=0.0)
    with server.socket, socket.create_connection(server.socket.getsockname()):
        server.socket.settimeout(10)
        accepted, _ = server.socket.accept()
        with accepted:
            assert accepted.proto == socket.IPPROTO_TCP, "asyncio sets TCP_NODELAY only where a socket says that it is TCP's"


def test_a_client_that_leaves_ends_its_text(start: Start) -> None:
    service = start()
    with listening(service) as address:
        for body in ({"prompt": "a", "max_tokens": 10**6, "stream": True}, {"prompt": "a", "max_tokens": 10**6}):
            data = json.dumps(body).encode()
            connection = socket.create_connection(address)
            head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            connection.sendall(head + b"Content-Length: %d\r\n\r\n" % len(data) + data)
            while not service.engine.n_busy:
                time.sleep(0.01)
            connection.close()
            begin = time.monotonic()
            while not service.engine.is_idle:
                assert time.monotonic() - begin < 5, "it goes on writing for nobody"
                time.sleep(0.01)


def test_lines_of_requests_hold_no_text(start: Start, capsys: pytest.CaptureFixture[str]) -> None:
    import io

    from starlette.testclient import TestClient

    service, log = start(), io.StringIO()
    service.metrics._log = log
    client = TestClient(make_app(service, keys=KEYS), base_url="http://localhost")
    client.post("/v1/completions", json={"prompt": "secret text", "max_tokens": 2}, headers=bearer(ONE))
    client.get("/v1/sessions/w1-forged%0D%0A{}", headers=bearer(ONE))
    client.get("/%0a%0dforged", headers=bearer("secret-key-that-is-wrong"))
    lines = [json.loads(line) for line in log.getvalue().splitlines()]
    assert [line["status"] for line in lines] == [200, 404, 401]
    assert lines[0]["route"] == "/v1/completions" and lines[0]["owner"] == KEYS[0][:8]
    assert "secret" not in log.getvalue() and "forged" not in log.getvalue()


def test_a_quota_counts_all_that_a_key_has(serve: Serve) -> None:
    client = serve(keys=KEYS, stored=True, quota=3)

    def create(key: str = ONE) -> Any:
        return client.post("/v1/sessions", json={}, headers=bearer(key))

    first = create().json()["id"]
    client.post(f"/v1/sessions/{first}/append", json={"text": "a text"}, headers=bearer(ONE))
    save = {"json": {"name": "kept"}, "headers": bearer(ONE)}
    assert client.post(f"/v1/sessions/{first}/save", **save).status_code == 200
    assert create().status_code == 201
    refused = create()
    assert refused.status_code == 403 and refused.json()["error"]["code"] == "quota"
    assert client.post(f"/v1/sessions/{first}/save", **save).status_code == 200, "another time to the same name"
    other = client.post(f"/v1/sessions/{first}/save", json={"name": "other"}, headers=bearer(ONE))
    assert other.status_code == 403
    assert create(TWO).status_code == 201, "each key has its own"
    assert client.delete("/v1/saved/kept", headers=bearer(ONE)).status_code == 204
    assert create().status_code == 201


def test_empty_sessions_give_way(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    client = serve(stored=True, most=1)
    one = client.post("/v1/sessions", json={}).json()["id"]
    assert client.post("/v1/sessions", json={}).json()["error"]["code"] == "no_room", "it may be used in a moment"
    monkeypatch.setattr("transformer_xl.server.sessions._EMPTY_SECONDS", -1.0)
    assert client.post("/v1/sessions", json={}).status_code == 201
    assert client.get(f"/v1/sessions/{one}").status_code == 404


def test_a_session_in_use_does_not_expire(start: Start) -> None:
    sessions = start(ttl=5.0).sessions
    session = asyncio.run(sessions.create(LOCAL_OWNER))
    assert session.is_expired(time.time() + 9)
    session.n_users = 1
    assert not session.is_expired(time.time() + 9)


def test_a_server_that_has_ended_changes_no_session(start: Start) -> None:
    first, second = start(stored=True), start(stored=True).sessions

    async def end_one() -> None:
        sessions = first.sessions
        session = await sessions.create(LOCAL_OWNER)
        async for _ in first.run(Job(owner=LOCAL_OWNER, prompt=np.arange(9), session=session)):
            pass
        await sessions.shut_down(0)
        assert not sessions.live and session.is_gone
        assert (await second.open(LOCAL_OWNER, session.id)).text.n_tokens == 9
        for call in (sessions.create(LOCAL_OWNER), sessions.rewind(session, 1), sessions.save(session)):
            with pytest.raises(RefusalError):
                await call

    asyncio.run(end_one())


def test_open_files_bound_sessions_in_memory(start: Start) -> None:
    service = start(most=50)
    assert service.sessions.most == 50
    assert Sessions(service.engine, limit=10**9, store=None, worker="w1", ttl=None, most_open=7).most == 7
    assert most_leases() >= 1


def test_a_session_that_is_deleted_does_not_come_back_from_its_file(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody asks for it after it has left memory, and before its file is gone."""
    service = start(stored=True)
    sessions = service.sessions
    end, asked = sessions._end, list[asyncio.Task[Session]]()

    async def end_and_ask(session: Session) -> None:
        await end(session)
        asked.append(asyncio.create_task(sessions.open(LOCAL_OWNER, session.id)))
        await asyncio.wait(asked, timeout=0.2)

    monkeypatch.setattr(sessions, "_end", end_and_ask)

    async def race() -> None:
        session = await sessions.create(LOCAL_OWNER)
        async for _ in service.run(Job(owner=LOCAL_OWNER, prompt=np.arange(9), session=session)):
            pass
        await sessions.save(session)
        await sessions.delete(LOCAL_OWNER, session.id)
        with pytest.raises(RefusalError, match="no such session"):
            await asked[0]
        assert sessions.file_of(LOCAL_OWNER, session.id) is None

    asyncio.run(race())


def test_what_is_read_while_its_session_is_saved_has_changed(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """The job may end between the copy and the file."""
    service = start(stored=True)
    sessions = service.sessions

    async def save() -> None:
        session = await sessions.create(LOCAL_OWNER)

        async def read() -> None:
            async for _ in service.run(Job(owner=LOCAL_OWNER, prompt=np.arange(9), session=session)):
                pass

        await read()
        await sessions.save(session)
        assert not session.is_changed
        in_engine = sessions.in_engine

        async def then_read(function: Callable[[], Any]) -> Any:
            found = await in_engine(function)
            await read()
            return found

        monkeypatch.setattr(sessions, "in_engine", then_read)
        await sessions.save(session)
        assert session.is_changed and session.saved_at == 9

    asyncio.run(save())
