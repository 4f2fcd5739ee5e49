"""Decoding after a long prompt: the cache of an enabled model beside transformers' DynamicCache."""

from __future__ import annotations

import torch
import typer
from common import options
from common.allocator import keep_freed_memory
from common.plan import Lengths, Plan, dtype_name
from common.report import MODEL_COLUMNS, Report, decoding_fields, ratio_fields
from common.timing import compare

from h2o_prefill.cli.options import ModelOption
from h2o_prefill.eval import load_model, load_text
from h2o_prefill.eval.inputs.text import encode

COLUMNS = {
    **MODEL_COLUMNS,
    "ms/token": "{milliseconds:.2f}",
    "tokens/s": "{tokens_per_second:.1f}",
    "against stock": "{speedup:.2f}x ({speedup_q1:.2f} to {speedup_q3:.2f})",
}
LENGTHS = Lengths(full=(8000,), quick=(200,))
STEPS = 16


@options.benchmark(
    "decode", dtype="bfloat16,float32", lengths=LENGTHS, preset="recommended", seconds=30.0
)
def main(
    plan: Plan,
    model: ModelOption = "smollm2-135m",
    text_file: options.TextFileOption = None,
) -> None:
    """Time greedy decoding after a prompt of real text, one token a call, over the whole history.

    "stock" is the model with its DynamicCache, which copies the history for every token; "enabled"
    is the enabled one, whose cache does not. Prefill is not timed.
    """
    # Loads transformers, which --help does not need.
    from common.variants import decode_variants

    config = plan.config()
    kept = {"freed_memory_kept": keep_freed_memory()}
    corpus = load_text("wikitext2" if text_file else "pydoc", text_file)
    title = f"decoding by {model} after a prompt, preset {plan.preset}"
    facts = {
        "preset": plan.preset,
        "lengths": plan.lengths,
        "steps": STEPS,
        "text": corpus.source,
        **kept,
    }
    with Report(plan, title, COLUMNS, model=model, **facts) as report:
        for kind in plan.dtypes:
            network, tokenizer = load_model(model, kind)
            tokens = encode(tokenizer, corpus.text)
            for length in plan.lengths:
                if len(tokens) < length:
                    raise typer.BadParameter(
                        f"--lengths must be <= the text's {len(tokens)} tokens, got {length}"
                    )
                variants = decode_variants(network, tokens[None, :length], config, STEPS)
                for count in plan.threads:
                    torch.set_num_threads(count)
                    timings = compare(variants, plan.seconds)
                    for name in variants:
                        report.add(
                            length=length,
                            dtype=dtype_name(kind),
                            threads=count,
                            variant=name,
                            **decoding_fields(timings, name, STEPS),
                            **ratio_fields("speedup", timings.ratio("stock", name)),
                        )


app = options.command(main)

if __name__ == "__main__":
    app()
