"""Errors of sparse attention against dense attention on a real prompt, layer by layer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from h2o_prefill import ops
from h2o_prefill.config import PrefillConfig
from h2o_prefill.eval.attention_flops import find_recalled
from h2o_prefill.functional import (
    NO_RECALL,
    PLAIN_LOGITS,
    LogitOptions,
    RecallLists,
    lists_of_rows,
    sparse_attention,
)
from h2o_prefill.generation.prompts import prompt_ids
from h2o_prefill.generation.runs import Progress, check_model, eval_mode, report_progress
from h2o_prefill.hf.kinds import count_heads
from h2o_prefill.presets import chosen_config
from h2o_prefill.vocabulary import check_ids


@dataclass(frozen=True)
class AttentionMeasures:
    """Errors of sparse attention against dense attention on the same q, k and v.

    `measure_attention` gives the formulas. Layers with fewer heads than others are padded with NaN
    and with empty memory sets.
    """

    l1_error: Tensor  # fp32 [layers, Hq]: relative L1 error; NaN if the dense output is all zeros
    mass_recall: Tensor  # fp32 [layers, Hq]: dense softmax mass on visible keys, mean of the rows
    l1_error_by_chunk: Tensor  # fp32 [chunks, layers, Hq]
    mass_recall_by_chunk: Tensor  # fp32 [chunks, layers, Hq]
    # int32 [chunks, layers, Hkv, K + L + H]: the set after each chunk, to which the next chunk
    # attends; ascending, -1 where absent.
    memory: Tensor
    layers: tuple[int, ...]  # indices of the layers that a sparse prefill runs sparsely
    kv_heads: tuple[int, ...]  # of each of these layers
    chunk_ends: tuple[int, ...]  # where each chunk ends; the last is T
    config: PrefillConfig

    @property
    def jaccard(self) -> Tensor:
        """Jaccard index of the sets after chunks c and c + 1, fp32 [chunks - 1, layers, Hkv]."""
        sets = positions_of(self.memory, self.chunk_ends[-1])
        return (sets[:-1] & sets[1:]).sum(-1) / (sets[:-1] | sets[1:]).sum(-1)

    def head_share(self, chunk: int) -> Tensor:
        """Return the share of KV heads that hold each position after a chunk, fp32 [layers, T]."""
        sets = positions_of(self.memory[chunk], self.chunk_ends[-1])
        return sets.sum(1) / torch.tensor(self.kv_heads).unsqueeze(1)

    def to_dict(self) -> dict[str, Any]:
        """Return the measures as plain dicts, lists and numbers; errors and shares in 0 .. 1.

        `summary` and `by_chunk` hold the mean over all query heads of all layers and the worst
        head, and the mean over all KV heads of the Jaccard index of the sets that a chunk and the
        chunk before attend to.
        """
        stability = self.jaccard
        # The first chunk attends to no set, the second to the first one.
        before = [None, None, *stability]
        error, recall = self.l1_error_by_chunk, self.mass_recall_by_chunk
        return {
            "config": asdict(self.config),
            "tokens": self.chunk_ends[-1],
            "summary": self._summary(self.l1_error, self.mass_recall, stability[:-1]),
            "by_chunk": [
                {"chunk": n, "end": end, **self._summary(error[n], recall[n], before[n])}
                for n, end in enumerate(self.chunk_ends)
            ],
        }

    def _summary(self, error: Tensor, recall: Tensor, stability: Tensor | None) -> dict[str, Any]:
        def mean(values: Tensor) -> float:
            return values.double().nanmean().item()

        def head(values: Tensor, index: Any) -> dict[str, Any]:
            row, column = divmod(int(index), values.shape[1])
            return {"value": values[row, column].item(), "layer": self.layers[row], "head": column}

        return {
            "l1_error_mean": mean(error),
            "l1_error_worst": head(error, np.nanargmax(error)),
            "mass_recall_mean": mean(recall),
            "mass_recall_worst": head(recall, np.nanargmin(recall)),
            "jaccard_mean": None if stability is None else mean(stability),
        }


def measure_attention(
    model: Any,
    input_ids: Tensor,
    chunk_config: PrefillConfig | str | None = None,
    *,
    on_progress: Progress | None = None,
) -> AttentionMeasures:
    """Compare sparse attention with dense attention in every layer, on the layer's own q, k and v.

    The model runs once and densely, so that an error is the layer's own, without errors of earlier
    layers. In fp32 (fp64 for fp64), over the rows i of the prompt or of one chunk, for head h:

    - relative L1 error: sum |x_hid - y_hid| / sum |y_hid|, with x the output of the sparse prefill
      and y the output of dense attention;
    - recall of dense softmax mass: the mean of the dense softmax weights, sinks left out, of the
      keys that row i sees sparsely: its chunk up to itself, the memory set and the recalled keys of
      the chunk, and all keys before it in the dense tail.

    Rows of the first chunk have error 0 and recall 1, since they see everything: both measures of a
    prompt depend on its number of chunks. The q, k and v of one layer are held at a time.

    Parameters
    ----------
    input_ids : Tensor
        int64 [1, T] or [T], at least two tokens.
    model, chunk_config, on_progress
        As in `h2o_prefill.eval`. `min_prefill` has no effect.

    Raises
    ------
    ValueError
        Also if no layer is sparse.
    """
    config = chosen_config(chunk_config)
    prompt = prompt_ids(input_ids)
    length = prompt.shape[1]
    if length < 2:
        raise ValueError(f"input_ids must hold at least two tokens, got {length}")
    check_model(model, length, "input_ids")
    from h2o_prefill.eval.observe import observe_attention
    from h2o_prefill.hf.cache import last_logits_only

    prompt = prompt.to(next(model.parameters()).device)
    recalled = find_recalled(prompt, config)
    total, _ = count_heads(model)
    measures: dict[int, LayerMeasures] = {}

    def observe(call: Any, _: Tensor) -> None:
        index = call.module.layer_idx
        report_progress(on_progress, index, total, f"attention of layer {index}")
        qkv = call.query, call.key, call.value
        of_layer = config.of_layer(index), recalled, call.logit_options
        measures[index] = measure_layer(*qkv, *of_layer)

    check_ids(prompt, model)
    observed = observe_attention(model, observe, config.dense_layers)
    with torch.no_grad(), eval_mode(model), observed:
        model(prompt, use_cache=False, **last_logits_only(model))
    report_progress(on_progress, total, total, "done")
    if not measures:
        raise ValueError(f"dense_layers must leave a layer sparse, got {config.dense_layers}")
    ends = [*range(config.chunk_size, length, config.chunk_size), length]
    rows = torch.tensor(ends).diff(prepend=torch.tensor([0]))
    columns = zip(*measures.values(), strict=True)
    fills = (math.nan, math.nan, math.nan, -1)
    difference, size, mass, memory = (
        stack_layers(column, fill, dim=1) for column, fill in zip(columns, fills, strict=True)
    )
    return AttentionMeasures(
        l1_error=(difference.sum(0) / size.sum(0)).float(),
        mass_recall=(mass.sum(0) / length).float(),
        l1_error_by_chunk=(difference / size).float(),
        mass_recall_by_chunk=(mass / rows[:, None, None]).float(),
        memory=memory,
        layers=tuple(measures),
        kv_heads=tuple(layer.memory.shape[1] for layer in measures.values()),
        chunk_ends=tuple(ends),
        config=config,
    )


class LayerMeasures(NamedTuple):
    """What `measure_layer` found for the rows of each chunk, on the CPU."""

    difference: Tensor  # fp64 [chunks, Hq]: sum |sparse - dense| of the outputs
    size: Tensor  # fp64 [chunks, Hq]: sum |dense|
    mass: Tensor  # fp64 [chunks, Hq]: dense softmax mass on visible keys, summed over rows
    memory: Tensor  # int32 [chunks, Hkv, K + L + H]: the set after each chunk, -1 where absent


def measure_layer(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    config: PrefillConfig,
    recalled: RecallLists = NO_RECALL,
    options: LogitOptions = PLAIN_LOGITS,
) -> LayerMeasures:
    """Compare sparse with dense attention of one layer, q, k and v [1, H, T, D], chunk by chunk."""
    # In 16 bits the rounding of two outputs would count as the error of one.
    query, key, value = (x if x.dtype == torch.float64 else x.float() for x in (query, key, value))
    length, kv_heads = query.shape[2], key.shape[1]
    state = None
    settings = config.to_string()
    chunks: list[tuple[Tensor, ...]] = []
    # Sinks have no part in the shares of a softmax.
    shares_only = options[0], None, options[2]
    for begin in range(0, length, config.chunk_size):
        end = min(begin + config.chunk_size, length)
        q, k, v = query[:, :, begin:end], key[:, :, :end], value[:, :, :end]
        lists = lists_of_rows(recalled, length, begin, end, config.recall_block)
        # The dense tail belongs to the prompt, not to the chunk. A copy would repeat warnings.
        tail = max(0, config.dense_tail - (length - end))
        call = config if tail == config.dense_tail else config.replace(dense_tail=tail)
        # With an indicator of the chunk as values, attention is the share of its keys. A row sees
        # all of them, so that the share of the visible keys is a ratio of two such shares.
        in_chunk = (torch.arange(end, device=query.device) >= begin).to(query)
        in_chunk = in_chunk.unsqueeze(1).expand(1, kv_heads, -1, -1)
        share = ops.dense_attention(q, k, in_chunk, *shares_only)
        seen, _ = sparse_attention(q, k, in_chunk, state, call, lists, *shares_only)
        mass = (share[0, ..., 0].double() / seen[0, ..., 0]).clamp(max=1)
        sparse, state = sparse_attention(q, k, v, state, call, lists, *options)
        dense = ops.dense_attention(q, k, v, *options)
        sums = ((x[0].abs().sum((1, 2), dtype=torch.float64)) for x in (sparse - dense, dense))
        chunks.append((*sums, mass.sum(1), state.checkpoint(1, settings)[0][0]))
    columns = (stack_layers(column, -1, dim=0).cpu() for column in zip(*chunks, strict=True))
    return LayerMeasures(*columns)


def stack_layers(layers: Sequence[Tensor], fill: float, dim: int) -> Tensor:
    """Stack the tensors of all layers along a new dimension; `fill` pads the smaller ones."""
    largest = [max(sizes) for sizes in zip(*(layer.shape for layer in layers), strict=True)]
    padded = []
    for layer in layers:
        whole = layer.new_full(largest, fill)
        whole[tuple(map(slice, layer.shape))] = layer
        padded.append(whole)
    return torch.stack(padded, dim=dim)


def positions_of(memory: Tensor, length: int) -> Tensor:
    """Mark the positions of memory sets, bool [..., length]."""
    # The additional column takes the absent entries.
    members = torch.zeros(*memory.shape[:-1], length + 1, dtype=torch.bool, device=memory.device)
    index = torch.where(memory < 0, length, memory).to(torch.int64)
    return members.scatter_(-1, index, True)[..., :length]
