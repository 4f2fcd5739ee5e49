"""Runs code in a child process, so that a crash, a hang or a memory bomb is an ordinary failure.

The child is forked: PyTorch is loaded already, and a new child takes milliseconds. hypothesis can
so shrink a call that crashes like any other that fails.
"""

import multiprocessing
import os
import resource
import signal
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

SECONDS = 60
MEMORY_BYTES = 6 << 30


class Sandbox:
    """A child process that calls a function for each item it is sent."""

    def __init__(self, function: Callable[[Any], None], limit_memory: bool) -> None:
        self.function, self.limit_memory = function, limit_memory
        self.child: Any = None

    def run(self, item: Any) -> None:
        """Call the function with an item."""
        if self.child is None:
            context = multiprocessing.get_context("fork")
            self.connection, theirs = context.Pipe()
            self.child = context.Process(target=self._serve, args=(theirs,), daemon=True)
            self.child.start()
            theirs.close()
        self.connection.send(item)
        try:
            alive = self.connection.poll(SECONDS)
            failure = self.connection.recv() if alive else f"no answer in {SECONDS} s"
        except EOFError:
            self.child.join()
            alive, code = False, self.child.exitcode
            how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            failure = f"the process died: {how}"
        if not alive:
            self.close()
        if failure is not None:
            raise AssertionError(failure)

    def close(self) -> None:
        """End the child."""
        if self.child is not None:
            self.child.kill()
            self.child.join()
            self.connection.close()
            self.child = None

    def _serve(self, connection: Any) -> None:
        if self.limit_memory:
            pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
            limit = pages * resource.getpagesize() + MEMORY_BYTES
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        # Prompts are saved wherever a text leads.
        os.chdir(tempfile.mkdtemp())
        while True:
            item = connection.recv()
            try:
                self.function(item)
            except Exception:
                connection.send(traceback.format_exc())
            else:
                connection.send(None)
