from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from transformer_xl.config.model import TransformerXLConfig
from transformer_xl.generation.decoder import Decoder
from transformer_xl.model.transformer_xl import TransformerXL
from transformer_xl.tokenizers.kinds import ByteTokenizer

pytest.importorskip("fastapi", reason="the extra 'serve' is not installed")

from transformer_xl.server.app import make_app
from transformer_xl.server.engine import Engine
from transformer_xl.server.metrics import Metrics
from transformer_xl.server.service import Service
from transformer_xl.server.sessions import Sessions
from transformer_xl.server.store import Store, most_bytes

BYTES = ByteTokenizer()
ROWS, MEM_LEN, PIECE = 3, 40, 8


@pytest.fixture(scope="session")
def model() -> TransformerXL:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"n_layer": 2, "d_model": 16, "n_head": 2, "d_head": 8, "d_inner": 16}
    model = TransformerXL(TransformerXLConfig(vocab_size=256, mem_len=MEM_LEN, **sizes))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.3)
    return model.eval()


@pytest.fixture
def folder(model: TransformerXL, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory, with the model `tiny`."""
    monkeypatch.chdir(tmp_path)
    model.save_pretrained(tmp_path / "tiny")
    BYTES.save(tmp_path / "tiny" / "tokenizer.json")
    return tmp_path


def decoder_of(model: TransformerXL, precision: Any = "fp32") -> Decoder:
    return Decoder(model, batch_size=ROWS, tgt_len=PIECE, precision=precision)


Start = Callable[..., Service]


@pytest.fixture
def start(model: TransformerXL, tmp_path: Path) -> Iterator[Start]:
    """Start a service; its engine ends with the test."""
    engines: list[Engine] = []

    def start(
        *,
        stored: bool = False,
        most: int = 50,
        queue: int = 12,
        per_owner: int | None = None,
        quota: int | None = None,
        precision: str = "fp32",
        n_prefix: int = 0,
        worker: str = "w1",
        ttl: float | None = None,
        chats: bool = False,
    ) -> Service:
        engine = Engine(
            decoder_of(model, precision), BYTES, queue=queue, per_owner=per_owner, n_prefix=n_prefix, metrics=Metrics()
        )
        each = most_bytes(engine.format)
        sessions = Sessions(
            engine,
            limit=each * most,
            store=Store(tmp_path / "sessions", engine.format, BYTES, who="test") if stored else None,
            worker=worker,
            ttl=ttl,
            quota=quota and each * quota,
        )
        engine.start()
        engines.append(engine)
        return Service(engine, sessions, model="tiny", chats=chats)

    yield start
    for engine in engines:
        engine.stop()


@pytest.fixture
def serve(start: Start) -> Iterator[Callable[..., Any]]:
    """Serve a model; the client knows no more than HTTP."""
    from starlette.testclient import TestClient

    clients: list[Any] = []

    def serve(
        *,
        keys: tuple[str, ...] = (),
        origins: tuple[str, ...] = (),
        **more: Any,
    ) -> Any:
        service = start(**more)
        app = make_app(service, keys=keys, origins=origins)
        client = TestClient(app, base_url="http://localhost")
        client.__enter__()
        clients.append(client)
        client.service = service  # pyright: ignore[reportAttributeAccessIssue]
        return client

    yield serve
    for client in clients:
        client.__exit__(None, None, None)
