"""Which forwards of enabled models run, in all threads: none is switched over half-way.

Transformers reads the name of the attention implementation in every layer. So a model is switched
back only when no forward of it runs any more; until then, no other one begins.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import FrameType

from h2o_prefill.hf.enabled_state import EnabledState

# How often to look for forwards that an interrupt has ended: no hook reports those.
_SECONDS_BETWEEN_LOOKS = 0.1

_changed = threading.Condition()
_running: list[Forward] = []
_closing: list[tuple[EnabledState, Callable[[], None]]] = []


@dataclass(frozen=True, eq=False)
class Forward:
    """One that runs."""

    enabled: EnabledState
    frame: FrameType | None
    thread: int


def begin(enabled: EnabledState, frame: FrameType | None, inside_another: bool) -> Forward | None:
    """Note that a forward begins."""
    with _changed:
        while not inside_another and _is_closing(enabled):
            _wait()
        if not enabled.on:
            return None
        forward = Forward(enabled, frame, threading.get_ident())
        _running.append(forward)
        return forward


def end(forward: Forward) -> None:
    """Note that a forward has ended."""
    with _changed:
        if forward in _running:
            _running.remove(forward)
        _close_idle()


def close(enabled: EnabledState, switch_off: Callable[[], None]) -> bool:
    """Switch a model back once no forward of it runs.

    Waits for those of other threads; but not inside of one, which would wait for itself.
    """
    with _changed:
        if enabled.on and not _is_closing(enabled):
            _closing.append((enabled, switch_off))
        _close_idle()
        mine = threading.get_ident()
        inside = any(x.enabled is enabled and x.thread == mine for x in _running)
        while not inside and _is_closing(enabled):
            _wait()
        return not _is_closing(enabled)


def switching() -> AbstractContextManager[bool]:
    """Return a lock that a thread holds while it switches a model over."""
    return _changed


def _is_closing(enabled: EnabledState) -> bool:
    return any(closing is enabled for closing, _ in _closing)


def _wait() -> None:
    _changed.wait(_SECONDS_BETWEEN_LOOKS)
    _close_idle()


def _is_executing(frame: FrameType | None) -> bool:
    """Return whether any thread executes a frame, and clear the local variables of one that ended.

    Walking the stacks of other threads would tell too, but CPython 3.11 crashes now and then where
    such a thread goes on meanwhile.
    """
    if frame is None:
        return False
    try:
        frame.clear()
    except RuntimeError:  # What clear() is documented to raise for a frame that is executing.
        return True
    return False


def _close_idle() -> None:
    """Switch back what is to be, and has no forward left."""
    if not _closing:
        return
    _running[:] = [x for x in _running if _is_executing(x.frame)]
    for closing in list(_closing):
        enabled, switch_off = closing
        if not any(x.enabled is enabled for x in _running):
            _closing.remove(closing)
            switch_off()
            _changed.notify_all()
