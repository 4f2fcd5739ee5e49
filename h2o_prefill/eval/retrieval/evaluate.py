"""Retrieval from long prompts: the same needles asked for after dense and after sparse prefill."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from h2o_prefill.config import PrefillConfig
from h2o_prefill.eval.retrieval.prompts import (
    QUESTIONS,
    Haystack,
    RetrievalPrompt,
    build_prompt,
    prompt_seed,
)
from h2o_prefill.eval.retrieval.result import (
    KeptOutcomes,
    PromptOutcome,
    RetrievalResult,
    substring_score,
    summarize_retrieval,
)
from h2o_prefill.eval.retrieval.tasks import TASKS
from h2o_prefill.eval.runs import check_chunks, check_model, chosen_variants, with_dense
from h2o_prefill.generation.cluster import (
    LoadedModel,
    ModelCluster,
    digest,
    model_digest,
    run_pieces,
)
from h2o_prefill.generation.models import resolve_model
from h2o_prefill.generation.runs import (
    DENSE,
    Progress,
    count_steps,
    eval_mode,
    generate_greedily,
    prefill_mode,
)
from h2o_prefill.generation.text import Corpus, as_corpus
from h2o_prefill.selection import SelectionRule, Selector

LENGTHS = (2048, 4096, 8192)
DEPTHS = (0, 25, 50, 75, 100)


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
    select: SelectionRule | None = None,
    kept: KeptOutcomes | None = None,
    cluster: ModelCluster | None = None,
    on_progress: Progress | None = None,
) -> RetrievalResult:
    """Ask for needles hidden in a text after dense and after each variant of sparse prefill.

    Every prompt is prefilled in one call, densely by the preset `exact` and then with each variant,
    and answered greedily; decoding is dense over the whole cache. The tasks have the form of RULER
    (NVIDIA/RULER); the score of an answer is the share of the expected strings in it. The
    log-probability of the expected answer, with dense attention after the same prefill, also tells
    prompts apart of which the greedy answers are equal.

    Parameters
    ----------
    model : PreTrainedModel or str
        A causal language model with dense attention, or a name that `load_model` knows.
    haystack : Corpus or str
        A text, or the name of one that `load_text` knows.
    variants : mapping of str to PrefillConfig, optional
        Names and settings of the sparse runs. Default: those of `enable`.
    tokenizer : optional
        The model's; default: that of a model given by name. If it has a chat template, prompts are
        formatted with it.
    tasks : sequence of str
        Of `tasks.TASKS`: "single", "multi_key", "multi_value", "variable_tracking",
        "common_words", "repeated_span", "paraphrased".
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
    select : callable, optional
        A selection rule for the sparse runs, as `enable` takes it. Prompts that are done are known
        by its name.
    kept : KeptOutcomes, optional
        A file of prompts that are done, which are not asked again, and in which others are written
        as they finish.
    cluster : ModelCluster, optional
        Workers that answer the prompts, of the same model. Default: this process.
    on_progress : callable, optional
        Called with (answers done, number of answers, description of the next step), or with
        prompts instead of answers where a cluster answers them.

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
    check_retrieval(tasks, lengths, depths, prompts_per_cell, question)
    network, tokenizer = resolve_model(model, tokenizer)
    check_model(network, max(lengths), "lengths")
    corpus = as_corpus(haystack, "haystack")
    chosen = chosen_variants(network, variants)
    for name, config in chosen.items():
        check_chunks(config, min(lengths), f"lengths for variant {name!r}")
    runs = with_dense(chosen)
    setup = _Setup(Haystack(corpus.text), question, seed, runs, select)
    rule = None if select is None else Selector(select).name
    # Lengths that are too short for a task or too long for the text fail before the model runs.
    for task, length in itertools.product(tasks, (min(lengths), max(lengths))):
        setup.build(tokenizer, (task, length, depths[0], 0))

    cells = list(itertools.product(tasks, lengths, depths, range(prompts_per_cell)))
    found = {}
    if kept is not None:
        settings = {name: config.to_string() for name, config in runs.items()}
        common = model_digest(network), digest(corpus.text), question, seed, settings
        common += () if rule is None else (rule,)
        keys = {cell: digest(*common, cell) for cell in cells}
        found = {cell: done for cell in cells if (done := kept.get(keys[cell])) is not None}
    pieces = {cell: cell for cell in cells if cell not in found}
    step = count_steps(on_progress, len(pieces) * (len(runs) if cluster is None else 1))
    held = LoadedModel(network, tokenizer, step)
    for cell, ask in run_pieces(held, cluster, _ask, setup, pieces):
        found[cell] = ask()
        if kept is not None:
            kept.add(keys[cell], found[cell])
    outcomes = [found[cell] for cell in cells]
    step("done")
    return RetrievalResult(
        outcomes=outcomes,
        summary=summarize_retrieval(outcomes, list(runs)),
        variants=chosen,
        select=rule,
        question=question,
        prompts_per_cell=prompts_per_cell,
        seed=seed,
        text_source=corpus.source,
    )


