"""The page in a real browser, where one is installed."""

import shutil
import subprocess

import pytest

from tests.explain.test_page import HOSTILE, Elements, explained
from transformer_xl.explain.page import page

UNSEEN = "\u00ad\u034f\u061c\u115f\u1160\u17b4\u180b\u180e\u200b\u2066\u3164\ufe00\uffa0\U000e0020\U000e0100\U000e01ef"
SEEN_THROUGH_OTHERS = "👩\u200d👧 ❤\ufe0f ☎\ufe0e می\u200cخواهم"  # these join or choose what is seen
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no chromium here; install one to see the page's script run")


def opened(text, tmp_path, *, token):
    """What a browser makes of a page, as HTML, after it has gone to a token."""
    path = tmp_path / "index.html"
    path.write_bytes(text.encode())
    options = ["--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    options = [*options, "--enable-logging=stderr", "--virtual-time-budget=20000", "--dump-dom", f"{path.as_uri()}#t{token}"]
    assert BROWSER
    done = subprocess.run([BROWSER, *options], capture_output=True, timeout=120, check=True)
    assert b"CONSOLE" not in done.stderr, done.stderr.decode()
    return Elements(done.stdout.decode())


@pytest.mark.parametrize("kind", ["paper", "vanilla", "lstm"])
def test_a_hostile_text_is_shown_and_nothing_else_happens(kind, tmp_path):
    bom = "\ufeff"  # decoders drop it unless told otherwise
    lines = [f"{bom}naïve", HOSTILE, "שלום עולם", "a\tb", UNSEEN, SEEN_THROUGH_OTHERS]
    how = {"mem_len": 0} if kind == "vanilla" else {}
    found = opened(page(explained("\n".join(lines), kind, name=HOSTILE, **how)), tmp_path, token=9)
    tags = [tag for tag, *_ in found.found]
    assert tags.count("script") == 1 + 1  # its own, and the manifest: arrays are taken out when they are unpacked
    assert not {"img", "iframe", "object"} & set(tags)
    assert dict(found.found[0][1])["data-ready"] == "yes"
    shown = "".join(found.texts("span", **{}))
    assert "‹U+202E›" in shown and "‹U+2028›" in shown and "‹U+FEFF›" in shown and "\u202e" not in shown
    assert "".join(f"‹U+{ord(c):04X}›" for c in UNSEEN) in shown and not set(UNSEEN) & set(shown)
    assert SEEN_THROUGH_OTHERS in shown
    assert "שלום" in shown.replace("\u200e", "")
    assert sum(tag == "div" and attrs.get("dir") == "auto" for tag, attrs, _ in found.found) >= len(lines)
    words = "".join("".join(text) for tag, _, text in found.found if tag not in ("script", "style"))
    assert "Would have preferred" in words and "number 9" in words
    assert ("Where the heads looked" in words) == (kind != "lstm")
    assert ("without" in words.split("Would have preferred")[0].split("number 9")[1]) == (kind != "vanilla")


@pytest.mark.parametrize("kind", ["paper", "lstm"])
def test_the_page_follows_the_language_of_the_browser_and_the_one_that_is_chosen(kind, tmp_path):
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed; make test-browser does that")
    path = tmp_path / "index.html"
    path.write_text(page(explained("some text, and some text again\n" * 3, kind)), encoding="utf-8")
    with playwright.sync_playwright() as running:
        browser = running.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        for locale, words in (("zh-CN", "模型更看好的词元"), ("de-DE", "Would have preferred")):
            opened = browser.new_context(locale=locale).new_page()
            opened.goto(f"{path.as_uri()}#t9")
            opened.wait_for_selector("html[data-ready=yes]")
            assert words in opened.inner_text("#inspector")
        before = opened.inner_text("body")
        opened.select_option("#language", "zh")
        assert opened.evaluate("document.documentElement.lang") == "zh"
        assert "模型更看好的词元" in opened.inner_text("#inspector") and "记忆的价值" in opened.inner_text("#totals")
        opened.select_option("#language", "en")
        assert opened.inner_text("body") == before
        browser.close()
