"""The page in a real browser, with a real server: what people see, hear and press.

Not part of the suite: `make test-browser`.
"""

import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.browser import check_sight, opened
from tests.server.serving import served

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = [pytest.mark.browser, pytest.mark.timeout(280)]

BOOK = "".join(f"{i} stories are told in this book, and none of them is long.\n" for i in range(17_000))[: 1 << 20]
CONTROLS = r"- (button|textbox|combobox|spinbutton|checkbox|link|progressbar|img|slider|option)\b(.*)"
LONG = 60_000  # milliseconds


def status(page: "Page", text: str | re.Pattern[str], timeout: float = 15_000) -> None:
    from playwright.sync_api import expect

    expect(page.get_by_role("status")).to_have_text(text, timeout=timeout)


def press(page: "Page", name: str) -> None:
    """Go to a button by the Tab key, and press it."""
    for _ in range(60):
        page.keyboard.press("Tab")
        if page.evaluate("() => document.activeElement.textContent") == name:
            page.keyboard.press("Enter")
            return
    raise AssertionError(f"the Tab key does not reach '{name}'")


def test_everything_by_keyboard_alone(browser: "Browser", folder: Path) -> None:
    from playwright.sync_api import expect

    with served("--sessions", "kept", "--rows", "2", "--quiet") as (_, client, said):
        with opened(browser, str(client.base_url)) as (page, faults):
            status(page, "Ready.")
            expect(page.locator("#model")).to_contain_text("tiny: ")
            for _ in range(60):
                page.keyboard.press("Tab")
                if page.evaluate("() => document.activeElement.id") == "input":
                    break
            page.keyboard.type("Once upon a time")
            press(page, "Continue")
            status(page, "Done: 100 tokens.")
            text = page.locator("#text")
            expect(text).to_contain_text("Once upon a time")
            assert page.evaluate("() => document.activeElement.id") == "continue", "the place of the keyboard is kept"

            def sessions() -> list[int]:
                return sorted(each["n_tokens"] for each in client.get("/v1/sessions").json()["data"])

            assert sessions() == [0, 116], "the text, and how it was before"
            expect(page.locator("#sessions button")).to_have_count(1)
            levels = {each.get_attribute("class") for each in text.locator("span").all()}
            assert {"s3", "s4", "s5"} & {kind for each in levels for kind in str(each).split()}, (
                "tokens are colored by surprise"
            )
            assert any(" w" in str(each) for each in levels), "what was written is marked"
            # of the prompt: what a model writes may be a part of a character, which shows nothing
            text.locator("span").nth(5).hover()
            expect(page.locator("#token")).to_contain_text("nats")
            text.focus()
            page.keyboard.press("ArrowLeft")
            page.keyboard.press("ArrowLeft")
            expect(page.locator("#token")).to_contain_text("nats")

            press(page, "Ask")
            status(page, "Done: 100 tokens.")
            expect(page.locator("#answer-left span")).not_to_have_count(0)
            assert sessions() == [0, 116], "a question leaves no trace"

            def shown() -> tuple[list[set[str]], str]:
                kinds = [set(str(each.get_attribute("class")).split()) - {"at"} for each in text.locator("span").all()]
                return kinds, page.locator("#chart-words").inner_text()

            before = shown()
            page.locator("#input").fill(", and then")
            press(page, "Continue")
            status(page, "Done: 100 tokens.")
            assert sessions() == [116, 226] and shown() != before
            press(page, "Undo")
            status(page, "Went back by 110 tokens.")
            assert shown() == before, "colors and counts, too"
            assert sessions() == [116]
            press(page, "Undo")
            status(page, "There is nothing to take back.")
            press(page, "Fork")
            status(page, "A copy of the session is open.")
            expect(page.locator("#sessions button")).to_have_count(2)
            expect(page.locator('#sessions [aria-current="true"]')).to_have_count(1)
            page.get_by_label("Name").focus()
            page.keyboard.type("mine")
            press(page, "Save")
            status(page, "Saved as mine.")
            expect(page.locator("#saved button")).to_have_text("mine · 116 tokens")

            press(page, "With and without memory")
            status(page, re.compile("^(Ready|Both are the same: what memory holds)"))
            page.locator("#language").select_option("zh")
            expect(page.locator("#answer-title")).to_contain_text("相同的随机数")
            page.locator("#language").select_option("en")
            assert page.locator("#scales .of-text").all_text_contents() == ["0", "100", "200", "characters"]
            expect(page.locator("#answer-left span")).not_to_have_count(0)
            expect(page.locator("#answer-right span")).not_to_have_count(0)
            page.locator("#input").fill("What the session holds is of use here.")
            press(page, "What memory saved")
            status(page, "Ready.")
            current = next(each["id"] for each in client.get("/v1/sessions").json()["data"] if each["id"][:9] in _current(page))
            body = {"text": page.locator("#input").input_value(), "memory": "both", "per_token": True, "session_id": current}
            scores = client.post("/v1/score", json=body).json()
            off, on = ([token["logprob"] for token in scores[way]["per_token"]][1:] for way in ("off", "on"))
            saved = f"Nats that memory saved: {sum(on) - sum(off):.2f} in {len(on)} tokens"
            expect(page.locator("#answer-title")).to_contain_text(saved)  # the first token has no score without memory
            best = max(range(len(on)), key=lambda i: on[i] - off[i])
            page.locator("#answer-left span").nth(best + 1).hover()
            expect(page.locator("#token")).to_contain_text(f": {on[best] - off[best]:.2f} nats")
            page.locator("#language").select_option("zh")
            expect(page.locator("#token")).to_contain_text("奈特")
            page.locator("#language").select_option("en")
            page.locator("#input").fill("")
            press(page, "mine · 116 tokens")
            expect(page.locator("#sessions button")).to_have_count(3)
            press(page, "New session")
            status(page, "Ready.")
            page.locator("#file").set_input_files({"name": "short.txt", "mimeType": "text/plain", "buffer": b"Short"})
            status(page, re.compile("^Read 5 B"))
            press(page, "What memory saved")
            status(page, re.compile("^Memory saved nothing: "))
            press(page, "With and without memory")
            status(page, "Both are the same: the text has no more than 64 tokens, so nothing is left for memory to know.")
            assert len(sessions()) == 5, "four, and how the last one was before"
            page.goto("about:blank")
            until = time.monotonic() + 10
            while len(sessions()) != 4:
                assert time.monotonic() < until, "copies go with the page"
                time.sleep(0.05)
            assert not faults, faults
        assert not any("Traceback" in line for line in said), said


