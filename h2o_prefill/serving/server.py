"""uvicorn in a thread, with an end that the worker knows of, and bounds on its connections."""

from __future__ import annotations

import asyncio
import logging
import resource
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from h2o_prefill.serving.worker import Worker

# What the request that runs gets to end, once the server is to stop.
_GRACE_SECONDS = 8
# For the header of a request, from the connection or the answer before it on.
_HEADER_SECONDS = 20
_FULL = b"HTTP/1.1 503 Service Unavailable\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"


class _Connection(H11Protocol):
    """Ends connections without a request in time, and one too many: event loops need handles."""

    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.most:
            transport.write(_FULL)
            transport.close()
        deadline = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)
        self.timeout_keep_alive_task = deadline

    def data_received(self, data: bytes) -> None:
        # uvicorn's deadline for the next request ends with any byte; this one with a whole header.
        deadline, self.timeout_keep_alive_task = self.timeout_keep_alive_task, None
        super().data_received(data)
        if deadline is not None and self.conn.our_state in (h11.SEND_RESPONSE, h11.SEND_BODY):
            deadline.cancel()
        else:
            self.timeout_keep_alive_task = deadline


def make_server(app: Any) -> uvicorn.Server:
    """Return the HTTP server of an app."""
    # asyncio warns of clients that leave in the middle of an answer.
    logging.getLogger("asyncio").setLevel(logging.ERROR)
    settings: Any = {"log_level": "warning", "access_log": False, "server_header": False}
    settings |= {"ws": "none", "timeout_keep_alive": _HEADER_SECONDS}
    # asyncio accepts a backlog, or two, before it looks at one of the connections.
    settings |= {"timeout_graceful_shutdown": _GRACE_SECONDS + 2, "backlog": _Connection.most // 4}
    return uvicorn.Server(uvicorn.Config(app, http=_Connection, **settings))


def run_server(app: Any, worker: Worker, listening: socket.socket) -> None:
    """Serve an app, of a worker, until SIGINT or SIGTERM; a second SIGINT ends what still runs."""
    server = make_server(app)
    before = [(n, signal.signal(n, server.handle_exit)) for n in (signal.SIGINT, signal.SIGTERM)]
    # In a thread it handles no signals by itself: the worker has to know of them first.
    with ThreadPoolExecutor(1, "server") as pool:
        served = pool.submit(server.run, [listening])
        while not (server.should_exit or served.done()):
            time.sleep(0.1)
        worker.stop()
        wait([served], _GRACE_SECONDS)
        worker.stop(cut=True)
    for number, handler in before:
        signal.signal(number, handler)
    served.result()
