"""The state of an enabled model, and what one of its forwards passes to its compiled graph."""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from h2o_prefill._warn import warn
from h2o_prefill.config import PrefillConfig
from h2o_prefill.functional import NO_RECALL, RecallLists
from h2o_prefill.identity import Marks, marks_of
from h2o_prefill.presets import PRESETS
from h2o_prefill.selection import Selector

# The name under which transformers finds our attention function and mask function. No "flash",
# "sdpa" or "flex_attention" inside: transformers reads a meaning into those.
NAME = "h2o_prefill"

# What Hugging Face configs are switched over by, under the configs' ids: several models may share
# one config object, and then the switch of one reaches a model that nobody enabled.
_switched: weakref.WeakValueDictionary[int, EnabledState] = weakref.WeakValueDictionary()


@dataclass
class LayerCalls:
    """What the calls of one layer were."""

    sparse_calls: int = 0
    sparse_rows: int = 0  # query tokens of these calls, counted once a batch row
    dense_calls: int = 0
    dense_rows: int = 0
    reason: str = ""  # why the last long call was dense; empty if none was


@dataclass
class EnabledState:
    """The state of one enabled model."""

    config: PrefillConfig
    # Raise where a call would otherwise fall back to dense attention with a warning.
    strict: bool = False
    # The attention implementation that each config of the model had before.
    previous: list[tuple[Any, str | None]] = field(default_factory=list)
    reported: set[str] = field(default_factory=set)  # reasons already warned of
    # Those whose self-attention layers do not say that they are causal: the mask alone makes
    # them so.
    causal_by_mask: list[Any] = field(default_factory=list)
    # Whether every layer that can be sparse has a window (sliding, or chunks).
    only_windows: bool = False
    # Whether layers with a window take no mask where it holds all keys.
    leaves_window_masks: bool = False
    # The windows of layers that take no mask where it hides some, and the kinds of these layers.
    windows: dict[int | None, str] = field(default_factory=dict)
    # What the calls of each layer were, by its number.
    calls: dict[Any, LayerCalls] = field(default_factory=dict)
    # What `error_rows` measured in each layer for the last prompt, as `PrefillState.errors` has it.
    errors: dict[int, Tensor] = field(default_factory=dict)
    on: bool = False  # whether the model is enabled
    token_text: Tensor | None = None  # what lexical recall knows of the vocabulary
    profile: str = ""  # the file that the settings are from, if they are from one
    select: Selector | None = None  # what chooses memory sets, if the settings do not

    def count(self, layer: Any, rows: int, reason: str | None) -> None:
        """Count a call of a layer; `reason` is None if it was sparse."""
        calls = self.calls.setdefault(layer, LayerCalls())
        if reason is None:
            calls.sparse_calls += 1
            calls.sparse_rows += rows
        else:
            calls.dense_calls += 1
            calls.dense_rows += rows
            calls.reason = reason or calls.reason

    def note_errors(self, layer: int | None, errors: Tensor | None) -> None:
        """Keep the errors of a layer, [B, Hkv, 4], for reports."""
        if layer is not None and errors is not None:
            self.errors[layer] = errors

    def marks(self, model: Any) -> Marks:
        """Return what tells the present state of this model from others."""
        return marks_of(model, self.select and self.select.rule, self.token_text)

    def owns(self, hf_config: Any) -> bool:
        """Return whether a Hugging Face config is one of this model's."""
        return any(config is hf_config for config, _ in self.previous)

    def previous_of(self, hf_config: Any) -> str | None:
        """Return the attention implementation that a config had before, None if unknown."""
        return next((name for config, name in self.previous if config is hf_config), None)

    def report(self, reason: str) -> None:
        """Warn of a reason once, or raise if strict."""
        if self.strict:
            raise NotImplementedError(f"h2o_prefill: {reason}")
        if reason not in self.reported:
            self.reported.add(reason)
            warn(f"h2o_prefill: {reason}")

    def mark(self, on: bool) -> None:
        """Note that the configs of this model are switched over, or as they were."""
        self.on = on
        for config, _ in self.previous:
            if on:
                _switched[id(config)] = self
            else:
                _switched.pop(id(config), None)


def enabled_of(hf_config: Any) -> EnabledState | None:
    """Return what has switched a Hugging Face config over, None if nothing has."""
    enabled = _switched.get(id(hf_config))
    return enabled if enabled is not None and enabled.owns(hf_config) else None


# For a model whose user set attn_implementation="h2o_prefill" and enabled nothing: it is dense.
DEFAULT_STATE = EnabledState(PRESETS["h2o"])


@dataclass
class GraphCall:
    """What a compiled graph, or a static cache, cannot determine about a forward."""

    config: PrefillConfig
    settings: str
    previous: str | None  # the attention implementation that the model had before
    sparse: bool  # whether layers that can be sparse are, by the number of tokens
    cached: bool  # whether the model was given a cache
    # Whether the model was called with a mask of two dimensions that hides nothing, so that
    # the graph leaves it out.
    unpadded: bool
    # Whether no mask means plain causal attention, since our mask function made none before
    # the forward.
    plain: bool
    windows: frozenset[int]  # whose masks it made none of before the forward either
    candidates: int  # tokens at the end of the call that assisted decoding verifies
    recall: RecallLists = NO_RECALL  # what `lexical_recall` found for the call
    # Of a static cache, int64 [2] on the CPU, as `ops.prefill_attention_` takes it.
    position: Tensor | None = None
    # Layers that the graph attended in, and why they had to be dense: empty if by design,
    # None if they were as the settings say (`is_sparse`).
    outcomes: list[tuple[int, str | None]] = field(default_factory=list)
    # bool: whether the graph left out a mask that hides something after all.
    hidden: list[Tensor] = field(default_factory=list)

    def is_sparse(self, number: int) -> bool:
        """Return whether a layer that can be sparse is."""
        return self.sparse and number not in self.config.dense_layers


# `call`: the forward that is under way in this thread, None if it cannot be in a graph. `layer`:
# the layer of the cache that was updated last; attention that follows belongs to it. `compiled`:
# whether the hooks of the model that was called run under torch.compile. Dynamo reads attributes of
# a thread's own alone, so this is no class with defaults.
graph = threading.local()


def call_in_graph() -> GraphCall | None:
    """Return the forward that torch.compile is tracing, None if attention must break its graph."""
    if not torch.compiler.is_dynamo_compiling():
        return None
    call: GraphCall | None = getattr(graph, "call", None)
    return call
