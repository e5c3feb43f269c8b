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

Serve = Callable[..., Any]
PROMPT = "Once upon a time there was a memory."


def complete(client: Any, **body: Any) -> Any:
    answer = client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def session(client: Any, **body: Any) -> str:
    answer = client.post("/v1/sessions", json=body)
    assert answer.status_code == 201, answer.text
    return f"/v1/sessions/{answer.json()['id']}"


def events(text: str) -> list[Any]:
    parts = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return [part if part == "[DONE]" else json.loads(part) for part in parts]


def test_a_completion_has_openais_shape(serve: Serve) -> None:
    client = serve()
    made = complete(client, model="tiny", prompt=PROMPT, max_tokens=7, seed=3, n=2, user="me")
    assert made["object"] == "text_completion" and made["model"] == "tiny" and made["system_fingerprint"].endswith("-seed3")
    assert [(each["index"], each["finish_reason"], each["logprobs"]) for each in made["choices"]] == [
        (0, "length", None),
        (1, "length", None),
    ]
    read = {"prompt_tokens": len(PROMPT), "prompt_tokens_details": {"cached_tokens": 0}}
    assert made["usage"] == {**read, "completion_tokens": 14, "total_tokens": len(PROMPT) + 14}
    again = complete(client, prompt=PROMPT, max_tokens=7, seed=3, n=2)
    assert again["choices"] == made["choices"], "the same seed, the same text"
    several = complete(client, prompt=[PROMPT, "x"], max_tokens=2, seed=3, n=2)
    assert [each["index"] for each in several["choices"]] == [0, 1, 2, 3]
    by_ids = complete(client, prompt=[BYTES.encode(PROMPT).tolist()], max_tokens=7, seed=3, n=2)
    assert by_ids["choices"] == made["choices"]


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
    ids = BYTES.encode(PROMPT).tolist()
    made = complete(client, prompt=[ids], max_tokens=1, temperature=0, logprobs=1, echo=True, seed=1234)
    logs = made["choices"][0]["logprobs"]
    assert len(logs["tokens"]) == len(ids) + 1 and logs["token_logprobs"][0] is None and logs["top_logprobs"][0] is None
    score = client.post("/v1/score", json={"tokens": ids, "per_token": True}).json()
    assert -sum(logs["token_logprobs"][1:-1]) == pytest.approx(score["nats"], abs=1e-6)
    assert score["tokens"] == len(ids) - 1 and score["ppl"] == pytest.approx(math.exp(score["nats"] / (len(ids) - 1)))
    for token, value, top in list(zip(logs["tokens"], logs["token_logprobs"], logs["top_logprobs"], strict=True))[1:]:
        assert top[token] == value and max(top.values()) >= value
    assert max(logs["top_logprobs"][-1].values()) == logs["token_logprobs"][-1], "what is written greedily is greedy"
    only = complete(client, prompt=PROMPT, max_tokens=0, echo=True, logprobs=0)
    assert only["choices"][0]["text"] == PROMPT
    assert only["choices"][0]["logprobs"]["token_logprobs"] == logs["token_logprobs"][:-1]
    cut = complete(client, prompt=[65, 195], max_tokens=0, echo=True)
    assert cut["choices"][0]["text"] == "A\ufffd", "a character that the prompt leaves open comes once"


def test_stops(serve: Serve) -> None:
    client = serve()
    free = complete(client, prompt=PROMPT, max_tokens=60, seed=1)["choices"][0]["text"]
    stop = next(letter for letter in free[5:] if letter.isascii() and letter.isprintable())
    ended = complete(client, prompt=PROMPT, max_tokens=60, seed=1, stop=[stop])["choices"][0]
    assert ended["finish_reason"] == "stop" and ended["text"] == free[: free.index(stop)]
    by_id = complete(client, prompt=PROMPT, max_tokens=60, seed=1, stop_token_ids=[ord(stop)])["choices"][0]
    assert by_id["finish_reason"] == "stop" and by_id["text"] == ended["text"]


