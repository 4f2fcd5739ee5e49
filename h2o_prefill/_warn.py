"""Warnings that point at the user's line."""

from __future__ import annotations

import importlib.util
import sys
import warnings
from functools import cache
from pathlib import Path

# Libraries whose frames lie between a user's call and the warning.
_LIBRARIES = ("h2o_prefill", "torch", "transformers")


def warn(message: str) -> None:
    """Warn at the first frame outside of this package, torch and transformers."""
    level = 1
    frame = sys._getframe()
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_folders()):
        frame = frame.f_back
        level += 1
    warnings.warn(message, UserWarning, stacklevel=level)


@cache
def _folders() -> tuple[str, ...]:
    specs = (importlib.util.find_spec(name) for name in _LIBRARIES)
    origins = (spec.origin for spec in specs if spec is not None and spec.origin is not None)
    # Code that a dataclass or a decorator generates has no file.
    return (*(str(Path(origin).parent) for origin in origins), "<", str(Path(warnings.__file__)))
