"""The page in a real browser, where one is installed."""

from typing import TYPE_CHECKING

import pytest

from tests.browser import check_sight, opened
from tests.explain.test_page import HOSTILE, Elements, explained
from transformer_xl.explain.page import page

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = [pytest.mark.browser, pytest.mark.timeout(280)]

UNSEEN = "\u00ad\u034f\u061c\u115f\u1160\u17b4\u180b\u180e\u200b\u2066\u3164\ufe00\uffa0\U000e0020\U000e0100\U000e01ef"
SEEN_THROUGH_OTHERS = "👩\u200d👧 ❤\ufe0f ☎\ufe0e می\u200cخواهم"  # these join or choose what is seen
LINES = "".join(f"{i} lines are in this text, and none of them is long.\n" for i in range(90))  # two pages of tokens


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("page") / "index.html"
    path.write_text(page(explained(LINES)), encoding="utf-8")
    return path.as_uri()


@pytest.mark.parametrize("kind", ["paper", "vanilla", "lstm"])
def test_a_hostile_text_is_shown_and_nothing_else_happens(browser, kind, tmp_path):
    bom = "\ufeff"  # decoders drop it unless told otherwise
    lines = [f"{bom}naïve", HOSTILE, "שלום עולם", "a\tb", UNSEEN, SEEN_THROUGH_OTHERS]
    how = {"mem_len": 0} if kind == "vanilla" else {}
    path = tmp_path / "index.html"
    path.write_bytes(page(explained("\n".join(lines), kind, name=HOSTILE, **how)).encode())
    with opened(browser, path.as_uri(), "#t9") as (shown_page, faults):
        shown_page.locator("html[data-ready]").wait_for()
        found = Elements(shown_page.content())
        assert not faults, faults
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
def test_the_page_follows_the_language_of_the_browser_and_the_one_that_is_chosen(browser, kind, tmp_path):
    path = tmp_path / "index.html"
    path.write_text(page(explained("some text, and some text again\n" * 3, kind)), encoding="utf-8")
    with opened(browser, path.as_uri(), "#t9", locale="zh-CN") as (shown, _):
        shown.locator("html[data-ready]").wait_for()
        assert "模型更看好的词元" in shown.inner_text("#inspector")
    with opened(browser, path.as_uri(), "#t9", locale="de-DE") as (shown, faults):
        shown.locator("html[data-ready]").wait_for()
        before = shown.inner_text("body")
        assert "Would have preferred" in before
        shown.select_option("#language", "zh")
        assert shown.evaluate("document.documentElement.lang") == "zh"
        assert "模型更看好的词元" in shown.inner_text("#inspector") and "记忆的价值" in shown.inner_text("#totals")
        shown.select_option("#language", "en")
        assert shown.inner_text("body") == before
        assert not faults, faults


