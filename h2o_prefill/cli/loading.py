"""The model of a command."""

from __future__ import annotations

from typing import Any

from h2o_prefill.cli import options
from h2o_prefill.cli.console import error_console


def load_network(model: str, dtype: str, threads: int | None) -> tuple[Any, Any]:
    """Set the number of threads, and load a model while stderr says so."""
    from h2o_prefill.eval import load_model

    options.use_threads(threads)
    with error_console().status(f"loading {model}"):
        return load_model(model, dtype)
