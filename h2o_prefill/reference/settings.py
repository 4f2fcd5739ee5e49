"""Settings as the oracles read them."""

from __future__ import annotations

from typing import Any

import torch

from h2o_prefill.config import PrefillConfig

Settings = PrefillConfig | str


def read_settings(settings: Settings) -> Any:
    """Return settings as an object with the fields of `PrefillConfig`."""
    if isinstance(settings, str):
        return torch.classes.h2o_prefill.PrefillConfig.parse(settings)
    return settings
