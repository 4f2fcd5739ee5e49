"""The combinations of an ablation: every one of the values given, less those that cannot be run."""

from __future__ import annotations

import dataclasses
import itertools
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from h2o_prefill.config import PrefillConfig, format_value
from h2o_prefill.eval.perplexity.evaluate import check_settings
from h2o_prefill.presets import chosen_config, preset_name

_FIELDS = {field.name: str(field.type) for field in dataclasses.fields(PrefillConfig)}

# Fields that have no effect without recall, at their defaults.
_WITHOUT_RECALL = {
    field.name: field.default
    for field in dataclasses.fields(PrefillConfig)
    if field.name.startswith("recall_")
}


@dataclass(frozen=True)
class Grid:
    """The combinations that an ablation runs on every text."""

    # Tokens of a window, and settings; none twice, in the order of the values given.
    combinations: list[tuple[int, PrefillConfig]]
    # The values of each combination that cannot be run, and why.
    refused: list[tuple[dict[str, Any], str]]
    # "context" and the fields that differ between combinations; "preset" stands for the fields in
    # which several presets differ.
    varied: tuple[str, ...]


def build_grid(
    axes: Mapping[str, Sequence[Any]],
    contexts: Sequence[int] = (4096,),
    base: PrefillConfig | str | Sequence[PrefillConfig | str] | None = None,
    protocol: str = "gptq",
) -> Grid:
    """Combine values, for arguments as `run_ablation` takes them.

    Combinations that differ only in fields without effect, since recall is 0 or no layer is wide,
    count once. Raises ValueError for an unknown field, a value that is out of its range by itself,
    or if no combination can be run.
    """
    bases = _bases(base)
    values = {"context": _distinct("contexts", contexts)}
    for context in values["context"]:
        if not isinstance(context, int) or context < 1:
            raise ValueError(f"contexts must be >= 1 and ints, got {context!r}")
    for name, given in axes.items():
        if name not in _FIELDS:
            raise ValueError(f"axes must be fields of PrefillConfig, {list(_FIELDS)}, got {name!r}")
        values[name] = _distinct(name, given)
    combinations: dict[tuple[int, PrefillConfig], None] = {}
    refused: list[tuple[dict[str, Any], str]] = []
    with warnings.catch_warnings():
        # A budget that is not smaller than a chunk is one more value of the grid here.
        warnings.simplefilter("ignore", UserWarning)
        for name in axes:
            for value in values[name]:
                PrefillConfig(**{name: value})
        for one, *chosen in itertools.product(bases, *values.values()):
            combination = dict(zip(values, chosen, strict=True))
            context, *settings = chosen
            try:
                config = chosen_config(one, dict(zip(axes, settings, strict=True)))
                check_settings(config, context, "0:1", protocol)
            except ValueError as error:
                refused.append((combination, str(error)))
            else:
                combinations[context, _without_idle(config)] = None
    if not combinations:
        raise ValueError(f"the grid must hold a combination that can be run: {refused[0][1]}")
    varied = [name for name, given in values.items() if len(given) > 1]
    varied += [name for name in _told_apart_by(bases) if name not in values]
    return Grid(list(combinations), refused, tuple(varied))


def parse_values(name: str, text: str) -> list[Any]:
    """Read comma-separated values of a field of `PrefillConfig`, or of "context".

    Layers are joined by "+"; "none" is no layer, or no number.
    """
    parse, rule = _PARSERS[_FIELDS.get(name, "int")]
    try:
        return [parse(part.strip()) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"{name} must be {rule}, with commas between, got {text!r}") from None


def describe(values: Mapping[str, Any]) -> str:
    """Return names and values in a line."""
    return " ".join(f"{name}={format_value(value)}" for name, value in values.items())


def label(grid: Grid, context: int, config: PrefillConfig) -> str:
    """Return in a line what tells a combination from the others of its grid."""
    settings = {"context": context, "preset": preset_name(config), **dataclasses.asdict(config)}
    return describe({name: settings[name] for name in grid.varied or ("context",)})


def _bases(
    base: PrefillConfig | str | Sequence[PrefillConfig | str] | None,
) -> list[PrefillConfig]:
    if base is None or isinstance(base, (PrefillConfig, str)):
        return [chosen_config(base)]
    if not isinstance(base, Sequence) or not base:
        raise ValueError(f"base must be settings or a sequence of them, got {base!r}")
    return list(dict.fromkeys(chosen_config(one) for one in base))


def _told_apart_by(bases: Sequence[PrefillConfig]) -> list[str]:
    if len(bases) > 1 and all(preset_name(base) for base in bases):
        return ["preset"]
    return [name for name in _FIELDS if len({getattr(base, name) for base in bases}) > 1]


def _distinct(name: str, values: Sequence[Any]) -> list[Any]:
    if isinstance(values, str) or not isinstance(values, Sequence) or not len(values):
        raise ValueError(f"{name} must be a sequence of at least one value, got {values!r}")
    return list(dict.fromkeys(tuple(v) if isinstance(v, list) else v for v in values))


def _without_idle(config: PrefillConfig) -> PrefillConfig:
    idle = {} if config.recall else dict(_WITHOUT_RECALL)
    if not config.wide_layers:
        idle["wide_factor"] = PrefillConfig.wide_factor
    return config.replace(**idle)


# By the annotation of the field.
_PARSERS: dict[str, tuple[Callable[[str], Any], str]] = {
    "int": (int, "whole numbers"),
    "int | None": (lambda text: None if text == "none" else int(text), "whole numbers or 'none'"),
    "bool": (lambda text: bool(("false", "true").index(text)), "true or false"),
    "str": (str, "names"),
    "tuple[int, ...]": (
        lambda text: () if text == "none" else tuple(int(part) for part in text.split("+")),
        "layers joined by '+', or 'none'",
    ),
}
