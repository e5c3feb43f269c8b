"""What `/openapi.json` says: what each route takes and answers, errors included."""

from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel, ConfigDict, Field
from pydantic.json_schema import JsonSchemaMode, models_json_schema

from transformer_xl.server.wire import AppendRequest

_REF = "#/components/schemas/"


class Answer(BaseModel):
    """An object of an answer, with all of its fields."""

    model_config = ConfigDict(extra="forbid")


class ErrorDetail(BaseModel):
    """What was refused: a line for people, a word for programs, and perhaps numbers."""

    message: str
    type: str
    code: str


class Error(Answer):
    """Any answer of 400 and above."""

    error: ErrorDetail


class Status(Answer):
    """Whether the server lives, or computes."""

    status: str


class Model(Answer):
    """The model, as OpenAI describes one; `meta` holds its sizes."""

    id: str
    object: str
    created: int
    owned_by: str
    meta: dict[str, Any]


class ModelList(Answer):
    """All models: one."""

    object: str
    data: list[Model]


class Piece(Answer):
    """A token and its text; bytes where they are no UTF-8."""

    id: int
    piece: str | list[int]


class Tokens(Answer):
    """The tokens of a text."""

    tokens: list[int] | list[Piece]
    count: int


class Detokenized(Answer):
    """The text of tokens, by two names."""

    content: str
    prompt: str


class TokenizerInfo(Answer):
    """What the tokenizer is."""

    tokenizer_class: str
    vocab_size: int
    eos_token: str | None
    bos_token: str | None


class Logs(Answer):
    """Tokens with their log-probabilities, as in OpenAI's completions."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class Choice(Answer):
    """A text that was written."""

    index: int
    text: str
    logprobs: Logs | None
    finish_reason: str | None


class Usage(Answer):
    """How many tokens were read and written."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class CompletionAnswer(Answer):
    """Texts, as in OpenAI's completions."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[Choice]
    usage: Usage


class SaidMessage(Answer):
    """What the assistant says."""

    role: str
    content: str
    refusal: None = None


class ChatChoice(Answer):
    """A message that was written."""

    index: int
    message: SaidMessage
    logprobs: dict[str, Any] | None
    finish_reason: str | None


class ChatAnswer(Answer):
    """Messages, as in OpenAI's chats."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage


class SessionAnswer(Answer):
    """A session: what it has read, where it lies, and what it costs."""

    id: str
    object: str
    created: int
    expires_at: int | None
    model: str
    n_tokens: int
    mem_len: int
    n_remembered: int
    bytes: int
    state: str
    busy: bool
    saved_at: int | None
    n_rewindable: int


class SessionList(Answer):
    """Sessions of the key."""

    object: str
    data: list[SessionAnswer]


class Tail(Answer):
    """The last tokens of a session."""

    n_tokens: int
    tokens: list[int]
    text: str


class ScoredToken(Answer):
    """A token and its log-probability; null for the first one of a text."""

    id: int
    text: str
    logprob: float | None


class Appended(Answer):
    """What was read; what is scored is told only where it was asked for."""

    session: SessionAnswer
    n_read: int
    nats: float | None = Field(default=None)
    scored: int | None = Field(default=None)
    tokens: list[ScoredToken] | None = Field(default=None)


class SavedName(Answer):
    """A text saved by a name."""

    object: str
    name: str | None
    n_tokens: int


class SavedList(Answer):
    """All names by which texts are saved."""

    object: str
    data: list[SavedName]


class Saved(SavedName):
    """A session that was saved, by a name or by none."""

    session: SessionAnswer


class Figures(Answer):
    """How well a text is predicted."""

    nats: float
    tokens: int
    bytes: int
    ppl: float
    bpc: float
    bpb: float
    per_token: list[ScoredToken] | None = Field(default=None)


class ScoreAnswer(Figures):
    """The score of a text."""

    object: str
    model: str
    n_tokens: int


class ScoresAnswer(Answer):
    """The scores of a text with memory and without."""

    object: str
    model: str
    n_tokens: int
    on: Figures
    off: Figures


