"""Which positions the memory sets of a real prompt hold, and what that costs."""

from __future__ import annotations

import dataclasses
import math
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from h2o_prefill.config import PrefillConfig
from h2o_prefill.eval.attention.measures import (
    AttentionMeasures,
    held_positions,
    measure_attention,
    stack_layers,
)
from h2o_prefill.eval.inputs.prompts import prompt_ids
from h2o_prefill.eval.recalled_keys import RecalledKeys, find_recalled
from h2o_prefill.eval.runs import Progress, check_model, eval_mode, report_progress
from h2o_prefill.functional import next_memory
from h2o_prefill.presets import chosen_config

FIGURES = ("memory.png", "errors.png")


@dataclass(frozen=True)
class AttentionPatterns:
    """Memory sets and scores of one prompt.

    Layers with fewer KV heads than others are padded with empty memory sets and NaN scores.
    """

    # int32 [chunks, layers, Hkv, K + L + H]: the set after each chunk, to which the next chunk
    # attends; ascending, -1 where absent.
    memory: Tensor
    # fp32 [layers, Hkv, T]: attention that each position received, over the queries of its own
    # chunk and of every chunk whose memory set held it.
    scores: Tensor
    layers: tuple[int, ...]  # indices of the layers that ran sparsely
    kv_heads: tuple[int, ...]  # of each of these layers
    chunk_ends: tuple[int, ...]  # where each chunk ends; the last is T
    config: PrefillConfig
    recalled: RecalledKeys | None = None  # what lexical recall found, if it is on
    measures: AttentionMeasures | None = None  # errors against dense attention, if measured
    paths: dict[str, Path] = field(default_factory=dict)  # the figures "memory" and "errors"

    def head_share(self, chunk: int) -> Tensor:
        """Return the share of KV heads that hold each position after a chunk, fp32 [layers, T]."""
        held = held_positions(self.memory[chunk], self.chunk_ends[-1])
        return held.sum(1) / torch.tensor(self.kv_heads).unsqueeze(1)

    def heavy_survival(self) -> Tensor:
        """Return the share of heavy positions still heavy n chunks later, fp32 [chunks, layers].

        Heavy positions are neither sinks nor local. Only those count that became heavy n or more
        chunks before the last one; NaN for none.
        """
        heavy = held_positions(self.memory, self.chunk_ends[-1])
        heavy[..., : self.config.sink_tokens] = False
        for row, layer in enumerate(self.layers):
            window = self.config.of_layer(layer).local_window
            for chunk, end in enumerate(self.chunk_ends):
                heavy[chunk, row, :, max(0, end - window) :] = False
        chunks, held_for = len(heavy), heavy.sum(0)
        # A position that leaves never returns.
        entered = torch.where(held_for > 0, heavy.int().argmax(0), chunks)
        shares = []
        for later in range(chunks):
            seen = entered < chunks - later
            shares.append((seen & (held_for > later)).sum((-1, -2)) / seen.sum((-1, -2)))
        return torch.stack(shares)


