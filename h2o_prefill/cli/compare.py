"""`h2o-prefill compare`: what sparse prefill brings on one prompt."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import typer

from h2o_prefill import eval as evaluation
from h2o_prefill.cli import console, options, outputs
from h2o_prefill.eval.report import build_report
from h2o_prefill.generation.prompts import encode_prompt
from h2o_prefill.generation.runs import check_length
from h2o_prefill.generation.text import encode, file_corpus, select_windows


@options.command
def compare(
    model: options.ModelOptions,
    text: options.TextOptions,
    *,
    preset: options.PresetOption = None,
    prompt_file: Path | None = typer.Option(
        None,
        metavar="FILE",
        help="UTF-8 text file that holds a prompt, which is put into the model's chat "
        "template, instead of a part of a text.",
    ),
    context: int | None = typer.Option(
        None, min=1, help="First tokens of the text to take.", show_default="4096"
    ),
    max_new_tokens: int = typer.Option(16, min=1, help="Tokens of the answers, at most."),
    repeats: int = typer.Option(3, min=1, help="Timed runs of each; the table shows medians."),
    report: outputs.ReportOptions,
) -> None:
    """Compare the model's own attention, the preset exact and sparse prefill on one prompt.

    Shows the seconds to the first token, what changes in the distributions of the next tokens and
    in the perplexity of the prompt, and how the answers begin.
    """
    report.check()
    config = options.find_settings(preset)
    if prompt_file is None:
        corpus = text.load()
    elif (text.text_file, context) != (None, None):
        raise ValueError("--prompt-file takes no --text-file or --context beside it")
    else:
        corpus = file_corpus(prompt_file.name, prompt_file, "--prompt-file")
    network, tokenizer = model.load()
    if prompt_file is None:
        tokens = encode(tokenizer, corpus.text)
        _, ids = select_windows(tokens, context or 4096, "0:1")
    else:
        ids = encode_prompt(tokenizer, corpus.text, chat=True)
        argument = "tokens of --prompt-file and the answer (a part: --text-file, --context)"
        check_length(network, ids.shape[1] + max_new_tokens, argument)
    with console.show_progress("compare") as show:
        result = evaluation.compare(
            network,
            ids,
            tokenizer=tokenizer,
            config=config,
            max_new_tokens=max_new_tokens,
            repeats=repeats,
            on_progress=show,
        )
    title = f"{model}, {corpus.name}, medians of {repeats}"
    name = result.runs[-1].name
    origin = model.origin(corpus, preset=name, **dataclasses.asdict(config))
    report.write(lambda: build_report(origin, **dataclasses.asdict(result)))
    report.show(title, str(result))
