"""Several workers with one directory behind a proxy: whatever dies, each session goes on in one place, from what was saved."""

import asyncio
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, aclosing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from tests import forked
from tests.server.conftest import BYTES, Start
from tests.server.serving import served
from tests.server.stand_in import StandIn
from transformer_xl.server import sessions as module
from transformer_xl.server.engine import Engine
from transformer_xl.server.guard import LOCAL_OWNER
from transformer_xl.server.jobs import Job, RefusalError, Session
from transformer_xl.server.service import Service

SERVE = Path(__file__).parents[2] / "examples" / "serve"
HAPROXY = shutil.which("haproxy") or shutil.which("/usr/sbin/haproxy")
PROXIES = [pytest.param("haproxy", marks=pytest.mark.skipif(not HAPROXY, reason="HAProxy is not installed")), "stand-in"]
NAMES = ("w1", "w2", "w3")
PART = 128  # bytes of an append: two pieces
PATIENCE = 60  # seconds that anything may take on a busy machine

Serve = Callable[..., Any]


def wait_until(condition: Callable[[], object], what: Callable[[], object]) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, f"not within {PATIENCE} s: {what()}"
        time.sleep(0.02)


def text_of(number: int, n_byte: int) -> str:
    return "".join(f"{i * (number + 3)} stories, " for i in range(n_byte // 10 + 1))[:n_byte]


# several processes


class Workers:
    """Three servers with one directory of sessions, and a proxy before them.

    Attributes:
        url: of the proxy.
        direct: clients of the workers.
    """

    def __init__(self, kind: str) -> None:
        self.url, self.direct = "", dict[str, httpx.Client]()
        self._kind, self._ports = kind, {name: 0 for name in NAMES}
        self._children, self._ends = dict[str, forked.Child](), {name: ExitStack() for name in NAMES}

    def __enter__(self) -> "Workers":
        self._stack = ExitStack()
        with ExitStack() as stack:
            for name in NAMES:
                stack.push(self._ends[name])
                self.begin(name)
            listening = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=128))
            self.url = f"http://127.0.0.1:{listening.getsockname()[1]}"
            stack.enter_context((haproxy if self._kind == "haproxy" else stand_in)(listening, self._ports))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def begin(self, name: str) -> None:
        """Start a worker, at its old address if it had one."""
        options = ("--sessions", "kept", "--rows", "2", "--quiet", "--worker", name)
        opened = self._ends[name].enter_context(served(*options, port=self._ports[name]))
        self._children[name], self.direct[name] = opened[:2]
        self._ports[name] = int(str(opened[1].base_url).rpartition(":")[2].strip("/"))

    def kill(self, name: str) -> float:
        """Kill a worker, and return when."""
        self._children[name].send_signal(signal.SIGKILL)
        when = time.monotonic()
        self._children[name].wait()
        self._ends[name].close()
        return when

    def open_in(self, name: str) -> set[str]:
        """Return the sessions that a worker has open; none if it is dead."""
        try:
            listed = self.direct[name].get("/v1/sessions").json()["data"]
        except (httpx.HTTPError, RuntimeError):  # it was killed, and its client closed
            return set()
        return {each["id"] for each in listed if each["state"] in ("row", "parked")}


@contextmanager
def haproxy(listening: socket.socket, ports: dict[str, int]) -> Iterator[None]:
    """The configuration that is shipped, but for the ports."""
    assert HAPROXY
    config = (SERVE / "haproxy.cfg").read_text()
    changes = {f"127.0.0.1:808{i}": (f"127.0.0.1:{ports[name]}", 2) for i, name in enumerate(NAMES, 1)}
    for old, (new, n) in {**changes, "127.0.0.1:8080": (f"fd@{listening.fileno()}", 1)}.items():
        assert config.count(old) == n
        config = config.replace(old, new)
    logged = "global\n    log stdout format raw local0\ndefaults\n    log global\n    option httplog\n"
    Path("haproxy.cfg").write_text(config.replace("defaults\n", logged))
    command = [HAPROXY, "-f", "haproxy.cfg", "-db"]
    with (
        Path("haproxy.log").open("wb") as log,
        subprocess.Popen(command, stdout=log, stderr=log, pass_fds=[listening.fileno()]) as process,
    ):
        try:
            yield
            assert process.poll() is None, Path("haproxy.log").read_text()
        finally:
            process.kill()