def test_a_session_is_one_text(serve: Serve) -> None:
    client = serve()
    one, whole = session(client, seed=7), session(client, seed=7)
    empty = client.get(one).json()
    assert (empty["n_tokens"], empty["state"], empty["busy"], empty["mem_len"]) == (0, "parked", False, MEM_LEN)
    read = client.post(f"{one}/append", json={"text": PROMPT, "at": 0, "score": "tokens"}).json()
    assert read["session"]["n_tokens"] == len(PROMPT) and not read["session"]["busy"]
    assert [each["id"] for each in read["tokens"]] == BYTES.encode(PROMPT).tolist()
    first = client.post(f"{one}/generate", json={"max_tokens": 4, "at": len(PROMPT)}).json()["choices"][0]
    second = client.post(f"{one}/generate", json={"max_tokens": 5}).json()["choices"][0]
    client.post(f"{whole}/append", json={"tokens": BYTES.encode(PROMPT).tolist()})
    together = client.post(f"{whole}/generate", json={"max_tokens": 9}).json()["choices"][0]
    assert first["text"] + second["text"] == together["text"] or "\ufffd" in first["text"]
    assert client.get(one).json()["bytes"] == empty["bytes"] and client.get(one).json()["n_remembered"] == MEM_LEN
    end = client.get(f"{one}/tail").json()
    assert end["n_tokens"] == len(PROMPT) + 9 and end["text"].startswith(PROMPT)
    scored = client.post(f"{one}/append", json={"text": "!", "score": "sum"}).json()
    assert scored["scored"] == 1, "the first token of an append has a score, too"
    assert client.delete(one).status_code == 204 and client.get(one).status_code == 404


@pytest.mark.parametrize("refused", [{"stop_token_ids": [999]}, {"logit_bias": {"999": 1}}])
def test_a_refused_call_leaves_the_random_numbers_of_a_session(serve: Serve, refused: dict[str, Any]) -> None:
    client, texts = serve(), list[str]()
    for tries in (False, True):
        one = session(client, seed=7)
        client.post(f"{one}/append", json={"text": PROMPT})
        client.post(f"{one}/generate", json={"max_tokens": 4})
        if tries:
            answer = client.post(f"{one}/generate", json={"max_tokens": 4, "seed": 8, **refused})
            assert answer.status_code == 400 and "outside the vocabulary" in answer.json()["error"]["message"]
        texts.append(client.post(f"{one}/generate", json={"max_tokens": 9}).json()["choices"][0]["text"])
    assert texts[0] == texts[1]


def test_a_repeated_call_is_told_where_the_text_is(serve: Serve) -> None:
    client = serve()
    one = session(client)
    client.post(f"{one}/append", json={"text": "abc", "at": 0})
    for what, body in (("append", {"text": "abc"}), ("generate", {"max_tokens": 3}), ("rewind", {"n": 1})):
        again = client.post(f"{one}/{what}", json={**body, "at": 0})
        assert again.status_code == 409 and again.headers["x-should-retry"] == "false"
        assert again.json()["error"]["n_tokens"] == 3 and again.json()["error"]["code"] == "moved"
    streamed = client.post(f"{one}/append?at=0", content=b"abc", headers={"content-type": "text/plain"})
    assert (streamed.status_code, streamed.json()["error"]["code"]) == (409, "moved")
    assert client.get(one).json()["n_tokens"] == 3


def test_a_question_leaves_no_trace_and_a_fork_goes_its_own_way(serve: Serve) -> None:
    client = serve()
    one = session(client)
    client.post(f"{one}/append", json={"text": PROMPT})
    before = client.post(f"{one}/ask", json={"text": "?", "max_tokens": 5, "seed": 1, "n": 3}).json()
    assert len(before["choices"]) == 3 and before["usage"]["prompt_tokens"] == 1
    other = f"/v1/sessions/{client.post(f'{one}/fork').json()['id']}"
    client.post(f"{other}/append", json={"text": "something else"})
    assert client.get(one).json()["n_tokens"] == len(PROMPT)
    after = client.post(f"{one}/ask", json={"text": "?", "max_tokens": 5, "seed": 1, "n": 3}).json()
    assert after["choices"] == before["choices"]
    assert client.get(other).json()["n_tokens"] == len(PROMPT) + 14


