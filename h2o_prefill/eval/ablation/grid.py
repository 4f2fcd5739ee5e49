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

# What recall = 0 leaves without effect, at its defaults.
_WITHOUT_RECALL = {
    field.name: field.default
    for field in dataclasses.fields(PrefillConfig)
    if field.name.startswith("recall_")
}


@dataclass(frozen=True)
class Grid:
    """What an ablation runs on every text.

    Attributes
    ----------
    combinations : list of (int, PrefillConfig)
        Tokens of a window, and settings; none twice, in the order of the values given.
    refused : list of (dict, str)
        Values of each combination that cannot be run, and why.
    varied : tuple of str
        The fields, and "context", of which more than one value was given, and those in which
        several bases differ; "preset" stands for these where every base is one.
    """

    combinations: list[tuple[int, PrefillConfig]]
    refused: list[tuple[dict[str, Any], str]]
    varied: tuple[str, ...]


def build_grid(
    axes: Mapping[str, Sequence[Any]],
    contexts: Sequence[int] = (4096,),
    base: PrefillConfig | str | Sequence[PrefillConfig | str] | None = None,
    protocol: str = "gptq",
) -> Grid:
    """Combine values.

    Combinations that differ only in what has no effect, since `recall` is 0, count once.

    Parameters
    ----------
    axes : mapping of str to sequence
        Values of fields of `PrefillConfig`.
    contexts : sequence of int
        Tokens of a window.
    base : PrefillConfig or str, or a sequence of them, optional
        The settings that `axes` does not name; each of several is combined with all values.
        Default: that of `enable`.
    protocol : str
        As `evaluate_perplexity` takes it.

    Returns
    -------
    Grid

    Raises
    ------
    ValueError
        If a field is unknown, has no value or one that is out of its range by itself, or if no
        combination can be run.
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
        # A budget beyond a chunk is a place of the grid like any other here.
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
    """Read the values of a field of `PrefillConfig`, or of "context", from a command line.

    Parameters
    ----------
    name : str
    text : str
        Values with commas between. Layers are joined by "+"; "none" is no layer, or no number.

    Raises
    ------
    ValueError
        If a value cannot be read.
    """
    parse, rule = _PARSERS[_FIELDS.get(name, "int")]
    try:
        return [parse(part.strip()) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"{name} must be {rule}, with commas between, got {text!r}") from None


def describe(values: Mapping[str, Any]) -> str:
    """Return names and values in a line."""
    return " ".join(f"{name}={format_value(value)}" for name, value in values.items())


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


def _layers(text: str) -> tuple[int, ...]:
    return () if text == "none" else tuple(int(part) for part in text.split("+"))


def _number_or_none(text: str) -> int | None:
    return None if text == "none" else int(text)


def _truth(text: str) -> bool:
    if text not in ("true", "false"):
        raise ValueError(text)
    return text == "true"


# By the annotation of the field.
_PARSERS: dict[str, tuple[Callable[[str], Any], str]] = {
    "int": (int, "whole numbers"),
    "int | None": (_number_or_none, "whole numbers or 'none'"),
    "bool": (_truth, "true or false"),
    "str": (str, "names"),
    "tuple[int, ...]": (_layers, "layers joined by '+', or 'none'"),
}
