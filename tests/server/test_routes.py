"""What clients see: OpenAI's shapes, sessions, scores, and one line of JSON for everything that is refused."""

import json
import math
import os
import stat
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.server.conftest import BYTES, MEM_LEN, ROWS
from transformer_xl.server.guard import LOCAL_OWNER
from transformer_xl.server.jobs import Job

Serve = Callable[..., Any]
PROMPT = "Once upon a time there was a memory."
IDS = BYTES.encode(PROMPT).tolist()
LIVE = "/v1/sessions/{}"


def complete(client: Any, **body: Any) -> Any:
    answer = client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def session(client: Any, text: str = "", **body: Any) -> str:
    """Begin a session that has read a text; return its path."""
    answer = client.post("/v1/sessions", json=body)
    assert answer.status_code == 201, answer.text
    path = LIVE.format(answer.json()["id"])
    assert not text or client.post(f"{path}/append", json={"text": text}).status_code == 200
    return path


def ask(client: Any, path: str, **body: Any) -> Any:
    return client.post(f"{path}/ask", json={"max_tokens": 6, "seed": 1, **body}).json()["choices"]


def fork(client: Any, path: str) -> str:
    return LIVE.format(client.post(f"{path}/fork").json()["id"])


def live(client: Any, path: str) -> Any:
    return client.service.sessions.live[path.rpartition("/")[2]]


def shut_down(client: Any) -> None:
    client.portal.call(client.service.sessions.shut_down, 0.0)


def events(text: str) -> list[Any]:
    parts = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return [part if part == "[DONE]" else json.loads(part) for part in parts]


def test_a_completion_has_openais_shape(serve: Serve) -> None:
    client, body = serve(), {"prompt": PROMPT, "max_tokens": 7, "seed": 3, "n": 2}
    made = complete(client, model="tiny", user="me", **body)
    assert made["object"] == "text_completion" and made["model"] == "tiny" and made["system_fingerprint"].endswith("-seed3")
    shape = [(each["index"], each["finish_reason"], each["logprobs"]) for each in made["choices"]]
    assert shape == [(0, "length", None), (1, "length", None)]
    read = {"prompt_tokens": len(PROMPT), "prompt_tokens_details": {"cached_tokens": 0}}
    assert made["usage"] == {**read, "completion_tokens": 14, "total_tokens": len(PROMPT) + 14}
    for prompt in (PROMPT, [IDS]):
        assert complete(client, **{**body, "prompt": prompt})["choices"] == made["choices"], "the same seed, the same text"


def test_a_completion_continues_a_session_that_its_body_names(serve: Serve) -> None:
    client = serve()
    first, second = session(client, PROMPT), session(client, PROMPT)
    body = {"max_tokens": 6, "seed": 2}
    made = complete(client, prompt=" Then", session_id=first.rpartition("/")[2], **body)["choices"]
    assert client.post(f"{second}/append", json={"text": " Then"}).status_code == 200
    assert client.post(f"{second}/generate", json=body).json()["choices"][0]["text"] == made[0]["text"]
    places = [client.get(path).json()["n_tokens"] for path in (first, second)]
    assert places == [len(PROMPT + " Then") + 6] * 2
    refused = client.post("/v1/completions", json={"prompt": "a", "n": 2, "session_id": first.rpartition("/")[2]})
    assert refused.status_code == 400


def test_a_stream_is_the_whole_in_parts(serve: Serve) -> None:
    client = serve()
    body = {"prompt": PROMPT, "max_tokens": 9, "seed": 5, "n": 2, "logprobs": 2}
    whole = complete(client, **body)
    answer = client.post("/v1/completions", json={**body, "stream": True, "stream_options": {"include_usage": True}})
    assert answer.headers["content-type"].startswith("text/event-stream")
    *chunks, usage, done = events(answer.text)
    assert done == "[DONE]" and usage["choices"] == [] and usage["usage"] == whole["usage"]
    for expected in whole["choices"]:
        own = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == expected["index"]]
        assert "".join(each["text"] for each in own) == expected["text"]
        assert [each["finish_reason"] for each in own] == [None] * (len(own) - 1) + ["length"]
        shown = [sum(len(each["text"]) for each in own[:i]) for i in range(len(own))]
        assert [n for n, each in zip(shown, own, strict=True) if each["logprobs"]] == expected["logprobs"]["text_offset"]
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            assert [value for each in own if each["logprobs"] for value in each["logprobs"][name]] == expected["logprobs"][name]


