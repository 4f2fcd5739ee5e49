"""Prefill of a padded batch of prompts of several lengths, beside its rows one by one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer
from common import options
from common.allocator import keep_freed_memory
from common.report import Report, ratio_fields
from common.timing import compare

from h2o_prefill.cli.options import ModelOption
from h2o_prefill.eval import load_model, load_text
from h2o_prefill.eval.inputs.text import encode

COLUMNS = {
    "rows": "{row_lengths}",
    "dtype": "{dtype}",
    "threads": "{threads}",
    "variant": "{variant}",
    "seconds": "{seconds:.3f}",
    "tokens/s": "{tokens_per_second:.0f}",
    "against dense": "{speedup:.2f}x ({speedup_q1:.2f} to {speedup_q3:.2f})",
    "against rows": "{rows_speedup:.2f}x ({rows_speedup_q1:.2f} to {rows_speedup_q3:.2f})",
}
LENGTHS = [4096, 2500, 1500]


def main(
    model: ModelOption = "smollm2-135m",
    text_file: Annotated[
        Path | None,
        typer.Option("--text-file", metavar="FILE", help="The prompts. Default: Python's help."),
    ] = None,
    json: options.JsonOption = None,
    threads: options.ThreadsOption = None,
    dtype: Annotated[
        str | None, typer.Option("--dtype", help="Comma-separated. Default: bfloat16,float32.")
    ] = None,
    lengths: Annotated[
        str | None, typer.Option("--lengths", help="Tokens of each row, comma-separated.")
    ] = None,
    preset: options.PresetOption = "recommended",
    seconds: options.SecondsOption = 240.0,
    quick: options.QuickOption = False,
) -> None:
    """Time the prefill of prompts of several lengths, padded on the left, as `generate` does it.

    Logits of the last tokens only. Tokens are consecutive pieces of a text. "against rows" compares
    a batch with its rows one by one in the same way of attending, which need no padding.
    """
    # Loads transformers, which --help does not need.
    from common.variants import padded_variants

    plan = options.make_plan(
        "padded", json, threads, dtype or "bfloat16,float32", seconds=seconds, quick=quick
    )
    config = plan.config(preset)
    kept = {"freed_memory_kept": keep_freed_memory()}
    chosen = plan.numbers("--lengths", lengths, LENGTHS, [200, 90, 150])
    corpus = load_text("wikitext2" if text_file else "pydoc", text_file)
    title = f"prefill of a padded batch by {model}, preset {preset}, beside its rows one by one"
    facts = {"preset": preset, "lengths": chosen, "text": corpus.source, **kept}
    with Report(plan, title, COLUMNS, model=model, **facts) as report:
        for kind in plan.dtypes:
            network, tokenizer = load_model(model, kind)
            tokens = encode(tokenizer, corpus.text)
            if len(tokens) < sum(chosen):
                raise typer.BadParameter(
                    f"--lengths must be <= the text's {len(tokens)} tokens in all, got "
                    f"{sum(chosen)}"
                )
            rows = tokens[: sum(chosen)].split(chosen)
            for count in plan.threads:
                torch.set_num_threads(count)
                variants = padded_variants(network, rows, config)
                timings = compare(variants, plan.seconds)
                for name in variants:
                    alone = f"{name.removesuffix('_rows')}_rows"
                    report.add(
                        row_lengths="+".join(map(str, chosen)),
                        dtype=options.dtype_name(kind),
                        threads=count,
                        variant=name,
                        seconds=timings.median(name),
                        least_seconds=min(timings.seconds[name]),
                        tokens_per_second=sum(chosen) / timings.median(name),
                        rounds=timings.rounds,
                        **ratio_fields("speedup", timings.ratio("dense", name)),
                        **ratio_fields("rows_speedup", timings.ratio(alone, name)),
                    )


app = options.command(main)

if __name__ == "__main__":
    app()
