"""Routes about the server: whether it computes, its model and tokens, and the page."""

from collections.abc import Awaitable, Callable
from importlib import resources
from typing import Any, Literal

from fastapi import APIRouter
from fastapi.responses import JSONResponse, Response

from transformer_xl.reading.rows import whole_characters
from transformer_xl.server.dependencies import ERRORS, Serving, require_model
from transformer_xl.server.wire import DetokenizeRequest, Listed, Reply, TokenizeRequest

router = APIRouter(responses=ERRORS)

_CSP = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)
_PAGE = {"/": ("index.html", "text/html"), "/page.css": ("page.css", "text/css"), "/page.js": ("page.js", "text/javascript")}
_ICON = (
    b'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 16 16">'
    b'<path d="M2 4h12M2 8h9M2 12h12" stroke="#0b5cad" stroke-width="2"/></svg>'
)


class Model(Reply):
    """The model, as OpenAI describes one; `meta` holds its sizes."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "transformer_xl"
    meta: dict[str, Any]


class TokenPiece(Reply):
    """A token and its text; bytes where they are no UTF-8."""

    id: int
    piece: str | list[int]


class Tokens(Reply):
    """The tokens of a text."""

    tokens: list[int] | list[TokenPiece]
    count: int


@router.get("/healthz")
async def healthz() -> dict[str, str]:
    """Say that the process lives."""
    return {"status": "ok"}


@router.get("/readyz", responses={503: {"model": dict[str, str], "description": "it does not compute"}})
async def readyz(service: Serving, response: Response) -> dict[str, str]:
    """Say whether the engine computes."""
    ready = service.engine.is_healthy and not service.engine.is_draining
    response.status_code = 200 if ready else 503
    return {"status": "ready" if ready else "not ready"}


@router.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}})
async def metrics(service: Serving) -> Response:
    """Return counts for Prometheus."""
    return Response(service.metrics.text(), media_type="text/plain; version=0.0.4")


@router.get("/v1/models")
async def list_models(service: Serving) -> Listed[Model]:
    """Return the model, as a list."""
    return Listed(data=[_model(service)])


@router.get("/v1/models/{name:path}")
async def get_model(service: Serving, name: str) -> Model:
    """Return the model."""
    require_model(service, name)
    return _model(service)


def _model(service: Serving) -> Model:
    return Model(id=service.model, created=service.began, meta=service.details)


@router.post("/tokenize", response_model=Tokens)
@router.post("/v1/tokenize", response_model=Tokens)
async def tokenize(service: Serving, body: TokenizeRequest) -> Response:
    """Return the tokens of a text."""
    require_model(service, body.model)
    ids = (await service.encode(body.content if body.prompt is None else body.prompt)).tolist()
    pieces = [{"id": token, "piece": _piece(service.tokenizer.piece(token))} for token in ids if body.with_pieces]
    return JSONResponse({"tokens": pieces or ids, "count": len(ids)})  # which may be many


@router.post("/detokenize")
@router.post("/v1/detokenize")
async def detokenize(service: Serving, body: DetokenizeRequest) -> dict[str, str]:
    """Return the text of tokens."""
    text = whole_characters(service.tokenizer.decode((await service.encode(body.tokens)).tolist()))
    return {"content": text, "prompt": text}


@router.get("/tokenizer_info")
async def tokenizer_info(service: Serving) -> dict[str, str | int | None]:
    """Say what the tokenizer is."""
    tokenizer = service.tokenizer
    return {"tokenizer_class": tokenizer.kind, "vocab_size": tokenizer.vocab_size, "eos_token": None, "bos_token": None}


def _piece(piece: bytes) -> str | list[int]:
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return list(piece)


def _static(content: bytes, kind: str) -> Callable[[], Awaitable[Response]]:
    async def page() -> Response:
        headers = {"content-security-policy": _CSP, "cache-control": "no-cache"}
        return Response(content, media_type=kind, headers=headers)

    return page


for _path, (_file, _kind) in _PAGE.items():
    _content = (resources.files("transformer_xl.server") / "page" / _file).read_bytes()
    router.add_api_route(_path, _static(_content, _kind), include_in_schema=False)
router.add_api_route("/icon.svg", _static(_ICON, "image/svg+xml"), include_in_schema=False)
