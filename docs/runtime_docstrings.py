"""What the package completes when it is imported, for the pages of `make docs`.

Pages are made from the sources, where the settings have their texts, and not their defaults, beside
the fields.
"""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import griffe

from h2o_prefill.config import PrefillConfig


class RuntimeDocstrings(griffe.Extension):
    """Give `PrefillConfig` the docstring that `help` shows, and its fields their defaults."""

    def on_class_members(self, *, cls: griffe.Class, **_: Any) -> None:
        """Replace the docstring of the class and the values of its fields."""
        if cls.path != "h2o_prefill.config.PrefillConfig" or cls.docstring is None:
            return
        cls.docstring.value = inspect.cleandoc(PrefillConfig.__doc__ or "")
        for field in dataclasses.fields(PrefillConfig):
            cls.members[field.name].value = repr(field.default)
