"""The Hugging Face hub, which may be unreachable."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

OUT_OF_REACH = "the hub cannot be reached and nothing is cached"


def hub_is_reachable() -> bool:
    """Ask the hub's endpoint once, for up to three seconds, without the client's retries."""
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    if constants.HF_HUB_OFFLINE:
        return False
    try:
        get_session().head(constants.ENDPOINT, timeout=3.0)
    except Exception:  # the HTTP library, so its errors, differ between versions
        return False
    return True


@contextlib.contextmanager
def offline_unless_reachable(needed: bool = True) -> Iterator[bool]:
    """Put the hub's clients into offline mode for a block if the hub does not answer.

    Yields whether it answers. Without this, every file costs about twenty seconds of retries on a
    machine without a network. Files that were downloaded before are still found.
    """
    from huggingface_hub import constants

    if not needed or hub_is_reachable():
        yield True
        return
    with contextlib.ExitStack() as restored:
        # Each client keeps a copy of the switch; `datasets` reads its own.
        for holder in (constants, sys.modules.get("datasets.config")):
            if holder is not None:
                restored.callback(setattr, holder, "HF_HUB_OFFLINE", holder.HF_HUB_OFFLINE)
                holder.HF_HUB_OFFLINE = True  # type: ignore[attr-defined]
        yield False
