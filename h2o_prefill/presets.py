"""Named settings of sparse prefill."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from h2o_prefill.config import PrefillConfig

PRESETS = {
    # The algorithm as specified, with its sizes.
    "spec": PrefillConfig(),
    # What lost least at up to 1.45 times the attention flops of `spec` (README, "What it costs").
    "recommended": PrefillConfig(
        chunk_size=1024,
        local_window=512,
        heavy_budget=256,
        gqa_reduce="max",
        recall=6,
        recall_block=64,
        recall_suffix=2,
        recall_span=4,
        recall_max_count=32,
    ),
}

# What `enable` and everything above it use where no settings are given.
DEFAULT_PRESET = "recommended"


def preset_config(preset: str = DEFAULT_PRESET, **overrides: Any) -> PrefillConfig:
    """Return a preset's settings with some fields changed, as `chosen_config` does.

    Parameters
    ----------
    preset : str
        One of `PRESETS`.
    **overrides
        Fields of `PrefillConfig`.

    Raises
    ------
    ValueError
        If the preset or a field is unknown, or a value out of its range.
    """
    if preset not in PRESETS:
        raise ValueError(f"preset must be one of {tuple(PRESETS)}, got {preset!r}")
    return _replace(PRESETS[preset], overrides)


def chosen_config(
    config: PrefillConfig | str | None, overrides: dict[str, Any] | None = None
) -> PrefillConfig:
    """Return settings as a user may give them: whole, by a preset's name, or None for the default.

    With recall, a `chunk_size` among the overrides that is no multiple of `recall_block` changes
    that too, to their greatest common divisor, unless it is given.

    Parameters
    ----------
    config : PrefillConfig or str, optional
        Default: the preset `DEFAULT_PRESET`.
    overrides : dict, optional
        Fields of `PrefillConfig` to change.

    Raises
    ------
    ValueError
        If the config is of another type, or for the reasons of `preset_config`.
    """
    if config is None or isinstance(config, str):
        return preset_config(config or DEFAULT_PRESET, **(overrides or {}))
    if not isinstance(config, PrefillConfig):
        raise ValueError(
            f"config must be a PrefillConfig or the name of a preset, got {type(config).__name__}"
        )
    return _replace(config, overrides or {})


def preset_name(config: PrefillConfig) -> str | None:
    """Return the preset that has exactly these settings, None if there is none."""
    return next((name for name, preset in PRESETS.items() if preset == config), None)


def _replace(config: PrefillConfig, overrides: dict[str, Any]) -> PrefillConfig:
    known = [field.name for field in dataclasses.fields(PrefillConfig)]
    for name in overrides:
        if name not in known:
            raise ValueError(f"{name} is no option of PrefillConfig, whose options are {known}")
    chunk_size = overrides.get("chunk_size")
    if isinstance(chunk_size, int) and chunk_size > 0 and overrides.get("recall", config.recall):
        block = math.gcd(chunk_size, config.recall_block)
        overrides = {"recall_block": block, **overrides}
    return config.replace(**overrides) if overrides else config