def visualize_attention_patterns(
    model: Any,
    input_ids: Tensor,
    chunk_config: PrefillConfig | str | None = None,
    output_dir: str | os.PathLike[str] = "benchmark_results/attention_heatmaps",
    *,
    title: str = "",
    errors: bool = True,
    on_progress: Progress | None = None,
) -> AttentionPatterns:
    """Prefill a prompt sparsely and draw what its memory sets hold, and what that costs.

    `memory.png` shows which positions the KV heads of each layer hold after each chunk (eight of
    the chunks if there are more); `errors.png` the error of each layer and head against dense
    attention, and the share of the dense softmax that falls on visible keys.

    Parameters
    ----------
    model : PreTrainedModel
        A causal decoder with dense attention.
    input_ids : Tensor
        int64 [1, T] or [T]: at least two chunks.
    chunk_config : PrefillConfig or str, optional
        Default: that of `enable`.
    output_dir : path
        Folder for the figures, created if necessary.
    title : str
        Description of the run, for the figures.
    errors : bool
        Measure and draw the errors too, see `measure_attention`: a dense run, which takes longer
        than the sparse one.
    on_progress : callable, optional
        Called with (steps done, number of steps, description of the next step), first for the
        chunks of the sparse run, then for the layers of the dense one.

    Returns
    -------
    AttentionPatterns

    Raises
    ------
    ValueError
        If an argument is out of its range, or the model already runs sparsely.
    NotImplementedError
        If the model cannot be prefilled sparsely.
    ImportError
        If matplotlib is missing.
    """
    from h2o_prefill.eval.attention import plots

    folder = Path(output_dir).expanduser()
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"output_dir must be a folder, got the file {str(folder)!r}")
    patterns = collect_patterns(model, input_ids, chunk_config, on_progress=on_progress)
    if errors:
        measures = measure_attention(model, input_ids, chunk_config, on_progress=on_progress)
        patterns = dataclasses.replace(patterns, measures=measures)
    folder.mkdir(parents=True, exist_ok=True)
    memory, heads = (folder / name for name in FIGURES)
    plots.plot_memory(patterns, memory, title)
    patterns.paths["memory"] = memory
    if patterns.measures is not None:
        plots.plot_errors(patterns.measures, heads, title)
        patterns.paths["errors"] = heads
    return patterns


def collect_patterns(
    model: Any,
    input_ids: Tensor,
    chunk_config: PrefillConfig | str | None = None,
    *,
    on_progress: Progress | None = None,
) -> AttentionPatterns:
    """Keep memory sets and scores of a sparse prefill, a chunk a call; one call has the same."""
    config = chosen_config(chunk_config)
    prompt = prompt_ids(input_ids)
    length = prompt.shape[1]
    check_prompt_length(config, length)
    check_model(model, length, "input_ids")
    from h2o_prefill.hf import ChunkedPrefillCache, chunked_prefill

    cache: Any = ChunkedPrefillCache(config=model.config)
    pieces = prompt.to(next(model.parameters()).device).split(config.chunk_size, dim=1)
    sets: list[Tensor] = []
    ends: list[int] = []
    states: dict[int, Any] = {}
    with eval_mode(model):
        for piece in pieces:
            report_progress(on_progress, len(ends), len(pieces), f"chunk {len(ends)}")
            ends.append((ends[-1] if ends else 0) + piece.shape[1])
            # A last chunk is sparse however short it is, and the dense tail is the prompt's.
            call = config.replace(
                min_prefill=min(config.sparse_from, piece.shape[1]),
                dense_tail=max(0, config.dense_tail - (length - ends[-1])),
            )
            chunked_prefill(
                model, piece, call, chunks_per_call=1, past_key_values=cache, strict=True
            )
            states = {
                index: layer.state
                for index, layer in enumerate(cache.layers)
                if getattr(layer, "state", None) is not None
            }
            if not states:
                raise ValueError(
                    f"dense_layers must leave a layer sparse, got {config.dense_layers}"
                )
            memory = [next_memory(state, config.of_layer(i))[0] for i, state in states.items()]
            sets.append(stack_layers(memory, -1, dim=0).cpu())
    report_progress(on_progress, len(pieces), len(pieces), "done")
    scores = [state.scores[0].cpu() for state in states.values()]
    return AttentionPatterns(
        memory=torch.stack(sets),
        scores=stack_layers(scores, math.nan, dim=0),
        layers=tuple(states),
        kv_heads=tuple(layer.shape[0] for layer in scores),
        chunk_ends=tuple(ends),
        config=config,
        recalled=find_recalled(prompt, config),
    )


def check_prompt_length(config: PrefillConfig, length: int, argument: str = "input_ids") -> None:
    """Raise ValueError for prompts of less than two chunks, or with one token in the last chunk."""
    size = config.chunk_size
    if length < 2 * size:
        raise ValueError(
            f"{argument} must hold at least two chunks of {size} tokens, got {length} tokens"
        )
    if length % size == 1:
        raise ValueError(
            f"{argument} must not end one token after a chunk, because a call of one token is "
            f"dense: cut it to {length - 1} tokens, got {length}"
        )
