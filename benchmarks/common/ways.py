"""A program in one mode: what a benchmark asks of it, whoever the program is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

# The program of the ways of this library.
OURS = "h2o_prefill"


@dataclass(frozen=True)
class Way:
    """A program and a mode of it; the model is loaded when it is first needed."""

    # Its name, or that of its package.
    program: str
    version: str
    # The name of the way that its loss is measured against: itself, if it is dense.
    dense: str
    # Takes a prompt, int64 [T]: prefill and the first token.
    prefill: Callable[[Tensor], object]
    # Takes prompts, int64 [windows, T], and a range of rows; returns -log p(next token) of
    # those rows in nats, [windows, rows]. None where the program does not tell it.
    nll: Callable[[Tensor, range], Tensor] | None = None
    # Takes a prompt and a number of tokens; prefills, and returns a callable that decodes so
    # many greedily.
    decoder: Callable[[Tensor, int], Callable[[], object]] | None = None
    # In which of several forms the program has the model; its ways of one form decode alike.
    form: str = ""
