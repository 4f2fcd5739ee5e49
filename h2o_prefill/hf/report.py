"""Report which layers of a model were sparse, which dense, and why."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from h2o_prefill.hf.hooks import handle_of
from h2o_prefill.hf.layer_kinds import can_be_sparse, is_attention, layer_type, window_of
from h2o_prefill.hf.rules import NOT_ENABLED
from h2o_prefill.hf.state import NAME, EnabledState, LayerCalls


@dataclass(frozen=True)
class LayerReport:
    """One attention layer."""

    layer: int
    kind: str  # as in a config's `layer_types`
    mode: str  # what long calls of it are
    reason: str  # why they are dense; empty if they are sparse
    # Calls since the model was enabled, and their query tokens, counted once a batch row.
    sparse_calls: int
    sparse_rows: int
    dense_calls: int
    dense_rows: int


@dataclass(frozen=True)
class ModelReport:
    """The attention layers of a model, in order. `str` gives a table."""

    model: str
    settings: str  # the text of the settings, empty if the model is not enabled
    layers: tuple[LayerReport, ...] = ()

    def __iter__(self) -> Iterator[LayerReport]:
        return iter(self.layers)

    def __str__(self) -> str:
        heads = ("layer", "kind", "calls", "sparse calls (rows)", "dense calls (rows)", "why dense")
        rows = [heads]
        for x in self.layers:
            counts = f"{x.sparse_calls} ({x.sparse_rows})", f"{x.dense_calls} ({x.dense_rows})"
            rows.append((str(x.layer), x.kind, x.mode, *counts, x.reason))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [f"{self.model}: {self.settings or 'not enabled'}"]
        for row in rows:
            lines.append("  ".join(map(str.ljust, row, widths)).rstrip())
        return "\n".join(lines)


def explain(model: PreTrainedModel) -> ModelReport:
    """Return what each attention layer of a model does, and its calls so far.

    The model may be enabled or not. `print` the report for a table.
    """
    handle = next((h for h in map(handle_of, model.modules()) if h is not None), None)
    enabled = None if handle is None else handle.state
    return ModelReport(
        type(model).__name__,
        "" if enabled is None else enabled.config.to_string(),
        tuple(_report(x, enabled) for x in attention_layers(model, enabled and NAME)),
    )


def attention_layers(model: nn.Module, implementation: str | None) -> list[Any]:
    """Return the numbered attention layers of a model by number, those of an implementation."""
    found: list[Any] = []
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if (
            isinstance(getattr(module, "layer_idx", None), int)
            and is_attention(module)
            and hasattr(config, "_attn_implementation")
            and implementation in (None, config._attn_implementation)
        ):
            found.append(module)
    return sorted(found, key=lambda module: module.layer_idx)


def _report(module: Any, enabled: EnabledState | None) -> LayerReport:
    calls = LayerCalls() if enabled is None else enabled.calls.get(module.layer_idx, LayerCalls())
    reason = NOT_ENABLED if enabled is None else _why_dense(module, enabled, calls)
    mode, counts = "dense" if reason else "sparse", {**asdict(calls), "reason": reason}
    return LayerReport(layer=module.layer_idx, kind=layer_type(module), mode=mode, **counts)


def _why_dense(module: Any, enabled: EnabledState, calls: LayerCalls) -> str:
    if module.layer_idx in enabled.config.dense_layers:
        return "one of dense_layers"
    kind = layer_type(module).replace("_", " ")
    if not can_be_sparse(module, enabled.config):
        return "not causal" if kind == "full attention" else kind
    if calls.sparse_calls or calls.reason:
        return "" if calls.sparse_calls else calls.reason
    window = window_of(module)
    return "" if window is None else f"{kind}, sparse for prompts of up to {window} tokens"
