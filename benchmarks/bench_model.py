"""Prefill of a whole model: dense, dense in chunks, sparse, and without attention."""

from __future__ import annotations

from typing import Annotated

import torch
import typer
from common import options
from common.allocator import keep_freed_memory
from common.report import Report, ratio_fields
from common.timing import compare

from h2o_prefill.cli.options import ModelOption
from h2o_prefill.eval import load_model
from h2o_prefill.eval.inputs.prompts import random_ids

COLUMNS = {
    "N": "{length}",
    "dtype": "{dtype}",
    "threads": "{threads}",
    "variant": "{variant}",
    "seconds": "{seconds:.3f}",
    "tokens/s": "{tokens_per_second:.0f}",
    "against dense": "{speedup:.2f}x ({speedup_q1:.2f} to {speedup_q3:.2f})",
    "against dense in chunks": "{speedup_over_chunked:.2f}x",
}
LENGTHS = [2048, 4096, 8192]


def main(
    model: ModelOption = "smollm2-135m",
    json: options.JsonOption = None,
    threads: options.ThreadsOption = None,
    dtype: Annotated[
        str | None, typer.Option("--dtype", help="Comma-separated. Default: bfloat16,float32.")
    ] = None,
    lengths: options.LengthsOption = None,
    preset: options.PresetOption = "h2o",
    seconds: options.SecondsOption = 240.0,
    quick: options.QuickOption = False,
) -> None:
    """Time the prefill of a Hugging Face model, logits of the last token only.

    "no_attention" runs everything but attention: the ceiling of what sparse attention can reach.
    Lengths go up until the next one would take longer than --seconds.
    """
    # Loads transformers, which --help does not need.
    from common.variants import prefill_variants

    plan = options.make_plan(
        "model", json, threads, dtype or "bfloat16,float32", seconds=seconds, quick=quick
    )
    config = plan.config(preset)
    kept = {"freed_memory_kept": keep_freed_memory()}
    chosen = plan.numbers("--lengths", lengths, LENGTHS, [200])
    title = f"prefill of {model}, preset {preset}; no_attention is the ceiling"
    with Report(plan, title, COLUMNS, model=model, preset=preset, lengths=chosen, **kept) as report:
        for kind in plan.dtypes:
            network, _ = load_model(model, kind)
            for count in plan.threads:
                torch.set_num_threads(count)
                last: tuple[int, float] | None = None
                for length in chosen:
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
                            dtype=options.dtype_name(kind),
                            threads=count,
                            variant=name,
                            seconds=timings.median(name),
                            tokens_per_second=length / timings.median(name),
                            speedup_over_chunked=chunked,
                            rounds=timings.rounds,
                            **ratio_fields("speedup", timings.ratio("dense", name)),
                        )


app = options.command(main)

if __name__ == "__main__":
    app()