@contextmanager
def stand_in(listening: socket.socket, ports: dict[str, int]) -> Iterator[None]:
    loop, stop = asyncio.new_event_loop(), asyncio.Event()
    thread = threading.Thread(target=loop.run_until_complete, args=(StandIn(ports).run(listening, stop),))
    thread.start()
    try:
        yield
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(PATIENCE)
        loop.close()


@dataclass
class Reader:
    """A client that appends its own text to a session, part by part, and goes on where the session is."""

    url: str
    number: int
    id: str = ""
    at: int = 0
    good: list[float] = field(default_factory=list)  # times of answers
    died: list[str] = field(default_factory=list)  # requests that a dying worker took along
    waited: int = 0
    wrong: list[str] = field(default_factory=list)
    fresh: tuple[str, int] = "", 0  # what it is compared with, and how many tokens that has read

    def begin(self, client: httpx.Client) -> None:
        self.id = client.post("/v1/sessions", json={}).json()["id"]
        assert self._append(client) == 200
        assert client.post(f"/v1/sessions/{self.id}/save", json={}).status_code == 200

    def read_on(self, stop: threading.Event) -> None:
        with httpx.Client(base_url=self.url, timeout=PATIENCE) as client:
            while not stop.wait(0.03) and not self.wrong:
                with suppress(httpx.RemoteProtocolError, httpx.ReadError):
                    self._append(client)
                    continue
                self.died.append(f"no answer {time.monotonic():.3f}")

    def _append(self, client: httpx.Client) -> int:
        part = text_of(self.number, self.at + PART)[self.at :]
        answer = client.post(f"/v1/sessions/{self.id}/append", json={"text": part, "at": self.at})
        is_ours = answer.headers.get("content-type") == "application/json"
        code = answer.json()["error"]["code"] if is_ours and answer.status_code >= 400 else ""
        if answer.status_code == 200:
            self.at = answer.json()["session"]["n_tokens"]
            self.good.append(time.monotonic())
        elif code == "moved":
            self.at = answer.json()["error"]["n_tokens"]
            if self.at % 64:
                self.wrong.append(f"it stands at {self.at}")
        elif answer.status_code == 502:  # the proxy has lost the worker
            self.died.append(f"502 {time.monotonic():.3f}")
        elif code == "leased":
            assert answer.headers["retry-after"] == "1"
            self.waited += 1
            time.sleep(0.1)
        else:
            self.wrong.append(f"{answer.status_code} {answer.text}")
        return answer.status_code

    def good_since(self, when: float) -> float | None:
        """Return the seconds from a time to the first good answer after it."""
        return next((each - when for each in self.good if each > when), None)


@contextmanager
def watched(workers: Workers) -> Iterator[None]:
    """Look all the time whether two workers have one session open: one before and after a look at the other."""
    stop, twice = threading.Event(), list[str]()

    def watch() -> None:
        before = {name: workers.open_in(name) for name in NAMES}
        while not stop.is_set():
            between = {name: workers.open_in(name) for name in NAMES}
            after = {name: workers.open_in(name) for name in NAMES}
            for name in NAMES:
                elsewhere = set[str]().union(*(between[other] for other in NAMES if other != name))
                twice.extend(before[name] & after[name] & elsewhere)
            before = after
            stop.wait(0.1)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
    assert not twice, f"open in two workers: {twice}"


