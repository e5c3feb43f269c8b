"""What requests and answers have in common. Unknown and unsupported fields are refused by name; every number has a range."""

import math
from collections.abc import Sequence
from typing import Annotated, Any, Generic, Literal, TypeVar, get_type_hints

import numpy as np
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, create_model, model_validator

from transformer_xl.errors import Bounds
from transformer_xl.generation.draft import Chosen
from transformer_xl.generation.sampling import NUMBERS, Sampling
from transformer_xl.generation.seeds import text_seed
from transformer_xl.generation.stopping import Stopping
from transformer_xl.server.jobs import LONGEST_SECONDS, Job, Session, Writing
from transformer_xl.tokenizers.base import Tokenizer
from transformer_xl.untrusted import is_unicode

T = TypeVar("T")

MOST_TOKENS = 1 << 20
"""The most tokens that a call writes."""

MOST_BODY_BYTES = 2 << 20
"""The largest body."""


def _without_surrogates(text: str) -> str:
    if not is_unicode(text):
        raise ValueError("half of a character (a lone surrogate)")
    return text


Text = Annotated[str, AfterValidator(_without_surrogates)]
TokenId = Annotated[int, Field(ge=0, lt=1 << 31, strict=True)]
TokenIds = list[TokenId]
MaxTokens = Annotated[int, Field(ge=1, le=MOST_TOKENS, strict=True)]
Several = Annotated[int, Field(ge=1, le=64, strict=True)]
Name = Annotated[str, Field(max_length=256)]
SessionId = Annotated[str, Field(max_length=64)]
Timeout = Annotated[float, Field(gt=0, le=LONGEST_SECONDS)]
Seed = Annotated[int, Field(ge=0, lt=1 << 64, strict=True)]
Place = Annotated[int, Field(ge=0, strict=True)]


class Reply(BaseModel):
    """An object of an answer, with all of its fields."""

    model_config = ConfigDict(extra="forbid")


class Listed(Reply, Generic[T]):
    """A list, as OpenAI has them."""

    object: Literal["list"] = "list"
    data: list[T]


class ErrorDetail(BaseModel):
    """What was refused: a line for people, a word for programs, and perhaps numbers."""

    message: str
    type: str
    code: str


class Error(Reply):
    """Any answer of 400 and above."""

    error: ErrorDetail


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


class StreamOptions(Body):
    """Of OpenAI."""

    include_usage: bool = False


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
    stream_options: StreamOptions = StreamOptions()
    timeout: Timeout = LONGEST_SECONDS
    user: Name | None = None
    frequency_penalty: Annotated[float, Field(ge=0, le=0)] | None = None
    presence_penalty: Annotated[float, Field(ge=0, le=0)] | None = None

    @property
    def likeliest(self) -> int | None:
        """How many of the likeliest tokens are listed with each token; None: no log-probabilities."""
        return None

    def job(
        self,
        owner: str,
        prompt: np.ndarray,
        seed: int,
        *,
        place: int = 0,
        n: int = 1,
        stops: Sequence[str] = (),
        session: Session | None = None,
        forks: bool = False,
        score: bool = False,
    ) -> Job:
        """Return what reads a prompt, the one at a `place` of several, and writes `n` texts; `stops` end them, too."""
        bias = {int(token): -math.inf if value <= -100 else value for token, value in (self.logit_bias or {}).items()}
        numbers = {name: getattr(self, name) for name in NUMBERS}
        if numbers["temperature"] == 0:  # no filter has an effect then, and clients leave them set
            numbers |= dict.fromkeys(("top_k", "top_p", "min_p"))
        stops = [*stops, *([self.stop] if isinstance(self.stop, str) else self.stop or [])]
        writing = Writing(
            sampling=Sampling(**numbers, logit_bias=bias),
            stopping=Stopping(tokens=frozenset(self.stop_token_ids), strings=stops),
            max_tokens=self.max_tokens,
            seeds=tuple(text_seed(seed, place, sample) for sample in range(n)),
            keeps_drawing=self.seed is None and session is not None and not forks,
        )
        return Job(
            owner=owner,
            prompt=prompt,
            writing=writing if self.max_tokens else None,
            session=session,
            forks=forks,
            score=score,
            likeliest=self.likeliest,
            streams=self.stream,
            timeout=self.timeout,
        )


class CompletionFields(WritingFields):
    """The same with log-probabilities as completions ask for them."""

    logprobs: Annotated[int, Field(ge=0, le=20, strict=True)] | None = None

    @property
    def likeliest(self) -> int | None:
        return self.logprobs


class TextFields(Body):
    """Text, or its token ids."""

    text: Text | None = None
    tokens: TokenIds | None = None

    @model_validator(mode="after")
    def _one(self) -> "TextFields":
        if self.text is not None and self.tokens is not None:
            raise ValueError("give text or tokens, not both")
        return self

    @property
    def content(self) -> str | list[int]:
        """What was given; nothing is an empty text."""
        return (self.text or "") if self.tokens is None else self.tokens


def token_text(tokenizer: Tokenizer, token: int) -> str:
    """Return the text of a token; of one that is no whole characters, its bytes, as OpenAI writes them."""
    piece = tokenizer.piece(token)
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


class ScoredToken(Reply):
    """A token and its log-probability; null for the first one of a text."""

    id: int
    text: str
    logprob: float | None

    @classmethod
    def of(cls, tokenizer: Tokenizer, chosen: Chosen) -> "ScoredToken":
        """Return a token that was scored, as clients see it."""
        return cls(id=chosen.token, text=token_text(tokenizer, chosen.token), logprob=chosen.log_probability)
