"""What a compiled graph needs to know of a forward, and cannot find out by itself."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import torch
from torch import Tensor

from h2o_prefill.config import PrefillConfig
from h2o_prefill.functional import NO_RECALL, RecallLists

MASKED = "a custom attention mask, or padding in a static cache, is not supported"


@dataclass
class GraphCall:
    """One forward of an enabled model, as its compiled graph and a static cache see it."""

    config: PrefillConfig
    settings: str
    # The attention implementation that the model had before.
    previous: str | None
    # Whether layers that can be sparse are, by the number of tokens.
    sparse: bool
    # Whether the model was given a cache.
    cached: bool
    # Whether the model was called with a mask of two dimensions that hides nothing, so that
    # the graph leaves it out.
    unpadded: bool
    # Whether no mask means plain causal attention, since our mask function made none before
    # the forward.
    plain: bool
    # Tokens at the end of the call that assisted decoding verifies.
    candidates: int
    # What `lexical_recall` found for the call.
    recall: RecallLists = NO_RECALL
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
