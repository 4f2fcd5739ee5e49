"""The combinations of an ablation: all of the values given, except those that cannot be run."""

from __future__ import annotations

import dataclasses
import itertools
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from h2o_prefill._warn import warn
from h2o_prefill.config import PrefillConfig, format_value
from h2o_prefill.eval.perplexity.evaluate import check_settings

FIELDS = [field.name for field in dataclasses.fields(PrefillConfig)]

# Fields that have no effect without recall, at their defaults.
_WITHOUT_RECALL: dict[str, Any] = {
    name: getattr(PrefillConfig, name) for name in FIELDS if name.startswith("recall_")
}


def build_grid(
    axes: Mapping[str, Sequence[Any]],
    contexts: Sequence[int],
    bases: Sequence[PrefillConfig],
    protocol: str = "gptq",
) -> list[tuple[int, PrefillConfig]]:
    """Combine values, as `run_ablation` takes them, into tokens of a window and settings.

    `bases` are settings of the fields that `axes` does not name.

    Warns of combinations that cannot be run. Those that differ only in fields without effect, since
    recall is 0 or no layer is wide, count once.
    """
    values = {"contexts": _distinct("contexts", contexts)}
    for context in values["contexts"]:
        if not isinstance(context, int) or context < 1:
            raise ValueError(f"contexts must be >= 1 and ints, got {context!r}")
    for name, given in axes.items():
        if name not in FIELDS:
            raise ValueError(f"axes must be fields of PrefillConfig, {FIELDS}, got {name!r}")
        values[name] = _distinct(name, given)
    bases = _distinct("base", bases)
    found: dict[tuple[int, PrefillConfig], None] = {}
    refused: dict[str, list[str]] = {}
    with warnings.catch_warnings():
        # A budget that is not smaller than a chunk is one more value of the grid here.
        warnings.simplefilter("ignore", UserWarning)
        for name in axes:
            for value in values[name]:
                PrefillConfig(**{name: value})
        for one, context, *settings in itertools.product(bases, *values.values()):
            changes = dict(zip(axes, settings, strict=True))
            try:
                config = one.with_fields(**changes)
                check_settings(config, context, "0:1", protocol)
            except ValueError as error:
                described = {"context": context, **changes}.items()
                text = " ".join(f"{name}={format_value(value)}" for name, value in described)
                refused.setdefault(str(error), []).append(text)
            else:
                found[context, _without_idle(config)] = None
    if not found:
        raise ValueError(f"the grid must hold a combination that can be run: {next(iter(refused))}")
    for reason, left_out in refused.items():
        more = f" and {len(left_out) - 1} more" if len(left_out) > 1 else ""
        warn(f"left out {left_out[0]}{more}: {reason}")
    return list(found)


def parse_values(name: str, text: str) -> list[Any]:
    """Read comma-separated values of a field, each written as in a settings text."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        settings = [PrefillConfig.parse(f"h2o,{name}={part.strip()}") for part in text.split(",")]
    return [getattr(config, name) for config in settings]


def _distinct(name: str, values: Sequence[Any]) -> list[Any]:
    if isinstance(values, str) or not isinstance(values, Sequence) or not len(values):
        raise ValueError(f"{name} must be a sequence of at least one value, got {values!r}")
    return list(dict.fromkeys(tuple(v) if isinstance(v, list) else v for v in values))


def _without_idle(config: PrefillConfig) -> PrefillConfig:
    idle = {} if config.recall else dict(_WITHOUT_RECALL)
    return config.replace(**idle)
