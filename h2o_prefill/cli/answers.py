"""`h2o-prefill answers`: greedy answers over long texts, dense against sparse prefill."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from h2o_prefill.cli import options
from h2o_prefill.cli.console import quiet_libraries, show_progress
from h2o_prefill.cli.options import load_network, load_texts, parse_variant
from h2o_prefill.cli.outputs import json_output
from h2o_prefill.cli.result_table import print_result
from h2o_prefill.cli.tables import answers_table
from h2o_prefill.eval.answers import QUESTION
from h2o_prefill.presets import SPARSE_PRESETS


def answers(
    model: options.ModelOption = "smollm2-135m",
    dataset: Annotated[str | None, options.datasets("Texts to ask about")] = None,
    text_file: Annotated[list[Path] | None, options.text_files("ask about")] = None,
    prompts: Annotated[int, options.count("--prompts", "Number of prompts, over all texts.")] = 20,
    prompt_tokens: Annotated[int, options.count("--prompt-tokens", "Tokens of each text.")] = 6000,
    new_tokens: Annotated[int, options.count("--new-tokens", "Tokens of an answer, at most.")] = 32,
    question: Annotated[
        str, typer.Option(help="Question after every text; if empty, the text is continued.")
    ] = QUESTION,
    variants: options.VariantsOption = SPARSE_PRESETS,
    dtype: options.DtypeOption = "float32",
    json_file: options.JsonOption = None,
    threads: options.ThreadsOption = None,
) -> None:
    """Compare greedy answers after dense and after sparse prefill.

    Every prompt is a piece of a text and a question about it. The table shows how many answers are
    identical, at which token the others diverge from dense (counted from 0), and how much lower
    the dense run's log-probability of that token is than that of its own, in nats.
    """
    from h2o_prefill.eval.answers import answers_report, compare_answers

    with quiet_libraries(), json_output(json_file) as save_json:
        configs = {text: parse_variant(text) for text in variants}
        texts = load_texts(dataset, text_file)
        network, tokenizer = load_network(model, dtype, threads)
        with show_progress("answers") as show:
            result = compare_answers(
                network,
                texts,
                configs,
                tokenizer=tokenizer,
                prompts=prompts,
                prompt_tokens=prompt_tokens,
                new_tokens=new_tokens,
                question=question,
                on_progress=show,
            )
        save_json(lambda: answers_report(result, model=model, dtype=dtype))
        names = ", ".join(text.name for text in texts)
        title = f"{model} {dtype}\n{prompts} prompts of {prompt_tokens} tokens of {names}"
        print_result(title, answers_table(result))
