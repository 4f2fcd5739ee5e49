"""The routes of the server, and how errors and streams go out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from h2o_prefill import __version__
from h2o_prefill.eval.inputs.prompts import encode_prompt
from h2o_prefill.serving.metrics import Metrics
from h2o_prefill.serving.protocol import (
    Answer,
    ApiError,
    ChatRequest,
    CompletionRequest,
    Finish,
    event,
    parse_settings,
)
from h2o_prefill.serving.worker import Job, Worker

# For a body to arrive.
_BODY_SECONDS = 20
# Bodies of the largest size that all requests together may hold.
_BODIES = 32
# Up to how many times the limit a body is read, and dropped, before the answer that it is too long.
_DISCARDED = 16
# Of /v1/completions, as OpenAI's; answers of a chat may fill the context.
_COMPLETION_TOKENS = 16
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


def create_app(
    worker: Worker, name: str, *, max_body: int = 1 << 20, host: str = "127.0.0.1"
) -> FastAPI:
    """Return the server of a worker's model, which it calls `name`.

    `max_body` is the longest body of a request in bytes. On a `host` of loopback, requests for
    other hosts are refused: they come from a web page whose name leads to this machine.
    """
    app = FastAPI(title="h2o-prefill", version=__version__, docs_url=None, redoc_url=None)
    app.add_middleware(_Gate, metrics=worker.metrics, limit=max_body)

    @app.exception_handler(HTTPException)
    async def refuse(_: Request, error: HTTPException) -> Response:
        known = error if isinstance(error, ApiError) else ApiError(error.status_code, error.detail)
        return JSONResponse(known.body(), known.status_code, error.headers)

    @app.exception_handler(RequestValidationError)
    async def refuse_body(request: Request, error: RequestValidationError) -> Response:
        return await refuse(request, _as_api_error(error.errors()))

    @app.exception_handler(Exception)
    async def fail(_: Request, error: Exception) -> Response:
        return JSONResponse(ApiError(500, f"internal error: {type(error).__name__}").body(), 500)

    @app.get("/health")
    async def health() -> Response:
        return JSONResponse(
            {"status": "stopping" if worker.stopping else "ok"}, 503 if worker.stopping else 200
        )

    @app.get("/metrics")
    async def metrics() -> Response:
        text = worker.metrics.text(worker.gauges())
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4")

    @app.get("/v1/models")
    async def models() -> Response:
        known = {"id": name, "object": "model", "created": 0, "owned_by": "h2o_prefill"}
        return JSONResponse({"object": "list", "data": [known]})

    @app.post("/v1/completions")
    async def completions(body: CompletionRequest, request: Request) -> Response:
        return await respond(body, request)

    @app.post("/v1/chat/completions")
    async def chat(body: ChatRequest, request: Request) -> Response:
        return await respond(body, request)

    async def respond(body: CompletionRequest | ChatRequest, request: Request) -> Response:
        if host in _LOOPBACK and request.url.hostname not in _LOOPBACK:
            raise ApiError(403, f"this server answers at {host} alone")
        if body.model not in (None, name):
            message = f"model {body.model!r} is not here, only {name!r}"
            raise ApiError(404, message, "model_not_found", "model")
        worker.check_open()
        job = await run_in_threadpool(_make_job, worker, body)
        worker.submit(job)
        events = _events(job, request)
        # Errors before the first token have their own status, in a stream too.
        first = await anext(events)
        answer = Answer(name, isinstance(body, ChatRequest))
        if body.stream:
            usage = body.stream_options.include_usage
            stream = _stream(answer, first, events, usage)
            return StreamingResponse(stream, media_type="text/event-stream")
        pieces = [first, *[piece async for piece in events]]
        finish = pieces.pop()
        assert isinstance(finish, Finish)
        return JSONResponse(answer.whole("".join(map(str, pieces)), finish))

    return app


def _make_job(worker: Worker, body: CompletionRequest | ChatRequest) -> Job:
    """Return the job of a request; ApiError if there can be none."""
    ids, room = _token_ids(worker, body), worker.context
    wanted = body.max_tokens
    if isinstance(body, ChatRequest):
        param = "messages"
        wanted = body.max_completion_tokens or wanted or max(room - len(ids), 1)
    else:
        param, wanted = "prompt", wanted or _COMPLETION_TOKENS
    if not ids:
        raise ApiError(400, f"{param} must not be empty", None, param)
    if not 0 <= min(ids) <= max(ids) < worker.vocabulary:
        message = f"{param} must be token ids >= 0 and < {worker.vocabulary}"
        raise ApiError(400, message, None, param)
    if len(ids) + wanted > room:
        message = f"{param} of {len(ids)} tokens and {wanted} new ones must be <= {room} tokens"
        raise ApiError(400, message, "context_length_exceeded", param)
    config, settings = worker.config, body.h2o_prefill.settings
    if settings is not None:
        try:
            config = parse_settings(settings)
        except ValueError as error:
            param = "h2o_prefill.settings"
            raise ApiError(400, str(error), "invalid_settings", param) from None
    return Job(ids, wanted, body.sampling, body.stops, config)


def _token_ids(worker: Worker, body: CompletionRequest | ChatRequest) -> list[int]:
    tokenizer = worker.tokenizer
    if isinstance(body, CompletionRequest):
        if not isinstance(body.prompt, str):
            return body.prompt
        ids: list[int] = encode_prompt(tokenizer, body.prompt, chat=False)[0].tolist()
        return ids
    if not getattr(tokenizer, "chat_template", None):
        raise ApiError(400, "the model has no chat template: use /v1/completions")
    messages = [message.for_template() for message in body.messages]
    try:
        encoded: Any = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=True
        )
    except Exception as error:  # what a template raises is its own choice
        raise ApiError(400, f"chat template: {error}", None, "messages") from None
    return list(encoded["input_ids"])


async def _events(job: Job, request: Request) -> AsyncIterator[str | Finish]:
    """Yield what the worker says of a job, which ends when the client leaves."""

    async def watch() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        job.cancel()
        # The worker does not see a job that has waited until then.
        job.tell(ApiError(499, "the client left"))

    watcher = asyncio.create_task(watch())
    try:
        while True:
            event = await job.events.get()
            if isinstance(event, ApiError):
                raise event
            yield event
            if isinstance(event, Finish):
                return
    finally:
        watcher.cancel()
        job.cancel()


async def _stream(
    answer: Answer, first: str | Finish, events: AsyncIterator[str | Finish], usage: bool
) -> AsyncIterator[str]:
    if begin := answer.begin():
        yield begin
    try:
        piece = first
        while isinstance(piece, str):
            yield answer.piece(piece)
            piece = await anext(events)
        yield answer.end(piece, usage)
    except ApiError as error:
        yield event(error.body())


def _as_api_error(found: Sequence[Any]) -> ApiError:
    """Return what pydantic, or the JSON reader, has found in a body."""
    first, where = found[0], found[0]["loc"][1:]

    def path(one: Any) -> str:
        # Without the names of types.
        parts = (str(part) for part in one["loc"][1:])
        return ".".join(part for part in parts if part.isdigit() or part.isidentifier())

    if first["type"] == "json_invalid":
        return ApiError(400, f"body must be JSON: {first['ctx']['error']} at {where[0]}")
    if not where:
        return ApiError(400, "body must be a JSON object, with Content-Type: application/json")
    # Of a field with several types there is one for each.
    said = [f"{path(one)}: {one['msg']}" for one in found[:3]]
    return ApiError(400, "; ".join(said), None, str(where[0]))


class _Gate:
    """Counts answers by status, and stops bodies that are too long or too slow."""

    def __init__(self, app: ASGIApp, metrics: Metrics, limit: int) -> None:
        self.app, self.metrics, self.limit = app, metrics, limit
        self.held = 0  # bytes of the bodies of all requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on one request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        length, more = 0, True
        deadline = asyncio.get_running_loop().time() + _BODY_SECONDS

        async def read() -> Message:
            nonlocal length, more
            if not more:
                return await receive()
            left = deadline - asyncio.get_running_loop().time()
            try:
                message = await asyncio.wait_for(receive(), left)
            except asyncio.TimeoutError:
                raise _refused_body(408, f"body must arrive within {_BODY_SECONDS} s") from None
            size = len(message.get("body", b""))
            length, more = length + size, message.get("more_body", False)
            self.held += size
            return message

        async def read_limited() -> Message:
            message = await read()
            if length > self.limit:
                # Clients look for an answer after their last byte; there may be none.
                while more and length < _DISCARDED * self.limit:
                    await read()
                raise _refused_body(413, f"body must be <= {self.limit} bytes")
            if self.held > _BODIES * self.limit:
                raise _refused_body(429, "too many long bodies at once: try again later")
            return message

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start":
                self.metrics.statuses[message["status"]] += 1
            await send(message)

        try:
            await self.app(scope, read_limited, answer)
        finally:
            self.held -= length


def _refused_body(status: int, message: str) -> ApiError:
    # The rest of the body would be read to no end.
    return ApiError(status, message, headers={"Connection": "close"})
