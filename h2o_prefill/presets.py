"""Presets, and settings as a user passes them."""

from __future__ import annotations

from typing import Any

import torch

from h2o_prefill.config import PrefillConfig

_Native = torch.classes.h2o_prefill.PrefillConfig

PRESETS = {name: PrefillConfig.parse(name) for name in _Native.preset_names()}

SPARSE_PRESETS = [name for name, config in PRESETS.items() if not config.exact]

# The settings of `enable`, and of evaluations, if none are given and the model has no profile.
DEFAULT_PRESET = "recommended"

# What stands for the profile of a model in a settings text, in the place of a preset.
PROFILE = "profile"


def preset_config(preset: str = DEFAULT_PRESET, **overrides: Any) -> PrefillConfig:
    """Return the settings of one of `PRESETS` with some fields of `PrefillConfig` changed.

    Fields change as by `PrefillConfig.with_fields`. Raises ValueError if the preset or a field is
    unknown, or a value is out of range.
    """
    return chosen_config(preset, overrides)


def is_of_profile(config: PrefillConfig | str | None) -> bool:
    """Return whether settings are a text that begins with the profile of a model."""
    return isinstance(config, str) and config.partition(",")[0] == PROFILE


def chosen_config(
    config: PrefillConfig | str | None, overrides: dict[str, Any] | None = None
) -> PrefillConfig:
    """Return settings given as an object, as a text, or as None (the preset `DEFAULT_PRESET`)."""
    if config is None or isinstance(config, str):
        config = PrefillConfig.parse(DEFAULT_PRESET if config is None else config)
    elif not isinstance(config, PrefillConfig):
        hint = ": pass a tokenizer as tokenizer=" if hasattr(config, "batch_decode") else ""
        raise ValueError(
            "config must be a PrefillConfig or the name of a preset, got "
            f"{type(config).__name__}{hint}"
        )
    return config.with_fields(**(overrides or {}))
