"""The user's cache."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """Return H2O_PREFILL_CACHE, else the folder h2o_prefill in XDG_CACHE_HOME or ~/.cache."""
    own = os.environ.get("H2O_PREFILL_CACHE")
    if own:
        return Path(own).expanduser()
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared).expanduser() if shared else Path.home() / ".cache") / "h2o_prefill"
