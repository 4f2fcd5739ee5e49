"""What an enabled model runs with: its config, what it had before, what it warned of."""

from __future__ import annotations

import warnings
import weakref
from dataclasses import dataclass, field
from typing import Any

from h2o_prefill.config import PrefillConfig
from h2o_prefill.presets import PRESETS

# Hugging Face configs that some handle has switched over, by id: several models may share one
# config object, and then the switch of one reaches a model that nobody enabled.
_switched: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


@dataclass
class Settings:
    """The settings of one enabled model.

    Attributes
    ----------
    config : PrefillConfig
        How to prefill.
    strict : bool
        Raise where a call would otherwise fall back to dense attention with a warning.
    previous : list of (Hugging Face config, str or None)
        The attention implementation that each config of the model had before.
    reported : set of str
        Reasons already warned of.
    """

    config: PrefillConfig
    strict: bool = False
    previous: list[tuple[Any, str | None]] = field(default_factory=list)
    reported: set[str] = field(default_factory=set)

    def owns(self, hf_config: Any) -> bool:
        """Return whether a Hugging Face config is one of this model's."""
        return any(config is hf_config for config, _ in self.previous)

    def previous_of(self, hf_config: Any) -> str | None:
        """Return the attention implementation that a config had before, None if unknown."""
        return next((name for config, name in self.previous if config is hf_config), None)

    def report(self, reason: str) -> None:
        """Warn of a reason once, or raise if strict.

        Raises
        ------
        NotImplementedError
            If `strict`.
        """
        if self.strict:
            raise NotImplementedError(f"h2o_prefill: {reason}")
        if reason not in self.reported:
            self.reported.add(reason)
            warnings.warn(f"h2o_prefill: {reason}", UserWarning, stacklevel=3)

    def mark_switched(self) -> None:
        """Note that the configs of this model are switched over."""
        for config, _ in self.previous:
            _switched[id(config)] = config

    def unmark_switched(self) -> None:
        """Note that the configs of this model are as they were."""
        for config, _ in self.previous:
            _switched.pop(id(config), None)


def is_switched(hf_config: Any) -> bool:
    """Return whether a handle has switched this Hugging Face config over."""
    return hf_config is not None and _switched.get(id(hf_config)) is hf_config


# For a model whose user set attn_implementation="h2o_prefill" and enabled nothing: an attention
# function does not see the token ids that lexical recall needs.
DEFAULT_SETTINGS = Settings(PRESETS["h2o"])
