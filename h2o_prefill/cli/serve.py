"""`h2o-prefill serve`: an OpenAI-compatible server."""

from __future__ import annotations

import contextlib
import os
import socket
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from h2o_prefill.cli import console, options
from h2o_prefill.generation.runs import DENSE

_limit = partial(typer.Option, rich_help_panel="Limits")


@options.command
def serve(
    model: options.ModelOptions,
    host: str = typer.Option("127.0.0.1", help="Address to listen at; there is no authentication."),
    port: int = typer.Option(
        8000, min=0, max=65535, help="Port to listen at, 0 for any that is free."
    ),
    preset: Annotated[
        str | None,
        options.preset_option(
            "Settings of requests that name none (dense: the model's own attention)"
        ),
    ] = None,
    context: int | None = _limit(
        None,
        metavar="N",
        min=2,
        help="Tokens of a prompt and its answer; default: the model's limit.",
    ),
    queue: int = _limit(
        16, metavar="N", min=0, help="Requests that may wait; others get the status 429."
    ),
    max_body: int | None = _limit(
        None, metavar="KIB", min=1, help="Body of a request; default: 16 bytes for each token."
    ),
    prefix_cache: int = _limit(
        1024,
        metavar="MIB",
        min=0,
        help="Memory for prompts, reused by those that begin with all of one.",
    ),
) -> None:
    """Serve a model at /v1/completions and /v1/chat/completions, as OpenAI's clients ask.

    One request runs at a time. Ctrl-C, or SIGTERM, lets it end, and refuses those that wait.
    """
    try:
        from h2o_prefill.serving.app import create_app
        from h2o_prefill.serving.server import run_server
    except ModuleNotFoundError as error:
        needed = "serve needs FastAPI and uvicorn: pip install 'h2o_prefill[serve]'"
        raise ImportError(needed) from error
    from h2o_prefill.serving.worker import Worker

    settings = None if preset == DENSE else options.SettingsOptions(preset)
    with contextlib.ExitStack() as stack:
        if settings is not None:
            settings.check()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listening = stack.enter_context(socket.create_server((host, port), family=family))
        network, tokenizer = model.load()
        config = None if settings is None else settings.find()
        worker = Worker(network, tokenizer, config, context, queue, prefix_cache << 20)
        stack.callback(worker.close)
        # Folders of this machine are nobody's business.
        name = Path(model.model).name if Path(model.model).exists() else model.model
        app = create_app(worker, name, max_body and max_body << 10, host)

        shown = f"[{host}]" if ":" in host else host
        console.stderr.print(
            f"{name} at http://{shown}:{listening.getsockname()[1]}/v1, until Ctrl-C"
        )
        run_server(app, worker, listening)
        console.stderr.print("stopped")
        if not worker.close(1):
            os._exit(0)  # Python would wait for a layer, which takes minutes in a large model.
