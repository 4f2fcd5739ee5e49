"""Selection rules: functions that choose the keys of earlier chunks that a chunk attends to.

A rule gets a `SelectionContext` and returns positions for each KV head. It replaces the choice of
K, L and H; within a chunk attention stays exact, and recalled keys are added as without a rule.
The rules below are baselines of the literature, with budgets of K + L + H keys.
"""

from __future__ import annotations

import importlib
import runpy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from h2o_prefill.config import PrefillConfig
from h2o_prefill.state import PrefillState

# The sinks of StreamingLLM, where the settings have none.
_SINKS = 4


@dataclass(frozen=True)
class SelectionContext:
    """What a selection rule gets: one layer of a prompt, up to the end of its last chunk.

    The chunk that attends to the positions begins at `end`; nothing of it is known here. Tensors
    belong to the prefill: a rule must not change them in place.

    Attributes
    ----------
    layer : int or None
        Index of the layer; None where layers share a module.
    config : PrefillConfig
        Settings of the layer.
    begin, end : int
        The last chunk's positions [begin, end), with tokens that were decoded after it.
    scores : Tensor
        float32 [B, Hkv, end]: attention that each position received, as the operators sum it.
    memory : Tensor
        int32 [B, Hkv, any]: the positions that the last chunk attended to, ascending, then -1.
    queries : Tensor
        [B, Hq, n, D], after RoPE, of the tokens from `begin` on. n is 0 after a session
        file was read, and less than end - begin after decoding.
    keys, values : Tensor
        [B, Hkv, end, D] and [B, Hkv, end, Dv].
    scale : float
        The softmax scale.
    """

    layer: int | None
    config: PrefillConfig
    begin: int
    end: int
    scores: Tensor
    memory: Tensor
    queries: Tensor
    keys: Tensor
    values: Tensor
    scale: float

    @property
    def budget(self) -> int:
        """K + L + H of the settings, without the widening by errors."""
        return self.config.sink_tokens + self.config.local_window + self.config.heavy_budget


# Returns int32 or int64 [B, Hkv, any]: positions in [0, end) in any order, -1 where absent.
SelectionRule = Callable[[SelectionContext], Tensor]


class Selector:
    """A selection rule with its checks."""

    def __init__(self, rule: SelectionRule) -> None:
        if not callable(rule):
            raise ValueError(f"select must be a selection rule, a callable, got {rule!r}")
        function = getattr(rule, "func", rule)  # of a functools.partial
        self.rule, self.name = rule, getattr(function, "__qualname__", type(rule).__qualname__)
        self.dot_products: float | Tensor = 0.0  # with the keys selected so far, mean of the heads

    def select(
        self,
        state: PrefillState,
        keys: Tensor,
        values: Tensor,
        config: PrefillConfig,
        layer: int | None,
        scale: float | None,
    ) -> Tensor:
        """Return the set after `state` and all keys, int32 [B, Hkv, M], ascending, then -1.

        Raises ValueError, which names the rule, if it does not return one.
        """
        end, heads = keys.shape[2], [*keys.shape[:2]]
        given = SelectionContext(
            layer=layer,
            config=config,
            begin=state.last_chunk_begin,
            end=end,
            scores=functional.pad(state.scores, (0, end - state.scores.shape[2])),
            memory=state.memory,
            queries=keys[:, :0, :0] if state.queries is None else state.queries,
            keys=keys,
            values=values,
            scale=keys.shape[3] ** -0.5 if scale is None else scale,
        )
        chosen: Any = self.rule(given)
        where = f"selection rule {self.name!r} in layer {layer}"
        if not _is_plain(chosen) or chosen.ndim != 3 or [*chosen.shape[:2]] != heads:
            expected = f"a dense tensor, int32 or int64 {[*heads, 'any']}"
            raise ValueError(f"{where} must return positions, {expected}, got {_kind(chosen)}")
        chosen = chosen.to(keys.device)
        ordered = chosen.masked_fill(chosen == -1, end).sort(-1).values
        outside = chosen[(chosen < -1) | (chosen >= end)]
        twice = ordered[..., 1:][(ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] < end)]
        if len(outside):
            raise ValueError(
                f"{where} must return positions in [0, {end}), those before the chunk that attends "
                f"to them, or -1, got {int(outside[0])}"
            )
        if len(twice):
            raise ValueError(
                f"{where} must return a position once a head, got {int(twice[0])} twice"
            )
        return ordered.masked_fill(ordered == end, -1).int()


