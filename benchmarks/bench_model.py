"""Prefill of a whole model: dense, dense in chunks, sparse, and without attention."""

from __future__ import annotations

import torch
from common import options
from common.allocator import keep_freed_memory
from common.plan import Lengths, Plan, dtype_name
from common.report import MODEL_COLUMNS, Report, rate_fields, ratio_fields
from common.timing import compare

from h2o_prefill.cli.options import ModelOption
from h2o_prefill.eval import load_model
from h2o_prefill.eval.inputs.prompts import random_ids

COLUMNS = {
    **MODEL_COLUMNS,
    "seconds": "{seconds:.3f}",
    "tokens/s": "{tokens_per_second:.0f}",
    "against dense": "{speedup:.2f}x ({speedup_q1:.2f} to {speedup_q3:.2f})",
    "against dense in chunks": "{speedup_over_chunked:.2f}x",
}
LENGTHS = Lengths(full=(2048, 4096, 8192), quick=(200,))


@options.benchmark("model", "preset", dtype="bfloat16,float32", lengths=LENGTHS, seconds=240.0)
def main(
    plan: Plan,
    model: ModelOption = "smollm2-135m",
) -> None:
    """Time the prefill of a Hugging Face model, logits of the last token only.

    "no_attention" runs everything but attention: the ceiling of what sparse attention can reach.
    Lengths go up until the next one would take longer than --seconds.
    """
    # Loads transformers, which --help does not need.
    from common.variants import prefill_variants

    config = plan.config()
    kept = {"freed_memory_kept": keep_freed_memory()}
    title = f"prefill of {model}, preset {plan.preset}; no_attention is the ceiling"
    with Report(
        plan, title, COLUMNS, model=model, preset=plan.preset, lengths=plan.lengths, **kept
    ) as report:
        for kind in plan.dtypes:
            network, _ = load_model(model, kind)
            for count in plan.threads:
                torch.set_num_threads(count)
                last: tuple[int, float] | None = None
                for length in plan.lengths:
                    if not plan.affords(length, last):
                        report.note(f"N >= {length} left out, they need a larger --seconds")
                        break
                    ids = random_ids(network, length, torch.Generator().manual_seed(0))
                    variants = prefill_variants(network, ids, config)
                    timings = compare(variants, plan.seconds)
                    last = (length, sum(timings.median(name) for name in variants))
                    for name in variants:
                        chunked = timings.ratio("dense_chunked", name).value
                        report.add(
                            length=length,
                            dtype=dtype_name(kind),
                            threads=count,
                            speedup_over_chunked=chunked,
                            **rate_fields(timings, name, length),
                            **ratio_fields("speedup", timings.ratio("dense", name)),
                        )


app = options.command(main)

if __name__ == "__main__":
    app()
