"""`h2o-prefill serve`: an OpenAI-compatible server."""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path
from typing import Annotated, Any

import typer

from h2o_prefill.cli import options
from h2o_prefill.cli.console import quiet_libraries, say
from h2o_prefill.generation.runs import DENSE


def _limit(name: str, least: int, use: str, metavar: str = "N") -> Any:
    return typer.Option(name, metavar=metavar, min=least, help=use, rich_help_panel="Limits")


def serve(
    model: options.ModelOption = "smollm2-135m",
    host: Annotated[
        str, typer.Option(help="Address to listen at; there is no authentication.")
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port to listen at, 0 for any that is free.")
    ] = 8000,
    preset: Annotated[
        str | None,
        options.preset_option(
            "Settings of requests that name none (dense: the model's own attention)"
        ),
    ] = None,
    context: Annotated[
        int | None,
        _limit("--context", 2, "Tokens of a prompt and its answer; default: the model's limit."),
    ] = None,
    queue: Annotated[
        int, _limit("--queue", 0, "Requests that may wait; others get the status 429.")
    ] = 16,
    max_body: Annotated[
        int | None,
        _limit("--max-body", 1, "Body of a request; default: 16 bytes for each token.", "KIB"),
    ] = None,
    prefix_cache: Annotated[
        int,
        _limit(
            "--prefix-cache",
            0,
            "Memory for prompts, reused by those that begin with all of one.",
            "MIB",
        ),
    ] = 1024,
    dtype: options.DtypeOption = "float32",
    device: options.DeviceOption = "cpu",
    threads: options.ThreadsOption = None,
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

    with quiet_libraries(), contextlib.ExitStack() as stack:
        if preset != DENSE:
            options.check_preset(preset)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listening = stack.enter_context(socket.create_server((host, port), family=family))
        network, tokenizer = options.load_network(model, dtype, threads, device)
        config = None if preset == DENSE else options.find_settings(network, preset)
        worker = Worker(network, tokenizer, config, context, queue, prefix_cache << 20)
        stack.callback(worker.close)
        # Folders of this machine are nobody's business.
        name = Path(model).name if Path(model).exists() else model
        app = create_app(worker, name, max_body and max_body << 10, host)

        shown = f"[{host}]" if ":" in host else host
        say(f"{name} at http://{shown}:{listening.getsockname()[1]}/v1, until Ctrl-C")
        run_server(app, worker, listening)
        say("stopped")
        if not worker.close(1):
            os._exit(0)  # Python would wait for a layer, which takes minutes in a large model.
