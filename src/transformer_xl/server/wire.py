"""Requests and answers as JSON. Unknown and unsupported fields are refused by name; every number has a range."""

import math
from collections.abc import Sequence
from typing import Annotated, Any, Generic, Literal, TypeVar, get_type_hints

import numpy as np
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, create_model, model_validator

from transformer_xl.errors import one_line
from transformer_xl.generation.draft import Chosen
from transformer_xl.generation.sampling import NUMBERS, Bounds, Sampling
from transformer_xl.generation.seeds import fresh_seed, text_seed
from transformer_xl.generation.stopping import Stopping
from transformer_xl.model.softmax import check_ids
from transformer_xl.server.jobs import LONGEST_SECONDS, RefusalError, Writing
from transformer_xl.tokenizers.base import Tokenizer
from transformer_xl.untrusted import is_unicode

T = TypeVar("T")

MOST_TOKENS = 1 << 20
"""The most tokens that a call writes."""

MOST_BODY_BYTES = 2 << 20
"""The largest body, but of a text that is streamed."""


def _without_surrogates(text: str) -> str:
    if not is_unicode(text):
        raise ValueError("half of a character (a lone surrogate)")
    return text


Text = Annotated[str, AfterValidator(_without_surrogates)]
TokenId = Annotated[int, Field(ge=0, lt=1 << 31, strict=True)]
TokenIds = list[TokenId]
MaxTokens = Annotated[int, Field(ge=1, le=MOST_TOKENS, strict=True)]
Seed = Annotated[int, Field(ge=0, lt=1 << 64, strict=True)]
Place = Annotated[int, Field(ge=0, strict=True)]


class Reply(BaseModel):
    """An object of an answer, with all of its fields."""

    model_config = ConfigDict(extra="forbid")


class Listed(Reply, Generic[T]):
    """A list, as OpenAI has them."""

    object: Literal["list"] = "list"
    data: list[T]


def _show_nulls(schema: dict[str, Any]) -> None:
    """Let the schema say that a field that may be left out may be null."""
    for name in schema.get("properties", {}).keys() - set(schema.get("required", [])):
        schema["properties"][name] = {"anyOf": [schema["properties"][name], {"type": "null"}]}


class Body(BaseModel):
    """A body of JSON without unknown fields. A field that is null was left out, as in OpenAI's API."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, json_schema_extra=_show_nulls)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        known = {field.alias or name for name, field in cls.model_fields.items()}
        return {name: value for name, value in values.items() if value is not None or name not in known}


def _field(name: str, bounds: Bounds) -> Any:
    """Return type and default of a number of `Sampling`, with its bounds in pydantic's words."""
    gt, ge = (bounds.least, None) if bounds.above else (None, bounds.least)
    return get_type_hints(Sampling)[name], Field(default=getattr(Sampling, name), gt=gt, ge=ge, le=bounds.most)


_NUMBERS: dict[str, Any] = {name: _field(name, bounds) for name, bounds in NUMBERS.items()}


class WritingFields(create_model("SamplingFields", __base__=Body, **_NUMBERS)):
    """How a text is written: the numbers of `Sampling`, and the fields that all calls which write have in common."""

    max_tokens: Annotated[int, Field(ge=0, le=MOST_TOKENS, strict=True)] = 16
    logit_bias: dict[Annotated[str, Field(pattern=r"^\d{1,10}$")], Annotated[float, Field(ge=-100, le=100)]] | None = None
    seed: Seed | None = None
    stop: Text | Annotated[list[Text], Field(max_length=4)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=64)] = Field(default_factory=list)
    stream: bool = False
    stream_options: "StreamOptions | None" = None
    timeout: Annotated[float, Field(gt=0, le=LONGEST_SECONDS)] = LONGEST_SECONDS
    user: Annotated[str, Field(max_length=256)] | None = None
    frequency_penalty: Annotated[float, Field(ge=0, le=0)] | None = None
    presence_penalty: Annotated[float, Field(ge=0, le=0)] | None = None

    @model_validator(mode="after")
    def _streams(self) -> "WritingFields":
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options goes with stream")
        return self

    @property
    def likeliest(self) -> int | None:
        """How many of the likeliest tokens are listed with each token; None: no log-probabilities."""
        return None

    def writing(self, seeds: tuple[int, ...], *, keeps_drawing: bool = False, stops: Sequence[str] = ()) -> Writing:
        """Return how texts are written; `stops` end them besides what the client asked for."""
        bias = {int(token): -math.inf if value <= -100 else value for token, value in (self.logit_bias or {}).items()}
        numbers = {name: getattr(self, name) for name in NUMBERS}
        if numbers["temperature"] == 0:  # no filter has an effect then, and clients leave them set
            numbers |= dict.fromkeys(("top_k", "top_p", "min_p"))
        sampling = Sampling(**numbers, logit_bias=bias)
        stops = [*stops, *([self.stop] if isinstance(self.stop, str) else self.stop or [])]
        stopping = Stopping(tokens=frozenset(self.stop_token_ids), strings=stops)
        return Writing(
            sampling=sampling, stopping=stopping, max_tokens=self.max_tokens, seeds=seeds, keeps_drawing=keeps_drawing
        )


