"""A program in a process and an environment of its own, which answers one call at a time.

Programs need other versions of the same packages, so this imports none. In the process, `python -m
common.worker`, a class is made and its methods are called; arguments and results are pickled.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

_HERE = Path(__file__).parents[1]


class Worker:
    """A process with an object of a class; its attributes are methods to call there."""

    def __init__(self, python: Path, loader: str, arguments: Mapping[str, Any]) -> None:
        """Start `loader`, "module:class", with `arguments` in the environment of `python`."""
        self.begin = time.perf_counter()
        paths, environment = [str(_HERE)], dict(os.environ)
        if python != Path(sys.executable):
            # These sources, in this path or in this folder, may be for another PyTorch than there.
            environment["PYTHONSAFEPATH"] = "1"
        elif environment.get("PYTHONPATH"):
            paths.append(environment["PYTHONPATH"])
        self._process = subprocess.Popen(
            [python, "-m", "common.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment | {"PYTHONPATH": os.pathsep.join(paths)},
        )
        self._loader = loader
        self._ask((loader, dict(arguments)))

    def __getattr__(self, method: str) -> Callable[..., Any]:
        return lambda *arguments: self._ask((method, arguments))

    def close(self) -> None:
        """End the process, without what its program does at an end."""
        self._process.kill()
        self._process.wait()

    def _ask(self, request: Any) -> Any:
        assert self._process.stdin and self._process.stdout
        try:
            # It is stopped between calls: threads that wait for work would slow other programs.
            self._process.send_signal(signal.SIGCONT)
            pickle.dump(request, self._process.stdin)
            self._process.stdin.flush()
            done, answer = pickle.load(self._process.stdout)
            self._process.send_signal(signal.SIGSTOP)
        except (EOFError, BrokenPipeError):
            done, answer = False, f"its process ended with {self._process.wait()}"
        if not done:
            raise RuntimeError(f"{self._loader}: {answer}")
        return answer


def peak_megabytes() -> float:
    """Return the most memory that this process had in RAM, in 10^6 bytes (Linux).

    `getrusage` would also count the process that started this one.
    """
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024 / 1e6
    raise RuntimeError("no VmHWM in /proc/self/status")


# What every process answers.
_FACTS: dict[str, Callable[..., Any]] = {
    "cpu_seconds": time.process_time,
    "peak_megabytes": peak_megabytes,
    "version": importlib.metadata.version,
}


def _serve() -> None:
    # What programs print must not get between the answers.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    program: Any = None
    while True:
        try:
            name, arguments = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        try:
            if program is None:
                module, _, loader = name.partition(":")
                program = getattr(importlib.import_module(module), loader)(**arguments)
                answer = (True, None)
            else:
                call = _FACTS.get(name) or getattr(program, name)
                answer = (True, call(*arguments))
        except Exception as error:  # of any program
            answer = (False, f"{type(error).__name__}: {error}")
        pickle.dump(answer, answers)
        answers.flush()


if __name__ == "__main__":
    _serve()
