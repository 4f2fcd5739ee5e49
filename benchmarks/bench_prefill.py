"""Prefill of one layer: the whole operator against dense causal attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from common import options
from common.plan import Case, Lengths, Plan
from common.report import CASE_COLUMNS, Report, ratio_fields
from common.sdpa import backend_fields, fastest, gpu_attention, sdpa
from common.timing import compare

from h2o_prefill.config import PrefillConfig
from h2o_prefill.eval.attention_flops import dense_dot_products, sparse_dot_products
from h2o_prefill.functional import sparse_attention

COLUMNS = {
    **CASE_COLUMNS,
    "N": "{length}",
    "SDPA ms": "{dense_milliseconds:.2f}",
    "SDPA GFLOP/s": "{dense_gflops:.0f}",
    "SDPA by": "{sdpa_backend}",
    "sparse ms": "{sparse_milliseconds:.2f}",
    "sparse GFLOP/s": "{sparse_gflops:.0f}",
    "speedup": "{speedup:.2f} ({speedup_q1:.2f} to {speedup_q3:.2f})",
    "flop ratio": "{flop_ratio:.2f}",
    "speedup / flop ratio": "{speedup_by_flops:.2f}",
}
LENGTHS = Lengths(
    full=(1, 64, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536), quick=(1, 64, 200)
)


@options.benchmark("prefill", "dtype", "shape", "preset", "device", lengths=LENGTHS, seconds=30.0)
def main(plan: Plan) -> None:
    """Time the whole operator against torch SDPA (causal, enable_gqa) over the same tokens.

    On a GPU every backend of SDPA is timed, and the fastest is the baseline. Lengths go up until
    the next one would take longer than --seconds.
    """
    config = plan.config()
    title = (
        f"chunked_sparse_attention, S={config.chunk_size}, M={config.memory_size}: "
        "beside torch SDPA (causal, enable_gqa)"
    )
    with Report(plan, title, COLUMNS, preset=plan.preset, lengths=plan.lengths) as report:
        for case in plan.cases():
            last: tuple[int, float] | None = None
            for length in plan.lengths:
                if not plan.affords(length, last):
                    report.note(f"N >= {length} left out, they need a larger --seconds")
                    break
                row = _row(case, length, config, plan.seconds)
                report.add(**case.fields, **row)
                # Of long prompts alone: a short one is mostly overhead, which does not grow.
                if length >= 512:
                    dense = row.get("sdpa_backends_milliseconds", {"": row["dense_milliseconds"]})
                    milliseconds = sum(dense.values()) + row["sparse_milliseconds"]
                    last = (length, milliseconds / 1e3)


def _row(case: Case, length: int, config: PrefillConfig, seconds: float) -> dict[str, Any]:
    q, k, v = case.qkv(length)
    dense_calls: dict[str, Callable[[], object]] = {"dense": sdpa(q, k, v, causal=True)}
    if case.on_gpu:
        dense_calls = dict(gpu_attention(q, k, v, causal=True))
    timings = compare(
        {**dense_calls, "sparse": lambda: sparse_attention(q, k, v, None, config)},
        seconds,
        timer=case.timer,
    )
    baseline = fastest(timings, list(dense_calls))
    dense, sparse = timings.median(baseline), timings.median("sparse")
    speedup = timings.ratio(baseline, "sparse")
    flops = case.heads.attention_flops(dense_dot_products(length))
    sparse_flops = case.heads.attention_flops(sparse_dot_products(length, config))
    flop_ratio = flops / sparse_flops
    return {
        "length": length,
        "dense_milliseconds": 1e3 * dense,
        "dense_gflops": flops / dense / 1e9,
        "sparse_milliseconds": 1e3 * sparse,
        "sparse_gflops": sparse_flops / sparse / 1e9,
        **ratio_fields("speedup", speedup),
        "flop_ratio": flop_ratio,
        "speedup_by_flops": speedup.value / flop_ratio,
        "rounds": timings.rounds,
        **(backend_fields(timings, list(dense_calls)) if case.on_gpu else {}),
    }


app = options.command(main)

if __name__ == "__main__":
    app()