_ANSWERS: dict[tuple[str, str], tuple[int, str, list[type[BaseModel]], tuple[str, ...]]] = {
    # method and path: status, what it is, the JSON that it may be, and other media types
    ("get", "/healthz"): (200, "the process lives", [Status], ()),
    ("get", "/readyz"): (200, "it computes", [Status], ()),
    ("get", "/metrics"): (200, "counts for Prometheus", [], ("text/plain",)),
    ("get", "/v1/models"): (200, "the model", [ModelList], ()),
    ("get", "/v1/models/{name}"): (200, "the model", [Model], ()),
    ("post", "/tokenize"): (200, "tokens", [Tokens], ()),
    ("post", "/v1/tokenize"): (200, "tokens", [Tokens], ()),
    ("post", "/detokenize"): (200, "a text", [Detokenized], ()),
    ("post", "/v1/detokenize"): (200, "a text", [Detokenized], ()),
    ("get", "/tokenizer_info"): (200, "the tokenizer", [TokenizerInfo], ()),
    ("post", "/v1/completions"): (200, "texts, whole or as they come", [CompletionAnswer], ("text/event-stream",)),
    ("post", "/v1/chat/completions"): (200, "messages, whole or as they come", [ChatAnswer], ("text/event-stream",)),
    ("post", "/v1/sessions"): (201, "the session", [SessionAnswer], ()),
    ("get", "/v1/sessions"): (200, "sessions of the key", [SessionList], ()),
    ("get", "/v1/sessions/{session_id}"): (200, "the session", [SessionAnswer], ()),
    ("delete", "/v1/sessions/{session_id}"): (204, "it is gone", [], ()),
    ("get", "/v1/sessions/{session_id}/tail"): (200, "its last tokens", [Tail], ()),
    ("delete", "/v1/sessions/{session_id}/run"): (200, "the session", [SessionAnswer], ()),
    ("post", "/v1/sessions/{session_id}/append"): (200, "what was read, or progress", [Appended], ("text/event-stream",)),
    ("post", "/v1/sessions/{session_id}/generate"): (200, "a text", [CompletionAnswer], ("text/event-stream",)),
    ("post", "/v1/sessions/{session_id}/ask"): (200, "texts", [CompletionAnswer], ("text/event-stream",)),
    ("post", "/v1/sessions/{session_id}/fork"): (201, "the copy", [SessionAnswer], ()),
    ("post", "/v1/sessions/{session_id}/rewind"): (200, "the session", [SessionAnswer], ()),
    ("post", "/v1/sessions/{session_id}/save"): (200, "what was saved", [Saved], ()),
    ("get", "/v1/saved"): (200, "what is saved", [SavedList], ()),
    ("delete", "/v1/saved/{name}"): (204, "it is gone", [], ()),
    ("post", "/v1/score"): (200, "the score", [ScoreAnswer, ScoresAnswer], ()),
}
_KINDS: dict[str, dict[str, Any]] = {
    "text/plain": {"type": "string"},
    "text/event-stream": {  # each event
        "type": "object",
        "properties": {"data": {"type": "string", "contentMediaType": "application/json"}, "id": {"type": "string"}},
        "required": ["data"],
    },
}
_COMPUTING = ("completions", "append", "generate", "ask", "score")
_REASONS = {
    400: "a field does not fit; the message names it",
    401: "a valid key is needed",
    403: "the origin or the name of the host is not allowed, or the quota is full",
    404: "there is no such model, session or name",
    408: "the body comes too slowly",
    409: "the session is elsewhere (`at`), busy, or not what the call needs",
    413: "the body is too large",
    415: "the body has another content type",
    429: "too many requests wait; see Retry-After",
    500: "a fault of the server",
    501: "the server was started without this",
    503: "the server is starting or ending, has no room, or another one has the session; see Retry-After",
    504: "it took longer than `timeout`",
    507: "the disk is full",
}


def describe(app: FastAPI) -> None:
    """Let an application say all that its routes take and answer."""
    made = app.openapi

    def described() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _complete(made())
        return app.openapi_schema

    app.openapi = described


def _complete(schema: dict[str, Any]) -> dict[str, Any]:
    models = {model for _, _, own, _ in _ANSWERS.values() for model in own} | {Error, AppendRequest}
    wanted: list[tuple[type[BaseModel], JsonSchemaMode]] = [
        (model, "serialization") for model in sorted(models, key=lambda model: model.__name__)
    ]
    _, made = models_json_schema(wanted, ref_template=_REF + "{model}")
    parts = schema.setdefault("components", {}).setdefault("schemas", {})
    for name, own in made["$defs"].items():
        parts.setdefault(name, own)
    for name in ("HTTPValidationError", "ValidationError"):  # FastAPI's own, which is never sent
        parts.pop(name, None)
    for path, methods in schema["paths"].items():
        for method, operation in methods.items():
            operation["responses"] = _responses(method, path)
    _bodies(schema["paths"])
    return schema


def _responses(method: str, path: str) -> dict[str, Any]:
    """Return the answers of a route, its errors included."""
    status, what, models, kinds = _ANSWERS[method, path]
    content: dict[str, Any] = {kind: {"schema": _KINDS[kind]} for kind in kinds}
    if models:
        refs = [_of(model) for model in models]
        content["application/json"] = {"schema": refs[0] if len(refs) == 1 else {"anyOf": refs}}
    answers: dict[str, Any] = {str(status): {"description": what} | ({"content": content} if content else {})}
    if path == "/readyz":
        answers["503"] = {"description": "it does not", "content": {"application/json": {"schema": _of(Status)}}}
    error = {"application/json": {"schema": _of(Error)}}
    return answers | {str(code): {"description": _REASONS[code], "content": error} for code in _errors(method, path)}


def _errors(method: str, path: str) -> list[int]:
    if path in ("/healthz", "/readyz"):
        return [403]
    codes = {400, 401, 403, 429, 500}
    if method == "post":
        codes |= {408, 413, 415}
    if "{" in path:
        codes |= {404}
    if "session" in path or "save" in path:
        codes |= {404, 409, 503, 507}
    if path.endswith(_COMPUTING):
        codes |= {404, 409, 503, 504, 507}  # all of them may go on with a session
    if path.endswith("tokenize"):
        codes |= {404}
    if "chat" in path:
        codes |= {501}
    return sorted(codes)


def _of(model: type[BaseModel]) -> dict[str, str]:
    return {"$ref": _REF + model.__name__}


def _bodies(paths: dict[str, Any]) -> None:
    """Describe the bodies that routes read by themselves."""
    append = paths["/v1/sessions/{session_id}/append"]["post"]
    append["requestBody"] = {
        "required": True,
        "content": {"application/json": {"schema": _of(AppendRequest)}, "text/plain": {"schema": _KINDS["text/plain"]}},
    }
    append.setdefault("parameters", []).extend(
        [
            {"name": "at", "in": "query", "schema": {"type": "integer", "minimum": 0}, "description": "of a streamed text"},
            {"name": "score", "in": "query", "schema": {"enum": ["no", "sum"]}, "description": "of a streamed text"},
        ]
    )
