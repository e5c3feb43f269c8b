"""Routes about the server: whether it computes, its model, its counts, and the page."""

from collections.abc import Awaitable, Callable
from importlib import resources

from fastapi import APIRouter
from fastapi.responses import Response

from transformer_xl.server.service import ERRORS, Model, Serving
from transformer_xl.server.wire import Listed

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
    return Listed(data=[service.model])


@router.get("/v1/models/{name:path}")
async def get_model(service: Serving, name: str) -> Model:
    """Return the model."""
    service.require_model(name)
    return service.model


def _static(content: bytes, kind: str) -> Callable[[], Awaitable[Response]]:
    async def page() -> Response:
        headers = {"content-security-policy": _CSP, "cache-control": "no-cache"}
        return Response(content, media_type=kind, headers=headers)

    return page


for _path, (_file, _kind) in _PAGE.items():
    _content = (resources.files("transformer_xl.server") / "page" / _file).read_bytes()
    router.add_api_route(_path, _static(_content, _kind), include_in_schema=False)
router.add_api_route("/icon.svg", _static(_ICON, "image/svg+xml"), include_in_schema=False)
