"""`txl serve` as a process: it says what fits, ends when it is told to, and loses nothing when it is killed."""

import json
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from tests.server.serving import served
from tests.world_cases import txl

TEXT = "".join(f"{i} stories, " for i in range(3000))
EXAMPLE = Path(__file__).parents[2] / "examples" / "serve_client.py"
PART = 640  # bytes of an append: ten pieces


def test_it_says_what_fits_and_saves_everything_when_it_is_told_to_end(folder: Path) -> None:
    with served("--sessions", "kept", "--rows", "2", "--session-memory", "0.001") as (child, client, said):
        told = next(line for line in said if line.startswith("a session takes "))
        each = client.get("/v1/models").json()["data"][0]["meta"]["session_bytes"]
        assert f"a session takes {each:,} bytes, however much it reads: 2 in rows, {10**6 // each:,} in memory" in told
        assert any(line.strip().startswith("curl http://127.0.0.1:") for line in said)
        names = [client.post("/v1/sessions", json={}).json()["id"] for _ in range(3)]
        for name in names:
            client.post(f"/v1/sessions/{name}/append", json={"text": TEXT[:100]})
        asked = client.post(f"/v1/sessions/{names[0]}/ask", json={"max_tokens": 8, "seed": 1}).json()["choices"]
        child.send_signal(signal.SIGTERM)
        assert child.wait() == 0
    with served("--sessions", "kept") as (child, client, _):
        listed = client.get("/v1/sessions").json()["data"]
        assert {each["id"]: (each["n_tokens"], each["state"]) for each in listed} == dict.fromkeys(names, (100, "disk"))
        again = client.post(f"/v1/sessions/{names[0]}/ask", json={"max_tokens": 8, "seed": 1}).json()["choices"]
        assert again == asked
        child.send_signal(signal.SIGINT)
        assert child.wait() == 0


def test_a_text_that_is_written_may_end_before_the_server_does(folder: Path) -> None:
    with served("--grace", "30") as (child, client, _):
        body = {"prompt": "a", "max_tokens": 400, "stream": True, "seed": 1}
        with client.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.iter_lines()
            next(lines)
            child.send_signal(signal.SIGTERM)
            with httpx.Client(base_url=client.base_url) as other:
                while other.get("/readyz").status_code != 503:
                    time.sleep(0.01)
                refused = other.post("/v1/completions", json={"prompt": "a"})
                assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")
                assert "retry-after" in refused.headers
            assert [line for line in lines if line][-1] == "data: [DONE]"
        assert child.wait() == 0


