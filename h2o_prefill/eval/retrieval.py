"""Retrieval from long prompts: the same needles asked for after dense and after sparse prefill."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from h2o_prefill.config import PrefillConfig
from h2o_prefill.eval.report import build_report
from h2o_prefill.eval.retrieval_prompts import (
    TASKS,
    Haystack,
    RetrievalPrompt,
    build_prompt,
    prompt_seed,
)
from h2o_prefill.generation.models import resolve_model
from h2o_prefill.generation.runs import (
    DENSE,
    Progress,
    check_chunks,
    check_counts,
    check_model,
    count_steps,
    eval_mode,
    generate_greedily,
    prefill_mode,
    sparse_at_any_length,
)
from h2o_prefill.generation.text import Corpus, as_corpus
from h2o_prefill.presets import PRESETS, chosen_config

if TYPE_CHECKING:
    import pandas as pd

LENGTHS = (2048, 4096, 8192)
DEPTHS = (0, 25, 50, 75, 100)


@dataclass(frozen=True)
class PromptOutcome:
    """One prompt, what was expected, and what "dense" and each variant answered."""

    task: str
    length: int  # tokens of prompt and answer together, at most
    depth: float  # percent of the text before the needle
    seed: int  # of `build_prompt`
    prompt_tokens: int
    answers: tuple[str, ...]
    outputs: dict[str, str]
    scores: dict[str, float]  # `substring_score` of the outputs
    # Mean log-probability per token of the answers, in nats, whatever was said.
    log_probs: dict[str, float]


@dataclass(frozen=True)
class RetrievalResult:
    """Retrieval by a model with dense prefill and with each variant, on the same prompts."""

    outcomes: list[PromptOutcome]
    summary: pd.DataFrame  # see `summarize_retrieval`
    variants: dict[str, PrefillConfig]
    prompts_per_cell: int  # prompts of each task, length and depth
    seed: int
    text_source: str  # what the needles were hidden in


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
    seed: int = 0,
    on_progress: Progress | None = None,
) -> RetrievalResult:
    """Ask for needles hidden in a text after dense and after each variant of sparse prefill.

    Every prompt is prefilled in one call, densely by the preset `exact` and then with each variant,
    and answered greedily; decoding is dense over the whole cache. The tasks have the form of RULER
    (NVIDIA/RULER); the score of an answer is the share of the expected strings in it. The
    log-probability of the expected answer, with dense attention after the same prefill, also tells
    prompts apart whose greedy answers are equal.

    Parameters
    ----------
    haystack : Corpus or str
        A text.
    variants : mapping of str to PrefillConfig, optional
        Names and settings of the sparse runs. Default: what `enable` takes.
    tokenizer : optional
        A chat template formats the prompts.
    tasks : sequence of str
        Of "single", "multi_key" and "multi_value".
    lengths : sequence of int
        Tokens of prompt and answer together: at least two chunks of every variant.
    depths : sequence of float
        Percent of the text before the needle, 0 to 100.
    prompts_per_cell : int
        Prompts of each task, length and depth.
    seed : int
        Random seed; the same seed gives the same prompts.
    model, on_progress
        As in `h2o_prefill.eval`.
    """
    for name, values in (("tasks", tasks), ("lengths", lengths), ("depths", depths)):
        if not values or len(set(values)) < len(values):
            raise ValueError(f"{name} must hold at least one value, each once, got {list(values)}")
    if unknown := set(tasks) - set(TASKS):
        raise ValueError(f"tasks must be of {tuple(TASKS)}, got {min(unknown)!r}")
    if not 0 <= min(depths) <= max(depths) <= 100:
        raise ValueError(f"depths must be percentages from 0 to 100, got {list(depths)}")
    check_counts("prompts_per_cell", prompts_per_cell)
    network, tokenizer = resolve_model(model, tokenizer)
    check_model(network, max(lengths), "lengths")
    corpus = as_corpus(haystack, "haystack")
    if variants is None:
        config = chosen_config(None)
        variants = {config.to_string(): config}
    if DENSE in variants:
        raise ValueError(f"variants must not be named {DENSE!r}, which is the baseline's name")
    for name, config in variants.items():
        check_chunks(config, min(lengths), f"lengths for variant {name!r}")
    # The baseline is lossless, and faster than the model's own attention.
    runs = {DENSE: PRESETS["exact"]}
    runs |= {name: sparse_at_any_length(config) for name, config in variants.items()}
    cells = list(itertools.product(tasks, lengths, depths, range(prompts_per_cell)))
    words = Haystack(corpus.text)

    def build(cell: tuple[str, int, float, int]) -> tuple[int, RetrievalPrompt]:
        of_cell = prompt_seed(seed, *cell)
        return of_cell, build_prompt(cell[0], tokenizer, words, *cell[1:3], seed=of_cell)

    # Lengths that are too short for a task or too long for the text fail before the model runs.
    for task, length in itertools.product(tasks, (min(lengths), max(lengths))):
        build((task, length, depths[0], 0))
    step = count_steps(on_progress, len(cells) * len(runs))
    outcomes = []
    for cell in cells:
        task, length, depth, _ = cell
        of_cell, prompt = build(cell)
        outputs: dict[str, str] = {}
        log_probs: dict[str, float] = {}
        for name, config in runs.items():
            step(f"{task} {length} {depth:g} % {name}")
            outputs[name], log_probs[name] = _ask(network, tokenizer, config, prompt)
        scores = {name: substring_score(text, prompt.answers) for name, text in outputs.items()}
        tokens = prompt.input_ids.shape[1]
        results = prompt.answers, outputs, scores, log_probs
        outcomes.append(PromptOutcome(task, length, depth, of_cell, tokens, *results))
    step("done")
    return RetrievalResult(
        outcomes=outcomes,
        summary=summarize_retrieval(outcomes, list(runs)),
        variants=dict(variants),
        prompts_per_cell=prompts_per_cell,
        seed=seed,
        text_source=corpus.source,
    )


def _ask(
    network: Any, tokenizer: Any, config: PrefillConfig, prompt: RetrievalPrompt
) -> tuple[str, float]:
    """Return what a model answers, and the mean log-probability per token of the expected answer.

    The tokens of the expected answer attend densely, as decoded ones do, after the same prefill.
    """
    ids, tokens = prompt.input_ids, prompt.input_ids.shape[1]
    with (
        torch.no_grad(),
        eval_mode(network),
        prefill_mode(network, config, tokenizer=tokenizer, strict=True),
    ):
        options = {"output_logits": True, "return_dict_in_generate": True}
        output = generate_greedily(network, ids, prompt.new_tokens, **options)
        log_prob = _answer_log_prob(network, output, tokens, prompt.expected)
    text = tokenizer.decode(output.sequences[0, tokens:], skip_special_tokens=True)
    return str(text), log_prob


def _answer_log_prob(model: Any, output: Any, prompt_tokens: int, expected: Tensor) -> float:
    """Return the mean log-probability per token of an answer after a prompt, in nats.

    `output` comes from `generate` for the prompt; decoded tokens are removed from its cache. The
    tokens of the answer, int64 [1, A], attend densely, as decoded ones do.
    """
    from h2o_prefill.hf.cache import CACHE_NAMES, cache_argument

    caches = (getattr(output, name, None) for name in CACHE_NAMES)
    cache: Any = next(cache for cache in caches if cache is not None)
    cache.crop(prompt_tokens - cache.get_seq_length())
    expected = expected.to(output.sequences.device)
    rows = model(input_ids=expected, use_cache=True, **cache_argument(model, cache)).logits[0]
    # The first token follows the prompt, the others each other.
    log_probs = torch.cat([output.logits[0], rows[:-1]]).float().log_softmax(dim=-1)
    return float(log_probs.gather(1, expected.T).mean())


def retrieval_report(result: RetrievalResult, **origin: Any) -> dict[str, Any]:
    """Return the report of an evaluation; `origin` adds what else reproduces it: model, dtype."""
    values = asdict(result)
    summary, prompts = values.pop("summary").to_dict("records"), values.pop("outcomes")
    return build_report({**origin, **values}, summary=summary, prompts=prompts)


def substring_score(output: str, answers: Sequence[str]) -> float:
    """Return the share of answers that an output contains, ignoring case.

    RULER's `string_match_all` (NVIDIA/RULER, scripts/eval/synthetic/constants.py).
    """
    text = output.lower()
    return sum(answer.lower() in text for answer in answers) / len(answers)


def wilson_interval(share: float, count: int) -> tuple[float, float]:
    """Return the 95 % score interval of a share of `count`, NaN for a count of 0.

    Wilson (1927), "Probable inference, the law of succession, and statistical inference":
    (p + z^2/2n ± z sqrt(p(1-p)/n + z^2/4n^2)) / (1 + z^2/n). For a mean of values in 0 .. 1 it is
    conservative: their variance is at most p (1 - p).
    """
    if count == 0:
        return math.nan, math.nan
    z = statistics.NormalDist().inv_cdf(0.975)
    half = z * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    middle, whole = share + z * z / (2 * count), 1 + z * z / count
    # Rounding may exceed 0 and 1 by an ulp.
    return max(0.0, (middle - half) / whole), min(1.0, (middle + half) / whole)


def summarize_retrieval(outcomes: Sequence[PromptOutcome], variants: Sequence[str]) -> pd.DataFrame:
    """Return one row for each task, length and variant, in the order of the outcomes.

    Columns: `task`, `length`, `variant`; `prompts`, how many; `accuracy`, their mean score;
    `log_prob` of the answers, per token, mean of the prompts, nats; `log_prob_change`, its mean
    difference from dense, and `log_prob_stderr`, the standard error of these paired differences;
    `dense_solved`, how many prompts the dense run solves, with every answer; `kept`, the share that
    the variant solves of these, NaN if there are none: a prompt that the model fails with dense
    attention says nothing about the variant; `accuracy_interval` and `kept_interval`,
    (lowest, highest) at 95 %.
    """
    import pandas as pd

    rows = pd.DataFrame(
        {
            **{"task": outcome.task, "length": outcome.length, "variant": variant},
            "score": outcome.scores[variant],
            "solved": outcome.scores[DENSE] == 1,
            "log_prob": outcome.log_probs[variant],
            "change": outcome.log_probs[variant] - outcome.log_probs[DENSE],
        }
        for outcome in outcomes
        for variant in variants
    )
    rows["kept"] = (rows["score"] == 1).astype(float).where(rows["solved"])
    table = rows.groupby(["task", "length", "variant"], sort=False, as_index=False).agg(
        prompts=("score", "size"),
        accuracy=("score", "mean"),
        dense_solved=("solved", "sum"),
        kept=("kept", "mean"),
        log_prob=("log_prob", "mean"),
        log_prob_change=("change", "mean"),
        log_prob_stderr=("change", "sem"),
    )
    for share, count in (("accuracy", "prompts"), ("kept", "dense_solved")):
        table[f"{share}_interval"] = list(map(wilson_interval, table[share], table[count]))
    return table