@contextmanager
def reading(readers: list[Reader]) -> Iterator[None]:
    stop = threading.Event()
    threads = [threading.Thread(target=each.read_on, args=(stop,)) for each in readers]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def killed_and_back(workers: Workers, readers: list[Reader], victim: str, *, n_good: int) -> dict[str, float]:
    """Kill a worker while its sessions and others are read, start it again, and return what took how long."""
    own = [each for each in readers if each.id.startswith(f"{victim}-")]
    others = [each for each in readers if each not in own]
    n_died = {each.id: len(each.died) for each in readers}

    def have_gone_on(since: float) -> bool:
        assert not any(each.wrong for each in readers), [each.wrong for each in readers]
        return all(sum(good > since for good in each.good) >= n_good for each in readers)

    with watched(workers), reading(readers):
        begin = time.monotonic()
        wait_until(lambda: have_gone_on(begin), lambda: ("all sessions are read", readers))
        when = workers.kill(victim)
        wait_until(lambda: have_gone_on(when), lambda: ("all sessions go on after the kill", readers))
        back = time.monotonic()
        workers.begin(victim)
        ids = {each.id for each in own}
        wait_until(lambda: ids <= workers.open_in(victim), lambda: ("a worker that is back has its sessions", readers))
        returned = time.monotonic()
        wait_until(lambda: have_gone_on(returned), lambda: ("all sessions go on after the return", readers))
    # One that was under way, one that the dying process still let in; one more is tolerated on a busy machine.
    assert all(len(each.died) - n_died[each.id] <= 3 for each in own), ([each.died for each in own], when, back)
    assert all(len(each.died) == n_died[each.id] for each in others), ([each.died for each in others], when, back)
    firsts = [each.good_since(when) or PATIENCE for each in own]
    return {"first_good": min(firsts), "last_first_good": max(firsts), "back": returned - back}


def compare(workers: Workers, readers: list[Reader], oracle: httpx.Client) -> None:
    """Compare each session with one that has read the same in a server of its own that nobody killed."""
    body = {"max_tokens": 5, "seed": 1, "logprobs": 1}
    with httpx.Client(base_url=workers.url, timeout=PATIENCE) as client:
        for each in readers:
            n_tokens = client.get(f"/v1/sessions/{each.id}").json()["n_tokens"]
            fresh, n_read = each.fresh
            if not fresh or n_read >= n_tokens:
                fresh, n_read = f"/v1/sessions/{oracle.post('/v1/sessions', json={}).json()['id']}", 0
            read = oracle.post(f"{fresh}/append", json={"text": text_of(each.number, n_tokens)[n_read:], "at": n_read})
            assert read.status_code == 200, read.text
            each.fresh = fresh, n_tokens
            expected = oracle.post(f"{fresh}/ask", json=body).json()["choices"]
            assert client.post(f"/v1/sessions/{each.id}/ask", json=body).json()["choices"] == expected


def begin_everywhere(client: httpx.Client, url: str, n_each: int) -> list[Reader]:
    """Begin sessions until each worker has so many."""
    readers = list[Reader]()
    while any(sum(each.id.startswith(f"{name}-") for each in readers) < n_each for name in NAMES):
        assert len(readers) < 10 * n_each, "the proxy does not use all workers"
        readers.append(Reader(url, len(readers)))
        readers[-1].begin(client)
    return readers


@pytest.mark.parametrize("kind", PROXIES)
def test_a_worker_is_killed_and_comes_back(kind: str, folder: Path, record_property: Callable[..., None]) -> None:
    with Workers(kind) as workers, httpx.Client(base_url=workers.url, timeout=PATIENCE) as client:
        readers = begin_everywhere(client, workers.url, 1)
        check_routes(workers, client, readers)
        took = killed_and_back(workers, readers, "w1", n_good=2)
        for what, seconds in took.items():
            record_property(what, seconds)
        print(kind, took)
        assert took["first_good"] < 20
        with served("--rows", "2", "--quiet") as (_, oracle, _):
            compare(workers, readers, oracle)
    assert [path.name for path in Path("kept").rglob("*.tmp")] == []


