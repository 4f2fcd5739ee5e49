"""Retrieval from long prompts: the same needles asked for after dense and after sparse prefill."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from h2o_prefill.config import PrefillConfig
from h2o_prefill.eval.inputs.models import resolve_model
from h2o_prefill.eval.inputs.text import DATASETS, Corpus, load_text
from h2o_prefill.eval.needles.haystack import Haystack
from h2o_prefill.eval.needles.prompts import RetrievalPrompt, build_prompt, prompt_seed
from h2o_prefill.eval.needles.result import PromptOutcome, RetrievalResult
from h2o_prefill.eval.needles.scoring import DENSE, substring_score, summarize_retrieval
from h2o_prefill.eval.needles.settings import DEPTHS, LENGTHS, check_retrieval
from h2o_prefill.eval.needles.tasks import TASKS
from h2o_prefill.eval.runs import (
    Progress,
    check_model,
    eval_mode,
    prefill_mode,
    report_progress,
)
from h2o_prefill.presets import DEFAULT_PRESET, chosen_config


def evaluate_retrieval(
    model: nn.Module | str,
    haystack: Corpus | str = "wikitext2",
    variants: Mapping[str, PrefillConfig] | None = None,
    *,
    tokenizer: Any = None,
    tasks: Sequence[str] = tuple(TASKS),
    lengths: Sequence[int] = LENGTHS,
    depths: Sequence[float] = DEPTHS,
    prompts_per_cell: int = 1,
    question: str = "last",
    seed: int = 0,
    on_progress: Progress | None = None,
) -> RetrievalResult:
    """Ask for needles hidden in a text, with dense prefill and with each variant of sparse prefill.

    Every prompt is prefilled in one call, dense and then by each variant, and answered greedily;
    decoding is dense over the whole cache. The tasks have the form of RULER (NVIDIA/RULER); an
    answer scores the share of what was asked for that it holds as substrings.

    Parameters
    ----------
    model : PreTrainedModel or str
        A causal language model with dense attention, or a name that `load_model` knows.
    haystack : Corpus or str
        A text, or the name of one that `load_text` knows.
    variants : mapping of str to PrefillConfig, optional
        Names and settings of the sparse runs. Default: that of `enable`, by its name.
    tokenizer : optional
        The model's. A model given by name brings its own. If it has a chat template, prompts are
        messages in it.
    tasks : sequence of str
        Of `tasks.TASKS`: "single", "multi_key", "multi_value", "variable_tracking",
        "paraphrased".
    lengths : sequence of int
        Tokens of prompt and answer together: at least two chunks of every variant.
    depths : sequence of float
        Percent of the text before the needle, 0 to 100.
    prompts_per_cell : int
        Prompts of each task, length and depth.
    question : {"last", "first"}
        Whether the question comes after or before the text.
    seed : int
        Random seed; the same seed gives the same prompts.
    on_progress : callable, optional
        Called with (answers done, answers in all, what runs next).

    Returns
    -------
    RetrievalResult

    Raises
    ------
    ValueError
        If an argument is out of its range, the text is too short, or the model already runs
        sparsely.
    NotImplementedError
        If the model cannot be prefilled sparsely.
    """
    chosen = {DEFAULT_PRESET: chosen_config(None)} if variants is None else dict(variants)
    check_retrieval(chosen, tasks, lengths, depths, prompts_per_cell, question)
    network, tokenizer = resolve_model(model, tokenizer)
    if tokenizer is None:
        raise ValueError("tokenizer must be given with a model that is not given by name")
    check_model(network, max(lengths), "lengths")
    corpus = _corpus(haystack)
    text = Haystack(corpus.text)

    def build(task: str, length: int, depth: float, index: int) -> RetrievalPrompt:
        own_seed = prompt_seed(seed, task, length, depth, index)
        return build_prompt(task, tokenizer, text, length, depth, question=question, seed=own_seed)

    # A length that is too short for a task, or too long for the text, shows before the work.
    for task in tasks:
        for length in (min(lengths), max(lengths)):
            build(task, length, depths[0], 0)

    ways = [DENSE, *chosen]
    cells = [
        (task, length, depth, index)
        for task in tasks
        for length in lengths
        for depth in depths
        for index in range(prompts_per_cell)
    ]
    total = len(cells) * len(ways)
    outcomes: list[PromptOutcome] = []
    with torch.no_grad(), eval_mode(network):
        for task, length, depth, index in cells:
            prompt = build(task, length, depth, index)
            outputs: dict[str, str] = {}
            for name in ways:
                done = len(outcomes) * len(ways) + len(outputs)
                report_progress(on_progress, done, total, f"{task} {length} {depth:g} % {name}")
                with prefill_mode(network, chosen.get(name), strict=True):
                    outputs[name] = _answer(network, tokenizer, prompt)
            outcomes.append(_outcome(prompt, outputs))
    report_progress(on_progress, total, total, "done")
    return RetrievalResult(
        outcomes=outcomes,
        summary=summarize_retrieval(outcomes, ways),
        variants=chosen,
        question=question,
        prompts_per_cell=prompts_per_cell,
        seed=seed,
        text_source=corpus.source,
    )


def _corpus(haystack: Corpus | str) -> Corpus:
    if isinstance(haystack, Corpus):
        corpus = haystack
    elif haystack in DATASETS:
        corpus = load_text(haystack)
    else:
        corpus = Corpus("text", haystack, "text")
    if not corpus.text.strip():
        raise ValueError("haystack must not be empty text")
    return corpus


def _answer(model: Any, tokenizer: Any, prompt: RetrievalPrompt) -> str:
    input_ids = prompt.input_ids.to(next(model.parameters()).device)
    # Makes the logits of the prompt's last token only, and decodes one token a call: densely.
    output: Tensor = model.generate(
        input_ids,
        attention_mask=torch.ones_like(input_ids),
        max_new_tokens=prompt.new_tokens,
        do_sample=False,
        use_cache=True,
    )
    return str(tokenizer.decode(output[0, input_ids.shape[1] :], skip_special_tokens=True))


def _outcome(prompt: RetrievalPrompt, outputs: dict[str, str]) -> PromptOutcome:
    return PromptOutcome(
        task=prompt.task,
        length=prompt.length,
        depth=prompt.depth,
        seed=prompt.seed,
        prompt_tokens=prompt.input_ids.shape[1],
        answers=prompt.answers,
        outputs=outputs,
        scores={name: substring_score(text, prompt.answers) for name, text in outputs.items()},
    )
