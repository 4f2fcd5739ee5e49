"""The JSON files of evaluations."""

from __future__ import annotations

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


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
