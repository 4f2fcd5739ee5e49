"""What sparse attention leaves out, layer by layer and head by head, on a real prompt."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from h2o_prefill.config import PrefillConfig
from h2o_prefill.eval.attention.layer_error import LayerMeasures, measure_layer
from h2o_prefill.eval.attention.pattern_measures import stack_layers
from h2o_prefill.eval.attention.result import AttentionMeasures
from h2o_prefill.eval.inputs.prompts import prompt_ids
from h2o_prefill.eval.recalled_keys import find_recalled
from h2o_prefill.eval.runs import (
    Progress,
    check_model,
    eval_mode,
    last_logits_only,
    report_progress,
)
from h2o_prefill.presets import chosen_config


def measure_attention(
    model: Any,
    input_ids: Tensor,
    chunk_config: PrefillConfig | str | None = None,
    *,
    on_progress: Progress | None = None,
) -> AttentionMeasures:
    """Compare sparse attention with dense attention in every layer, on the layer's own q, k and v.

    The model runs once and densely, so that each layer gets the inputs of a dense run: what is
    measured is the error of that layer alone, not what earlier layers have added up. On the q, k
    and v of a layer, in fp32 (fp64 for fp64), with x the output of the sparse prefill, y that of
    dense attention, both [Hq, T, Dv]:

    - relative L1 error of head h over rows R: sum |x_hid - y_hid| / sum |y_hid|, over the rows i in
      R and all d;
    - recall of dense softmax mass of head h over rows R: the mean over i in R of sum p_hij over the
      keys j that row i sees sparsely, with p_hij = exp(z_hij) / sum_{j' <= i} exp(z_hij') and
      z_hij = scale q_hi . k_hj, under the soft cap if the layer has one; its sinks, if it has any,
      are in x and y but not in p. A row sees its chunk up to itself, the memory set that its chunk
      attends to (that of the operator, on these q and k), the keys that it recalls, and all keys
      before it if it lies in the dense tail.

    R is the prompt or one chunk. Rows of the first chunk have error 0 and recall 1, since they see
    everything: both measures of a prompt depend on how many chunks it has.

    One layer is held at a time, and the softmax weights of a block of rows.

    Parameters
    ----------
    model : PreTrainedModel
        A causal decoder with dense attention.
    input_ids : Tensor
        int64 [1, T] or [T], at least two tokens.
    chunk_config : PrefillConfig or str, optional
        Default: that of `enable`. `min_prefill` plays no part.
    on_progress : callable, optional
        Called with (layers begun, layers in all, what runs next).

    Returns
    -------
    AttentionMeasures

    Raises
    ------
    ValueError
        If an argument is out of its range, no layer is sparse, or the model already runs sparsely.
    NotImplementedError
        If the model cannot be prefilled sparsely.
    """
    config = chosen_config(chunk_config)
    prompt = prompt_ids(input_ids)
    length = prompt.shape[1]
    if length < 2:
        raise ValueError(f"input_ids must hold at least two tokens, got {length}")
    check_model(model, length, "input_ids")
    from h2o_prefill.eval.attention.observe import observe_attention

    recalled = find_recalled(prompt, config)
    total = int(getattr(model.config.get_text_config(decoder=True), "num_hidden_layers", 0))
    indices: list[int] = []
    found: list[LayerMeasures] = []

    def observe(call: Any, scaling: float | None) -> None:
        index = call.module.layer_idx
        report_progress(on_progress, index, total, f"attention of layer {index}")
        indices.append(index)
        settings = config.of_layer(index)
        qkv = call.query, call.key, call.value
        found.append(measure_layer(*qkv, settings, recalled, call.logit_options(scaling)))

    last = last_logits_only(model)
    with torch.no_grad(), eval_mode(model), observe_attention(model, observe, config.dense_layers):
        model(prompt.to(next(model.parameters()).device), use_cache=False, **last)
    report_progress(on_progress, total, total, "done")
    if not found:
        raise ValueError(f"dense_layers must leave a layer sparse, got {config.dense_layers}")
    return _assemble(indices, found, length, config)


def _assemble(
    indices: list[int], found: list[LayerMeasures], length: int, config: PrefillConfig
) -> AttentionMeasures:
    ends = tuple(
        min(begin + config.chunk_size, length) for begin in range(0, length, config.chunk_size)
    )
    rows = torch.tensor(ends).diff(prepend=torch.tensor([0]))

    def stacked(name: str, fill: float = math.nan) -> Tensor:
        return stack_layers([getattr(layer, name) for layer in found], fill)

    difference, size, mass = stacked("difference"), stacked("size"), stacked("mass")
    return AttentionMeasures(
        l1_error=(difference.sum(0) / size.sum(0)).float(),
        mass_recall=(mass.sum(0) / length).float(),
        mass_recall_lowest=stacked("lowest_mass").amin(0).float(),
        l1_error_by_chunk=(difference / size).float(),
        mass_recall_by_chunk=(mass / rows[:, None, None]).float(),
        memory=stacked("memory", -1),
        layers=tuple(indices),
        query_heads=tuple(layer.mass.shape[1] for layer in found),
        kv_heads=tuple(layer.memory.shape[1] for layer in found),
        chunk_ends=ends,
        config=config,
    )
