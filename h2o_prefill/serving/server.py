"""uvicorn, with an end that the worker knows of, and a bound on connections."""

from __future__ import annotations

import asyncio
import logging
import resource
import signal
import socket
import threading
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from h2o_prefill.serving.worker import Worker

# What the request that runs gets to end, once the server is to stop.
_GRACE_SECONDS = 8
# For the first byte of a connection.
_IDLE_SECONDS = 20
_FULL = b"HTTP/1.1 503 Service Unavailable\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"


class _Connection(H11Protocol):
    """Ends a connection that says nothing, and one too many: event loops fail without handles."""

    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.most:
            transport.write(_FULL)
            transport.close()
        wait = self.loop.call_later(_IDLE_SECONDS, self.timeout_keep_alive_handler)
        self.timeout_keep_alive_task = wait


class _Server(uvicorn.Server):
    worker: Worker

    def handle_exit(self, sig: int, frame: Any) -> None:
        self.worker.stop()
        timer = threading.Timer(_GRACE_SECONDS, self.worker.stop, (True,))
        timer.daemon = True
        timer.start()
        super().handle_exit(sig, frame)


def run_server(app: Any, worker: Worker, listening: socket.socket) -> None:
    """Serve an app, of a worker, until SIGINT or SIGTERM."""
    # asyncio warns of clients that leave in the middle of an answer.
    logging.getLogger("asyncio").setLevel(logging.ERROR)
    settings: Any = {"log_level": "warning", "access_log": False, "server_header": False}
    # asyncio accepts a backlog, or two, before it looks at one of the connections.
    settings |= {"timeout_graceful_shutdown": _GRACE_SECONDS + 2, "backlog": _Connection.most // 4}
    server = _Server(uvicorn.Config(app, http=_Connection, **settings))
    server.worker = worker
    # It has handlers of its own, and raises the signal for these again at its end.
    before = [(n, signal.signal(n, lambda *_: None)) for n in (signal.SIGINT, signal.SIGTERM)]
    try:
        server.run([listening])
    finally:
        for number, handler in before:
            signal.signal(number, handler)
