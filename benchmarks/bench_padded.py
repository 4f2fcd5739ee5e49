"""Prefill of a padded batch of prompts of several lengths, beside its rows one by one."""

from __future__ import annotations

from typing import Annotated

import torch
import typer
from common import options
from common.allocator import keep_freed_memory
from common.plan import Plan, dtype_name, parse_numbers
from common.report import MODEL_COLUMNS, Report, rate_fields, ratio_fields
from common.timing import compare

from h2o_prefill.cli.options import ModelOption
from h2o_prefill.eval import load_model, load_text
from h2o_prefill.eval.inputs.text import encode

COLUMNS = {
    "rows": "{row_lengths}",
    **MODEL_COLUMNS,
    "seconds": "{seconds:.3f}",
    "tokens/s": "{tokens_per_second:.0f}",
    "against dense": "{speedup:.2f}x ({speedup_q1:.2f} to {speedup_q3:.2f})",
    "against rows": "{rows_speedup:.2f}x ({rows_speedup_q1:.2f} to {rows_speedup_q3:.2f})",
}
LENGTHS = (4096, 2500, 1500)


@options.benchmark("padded", dtype="bfloat16,float32", preset="recommended", seconds=240.0)
def main(
    plan: Plan,
    model: ModelOption = "smollm2-135m",
    text_file: options.TextFileOption = None,
    lengths: Annotated[
        str | None, typer.Option("--lengths", help="Tokens of each row, comma-separated.")
    ] = None,
) -> None:
    """Time the prefill of prompts of several lengths, padded on the left, as `generate` does it.

    Logits of the last tokens only. Tokens are consecutive pieces of a text. "against rows" compares
    a batch with its rows one by one in the same way of attending, which need no padding.
    """
    # Loads transformers, which --help does not need.
    from common.variants import padded_variants

    config = plan.config()
    kept = {"freed_memory_kept": keep_freed_memory()}
    chosen = parse_numbers("--lengths", lengths, (200, 90, 150) if plan.quick else LENGTHS)
    corpus = load_text("wikitext2" if text_file else "pydoc", text_file)
    title = (
        f"prefill of a padded batch by {model}, preset {plan.preset}, beside its rows one by one"
    )
    facts = {"preset": plan.preset, "lengths": chosen, "text": corpus.source, **kept}
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
                        dtype=dtype_name(kind),
                        threads=count,
                        least_seconds=min(timings.seconds[name]),
                        **rate_fields(timings, name, sum(chosen)),
                        **ratio_fields("speedup", timings.ratio("dense", name)),
                        **ratio_fields("rows_speedup", timings.ratio(alone, name)),
                    )


app = options.command(main)

if __name__ == "__main__":
    app()
