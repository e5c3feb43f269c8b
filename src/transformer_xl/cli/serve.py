"""`txl serve`."""

import os
import sys
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from transformer_xl.cli.options import Flag, Natural, Opening, Positive, Precision, Repeated
from transformer_xl.console import say
from transformer_xl.errors import CheckpointError, ConfigError

_DEFAULT_ROWS = 8
_MOST = 1e9
"""Of seconds and gigabytes."""


def serve(
    run: str,
    /,
    *,
    host: str = "127.0.0.1",
    port: Natural = 8080,
    rows: Positive = _DEFAULT_ROWS,
    mem_len: Natural | None = None,
    precision: Precision = "fp32",
    api_key_file: Path | None = None,
    cors_origin: Repeated = None,
    public_name: Repeated = None,
    sessions: Path | None = None,
    session_memory: Annotated[float | None, Parameter(name="--session-memory")] = None,
    prefix_memory: float | None = None,
    ttl: float = 86_400,
    save_every: Positive = 65_536,
    queue: Positive | None = None,
    key_quota: float | None = None,
    chat_template: Literal["plain"] | None = None,
    grace: float = 30.0,
    worker: str = "w1",
    name: str | None = None,
    opening: Opening = Opening(),
    quiet: Flag = False,
) -> None:
    """Serve a model: OpenAI's completions API, and sessions of constant memory.

    Common uses:
        txl serve runs/mine
        txl serve runs/mine --sessions sessions --rows 16
        txl serve runs/mine --host 0.0.0.0 --api-key-file keys.txt

    To try it on a web page, open the address that it prints in a browser.

    Args:
        run: directory of a run, of an exported model, or a hub id.
        host: address to listen on; any but this machine's own needs --api-key-file.
        port: port to listen on; 0: any free one.
        rows: texts that are read and written side by side.
        mem_len: positions of memory. Default: the model's.
        precision: of weights and memory; auto: whichever steps fastest. A session keeps the precision that it was read with.
        api_key_file: file that only you can read, with a key on each line.
        cors_origin: web page that may send requests, such as https://example.org; may be repeated.
        public_name: name by which clients call the server, besides localhost; may be repeated.
        sessions: directory for sessions, which then outlive the server. Its parent must exist.
        session_memory: gigabytes that sessions may take in memory. Default: a quarter of what is free.
        prefix_memory: gigabytes for what prompts begin with, read only once; 0: none. Default: a quarter of --session-memory.
        ttl: seconds without use after which a session is deleted.
        save_every: tokens after which a session in use is saved.
        queue: requests that wait for a row. Default: four for each row.
        key_quota: gigabytes that the sessions and saved files of each key may take. Default: no limit.
        chat_template: answer chats, too; plain: messages are lines of a text that begin with the speaker.
        grace: seconds that texts have to finish when the server is stopped.
        worker: begins the ids of this server's sessions; another one for each server with the same directory.
        name: of the model, for clients. Default: that of the directory.
        opening: how the run is opened.
        quiet: print no line for each request.
    """
    if not (worker.isalnum() and worker.isascii() and len(worker) <= 16):
        raise ConfigError(f"--worker '{worker[:40]}' must be 1 to 16 letters and digits")
    if port > 65_535:
        raise ConfigError(f"--port ({port}) must be at most 65535")
    numbers = {"ttl": ttl, "grace": grace, "session-memory": session_memory, "prefix-memory": prefix_memory}
    numbers |= {"key-quota": key_quota}
    for option, value in numbers.items():
        if value is not None and not 0 <= value <= _MOST:
            raise ConfigError(f"--{option} ({value:g}) must be from 0 to {_MOST:,.0f}")
    if ttl == 0:
        raise ConfigError("--ttl (0) must be above 0, or no session lives")
    if precision == "auto" and sessions:
        raise ConfigError(
            "--precision auto may choose another one at the next start, which fits no session; name one, such as bf16"
        )
    try:
        from transformer_xl.server.guard import check_address, own_name, read_keys
    except ImportError as error:
        raise ConfigError(f"txl serve needs {error.name}; in a clone: pip install -e '.[serve]'") from None
    keys = read_keys(api_key_file) if api_key_file else ()
    check_address(host, keys)

    import torch

    from transformer_xl.generation.decoder import Decoder
    from transformer_xl.model.room import free_bytes
    from transformer_xl.server.app import Server, make_app
    from transformer_xl.server.engine import Engine
    from transformer_xl.server.metrics import Metrics
    from transformer_xl.server.service import Service
    from transformer_xl.server.sessions import Sessions, Store, most_bytes, most_leases

    opened = opening.open(run)
    decoder = Decoder(opened.model, batch_size=rows, mem_len=mem_len, precision=precision)
    each = most_bytes(decoder.session_format())
    limit = int(session_memory * 1e9) if session_memory is not None else (free_bytes(torch.device("cpu")) or 4 << 30) // 4
    if limit < each:
        raise ConfigError(f"--session-memory ({limit:,} bytes) holds no session, which takes {each:,} bytes; raise it")
    for_prefixes = limit // 4 if prefix_memory is None else int(prefix_memory * 1e9)
    if prefix_memory and for_prefixes < each:
        raise ConfigError(f"--prefix-memory ({for_prefixes:,} bytes) holds no beginning, which takes {each:,} bytes; raise it")
    metrics = Metrics(log=None if quiet else sys.stderr)
    engine = Engine(
        decoder,
        opened.tokenizer,
        queue=queue or 4 * rows,
        per_owner=max(8, 2 * rows) if keys else None,
        n_prefix=for_prefixes // each,
        metrics=metrics,
    )
    quota = None if key_quota is None else int(key_quota * 1e9)
    if quota is not None and quota < each:
        raise ConfigError(f"--key-quota ({quota:,} bytes) holds no session, which takes {each:,} bytes; raise it")
    most_open = most_leases() if sessions else None
    store = Store(sessions, engine.format, opened.tokenizer, who=f"{worker}@{own_name()}") if sessions else None
    kept = Sessions(bytes_each=each, limit=limit, store=store, worker=worker, ttl=ttl, quota=quota, most_open=most_open)
    parameters = sum(p.numel() for p in opened.model.parameters())
    details = {
        "mem_len": decoder.mem_len,
        "vocab_size": opened.tokenizer.vocab_size,
        "tokenizer": opened.tokenizer.kind,
        "precision": decoder.precision,
        "parameters": parameters,
        "model_sha256": engine.format.own.model,
        "rows": rows,
        "session_bytes": each,
    }
    metrics.rows.set(rows)
    metrics.session_bytes.set(each)
    own_model = name or Path(run).resolve().name
    service = Service(
        engine,
        kept,
        metrics,
        model=own_model,
        details=details,
        save_every=save_every,
        chats=chat_template == "plain",
    )
    app = make_app(
        service,
        keys=keys,
        origins=cors_origin or (),
        hosts=public_name or (),
    )
    server = Server(service, app, host=host, port=port, grace=grace)
    if opened.device.type == "cpu" and torch.get_num_threads() > 1 and not os.environ.get("OMP_NUM_THREADS"):
        torch.set_num_threads(torch.get_num_threads() - 1)  # one core answers requests
    where = f"and in {sessions} as many as the disk holds" if sessions else "and none survives the server (--sessions DIR)"
    say(
        f"{own_model}: {parameters:,} parameters, {decoder.precision} on {opened.device}, memory {decoder.mem_len:,} tokens\n"
        f"a session takes {each:,} bytes, however much it reads: {rows} in rows, {kept.most:,} in memory, {where}\n"
        f"beginnings of prompts that are kept, so that they are read once: {engine.n_prefix:,}\n"
        f"ready at {server.address} for a browser, or for example:\n"
        f"  curl {server.address}/v1/completions -H 'Content-Type: application/json' "
        + ('-H "Authorization: Bearer $KEY" ' if keys else "")
        + '-d \'{"prompt": "Once", "max_tokens": 40}\''
    )
    server.run_until_ended()
    if service.n_unsaved:
        raise CheckpointError(f"{service.n_unsaved} sessions could not be saved in '{sessions}'; free disk space, or check it")
    say("ended; every session is saved" if sessions else "ended", quiet=quiet)
