"""A program in one mode: what a benchmark asks of it, whoever the program is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

# The program of the ways of this library.
OURS = "h2o_prefill"


@dataclass(frozen=True)
class Way:
    """A program and a mode of it; the model is loaded when it is first needed.

    Attributes
    ----------
    program : str
        Its name, or that of its package.
    version : str
        Of the program.
    dense : str
        The name of the way that its loss is measured against: itself, if it is dense.
    prefill : callable
        Takes a prompt, int64 [T]: prefill and the first token.
    nll : callable, optional
        Takes prompts, int64 [windows, T], and a range of rows; returns -log p(next token) of those
        rows in nats, [windows, rows]. None where the program does not tell it.
    decoder : callable, optional
        Takes a prompt and a number of tokens; prefills, and returns a callable that decodes so many
        greedily.
    form : str
        In which of several forms the program has the model; its ways of one form decode alike.
    """

    program: str
    version: str
    dense: str
    prefill: Callable[[Tensor], object]
    nll: Callable[[Tensor, range], Tensor] | None = None
    decoder: Callable[[Tensor, int], Callable[[], object]] | None = None
    form: str = ""
