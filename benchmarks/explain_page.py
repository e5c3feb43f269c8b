"""How large the page of `txl explain` grows with its text, and what a browser makes of it.

A model of bytes with random weights reads prose, Python's own manual repeated; then headless Chromium opens each page, until
its script has laid out everything. The first text is short: what it takes is the browser's own.
"""

import argparse
import resource
import shutil
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from common.machine import describe
from common.report import facts

from transformer_xl.config.model import TransformerXLConfig
from transformer_xl.console import say, table
from transformer_xl.explain.explanation import explain
from transformer_xl.explain.page import write_explanation
from transformer_xl.model.transformer_xl import TransformerXL
from transformer_xl.reading.reading import Reading
from transformer_xl.tokenizers.kinds import ByteTokenizer

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
SIZES: dict[str, Any] = {"n_layer": 4, "d_model": 64, "n_head": 4, "d_head": 16, "d_inner": 128, "mem_len": 128}
SHORT = 1000


@dataclass(frozen=True)
class Page:
    """A page, and what it took."""

    n_byte: int
    seconds_to_write: float
    size: int
    seconds_to_open: float | None
    browser_mb: float | None


def main() -> None:
    options = parse_arguments()
    torch.manual_seed(0)
    model = TransformerXL(TransformerXLConfig(vocab_size=256, **SIZES))
    print(facts({**describe(), "torch": torch.__version__, "model": str(SIZES), "browser": version()}))
    pages = [measure(model, n_byte) for n_byte in (SHORT, options.bytes)]
    header = ["bytes of text", "s to explain", "page MB", "bytes of page a byte", "s to open", "browser MB"]
    print(f"\n{table([header, *[row(page) for page in pages]])}")
    print("\nbrowser MB: its largest process.")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bytes", type=int, default=1_000_000, help="of the long text (default: %(default)s)")
    return parser.parse_args()


def version() -> str:
    if BROWSER is None:
        return "none found: pages are not opened"
    return subprocess.run([BROWSER, "--version"], capture_output=True, text=True, check=True).stdout.strip()


def measure(model: TransformerXL, n_byte: int) -> Page:
    say(f"{n_byte:,} bytes")
    manual = "\n".join(topics.values()).encode()
    text = (manual * (n_byte // len(manual) + 1))[:n_byte]
    tokenizer = ByteTokenizer()
    with tempfile.TemporaryDirectory() as folder:
        begin = time.perf_counter()
        reading = Reading(tgt_len=128, mem_len=model.mem_len)
        explanation = explain(model, tokenizer, tokenizer.encode_bytes(text), reading, name="manual", run="random weights")
        path = write_explanation(explanation, Path(folder) / "page")
        written = time.perf_counter() - begin
        seconds, mb = open_page(path, Path(folder) / "profile") if BROWSER else (None, None)
        return Page(n_byte, written, path.stat().st_size, seconds, mb)


def open_page(path: Path, profile: Path) -> tuple[float, float]:
    """Return seconds until the page's script is ready, and the memory of the browser's largest process so far, in MB."""
    options = ["--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}", "--virtual-time-budget=60000"]
    begin = time.perf_counter()
    command = [str(BROWSER), *options, "--dump-dom", path.absolute().as_uri()]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True).stdout
    seconds = time.perf_counter() - begin
    if 'data-ready="yes"' not in shown:
        raise SystemExit(f"the page of {path} did not become ready")
    return seconds, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024


def row(page: Page) -> list[str]:
    opened = "-" if page.seconds_to_open is None else f"{page.seconds_to_open:.1f}"
    memory = "-" if page.browser_mb is None else f"{page.browser_mb:,.0f}"
    ratio = f"{page.size / page.n_byte:.1f}"
    return [f"{page.n_byte:,}", f"{page.seconds_to_write:,.1f}", f"{page.size / 1e6:.2f}", ratio, opened, memory]


if __name__ == "__main__":
    main()