def _current(page: "Page") -> str:
    return page.locator('#sessions [aria-current="true"]').inner_text()


@pytest.mark.parametrize(
    ("width", "language", "scheme"), [(360, "en", "dark"), (360, "zh", "light"), (1280, "en", "light"), (1280, "zh", "dark")]
)
def test_every_control_has_a_name_and_every_word_can_be_read(
    browser: "Browser", folder: Path, width: int, language: str, scheme: str
) -> None:
    from playwright.sync_api import expect

    with served("--sessions", "kept", "--quiet") as (_, client, _said):
        name = client.post("/v1/sessions", json={}).json()["id"]
        client.post(f"/v1/sessions/{name}/append", json={"text": "A text that is read. " * 20})
        client.post(f"/v1/sessions/{name}/save", json={"name": "mine"})
        size = {"width": width, "height": 740}
        options: dict[str, Any] = {"locale": f"{language}-XX", "color_scheme": scheme, "viewport": size}
        with opened(browser, str(client.base_url), **options) as (page, faults):
            expect(page.locator("html")).to_have_attribute("lang", language)
            expect(page.locator("#saved button")).to_have_count(1)
            page.locator("#input").fill("What is read is colored: surprising 123 !?")
            page.locator("#continue").click()
            expect(page.locator("#stop")).to_be_disabled(timeout=LONG)
            page.locator("#bought").click()
            expect(page.locator("#answer-left span")).not_to_have_count(0)
            expect(page.locator("#stop")).to_be_disabled(timeout=LONG)
            page.locator("#file").set_input_files({"name": "short.txt", "mimeType": "text/plain", "buffer": b"Short"})
            expect(page.locator("#reading")).not_to_be_empty()
            expect(page.locator("#stop")).to_be_disabled(timeout=LONG)
            tree = page.locator("body").aria_snapshot()
            found = re.findall(CONTROLS, tree)
            assert len(found) > 20 and all('"' in rest for _, rest in found), tree
            assert "undefined" not in page.locator("body").inner_text()
            check_sight(page)
            other = {"en": "zh", "zh": "en"}[language]
            before = page.locator("main").inner_text()
            page.locator("#language").select_option(other)
            expect(page.locator("html")).to_have_attribute("lang", other)
            assert page.locator("main").inner_text() != before
            check_sight(page)
            assert page.locator("[data-t]:empty").count() == 0
            assert not faults, faults


