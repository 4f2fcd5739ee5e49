"""Settings of sparse prefill in one word of a command line: a preset and what is changed in it."""

from __future__ import annotations

from collections.abc import Iterable

from h2o_prefill.config import PrefillConfig


def parse_variants(texts: Iterable[str]) -> dict[str, PrefillConfig]:
    """Return the settings of each variant, by the text that names it."""
    return {text: parse_variant(text) for text in texts}


def parse_variant(text: str, **overrides: int | None) -> PrefillConfig:
    """Return the settings that a text like "h2o,recall=4,dense_layers=0+1" stands for."""
    given = {name: value for name, value in overrides.items() if value is not None}
    try:
        config = PrefillConfig.parse(text)
    except ValueError as error:
        raise ValueError(f"settings {text!r}: {error}") from None
    return config.with_fields(**given)
