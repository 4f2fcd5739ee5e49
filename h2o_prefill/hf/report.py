"""Report which layers of a model were sparse, which dense, and why."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from h2o_prefill.config import PrefillConfig, crossover_text
from h2o_prefill.hf.forward import EnabledState, LayerCalls
from h2o_prefill.hf.kinds import (
    NAME,
    attends_to_tokens_alone,
    can_be_sparse,
    chooses_keys,
    is_attention,
    is_cross_attention,
    layer_type,
    why_none_sparse,
    window_of,
)
from h2o_prefill.hf.rules import NOT_ENABLED
from h2o_prefill.state import CHUNKS, ERROR_SUM, estimated_kl


@dataclass(frozen=True)
class LayerReport:
    """One attention layer."""

    layer: int
    kind: str  # as in a config's `layer_types`
    mode: str  # how its long calls attend
    reason: str  # why they are dense; empty if they are sparse
    # Calls since the model was enabled, and their query tokens, counted once a batch row.
    sparse_calls: int
    sparse_rows: int
    dense_calls: int
    dense_rows: int
    error: float | None = None  # relative squared error of the last prompt, mean of all heads


@dataclass(frozen=True)
class ModelReport:
    """The attention layers of a model, in order. `str` gives a table, equal layers in one row."""

    model: str
    settings: str  # the text of the settings, empty if the model is not enabled
    profile: str  # the file that they are from; empty if the user gave them
    layers: tuple[LayerReport, ...] = ()
    # Of each row of the last sparse prompt, nats a token (`estimated_kl`), 0 for a row that was too
    # short to be sparse; None if nothing was
    # measured: `error_rows` is 0, the prompt had one chunk, or the batch had padding.
    estimated_kl: tuple[float, ...] | None = None
    select: str = ""  # the name of the selection rule, empty if there is none
    # Tokens of the shortest sparse prompt, and why, if `min_prefill` is "auto".
    shortest_sparse_prompt: int | None = None
    crossover: str = ""

    def __iter__(self) -> Iterator[LayerReport]:
        return iter(self.layers)

    def __str__(self) -> str:
        heads = ("layer", "kind", "calls", "sparse calls (rows)", "dense calls (rows)")
        rows: list[tuple[str, ...]] = [(*heads, "error", "why dense")]
        for _, same in groupby(self.layers, lambda x: replace(x, layer=0, error=None)):
            group = list(same)
            x, last = group[0], group[-1]
            counts = f"{x.sparse_calls} ({x.sparse_rows})", f"{x.dense_calls} ({x.dense_rows})"
            errors = sorted({f"{y.error:.4f}" for y in group if y.error is not None})
            error = " to ".join(errors if len(errors) < 2 else (errors[0], errors[-1]))
            number = f"{x.layer}" if x is last else f"{x.layer}-{last.layer}"
            rows.append((number, x.kind, x.mode, *counts, error, x.reason))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        source = f" (profile {self.profile})" if self.profile else ""
        source += f", keys selected by {self.select}" if self.select else ""
        lines = [f"{self.model}: {self.settings or 'not enabled'}{source}"]
        if self.crossover:
            lines.append(self.crossover)
        for row in rows:
            lines.append("  ".join(map(str.ljust, row, widths)).rstrip())
        if self.estimated_kl is not None:
            values = ", ".join(f"{value:.4f}" if value else "dense" for value in self.estimated_kl)
            lines.append(f"estimated KL(dense || sparse) of the last prompt: {values} nats a token")
        return "\n".join(lines)


def report_of(model: nn.Module, enabled: EnabledState | None) -> ModelReport:
    """Return what each attention layer of a model does; `enabled` is None if it is not enabled."""
    return ModelReport(
        type(model).__name__,
        "" if enabled is None else enabled.config.to_string(),
        "" if enabled is None else enabled.profile,
        tuple(
            _report(x, enabled) for x in attention_layers(model, None if enabled is None else NAME)
        ),
        None if enabled is None else _estimated_kl(enabled),
        "" if enabled is None or enabled.select is None else enabled.select.name,
        *_crossover(model, enabled),
    )


def _crossover(model: Any, enabled: EnabledState | None) -> tuple[int | None, str]:
    if enabled is None or not enabled.config.is_auto:
        return None, ""
    like, shortest = enabled.like(model), enabled.shortest_sparse_prompt(model)
    return shortest, crossover_text(like, shortest)


def no_model(given: Any) -> ValueError:
    """Return the error for what is no model; a pipeline has one."""
    where = ": give pipeline.model" if isinstance(getattr(given, "model", None), nn.Module) else ""
    return ValueError(
        f"model must be a transformers PreTrainedModel, got {type(given).__name__}{where}"
    )


def _estimated_kl(enabled: EnabledState) -> tuple[float, ...] | None:
    measured = [errors for errors in enabled.errors.values() if bool(errors[..., CHUNKS].any())]
    return tuple(estimated_kl(measured, enabled.config).tolist()) if measured else None


def attention_layers(model: nn.Module, implementation: str | None) -> list[Any]:
    """Return the numbered attention layers of a model by number, if they run `implementation`."""
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
    error = None
    if enabled is not None and (errors := enabled.errors.get(module.layer_idx)) is not None:
        total, number = errors.double().sum((0, 1))[[ERROR_SUM, CHUNKS]].tolist()
        error = total / number if number else None
    return LayerReport(
        layer=module.layer_idx, kind=layer_type(module), mode=mode, error=error, **counts
    )


def _why_dense(module: Any, enabled: EnabledState, calls: LayerCalls) -> str:
    if enabled.config.exact:
        return "exact"
    if module.layer_idx in enabled.config.dense_layers:
        return "one of dense_layers"
    kind, window = layer_type(module).replace("_", " "), window_of(module)
    if window is not None:
        kind += ", exact"
    if not can_be_sparse(module, enabled.config):
        return "not causal" if kind == "full attention" else kind
    if calls.sparse_calls or calls.reason:
        return "" if calls.sparse_calls else calls.reason
    return "" if window is None else f"{kind}; sparse for prompts of up to {window} tokens"


def causal_by_mask(model: PreTrainedModel, configs: list[Any], config: PrefillConfig) -> list[Any]:
    """Return the Hugging Face configs of self-attention layers that need their masks to be causal.

    These are layers that say that they are not causal: encoders, and decoders which leave
    causality to their masks; and layers that choose keys among those that the mask shows, unless
    the config has others which can be sparse. In a model whose layers add the mask to their logits
    themselves, and so have no config that could name our attention function, it is all `configs`.
    """
    numbered = [m for m in model.modules() if is_attention(m) and hasattr(m, "layer_idx")]
    switched: list[Any] = [module for module in numbered if hasattr(module, "config")]
    if numbered and not switched:
        return configs
    others = [m.config for m in switched if can_be_sparse(m, config) and not chooses_keys(m)]
    choosing = [m.config for m in switched if chooses_keys(m)]
    by_choice = [one for one in choosing if all(one is not other for other in others)]
    return by_choice + [
        module.config
        for path, module in model.named_modules()
        if getattr(module, "is_causal", None) is False
        and hasattr(module, "config")
        and not is_cross_attention(module, path)
    ]


def look_at_layers(model: PreTrainedModel, enabled: EnabledState) -> None:
    """Record the kinds of the layers of an enabled model; report if none can be sparse."""
    modules = [module for module in model.modules() if is_attention(module)]
    numbered = [module for module in modules if hasattr(module, "layer_idx")]
    configs = [getattr(module, "config", None) for module in numbered]
    switched = any(getattr(one, "_attn_implementation", None) == NAME for one in configs)
    layers = attention_layers(model, NAME)
    candidates = [layer for layer in layers if can_be_sparse(layer, enabled.config)]
    windows = [window_of(layer) for layer in candidates]
    enabled.only_windows = bool(windows) and None not in windows
    enabled.leaves_window_masks = all(attends_to_tokens_alone(layer) for layer in layers)
    if enabled.leaves_window_masks:
        enabled.windows = {window_of(layer): layer_type(layer) for layer in layers}
        enabled.windows.pop(None, None)
    why = None
    if layers:
        kinds = why_none_sparse(layers, enabled.config, bool(model.config.is_encoder_decoder))
        why = None if kinds is None else f"its attention is {kinds}"
    elif not modules:
        why = "it has no attention layers"
    elif numbered and not switched:
        why = "its attention layers do not use transformers' attention interface"
    if why is not None:
        enabled.report(f"no layer of {type(model).__name__} can be sparse: {why}")
