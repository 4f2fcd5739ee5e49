"""Requests and answers of OpenAI's API: completions and chat."""

from __future__ import annotations

import json
import secrets
import time
import uuid
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator
from starlette.exceptions import HTTPException

from h2o_prefill.config import PrefillConfig
from h2o_prefill.eval.runs import DENSE
from h2o_prefill.eval.timing.generation import Sampling

# Colder draws are greedy: logits divided by less would overflow.
_COLDEST = 1e-3
_LONGEST_MESSAGE = 500


class ApiError(HTTPException):
    """An error as an answer: its status, OpenAI's code, and the argument that it is about."""

    def __init__(
        self,
        status: int,
        message: str,
        code: str | None = None,
        param: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(status, message, headers)
        self.code = code
        self.param = param

    def body(self) -> dict[str, Any]:
        """Return the error in OpenAI's form."""
        kind = "invalid_request_error" if self.status_code < 500 else "server_error"
        kind = "rate_limit_error" if self.status_code == 429 else kind
        found = {"message": self.detail, "type": kind, "param": self.param, "code": self.code}
        return {"error": {name: _printable(value) for name, value in found.items()}}


def _printable(text: str | None) -> str | None:
    """Return the beginning of a text that may hold anything, halves of characters included."""
    return text and text[:_LONGEST_MESSAGE].encode("utf-8", "backslashreplace").decode()


def _without_halves(text: str) -> str:
    """Return a text; ValueError if it has halves of characters, which JSON can hold."""
    text.encode()
    return text


_Text = Annotated[str, AfterValidator(_without_halves)]


class _Object(BaseModel):
    """A JSON object: no other fields, no other types, and null is as if it was left out."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _leave_out_nulls(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        return {name: value for name, value in data.items() if value is not None}


class StreamOptions(_Object):
    """What a stream has besides text."""

    include_usage: bool = False
    include_obfuscation: bool = False


class PrefillOptions(_Object):
    """How this request is prefilled."""

    settings: _Text | None = None


_Zero = Annotated[float, Field(ge=0, le=0)]
_Stop = Annotated[str, Field(min_length=1, max_length=256)]


class GenerationRequest(_Object):
    """What completions and chat have in common."""

    model: str | None = None
    max_tokens: int | None = Field(None, ge=1)
    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, ge=0, le=1)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: _Stop | Annotated[list[_Stop], Field(max_length=4)] = Field(default_factory=list)
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    h2o_prefill: PrefillOptions = PrefillOptions()
    user: str | None = None
    # Clients send these; no other values are served.
    n: Literal[1] = 1
    logprobs: Literal[False] = False
    presence_penalty: _Zero = 0.0
    frequency_penalty: _Zero = 0.0

    @property
    def stops(self) -> list[str]:
        """The texts that end an answer."""
        return [self.stop] if isinstance(self.stop, str) else self.stop

    @property
    def sampling(self) -> Sampling | None:
        """How tokens are drawn, None for the likeliest ones."""
        if self.temperature < _COLDEST:
            return None
        seed = secrets.randbits(63) if self.seed is None else self.seed
        return Sampling(temperature=self.temperature, top_p=self.top_p, seed=seed)


class CompletionRequest(GenerationRequest):
    """The body of /v1/completions."""

    prompt: _Text | list[int]
    best_of: Literal[1] = 1
    echo: Literal[False] = False


class TextPart(_Object):
    """A part of a message."""

    type: Literal["text"]
    text: _Text


class Message(_Object):
    """A message of a chat."""

    role: Literal["system", "developer", "user", "assistant"]
    content: _Text | list[TextPart]
    name: str | None = None

    def for_template(self) -> dict[str, str]:
        """Return the message as chat templates take it."""
        parts = self.content
        text = parts if isinstance(parts, str) else "".join(part.text for part in parts)
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


class ChatRequest(GenerationRequest):
    """The body of /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)


def parse_settings(text: str) -> PrefillConfig | None:
    """Return the settings of a text, None for "dense", the model's own attention."""
    return None if text == DENSE else PrefillConfig.parse(text)


@dataclass(frozen=True)
class Finish:
    """How an answer ended."""

    reason: Literal["stop", "length"]
    prompt_tokens: int
    cached_tokens: int
    new_tokens: int

    def usage(self) -> dict[str, Any]:
        """Return the numbers of tokens in OpenAI's form."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.new_tokens,
            "total_tokens": self.prompt_tokens + self.new_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


@dataclass(frozen=True)
class Answer:
    """An answer in OpenAI's form, whole or in pieces."""

    model: str
    chat: bool
    id: str = field(default_factory=lambda: f"cmpl-{uuid.uuid4().hex}")
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, text: str, finish: Finish) -> dict[str, Any]:
        """Return the body of an answer that is not a stream."""
        said = {"message": {"role": "assistant", "content": text}} if self.chat else {"text": text}
        return self._body([self._choice(said, finish.reason)], usage=finish.usage())

    def begin(self) -> str:
        """Return the first event of a stream."""
        return self._event({"role": "assistant", "content": ""}) if self.chat else ""

    def piece(self, text: str) -> str:
        """Return the event of a piece of text."""
        return self._event({"content": text} if self.chat else {"text": text})

    def end(self, finish: Finish, include_usage: bool) -> str:
        """Return the last events of a stream."""
        last = self._event({} if self.chat else {"text": ""}, finish.reason)
        if include_usage:
            last += event(self._body([], ".chunk", usage=finish.usage()))
        return last + "data: [DONE]\n\n"

    def _event(self, said: dict[str, str], reason: str | None = None) -> str:
        choice = self._choice({"delta": said} if self.chat else said, reason)
        return event(self._body([choice], ".chunk"))

    def _choice(self, said: dict[str, Any], reason: str | None) -> dict[str, Any]:
        return {"index": 0, **said, "logprobs": None, "finish_reason": reason}

    def _body(self, choices: list[Any], kind: str = "", **more: Any) -> dict[str, Any]:
        shared = {"id": self.id, "created": self.created, "model": self.model}
        name = f"chat.completion{kind}" if self.chat else "text_completion"
        return {**shared, "object": name, "choices": choices, **more}


def event(body: dict[str, Any]) -> str:
    """Return a server-sent event."""
    return f"data: {json.dumps(body)}\n\n"
