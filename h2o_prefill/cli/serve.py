"""`h2o-prefill serve`: an OpenAI-compatible server."""

from __future__ import annotations

import contextlib
import logging
import signal
import socket
import threading
from pathlib import Path
from typing import Annotated, Any

import typer

from h2o_prefill.cli import options
from h2o_prefill.cli.console import quiet_libraries, say
from h2o_prefill.presets import DEFAULT_PRESET

# What the request that runs gets to end, once the server is to stop.
_GRACE_SECONDS = 8


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
        str,
        typer.Option(
            help="Settings of requests that name none: a preset with changes of single fields, as "
            "in h2o,recall=4, or dense, the model's own attention."
        ),
    ] = DEFAULT_PRESET,
    context: Annotated[
        int | None,
        _limit("--context", 2, "Tokens of a prompt and its answer; default: the model's limit."),
    ] = None,
    queue: Annotated[
        int, _limit("--queue", 0, "Requests that may wait; others get the status 429.")
    ] = 16,
    max_body: Annotated[
        int, _limit("--max-body", 1, "Body of a request; others get the status 413.", "KIB")
    ] = 1024,
    prefix_cache: Annotated[
        int, _limit("--prefix-cache", 0, "Memory for prompts that begin as one before.", "MIB")
    ] = 1024,
    dtype: options.DtypeOption = "float32",
    device: options.DeviceOption = "cpu",
    threads: options.ThreadsOption = None,
) -> None:
    """Serve a model at /v1/completions and /v1/chat/completions, as OpenAI's clients ask.

    One request runs at a time. Ctrl-C, or SIGTERM, lets it end, and refuses those that wait.
    """
    try:
        import uvicorn

        from h2o_prefill.serving.app import create_app, parse_settings
    except ModuleNotFoundError as error:
        needed = "serve needs FastAPI and uvicorn: pip install 'h2o_prefill[serve]'"
        raise ImportError(needed) from error
    from h2o_prefill.serving.worker import Worker

    with quiet_libraries(), contextlib.ExitStack() as stack:
        config = parse_settings(preset)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listening = stack.enter_context(socket.create_server((host, port), family=family))
        network, tokenizer = options.load_network(model, dtype, threads, device)
        worker = Worker(network, tokenizer, config, context, queue, prefix_cache << 20)
        stack.callback(worker.close)
        # Folders of this machine are nobody's business.
        name = Path(model).name if Path(model).exists() else model
        app = create_app(worker, name, max_body << 10, host)

        class Server(uvicorn.Server):
            """Tells the worker about the end."""

            def handle_exit(self, sig: int, frame: Any) -> None:
                worker.stop()
                timer = threading.Timer(_GRACE_SECONDS, worker.stop, (True,))
                timer.daemon = True
                timer.start()
                super().handle_exit(sig, frame)

        # It warns of clients that leave in the middle of an answer.
        logging.getLogger("asyncio").setLevel(logging.ERROR)
        # The server has handlers of its own, and raises the signal for these again at its end.
        for number in (signal.SIGINT, signal.SIGTERM):
            stack.callback(signal.signal, number, signal.signal(number, lambda *_: None))
        shown = f"[{host}]" if ":" in host else host
        say(f"{name} at http://{shown}:{listening.getsockname()[1]}/v1, until Ctrl-C")
        settings: Any = {"log_level": "warning", "access_log": False, "server_header": False}
        settings["timeout_graceful_shutdown"] = _GRACE_SECONDS + 2
        Server(uvicorn.Config(app, **settings)).run([listening])
        say("stopped")
