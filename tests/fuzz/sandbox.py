"""Runs code in a child process, so that a crash, a hang or a memory bomb is an ordinary failure.

The child is forked: PyTorch is loaded already, and a new child takes milliseconds. hypothesis can
so shrink a call that crashes like any other that fails.
"""

from __future__ import annotations

import multiprocessing
import resource
import signal
import traceback
from collections.abc import Callable
from typing import Any

SECONDS = 60
MEMORY_BYTES = 6 << 30


class Sandbox:
    """A child process that calls a function for each item it is sent."""

    def __init__(self, function: Callable[[Any], None], limit_memory: bool) -> None:
        self.function = function
        self.limit_memory = limit_memory
        self.child: Any = None

    def run(self, item: Any) -> None:
        """Call the function with an item."""
        if self.child is None:
            self._start()
        self.connection.send(item)
        if not self.connection.poll(SECONDS):
            self.close()
            raise AssertionError(f"no answer in {SECONDS} s")
        try:
            failure = self.connection.recv()
        except EOFError:
            self.child.join()
            code = self.child.exitcode
            self.close()
            how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            raise AssertionError(f"the process died: {how}") from None
        if failure is not None:
            raise AssertionError(failure)

    def _start(self) -> None:
        context = multiprocessing.get_context("fork")
        self.connection, theirs = context.Pipe()
        self.child = context.Process(target=self._serve, args=(theirs,), daemon=True)
        self.child.start()
        theirs.close()

    def close(self) -> None:
        """End the child."""
        if self.child is None:
            return
        self.child.kill()
        self.child.join()
        self.connection.close()
        self.child = None

    def _serve(self, connection: Any) -> None:
        if self.limit_memory:
            used = _address_space()
            resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES, used + MEMORY_BYTES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        while True:
            item = connection.recv()
            try:
                self.function(item)
            except Exception:
                connection.send(traceback.format_exc())
            else:
                connection.send(None)


def _address_space() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[0]) * resource.getpagesize()