@pytest.mark.parametrize("way", ["choose", "drop"])
def test_a_book_is_read_to_its_end_and_takes_no_more_memory(browser: "Browser", folder: Path, way: str) -> None:
    from playwright.sync_api import expect

    book = BOOK if way == "choose" else "Grüße an alle! " * 9_000  # of which some slices would end inside a character
    (folder / "book.txt").write_text(book, encoding="utf-8")
    n_byte = len(book.encode())
    with served("--quiet") as (_, client, _said), opened(browser, str(client.base_url)) as (page, faults):
        status(page, "Ready.")
        (before,) = client.get("/v1/sessions").json()["data"]
        if way == "choose":
            page.get_by_label("Drop a text file here, or choose one.").set_input_files(folder / "book.txt")
        else:
            make = "(text) => { const d = new DataTransfer(); d.items.add(new File([text], 'book.txt')); return d; }"
            page.dispatch_event("body", "drop", {"dataTransfer": page.evaluate_handle(make, book)})
        page.locator("#pause").click()
        expect(page.locator("#pause")).to_have_text("Go on")
        page.locator("#language").select_option("zh")
        expect(page.locator("#pause")).to_have_text("继续")
        page.locator("#language").select_option("en")
        page.locator("#pause").click()
        bar, seen = page.get_by_role("progressbar"), list[float]()
        words = page.locator("#chart-words").inner_text()
        until = time.monotonic() + 200
        while "Read " not in page.get_by_role("status").inner_text():
            assert time.monotonic() < until, page.get_by_role("status").inner_text()
            seen.append(float(bar.evaluate("(bar) => bar.value")))
            assert _memory(page.locator("#chart-words").inner_text()) == _memory(words), "the bytes stay what they were"
            time.sleep(0.05)
        assert seen == sorted(seen) and len({*seen}) > 5, "the bar goes on, and never back"
        status(page, re.compile(rf"^Read {_size(n_byte)}: \d+\.\d+ bits per character\.$"))
        expect(page.locator("#reading")).to_contain_text("tokens/s")
        after = client.get(f"/v1/sessions/{before['id']}").json()  # beside it is what "Undo" goes back to
        assert after["n_tokens"] == n_byte and after["bytes"] == before["bytes"]
        left, right = (point.split(",") for point in str(page.locator("#bytes").get_attribute("points")).split())
        assert left[1] == right[1] and float(left[0]) < float(right[0]), "a level line"
        assert client.get(f"/v1/sessions/{after['id']}/tail").json()["text"] == book.encode()[-512:].decode(errors="replace")
        assert f"{len(book):,} characters" in page.locator("#chart-words").inner_text()
        scored = client.post("/v1/score", json={"text": book[: 1 << 16]}).json()["bpc"]
        bits = float(re.findall(r": ([\d.]+) bits", page.get_by_role("status").inner_text())[0])
        assert bits == pytest.approx(scored, rel=0.05)
        assert not faults, faults


def _memory(words: str) -> str:
    return words.split("(dashed), ")[1]


