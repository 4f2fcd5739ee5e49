"""Ctrl-C that is not lost: an exception may be, where a library calls Python from C."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType


class _Pressed:
    """Whether Ctrl-C has been pressed in this command."""

    value = False


def check_interrupt() -> None:
    """Raise KeyboardInterrupt once more if Ctrl-C has been pressed: the command is still going on.

    Libraries that call Python code from C, such as attribute lookups of PyTorch, may clear any
    error of it, and the exception of Ctrl-C rises wherever the interpreter happens to be.
    """
    if _Pressed.value:
        raise KeyboardInterrupt


@contextlib.contextmanager
def interrupts_remembered() -> Iterator[None]:
    """Let `check_interrupt` know of Ctrl-C in a block, where it has its usual meaning."""
    _Pressed.value = False
    usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    # Others may not set handlers.
    if not usual or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, _remember)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _remember(signum: int, frame: FrameType | None) -> None:
    _Pressed.value = True
    signal.default_int_handler(signum, frame)
