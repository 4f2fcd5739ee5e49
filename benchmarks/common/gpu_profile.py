"""What single kernels of a call take on a GPU, by PyTorch's profiler."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from torch.profiler import ProfilerActivity, profile

MAX_ROUNDS = 50
_WARM_UP = 3


def kernel_seconds(
    call: Callable[[], object], names: Sequence[str], seconds: float
) -> list[dict[str, float]]:
    """Return the seconds of the kernels whose names hold each of `names`, a dict for each round."""
    for _ in range(_WARM_UP):
        call()
    torch.cuda.synchronize()
    end = time.perf_counter() + seconds
    rounds: list[dict[str, float]] = []
    while len(rounds) < 2 or (len(rounds) < MAX_ROUNDS and time.perf_counter() < end):
        with profile(activities=[ProfilerActivity.CUDA]) as run:
            call()
            torch.cuda.synchronize()
        taken = dict.fromkeys(names, 0.0)
        for event in run.key_averages():
            for name in names:
                if name in event.key:
                    taken[name] += event.self_device_time_total / 1e6
        missing = [name for name in names if taken[name] == 0]
        if missing:
            raise RuntimeError(f"no kernel {', '.join(missing)} was launched")
        rounds.append(taken)
    return rounds