class StreamOptions(Body):
    """Of OpenAI."""

    include_usage: bool = False


class CompletionFields(WritingFields):
    """The same with log-probabilities as completions ask for them."""

    logprobs: Annotated[int, Field(ge=0, le=20, strict=True)] | None = None

    @property
    def likeliest(self) -> int | None:
        return self.logprobs


class CompletionRequest(CompletionFields):
    """`POST /v1/completions`."""

    model: Annotated[str, Field(max_length=256)] | None = None
    prompt: Text | TokenIds | Annotated[list[Text], Field(max_length=128)] | Annotated[list[TokenIds], Field(max_length=128)]
    n: Annotated[int, Field(ge=1, le=64, strict=True)] = 1
    best_of: int | None = None
    echo: bool = False
    session_id: Annotated[str, Field(max_length=64)] | None = None

    @model_validator(mode="after")
    def _fits(self) -> "CompletionRequest":
        if self.best_of not in (None, self.n):
            raise ValueError("best_of is not supported; leave it out, or give it as n")
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens 0 scores a prompt, which needs echo")
        if self.max_tokens == 0 and self.n > 1:
            raise ValueError("n above 1 writes several texts, which needs max_tokens above 0")
        if self.session_id is not None and (self.n > 1 or self.echo or not isinstance(self.prompt, str)):
            raise ValueError("session_id goes with a prompt of one text, n 1 and without echo; use /v1/sessions/…/ask for more")
        return self

    def prompts(self) -> list[str | list[int]]:
        """Return each prompt."""
        prompt: Any = self.prompt
        if isinstance(prompt, str) or not prompt or isinstance(prompt[0], int):
            return [prompt]
        return prompt


class TextPart(Body):
    """A part of a message."""

    type: Literal["text"]
    text: Text


class Message(Body):
    """What somebody says in a chat."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Text | Annotated[list[TextPart], Field(max_length=64)] = ""
    name: Annotated[str, Field(max_length=64)] | None = None

    def line(self) -> str:
        """Return it as a line of a text."""
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return f"{self.role}: {text}\n"


class ChatRequest(WritingFields):
    """`POST /v1/chat/completions`."""

    model: Annotated[str, Field(max_length=256)] | None = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=4096)]
    max_tokens: MaxTokens = 256
    max_completion_tokens: MaxTokens | None = None
    n: Annotated[int, Field(ge=1, le=64, strict=True)] = 1
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=20, strict=True)] | None = None

    @model_validator(mode="after")
    def _fits(self) -> "ChatRequest":
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs goes with logprobs")
        if self.max_completion_tokens is not None:
            self.max_tokens = self.max_completion_tokens
        return self

    @property
    def likeliest(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def prompt(self) -> str:
        """Return the messages as a text that the assistant goes on with."""
        return "".join(message.line() for message in self.messages) + "assistant:"


CHAT_STOPS = ("\nsystem:", "\ndeveloper:", "\nuser:", "\nassistant:")
"""Where somebody else speaks."""


class SessionAnswer(Reply):
    """A session: what it has read, where it lies, and what it costs."""

    id: str
    object: Literal["session"] = "session"
    created: int
    expires_at: int | None
    model: str
    n_tokens: int
    mem_len: int
    n_remembered: int
    bytes: int
    state: Literal["row", "parked", "disk", "elsewhere"]
    busy: bool
    saved_at: int | None
    n_rewindable: int


class SessionRequest(Body):
    """`POST /v1/sessions`."""

    ttl: Annotated[float, Field(gt=0, le=10 * 365 * 86400)] | None = None
    seed: Seed | None = None
    from_: "SessionSource | None" = Field(default=None, alias="from")


class SessionSource(Body):
    """What a session begins with."""

    session: Annotated[str, Field(max_length=64)] | None = None
    saved: Annotated[str, Field(max_length=64)] | None = None

    @model_validator(mode="after")
    def _one(self) -> "SessionSource":
        if (self.session is None) == (self.saved is None):
            raise ValueError("from needs either a session or a saved name")
        return self


class TextFields(Body):
    """Text, or its token ids."""

    text: Text | None = None
    tokens: TokenIds | None = None

    @model_validator(mode="after")
    def _one(self) -> "TextFields":
        if self.text is not None and self.tokens is not None:
            raise ValueError("give text or tokens, not both")
        return self


class AppendRequest(TextFields):
    """`POST /v1/sessions/{id}/append`."""

    at: Place | None = None
    score: Literal["no", "sum", "tokens"] = "no"
    timeout: Annotated[float, Field(gt=0, le=LONGEST_SECONDS)] = LONGEST_SECONDS


class GenerateRequest(CompletionFields):
    """`POST /v1/sessions/{id}/generate`."""

    max_tokens: MaxTokens = 16
    at: Place | None = None


class AskRequest(TextFields, CompletionFields):
    """`POST /v1/sessions/{id}/ask`."""

    max_tokens: MaxTokens = 16
    n: Annotated[int, Field(ge=1, le=64, strict=True)] = 1


class RewindRequest(Body):
    """`POST /v1/sessions/{id}/rewind`."""

    n: Annotated[int, Field(ge=1, strict=True)]
    at: Place | None = None


class SaveRequest(Body):
    """`POST /v1/sessions/{id}/save`."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")] | None = None


