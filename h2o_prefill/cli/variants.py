"""Settings of sparse prefill in one word of a command line: a preset and what is changed in it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..config import LAYER_FIELDS, PrefillConfig
from ..presets import preset_config


def parse_variants(texts: Iterable[str]) -> dict[str, PrefillConfig]:
    """Return the settings of each variant, by the text that names it."""
    return {text: parse_variant(text) for text in texts}


def parse_variant(text: str, **overrides: int | None) -> PrefillConfig:
    """Return the settings that a text like "spec,recall=4,dense_layers=0+1" stands for.

    Parameters
    ----------
    text : str
        A preset, then fields of `PrefillConfig` with commas between; layers are joined by "+".
    **overrides
        Fields of `PrefillConfig` that win over the text; None is not given.

    Raises
    ------
    ValueError
        If the text has another form, names no preset or no field, or a value is out of its range.
    """
    preset, *settings = text.split(",")
    given = dict(_setting(part, text) for part in settings)
    given.update((name, value) for name, value in overrides.items() if value is not None)
    return preset_config(preset, **given)


def _setting(part: str, text: str) -> tuple[str, Any]:
    name, equals, value = part.partition("=")
    try:
        if name in LAYER_FIELDS:
            return name, tuple(int(layer) for layer in value.split("+"))
        if name == "gqa_reduce" and equals:
            return name, value
        return name, int(value)
    except ValueError:
        raise ValueError(
            f"variant must be a preset and settings like spec,recall=4,dense_layers=0+1, got "
            f"{text!r}"
        ) from None
