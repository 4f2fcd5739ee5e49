"""Report which layers of a model were sparse, which dense, and why."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from h2o_prefill.config import PrefillConfig, crossover_text
from h2o_prefill.hf.call import NOT_ENABLED
from h2o_prefill.hf.kinds import (
    NAME,
    WINDOWED,
    EnabledState,
    is_causal,
    is_cross_attention,
    layer_type,
    window_of,
)
from h2o_prefill.state import CHUNKS, ERROR_SUM, estimated_kl

EMPTY = "the memory set is empty (K + L + H = 0)"


@dataclass(frozen=True)
class LayerReport:
    """One attention layer."""

    layer: int
    kind: str  # as in a config's `layer_types`
    mode: str  # how its long calls attend
    reason: str  # why they are dense; empty if they are sparse
    # Calls since the model was enabled, and their query tokens, counted once a batch row.
    sparse_calls: int = 0
    sparse_rows: int = 0
    dense_calls: int = 0
    dense_rows: int = 0
    error: float | None = None  # relative squared error of the last prompt, mean of all heads


@dataclass(frozen=True)
class ModelReport:
    """The attention layers of a model, in order. `str` gives a table, equal layers in one row."""

    model: str
    settings: str  # the text of the settings, empty if the model is not enabled
    layers: tuple[LayerReport, ...] = ()
    # Of each row of the last sparse prompt, nats a token (`estimated_kl`); None if nothing was
    # measured: `error_rows` is 0, or the prompt had one chunk.
    estimated_kl: tuple[float, ...] | None = None
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
        lines = [f"{self.model}: {self.settings or 'not enabled'}"]
        if self.crossover:
            lines.append(self.crossover)
        for row in rows:
            lines.append("  ".join(map(str.ljust, row, widths)).rstrip())
        if self.estimated_kl is not None:
            values = ", ".join(f"{value:.4f}" for value in self.estimated_kl)
            lines.append(f"estimated KL(dense || sparse) of the last prompt: {values} nats a token")
        return "\n".join(lines)


def report_of(model: nn.Module, enabled: EnabledState | None) -> ModelReport:
    """Return what each attention layer of a model does; `enabled` is None if it is not enabled."""
    modules = attention_layers(model, None if enabled is None else NAME)
    name, layers = type(model).__name__, tuple(_report(module, enabled) for module in modules)
    if enabled is None:
        return ModelReport(name, "", layers)
    config, shortest, crossover = enabled.config, None, ""
    if config.is_auto:
        like = enabled.like(model)
        shortest = config.shortest_sparse_prompt(like)
        crossover = crossover_text(like, shortest)
    measured = [errors for errors in enabled.errors.values() if bool(errors[..., CHUNKS].any())]
    kl = tuple(estimated_kl(measured, config).tolist()) if measured else None
    return ModelReport(name, config.to_string(), layers, kl, shortest, crossover)


def no_model(value: Any) -> ValueError:
    """Return the error for what is no model."""
    return ValueError(f"model must be a transformers PreTrainedModel, got {type(value).__name__}")


def _is_attention(module: nn.Module) -> bool:
    """Return whether a module is an attention layer, or a part of one."""
    return any(word in type(module).__name__ for word in ("Attention", "Attn", "MLA"))


def attention_layers(model: nn.Module, implementation: str | None) -> list[Any]:
    """Return the numbered attention layers of a model by number, if they run `implementation`."""

    def fits(module: Any) -> bool:
        name = getattr(getattr(module, "config", None), "_attn_implementation", "")
        numbered = isinstance(getattr(module, "layer_idx", None), int) and _is_attention(module)
        return numbered and name != "" and implementation in (None, name)

    return sorted(filter(fits, model.modules()), key=lambda module: module.layer_idx)


def _report(module: Any, enabled: EnabledState | None) -> LayerReport:
    """Return what a layer does; `enabled` is None if the model is not enabled."""
    number, kind = module.layer_idx, layer_type(module)
    if enabled is None:
        return LayerReport(number, kind, "dense", NOT_ENABLED)
    counts, error, reason = enabled.counts[number], None, _why_dense(module, enabled)
    if (errors := enabled.errors.get(number)) is not None:
        total, chunks = errors.double().sum((0, 1))[[ERROR_SUM, CHUNKS]].tolist()
        error = total / chunks if chunks else None
    return LayerReport(number, kind, "dense" if reason else "sparse", reason, **counts, error=error)


def _why_dense(module: Any, enabled: EnabledState) -> str:
    config, number = enabled.config, module.layer_idx
    if config.exact or config.memory_size == 0:
        return "exact" if config.exact else EMPTY
    if number in config.dense_layers:
        return "one of dense_layers"
    kind, window = layer_type(module).replace("_", " "), window_of(module)
    if window is not None:
        kind += ", exact"
    if not _can_be_sparse(module, config):
        return "not causal" if kind == "full attention" else kind
    if enabled.counts[number]["sparse_calls"]:
        return ""
    by_window = f"{kind}; sparse for prompts of up to {window} tokens" if window else ""
    return enabled.reasons.get(number, by_window)


def _can_be_sparse(module: nn.Module, config: PrefillConfig) -> bool:
    """Return whether some calls of an attention layer are sparse, by its kind."""
    window, fits = window_of(module), layer_type(module) == "full_attention"
    if window is not None:
        fits = window > config.chunk_size and config.is_long_call(0, window)
    return fits and is_causal(module)


def why_refused(model: PreTrainedModel) -> str:
    """Return why the attention of a model cannot be replaced, empty if it can be."""
    layers = [m for m in model.modules() if _is_attention(m) and hasattr(m, "layer_idx")]
    # DSA and Doge hide the other keys under the names of transformers' implementations alone.
    choosers = ("indexer", "prepare_dynamic_mask")
    if any(getattr(layer, name, None) is not None for layer in layers for name in choosers):
        return "chooses its keys itself"
    # Transformers only logs a warning when a model cannot be switched over.
    config: Any = model.config.get_text_config(decoder=True)
    ours = config._attn_implementation == NAME
    if not ours or (layers and not any(hasattr(layer, "config") for layer in layers)):
        return "does not use transformers' attention interface"
    return ""


def look_at_layers(model: PreTrainedModel, enabled: EnabledState) -> None:
    """Record the kinds of the layers of an enabled model; report if none can be sparse."""
    layers, config = attention_layers(model, NAME), enabled.config
    enabled.causal_by_mask = [
        module.config
        for path, module in model.named_modules()
        if getattr(module, "is_causal", None) is False
        and hasattr(module, "config")
        and not is_cross_attention(module, path)
    ]
    candidates = [layer for layer in layers if _can_be_sparse(layer, config)]
    windows = [window_of(layer) for layer in candidates]
    enabled.only_windows = bool(windows) and None not in windows
    # DeepSeek V4 hides compressed keys by its mask, in addition to its window.
    to_tokens_alone = ("full_attention", "linear_attention", *WINDOWED)
    enabled.leaves_window_masks = all(layer_type(layer) in to_tokens_alone for layer in layers)
    if enabled.leaves_window_masks:
        sliding = (layer for layer in layers if layer_type(layer) != "chunked_attention")
        enabled.windows = {window_of(layer) for layer in sliding}
    why = "" if candidates else _why_none_sparse(model, layers)
    if not config.exact and config.memory_size == 0:
        why = EMPTY
    if why:
        enabled.report(f"no layer of {type(model).__name__} can be sparse: {why}")


def _why_none_sparse(model: PreTrainedModel, layers: list[Any]) -> str:
    if layers:
        encoder_decoder = model.config.is_encoder_decoder
        not_causal = "part of an encoder-decoder" if encoder_decoder else "not causal"
        kinds = [layer_type(x) if is_causal(x) else not_causal for x in layers]
        # Each once, in the order of the layers.
        words = dict.fromkeys(x.removesuffix("_attention").replace("_", " ") for x in kinds)
        return "its attention is " + " or ".join(words)
    modules = [module for module in model.modules() if _is_attention(module)]
    return "" if modules else "it has no attention layers"
