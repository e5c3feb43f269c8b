"""What `txl serve` does under load: speed, delays, cancellations, refusals, and memory, on a model with random weights.

- streams: 64 texts on 8 rows, beside `txl bench` with as many rows, in turns;
- victim: the gaps between the tokens of one text, alone and while another client appends a million tokens;
- sessions: 1,000 sessions through 8 rows; 100 of them fit into memory;
- prefixes: a prompt of 5,000 bytes, and others that differ from it in the last one, with and without kept beginnings;
- soak: clients that do everything at random, for `--minutes`.

Server and clients share this machine, so clients take a part of what is measured.
"""

import argparse
import asyncio
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import torch
from common.harness import command, parse, ratios, run, spread
from long_session import SIZES, Sizes, make_model

from transformer_xl.console import say, table
from transformer_xl.tokenizers.kinds import ByteTokenizer

TXL = [sys.executable, "-c", "from transformer_xl.cli import main; main()"]
ROWS = 8


def measure(part: str, options: argparse.Namespace) -> dict[str, Any]:
    """Measure one part."""
    return asyncio.run(PARTS[part](options))


def sizes_of(options: argparse.Namespace) -> Sizes:
    """Return the sizes of the model."""
    return SIZES["tiny" if options.tiny else "paper" if options.paper else "middle"]


def save_model(sizes: Sizes, directory: Path) -> None:
    """Write a model with random weights that reads bytes."""
    torch.manual_seed(0)
    make_model(sizes).save_pretrained(directory)
    ByteTokenizer().save(directory / "tokenizer.json")


class Served:
    """A server that runs, and a client of it."""

    def __init__(self, process: subprocess.Popen[str], client: httpx.AsyncClient) -> None:
        self.process, self.client = process, client

    def resident_mb(self) -> float:
        """Return the memory of the server's process."""
        return psutil.Process(self.process.pid).memory_info().rss / 1e6

    async def count(self, name: str) -> float:
        """Return a number of `/metrics`."""
        lines = (await self.client.get("/metrics")).text.splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))

    async def post(self, path: str, body: Any = None) -> Any:
        """Post JSON, and return the JSON of the answer."""
        answer = await self.client.post(path, json={} if body is None else body)
        answer.raise_for_status()
        return answer.json()

    async def session(self, text: str = "") -> str:
        """Begin a session with a text, and return its path."""
        path = f"/v1/sessions/{(await self.post('/v1/sessions'))['id']}"
        if text:
            await self.post(f"{path}/append", {"text": text})
        return path

    async def stream(self, path: str, **body: Any) -> AsyncIterator[float]:
        """Yield the time of each event of a text that is written."""
        async with self.client.stream("POST", path, json={**body, "stream": True}) as answer:
            if answer.status_code != 200:
                await answer.aread()
                answer.raise_for_status()
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    yield time.perf_counter()

    async def rest(self) -> None:
        """Wait until nothing is computed."""
        while await self.count("txl_rows_busy") + await self.count("txl_queue_requests"):
            await asyncio.sleep(0.1)


@asynccontextmanager
async def served(*more: str) -> AsyncIterator[Served]:
    """Run a server while the block runs."""
    command = [*TXL, "serve", "model", "--port", "0", "--rows", str(ROWS), "--precision", "fp32", "--quiet", *more]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr
        said = list[str]()
        try:
            while not (said and said[-1].startswith("ready at ")):
                said.append(process.stderr.readline())
                if not said[-1]:
                    sys.exit("error: the server did not start\n" + "".join(said))
            limits = httpx.Limits(max_connections=None, max_keepalive_connections=256)
            async with httpx.AsyncClient(base_url=said[-1].split()[2], timeout=600, limits=limits) as client:
                yield Served(process, client)
        finally:
            process.terminate()
            process.communicate()


# --- parts -----------------------------------------------------------------------------------------------------------------


