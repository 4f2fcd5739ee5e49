"""`h2o-prefill compare`: what sparse prefill brings on one prompt."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import typer

from h2o_prefill.cli import options
from h2o_prefill.cli.console import quiet_libraries, show_progress
from h2o_prefill.cli.options import load_network
from h2o_prefill.cli.outputs import json_output, text_origin
from h2o_prefill.cli.result_table import print_result


@options.add_size_options
def compare(
    model: options.ModelOption = "smollm2-135m",
    prompt_file: Annotated[
        Path | None,
        typer.Option(
            "--prompt-file",
            metavar="FILE",
            help="UTF-8 text file that holds a prompt, which is put into the model's chat "
            "template, instead of a part of a text.",
        ),
    ] = None,
    dataset: options.DatasetOption = "wikitext2",
    text_file: options.TextFileOption = None,
    context: Annotated[
        int | None,
        typer.Option(
            "--context", min=1, help="First tokens of the text to take.", show_default="4096"
        ),
    ] = None,
    preset: options.PresetOption = None,
    max_new_tokens: Annotated[
        int, options.count("--max-new-tokens", "Tokens of the answers, at most.")
    ] = 16,
    repeats: Annotated[
        int, options.count("--repeats", "Timed runs of each; the table shows medians.")
    ] = 3,
    dtype: options.DtypeOption = "float32",
    json_file: options.JsonOption = None,
    device: options.DeviceOption = "cpu",
    threads: options.ThreadsOption = None,
    **sizes: int | None,
) -> None:
    """Compare the model's own attention, the preset exact and sparse prefill on one prompt.

    Shows the seconds to the first token, what changes in the distributions of the next tokens and
    in the perplexity of the prompt, and how the answers begin.
    """
    from h2o_prefill.cli.tables import comparison_table
    from h2o_prefill.eval.comparison import compare as compare_prefill
    from h2o_prefill.eval.report import build_report
    from h2o_prefill.eval.windows import select_windows
    from h2o_prefill.generation import load_text
    from h2o_prefill.generation.prompts import encode_prompt
    from h2o_prefill.generation.runs import check_length
    from h2o_prefill.generation.text import encode, file_corpus

    with quiet_libraries(), json_output(json_file) as save_json:
        options.check_preset(preset, **sizes)
        if prompt_file is not None and (text_file, context) != (None, None):
            raise ValueError("--prompt-file takes no --text-file or --context beside it")
        if prompt_file is None:
            corpus = load_text(dataset, text_file)
        else:
            corpus = file_corpus(prompt_file.name, prompt_file, "--prompt-file")
        network, tokenizer = load_network(model, dtype, threads, device)
        config = options.find_settings(network, preset, **sizes)
        if prompt_file is None:
            _, ids = select_windows(encode(tokenizer, corpus.text), context or 4096, "0:1")
        else:
            ids = encode_prompt(tokenizer, corpus.text, chat=True)
            argument = "tokens of --prompt-file and the answer (a part: --text-file, --context)"
            check_length(network, ids.shape[1] + max_new_tokens, argument)
        with show_progress("compare") as show:
            result = compare_prefill(
                network,
                ids,
                tokenizer=tokenizer,
                config=config,
                max_new_tokens=max_new_tokens,
                repeats=repeats,
                on_progress=show,
            )
        title = f"{model} {dtype}, {corpus.name}, {result.tokens} tokens\n"
        title += f"seconds to the first new token, median of {repeats}"
        fields = {"preset": result.runs[-1].name, **dataclasses.asdict(config)}
        origin = text_origin(model, dtype, corpus, **fields)
        save_json(lambda: build_report(origin, **dataclasses.asdict(result)))
        print_result(title, comparison_table(result))
