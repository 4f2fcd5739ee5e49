"""The cells of an ablation: settings, and the windows that they run on."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from h2o_prefill.config import PrefillConfig
from h2o_prefill.eval.ablation.grid import Grid, describe
from h2o_prefill.eval.inputs.text import Corpus, encode
from h2o_prefill.eval.perplexity.windows import first_token, select_windows
from h2o_prefill.presets import preset_name


@dataclass(frozen=True)
class Window:
    """Tokens that a cell runs on.

    Attributes
    ----------
    key : str
        Digest of the model and the tokens: what a dense run depends on.
    input_ids : Tensor
        int64 [context]
    """

    key: str
    input_ids: Tensor


@dataclass(frozen=True)
class Cell:
    """One row of the table to be.

    Attributes
    ----------
    key : str
        Digest of all that the result depends on.
    config : PrefillConfig
    context : int
        Tokens of a window.
    indices : range
        The windows' places in the text.
    windows : tuple of Window
    corpus : Corpus
    label : str
        What tells it from the other cells.
    """

    key: str
    config: PrefillConfig
    context: int
    indices: range
    windows: tuple[Window, ...]
    corpus: Corpus
    label: str


def find_cells(
    grid: Grid,
    corpora: Sequence[Corpus],
    model: nn.Module,
    tokenizer: Any,
    windows: str,
    protocol: str,
) -> list[Cell]:
    """Put the combinations of a grid on the windows of texts.

    Parameters
    ----------
    grid : Grid
    corpora : sequence of Corpus
    model : nn.Module
    tokenizer
        The model's.
    windows, protocol : str
        As `evaluate_perplexity` takes them.

    Raises
    ------
    ValueError
        If a text is too short for the windows.
    """
    weights = _fingerprint(model)
    first = first_token(tokenizer, protocol)
    cells: dict[str, Cell] = {}
    for corpus in corpora:
        tokens = encode(tokenizer, corpus.text)
        cut: dict[int, tuple[range, tuple[Window, ...]]] = {}
        for context, config in grid.combinations:
            if context not in cut:
                indices, batches = select_windows(tokens, context, windows, first)
                cut[context] = (
                    indices,
                    tuple(Window(_digest(weights, ids.tolist()), ids) for ids in batches),
                )
            indices, chosen = cut[context]
            key = _digest(
                corpus.name,
                protocol,
                [indices.start, *(window.key for window in chosen)],
                _changed(config),
            )
            label = _label(grid, corpus.name if len(corpora) > 1 else "", context, config)
            cells[key] = Cell(key, config, context, indices, chosen, corpus, label)
    return list(cells.values())


def _changed(config: PrefillConfig) -> dict[str, Any]:
    """Return the fields that are not at their defaults: a new field leaves old keys as they are."""
    return {
        field.name: getattr(config, field.name)
        for field in dataclasses.fields(config)
        if getattr(config, field.name) != field.default
    }


def _fingerprint(model: nn.Module) -> str:
    """Return a digest that another model, or other weights, would hardly share.

    Of the first numbers of each parameter only: a name may stand for other weights tomorrow, but
    reading all of them takes too long.
    """
    return _digest(
        *(
            (name, str(weight.dtype), list(weight.shape), weight.detach().flatten()[:4].tolist())
            for name, weight in model.named_parameters()
        )
    )


def _digest(*values: Any) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]


def _label(grid: Grid, name: str, context: int, config: PrefillConfig) -> str:
    settings = {"context": context, "preset": preset_name(config), **dataclasses.asdict(config)}
    varied = describe({key: settings[key] for key in grid.varied})
    return " ".join(part for part in (name, varied) if part) or describe({"context": context})