async def streams(options: argparse.Namespace) -> dict[str, Any]:
    """Let 64 clients write at once, in turns with a decoder that does nothing else."""
    n_text, n_token = (16, 8) if options.tiny else (64, 32 if options.paper else 128)
    found: dict[str, list[float]] = {"decoder": [], "server": [], "busy": []}
    for _ in range(options.repeats):
        command = ["bench", "model", "--rows", str(ROWS), "--precision", "fp32", "--no-compile", "--json"]
        done = subprocess.run(
            [*TXL, *command, "--tokens", str(100 if options.paper else 8 * n_token)], check=True, capture_output=True, text=True
        )
        found["decoder"].append(json.loads(done.stdout)["figures"][0]["tokens_per_second"])
        async with served("--queue", str(n_text)) as server:
            seconds, busy = await write_all(server, n_text, n_token)
        found["server"].append(n_text * n_token / seconds)
        found["busy"].append(busy / ROWS)
        decoder, ours, busy = (values[-1] for values in found.values())
        say(f"decoder {decoder:,.0f}, server {ours:,.0f} tokens/s, rows busy {busy:.1%}")
    shares = ratios(found["server"], found["decoder"])
    row = [f"{n_text} texts on {ROWS} rows", *(f"{statistics.median(found[key]):,.0f}" for key in ("decoder", "server"))]
    row += [*spread(shares), f"{statistics.median(found['busy']):.1%}"]
    print(f"\n{table([['', 'decoder alone, tokens/s', 'server, tokens/s', 'of it', 'min-max', 'rows busy'], row])}")
    return {**found, "ratios": shares}


async def write_all(server: Served, n_text: int, n_token: int) -> tuple[float, float]:
    """Return how long texts take that are asked for at once, and how many rows are busy while others wait."""
    left, busy = set(range(n_text)), list[float]()

    async def write(i: int) -> None:
        async for _ in server.stream("/v1/completions", prompt=[i % 256] * 16, max_tokens=n_token, seed=i):
            pass
        left.discard(i)

    begin = time.perf_counter()
    tasks = [asyncio.ensure_future(write(i)) for i in range(n_text)]
    while len(left) > ROWS:
        await asyncio.sleep(0.25)
        busy.append(await server.count("txl_rows_busy"))
    await asyncio.gather(*tasks)
    return time.perf_counter() - begin, statistics.fmean(busy[1:-1] or busy)


