"""Where converted models are kept, and how a folder gets there whole or not at all."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path


def cache_dir() -> Path:
    """Return H2O_PREFILL_CACHE, else the folder h2o_prefill in XDG_CACHE_HOME or ~/.cache."""
    own = os.environ.get("H2O_PREFILL_CACHE")
    if own:
        return Path(own).expanduser()
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared).expanduser() if shared else Path.home() / ".cache") / "h2o_prefill"


def build_folder_once(folder: Path, build: Callable[[Path], None]) -> Path:
    """Return `folder`, filled by `build` if it does not exist yet.

    `build` fills a temporary folder beside it that is renamed at the end: an interrupted run leaves
    no half-written folder, and of two processes that build at once, one wins.

    Parameters
    ----------
    folder : Path
        What to return; its parent is created.
    build : callable
        Takes the folder to fill.
    """
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        build(scratch)
        try:
            scratch.rename(folder)
        except OSError:
            if not folder.is_dir():
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return folder