class ScoreRequest(TextFields):
    """`POST /v1/score`."""

    session_id: Annotated[str, Field(max_length=64)] | None = None
    memory: Literal["on", "off", "both"] = "on"
    per_token: bool = False
    timeout: Annotated[float, Field(gt=0, le=LONGEST_SECONDS)] = LONGEST_SECONDS


class TokenizeRequest(Body):
    """`POST /tokenize`: the text is `content` for clients of llama.cpp, and `prompt` for those of vLLM."""

    content: Text | None = None
    prompt: Text | None = None
    with_pieces: bool = False
    model: Annotated[str, Field(max_length=256)] | None = None
    add_special_tokens: bool = False
    add_special: bool = False

    @model_validator(mode="after")
    def _one(self) -> "TokenizeRequest":
        if (self.content is None) == (self.prompt is None):
            raise ValueError("give the text as content or as prompt")
        return self


class DetokenizeRequest(Body):
    """`POST /detokenize`."""

    tokens: TokenIds


def ids_of(tokenizer: Tokenizer, text: str | list[int]) -> np.ndarray:
    """Return the token ids of a text, or ids as they are; TokenizerError for what is not in the vocabulary."""
    if isinstance(text, str):
        return np.asarray(tokenizer.encode(text), np.int64)
    ids = np.array(text, np.int64)
    check_ids(ids, vocab_size=tokenizer.vocab_size)
    return ids


def seeds_of(seed: int | None, prompt: int, n: int) -> tuple[int, tuple[int, ...]]:
    """Return the seed of a call, and those of the texts of one of its prompts."""
    seed = fresh_seed() if seed is None else seed
    return seed, tuple(text_seed(seed, prompt, sample) for sample in range(n))


def token_text(tokenizer: Tokenizer, token: int) -> str:
    """Return the text of a token; of one that is no whole characters, its bytes, as OpenAI writes them."""
    piece = tokenizer.piece(token)
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


class Logprobs:
    """The tokens of a text as OpenAI's legacy object: the `n` likeliest of each are listed, and the token itself always is.

    A token has the same number wherever it stands.
    """

    def __init__(self, tokenizer: Tokenizer, n: int) -> None:
        self._tokenizer, self._n, self._offset = tokenizer, n, 0

    def of(self, chosen: list[Chosen], texts: list[str] | None = None) -> dict[str, Any]:
        """Return the object of some more tokens."""
        tokens, offsets, values, tops = [], [], [], []
        for i, each in enumerate(chosen):
            own = token_text(self._tokenizer, each.token)
            tokens.append(own)
            offsets.append(self._offset)
            begun = sum((byte & 0xC0) != 0x80 for byte in self._tokenizer.piece(each.token))  # characters that begin in it
            self._offset += begun if texts is None else len(texts[i])
            values.append(each.log_probability)
            if each.log_probability is None:
                tops.append(None)
                continue
            top = {token_text(self._tokenizer, token): value for token, value in each.likeliest[: self._n]}
            tops.append(top | {own: each.log_probability})
        return {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}


def error_body(refusal: RefusalError) -> dict[str, Any]:
    """Return the body of an error, as OpenAI's clients read it."""
    kind = "invalid_request_error" if refusal.status < 500 else "server_error"
    return {"error": {"message": one_line(refusal), "type": kind, "code": refusal.code, **refusal.extra}}
