"""What a retrieval evaluation can be asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from h2o_prefill.config import PrefillConfig
from h2o_prefill.eval.needles.prompts import QUESTIONS
from h2o_prefill.eval.needles.scoring import DENSE
from h2o_prefill.eval.needles.tasks import TASKS

LENGTHS = (2048, 4096, 8192)
DEPTHS = (0, 25, 50, 75, 100)


def check_retrieval(
    variants: Mapping[str, PrefillConfig],
    tasks: Sequence[str],
    lengths: Sequence[int],
    depths: Sequence[float],
    prompts_per_cell: int,
    question: str,
) -> None:
    """Refuse settings that `evaluate_retrieval` would refuse, without a model and a text.

    Parameters
    ----------
    variants, tasks, lengths, depths, prompts_per_cell, question
        As `evaluate_retrieval` takes them.

    Raises
    ------
    ValueError
        If one is out of its range, or a length is shorter than two chunks of a variant.
    """
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
    if DENSE in variants:
        raise ValueError(f"variants must not be named {DENSE!r}, the run that they are compared to")
    for name, config in variants.items():
        if min(lengths) < 2 * config.chunk_size:
            raise ValueError(
                f"lengths must be at least two chunks of {config.chunk_size} tokens for variant "
                f"{name!r}, because within the first chunk attention is dense, got {min(lengths)}"
            )
