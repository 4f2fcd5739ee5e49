"""The Hugging Face hub, which may be out of reach."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

OUT_OF_REACH = "the hub cannot be reached and nothing is cached"


def hub_is_reachable(timeout: float = 3.0) -> bool:
    """Ask the hub's endpoint once, without the client's retries; `timeout` is in seconds."""
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    if constants.HF_HUB_OFFLINE:
        return False
    try:
        get_session().head(constants.ENDPOINT, timeout=timeout)
    except Exception:  # the HTTP library, so its errors, differ between versions
        return False
    return True


@contextlib.contextmanager
def offline_unless_reachable(needed: bool = True) -> Iterator[bool]:
    """Put the hub's clients into offline mode for a block if the hub does not answer.

    Gives whether it answers. Without this, every file costs about twenty seconds of retries on a
    machine without a network. Files that were downloaded before are still found.
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
