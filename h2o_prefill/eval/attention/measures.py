"""Errors of sparse attention against dense attention on a real prompt, layer by layer."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from h2o_prefill.config import PrefillConfig
from h2o_prefill.eval.attention.layer_error import LayerMeasures, measure_layer
from h2o_prefill.eval.attention.memory_sets import held_positions, jaccard, stack_layers
from h2o_prefill.eval.inputs.prompts import prompt_ids
from h2o_prefill.eval.recalled_keys import find_recalled
from h2o_prefill.eval.runs import (
    Progress,
    check_model,
    count_layers,
    eval_mode,
    last_logits_only,
    report_progress,
)
from h2o_prefill.presets import chosen_config


@dataclass(frozen=True)
class AttentionMeasures:
    """Errors of sparse attention against dense attention on the same q, k and v.

    `measure_attention` gives the formulas. Layers with fewer heads than others are padded with NaN
    and with empty memory sets.
    """

    l1_error: Tensor  # fp32 [layers, Hq]: relative L1 error; NaN if the dense output is all zeros
    mass_recall: Tensor  # fp32 [layers, Hq]: dense softmax mass on visible keys, mean of the rows
    mass_recall_lowest: Tensor  # fp32 [layers, Hq]: that of the row with the least
    l1_error_by_chunk: Tensor  # fp32 [chunks, layers, Hq]
    mass_recall_by_chunk: Tensor  # fp32 [chunks, layers, Hq]
    # int32 [chunks, layers, Hkv, K + L + H]: the set after each chunk, to which the next chunk
    # attends; ascending, -1 where absent.
    memory: Tensor
    layers: tuple[int, ...]  # indices of the layers that a sparse prefill runs sparsely
    query_heads: tuple[int, ...]  # of each of these layers
    kv_heads: tuple[int, ...]
    chunk_ends: tuple[int, ...]  # where each chunk ends; the last is T
    config: PrefillConfig

    @property
    def jaccard(self) -> Tensor:
        """Jaccard index of the sets after chunks c and c + 1, fp32 [chunks - 1, layers, Hkv].

        The local window moves on with each chunk, so the index is below 1 even if all heavy
        positions stay.
        """
        held = held_positions(self.memory, self.chunk_ends[-1])
        return jaccard(held[:-1], held[1:])

    def to_dict(self) -> dict[str, Any]:
        """Return the measures as plain dicts, lists and numbers; errors and shares in 0 .. 1.

        `summary` and `by_chunk` hold the mean over all query heads of all layers and the worst
        head, and the mean over all KV heads of the Jaccard index of the set that a chunk attends to
        and that of the chunk before; `by_layer` holds every head, and the set after the last chunk.
        """
        stability = self.jaccard
        by_chunk = [
            {
                "chunk": chunk,
                "end": end,
                **self._means_and_worst(
                    self.l1_error_by_chunk[chunk], self.mass_recall_by_chunk[chunk]
                ),
                # The first chunk attends to no set, the second to the first one.
                "jaccard_mean": _mean(stability[chunk - 2]) if chunk >= 2 else None,
            }
            for chunk, end in enumerate(self.chunk_ends)
        ]
        names = (
            "l1_error",
            "mass_recall",
            "mass_recall_lowest",
            "l1_error_by_chunk",
            "mass_recall_by_chunk",
        )
        by_layer = [
            {
                "layer": layer,
                **{name: getattr(self, name)[..., row, :heads].tolist() for name in names},
                "jaccard": stability[:, row, :kv_heads].tolist(),
            }
            for row, (layer, heads, kv_heads) in enumerate(
                zip(self.layers, self.query_heads, self.kv_heads, strict=True)
            )
        ]
        return {
            "config": asdict(self.config),
            "tokens": self.chunk_ends[-1],
            "summary": {
                **self._means_and_worst(self.l1_error, self.mass_recall),
                "jaccard_mean": _mean(stability[:-1]),
            },
            "by_chunk": by_chunk,
            "by_layer": by_layer,
        }

    def _means_and_worst(self, error: Tensor, recall: Tensor) -> dict[str, Any]:
        return {
            "l1_error_mean": _mean(error),
            "l1_error_worst": self._head(error, np.nanargmax(error)),
            "mass_recall_mean": _mean(recall),
            "mass_recall_worst": self._head(recall, np.nanargmin(recall)),
        }

    def _head(self, values: Tensor, index: Any) -> dict[str, Any]:
        row, head = divmod(int(index), values.shape[1])
        return {"value": values[row, head].item(), "layer": self.layers[row], "head": head}


def _mean(values: Tensor) -> float:
    return values.double().nanmean().item()


def measure_attention(
    model: Any,
    input_ids: Tensor,
    chunk_config: PrefillConfig | str | None = None,
    *,
    on_progress: Progress | None = None,
) -> AttentionMeasures:
    """Compare sparse attention with dense attention in every layer, on the layer's own q, k and v.

    The model runs once and densely, so that each layer gets the inputs of a dense run: what is
    measured is the error of that layer alone, not the accumulated error of earlier layers. On the
    q, k and v of a layer, in fp32 (fp64 for fp64), with x the output of the sparse prefill, y that
    of dense attention, both [Hq, T, Dv]:

    - relative L1 error of head h over rows R: sum |x_hid - y_hid| / sum |y_hid|, over the rows i in
      R and all d;
    - recall of dense softmax mass of head h over rows R: the mean over i in R of sum p_hij over the
      keys j that row i sees sparsely, with p_hij = exp(z_hij) / sum_{j' <= i} exp(z_hij') and
      z_hij = scale q_hi . k_hj, capped if the layer has a softcap; attention sinks, if it has any,
      are in x and y but not in p. A row sees its chunk up to itself, the memory set that its chunk
      attends to (that of the operator, on these q and k), the keys that it recalls, and all keys
      before it if it is in the dense tail.

    R is the prompt or one chunk. Rows of the first chunk have error 0 and recall 1, since they see
    everything: both measures of a prompt depend on its number of chunks.

    The q, k and v of one layer and the softmax weights of a block of rows are held at a time.

    Parameters
    ----------
    model : PreTrainedModel
        A causal decoder with dense attention.
    input_ids : Tensor
        int64 [1, T] or [T], at least two tokens.
    chunk_config : PrefillConfig or str, optional
        Default: that of `enable`. `min_prefill` has no effect.
    on_progress : callable, optional
        Called with (layers begun, number of layers, description of the next step).

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
    total = count_layers(model)
    found: dict[int, LayerMeasures] = {}

    def observe(call: Any, scaling: float | None) -> None:
        index = call.module.layer_idx
        report_progress(on_progress, index, total, f"attention of layer {index}")
        qkv = call.query, call.key, call.value
        options = call.logit_options(scaling)
        found[index] = measure_layer(*qkv, config.of_layer(index), recalled, options)

    last = last_logits_only(model)
    with torch.no_grad(), eval_mode(model), observe_attention(model, observe, config.dense_layers):
        model(prompt.to(next(model.parameters()).device), use_cache=False, **last)
    report_progress(on_progress, total, total, "done")
    if not found:
        raise ValueError(f"dense_layers must leave a layer sparse, got {config.dense_layers}")
    return _assemble(found, length, config)


def _assemble(
    found: dict[int, LayerMeasures], length: int, config: PrefillConfig
) -> AttentionMeasures:
    ends = [*range(config.chunk_size, length, config.chunk_size), length]
    rows = torch.tensor(ends).diff(prepend=torch.tensor([0]))
    columns = zip(*found.values(), strict=True)
    fills = (math.nan, math.nan, math.nan, math.nan, -1)
    difference, size, mass, lowest, memory = (
        stack_layers(column, fill, dim=1) for column, fill in zip(columns, fills, strict=True)
    )
    return AttentionMeasures(
        l1_error=(difference.sum(0) / size.sum(0)).float(),
        mass_recall=(mass.sum(0) / length).float(),
        mass_recall_lowest=lowest.amin(0).float(),
        l1_error_by_chunk=(difference / size).float(),
        mass_recall_by_chunk=(mass / rows[:, None, None]).float(),
        memory=memory,
        layers=tuple(found),
        query_heads=tuple(layer.mass.shape[1] for layer in found.values()),
        kv_heads=tuple(layer.memory.shape[1] for layer in found.values()),
        chunk_ends=tuple(ends),
        config=config,
    )
