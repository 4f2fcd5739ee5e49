"""The routes of the server, and how errors and streams go out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from fastapi import Depends, FastAPI
from pydantic import ValidationError
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse

from h2o_prefill.generation.prompts import encode_prompt
from h2o_prefill.generation.runs import DENSE
from h2o_prefill.presets import chosen_config
from h2o_prefill.serving.protocol import Answer, ApiError, ChatRequest, CompletionRequest, Finish
from h2o_prefill.serving.worker import Job, Worker, settings_error

# For a body to arrive.
_BODY_SECONDS = 20.0
# Bodies of the largest size that all requests together may hold.
_BODIES = 32
# How much of a body is read, and dropped, before the answer that it is too long: clients look for
# one after their last byte. There may be none.
_DISCARDED = 16 << 20
# Of a body, by default, for each token of a prompt and its answer.
_TOKEN_BYTES = 16
# Of /v1/completions, as OpenAI's; answers of a chat may fill the context.
_COMPLETION_TOKENS = 16
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


def create_app(
    worker: Worker, name: str, max_body: int | None = None, host: str = "127.0.0.1"
) -> FastAPI:
    """Return the server of a worker's model, which it calls `name`.

    `max_body` is the longest body of a request in bytes. On a `host` of loopback, requests for
    other hosts are refused: they come from a web page whose name leads to this machine.
    """

    async def check_host(request: Request) -> None:
        if host in _LOOPBACK and request.url.hostname not in _LOOPBACK:
            raise ApiError(403, f"this server answers at {host} alone")

    app = FastAPI(openapi_url=None, dependencies=[Depends(check_host)])
    requests = _Requests(worker, name, max_body or _TOKEN_BYTES * worker.context)

    def answer(body: Any, status: int = 200, headers: Any = None) -> Response:
        worker.counts[f'requests_total{{status="{status}"}}'] += 1
        return JSONResponse(body, status, headers)

    @app.exception_handler(HTTPException)
    async def refuse(_: Request, error: HTTPException) -> Response:
        known = error if isinstance(error, ApiError) else ApiError(error.status_code, error.detail)
        return answer(known.body(), known.status_code, error.headers)

    @app.get("/health")
    async def health() -> Response:
        said, status = ("stopping", 503) if worker.stopping else ("ok", 200)
        return JSONResponse({"status": said}, status)

    @app.get("/metrics")
    async def metrics() -> Response:
        lines = [f"h2o_prefill_{key} {number}\n" for key, number in worker.numbers().items()]
        return PlainTextResponse("".join(lines), media_type="text/plain; version=0.0.4")

    @app.get("/v1/models")
    @app.get("/v1/models/{model:path}")
    async def models(model: str | None = None) -> Response:
        requests.check_model(model)
        known = {"id": name, "object": "model", "created": 0, "owned_by": "h2o_prefill"}
        return JSONResponse({"object": "list", "data": [known]} if model is None else known)

    @app.post("/v1/completions")
    @app.post("/v1/chat/completions")
    async def respond(request: Request) -> Response:
        body, job = await requests.take(request)
        worker.submit(job)
        events = _events(job, request)
        # Errors before the first token have their own status, in a stream too.
        first = await anext(events)
        form = Answer(name, isinstance(body, ChatRequest))
        if body.stream:
            worker.counts['requests_total{status="200"}'] += 1
            stream = form.stream(first, events, body.stream_options.get("include_usage", False))
            return StreamingResponse(stream, media_type="text/event-stream")
        *pieces, finish = [first, *[piece async for piece in events]]
        assert isinstance(finish, Finish)
        text = form.body("".join(map(str, pieces)), finish.reason)
        return answer({**text, "usage": finish.usage})

    return app


class _Requests:
    """Bodies of requests, which together may hold so much memory, and what they ask for."""

    def __init__(self, worker: Worker, name: str, max_body: int) -> None:
        self.worker, self.name, self.max_body = worker, name, max_body
        self.held = 0  # bytes of all bodies
        self.encoding = asyncio.Lock()  # which takes many times the memory of a text

    def check_model(self, model: str | None) -> None:
        if model not in (None, self.name):
            message = f"model {model!r} is not here, only {self.name!r}"
            raise ApiError(404, message, code="model_not_found", param="model")

    async def take(self, request: Request) -> tuple[CompletionRequest | ChatRequest, Job]:
        """Return what a client asks for, and the job; ApiError if there can be none."""
        kind = ChatRequest if "/chat/" in request.url.path else CompletionRequest
        content = bytearray()
        try:
            await asyncio.wait_for(self.read(request, content), _BODY_SECONDS)
            # A web page of another origin cannot send this type.
            media = request.headers.get("content-type", "").partition(";")[0].strip()
            if media.lower() != "application/json":
                raise ApiError(400, "body must be JSON, with Content-Type: application/json")
            self.worker.check_open()
            body = kind.model_validate_json(bytes(content))
            self.check_model(body.model)
            async with self.encoding:
                return body, await run_in_threadpool(_make_job, self.worker, body)
        except asyncio.TimeoutError:
            late = f"body must arrive within {_BODY_SECONDS:g} s"
            raise ApiError(408, late, {"Connection": "close"}) from None
        except ClientDisconnect:
            raise ApiError(499, "the client left") from None
        except ValidationError as error:
            raise _as_api_error(error) from None
        finally:
            self.held -= len(content)

    async def read(self, request: Request, content: bytearray) -> None:
        """Add the body of a request to `content`; ApiError if there is too much."""
        length = 0
        async for piece in request.stream():
            length += len(piece)
            if length <= self.max_body:
                content += piece
                self.held += len(piece)
            if self.held > _BODIES * self.max_body:
                raise ApiError(429, "too many long bodies at once", {"Connection": "close"})
            if length > max(_DISCARDED, self.max_body):
                break
        if length > self.max_body:
            message = f"body must be <= {self.max_body} bytes"
            raise ApiError(413, message, {"Connection": "close"})


def _make_job(worker: Worker, body: CompletionRequest | ChatRequest) -> Job:
    """Return the job of a request; ApiError if there can be none."""
    wanted, settings = body.max_tokens, body.h2o_prefill.get("settings")
    if isinstance(body, ChatRequest):
        param, ids = "messages", _chat_ids(worker.tokenizer, body)
        wanted = body.max_completion_tokens or wanted or max(worker.context - len(ids), 1)
    else:
        param, wanted = "prompt", wanted or _COMPLETION_TOKENS
        ids = body.only_prompt()
        if isinstance(ids, str):
            ids = encode_prompt(worker.tokenizer, ids, chat=False)[0].tolist()
    vocabulary = worker.model.get_input_embeddings().weight.shape[0]
    if not ids or not 0 <= min(ids) <= max(ids) < vocabulary:
        rule = f"be token ids >= 0 and < {vocabulary}" if ids else "not be empty"
        raise ApiError(400, f"{param} must {rule}", param=param)
    if len(ids) + wanted > worker.context:
        message = f"{param} of {len(ids)} tokens and {wanted} new ones must be <= {worker.context}"
        raise ApiError(400, message, code="context_length_exceeded", param=param)
    config = worker.config if settings is None else None
    try:
        if settings not in (None, DENSE):
            config = chosen_config(settings)
    except ValueError as error:
        raise settings_error(error) from None
    stops = [body.stop] if isinstance(body.stop, str) else body.stop
    return Job(ids, wanted, body.sampling(), stops, config)


def _chat_ids(tokenizer: Any, body: ChatRequest) -> list[int]:
    messages = [message.for_template() for message in body.messages]
    try:
        encoded = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=True
        )
    except Exception as error:  # no template, or one that refuses, by any class of error
        raise ApiError(400, f"chat template: {error}", param="messages") from None
    return list(encoded["input_ids"])


async def _events(job: Job, request: Request) -> AsyncIterator[str | Finish]:
    """Yield what the worker says of a job, which ends when the client leaves."""

    async def watch() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        job.cancel()
        job.tell(ApiError(499, "the client left"))

    watcher = asyncio.create_task(watch())
    try:
        while True:
            told = await job.events.get()
            if isinstance(told, ApiError):
                raise told
            yield told
            if isinstance(told, Finish):
                return
    finally:
        watcher.cancel()
        job.cancel()


def _as_api_error(error: ValidationError) -> ApiError:
    """Return what is wrong with a body; of a field with several types, for each."""
    found = error.errors(include_url=False, include_input=False)[:3]
    said = [f"{'.'.join(map(str, one['loc'])) or 'body'}: {one['msg']}" for one in found]
    about = {"param": str(found[0]["loc"][0])} if found[0]["loc"] else {}
    return ApiError(400, "; ".join(said), **about)