@pytest.mark.parametrize("kind", ["paper", "lstm"])
def test_causes_are_listed_and_colored_alone_and_against_the_rival(browser, kind, tmp_path):
    text, path = "some text, and some text again\n" * 3, tmp_path / "index.html"
    found = explained(text, kind, attributed=1, token=41)
    path.write_text(page(found), encoding="utf-8")
    causes, row = found.facts.causes, found.facts.causes.places.tolist().index(40)
    with opened(browser, path.as_uri(), "#t41") as (shown, faults):
        shown.locator("html[data-ready]").wait_for()
        for kept, button in enumerate(["this token", "this and not"] if kind == "paper" else [""]):
            if button:
                shown.locator("#inspector button", has_text=button).click()
            strong = [
                (d, x) for d, x in zip(causes.distances[row, kept], causes.nats[row, kept], strict=True) if abs(x) >= 0.006
            ]
            cells = shown.locator("#inspector td.raised, #inspector td.lowered").all_inner_texts()
            expected = [f"{'−' if x < 0 else '+'}{abs(x):.2f}" for _, x in strong]
            assert strong and [float(cell.replace("−", "-")) for cell in cells[: len(strong)]] == pytest.approx(
                [float(x.replace("−", "-")) for x in expected], abs=0.0101
            )
            marks = shown.evaluate("[...document.querySelectorAll('#text .raised, #text .lowered')].map((e) => e.token)")
            assert {40 - int(d) for d, _ in strong} <= set(marks)
        if kind == "paper":
            shown.locator(".heads button").first.click()  # what a head looked at is underlined instead
            assert shown.locator("#text .raised, #text .lowered").count() == 0 and shown.locator("#text .key").count()
            assert "rank correlation" in shown.inner_text("#inspector") or not (causes.nats[row, 2] > 0.005).any()
        said = shown.evaluate("[0.004, -0.04, -0.06, 0.04, 0.06].map((nats) => verdict(nats).split(/[.:]/)[0])")
        hardly = "Memory hardly changed it"
        assert said == ["Memory made no difference", hardly, "Memory misled", hardly, "Memory helped"]
        shown.evaluate("data.effects.fill(0.004 / about.nats_step)")
        assert "no single token" not in shown.inner_text("#inspector").lower()
        shown.select_option("#language", "zh")  # which draws it again
        assert "没有哪个词元单独使它改变 0.005 奈特" in shown.inner_text("#inspector")
        assert not faults, faults


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_it_is_seen_whole_on_a_telephone_and_a_desk(browser: "Browser", url: str, width: int, scheme: str) -> None:
    options = {"color_scheme": scheme, "viewport": {"width": width, "height": 844}}
    with opened(browser, url, "#t140", **options) as (shown, faults):
        shown.locator("html[data-ready]").wait_for()
        cards = [card.bounding_box() for card in shown.locator("#totals > div").all()]
        tops = [round(box["y"]) for box in cards if box]
        assert len({round(box["width"]) for box in cards if box}) == 1
        assert len(set(tops)) == (1 if width == 1280 else 2) and len(tops) == 4
        check_sight(shown)
        names = {(each["canvas"], each["text"]) for each in shown.evaluate("() => drawn")}
        for chart in ("heat", "curve"):
            assert {(chart, "distance in tokens (1: the token right before)"), (chart, "1"), (chart, "5")} <= names
        shares = {text for chart, text in names if chart == "curve" and text.endswith("%")}
        assert 2 <= len(shares) <= 4, "a scale in percent"
        assert "up to" in shown.locator("#map-hint").inner_text() and "%" in shown.locator("#heat-caption").inner_text()
        shown.get_by_label("memory’s gain").check()
        check_sight(shown)
        shown.get_by_role("button", name="Next ›").first.click()
        assert "page 2 of 2" in shown.locator("#where").inner_text()
        assert "darker" not in shown.locator("body").inner_text()
        shown.select_option("#language", "zh")
        check_sight(shown)
        assert not faults, faults


def test_a_tap_holds_a_token_above_its_facts_and_a_cross_closes_them(browser: "Browser", url: str) -> None:
    options = {"viewport": {"width": 390, "height": 844}, "has_touch": True, "is_mobile": True}
    with opened(browser, url, **options) as (shown, faults):
        shown.locator("html[data-ready]").wait_for()
        token, panel = shown.locator("#text span").nth(700), shown.locator("#inspector")
        token.evaluate("(span) => scrollTo(0, scrollY + span.getBoundingClientRect().top - 700)")  # where the facts will lie
        place = token.bounding_box()
        assert place and 650 < place["y"] < 720
        shown.touchscreen.tap(place["x"] + 2, place["y"] + 5)
        shown.locator("#text .held").first.wait_for()
        assert "number 701" in panel.inner_text()
        held, facts = token.bounding_box(), panel.bounding_box()
        assert held and facts and held["y"] + held["height"] <= facts["y"]
        panel.get_by_role("button", name="Close").tap()
        assert "Point at the text" in panel.inner_text()
        assert not faults, faults