def check_routes(workers: Workers, client: httpx.Client, readers: list[Reader]) -> None:
    """Each call for a session reaches the worker that has it, and events come one by one."""
    for each in readers:
        name = each.id.partition("-")[0]
        other = NAMES[NAMES.index(name) - 1]
        assert each.id in workers.open_in(name)
        refused = workers.direct[other].post(f"/v1/sessions/{each.id}/append", json={"text": "a"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "leased")
        assert refused.headers["x-txl-owner"].startswith(f"{name}@")
        assert workers.direct[other].get(f"/v1/sessions/{each.id}").json()["state"] == "elsewhere"
        assert client.get(f"/v1/sessions/{each.id}").json()["state"] in ("row", "parked")
        header = {"x-session-id": each.id}
        assert client.post("/v1/score", json={"text": "a", "session_id": each.id}, headers=header).status_code == 200
    fork = client.post(f"/v1/sessions/{readers[0].id}/fork").json()["id"]
    with client.stream("POST", f"/v1/sessions/{fork}/generate", json={"max_tokens": 1_000_000, "stream": True}) as answer:
        lines = answer.iter_lines()
        assert next(lines).startswith("data: ")
        assert client.get(f"/v1/sessions/{fork}").json()["busy"], "events are held back until the text has ended"
        client.delete(f"/v1/sessions/{fork}/run")
        assert "stopped" in [line for line in lines if line][-1]
    assert client.delete(f"/v1/sessions/{fork}").status_code == 204


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("kind", PROXIES)
def test_workers_are_killed_again_and_again(kind: str, folder: Path) -> None:
    draw, took = np.random.default_rng(0), list[dict[str, float]]()
    with Workers(kind) as workers, httpx.Client(base_url=workers.url, timeout=PATIENCE) as client:
        readers = begin_everywhere(client, workers.url, 3)
        with served("--rows", "2", "--quiet") as (_, oracle, _):
            for _ in range(10):
                took.append(killed_and_back(workers, readers, str(draw.choice(NAMES)), n_good=5))
                compare(workers, readers, oracle)
    print(kind, took)


def test_the_configuration_is_one() -> None:
    if not HAPROXY:
        pytest.skip("HAProxy is not installed")
    checked = subprocess.run([HAPROXY, "-c", "-f", SERVE / "haproxy.cfg"], capture_output=True, text=True, timeout=PATIENCE)
    assert checked.returncode == 0 and "warning" not in checked.stderr.lower(), checked.stderr


# two servers in one process


def begin(client: Any, text: str = "Once upon a time") -> str:
    url = f"/v1/sessions/{client.post('/v1/sessions', json={}).json()['id']}"
    assert client.post(f"{url}/append", json={"text": text}).status_code == 200
    return url


def end(client: Any, url: str) -> None:
    """Let a session be as if its worker had been killed after it was saved."""
    assert client.post(f"{url}/save", json={}).status_code == 200
    sessions = client.service.sessions
    session = sessions.live.pop(url.rpartition("/")[2])
    session.lease.close()
    client.service.engine.call(lambda: client.service.engine.release(session)).result(PATIENCE)


def listed(client: Any) -> dict[str, str]:
    return {f"/v1/sessions/{each['id']}": each["state"] for each in client.get("/v1/sessions").json()["data"]}


def test_a_guest_goes_home_and_an_own_session_stays(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    home, refuge = serve(stored=True), serve(stored=True, worker="w2")
    one, own = begin(home), begin(refuge)
    expected = home.post(f"{one}/ask", json={"max_tokens": 5, "seed": 1}).json()["choices"]
    end(home, one)
    with monkeypatch.context() as patch:
        patch.setattr(module, "_GUEST_SECONDS", 1000.0)
        assert refuge.post(f"{one}/ask", json={"max_tokens": 5, "seed": 1}).json()["choices"] == expected
        assert listed(refuge) == {one: "parked", own: "row"} and listed(home)[one] == "elsewhere"
        refused = home.post(f"{one}/append", json={"text": "a"})
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
    wait_until(lambda: listed(refuge)[one] == "disk", lambda: "a guest is left to its file")
    assert home.post(f"{one}/ask", json={"max_tokens": 5, "seed": 1}).json()["choices"] == expected
    assert listed(home)[one] == "parked" and listed(refuge) == {one: "elsewhere", own: "row"}


def test_a_guest_that_has_gone_back_to_its_beginning_is_ended(serve: Serve) -> None:
    home, refuge = serve(stored=True), serve(stored=True, worker="w2")
    one = begin(home)
    end(home, one)
    assert refuge.post(f"{one}/rewind", json={"n": 16}).json()["n_tokens"] == 0
    wait_until(lambda: one not in listed(home), lambda: "it has neither file nor lease")
    # its file goes first, and for a moment the lease is still there
    wait_until(lambda: home.post(f"{one}/append", json={"text": "a", "at": 0}).status_code == 404, lambda: "it is leased")


async def read(server: Service, session: Session, text: str) -> None:
    job = Job(owner=session.owner, prompt=BYTES.encode(text), session=session)
    async with aclosing(server.run(job)) as answers:
        async for _ in answers:
            pass


async def guest_of(home: Service, text: str) -> tuple[str, str]:
    """Return owner and name of a session that was saved by a worker that is no more."""
    session = await home.sessions.create(LOCAL_OWNER)
    await read(home, session, text)
    await home.sessions.save(session)
    home.sessions.forget(session)
    return LOCAL_OWNER, session.id


def test_a_guest_stays_while_a_request_has_it_in_hand(start: Start) -> None:
    home, refuge = start(stored=True), start(stored=True, worker="w2")

    async def request(name: tuple[str, str], go_on: asyncio.Event, opened: asyncio.Future[Session]) -> None:
        opened.set_result(await refuge.sessions.open(*name))
        await go_on.wait()

    async def main() -> None:
        name, go_on = await guest_of(home, "Once"), asyncio.Event()
        opened = asyncio.get_running_loop().create_future()
        requesting = asyncio.ensure_future(request(name, go_on, opened))
        session = await opened
        session.used -= 10
        await refuge.sessions._look()
        assert not session.is_gone, "it comes slowly, but it comes"
        go_on.set()
        await requesting
        await asyncio.sleep(0)
        await refuge.sessions._look()
        assert session.is_gone and not refuge.sessions.live

    asyncio.run(main())


def test_who_asks_for_a_session_that_is_being_left_gets_it(start: Start) -> None:
    home, refuge = start(stored=True), start(stored=True, worker="w2")

    async def main() -> None:
        name = await guest_of(home, "Once")
        session = await asyncio.ensure_future(refuge.sessions.open(*name))
        await asyncio.sleep(0)
        leaving = asyncio.ensure_future(refuge.sessions._let_go(session))
        while not session.is_leaving:
            await asyncio.sleep(0)
        again = await refuge.sessions.open(*name)
        await leaving
        assert session.is_gone and again is not session
        await read(refuge, again, " more")
        assert again.text.n_tokens == 9

    asyncio.run(main())


def test_a_session_that_is_deleted_is_nobody_elses_before_its_file_is_gone(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, others = start(stored=True), start(stored=True, worker="w2").sessions.store
    store, forget, leases = home.sessions.store, home.sessions.forget, list[ExitStack]()
    assert store and others

    def take(path: Path) -> None:
        with suppress(RefusalError):
            leases.append(others.lease(path))

    async def main() -> None:
        session = await asyncio.ensure_future(home.sessions.create(LOCAL_OWNER))
        await read(home, session, "Once")
        await home.sessions.save(session)
        path, remove = store.path(LOCAL_OWNER, session.id), store.remove

        def look_and_remove(path: Path) -> None:
            assert home.sessions.find(LOCAL_OWNER, session.id) is None, "another request comes meanwhile"
            take(path)
            assert not leases
            remove(path)

        monkeypatch.setattr(store, "remove", look_and_remove)
        monkeypatch.setattr(home.sessions, "forget", lambda session: (forget(session), take(path)))
        await home.sessions.delete(LOCAL_OWNER, session.id)
        assert not path.is_file() and not home.sessions.live

    with ExitStack() as end:
        end.callback(lambda: [lease.close() for lease in leases])
        asyncio.run(main())


def test_a_session_whose_time_is_over_stays_if_somebody_comes_first(start: Start) -> None:
    server = start()

    async def main() -> None:
        sessions = [await asyncio.ensure_future(server.sessions.create(LOCAL_OWNER, ttl=1)) for _ in range(2)]
        for session in sessions:
            session.used -= 10
        async with server.sessions._adopting:
            looking = asyncio.ensure_future(server.sessions._look())
            await asyncio.sleep(0.01)
            await server.sessions.open(LOCAL_OWNER, sessions[1].id)
        await looking
        assert [session.is_gone for session in sessions] == [True, False]
        assert list(server.sessions.live.values()) == sessions[1:]

    asyncio.run(main())


def test_a_session_that_changes_while_it_is_saved_is_not_left(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    server = start(stored=True)
    keep = server.sessions._bring_file_up_to_date

    async def keep_and_read(session: Session) -> None:
        await keep(session)
        await read(server, session, " more")

    async def main() -> None:
        session = await asyncio.ensure_future(server.sessions.create(LOCAL_OWNER))
        await read(server, session, "Once")
        monkeypatch.setattr(server.sessions, "_bring_file_up_to_date", keep_and_read)
        await server.sessions._let_go(session)
        assert server.sessions.live == {session.id: session} and session.text.n_tokens == 9
        assert session.saved_at == 4 and session.is_changed

    asyncio.run(main())


def test_a_server_that_drains_leaves_idle_sessions_to_others_at_once(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    home, refuge = start(stored=True), start(stored=True, worker="w2")

    async def main() -> None:
        session = await asyncio.ensure_future(home.sessions.create(LOCAL_OWNER))
        await read(home, session, "Once")
        with monkeypatch.context() as patch:
            patch.setattr(Engine, "is_idle", False)  # a text goes on
            ending = asyncio.ensure_future(home.sessions.shut_down(PATIENCE))
            while home.sessions.live:
                await asyncio.sleep(0.02)
            assert (await refuge.sessions.open(LOCAL_OWNER, session.id)).text.n_tokens == 4
            with pytest.raises(RefusalError, match="shutting down"):
                await home.sessions.open(LOCAL_OWNER, session.id)
            assert not ending.done()
        await ending
        assert home.sessions.n_unsaved == 0

    asyncio.run(asyncio.wait_for(main(), PATIENCE))


def test_what_is_open_elsewhere_is_no_unknown_session(serve: Serve) -> None:
    home, refuge = serve(stored=True), serve(stored=True, worker="w2")
    one = begin(home)  # and never saved
    for refused in (refuge.get(one), refuge.post(f"{one}/append", json={"text": "a"}), refuge.delete(one)):
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "leased")
    assert listed(refuge) == {}
    assert refuge.get(f"/v1/sessions/w1-{'0' * 32}").status_code == 404
    assert not list(home.service.sessions.store.directory.rglob(f"*{'0' * 32}*")), "a question about nothing leaves nothing"


def test_who_only_looks_whether_a_session_is_free_is_waited_for(start: Start) -> None:
    store = start(stored=True).sessions.store
    assert store
    path = store.path(LOCAL_OWNER, f"w1-{'0' * 32}")
    looking = store.lease(path)
    with pytest.raises(RefusalError, match="open in another process \\(test\\)"):
        store.lease(path)
    threading.Timer(0.05, looking.close).start()
    store.lease(path, wait=PATIENCE).close()
    assert not list(path.parent.iterdir()), "neither lock nor owner"


def test_two_workers_that_save_by_one_name_take_turns(serve: Serve) -> None:
    home, refuge = serve(stored=True), serve(stored=True, worker="w2")
    one, two = begin(home, "first"), begin(refuge, "second one")
    store = home.service.sessions.store
    with store.lease(store.path(LOCAL_OWNER, "x", saved=True)):  # as if home were writing it
        refused = refuge.post(f"{two}/save", json={"name": "x"})
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
    for client, url, n in ((refuge, two, 10), (home, one, 5)):
        assert client.post(f"{url}/save", json={"name": "x"}).status_code == 200
        assert [each["n_tokens"] for each in client.get("/v1/saved").json()["data"]] == [n]


def test_workers_that_sweep_at_once_delete_what_is_over_and_nothing_else(start: Start) -> None:
    home, others = start(stored=True), [start(stored=True, worker=f"w{i}") for i in (2, 3)]

    async def main() -> None:
        over, live = [(await guest_of(home, "Once"))[1] for _ in range(5)], await home.sessions.create(LOCAL_OWNER, ttl=9.0)
        await read(home, live, "Once")
        await home.sessions.save(live)
        store = home.sessions.store
        assert store
        folder = store.path(LOCAL_OWNER, live.id).parent
        for name in over:
            path = store.path(LOCAL_OWNER, name)
            session = store.read(LOCAL_OWNER, path)
            assert session.parked
            store.write(path, session.parked, {**session.note(), "ttl": "9.0"})
        for name in (over[0], f"w1-{'0' * 32}", live.id):
            (folder / f".{name}.session.session.tmp").write_bytes(b"half")
        (folder / f"w1-{'1' * 32}.lock").touch()
        (folder / f"w1-{'1' * 32}.owner").write_text("w1@dead:1")
        await asyncio.gather(*(asyncio.to_thread(other.sessions.require_store().sweep, time.time() + 10) for other in others))
        left = [f".{live.id}.session.session.tmp", f"{live.id}.lock", f"{live.id}.owner", f"{live.id}.session"]
        assert sorted(path.name for path in folder.iterdir()) == left, "what is open is another's"

    asyncio.run(main())


def test_the_recipe_for_kubernetes_fits_the_server(tmp_path: Path) -> None:
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
    documents = yaml.safe_load_all((SERVE / "kubernetes.yaml").read_text())
    parts = {(part["kind"], part["metadata"]["name"]): part for part in documents}
    pod = parts["StatefulSet", "txl"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    (script,) = container["args"]
    assert pod["terminationGracePeriodSeconds"] > int(script.split("--grace ")[1])
    assert {each["name"] for each in container["volumeMounts"]} == {each["name"] for each in pod["volumes"]}
    shown = f"HOSTNAME=txl-2; echo {script.split('--worker ')[1].split(' --')[0]}"
    assert subprocess.run(["sh", "-c", shown], capture_output=True, text=True, timeout=PATIENCE).stdout == "w3\n"
    config = parts["ConfigMap", "txl-haproxy"]["data"]["haproxy.cfg"]

    def rules(text: str) -> list[str]:
        lines = [" ".join(line.partition("#")[0].split()) for line in text.splitlines()]
        return [line for line in lines if line and not line.startswith(("server ", "bind ", "resolvers ", "parse-", "hold "))]

    assert rules(config) == rules((SERVE / "haproxy.cfg").read_text())
    if HAPROXY:
        (tmp_path / "haproxy.cfg").write_text(config)
        command = [HAPROXY, "-c", "-f", tmp_path / "haproxy.cfg"]
        assert subprocess.run(command, capture_output=True, timeout=PATIENCE).returncode == 0
