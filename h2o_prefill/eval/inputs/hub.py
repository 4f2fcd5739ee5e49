"""The Hugging Face hub, when it may be out of reach."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

TIMEOUT_SECONDS = 3.0
OUT_OF_REACH = "the hub cannot be reached and nothing is cached"


def hub_is_reachable(timeout: float = TIMEOUT_SECONDS) -> bool:
    """Ask the hub's endpoint once, without the client's retries.

    Parameters
    ----------
    timeout : float
        Seconds to wait for an answer.
    """
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    if constants.HF_HUB_OFFLINE:
        return False
    try:
        get_session().head(constants.ENDPOINT, timeout=timeout)
    except Exception:  # the HTTP library, so its errors, differ between versions
        return False
    return True


def cached_folder(model_id: str) -> Path | None:
    """Return the folder with the downloaded files of a model, None if there is none."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model_id, local_files_only=True))
    except (OSError, ValueError):
        return None


@contextlib.contextmanager
def offline_unless_reachable(needed: bool = True) -> Iterator[bool]:
    """Put the hub's clients into their offline mode for a block if the hub does not answer.

    Files that were downloaded before are still found. Without this, every file costs about twenty
    seconds of retries on a machine without a network.

    Parameters
    ----------
    needed : bool
        False leaves the clients and the hub alone.

    Yields
    ------
    bool
        Whether the hub answers.
    """
    from huggingface_hub import constants

    if not needed or hub_is_reachable():
        yield True
        return
    # Each client keeps a copy of the switch; `datasets` reads its own.
    holders: list[Any] = [constants, sys.modules.get("datasets.config")]
    before = [(holder, holder.HF_HUB_OFFLINE) for holder in holders if holder is not None]
    for holder, _ in before:
        holder.HF_HUB_OFFLINE = True
    try:
        yield False
    finally:
        for holder, value in before:
            holder.HF_HUB_OFFLINE = value
