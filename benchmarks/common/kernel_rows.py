"""One attention kernel beside its PyTorch counterpart, and the peaks of a CPU, as a row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from common import hardware_peak
from common.report import CASE_COLUMNS, ratio_fields, speedup_fields
from common.sdpa import Attention, backend_fields, fastest
from common.timing import compare, gpu_timer

COLUMNS = {
    **CASE_COLUMNS,
    "ms": "{milliseconds:.3f}",
    "GFLOP/s": "{gflops:.1f}",
    "FMA peak": "{peak_gflops:.1f}",
    "% of FMA peak": "{percent:.1f} ({percent_q1:.1f} to {percent_q3:.1f})",
    "% of bf16-dot peak": "{percent_bf16_dot:.1f}",
    "SDPA ms": "{sdpa_milliseconds:.3f}",
    "SDPA by": "{sdpa_backend}",
    "against SDPA": "{speedup:.2f}x ({speedup_q1:.2f} to {speedup_q3:.2f})",
}


def gpu_kernel_row(
    kernel: Callable[[], object], baselines: dict[str, Attention], flops: int, seconds: float
) -> dict[str, Any]:
    """Time a kernel on a GPU beside every backend of PyTorch's attention, in turns."""
    timings = compare({"kernel": kernel, **baselines}, seconds, timer=gpu_timer)
    best = fastest(timings, list(baselines))
    return {
        "milliseconds": 1e3 * timings.median("kernel"),
        "sdpa_milliseconds": 1e3 * timings.median(best),
        "gflops": flops / timings.median("kernel") / 1e9,
        "rounds": timings.rounds,
        **backend_fields(timings, list(baselines)),
        **ratio_fields("speedup", timings.ratio(best, "kernel")),
    }


def kernel_row(
    kernel: Callable[[], object],
    sdpa: Callable[[], object],
    flops: int,
    threads: int,
    seconds: float,
) -> dict[str, Any]:
    """Time a kernel, PyTorch's SDPA on the same problem, and the peaks, in turns."""
    peaks = {"fma": hardware_peak.fma(threads), "bf16_dot": hardware_peak.bf16_dot(threads)}
    calls: dict[str, Callable[[], object]] = {"kernel": kernel, "sdpa": sdpa}
    calls |= {name: peak.run for name, peak in peaks.items() if peak is not None}
    timings = compare(calls, seconds)
    row: dict[str, Any] = {
        "gflops": flops / timings.median("kernel") / 1e9,
        **speedup_fields(timings, "kernel", "sdpa"),
    }
    for name, peak in peaks.items():
        if peak is None:
            continue
        # Rate over rate: (flops / kernel time) / (peak flops / peak time).
        share = timings.ratio(name, "kernel")
        percents = [100 * flops / peak.amount * x for x in (share.value, share.q1, share.q3)]
        suffix = "" if name == "fma" else "_bf16_dot"
        row[f"peak_gflops{suffix}"] = peak.amount / timings.median(name) / 1e9
        row |= zip(
            (f"percent{suffix}", f"percent{suffix}_q1", f"percent{suffix}_q3"),
            percents,
            strict=True,
        )
    return row
