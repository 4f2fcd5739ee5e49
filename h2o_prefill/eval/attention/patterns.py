"""Which positions the memory sets of a real prompt hold, and how much attention they received."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from h2o_prefill.config import PrefillConfig
from h2o_prefill.eval.attention.pattern_measures import stack_layers
from h2o_prefill.eval.inputs.prompts import prompt_ids
from h2o_prefill.eval.recalled_keys import RecalledKeys, find_recalled
from h2o_prefill.eval.runs import Progress, check_model, eval_mode, report_progress
from h2o_prefill.functional import next_memory
from h2o_prefill.presets import chosen_config

if TYPE_CHECKING:
    from h2o_prefill.eval.attention.result import AttentionMeasures


@dataclass(frozen=True)
class AttentionPatterns:
    """Memory sets and scores of one prompt.

    Attributes
    ----------
    memory : Tensor
        int32 [chunks, layers, Hkv, K + L + H]: the set after each chunk, ascending, -1 where
        absent. The next chunk attends to it; after the last chunk it is what a next call would.
    scores : Tensor
        fp32 [layers, Hkv, T]: attention that each position received, over the queries of its own
        chunk and of every chunk whose memory set held it.
    layers : tuple of int
        Indices of the layers that were prefilled sparsely.
    chunk_ends : tuple of int
        Where each chunk ends; the last is T.
    config : PrefillConfig
    kv_heads : tuple of int, optional
        KV heads of each layer; layers with fewer than others are filled up with empty sets and NaN
        scores. None: all have the same.
    recalled : RecalledKeys, optional
        What lexical recall found, if it is on.
    measures : AttentionMeasures, optional
        Errors against dense attention, if they were measured.
    paths : dict of str to Path
        The figures: "memory", "scores", "sinks", "heavy", "survival"; of the errors "errors",
        "chunks"; with recall "recalled"; of an ablation "perplexity".
    page : Path, optional
        An HTML page that holds them all.
    """

    memory: Tensor
    scores: Tensor
    layers: tuple[int, ...]
    chunk_ends: tuple[int, ...]
    config: PrefillConfig
    kv_heads: tuple[int, ...] | None = None
    recalled: RecalledKeys | None = None
    measures: AttentionMeasures | None = None
    paths: dict[str, Path] = field(default_factory=dict)
    page: Path | None = None


def collect_patterns(
    model: Any,
    input_ids: Tensor,
    chunk_config: PrefillConfig | str | None = None,
    *,
    on_progress: Progress | None = None,
) -> AttentionPatterns:
    """Prefill a prompt sparsely, a chunk a call, and keep the memory sets and the scores.

    They are those of one call over the whole prompt.

    Parameters
    ----------
    model, input_ids, chunk_config
        As `visualize_attention_patterns` takes them.
    on_progress : callable, optional
        Called with (chunks done, chunks in all, what runs next).

    Raises
    ------
    ValueError, NotImplementedError
        As `visualize_attention_patterns` does.
    """
    config = chosen_config(chunk_config)
    prompt = prompt_ids(input_ids)
    length = prompt.shape[1]
    check_prompt_length(config, length)
    check_model(model, length, "input_ids")
    from h2o_prefill.hf import ChunkedPrefillCache, chunked_prefill

    cache = ChunkedPrefillCache(config=model.config)
    pieces = prompt.to(next(model.parameters()).device).split(config.chunk_size, dim=1)
    sets: list[list[Tensor]] = []
    ends: list[int] = []
    with eval_mode(model):
        for piece in pieces:
            report_progress(on_progress, len(ends), len(pieces), f"chunk {len(ends)}")
            ends.append((ends[-1] if ends else 0) + piece.shape[1])
            call = _call_config(config, piece.shape[1], length - ends[-1])
            chunked_prefill(
                model, piece, call, chunks_per_call=1, past_key_values=cache, strict=True
            )
            sets.append(
                [next_memory(state, config.of_layer(i))[0].cpu() for i, state in _states(cache)]
            )
    report_progress(on_progress, len(pieces), len(pieces), "done")
    states = _states(cache)
    if not states:
        raise ValueError(f"dense_layers must leave a layer sparse, got {config.dense_layers}")
    return AttentionPatterns(
        memory=torch.stack([stack_layers(layers, -1, heads_dim=0) for layers in sets]),
        scores=stack_layers([state.scores[0].cpu() for _, state in states], math.nan, heads_dim=0),
        layers=tuple(index for index, _ in states),
        chunk_ends=tuple(ends),
        config=config,
        kv_heads=tuple(state.scores.shape[1] for _, state in states),
        recalled=find_recalled(prompt, config),
    )


def check_prompt_length(config: PrefillConfig, length: int, argument: str = "input_ids") -> None:
    """Refuse prompts that have no two memory sets to compare.

    Parameters
    ----------
    config : PrefillConfig
    length : int
        Tokens of the prompt.
    argument : str
        What the user called it, for the errors.

    Raises
    ------
    ValueError
        If there are fewer than two chunks, or the last chunk has one token.
    """
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


def _call_config(config: PrefillConfig, new: int, after: int) -> PrefillConfig:
    """Return the settings with which one chunk goes as it would in one call over the prompt.

    A last chunk goes sparsely however short it is, and the dense tail is the prompt's, not the
    chunk's.
    """
    changes: dict[str, object] = {}
    if new < config.sparse_from:
        changes["min_prefill"] = new
    if config.dense_tail:
        changes["dense_tail"] = max(0, config.dense_tail - after)
    return config.replace(**changes) if changes else config


def _states(cache: Any) -> list[tuple[int, Any]]:
    states = [(index, getattr(layer, "state", None)) for index, layer in enumerate(cache.layers)]
    return [(index, state) for index, state in states if state is not None]