def test_going_back(serve: Serve) -> None:
    client = serve()
    one, other = session(client), session(client)
    for each, text in ((one, "abcdef"), (other, "abcd")):
        client.post(f"{each}/append", json={"text": text})
    assert client.post(f"{one}/rewind", json={"n": 2}).json()["n_tokens"] == 4
    asked = [client.post(f"{each}/ask", json={"max_tokens": 6, "seed": 2}).json()["choices"] for each in (one, other)]
    assert asked[0] == asked[1]
    assert client.post(f"{one}/rewind", json={"n": 4}).json()["n_tokens"] == 0
    assert client.post(f"{one}/rewind", json={"n": 1}).json()["error"]["code"] == "cannot_rewind"
    client.post(f"{one}/append", json={"text": PROMPT * 5})
    refused = client.post(f"{one}/rewind", json={"n": 100})
    assert refused.status_code == 409 and refused.json()["error"]["n_rewindable"] == client.get(one).json()["n_rewindable"]


def test_a_session_that_begins_anew_keeps_its_seed(serve: Serve) -> None:
    client = serve()
    one = session(client, seed=5)
    texts: list[str] = []
    for _ in range(2):
        client.post(f"{one}/append", json={"text": "ab"})
        made = client.post(f"{one}/generate", json={"max_tokens": 3}).json()
        texts.append(made["choices"][0]["text"])
        assert client.post(f"{one}/rewind", json={"n": 5}).json()["n_tokens"] == 0
    assert texts[0] == texts[1]


def test_files_of_sessions_are_for_their_owner_alone(serve: Serve, tmp_path: Path) -> None:
    client = serve(stored=True)
    one = session(client)
    client.post(f"{one}/append", json={"text": PROMPT})
    client.post(f"{one}/save", json={})
    client.post(f"{one}/save", json={"name": "book"})
    files = [each for each in (tmp_path / "sessions").rglob("*") if each.is_file()]
    assert {each.suffix for each in files} == {".session", ".lock", ".owner"}
    assert {stat.S_IMODE(each.stat().st_mode) for each in files} == {0o600}
    assert {stat.S_IMODE(each.stat().st_mode) for each in (tmp_path / "sessions").rglob("*/")} == {0o700}


@pytest.mark.parametrize("what", ["link", "pipe"])
def test_what_is_no_file_of_ours_is_neither_followed_nor_waited_for(serve: Serve, tmp_path: Path, what: str) -> None:
    client, mine = serve(stored=True), tmp_path / "mine.txt"
    mine.write_text("precious")
    one = session(client)
    client.post(f"{one}/append", json={"text": PROMPT})
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


def test_what_is_saved_comes_back_without_being_read_again(serve: Serve) -> None:
    client = serve(stored=True)
    one = session(client)
    client.post(f"{one}/append", json={"text": PROMPT})
    assert client.post(f"{one}/save", json={"name": "book.1"}).json()["n_tokens"] == len(PROMPT)
    assert client.get("/v1/saved").json()["data"] == [{"object": "saved", "name": "book.1", "n_tokens": len(PROMPT)}]
    expected = client.post(f"{one}/ask", json={"max_tokens": 6, "seed": 2}).json()["choices"]
    client.post(f"{one}/append", json={"text": "more"})
    n_read = counted(client, "txl_tokens_read_total")
    other = session(client, **{"from": {"saved": "book.1"}})
    assert client.get(other).json()["n_tokens"] == len(PROMPT)
    assert counted(client, "txl_tokens_read_total") == n_read
    assert client.post(f"{other}/ask", json={"max_tokens": 6, "seed": 2}).json()["choices"] == expected
    assert client.delete("/v1/saved/book.1").status_code == 204
    assert client.post("/v1/sessions", json={"from": {"saved": "book.1"}}).json()["error"]["code"] == "not_found"


def counted(client: Any, name: str) -> float:
    line = next(line for line in client.get("/metrics").text.splitlines() if line.startswith(f"{name} "))
    return float(line.split()[1])