async def victim(options: argparse.Namespace) -> dict[str, Any]:
    """Watch the gaps between the tokens of a text while another client appends a long one."""
    async with served("--save-every", str(1 << 30)) as server:
        mine, other = await server.session("Once upon a time"), await server.session("x")

        async def gaps(n: int) -> list[float]:
            times = [each async for each in server.stream(f"{mine}/generate", max_tokens=n)]
            return [late - early for early, late in itertools.pairwise(times)]

        await gaps(50)
        quiet = await gaps(1000 if not options.tiny else 50)
        before, size = server.resident_mb(), (await server.client.get(other)).json()["bytes"]
        text = random.Random(0).randbytes(options.tokens // 2).hex()

        async def append() -> None:
            for at in range(0, len(text), 1 << 17):
                await server.post(f"{other}/append", {"text": text[at : at + (1 << 17)]})

        begin = time.perf_counter()
        appending = asyncio.ensure_future(append())
        loud = list[float]()
        while not appending.done():
            loud += await gaps(100)
        await appending
        seconds, after = time.perf_counter() - begin, server.resident_mb()
        told = (await server.client.get(other)).json()
    assert told["bytes"] == size and told["n_tokens"] == len(text) + 1
    quiet_ms, loud_ms = ([1000 * value for value in quantiles(each)] for each in (quiet, loud))
    rows = [
        [name, f"{n:,}", *(f"{value:.1f}" for value in values)]
        for name, n, values in (("alone", len(quiet), quiet_ms), ("beside", len(loud), loud_ms))
    ]
    print(f"\n{table([['gaps of a text, ms', 'gaps', 'median', '99 %', 'longest'], *rows])}")
    print(f"99 %: {loud_ms[1] / quiet_ms[1]:.2f} times as long while {len(text):,} tokens were read in {seconds:,.0f} s")
    print(f"the reader's session took {size:,} bytes before and after; the server {before:,.1f} MB before, {after:,.1f} after")
    return {"quiet_ms": quiet_ms, "loud_ms": loud_ms, "resident_mb": [before, after], "seconds": seconds, "session_bytes": size}


async def prefixes(options: argparse.Namespace) -> dict[str, Any]:
    """Ask for a token after prompts that differ in the last byte."""
    prompt = random.Random(0).randbytes(500 if options.tiny else 5000).hex()[::2]
    found: dict[str, list[float]] = {}
    for kept, more in (("kept", ()), ("not kept", ("--prefix-memory", "0"))):
        async with served(*more) as server:
            await server.post("/v1/completions", {"prompt": "x", "max_tokens": 1})
            for last in "abcd":
                begin = time.perf_counter()
                made = await server.post("/v1/completions", {"prompt": prompt[:-1] + last, "max_tokens": 1, "seed": 0})
                found.setdefault(kept, []).append(time.perf_counter() - begin)
                found.setdefault("cached", []).append(made["usage"]["prompt_tokens_details"]["cached_tokens"])
    rows = [[kept, f"{1000 * found[kept][0]:,.0f}", f"{1000 * min(found[kept][1:]):,.1f}"] for kept in ("kept", "not kept")]
    print(f"\n{table([['beginnings', 'first prompt, ms', 'the next, ms'], *rows])}")
    print(f"of {len(prompt):,} tokens, {max(found['cached']):,} were not read again")
    return found


async def sessions(options: argparse.Namespace) -> dict[str, Any]:
    """Let sessions come and go through the rows; most of them lie on the disk."""
    n_kept, points = max(2 * ROWS, options.sessions // 10), list[list[float]]()
    async with served("--sessions", "sessions", "--session-memory", str(bytes_of(options) * (n_kept + 0.5) / 1e9)) as server:
        paths = list[str]()
        for i in range(options.sessions):
            paths.append(await server.session(f"This is session {i}. " * 8))
            if (i + 1) % max(1, options.sessions // 10) == 0:
                points.append([i + 1, server.resident_mb()])
        wrong = 0
        for i in random.Random(0).sample(range(options.sessions), min(100, options.sessions)):
            tail = (await server.client.get(f"{paths[i]}/tail")).json()["text"]
            wrong += tail != f"This is session {i}. " * 8
        points.append([options.sessions, server.resident_mb()])
        read = await server.count("txl_tokens_read_total")
    print(f"\n{table([['sessions', 'resident MB'], *([f'{n:,.0f}', f'{mb:,.1f}'] for n, mb in points)])}")
    expected = sum(len(f"This is session {i}. " * 8) for i in range(options.sessions))
    print(f"{n_kept} lie in memory, the others on the disk; {wrong} of 100 came back with another text; ", end="")
    print(f"{read - expected:,.0f} tokens were read again")
    return {"resident_mb": points, "read_again": read - expected, "wrong": wrong}


def bytes_of(options: argparse.Namespace) -> int:
    """Return what a session takes in memory: keys and values of each layer, and a little."""
    sizes = sizes_of(options)
    return sizes.n_layer * sizes.mem_len * 2 * sizes.d_model * 4 + 4 * sizes.d_model + 16


async def soak(options: argparse.Namespace) -> dict[str, Any]:
    """Do everything at random."""
    points, errors, counts = list[list[float]](), list[str](), dict[str, int]()
    async with served("--sessions", "soaked", "--save-every", "2000", "--session-memory", "0.2") as server:
        end = time.monotonic() + 60 * options.minutes

        async def client(number: int) -> None:
            draw, path = random.Random(number), await server.session("Begin. ")
            acts: dict[str, Callable[[], Awaitable[Any]]] = {
                "append": lambda: server.post(f"{path}/append", {"text": "word " * draw.choice([1, 20, 400]), "score": "sum"}),
                "generate": lambda: server.post(f"{path}/generate", {"max_tokens": draw.choice([1, 20, 100])}),
                "ask": lambda: server.post(f"{path}/ask", {"text": "So? ", "max_tokens": 10, "n": draw.choice([1, 3])}),
                "complete": lambda: server.post("/v1/completions", {"prompt": "x" * draw.choice([1, 500]), "max_tokens": 20}),
                "score": lambda: server.post("/v1/score", {"text": "word " * 100, "memory": "both"}),
                "save": lambda: server.post(f"{path}/save", {"name": f"saved-{number}"}),
                "rewind": lambda: server.client.post(f"{path}/rewind", json={"n": draw.choice([1, 5])}),
                "tail": lambda: server.client.get(f"{path}/tail"),
                "list": lambda: server.client.get("/v1/sessions"),
            }
            left = False
            while time.monotonic() < end:
                name = draw.choice([*acts, "leave", "new"])
                counts[name] = counts.get(name, 0) + 1
                try:
                    if name == "new":
                        await server.client.delete(path)
                        path = await server.session("Begin. ")
                    elif name == "leave":
                        call = asyncio.ensure_future(acts[draw.choice(["append", "generate", "complete"])]())
                        await asyncio.sleep(draw.random() * 0.2)
                        call.cancel()
                        await asyncio.gather(call, return_exceptions=True)
                        await server.client.delete(f"{path}/run")
                        left = True
                    else:
                        await acts[name]()
                        left = False
                except httpx.HTTPError as error:
                    busy = isinstance(error, httpx.HTTPStatusError) and error.response.json()["error"]["code"] == "busy"
                    if left and busy:  # a call that was left may arrive after what was to stop it
                        await server.client.delete(f"{path}/run")
                        continue
                    errors.append(f"{name}: {error!r}")

        async def watch() -> None:
            while time.monotonic() < end:
                points.append([60 * options.minutes - (end - time.monotonic()), server.resident_mb()])
                await asyncio.sleep(min(60.0, max(0.1, 6 * options.minutes)))

        watching = asyncio.ensure_future(watch())
        await asyncio.gather(*(client(number) for number in range(12)))
        watching.cancel()
        with suppress(asyncio.CancelledError):
            await watching
        points.append([60 * options.minutes, server.resident_mb()])
    shown = points[:: max(1, len(points) // 10)]
    print(f"\n{table([['minute', 'resident MB'], *([f'{at / 60:.1f}', f'{mb:,.1f}'] for at, mb in shown)])}")
    print(f"{sum(counts.values()):,} calls of 12 clients, {len(errors)} errors")
    for error in errors[:5]:
        print(f"  {error}")
    return {"resident_mb": points, "calls": counts, "errors": errors}


def quantiles(values: list[float]) -> tuple[float, float, float]:
    """Return the median, what 99 % do not exceed, and the largest."""
    ordered = sorted(values)
    return statistics.median(ordered), ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))], ordered[-1]


PARTS: dict[str, Callable[[argparse.Namespace], Any]] = {
    "streams": streams,
    "victim": victim,
    "sessions": sessions,
    "prefixes": prefixes,
    "soak": soak,
}


if __name__ == "__main__":
    parser = command(__doc__, repeats=3)
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=[name for name in PARTS if name != "soak"])
    parser.add_argument("--tokens", type=int, default=1_000_000, help="that the intruder appends (default: %(default)s)")
    parser.add_argument("--sessions", type=int, default=1000, help="default: %(default)s")
    parser.add_argument("--minutes", type=float, default=60, help="of the soak (default: %(default)s)")
    parser.add_argument("--paper", action="store_true", help="the paper's 12-layer enwik8 model; streams of 32 tokens")
    parser.add_argument("--tiny", action="store_true", help="a model of no interest, to see whether this script works")
    parser.set_defaults(threads=1)
    options = parse(parser)
    os.environ["OMP_NUM_THREADS"] = str(options.threads)  # of the server, too
    with tempfile.TemporaryDirectory() as folder:
        save_model(sizes_of(options), Path(folder, "model"))
        os.chdir(folder)
        run(options, measure, options.parts, model=str(sizes_of(options)))
