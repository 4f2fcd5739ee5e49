"""Requests and answers of OpenAI's API: completions and chat."""

from __future__ import annotations

import json
import secrets
import time
import uuid
from collections.abc import AsyncIterator
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, model_validator
from starlette.exceptions import HTTPException

from h2o_prefill.eval.timing.generation import Sampling

# Colder draws are greedy: logits divided by less would overflow.
_COLDEST = 1e-3
_LONGEST_MESSAGE = 500


class ApiError(HTTPException):
    """An error as an answer; `about` has OpenAI's `code`, and `param`, the argument."""

    def __init__(self, status: int, message: str, headers: Any = None, **about: str) -> None:
        super().__init__(status, message[:_LONGEST_MESSAGE], headers)
        self.about = about

    def body(self) -> dict[str, Any]:
        """Return the error in OpenAI's form."""
        kind = "invalid_request_error" if self.status_code < 500 else "server_error"
        whole = {"message": self.detail, "type": kind, "param": None, "code": None}
        return {"error": {**whole, **self.about}}


class _Object(BaseModel):
    """A JSON object: no other fields, no other types, and null is as if it was left out."""

    model_config = ConfigDict(extra="forbid", strict=True)

    # Other fields that a client may send, with values that ask for nothing.
    idle: ClassVar[dict[str, tuple[Any, ...]]] = {}

    @model_validator(mode="before")
    @classmethod
    def _leave_out(cls, data: Any) -> Any:
        given = _without_nulls(data)
        for name in cls.idle.keys() & given.keys() if isinstance(given, dict) else ():
            served = [json.dumps(value) for value in cls.idle[name]]
            if json.dumps(given.pop(name)) not in served:
                raise ApiError(400, f"{name} must be {' or '.join(served)}", param=name)
        return given


def _without_nulls(data: Any) -> Any:
    if not isinstance(data, dict):
        return data
    return {name: _without_nulls(value) for name, value in data.items() if value is not None}


_Stop = Annotated[str, Field(min_length=1, max_length=256)]
_TOOLS = ("none", "auto")


class GenerationRequest(_Object):
    """What completions and chat have in common."""

    idle = {
        **{"n": (1,), "best_of": (1,), "echo": (False,), "suffix": ("",), "logprobs": (False,)},
        **{"top_logprobs": (0,), "presence_penalty": (0, 0.0), "frequency_penalty": (0, 0.0)},
        **{"logit_bias": ({},), "tools": ([],), "tool_choice": _TOOLS, "functions": ([],)},
        **{"function_call": _TOOLS, "parallel_tool_calls": (True, False), "store": (False,)},
        **{"response_format": ({"type": "text"},), "modalities": (["text"],), "metadata": ({},)},
        "service_tier": ("auto", "default"),
    }

    model: str | None = None
    max_tokens: int | None = Field(None, ge=1)
    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, ge=0, le=1)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: _Stop | Annotated[list[_Stop], Field(max_length=4)] = Field(default_factory=list)
    stream: bool = False
    stream_options: dict[Literal["include_usage", "include_obfuscation"], bool] = {}
    h2o_prefill: dict[Literal["settings"], str] = {}
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    def sampling(self) -> Sampling | None:
        """Return how tokens are drawn, None for the likeliest ones."""
        if self.temperature < _COLDEST:
            return None
        seed = secrets.randbits(63) if self.seed is None else self.seed
        return Sampling(temperature=self.temperature, top_p=self.top_p, seed=seed)


class CompletionRequest(GenerationRequest):
    """The body of /v1/completions."""

    prompt: str | list[int] | list[str] | list[list[int]]

    def only_prompt(self) -> Any:
        """Return the text, or token ids; of a list of several it has to be the only one."""
        if not isinstance(self.prompt, list) or not self.prompt or isinstance(self.prompt[0], int):
            return self.prompt
        if len(self.prompt) > 1:
            message = f"prompt must be one text, or its token ids, got a list of {len(self.prompt)}"
            raise ApiError(400, message, param="prompt")
        return self.prompt[0]


class TextPart(_Object):
    """A part of a message."""

    type: Literal["text"]
    text: str


class Message(_Object):
    """A message of a chat, as clients write one, and as they hand one back that was an answer."""

    idle = {"annotations": ([],), "tool_calls": ([],)}

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart] | None = None
    name: str | None = None

    def for_template(self) -> dict[str, str]:
        """Return the message as chat templates take it."""
        if self.content is None and self.role != "assistant":
            raise ApiError(400, f"content of role {self.role!r} must not be null", param="messages")
        parts = self.content or ""
        text = parts if isinstance(parts, str) else "".join(part.text for part in parts)
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


class ChatRequest(GenerationRequest):
    """The body of /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)


class Finish(NamedTuple):
    """How an answer ended, and the numbers of tokens in OpenAI's form."""

    reason: str  # "stop" or "length"
    usage: dict[str, Any]


class Answer:
    """An answer in OpenAI's form."""

    def __init__(self, model: str, chat: bool) -> None:
        self.chat = chat
        self._role = {"role": "assistant"}
        self.shared = {"id": f"cmpl-{uuid.uuid4().hex}", "created": int(time.time())}
        self.shared["model"] = model

    def body(self, text: str, reason: str | None = None, chunk: bool = False) -> dict[str, Any]:
        """Return an answer, or the chunk of a stream, without its usage."""
        part, kind = ("delta", ".chunk") if chunk else ("message", "")
        said = {part: {**self._role, "content": text}} if self.chat else {"text": text}
        self._role = {}  # of the first chunk alone, as clients add up what is in all
        choice = {"index": 0, **said, "logprobs": None, "finish_reason": reason}
        name = f"chat.completion{kind}" if self.chat else "text_completion"
        return {**self.shared, "object": name, "choices": [choice]}

    async def stream(
        self, piece: str | Finish, rest: AsyncIterator[str | Finish], usage: bool
    ) -> AsyncIterator[str]:
        """Yield the server-sent events of pieces of text; the first is known."""
        try:
            while isinstance(piece, str):
                yield _event(self.body(piece, chunk=True))
                piece = await anext(rest)
            last = self.body("", piece.reason, chunk=True)
            yield _event(last)
            if usage:
                yield _event({**last, "choices": [], "usage": piece.usage})
            yield "data: [DONE]\n\n"
        except ApiError as error:
            yield _event(error.body())


def _event(body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body)}\n\n"