def test_the_engine_knows_which_answers_are_streamed(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only those have a reader who may be slow."""
    client, streams = serve(chats=True), list[bool]()
    submit = client.service.engine.submit
    monkeypatch.setattr(client.service.engine, "submit", lambda job, tell: (streams.append(job.streams), submit(job, tell))[1])
    asks = {
        "/v1/completions": {"prompt": PROMPT},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": PROMPT}]},
        f"{session(client)}/ask": {"text": PROMPT},
    }
    for path, body in asks.items():
        for stream in (True, False):
            assert client.post(path, json={**body, "max_tokens": 2, "stream": stream}).status_code == 200
    assert streams == [True, False] * 3


def test_echo_scores_a_prompt_as_the_harness_sums_it(serve: Serve) -> None:
    """As lm-evaluation-harness asks: ids, echo, one token more; the greedy token is told by an equal float."""
    client = serve()
    made = complete(client, prompt=[IDS], max_tokens=1, temperature=0, logprobs=1, echo=True, seed=1234)
    logs = made["choices"][0]["logprobs"]
    assert len(logs["tokens"]) == len(IDS) + 1 and logs["token_logprobs"][0] is None and logs["top_logprobs"][0] is None
    score = client.post("/v1/score", json={"tokens": IDS, "per_token": True}).json()
    assert -sum(logs["token_logprobs"][1:-1]) == pytest.approx(score["nats"], abs=1e-6)
    assert score["tokens"] == len(IDS) - 1 and score["ppl"] == pytest.approx(math.exp(score["nats"] / (len(IDS) - 1)))
    for token, value, top in list(zip(logs["tokens"], logs["token_logprobs"], logs["top_logprobs"], strict=True))[1:]:
        assert top[token] == value and max(top.values()) >= value
    assert max(logs["top_logprobs"][-1].values()) == logs["token_logprobs"][-1], "what is written greedily is greedy"
    only = complete(client, prompt=PROMPT, max_tokens=0, echo=True, logprobs=0)["choices"][0]
    assert only["text"] == PROMPT and only["logprobs"]["token_logprobs"] == logs["token_logprobs"][:-1]
    cut = complete(client, prompt=[65, 195], max_tokens=0, echo=True)
    assert cut["choices"][0]["text"] == "A\ufffd", "a character that the prompt leaves open comes once"


def test_stops(serve: Serve) -> None:
    client = serve()
    free = complete(client, prompt=PROMPT, max_tokens=60, seed=1)["choices"][0]["text"]
    stop = next(letter for letter in free[5:] if letter.isascii() and letter.isprintable())
    for stops in ({"stop": [stop]}, {"stop_token_ids": [ord(stop)]}):
        ended = complete(client, prompt=PROMPT, max_tokens=60, seed=1, **stops)["choices"][0]
        assert ended["finish_reason"] == "stop" and ended["text"] == free[: free.index(stop)]


def test_more_texts_than_rows_and_queue_hold_are_all_written_or_time_out(serve: Serve) -> None:
    client = serve(queue=12, per_owner=8)
    body = {"n": 4, "max_tokens": 3, "seed": 1}
    made = complete(client, prompt=[f"text {i}" for i in range(4 * ROWS)], **body)["choices"]
    assert [(each["index"], each["finish_reason"]) for each in made] == [(i, "length") for i in range(16 * ROWS)]
    assert complete(client, prompt=["text 0", "text 1"], **body)["choices"] == made[:8]
    endless = {"max_tokens": 10**5, "timeout": 0.2}
    late = client.post("/v1/completions", json={"prompt": ["a"] * 6, **endless})
    assert (late.status_code, late.json()["error"]["code"], late.headers["x-should-retry"]) == (504, "timeout", "false")
    stream = client.post("/v1/completions", json={"prompt": "a", "stream": True, **endless})
    assert events(stream.text)[-1]["error"]["code"] == "timeout"


def test_a_session_is_one_text(serve: Serve) -> None:
    client = serve()
    one, whole = session(client, seed=7), session(client, seed=7)
    empty = client.get(one).json()
    assert (empty["n_tokens"], empty["state"], empty["busy"], empty["mem_len"]) == (0, "parked", False, MEM_LEN)
    read = client.post(f"{one}/append", json={"text": PROMPT, "at": 0, "score": "tokens"}).json()
    assert read["session"]["n_tokens"] == len(PROMPT) and not read["session"]["busy"]
    assert [each["id"] for each in read["tokens"]] == IDS
    first = client.post(f"{one}/generate", json={"max_tokens": 4, "at": len(PROMPT)}).json()["choices"][0]
    second = client.post(f"{one}/generate", json={"max_tokens": 5}).json()["choices"][0]
    client.post(f"{whole}/append", json={"tokens": IDS})
    together = client.post(f"{whole}/generate", json={"max_tokens": 9}).json()["choices"][0]
    assert first["text"] + second["text"] == together["text"] or "\ufffd" in first["text"]
    assert client.get(one).json()["bytes"] == empty["bytes"] and client.get(one).json()["n_remembered"] == MEM_LEN
    end = client.get(f"{one}/tail").json()
    assert end["n_tokens"] == len(PROMPT) + 9 and end["text"].startswith(PROMPT)
    scored = client.post(f"{one}/append", json={"text": "!", "score": "sum"}).json()
    assert scored["scored"] == 1, "the first token of an append has a score, too"
    assert client.post(f"{one}/append", json={"text": ""}).status_code == 400
    assert client.delete(one).status_code == 204 and client.get(one).status_code == 404


def test_progress_of_an_append(serve: Serve) -> None:
    client = serve()
    body = {"text": PROMPT, "score": "sum"}
    answer = client.post(f"{session(client)}/append", json=body, headers={"accept": "text/event-stream"})
    *progress, last = events(answer.text)
    assert [each["processed"] for each in progress] == [8, 16, 24, 32, len(PROMPT)]
    assert all(each["total"] == len(PROMPT) for each in progress)
    assert last["session"]["n_tokens"] == len(PROMPT) and last["nats"] == progress[-1]["nats"]
    assert last["nats"] == pytest.approx(client.post("/v1/score", json={"text": PROMPT}).json()["nats"])
    one = session(client)
    parts = [client.post(f"{one}/append", json={**body, "text": text}).json() for text in (PROMPT[:24], PROMPT[24:])]
    assert sum(part["nats"] for part in parts) == pytest.approx(last["nats"])
    assert sum(part["scored"] for part in parts) == last["scored"] == len(PROMPT) - 1


def test_the_random_numbers_of_a_session(serve: Serve) -> None:
    """A refused call takes none, they begin anew with the text, and a seed of a call counts more."""
    client = serve()

    def write(path: str, n: int, **body: Any) -> str:
        return client.post(f"{path}/generate", json={"max_tokens": n, **body}).json()["choices"][0]["text"]

    one, other = session(client, PROMPT, seed=7), session(client, PROMPT, seed=7)
    assert write(one, 4) == write(other, 4)
    for refused in ({"stop_token_ids": [999]}, {"logit_bias": {"999": 1}}):
        answer = client.post(f"{one}/generate", json={"max_tokens": 4, "seed": 8, **refused})
        assert answer.status_code == 400 and "outside the vocabulary" in answer.json()["error"]["message"]
    assert write(one, 9) == write(other, 9)
    made = client.post(f"{one}/generate", json={"max_tokens": 1}).json()
    assert made["system_fingerprint"].endswith("-seed7"), "what decides the text"

    again, texts = session(client, seed=5), list[str]()
    for _ in range(2):
        client.post(f"{again}/append", json={"text": "ab"})
        texts.append(write(again, 3))
        assert client.post(f"{again}/rewind", json={"n": 5}).json()["n_tokens"] == 0
    assert texts[0] == texts[1]
    third, fourth = session(client, PROMPT, seed=3), session(client, PROMPT, seed=4)
    assert write(third, 12, seed=9) == write(fourth, 12, seed=9)


def test_a_repeated_call_is_told_where_the_text_is(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    client = serve()
    one = session(client, "abc")
    for what, body in (("append", {"text": "abc"}), ("generate", {"max_tokens": 3}), ("rewind", {"n": 1})):
        again = client.post(f"{one}/{what}", json={**body, "at": 0})
        assert again.status_code == 409 and again.headers["x-should-retry"] == "false"
        assert again.json()["error"]["n_tokens"] == 3 and again.json()["error"]["code"] == "moved"
    assert client.get(one).json()["n_tokens"] == 3
    encode = client.service.encode

    async def encode_while_another_call_reads(text: str) -> Any:
        ids = await encode(text)
        async for _ in client.service.run(Job(owner=LOCAL_OWNER, prompt=ids, session=live(client, one))):
            pass
        return ids

    monkeypatch.setattr(client.service, "encode", encode_while_another_call_reads)
    late = client.post(f"{one}/append", json={"text": "xyz", "at": 3})
    assert late.status_code == 409 and late.json()["error"]["n_tokens"] == 6 == client.get(one).json()["n_tokens"]


def test_a_question_leaves_no_trace_and_a_fork_goes_its_own_way(serve: Serve) -> None:
    client = serve()
    one, body = session(client, PROMPT), {"text": "?", "max_tokens": 5, "seed": 1, "n": 3}
    before = client.post(f"{one}/ask", json=body).json()
    assert len(before["choices"]) == 3 and before["usage"]["prompt_tokens"] == 1
    other = fork(client, one)
    client.post(f"{other}/append", json={"text": "something else"})
    assert client.get(one).json()["n_tokens"] == len(PROMPT)
    assert ask(client, one, **body) == before["choices"]
    assert client.get(other).json()["n_tokens"] == len(PROMPT) + 14
    engine = client.service.engine
    engine.call(lambda: engine.park(live(client, one))).result(30)
    assert client.delete(fork(client, one)).status_code == 204
    assert ask(client, one, **body) == before["choices"], "nor does it share what was parked"


def test_going_back(serve: Serve) -> None:
    client = serve()
    one, other = session(client, "abcdef"), session(client, "abcd")
    assert client.post(f"{one}/rewind", json={"n": 2}).json()["n_tokens"] == 4
    assert ask(client, one) == ask(client, other)
    assert client.post(f"{one}/rewind", json={"n": 4}).json()["n_tokens"] == 0
    assert client.post(f"{one}/rewind", json={"n": 1}).json()["error"]["code"] == "cannot_rewind"
    client.post(f"{one}/append", json={"text": PROMPT * 5})
    refused = client.post(f"{one}/rewind", json={"n": 100})
    assert refused.status_code == 409 and refused.json()["error"]["n_rewindable"] == client.get(one).json()["n_rewindable"]


@pytest.mark.parametrize("what", ["link", "pipe"])
def test_what_is_no_file_of_ours_is_neither_followed_nor_waited_for(serve: Serve, tmp_path: Path, what: str) -> None:
    client, mine = serve(stored=True), tmp_path / "mine.txt"
    mine.write_text("precious")
    one = session(client, PROMPT)
    client.post(f"{one}/save", json={"name": "book"})
    (saved,) = (tmp_path / "sessions").rglob("saved-*.session")
    own = saved.with_name(f"{one.rpartition('/')[2]}.session")
    for file in (saved, own):
        file.unlink(missing_ok=True)
        file.symlink_to(mine) if what == "link" else os.mkfifo(file)
    for path, body in ((f"{one}/save", {"name": "book"}), (f"{one}/save", {}), ("/v1/sessions", {"from": {"saved": "book"}})):
        refused = client.post(path, json=body)
        assert refused.status_code in (404, 409) and "Traceback" not in refused.text
    assert client.get("/v1/saved").json()["data"] == []
    assert mine.read_text() == "precious" and client.get(one).json()["n_tokens"] == len(PROMPT)


def test_what_is_saved_comes_back_without_being_read_again(serve: Serve, tmp_path: Path) -> None:
    client = serve(stored=True)
    one = session(client, PROMPT)
    client.post(f"{one}/save", json={})
    assert client.post(f"{one}/save", json={"name": "book.1"}).json()["n_tokens"] == len(PROMPT)
    assert client.get("/v1/saved").json()["data"] == [{"object": "saved", "name": "book.1", "n_tokens": len(PROMPT)}]
    paths = list((tmp_path / "sessions").rglob("*"))
    assert {path.suffix for path in paths if path.is_file()} == {".session", ".lock", ".owner"}
    assert all(stat.S_IMODE(path.stat().st_mode) == (0o600 if path.is_file() else 0o700) for path in paths), "its owner's alone"
    expected = ask(client, one)
    client.post(f"{one}/append", json={"text": "more"})
    n_read = counted(client, "txl_tokens_read_total")
    other = session(client, "", **{"from": {"saved": "book.1"}})
    assert client.get(other).json()["n_tokens"] == len(PROMPT)
    assert counted(client, "txl_tokens_read_total") == n_read
    assert ask(client, other) == expected
    assert client.delete("/v1/saved/book.1").status_code == 204
    assert client.post("/v1/sessions", json={"from": {"saved": "book.1"}}).json()["error"]["code"] == "not_found"


def counted(client: Any, name: str) -> float:
    line = next(line for line in client.get("/metrics").text.splitlines() if line.startswith(f"{name} "))
    return float(line.split()[1])


def test_more_sessions_than_memory_holds_go_to_the_disk_and_back(serve: Serve) -> None:
    client = serve(stored=True, most=4)
    paths = [session(client, f"text number {i}") for i in range(4)] + [session(client) for _ in range(3)]
    states = [each["state"] for each in client.get("/v1/sessions").json()["data"]]
    assert len(states) == 7 and states.count("disk") == 3
    answers = [ask(client, path) for path in paths[:4]]
    assert ask(client, session(client, "text number 2")) == answers[2]
    assert len(client.service.sessions.live) <= 4
    without = serve(stored=False, most=1)
    session(without)
    refused = without.post("/v1/sessions", json={})
    assert refused.status_code == 503 and "--session-memory" in refused.json()["error"]["message"]


def test_a_fork_that_needs_the_room_of_what_it_is_made_of(serve: Serve) -> None:
    client = serve(stored=True, most=1)
    one = session(client, PROMPT, seed=3)
    made = fork(client, one)
    assert client.get(made).json()["n_tokens"] == len(PROMPT)
    assert len(client.service.sessions.live) == 1 and client.get(one).json()["state"] == "disk"
    assert ask(client, made) == ask(client, one)


def test_what_memory_is_worth(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    client = serve()
    text = PROMPT * 4
    both = client.post("/v1/score", json={"text": text, "memory": "both", "per_token": True}).json()
    assert both["on"]["tokens"] == both["off"]["tokens"] == len(text) - 1
    on, off = ([each["logprob"] for each in both[way]["per_token"]] for way in ("on", "off"))
    assert on[:8] == off[:8] and on[30:] != off[30:]
    accents = client.post("/v1/score", json={"text": "aéé"}).json()
    assert (accents["tokens"], accents["bytes"]) == (4, 4)
    assert [accents[name] for name in ("bpc", "bpb")] == pytest.approx([accents["nats"] / math.log(2) / n for n in (2, 4)])
    alone = client.post("/v1/score", json={"text": text[16:32], "per_token": True}).json()
    assert [each["logprob"] for each in alone["per_token"]][8:] == pytest.approx(off[24:32], abs=1e-5), "the piece before it"
    monkeypatch.setattr(BYTES, "counts", "word")  # words that are lines
    assert client.post("/v1/score", json={"text": "aéé"}).json() == {**accents, "bpc": None}


def test_tokens_and_text(serve: Serve) -> None:
    """As llama.cpp, vLLM and lm-evaluation-harness ask for them."""
    client = serve()
    for path, body in (
        ("/tokenize", {"content": "aé", "add_special": False}),
        ("/v1/tokenize", {"prompt": "aé", "model": "tiny", "add_special_tokens": True}),
    ):
        assert client.post(path, json=body).json() == {"tokens": [97, 195, 169], "count": 3}
    assert client.post("/detokenize", json={"tokens": [97, 195, 169]}).json()["content"] == "aé"
    assert client.post("/tokenize", json={"prompt": "ab", "model": "other"}).status_code == 404
    model = client.get("/v1/models").json()["data"][0]
    assert (model["id"], model["object"], model["meta"]["mem_len"]) == ("tiny", "model", MEM_LEN)


REFUSED: list[tuple[str, Any, int, str]] = [
    ("completions", {"prompt": "a", "suffix": "b"}, 400, "suffix: "),
    ("completions", {"prompt": "a", "suffix": None}, 400, "suffix: "),  # null is no reason to overlook an unknown field
    ("completions", {"prompt": None}, 400, "prompt"),
    ("completions", {"prompt": "a", "best_of": 3}, 400, "best_of"),
    ("completions", {"prompt": "a", "frequency_penalty": 0.5}, 400, "frequency_penalty: "),
    ("completions", {"prompt": ""}, 400, "prompt"),
    ("completions", {"prompt": [[300]]}, 400, "token id 300"),
    ("completions", {"prompt": "a", "model": "gpt"}, 404, "'gpt' does not exist; this server has 'tiny'"),
    ("completions", {"prompt": "a", "model": "a\nb"}, 404, "a b"),
    ("completions", {"prompt": "a", "a\nb": 1}, 400, "a b"),
    ("completions", {"prompt": "a", "temperature": -1}, 400, "temperature: "),
    ("completions", {"prompt": "a", "repetition_penalty": 1e-178}, 400, "repetition_penalty: "),  # all scores would be infinite
    ("completions", {"prompt": "a", "max_tokens": "7"}, 400, "max_tokens: "),
    ("completions", {"prompt": "a", "max_tokens": 0}, 400, "max_tokens 0"),
    ("completions", {"prompt": "a", "max_tokens": 0, "echo": True, "n": 2}, 400, "n above 1"),
    ("completions", {"prompt": "a", "stop": [""]}, 400, "''"),
    ("completions", {"prompt": "a", "logit_bias": {"999": 1}}, 400, "token id 999"),
    ("completions", {"prompt": "a", "stop_token_ids": [300]}, 400, "token id 300"),
    ("completions", {"prompt": "a", "seed": -1}, 400, "seed: "),
    ("completions", {"prompt": "a", "session_id": "w1-" + "0" * 32}, 404, "no such session"),
    ("completions", {"prompt": "\ud800"}, 400, "lone surrogate"),
    ("chat/completions", {}, 501, "/v1/completions"),
    ("sessions/nope/append", {"text": "a"}, 404, "no such session"),
    ("sessions", {"ttl": 0}, 400, "ttl: "),
    ("sessions", {"from": {}}, 400, "from"),
    ("sessions", {"from": {"saved": "../x"}}, 400, "--sessions DIR"),
    ("score", {"text": ""}, 400, "text or tokens"),
]


def test_what_is_refused_is_named_in_one_line(serve: Serve) -> None:
    client = serve()
    for path, body, status, part in REFUSED:
        answer = client.post(f"/v1/{path}", content=json.dumps(body), headers={"content-type": "application/json"})
        message = answer.json()["error"]["message"]
        assert answer.status_code == status and part in message and "\n" not in message, (path, body, answer.text)
        assert (answer.headers.get("x-should-retry") == "false") == (status == 501), "openai-python repeats 501"


def test_names_are_no_paths(serve: Serve, tmp_path: Path) -> None:
    client = serve(stored=True)
    one = session(client, "abc")
    before = {*tmp_path.rglob("*")}
    for name in ("../evil", "sub/x", "..", ".hidden", "a" * 65, "a\nb", "%2e%2e", "a b"):
        assert client.post(f"{one}/save", json={"name": name}).status_code == 400, name
    assert not [path for path in {*tmp_path.rglob("*")} - before if path.suffix != ".session"]


def test_a_damaged_file_is_refused_and_nothing_else_is_lost(serve: Serve, tmp_path: Path) -> None:
    client, again = serve(stored=True), {"from": {"saved": "x"}}
    one = session(client, PROMPT)
    client.post(f"{one}/save", json={"name": "x"})
    (file,) = tmp_path.rglob("saved-*.session")
    whole = file.read_bytes()
    for damaged in (*(whole[:i] + bytes([whole[i] ^ 1]) + whole[i + 1 :] for i in (0, 8, 9)), whole[:100]):  # of the header
        file.write_bytes(damaged)
        refused = client.post("/v1/sessions", json=again)
        message = refused.json()["error"]["message"]
        assert refused.status_code == 409 and str(tmp_path) not in message and "\n" not in message
    file.write_bytes(whole)
    assert client.post("/v1/sessions", json=again).json()["n_tokens"] == len(PROMPT)
    assert client.get(one).json()["n_tokens"] == len(PROMPT)


def test_a_session_is_open_in_one_server_at_a_time(serve: Serve) -> None:
    first, second = serve(stored=True), serve(stored=True)
    one = session(first, PROMPT)
    first.post(f"{one}/save", json={})
    assert second.get(one).json()["state"] == "elsewhere"
    refused = second.post(f"{one}/append", json={"text": "a"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "leased")
    assert (refused.headers["retry-after"], refused.headers["x-txl-owner"]) == ("1", "test")
    first.post(f"{one}/append", json={"text": "what no file holds yet"})
    assert second.post(f"{one}/fork").json()["error"]["code"] == "leased"
    assert second.delete(one).status_code == 503
    live(first, one).lease.close()  # as if the first had ended
    assert second.post(f"{one}/append", json={"text": "a"}).json()["session"]["n_tokens"] == len(PROMPT) + 1


def test_what_a_server_saves_when_it_ends(serve: Serve) -> None:
    """Forks, and a text of the same length that is another text; a server of another precision refuses them."""
    client = serve(stored=True)
    one, other = session(client, "abcdefghij"), session(client, "abcdefghij")
    copy = fork(client, one)
    for path in (one, other):
        client.post(f"{path}/save", json={})
    client.post(f"{one}/rewind", json={"n": 3})
    client.post(f"{one}/append", json={"text": "XYZ"})
    client.post(f"{other}/rewind", json={"n": 10})
    assert client.get(other).json()["n_rewindable"] == 0
    shut_down(client)
    again = serve(stored=True)
    assert again.get(f"{one}/tail").json()["text"] == "abcdefgXYZ"
    assert again.get(copy).json()["n_tokens"] == 10
    assert again.get(other).status_code == 404, "it has read nothing, so there is no file"
    refused = serve(stored=True, precision="bf16").post(f"{copy}/append", json={"text": "and on"})
    assert refused.status_code == 409
    assert "precision ('fp32' there, 'bf16' here)" in refused.json()["error"]["message"], refused.text


def test_a_disk_that_is_full_costs_nothing_but_the_file(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformer_xl.generation import session_file

    client = serve(stored=True)
    one = session(client, PROMPT)
    client.post(f"{one}/save", json={"name": "x"})

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(session_file, "whole_file", full)
        client.post(f"{one}/append", json={"text": "more"})
        refused = client.post(f"{one}/save", json={"name": "x"})
        assert refused.status_code == 507 and "No space left on device" in refused.json()["error"]["message"]
        live(client, one).used = 0.0  # so that it rests, and is saved by itself
        client.portal.call(client.service.sessions._look)
        assert live(client, one).is_changed, "it goes on in memory"
    assert client.get(one).json()["n_tokens"] == len(PROMPT) + 4
    assert client.get("/v1/saved").json()["data"][0]["n_tokens"] == len(PROMPT)
    assert client.post(f"{one}/save", json={"name": "x"}).status_code == 200


def test_a_wrong_method_is_told_the_right_ones(serve: Serve) -> None:
    client = serve()
    for path, allowed in {"/v1/sessions": "GET, POST", "/v1/sessions/w1-x": "DELETE, GET", "/openapi.json": "GET"}.items():
        answer = client.request("PATCH", path)
        assert (answer.status_code, answer.json()["error"]["code"]) == (405, "method_not_allowed")
        assert answer.headers["allow"] == allowed, path


def test_the_description_names_every_answer(serve: Serve) -> None:
    """Each route says what it answers, and each of its errors has the one shape that errors have."""
    described = serve().get("/openapi.json").json()
    schemas = described["components"]["schemas"]
    assert len(described["paths"]) > 20 and not any("Validation" in name for name in schemas)
    for path, methods in described["paths"].items():
        for method, operation in methods.items():
            answers = operation["responses"]
            good = [code for code in answers if code < "300"]
            assert len(good) == 1 and {"4XX", "5XX"} < answers.keys(), (method, path)
            for code in answers.keys() - set(good) - ({"503"} if path == "/readyz" else set()):
                assert answers[code]["content"]["application/json"]["schema"]["$ref"].endswith("/Error"), (path, code)
    for name in ("SessionAnswer", "CompletionAnswer", "Appended", "AppendRequest", "CompletionRequest"):
        assert schemas[name]["additionalProperties"] is False


def test_who_is_cut_off_by_the_end_of_the_server_may_ask_again(serve: Serve) -> None:
    """A call that somebody stopped is not to be repeated; one that the server ends is, when that has begun anew."""
    client = serve(stored=True)
    one = session(client, "abc")
    with ThreadPoolExecutor() as pool:
        call = pool.submit(client.post, f"{one}/generate", json={"max_tokens": 10**6})
        while not client.get(one).json()["busy"]:
            time.sleep(0.01)
        shut_down(client)
        answer = call.result(30)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "shutting_down")
    assert answer.headers["retry-after"] == "5" and "x-should-retry" not in answer.headers
