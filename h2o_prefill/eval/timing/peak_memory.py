"""The memory that a call takes."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

# The profiler looks for a GPU when it starts, and says so where there is none.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")

from torch.profiler import ProfilerActivity, profile


def peak_bytes(call: Callable[[], Any]) -> int:
    """Return the most bytes of tensors that a call held at a time, its results included.

    Counted by PyTorch's allocator, so it is exact and repeatable. What is not a tensor is missing.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as run:
        call()
    events = [e for e in run.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak
