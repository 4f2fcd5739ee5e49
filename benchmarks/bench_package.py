"""A model exported as a package beside the same model in transformers: prefill and decoding."""

from __future__ import annotations

import importlib.util
import tempfile
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from common import options
from common.allocator import keep_freed_memory
from common.plan import Lengths, Plan, dtype_name
from common.report import MODEL_COLUMNS, Report, rate_fields, ratio_fields
from common.timing import compare

from h2o_prefill.cli.options import ModelOption
from h2o_prefill.eval import load_model, load_text
from h2o_prefill.eval.inputs.text import encode
from h2o_prefill.package import PrefillPackage

COLUMNS = {
    **MODEL_COLUMNS,
    "seconds": "{seconds:.4f}",
    "tokens/s": "{tokens_per_second:.1f}",
    "package": "{speedup:.2f}x ({speedup_q1:.2f} to {speedup_q3:.2f})",
}
LENGTHS = Lengths(full=(4096, 8000), quick=(200,))
STEPS = 16


@options.benchmark("package", dtype="bfloat16", lengths=LENGTHS, preset="recommended", seconds=60.0)
def main(
    plan: Plan,
    model: ModelOption = "smollm2-135m",
    int8: Annotated[
        bool, typer.Option("--int8", help="Add int8 linear layers, compiled: needs torchao.")
    ] = False,
) -> None:
    """Time prefill and greedy decoding by a package and by transformers, on real text.

    "eager" is the enabled model, "compiled" the same by torch.compile, "compiled_int8" that with
    linear layers rounded by torchao, "dense" the model without h2o_prefill, "decode_stock" its
    decoding with a DynamicCache. "package" says how many times as fast the package is as each of
    them. The package is exported first, and a model compiled for each length, which takes minutes.
    """
    from common.packaged_ways import package_decoder, prefill_package
    from common.variants import compiled_prefill, decode_variants, int8_twin, prefill_variants

    from h2o_prefill.eval.inputs.packages import write_package

    if int8 and importlib.util.find_spec("torchao") is None:
        raise typer.BadParameter("--int8 needs torchao: pip install torchao")
    config = plan.config()
    kept = {"freed_memory_kept": keep_freed_memory()}
    corpus = load_text("pydoc")
    facts = {
        "preset": plan.preset,
        "lengths": plan.lengths,
        "steps": STEPS,
        "text": corpus.source,
        **kept,
    }
    with (
        tempfile.TemporaryDirectory() as folder,
        Report(plan, f"{model} as a package", COLUMNS, model=model, **facts) as report,
    ):
        for kind in plan.dtypes:
            network, tokenizer = load_model(model, kind)
            tokens = encode(tokenizer, corpus.text)[None]
            path = Path(folder) / f"{dtype_name(kind)}.pt2"
            write_package(network, tokenizer, config, max(plan.lengths) + STEPS, path)
            package = PrefillPackage(path)
            for length in plan.lengths:
                ids = tokens[:, :length].contiguous()
                eager = prefill_variants(network, ids, config)
                prefill = {
                    "package": partial(prefill_package, package, ids),
                    "compiled": compiled_prefill(network, ids, config),
                    "eager": eager["sparse"],
                    "dense": eager["dense"],
                }
                if int8:
                    rounded = int8_twin(network)
                    prefill["compiled_int8"] = compiled_prefill(rounded, ids, config)
                stock = decode_variants(network, ids, config, STEPS)
                decode = {
                    "decode_package": package_decoder(package, ids, STEPS),
                    "decode_eager": stock["enabled"],
                    "decode_stock": stock["stock"],
                }
                for count in plan.threads:
                    torch.set_num_threads(count)
                    fields = {"dtype": dtype_name(kind), "threads": count}
                    for calls, number in ((prefill, length), (decode, STEPS)):
                        add_rows(report, calls, plan.seconds, number, length=length, **fields)


def add_rows(
    report: Report, calls: dict[str, Any], seconds: float, number: int, **fields: Any
) -> None:
    """Time calls of so many tokens, the package's first, and add a row for each."""
    timings = compare(calls, seconds)
    package = next(iter(calls))
    for name in calls:
        report.add(
            **rate_fields(timings, name, number),
            **ratio_fields("speedup", timings.ratio(name, package)),
            **fields,
        )


app = options.command(main)

if __name__ == "__main__":
    app()