def test_more_sessions_than_memory_holds_go_to_the_disk_and_back(serve: Serve) -> None:
    client = serve(stored=True, most=4)
    all_of_them = [session(client) for _ in range(4)]
    for i, each in enumerate(all_of_them):
        client.post(f"{each}/append", json={"text": f"text number {i}"})
    more = [session(client) for _ in range(3)]
    states = {each["id"]: each["state"] for each in client.get("/v1/sessions").json()["data"]}
    assert len(states) == 7 and list(states.values()).count("disk") == 3
    asked = {each: client.post(f"{each}/ask", json={"max_tokens": 4, "seed": 1}).json()["choices"] for each in all_of_them}
    fresh = session(client)
    client.post(f"{fresh}/append", json={"text": "text number 2"})
    assert client.post(f"{fresh}/ask", json={"max_tokens": 4, "seed": 1}).json()["choices"] == asked[all_of_them[2]]
    assert len(client.service.sessions.live) <= 4 and more
    without = serve(stored=False, most=1)
    session(without)
    refused = without.post("/v1/sessions", json={})
    assert refused.status_code == 503 and "fill --session-memory" in refused.json()["error"]["message"]


def test_a_streamed_text_is_read_to_the_same_bits_however_it_comes(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformer_xl.server.streaming._BLOCK", 200)
    client = serve()
    data = (("Grüße an alle, die lesen. " * 25) + "Ende.").encode()
    answers = []
    for size in (70_000, 101):
        one = session(client)
        parts = (data[i : i + size] for i in range(0, len(data), size))
        read = client.post(f"{one}/append?at=0&score=sum", content=parts, headers={"content-type": "text/plain"}).json()
        assert read["n_read"] == len(data), read
        answers.append(
            (len(data), read["nats"], client.post(f"{one}/ask", json={"max_tokens": 9, "seed": 2}).json()["choices"])
        )
    assert answers[0] == answers[1]
    whole = client.post(f"{session(client)}/append", json={"text": data.decode(), "score": "sum"}).json()
    assert whole["nats"] == answers[0][1], "pieces are counted from the beginning, whatever is encoded together"
    one = session(client)
    parts = (data[i : i + 101] for i in range(0, len(data), 101))
    streamed = client.post(
        f"{one}/append?score=sum", content=parts, headers={"content-type": "text/plain", "accept": "text/event-stream"}
    )
    assert events(streamed.text)[-1]["n_read"] == len(data) and events(streamed.text)[-1]["nats"] == answers[0][1]
    bad = client.post(f"{session(client)}/append", content=b"abc\xff\xfe", headers={"content-type": "text/plain"})
    assert bad.status_code == 400 and "not UTF-8" in bad.json()["error"]["message"]


def test_progress_of_an_append(serve: Serve) -> None:
    client = serve()
    one = session(client)
    answer = client.post(f"{one}/append", json={"text": PROMPT, "score": "sum"}, headers={"accept": "text/event-stream"})
    *progress, last = events(answer.text)
    assert [each["processed"] for each in progress] == [8, 16, 24, 32, len(PROMPT)]
    assert all(each["total"] == len(PROMPT) for each in progress)
    assert last["session"]["n_tokens"] == len(PROMPT) and last["nats"] == progress[-1]["nats"]


def test_what_memory_is_worth(serve: Serve) -> None:
    client = serve()
    text = PROMPT * 4
    both = client.post("/v1/score", json={"text": text, "memory": "both", "per_token": True}).json()
    assert both["on"]["tokens"] == both["off"]["tokens"] == len(text) - 1
    on, off = ([each["logprob"] for each in both[way]["per_token"]] for way in ("on", "off"))
    assert on[:8] == off[:8] and on[30:] != off[30:]
    alone = client.post("/v1/score", json={"text": text[16:32], "per_token": True}).json()
    assert [each["logprob"] for each in alone["per_token"]][8:] == pytest.approx(off[24:32], abs=1e-5), "the piece before it"


def test_tokens_and_text(serve: Serve) -> None:
    client = serve()
    assert client.post("/tokenize", json={"content": "aé"}).json() == {"tokens": [97, 195, 169], "count": 3}
    assert client.post("/v1/tokenize", json={"prompt": "aé"}).json()["count"] == 3
    assert client.post("/detokenize", json={"tokens": [97, 195, 169]}).json()["content"] == "aé"
    model = client.get("/v1/models").json()["data"][0]
    assert (model["id"], model["object"], model["meta"]["mem_len"]) == ("tiny", "model", MEM_LEN)


REFUSED: list[tuple[str, Any, int, str]] = [
    ("completions", {"prompt": "a", "suffix": "b"}, 400, "suffix: this field is unknown or not supported; leave it out"),
    ("completions", {"prompt": "a", "best_of": 3}, 400, "best_of is not supported"),
    ("completions", {"prompt": "a", "frequency_penalty": 0.5}, 400, "frequency_penalty: Input should be less than or equal"),
    ("completions", {"prompt": ""}, 400, "the prompt is empty; give at least one token"),
    ("completions", {"prompt": [[300]]}, 400, "token id 300 is outside the vocabulary (256)"),
    ("completions", {"prompt": "a", "model": "gpt"}, 404, "the model 'gpt' does not exist; this server has 'tiny'"),
    ("completions", {"prompt": "a", "temperature": -1}, 400, "temperature: Input should be greater than or equal to 0"),
    ("completions", {"prompt": "a", "max_tokens": "7"}, 400, "max_tokens: Input should be a valid integer"),
    ("completions", {"prompt": "a", "max_tokens": 0}, 400, "max_tokens 0 scores a prompt, which needs echo"),
    ("completions", {"prompt": "a", "stop": [""]}, 400, "a stop string ('') is empty"),
    ("completions", {"prompt": "a", "logit_bias": {"999": 1}}, 400, "logit_bias has token id 999"),
    ("completions", {"prompt": "a", "stop_token_ids": [300]}, 400, "stop token id 300 is outside the vocabulary (256)"),
    ("completions", {"prompt": "a", "seed": -1}, 400, "seed: Input should be greater than or equal to 0"),
    ("completions", {"prompt": "a", "session_id": "w1-" + "0" * 32}, 404, "no such session"),
    ("completions", {"prompt": "\ud800"}, 400, "half of a character"),
    ("chat/completions", {}, 501, "this is a base model without turns; use /v1/completions"),
    ("sessions/nope/append", {"text": "a"}, 404, "no such session"),
    ("sessions", {"ttl": 0}, 400, "ttl: Input should be greater than 0"),
    ("sessions", {"from": {}}, 400, "from needs either a session or a saved name"),
    ("sessions", {"from": {"saved": "../x"}}, 400, "this server keeps no files; start it with --sessions DIR"),
    ("score", {"text": ""}, 400, "there is nothing to score; give text or tokens"),
]


def test_what_is_refused_is_named(serve: Serve) -> None:
    client = serve()
    for path, body, status, message in REFUSED:
        answer = client.post(f"/v1/{path}", content=json.dumps(body), headers={"content-type": "application/json"})
        assert (answer.status_code, "error" in answer.json()) == (status, True), answer.text
        assert message in answer.json()["error"]["message"], (path, body)
        assert "\n" not in answer.json()["error"]["message"]


def test_names_are_no_paths(serve: Serve, tmp_path: Path) -> None:
    client = serve(stored=True)
    one = session(client)
    client.post(f"{one}/append", json={"text": "abc"})
    before = sorted(tmp_path.rglob("*"))
    for name in ("../evil", "sub/x", "..", ".hidden", "a" * 65, "a\nb", "%2e%2e", "a b"):
        assert client.post(f"{one}/save", json={"name": name}).status_code == 400, name
    assert [path for path in sorted(tmp_path.rglob("*")) if path not in before and path.suffix != ".session"] == []


def test_rows_that_wait(serve: Serve) -> None:
    """As many texts as rows at a time; all are written."""
    client = serve(queue=40)
    made = complete(client, prompt=[f"text {i}" for i in range(4 * ROWS)], max_tokens=3, seed=1)
    assert [each["index"] for each in made["choices"]] == list(range(4 * ROWS))
    alone = complete(client, prompt=["text 0", "text 1"], max_tokens=3, seed=1)
    assert alone["choices"] == made["choices"][:2]


def test_a_damaged_file_is_refused_and_nothing_else_is_lost(serve: Serve, tmp_path: Path) -> None:
    client = serve(stored=True)
    one = session(client)
    client.post(f"{one}/append", json={"text": PROMPT})
    client.post(f"{one}/save", json={"name": "x"})
    (file,) = tmp_path.rglob("saved-*.session")
    whole = file.read_bytes()
    for place in (0, 8, 9):  # of the header: the numbers have no checksum
        file.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        refused = client.post("/v1/sessions", json={"from": {"saved": "x"}})
        assert refused.status_code == 409, place
        message = refused.json()["error"]["message"]
        assert message.startswith("the saved session cannot be used: ") and str(tmp_path) not in message and "\n" not in message
    file.write_bytes(whole[:100])
    assert client.post("/v1/sessions", json={"from": {"saved": "x"}}).status_code == 409
    file.write_bytes(whole)
    assert client.post("/v1/sessions", json={"from": {"saved": "x"}}).json()["n_tokens"] == len(PROMPT)
    assert client.get(one).json()["n_tokens"] == len(PROMPT)


def test_a_session_is_open_in_one_server_at_a_time(serve: Serve) -> None:
    first, second = serve(stored=True), serve(stored=True)
    one = session(first)
    first.post(f"{one}/append", json={"text": PROMPT})
    first.post(f"{one}/save", json={})
    assert second.get(one).json()["state"] == "elsewhere"
    refused = second.post(f"{one}/append", json={"text": "a"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "leased")
    assert (refused.headers["retry-after"], refused.headers["x-txl-owner"]) == ("1", "test")
    first.post(f"{one}/append", json={"text": "what no file holds yet"})
    assert second.post(f"{one}/fork").json()["error"]["code"] == "leased"
    assert second.delete(one).status_code == 503
    first.service.sessions.live[one.rpartition("/")[2]].lease.close()  # as if the first had ended
    assert second.post(f"{one}/append", json={"text": "a"}).json()["session"]["n_tokens"] == len(PROMPT) + 1


def test_a_session_of_another_precision_is_refused_with_what_to_do(serve: Serve) -> None:
    first, second = serve(stored=True), serve(stored=True, precision="bf16")
    one = session(first)
    first.post(f"{one}/append", json={"text": PROMPT})
    first.portal.call(first.service.sessions.shut_down, 0.0)
    refused = second.post(f"{one}/append", json={"text": "and on"})
    assert refused.status_code == 409
    assert "precision ('fp32' there, 'bf16' here)" in refused.json()["error"]["message"], refused.text


def test_a_disk_that_is_full_costs_nothing_but_the_file(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformer_xl.generation import session_file

    client = serve(stored=True)
    one = session(client)
    client.post(f"{one}/append", json={"text": PROMPT})
    client.post(f"{one}/save", json={"name": "x"})

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(session_file, "whole_file", full)
        client.post(f"{one}/append", json={"text": "more"})
        refused = client.post(f"{one}/save", json={"name": "x"})
        assert refused.status_code == 507 and "No space left on device" in refused.json()["error"]["message"]
        (live,) = client.service.sessions.live.values()
        live.used = 0.0  # so that it rests, and is saved by itself
        client.portal.call(client.service.sessions._look)
        assert live.is_changed, "it goes on in memory"
    assert client.get(one).json()["n_tokens"] == len(PROMPT) + 4
    assert client.get("/v1/saved").json()["data"][0]["n_tokens"] == len(PROMPT)
    assert client.post(f"{one}/save", json={"name": "x"}).status_code == 200


def test_a_fork_and_what_it_was_made_of_share_nothing(serve: Serve) -> None:
    client = serve()
    one = session(client)
    client.post(f"{one}/append", json={"text": PROMPT})
    expected = client.post(f"{one}/ask", json={"max_tokens": 5, "seed": 1}).json()["choices"]
    service = client.service
    live = service.sessions.live[one.rpartition("/")[2]]
    service.engine.call(lambda: service.engine.park(live)).result(30)
    fork = f"/v1/sessions/{client.post(f'{one}/fork').json()['id']}"
    assert client.delete(fork).status_code == 204
    assert client.post(f"{one}/ask", json={"max_tokens": 5, "seed": 1}).json()["choices"] == expected


def test_a_fork_outlives_the_server(serve: Serve) -> None:
    client = serve(stored=True)
    one = session(client)
    client.post(f"{one}/append", json={"text": PROMPT})
    fork = f"/v1/sessions/{client.post(f'{one}/fork').json()['id']}"
    client.portal.call(client.service.sessions.shut_down, 0.0)
    assert serve(stored=True).get(fork).json()["n_tokens"] == len(PROMPT)


def test_a_text_of_the_same_length_is_another_text(serve: Serve) -> None:
    """What was undone and written anew is saved, and so is nothing at all."""
    client = serve(stored=True)
    one, other = session(client), session(client)
    for each in (one, other):
        client.post(f"{each}/append", json={"text": "abcdefghij"})
        client.post(f"{each}/save", json={})
    client.post(f"{one}/rewind", json={"n": 3})
    client.post(f"{one}/append", json={"text": "XYZ"})
    client.post(f"{other}/rewind", json={"n": 10})
    assert client.get(other).json()["n_rewindable"] == 0
    client.portal.call(client.service.sessions.shut_down, 0.0)
    again = serve(stored=True)
    assert again.get(f"{one}/tail").json()["text"] == "abcdefgXYZ"
    assert again.get(other).status_code == 404, "it has read nothing, so there is no file"


def test_a_batch_of_many_texts_has_all_of_them_or_an_error(serve: Serve) -> None:
    client = serve(queue=12, per_owner=8)
    made = complete(client, prompt=["a"] * 10, n=16, max_tokens=3, seed=1)
    assert [each["index"] for each in made["choices"]] == list(range(160))
    assert all(each["finish_reason"] == "length" for each in made["choices"])
    late = client.post("/v1/completions", json={"prompt": ["a"] * 6, "max_tokens": 10**5, "timeout": 0.2})
    assert (late.status_code, late.json()["error"]["code"]) == (504, "timeout")
    stream = client.post("/v1/completions", json={"prompt": "a", "max_tokens": 10**5, "timeout": 0.3, "stream": True})
    assert events(stream.text)[-1]["error"]["code"] == "timeout"


def test_what_would_be_refused_again_is_not_to_be_repeated(serve: Serve) -> None:
    """openai-python repeats 409 and everything from 500 on by itself, unless it is told that this is of no use."""
    client = serve()
    chat = client.post("/v1/chat/completions", json={"messages": []})
    late = client.post("/v1/completions", json={"prompt": "a", "max_tokens": 10**5, "timeout": 0.1})
    for answer, status in ((chat, 501), (late, 504)):
        assert (answer.status_code, answer.headers["x-should-retry"]) == (status, "false")


def test_tokenizing_as_the_harness_and_others_ask_for_it(serve: Serve) -> None:
    client = serve()
    for more in ({"add_special_tokens": False}, {"model": "tiny", "add_special_tokens": True}):
        assert client.post("/tokenize", json={"prompt": "ab", **more}).json() == {"tokens": [97, 98], "count": 2}
    assert client.post("/tokenize", json={"content": "ab", "add_special": False}).json()["tokens"] == [97, 98]
    assert client.post("/tokenize", json={"prompt": "ab", "model": "other"}).status_code == 404


def test_a_wrong_method_is_told_the_right_ones(serve: Serve) -> None:
    client = serve()
    for path, allowed in [
        ("/v1/sessions", "GET, POST"),
        ("/v1/sessions/w1-x", "DELETE, GET"),
        ("/openapi.json", "GET"),
    ]:
        answer = client.request("PATCH", path)
        assert (answer.status_code, answer.json()["error"]["code"]) == (405, "method_not_allowed")
        assert answer.headers["allow"] == allowed, path


def test_the_description_names_every_answer(serve: Serve) -> None:
    """Each route says what it answers, and each of its errors has the one shape that errors have."""
    described = serve().get("/openapi.json").json()
    assert len(described["paths"]) > 20 and not any("Validation" in name for name in described["components"]["schemas"])
    for path, methods in described["paths"].items():
        for method, operation in methods.items():
            answers = operation["responses"]
            good = [code for code in answers if code < "300"]
            assert len(good) == 1 and {"4XX", "5XX"} < answers.keys(), (method, path)
            for code in answers.keys() - set(good) - ({"503"} if path == "/readyz" else set()):
                assert answers[code]["content"]["application/json"]["schema"]["$ref"].endswith("/Error"), (path, code)
    append = described["paths"]["/v1/sessions/{session_id}/append"]["post"]
    assert append["requestBody"]["content"]["application/json"]["schema"]["additionalProperties"] is False
    assert {each["name"] for each in append["parameters"]} == {"session_id", "at", "score"}
    for name in ("SessionAnswer", "CompletionAnswer", "Appended", "CompletionRequest"):
        assert described["components"]["schemas"][name]["additionalProperties"] is False


def test_a_place_in_the_address_is_never_overlooked(serve: Serve) -> None:
    """It would make a call safe to repeat, so it must not be ignored where it has no meaning."""
    client = serve()
    one = session(client)
    plain = {"content-type": "text/plain"}
    for answer, name in [
        (client.post(f"{one}/append?at=0", json={"text": "a"}), "at"),
        (client.post(f"{one}/append?at=0&score=sum&timeout=3", content=b"a", headers=plain), "timeout"),
    ]:
        assert answer.status_code == 400 and answer.json()["error"]["message"].startswith(f"{name}: "), answer.text
    assert client.get(one).json()["n_tokens"] == 0


def test_who_is_cut_off_by_the_end_of_the_server_may_ask_again(serve: Serve) -> None:
    """A call that somebody stopped is not to be repeated; one that the server ends is, when that has begun anew."""
    client = serve(stored=True)
    one = session(client)
    client.post(f"{one}/append", json={"text": "abc"})
    with ThreadPoolExecutor() as pool:
        call = pool.submit(client.post, f"{one}/generate", json={"max_tokens": 10**6})
        while not client.get(one).json()["busy"]:
            time.sleep(0.01)
        client.portal.call(client.service.sessions.shut_down, 0.0)
        answer = call.result(30)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "shutting_down")
    assert answer.headers["retry-after"] == "5" and "x-should-retry" not in answer.headers


def test_every_reason_is_one_line(serve: Serve) -> None:
    client = serve()
    name = "a\nb"
    for answer in (
        client.post("/v1/completions", json={"prompt": "a", "model": name}),
        client.post("/v1/completions", json={"prompt": "a", name: 1}),
        client.post(f"{session(client)}/append", params={name: 1}, json={"text": "a"}),
    ):
        assert answer.status_code in (400, 404) and "a b" in answer.json()["error"]["message"], answer.text
    tiny = client.post("/v1/completions", json={"prompt": "a", "repetition_penalty": 1e-178})
    assert tiny.json()["error"]["message"].startswith("repetition_penalty: "), "such a number makes all scores infinite"


def test_a_fork_that_needs_the_room_of_what_it_is_made_of(serve: Serve) -> None:
    client = serve(stored=True, most=1)
    one = session(client, seed=3)
    client.post(f"{one}/append", json={"text": PROMPT})
    made = client.post(f"{one}/fork")
    assert made.status_code == 201 and made.json()["n_tokens"] == len(PROMPT), made.text
    assert len(client.service.sessions.live) == 1 and client.get(one).json()["state"] == "disk"
    asked = [
        client.post(f"{path}/ask", json={"max_tokens": 9, "seed": 1}).json()["choices"]
        for path in (f"/v1/sessions/{made.json()['id']}", one)
    ]
    assert asked[0] == asked[1]


def test_a_seed_of_a_call_counts_more_than_that_of_its_session(serve: Serve) -> None:
    client, texts = serve(), []
    for seed in (3, 4):
        one = session(client, seed=seed)
        client.post(f"{one}/append", json={"text": PROMPT})
        answer = client.post(f"{one}/generate", json={"max_tokens": 12, "seed": 9}).json()
        texts.append(answer["choices"][0]["text"])
    assert texts[0] == texts[1]
