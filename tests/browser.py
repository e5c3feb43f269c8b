"""Pages in a real browser: how they are opened, and what each of them must hold to.

`tests/conftest.py` starts the browser: `TXL_BROWSER` names a Chromium; else that of this machine or of playwright is taken.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page


@contextmanager
def opened(browser: "Browser", url: str, at: str = "", **options: Any) -> "Iterator[tuple[Page, list[str]]]":
    """Open a page at a place, and note all that it says, asks of others, or may not do."""
    context = browser.new_context(**{"locale": "en-US", **options})
    page, faults = context.new_page(), list[str]()
    page.on("console", lambda message: faults.append(f"console: {message.text}"))
    page.on("pageerror", lambda error: faults.append(f"error: {error}"))
    page.on("request", lambda request: None if request.url.startswith(url) else faults.append(f"foreign: {request.url}"))
    page.add_init_script("addEventListener('securitypolicyviolation', (e) => console.error('CSP', e.violatedDirective))")
    page.add_init_script(_DRAWN)
    try:
        page.goto(url + at)
        yield page, faults
    finally:
        context.close()


def check_sight(page: "Page") -> None:
    """Demand that nothing is wider than the page, all words can be read, and what has the keyboard shows it."""
    width = page.evaluate("() => innerWidth")
    assert page.evaluate("() => document.documentElement.scrollWidth") <= width, "no scrolling sideways"
    poor = page.evaluate(_CONTRASTS)
    assert not poor, poor[:8]
    assert page.evaluate("() => drawn.filter(({left, right, width}) => left < 0 || right > width)") == [], "words are cut off"
    for _ in range(30):
        page.keyboard.press("Tab")
        name, outline = page.evaluate(
            "() => [document.activeElement.outerHTML, getComputedStyle(document.activeElement).outlineStyle]"
        )
        assert outline != "none" or name.startswith("<body"), name


_FOCUS = "() => [document.activeElement.outerHTML, getComputedStyle(document.activeElement).outlineStyle]"

# what is drawn on a canvas, and where it begins and ends there
_DRAWN = """
  window.drawn = [];
  const fillText = CanvasRenderingContext2D.prototype.fillText;
  CanvasRenderingContext2D.prototype.fillText = function (text, x, y) {
    const { actualBoundingBoxLeft, actualBoundingBoxRight } = this.measureText(text);
    const canvas = this.canvas.id, width = this.canvas.clientWidth;
    drawn.push({ canvas, text, left: x - actualBoundingBoxLeft, right: x + actualBoundingBoxRight, width });
    fillText.call(this, text, x, y);
  };
"""

_CONTRASTS = """() => {
  const numbers = (color) => color.match(/[\\d.]+/g).map(Number);
  const over = (top, below) => top.slice(0, 3).map((value, i) => value * (top[3] ?? 1) + below[i] * (1 - (top[3] ?? 1)));
  const linear = (value) => { value /= 255; return value <= 0.03928 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4; };
  const light = ([r, g, b]) => 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
  const poor = [];
  for (const element of document.querySelectorAll("body *")) {
    const own = [...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
    if (!own || !element.getClientRects().length || element.disabled) continue;
    const chain = [];
    for (let each = element; each; each = each.parentElement) chain.unshift(numbers(getComputedStyle(each).backgroundColor));
    const paper = chain.reduce((below, top) => over(top, below), [255, 255, 255]);
    const ink = over(numbers(getComputedStyle(element).color), paper);
    const [high, low] = [light(ink), light(paper)].sort((a, b) => b - a);
    const ratio = (high + 0.05) / (low + 0.05);
    if (ratio < 4.5) poor.push([element.tagName, element.className, element.textContent.slice(0, 20), ratio]);
  }
  return poor;
}"""
