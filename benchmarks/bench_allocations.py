"""Memory: what sparse prefill holds beside the KV cache, and whether that grows over prompts."""

from __future__ import annotations

import random
from typing import Any

import torch.nn.functional as F
from common import options
from common.memory import allocated_bytes, first_call_peak_bytes, resident_bytes
from common.plan import Case, Lengths, Plan
from common.report import Report
from common.shapes import Heads
from torch import Tensor

from h2o_prefill.config import PrefillConfig
from h2o_prefill.eval.speed.peak_memory import peak_bytes
from h2o_prefill.functional import sparse_attention

COLUMNS = {
    "model": "{model}",
    "dtype": "{dtype}",
    "threads": "{threads}",
    "N": "{length}",
    "KV cache MB": "{kv_megabytes:.2f}",
    "scores + memory set MB": "{state_megabytes:.3f}",
    "% of KV cache": "{state_percent:.2f}",
    "workspace MB": "{workspace_megabytes:.2f}",
    "% of model's KV cache": "{workspace_percent:.2f}",
    "SDPA workspace MB": "{dense_workspace_megabytes:.2f}",
    "prompts": "{prompts}",
    "growth: allocated kB": "{allocated_growth_kilobytes:+.1f}",
    "resident kB": "{resident_growth_kilobytes:+.0f}",
}
LENGTHS = Lengths(full=(1024, 2048, 4096, 8192, 16384), quick=(64, 200))


@options.benchmark("allocations", "dtype", "shape", "preset", lengths=LENGTHS)
def main(plan: Plan) -> None:
    """Count the bytes of one layer's prefill beside those of dense SDPA, then run 100 prompts.

    State (scores and memory set) stays with the KV cache of its layer. The workspace lives for one
    call: layers share it one after another. Growth is from the middle of the run to its end, over
    prompts of random lengths.
    """
    config = plan.config()
    prompts = 10 if plan.quick else 100
    title = f"memory of one layer, S={config.chunk_size}, M={config.memory_size}"
    with Report(plan, title, COLUMNS, preset=plan.preset, lengths=plan.lengths) as report:
        for case in plan.cases():
            for length in plan.lengths:
                inputs = case.heads.qkv(length, case.dtype)
                report.add(**case.fields, length=length, **_one_prompt(case.heads, inputs, config))
            report.add(**case.fields, prompts=prompts, **_many_prompts(case, config, prompts))


def _one_prompt(
    heads: Heads, inputs: tuple[Tensor, Tensor, Tensor], config: PrefillConfig
) -> dict[str, float]:
    q, k, v = inputs
    kv_bytes = heads.kv_bytes(k.shape[2], k.dtype)
    out, state = sparse_attention(q, k, v, None, config)
    state_bytes = state.scores.nbytes + state.memory.nbytes
    # First, since PyTorch's profiler wants to begin in the main thread.
    dense = peak_bytes(
        lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    )
    peak = first_call_peak_bytes(lambda: sparse_attention(q, k, v, None, config))
    workspace = peak - out.nbytes - state_bytes
    return {
        "kv_megabytes": kv_bytes / 1e6,
        "state_megabytes": state_bytes / 1e6,
        "state_percent": 100 * state_bytes / kv_bytes,
        "workspace_megabytes": workspace / 1e6,
        "workspace_percent": 100 * workspace / (heads.layers * kv_bytes),
        "dense_workspace_megabytes": (dense - out.nbytes) / 1e6,
    }


def _many_prompts(case: Case, config: PrefillConfig, prompts: int) -> dict[str, Any]:
    chooser = random.Random(0)
    longest = 3 * config.chunk_size
    q, k, v = case.heads.qkv(longest, case.dtype)
    # Of their final length from the start: the lists must not grow with the prompts.
    resident: list[int | None] = [0] * prompts
    allocated: list[int | None] = [0] * prompts
    for prompt in range(prompts):
        # The longest first, so that what comes later needs nothing new.
        length = chooser.randint(1, longest) if prompt else longest
        sparse_attention(q[:, :, :length], k[:, :, :length], v[:, :, :length], None, config)
        resident[prompt] = resident_bytes()
        allocated[prompt] = allocated_bytes()
    return {
        "resident_bytes": resident,
        "allocated_bytes": allocated,
        "resident_growth_kilobytes": _growth(resident),
        "allocated_growth_kilobytes": _growth(allocated),
    }


def _growth(held: list[int | None]) -> float | None:
    """Return how far the highest of the second half is above that of the first, in kB."""
    half = len(held) // 2
    first = [x for x in held[:half] if x is not None]
    second = [x for x in held[half:] if x is not None]
    return (max(second) - max(first)) / 1e3 if first and second else None


app = options.command(main)

if __name__ == "__main__":
    app()