# Task, length, depth, and the number of the prompt among those of all three.
_Cell = tuple[str, int, float, int]


@dataclass(frozen=True)
class _Setup:
    """What all prompts of an evaluation share."""

    haystack: Haystack
    question: str
    seed: int
    runs: dict[str, PrefillConfig]  # by name, the baseline first
    select: SelectionRule | None  # of all runs but the baseline

    def build(self, tokenizer: Any, cell: _Cell) -> tuple[int, RetrievalPrompt]:
        """Return the seed of a prompt, and the prompt."""
        task, length, depth, _ = cell
        seed, question = prompt_seed(self.seed, *cell), self.question
        return seed, build_prompt(
            task, tokenizer, self.haystack, length, depth, question=question, seed=seed
        )


def _ask(held: LoadedModel, setup: _Setup, cell: _Cell) -> PromptOutcome:
    """Answer a prompt after dense prefill and after that of each variant."""
    task, length, depth, _ = cell
    network, tokenizer = held.network, held.tokenizer
    seed, (ids, new_tokens, answers, expected) = setup.build(tokenizer, cell)
    said: dict[str, str] = {}
    log_probs: dict[str, float] = {}
    with torch.no_grad(), eval_mode(network):
        for name, config in setup.runs.items():
            held.step(f"{task} {length} {depth:g} % {name}")
            rule = None if name == DENSE else setup.select
            with prefill_mode(network, config, tokenizer=tokenizer, strict=True, select=rule):
                options = {"output_logits": True, "return_dict_in_generate": True}
                output = generate_greedily(network, ids, new_tokens, **options)
                log_probs[name] = _answer_log_prob(network, output, ids.shape[1], expected)
            made = output.sequences[0, ids.shape[1] :]
            said[name] = str(tokenizer.decode(made, skip_special_tokens=True))
    scores = {name: substring_score(answer, answers) for name, answer in said.items()}
    return PromptOutcome(
        *(task, length, depth, seed, ids.shape[1]), *(answers, said, scores, log_probs)
    )


def _answer_log_prob(model: Any, output: Any, prompt_tokens: int, expected: Tensor) -> float:
    """Return the mean log-probability per token of an answer after a prompt, in nats.

    `output` is that of `generate` for the prompt; what it decoded is removed from its cache. The
    tokens of the answer, int64 [1, A], attend densely, as decoded ones do.
    """
    from h2o_prefill.hf.cache import CACHE_NAMES, cache_argument

    found = (getattr(output, name, None) for name in CACHE_NAMES)
    cache: Any = next(one for one in found if one is not None)
    cache.crop(prompt_tokens - cache.get_seq_length())
    expected = expected.to(output.sequences.device)
    rows = model(input_ids=expected, use_cache=True, **cache_argument(model, cache)).logits[0]
    # The first token follows the prompt, the others each other.
    log_probs = torch.cat([output.logits[0], rows[:-1]]).float().log_softmax(dim=-1)
    return float(log_probs.gather(1, expected.T).mean())


def check_retrieval(
    tasks: Sequence[str],
    lengths: Sequence[int],
    depths: Sequence[float],
    prompts_per_cell: int,
    question: str,
) -> None:
    """Raise ValueError for settings that `evaluate_retrieval` would refuse, without a model."""
    for name, values in (("tasks", tasks), ("lengths", lengths), ("depths", depths)):
        if not values or len(set(values)) < len(values):
            raise ValueError(f"{name} must hold at least one value, each once, got {list(values)}")
    for task in tasks:
        if task not in TASKS:
            raise ValueError(f"tasks must be of {tuple(TASKS)}, got {task!r}")
    for depth in depths:
        if not 0 <= depth <= 100:
            raise ValueError(f"depths must be percentages from 0 to 100, got {depth}")
    if prompts_per_cell < 1:
        raise ValueError(f"prompts_per_cell must be >= 1, got {prompts_per_cell}")
    if question not in QUESTIONS:
        raise ValueError(f"question must be one of {QUESTIONS}, got {question!r}")
