"""Greedy answers to a question about pieces of a text, after dense and after sparse prefill."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import torch
import typer
from common.benchmark import (
    ModelOption,
    Plan,
    Row,
    TextFileOption,
    benchmark,
    dtype_name,
    load_with_text,
    new_app,
    read_corpus,
)
from common.report import Report
from torch import Tensor

from h2o_prefill.config import PrefillConfig
from h2o_prefill.generation.prompts import encode_prompt
from h2o_prefill.generation.runs import DENSE, generate_greedily, prefill_mode
from h2o_prefill.presets import PRESETS, SPARSE_PRESETS

app = new_app()


@benchmark(app, "answers", dtype="float32", lengths=((6000,), (256,)))
def answers(
    plan: Plan,
    model: ModelOption = "smollm2-135m",
    text_file: TextFileOption = None,
    prompts: Annotated[int, typer.Option(min=1, help="Pieces, spread evenly over the text.")] = 5,
    new_tokens: Annotated[int, typer.Option(min=1, help="Tokens of an answer, at most.")] = 24,
    question: Annotated[
        str, typer.Option(help="If empty, the pieces are continued.")
    ] = "Summarize the text above in one sentence.",
    variants: Annotated[
        list[str], typer.Option("--variant", help="Settings; repeatable.")
    ] = SPARSE_PRESETS,
) -> None:
    """Show where answers differ from those after dense prefill, at its first other token.

    A prompt is a piece of --lengths tokens and the question, in the tokenizer's chat template if it
    has one. `gap`: how much less likely than its own the dense run holds the other token, in nats.
    """
    corpus = read_corpus(text_file)
    small = {"chunk_size": plan.config().chunk_size} if plan.quick else {}
    chosen = {text: PrefillConfig.parse(text).with_fields(**small) for text in variants}
    title = "greedy answers after sparse and dense prefill"
    with (
        torch.no_grad(),
        Report(plan, title, model=model, text=corpus.source, question=question) as report,
    ):
        for length in plan.lengths:
            needed = prompts * length
            ((dtype, network, tokenizer, tokens),) = load_with_text(plan, model, corpus, needed)
            for number in range(prompts):
                begin = number * (len(tokens) - length) // max(1, prompts - 1)
                ids = _prompt(tokenizer, tokens[begin : begin + length], question)
                where = {"length": length, "dtype": dtype_name(dtype), "begin": begin}
                made: dict[str, list[int]] = {}
                logits: Sequence[Tensor] = ()
                for name, config in {DENSE: PRESETS["exact"], **chosen}.items():
                    options = {"output_logits": name == DENSE, "return_dict_in_generate": True}
                    with prefill_mode(network, config, tokenizer=tokenizer, strict=True):
                        output = generate_greedily(network, ids, new_tokens, **options)
                    made[name] = output.sequences[0, ids.shape[1] :].tolist()
                    if name == DENSE:
                        logits = output.logits
                for name in chosen:
                    texts = {x: tokenizer.decode(made[x]) for x in (DENSE, name)}
                    row = compare(made[name], made[DENSE], logits)
                    report.add(variant=name, **where, **row, answers=texts)


def compare(tokens: list[int], dense: list[int], logits: Sequence[Tensor]) -> Row:
    """Return whether an answer equals dense; else the first token that differs, and its gap.

    Later tokens are not comparable: they answer different prompts. `logits` are dense ones.
    """
    pairs = zip(tokens, dense, strict=False)
    at = next((i for i, (ours, theirs) in enumerate(pairs) if ours != theirs), None)
    if at is None:
        return {"equal": True}
    row = logits[at][0].float()
    return {"equal": False, "parts_at": at, "gap": float(row[dense[at]] - row[tokens[at]])}


def _prompt(tokenizer: Any, piece: Tensor, question: str) -> Tensor:
    """Return the token ids of a prompt, int64 [1, T]."""
    if not question:
        return piece.unsqueeze(0)
    return encode_prompt(tokenizer, f"{tokenizer.decode(piece)}\n\n{question}", chat=True)


if __name__ == "__main__":
    app()
