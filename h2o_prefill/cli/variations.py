"""`h2o-prefill variations`: a passage that comes again in another form, dense against sparse."""

from __future__ import annotations

from typing import Annotated

import typer

from h2o_prefill.cli import options
from h2o_prefill.cli.console import quiet_libraries, show_progress
from h2o_prefill.cli.options import load_network, parse_variant
from h2o_prefill.cli.outputs import json_output, text_origin
from h2o_prefill.cli.result_table import print_result
from h2o_prefill.cli.tables import variations_table
from h2o_prefill.eval.inputs.variations import VARIATIONS
from h2o_prefill.presets import SPARSE_PRESETS


def variations(
    model: options.ModelOption = "smollm2-135m",
    dataset: options.DatasetOption = "wikitext2",
    text_file: options.TextFileOption = None,
    variations: Annotated[
        str,
        typer.Option(
            metavar="NAME,NAME,...",
            help=f"Forms in which the passage comes again, of {', '.join(VARIATIONS)}.",
            show_default="all",
        ),
    ] = ",".join(VARIATIONS),
    context: options.ContextOption = 4096,
    variants: options.VariantsOption = SPARSE_PRESETS,
    dtype: options.DtypeOption = "float32",
    json_file: options.JsonOption = None,
    threads: options.ThreadsOption = None,
) -> None:
    """Measure perplexity where a passage comes again in another form.

    In every window a passage is followed by other text and comes again: the same, in capitals, with
    another spelling, as code with other names, and so on. Lexical recall by tokens finds little of
    it. The table has the loss on the whole window and on the changed passage alone.
    """
    from h2o_prefill.eval import load_text, measure_variations
    from h2o_prefill.eval.variations import check_variations, variations_report

    with quiet_libraries(), json_output(json_file) as save_json:
        configs = {text: parse_variant(text) for text in variants}
        names = variations.split(",")
        check_variations(configs, names, context)
        corpus = load_text(dataset, text_file)
        network, tokenizer = load_network(model, dtype, threads)
        with show_progress("variations") as show:
            result = measure_variations(
                network,
                corpus,
                configs,
                tokenizer=tokenizer,
                variations=names,
                context=context,
                on_progress=show,
            )
        save_json(lambda: variations_report(result, **text_origin(model, dtype, corpus)))
        title = f"{model} {dtype}, windows of {context} tokens made from {corpus.name}"
        print_result(title, variations_table(result))
