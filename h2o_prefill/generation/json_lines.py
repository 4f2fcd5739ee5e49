"""Files of JSON lines, to which a run adds a line as soon as it has one."""

from __future__ import annotations

import contextlib
import json


def whole_lines(held: bytes, begin: bytes) -> bytes:
    """Return the lines of a file of JSON lines, but for one without an end.

    A run that was killed while it wrote leaves such a line, the first part of one with a "key" that
    begins with `begin`. Raises ValueError for any other.
    """
    lines = held[: held.rfind(b"\n") + 1]
    rest = held[len(lines) :]
    foreign = rest[: len(begin)] != begin[: len(rest)]
    with contextlib.suppress(ValueError, RecursionError):
        foreign = foreign or "key" not in json.loads(rest)
    if foreign:
        raise ValueError(f"its last line is not of this command, {rest[:40]!r}")
    return lines
