"""Named settings of sparse prefill."""

from __future__ import annotations

from typing import Any

from ..config import PrefillConfig

PRESETS: dict[str, dict[str, Any]] = {
    # The algorithm as specified, with its sizes.
    "spec": {"chunk_size": 1024, "local_window": 256, "heavy_budget": 256, "sink_tokens": 0},
}


def preset_config(preset: str, **overrides: int | None) -> PrefillConfig:
    """Return a preset's settings with those that are not None replaced.

    Parameters
    ----------
    preset : str
        One of `PRESETS`.
    overrides
        Fields of `PrefillConfig`.
    """
    if preset not in PRESETS:
        raise ValueError(f"preset must be one of {tuple(PRESETS)}, got {preset!r}")
    given = {name: value for name, value in overrides.items() if value is not None}
    return PrefillConfig(**{**PRESETS[preset], **given})
