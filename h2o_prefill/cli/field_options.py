"""Fields of `PrefillConfig` as options of commands."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable, Collection
from typing import Annotated, Any

import typer

from h2o_prefill.config import PrefillConfig


def add_field_options(
    kind: Any, *, panel: str, metavar: str | None = None, names: Collection[str] | None = None
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Let a command that takes **fields show them as options, None where they are not given."""

    def change(command: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(command, eval_str=True)
        own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        shown = [
            inspect.Parameter(
                field.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=None,
                annotation=Annotated[kind, _option(field, panel, metavar)],
            )
            for field in dataclasses.fields(PrefillConfig)
            if names is None or field.name in names
        ]
        changed = signature.replace(parameters=[*own, *shown])
        command.__signature__ = changed  # type: ignore[attr-defined]
        return command

    return change


def _option(field: dataclasses.Field[Any], panel: str, metavar: str | None) -> Any:
    return typer.Option(
        _flag(field.name),
        metavar=metavar,
        # Fields that the text names are options here.
        help=re.sub(r"`(\w+)`", lambda name: _flag(name[1]), field.metadata["help"]),
        rich_help_panel=panel,
        show_default="from --preset",
    )


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
