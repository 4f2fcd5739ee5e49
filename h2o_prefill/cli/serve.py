"""`h2o-prefill serve`: an OpenAI-compatible server."""

from __future__ import annotations

import contextlib
import signal
import socket
import threading
from pathlib import Path
from typing import Annotated, Any

import typer

from h2o_prefill.cli import options
from h2o_prefill.cli.console import quiet_libraries, say
from h2o_prefill.presets import DEFAULT_PRESET

_LIMITS = "Limits"
# What a request that runs gets to end, once the server is to stop.
_GRACE_SECONDS = 8


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
            help="Settings of requests that name none: a preset, optionally followed by changes of "
            "single fields, as in h2o,recall=4, or dense, the model's own attention.",
        ),
    ] = DEFAULT_PRESET,
    context: Annotated[
        int | None,
        typer.Option(
            "--context",
            min=2,
            help="Tokens of a prompt and its answer, at most; by default what the model takes.",
            rich_help_panel=_LIMITS,
        ),
    ] = None,
    queue: Annotated[
        int,
        typer.Option(
            min=0,
            help="Requests that may wait while one runs; more are refused with status 429.",
            rich_help_panel=_LIMITS,
        ),
    ] = 16,
    max_body: Annotated[
        int,
        typer.Option(
            "--max-body",
            metavar="KIB",
            min=1,
            help="Body of a request, at most; longer ones are refused with status 413.",
            rich_help_panel=_LIMITS,
        ),
    ] = 1024,
    prefix_cache: Annotated[
        int,
        typer.Option(
            "--prefix-cache",
            metavar="MIB",
            min=0,
            help="Memory for prompts and answers, from which prompts that begin with them go on.",
            rich_help_panel=_LIMITS,
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
        import uvicorn

        from h2o_prefill.serving.app import create_app
    except ModuleNotFoundError as error:
        raise ImportError(
            "serve needs FastAPI and uvicorn: pip install 'h2o_prefill[serve]'"
        ) from error
    from h2o_prefill.serving.protocol import parse_settings
    from h2o_prefill.serving.worker import Worker

    with quiet_libraries(), contextlib.ExitStack() as stack:
        config = parse_settings(preset)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listening = stack.enter_context(socket.create_server((host, port), family=family))
        network, tokenizer = options.load_network(model, dtype, threads, device)
        worker = Worker(
            network,
            tokenizer,
            config,
            context=context,
            queue=queue,
            prefix_bytes=prefix_cache << 20,
        )
        stack.callback(worker.close)
        # A path is nobody's business.
        name = Path(model).name if Path(model).exists() else model
        app = create_app(worker, name, max_body=max_body << 10, host=host)

        class Server(uvicorn.Server):
            """Tells the worker about the end."""

            def handle_exit(self, sig: int, frame: Any) -> None:
                worker.stop()
                timer = threading.Timer(_GRACE_SECONDS, worker.cut)
                timer.daemon = True
                timer.start()
                super().handle_exit(sig, frame)

        # The server has handlers of its own, and raises the signal for these again at its end.
        for number in (signal.SIGINT, signal.SIGTERM):
            stack.callback(signal.signal, number, signal.signal(number, lambda *_: None))
        address = f"[{host}]" if ":" in host else host
        say(f"{name} at http://{address}:{listening.getsockname()[1]}/v1, until Ctrl-C")
        settings = uvicorn.Config(
            app,
            log_level="warning",
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=_GRACE_SECONDS + 2,
        )
        Server(settings).run(sockets=[listening])
        say("stopped")
