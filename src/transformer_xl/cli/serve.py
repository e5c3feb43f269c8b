"""`txl serve`."""

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter
from cyclopts.validators import Number

from transformer_xl.cli.options import Flag, Natural, Opening, Positive, Precision, Repeated
from transformer_xl.console import say
from transformer_xl.errors import CheckpointError, ConfigError, counted

if TYPE_CHECKING:
    from transformer_xl.checkpoint.open_run import Opened
    from transformer_xl.server.app import Server
    from transformer_xl.server.service import Service

Amount = Annotated[float, Parameter(validator=Number(gte=0, lte=1e9))]
"""Of seconds or gigabytes."""


@Parameter(name="*")
@dataclass(frozen=True)
class Access:
    """Where the server listens, and whom it answers.

    Args:
        host: address to listen on; any but this machine's own needs --api-key-file.
        port: port to listen on; 0: any free one.
        api_key_file: file that only you can read, with a key on each line.
        cors_origin: web page that may send requests, such as https://example.org; may be repeated.
        public_name: name by which clients call the server, besides localhost; may be repeated.
    """

    host: str = "127.0.0.1"
    port: Annotated[int, Parameter(validator=Number(gte=0, lte=65_535))] = 8080
    api_key_file: Path | None = None
    cors_origin: Repeated = None
    public_name: Repeated = None

    def keys(self) -> tuple[str, ...]:
        """Return the hashes of the keys; none are needed where only this machine can ask."""
        try:
            from transformer_xl.server.guard import check_address, read_keys
        except ImportError as error:
            raise ConfigError(f"txl serve needs {error.name}; in a clone: pip install -e '.[serve]'") from None
        keys = read_keys(self.api_key_file) if self.api_key_file else ()
        check_address(self.host, keys)
        return keys


@Parameter(name="*")
@dataclass(frozen=True)
class Room:
    """What is read and written at once, and what is kept.

    Args:
        rows: texts that are read and written side by side.
        mem_len: positions of memory. Default: the model's.
        precision: of weights and memory; auto: whichever steps fastest. A session keeps the precision that it was read with.
        sessions: directory for sessions, which then outlive the server. Its parent must exist.
        session_memory: gigabytes that sessions may take in memory. Default: a quarter of what is free.
        prefix_memory: gigabytes for what prompts begin with, read only once; 0: none. Default: a quarter of --session-memory.
        ttl: seconds without use after which a session is deleted.
        save_every: tokens after which a session in use is saved.
        queue: requests that wait for a row. Default: four for each row.
        key_quota: gigabytes that the sessions and saved files of each key may take. Default: no limit.
        worker: begins the ids of this server's sessions; another one for each server with the same directory.
    """

    rows: Positive = 8
    mem_len: Natural | None = None
    precision: Precision = "fp32"
    sessions: Path | None = None
    session_memory: Amount | None = None
    prefix_memory: Amount | None = None
    ttl: Amount = 86_400
    save_every: Positive = 65_536
    queue: Positive | None = None
    key_quota: Amount | None = None
    worker: str = "w1"

    def check(self) -> None:
        """Refuse what fits no server, before a model is opened."""
        if not (self.worker.isalnum() and self.worker.isascii() and len(self.worker) <= 16):
            raise ConfigError(f"--worker '{self.worker[:40]}' must be 1 to 16 letters and digits")
        if self.ttl == 0:
            raise ConfigError("--ttl (0) must be above 0, or no session lives")
        if self.precision == "auto" and self.sessions:
            raise ConfigError(
                "--precision auto may choose another one at the next start, which fits no session; name one, such as bf16"
            )

    def service(self, opened: "Opened", *, model: str, has_keys: bool, chats: bool, quiet: bool) -> "Service":
        """Return what computes and what keeps its sessions."""
        import torch

        from transformer_xl.generation.decoder import Decoder
        from transformer_xl.model.room import free_bytes
        from transformer_xl.server.engine import Engine
        from transformer_xl.server.metrics import Metrics
        from transformer_xl.server.service import Service
        from transformer_xl.server.sessions import Sessions
        from transformer_xl.server.store import Store, most_bytes, most_leases, own_name

        decoder = Decoder(opened.model, batch_size=self.rows, mem_len=self.mem_len, precision=self.precision)
        format, free = decoder.session_format(), free_bytes(torch.device("cpu")) or 4 << 30
        limit = free // 4 if self.session_memory is None else int(self.session_memory * 1e9)
        for_prefixes = limit // 4 if self.prefix_memory is None else int(self.prefix_memory * 1e9)
        quota = None if self.key_quota is None else int(self.key_quota * 1e9)
        given = {"session-memory": limit, "prefix-memory": for_prefixes if self.prefix_memory else None, "key-quota": quota}
        for option, n_byte in given.items():
            if n_byte is not None and n_byte < most_bytes(format):
                message = (
                    f"--{option} ({n_byte:,} bytes) is less than one session takes, {most_bytes(format):,} bytes; raise it"
                )
                raise ConfigError(message)
        engine = Engine(
            decoder,
            opened.tokenizer,
            queue=self.queue or 4 * self.rows,
            per_owner=max(8, 2 * self.rows) if has_keys else None,
            n_prefix=for_prefixes // most_bytes(format),
            metrics=Metrics(log=None if quiet else sys.stderr),
        )
        sessions = Sessions(
            engine,
            limit=limit,
            store=Store(self.sessions, format, opened.tokenizer, who=f"{self.worker}@{own_name()}") if self.sessions else None,
            worker=self.worker,
            ttl=self.ttl,
            quota=quota,
            most_open=most_leases() if self.sessions else None,
            save_every=self.save_every,
        )
        return Service(engine, sessions, model=model, chats=chats)


