"""Session files of caches: the layers of a cache as a file, and a file as layers."""

from __future__ import annotations

import operator
import weakref
from dataclasses import replace
from typing import Any

from torch import Tensor
from torch.nn.functional import pad
from transformers.cache_utils import DynamicSlidingWindowLayer

from h2o_prefill.config import PrefillConfig
from h2o_prefill.hf.kinds import enabled_of
from h2o_prefill.hf.layer import ChunkedPrefillLayer
from h2o_prefill.identity import (
    CHANGED,
    Marks,
    Origin,
    difference,
    marks_of,
    model_text,
    old_model_hash,
)
from h2o_prefill.session_file import SessionFile, SessionLayer
from h2o_prefill.state import PrefillState, stacked_checkpoints, unstacked_checkpoints


def session_of(layers: list[Any], token_ids: Tensor | None, origin: Origin | None) -> SessionFile:
    """Return what a session file holds of a cache with such layers; ValueError if none can."""
    model = None if origin is None else origin.model()
    if origin is None or model is None:
        raise ValueError("cache must have been used by an enabled model that still exists")
    changed = "" if origin.changed == "settings" else origin.changed
    # The weights and adapters of now; rule and tokenizer of then.
    now = Marks(*marks_of(model)[:2], *origin.marks[2:])
    changed = changed or difference(origin.marks, now)
    if changed:
        raise ValueError(
            f"cache must be of one state of its model, whose {CHANGED[changed]} changed since it "
            "was filled"
        )
    config = PrefillConfig.parse(origin.settings)
    kinds = [_rows_of(layer, 1) for layer in layers]
    length = int(layers[0].get_seq_length()) if kinds else 0
    held = []
    for number, layer in enumerate(layers):
        rows = _rows_of(layer, length)
        if length == 0 or layer.get_seq_length() != length or layer.keys.shape[2] != rows:
            raise ValueError("cache must hold the same tokens in every layer, and at least one")
        if getattr(layer, "padded", False):
            raise ValueError("cache must not be of a padded batch")
        state = _in_width(getattr(layer, "state", None), config.of_layer(number).memory_size)
        kept = getattr(layer, "checkpoints", None) or {}
        checkpoints = stacked_checkpoints(kept, config.chunk_size)
        held.append(SessionLayer(layer.keys, layer.values, state, checkpoints))
    return SessionFile(model_text(model, origin.marks), origin.settings, length, token_ids, held)


def _in_width(state: PrefillState | None, memory_size: int) -> PrefillState | None:
    """Return a state whose sets have the width of the settings; other settings had another one."""
    if state is None:
        return None
    more = memory_size - state.memory.shape[2]
    return replace(state, memory=pad(state.memory, (0, more), value=-1))


def fill(layers: list[Any], session: SessionFile, model: Any) -> Origin:
    """Put a session into the empty layers of a cache of a model; ValueError if it does not fit."""
    enabled = enabled_of(model.config)
    marks = marks_of(model) if enabled is None else enabled.marks(model)
    if enabled is None:  # then rule, tokenizer and settings come from the file
        words = dict(word.split("=", 1) for word in session.model.split() if "=" in word)
        marks = marks._replace(select=words.get("select", ""), tokenizer=words.get("tokenizer", ""))
    text = old_model_hash(model) if session.version == 1 else model_text(model, marks)
    session.check_origin(text, None if enabled is None else enabled.config)
    wanted = [_rows_of(layer, session.length) for layer in layers]
    found = [held.key.shape[2] for held in session.layers]
    if len(found) != len(wanted) or any(map(operator.lt, found, wanted)):
        raise ValueError(f"it must have {wanted} tokens of the layers, got {found}")
    for layer, held, rows in zip(layers, session.layers, wanted, strict=True):
        key, value = (x[:, :, -rows:].to(model.device) for x in (held.key, held.value))
        layer.lazy_initialization(key, value)
        layer.keys, layer.values = key, value
        if isinstance(layer, ChunkedPrefillLayer):
            layer.state = held.state
            if held.checkpoints is not None:
                chunk_size = PrefillConfig.parse(session.settings).chunk_size
                layer.checkpoints = unstacked_checkpoints(held.checkpoints, chunk_size)
        else:
            layer.cumulative_length = session.length
    return Origin(weakref.ref(model), session.settings, marks)


def _rows_of(layer: Any, length: int) -> int:
    """Return how many of the last tokens a layer holds; ValueError for kinds without a session."""
    if type(layer) is ChunkedPrefillLayer:
        return length
    if type(layer) is DynamicSlidingWindowLayer and layer.sliding_window > 1:
        return min(length, layer.sliding_window - 1)
    raise ValueError(
        "cache must have full attention or sliding windows alone, got a layer of "
        f"{type(layer).__name__}"
    )
