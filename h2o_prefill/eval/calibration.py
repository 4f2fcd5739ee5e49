"""The layers of a model that cause most of the loss and need larger memory sets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from h2o_prefill.config import PrefillConfig
from h2o_prefill.eval.attention_flops import AttentionFlops, count_attention_flops
from h2o_prefill.eval.inputs.text import Corpus
from h2o_prefill.eval.perplexity.evaluate import PairedRuns, check_settings
from h2o_prefill.eval.perplexity.windows import model_windows
from h2o_prefill.eval.runs import Progress, count_kv_heads, count_layers, count_steps, eval_mode
from h2o_prefill.presets import chosen_config

# What the chosen layers become, and the field of `PrefillConfig` that names them.
KEPT = {"wide": "wide_layers", "dense": "dense_layers"}

_PROTOCOL = "gptq"


@dataclass(frozen=True)
class LayerCalibration:
    """The loss of a model due to the sparse attention of each layer."""

    # The settings measured, with the layers found among its `wide_layers` or `dense_layers`.
    config: PrefillConfig
    # Mean KL(dense || sparse) in nats a token, of the settings as given and of `config`.
    kl_before: float
    kl_after: float
    # The same with one more layer dense; without the layers that were dense, or wide, already.
    kl_by_layer: dict[int, float]
    flops_before: AttentionFlops  # of both on the windows measured
    flops_after: AttentionFlops
    context: int  # tokens of a window
    windows: list[int]

    @property
    def ranking(self) -> list[int]:
        """Layers by their KL when they are dense, the lowest first."""
        return sorted(self.kl_by_layer, key=self.kl_by_layer.__getitem__)


def calibrate_layers(
    model: nn.Module,
    dataset: Tensor | Sequence[int] | Corpus | str,
    chunk_config: PrefillConfig | str | None = None,
    *,
    layers: int = 6,
    keep: str = "wide",
    tokenizer: Any = None,
    context: int = 4096,
    windows: str = "0:1",
    on_progress: Progress | None = None,
) -> LayerCalibration:
    """Find the layers whose sparse attention changes a model's predictions most.

    Most of the loss of sparse prefill comes from a few layers, whose heads retrieve distant tokens.
    One layer after another is made dense while all others stay sparse, and the layers with the
    lowest mean KL(dense || sparse) are chosen. This takes one dense and `num_layers + 2` sparse
    forward passes a window.

    Parameters
    ----------
    model : nn.Module
        A causal language model with dense attention.
    dataset : Tensor, sequence of int, Corpus or str
        As `evaluate_perplexity` takes it. Use another text than for the evaluation.
    chunk_config : PrefillConfig or str, optional
        Settings of the other layers. Default: those of `enable`.
    layers : int
        Number of layers to choose, in addition to those of the settings.
    keep : {"wide", "dense"}
        What the chosen layers become. Wide layers have larger memory sets, dense ones exact
        attention, at a cost quadratic in the length of the prompt.
    tokenizer : optional
        The model's tokenizer, needed where `dataset` is a text.
    context : int
        Tokens of a window: at least two chunks.
    windows : str
        A slice "begin:end" of the windows.
    on_progress : callable, optional
        Called with (forward passes done, passes in all, what runs next).

    Returns
    -------
    LayerCalibration
        `enable(model, calibration.config)` uses the chosen layers.

    Raises
    ------
    ValueError
        As `evaluate_perplexity` does, or if `layers` is not less than the number of candidates.
    ArithmeticError
        If a run gives logits that are not finite.
    """
    config = chosen_config(chunk_config)
    check_settings(config, context, windows, _PROTOCOL)
    if keep not in KEPT:
        raise ValueError(f"keep must be one of {tuple(KEPT)}, got {keep!r}")
    settled = {*config.dense_layers, *getattr(config, KEPT[keep])}
    num_layers, kv_heads = count_layers(model), count_kv_heads(model)
    candidates = [i for i in range(num_layers) if i not in settled]
    if not 1 <= layers < len(candidates):
        raise ValueError(
            f"layers must be at least 1 and fewer than the {len(candidates)} that there are to "
            f"choose from, got {layers}"
        )
    selected, batches = model_windows(model, dataset, tokenizer, context, windows, _PROTOCOL)
    step = count_steps(on_progress, len(batches) * (len(candidates) + 3))
    with torch.no_grad(), eval_mode(model):
        runs = PairedRuns(model, tokenizer, selected, batches, _PROTOCOL, keep_dense=True)

        def measure(tried: PrefillConfig, what: str) -> float:
            def tell(index: int, mode: str) -> None:
                step(f"window {index} {mode if mode == 'dense' else what}")

            return runs.evaluate(tried, tell).kl_mean

        before = measure(config, "sparse")
        by_layer = {
            layer: measure(_with_layers(config, KEPT["dense"], [layer]), f"layer {layer} dense")
            for layer in candidates
        }
        ranking = sorted(by_layer, key=by_layer.__getitem__)
        chosen = _with_layers(config, KEPT[keep], ranking[:layers])
        after = measure(chosen, f"chosen layers {keep}")
    step("done")
    return LayerCalibration(
        config=chosen,
        kl_before=before,
        kl_after=after,
        kl_by_layer=by_layer,
        flops_before=count_attention_flops(batches, config, num_layers, kv_heads),
        flops_after=count_attention_flops(batches, chosen, num_layers, kv_heads),
        context=context,
        windows=list(selected),
    )


def _with_layers(config: PrefillConfig, field: str, layers: list[int]) -> PrefillConfig:
    return config.replace(**{field: tuple(sorted({*getattr(config, field), *layers}))})
