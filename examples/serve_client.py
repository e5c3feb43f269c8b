"""Let a server read a text of any length in one session, then ask about it; a broken connection loses nothing.

txl serve runs/mine --sessions sessions          # in another terminal
python examples/serve_client.py book.txt "In the end, "
python examples/serve_client.py book.txt "In the end, " --session w1-…    # continues where it was
"""

import argparse
import json
import math
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

SLICE = 1 << 17  # characters per call
AGAIN = ("busy", "moved")  # temporary errors: try again


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="UTF-8 text")
    parser.add_argument("question", help="text that the model continues; the session does not remember it")
    parser.add_argument("--session", help="id of a session that has started reading this file; default: a new one")
    parser.add_argument("--server", default="http://127.0.0.1:8080", help="default: %(default)s")
    parser.add_argument("--key", help="API key, if the server asks for one")
    options = parser.parse_args()
    if not options.file.is_file():
        parser.error(f"there is no file '{options.file}'")

    def call(path: str, body: Any = None) -> Any:
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {options.key}"} if options.key else {})
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(options.server + path, data, headers)
        try:
            with urllib.request.urlopen(request, timeout=600) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            told = json.load(error)["error"]
            if error.code in (429, 503) or told["code"] in AGAIN:
                raise
            raise SystemExit(f"error: {told['message']}") from None

    try:
        name = options.session or call("/v1/sessions", {})["id"]
    except (urllib.error.URLError, ConnectionError) as error:
        parser.error(f"no server answers at {options.server} ({error}); start one with txl serve")
    print(f"session {name}")
    read(call, f"/v1/sessions/{name}", options.file.read_text(encoding="utf-8"))
    answer = call(f"/v1/sessions/{name}/ask", {"text": options.question, "max_tokens": 80})
    print(options.question + answer["choices"][0]["text"])


def read(call: Any, session: str, text: str) -> None:
    """Append a text slice by slice.

    `at` says where a slice belongs, so that none is read twice. Before each slice the session is asked how far it is, because a
    server that was killed starts again from what it had saved.
    """
    slices = [text[at : at + SLICE] for at in range(0, len(text), SLICE)]
    number, begins = 0, [0]  # tokens before each slice
    while number < len(slices):
        try:
            n_tokens = call(session)["n_tokens"]
            if n_tokens < begins[number]:
                number -= 1
                continue
            tokens = call("/tokenize", {"content": slices[number]})["tokens"]
            begins[number + 1 :] = [begins[number] + len(tokens)]
            if missing := tokens[n_tokens - begins[number] :]:
                done = call(f"{session}/append", {"tokens": missing, "at": n_tokens, "score": "sum"})
                bits, size = done["nats"] / math.log(2) / max(1, done["scored"]), done["session"]["bytes"]
                print(f"{number + 1} of {len(slices)}: {bits:.3f} bits per token, {size:,} bytes of memory")
            number += 1
        except (urllib.error.URLError, ConnectionError, TimeoutError) as error:
            print(f"trying again in a second: {error}")
            time.sleep(1)


if __name__ == "__main__":
    main()
