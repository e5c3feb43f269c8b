"""Hooks for schemathesis: most cases go to sessions that exist, and write a few tokens, so that they reach what computes.

Runs in the environment of requirements.txt, with $TXL_URL the address of the server; `test_fuzz.py` starts it.
"""

import json
import os
import urllib.request
import zlib
from typing import Any

import schemathesis

URL = os.environ["TXL_URL"]
LIMITS = {"max_tokens": 1 << 20, "max_completion_tokens": 1 << 20, "n": 64}


def _post(path: str, body: dict[str, Any]) -> Any:
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(URL + path, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def _session() -> str:
    name = _post("/v1/sessions", {})["id"]
    _post(f"/v1/sessions/{name}/append", {"text": "Once upon a time there was a memory."})
    return name


sessions = [_session() for _ in range(8)]


@schemathesis.hook
def before_call(context: Any, case: Any, kwargs: Any) -> None:
    """Let three of four cases name a session that there is, and none write for long."""
    path, body = case.path_parameters, case.body
    if isinstance(path, dict) and "session_id" in path:
        drawn = zlib.crc32(str(path["session_id"]).encode("utf-8", "replace"))
        if drawn % 4:
            path["session_id"] = sessions[drawn // 4 % len(sessions)]
    if isinstance(body, dict):
        most = {"max_tokens": 40, "max_completion_tokens": 40, "n": 8}
        for name, limit in most.items():
            if type(body.get(name)) is int and limit < body[name] <= LIMITS[name]:
                body[name] = 1 + body[name] % limit
        if type(body.get("timeout")) in (int, float) and 0 < body["timeout"] <= 600:
            body["timeout"] = 600  # else the answer is 504, as it was asked for


@schemathesis.hook
def after_call(context: Any, case: Any, response: Any) -> None:
    """Begin another session for one that is gone."""
    name = (case.path_parameters or {}).get("session_id")
    if name in sessions and response.status_code in (204, 404):
        sessions[sessions.index(name)] = _session()