def test_a_second_signal_ends_it_at_once_and_quietly(folder: Path) -> None:
    """As a program of its own, whose log is standard error; a fork of pytest has pytest's."""
    command = [sys.executable, "-m", "transformer_xl", "serve", "tiny", "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as child, ThreadPoolExecutor() as others:
        assert child.stderr
        address = next(line for line in child.stderr if line.startswith("ready at ")).split()[2]
        others.submit(httpx.post, f"{address}/v1/completions", json={"prompt": "a", "max_tokens": 10**6}, timeout=30)
        while "txl_rows_busy 1.0" not in httpx.get(f"{address}/metrics").text:
            time.sleep(0.02)
        for _ in range(2):
            child.send_signal(signal.SIGINT)
            time.sleep(0.3)
        said = child.stderr.read().splitlines()
    assert child.returncode == 0 and said[-1] == "ended"
    assert not any("Traceback" in line for line in said), said


def test_what_keeps_it_from_starting(folder: Path) -> None:
    for option, value in {"--port": "65536", "--session-memory": "inf", "--ttl": "nan", "--grace": "-1.0"}.items():
        said = txl("serve", "tiny", option, value)
        assert said["status"] == 2 and f'"{value}" for {option}' in said["err"], said
    Path("keys").write_text("a-key-of-sixteen-letters\n")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for options, begin in {
            ("tiny", "--port", port): f"'127.0.0.1:{port}': Address already in use",
            ("tiny", "--ttl", "0"): "--ttl (0) must be above 0",
            ("nope",): "'nope' is not a directory of a model",
            ("tiny", "--host", "0.0.0.0"): "--host 0.0.0.0 lets other machines in; give --api-key",
            ("tiny", "--api-key-file", "keys"): "--api-key-file 'keys' can be read by others; chmod 600",
            ("tiny", "--sessions", "no/where"): "'no/where': No such file or directory",
            ("tiny", "--sessions", "kept", "--precision", "auto"): "--precision auto",
            **{
                ("tiny", option, "0.0000001"): f"{option} (100 bytes) is less than one session takes"
                for option in ("--session-memory", "--prefix-memory", "--key-quota")
            },
        }.items():
            assert complaint("serve", *options).startswith(begin)
    Path("tiny/model.safetensors").write_bytes(b"damaged")
    assert complaint("serve", "tiny").startswith("'tiny/model.safetensors'")


def complaint(*command: str) -> str:
    done = txl(*command)
    assert done["status"] == 1, done
    (line,) = [line for line in done["err"].splitlines() if not line.startswith("warning: ")]
    return line.removeprefix("txl: error: ")


def killed(n_kill: int, n_session: int) -> None:
    """Kill a server while sessions read, and look what the next one finds."""
    draw = np.random.default_rng(0)
    sessions: list[str] = []
    for _ in range(n_kill):
        with served("--sessions", "kept", "--save-every", "500", "--rows", "4", "--quiet") as (child, client, _):
            found = {each["id"]: each for each in client.get("/v1/sessions").json()["data"]}
            assert sorted(found) == sorted(sessions), "a session is lost, or there is one that nobody made"
            for name in draw.permutation(sessions)[:2].tolist():
                look(client, name, found[name]["n_tokens"])
            while len(sessions) < n_session:
                name = client.post("/v1/sessions", json={}).json()["id"]
                client.post(f"/v1/sessions/{name}/append", json={"text": TEXT[:PART], "at": 0})
                client.post(f"/v1/sessions/{name}/save", json={})
                sessions.append(name)
            threads = [threading.Thread(target=read_on, args=(str(client.base_url), name)) for name in sessions]
            for thread in threads:
                thread.start()
            time.sleep(float(draw.uniform(0, 1.2)))
            child.send_signal(signal.SIGKILL)
            child.wait()
            for thread in threads:
                thread.join()
    assert [path.name for path in Path("kept").rglob("*.tmp")] == []


def read_on(address: str, name: str) -> None:
    """Append the text from where the session is, until the server dies."""
    with httpx.Client(base_url=address, timeout=30) as client:
        try:
            at = client.get(f"/v1/sessions/{name}").json()["n_tokens"]
            while at + PART <= len(TEXT):
                done = client.post(f"/v1/sessions/{name}/append", json={"text": TEXT[at : at + PART], "at": at}).json()
                at = done["session"]["n_tokens"]
        except (httpx.HTTPError, json.JSONDecodeError):
            return


def look(client: httpx.Client, name: str, n_tokens: int, *, whole: bool = True) -> None:
    """Compare a session with one that has read as much of the text, and nothing else has happened to."""
    assert not whole or (n_tokens % 64 == 0 and n_tokens >= PART)

    def asked(session: str) -> Any:
        body = {"max_tokens": 5, "seed": 1, "logprobs": 1}
        return client.post(f"/v1/sessions/{session}/ask", json=body).json()["choices"]

    fresh = client.post("/v1/sessions", json={}).json()["id"]
    client.post(f"/v1/sessions/{fresh}/append", json={"text": TEXT[:n_tokens]})
    assert client.get(f"/v1/sessions/{name}").json()["n_tokens"] == n_tokens
    assert asked(name) == asked(fresh), f"the session at {n_tokens} tokens is not what it was"
    assert client.delete(f"/v1/sessions/{fresh}").status_code == 204


def test_kills_lose_nothing_that_was_saved(folder: Path) -> None:
    killed(2, 3)


def test_a_text_whose_reader_leaves_goes_on_where_it_was(folder: Path) -> None:
    text = TEXT[:15_000]
    with served("--sessions", "kept", "--rows", "2") as (_, client, _):
        url = f"/v1/sessions/{client.post('/v1/sessions', json={}).json()['id']}"
        as_events = {"accept": "text/event-stream"}
        with client.stream("POST", f"{url}/append", json={"text": text}, headers=as_events) as answer:
            next(answer.iter_lines())
        while (found := client.get(url).json())["busy"]:
            time.sleep(0.02)
        at = found["n_tokens"]
        assert 0 < at < len(text) and at % 64 == 0
        client.post(f"{url}/append", json={"text": text[at:], "at": at})
        look(client, url.rpartition("/")[2], len(text), whole=False)


def test_the_example_reads_again_what_a_killed_server_has_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    example = runpy.run_path(str(EXAMPLE))
    text = "".join(chr(97 + i % 26) for i in range(5 * 131_072))
    kept, n_call, lost = list[str](), 0, {3: 200_000, 5: 0}  # at which append, and what was saved

    def call(path: str, body: Any = None) -> Any:
        nonlocal kept, n_call
        if path == "/tokenize":
            return {"tokens": list(body["content"])}
        if body is None:
            return {"n_tokens": len(kept)}
        n_call += 1
        if n_call in lost:
            kept = kept[: lost[n_call]]
            raise ConnectionError("killed")
        assert body["at"] == len(kept)
        kept += body["tokens"]
        return {"nats": 1.0, "scored": 1, "session": {"bytes": 1}}

    monkeypatch.setattr("time.sleep", lambda _: None)
    example["read"](call, "/v1/sessions/w1-0", text)
    assert "".join(kept) == text and n_call > 5


def test_the_example_reads_a_book_and_goes_on_with_it(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    example = runpy.run_path(str(EXAMPLE))["main"]
    book = TEXT[:6_000]
    Path("book.txt").write_text(book, encoding="utf-8")
    with served("--sessions", "kept") as (_, client, _), pytest.MonkeyPatch.context() as patch:
        common = ["serve_client.py", "book.txt", "So? ", "--server", str(client.base_url)]
        patch.setattr(sys, "argv", common)
        example()
        said = capsys.readouterr().out
        name = said.partition("\n")[0].removeprefix("session ")
        assert "\nSo? " in said and client.get(f"/v1/sessions/{name}").json()["n_tokens"] == len(book)
        Path("book.txt").write_text(book + "The end.", encoding="utf-8")
        patch.setattr(sys, "argv", [*common, "--session", name])
        example()
        assert client.get(f"/v1/sessions/{name}").json()["n_tokens"] == len(book) + 8, "what was read is not read again"
        patch.setattr(sys, "argv", [*common, "--session", "w1-" + "0" * 32])
        with pytest.raises(SystemExit, match="no such session"):
            example()


@pytest.mark.faults
@pytest.mark.long
@pytest.mark.timeout(1500)
def test_200_kills_lose_nothing_that_was_saved(folder: Path) -> None:
    killed(200, 8)