def _is_plain(chosen: Any) -> bool:
    kinds = torch.int32, torch.int64
    dense = isinstance(chosen, Tensor) and chosen.layout is torch.strided and not chosen.is_nested
    return dense and not chosen.is_meta and chosen.dtype in kinds


def _kind(chosen: Any) -> str:
    """Return what a rule has returned, in words: a nested tensor has no shape."""
    if not isinstance(chosen, Tensor):
        return type(chosen).__name__
    shape = "nested" if chosen.is_nested else [*chosen.shape]
    return f"{chosen.dtype} {shape}, {chosen.layout} on {chosen.device}"


def load_rule(text: str) -> SelectionRule:
    """Return a rule by its name in `RULES`, or as MODULE:FUNCTION or FILE.py:FUNCTION."""
    if text in RULES:
        return RULES[text]
    source, _, name = text.rpartition(":")
    try:
        is_file = source.endswith(".py")
        names = runpy.run_path(source) if is_file else vars(importlib.import_module(source))
        return Selector(names[name]).rule
    except (ImportError, OSError, KeyError, ValueError) as error:
        raise ValueError(
            f"select must be {', '.join(RULES)}, MODULE:FUNCTION or FILE.py:FUNCTION, got {text!r} "
            f"({type(error).__name__}: {error})"
        ) from error


def sinks_and_window(given: SelectionContext) -> Tensor:
    """Select the first positions and the last ones, as StreamingLLM (arXiv 2309.17453).

    Sinks are K of the settings, or 4 where that is 0; the window takes the rest of the budget.
    """
    sinks = min(given.config.sink_tokens or _SINKS, given.budget)
    positions = torch.arange(given.end, device=given.keys.device)
    kept = (positions < sinks) | (positions >= given.end - given.budget + sinks)
    return positions[kept].expand(*given.keys.shape[:2], -1)


def tri_shape(given: SelectionContext) -> Tensor:
    """Select as `sinks_and_window`, where the last rows of a call are dense (arXiv 2412.10319).

    These are `dense_tail` of the settings, which must not be 0.
    """
    if given.config.dense_tail == 0:
        raise ValueError("dense_tail must be > 0 in the settings of the rule 'tri_shape', got 0")
    return sinks_and_window(given)


def snapkv(given: SelectionContext, observed: int = 32, pooled: int = 7) -> Tensor:
    """Select what the last queries attend to most, after SnapKV (arXiv 2404.14469).

    Softmax weights of the last `observed` queries of the chunk, summed over them and the query
    heads of a KV head, and the largest of `pooled` neighbours; with the last `observed` keys in any
    case. Where no queries are known, scores take the place of these sums.
    """
    weights = given.scores
    queries = given.queries[:, :, -observed:]
    if rows := queries.shape[2]:
        keys = given.keys.unsqueeze(2).float()
        logits = queries.unflatten(1, (keys.shape[1], -1)).float() @ keys.transpose(-1, -2)
        last = given.begin + given.queries.shape[2]
        positions = torch.arange(given.end, device=keys.device)
        later = positions > torch.arange(last - rows, last, device=keys.device).unsqueeze(1)
        weights = (logits * given.scale).masked_fill(later, -torch.inf).softmax(-1).sum((2, 3))
    votes = functional.max_pool1d(weights, pooled, stride=1, padding=pooled // 2)
    votes[..., -observed:] = torch.inf
    return votes.topk(min(given.budget, given.end)).indices


RULES: dict[str, SelectionRule] = {
    rule.__name__: rule for rule in (sinks_and_window, tri_shape, snapkv)
}
