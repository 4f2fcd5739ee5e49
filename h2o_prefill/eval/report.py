"""The JSON files of evaluations."""

from __future__ import annotations

import contextlib
import json
import math
import os
from typing import Any

from h2o_prefill._atomic_write import replaced_file
from h2o_prefill.eval.environment import environment


def build_report(config: dict[str, Any], **parts: Any) -> dict[str, Any]:
    """Return the report of an evaluation: {environment, config, **parts}."""
    return {"environment": environment(), "config": config, **parts}


def write_json(values: dict[str, Any], path: str | os.PathLike[str]) -> None:
    """Write plain values as a JSON file, whole or not at all; see `format_json`."""
    text = format_json(values)
    with replaced_file(path) as scratch:
        scratch.write_text(text, encoding="utf-8")


def format_json(values: dict[str, Any]) -> str:
    """Return plain values as JSON. Numbers that JSON does not know (NaN) become null."""
    return json.dumps(_plain(values), indent=2) + "\n"


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


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