def serve(
    run: str,
    /,
    *,
    access: Access = Access(),
    room: Room = Room(),
    chat_template: Literal["plain"] | None = None,
    grace: Amount = 30.0,
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
        access: where it listens, and whom it answers.
        room: what is read and written at once, and what is kept.
        chat_template: answer chats, too; plain: messages are lines of a text that begin with the speaker.
        grace: seconds that texts have to finish when the server is stopped.
        name: of the model, for clients. Default: that of the directory.
        opening: how the run is opened.
        quiet: print no line for each request.
    """
    room.check()
    keys = access.keys()

    import torch

    from transformer_xl.server.app import Server, make_app

    opened = opening.open(run)
    model = name or Path(run).resolve().name
    service = room.service(opened, model=model, has_keys=bool(keys), chats=chat_template == "plain", quiet=quiet)
    app = make_app(service, keys=keys, origins=access.cors_origin or (), hosts=access.public_name or ())
    server = Server(service, app, host=access.host, port=access.port, grace=grace)
    if opened.device.type == "cpu" and torch.get_num_threads() > 1 and not os.environ.get("OMP_NUM_THREADS"):
        torch.set_num_threads(torch.get_num_threads() - 1)  # one core answers requests
    say(_greeting(service, server, room.sessions, has_keys=bool(keys), device=str(opened.device)))
    server.run_until_ended()
    if n := service.sessions.n_unsaved:
        raise CheckpointError(f"{counted(n, 'session')} could not be saved in '{room.sessions}'; free disk space, or check it")
    say("ended; every session is saved" if room.sessions else "ended", quiet=quiet)


def _greeting(service: "Service", server: "Server", directory: Path | None, *, has_keys: bool, device: str) -> str:
    """Return what fits, and how to ask."""
    model, engine, sessions = service.model, service.engine, service.sessions
    where = f"and in {directory} as many as the disk holds" if directory else "and none survives the server (--sessions DIR)"
    return (
        f"{model.id}: {model.meta['parameters']:,} parameters, {engine.decoder.precision} on {device}, "
        f"memory {engine.decoder.mem_len:,} tokens\n"
        f"a session takes {sessions.bytes_each:,} bytes, however much it reads: {engine.decoder.batch_size} in rows, "
        f"{sessions.most:,} in memory, {where}\n"
        f"beginnings of prompts that are kept, so that they are read once: {engine.n_prefix:,}\n"
        f"ready at {server.address} for a browser, or for example:\n"
        f"  curl {server.address}/v1/completions -H 'Content-Type: application/json' "
        + ('-H "Authorization: Bearer $KEY" ' if has_keys else "")
        + '-d \'{"prompt": "Once", "max_tokens": 40}\''
    )