def _size(n_byte: int) -> str:
    number, unit = (n_byte / 1e6, "MB") if n_byte >= 1e6 else (n_byte / 1e3, "kB")
    return f"{number:.1f}".removesuffix(".0") + f" {unit}"


def test_a_book_and_a_session_outlive_the_server(browser: "Browser", folder: Path) -> None:
    """The server is killed in the middle of a book, and begins anew: the page goes on where the session is."""
    from playwright.sync_api import expect

    (folder / "book.txt").write_text(BOOK)
    with served("--sessions", "kept", "--quiet", "--save-every", "20000") as (child, client, _said):
        url, port = str(client.base_url), client.base_url.port or 0
        with opened(browser, url) as (page, faults):
            status(page, "Ready.")
            (session,) = client.get("/v1/sessions").json()["data"]
            page.locator("#file").set_input_files(folder / "book.txt")
            expect(page.locator("#reading")).to_contain_text("tokens/s", timeout=LONG)
            _until(lambda: client.get(f"/v1/sessions/{session['id']}").json()["n_tokens"] > 200_000)
            child.send_signal(signal.SIGKILL)
            child.wait()
            status(page, re.compile(r"^The connection is lost; trying again\."))
            with served("--sessions", "kept", "--quiet", port=port) as (child, client, _said):
                (found,) = client.get("/v1/sessions").json()["data"]
                assert found["id"] == session["id"] and 20_000 <= found["n_tokens"] < len(BOOK)
                status(page, re.compile(r"^Read "), timeout=200_000)
                end = client.get(f"/v1/sessions/{session['id']}/tail").json()
                assert end["n_tokens"] == len(BOOK) and end["text"] == BOOK[-512:]
                foreign = [each for each in faults if not each.startswith("console: Failed to load resource")]
                assert not [each for each in foreign if "ERR_INCOMPLETE_CHUNKED" not in each], foreign
                page.get_by_label("Name").fill("book")
                page.get_by_role("button", name="Save", exact=True).click()
                status(page, "Saved as book.")
                asked = client.post(f"/v1/sessions/{session['id']}/ask", json={"max_tokens": 8, "seed": 1}).json()["choices"]
                child.send_signal(signal.SIGTERM)
                assert child.wait() == 0
            with served("--sessions", "kept", "--quiet", port=port) as (_, client, _said):
                page.reload()
                expect(page.locator("#text")).to_contain_text(BOOK[-100:-1])
                page.get_by_role("button", name="book · ").click()
                expect(page.locator("#sessions button")).to_have_count(2)
                both = client.get("/v1/sessions").json()["data"]
                for each in both:
                    again = client.post(f"/v1/sessions/{each['id']}/ask", json={"max_tokens": 8, "seed": 1}).json()["choices"]
                    assert again == asked, "the same next words"
                page.get_by_label("Your text").fill("And then")
                page.get_by_role("button", name="Continue").click()
                status(page, "Done: 100 tokens.")


def _until(condition: Callable[[], bool], seconds: float = 60) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.02)


def test_a_key_is_asked_for_and_kept_only_on_request(browser: "Browser", folder: Path) -> None:
    from playwright.sync_api import expect

    key = "a-key-of-at-least-sixteen-letters"
    (folder / "keys").write_text(key + "\n")
    (folder / "keys").chmod(0o600)
    options = ("--quiet", "--api-key-file", "keys")
    with served(*options, key=key) as (_, client, _said), opened(browser, str(client.base_url)) as (page, faults):
        status(page, "This server asks for a key.")
        page.get_by_label("Key").fill(key)
        page.keyboard.press("Enter")
        status(page, "Ready.")
        assert key not in page.evaluate("() => JSON.stringify([{...sessionStorage}, {...localStorage}, document.cookie])")
        page.reload()
        status(page, "This server asks for a key.")
        page.get_by_label("Key").fill(key)
        page.get_by_label("keep it until the tab is closed").check()
        page.get_by_role("button", name="Use this key").click()
        status(page, "Ready.")
        page.reload()
        status(page, "Ready.")
        expect(page.locator("#key-form")).to_be_hidden()
        assert all("401" in each for each in faults), faults
