"""The page that shows all figures of attention patterns and says what they show."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from h2o_prefill.eval.attention.html_page import Picture, write_page
from h2o_prefill.eval.attention.patterns import AttentionPatterns
from h2o_prefill.eval.attention.result import AttentionMeasures
from h2o_prefill.eval.environment import environment
from h2o_prefill.eval.recalled_keys import RecalledKeys

_HEADINGS = {
    "memory": "Memory sets",
    "scores": "Attention that positions received",
    "sinks": "The first positions",
    "heavy": "Heavy positions from set to set",
    "survival": "How long heavy positions stay",
    "errors": "Errors by layer and head",
    "chunks": "Errors by chunk",
    "recalled": "Recalled positions",
    "perplexity": "Perplexity against attention flops",
}
PAGE_NAME = "index.html"
# What a folder of figures can hold.
FILES = (*(f"{name}.png" for name in _HEADINGS), PAGE_NAME)
_CAPTIONS = {
    "memory": (
        "One panel for the memory set after each chunk (at most eight of them): which positions "
        "the next chunk still sees, by layer. Black: all KV heads of the layer hold the position; "
        "pale: none does. Vertical lines through all layers are positions that every layer keeps; "
        "what was dropped does not come back in a later panel."
    ),
    "scores": (
        "The score that decides which positions stay: the attention that a position received from "
        "the queries of its own chunk and of every chunk whose memory set held it. Logarithmic, "
        "mean of the KV heads. Positions late in a chunk had fewer queries to be seen by: scores "
        "step up behind a dotted line."
    ),
    "sinks": (
        "Attention sinks: whether the first positions of the prompt survive to the last memory "
        "set. The dashed line is the share that an average position reaches."
    ),
    "heavy": (
        "Jaccard index of the heavy positions (neither sinks nor in the local window) of one "
        "memory set and the next: 1 if all stay, 0 if all are replaced. Mean of the KV heads."
    ),
    "survival": (
        "Of the positions that a head held as heavy, the share that it still holds so and so many "
        "chunks later; one line a layer, dark for the first layers. Counted are positions that "
        "entered early enough to be seen for as long; positions that leave never return."
    ),
    "perplexity": (
        "Settings of an ablation, on the texts that the panels name: perplexity beside dense, with "
        "the standard error of the difference, against the query-key products of attention, "
        "recalled keys and dense tail included. The line joins the settings that no other one "
        "beats in both; they are named below by their numbers."
    ),
}


def write_pattern_page(patterns: AttentionPatterns, path: Path, title: str = "") -> Path:
    """Write the page of figures that `plot_patterns` has drawn.

    Parameters
    ----------
    patterns : AttentionPatterns
        With `paths`.
    path : Path
        The .html file.
    title : str
        What was run.
    """
    captions = dict(_CAPTIONS)
    if patterns.measures is not None:
        captions.update(_error_captions(patterns.measures))
    if patterns.recalled is not None:
        captions["recalled"] = _recall_caption(patterns.recalled)
    pictures = [
        Picture(file, _HEADINGS[name], captions[name]) for name, file in patterns.paths.items()
    ]
    heading = "Attention patterns of sparse prefill"
    return write_page(path, heading, _facts(patterns, title), pictures)


def _facts(patterns: AttentionPatterns, title: str) -> dict[str, str]:
    config, where = patterns.config, environment()
    facts = {"run": title} if title else {}
    facts["prompt"] = f"{patterns.chunk_ends[-1]} tokens in {len(patterns.chunk_ends)} chunks"
    facts["settings"] = (
        f"chunk size S={config.chunk_size}, local window L={config.local_window}, "
        f"heavy budget H={config.heavy_budget}, sinks K={config.sink_tokens}, "
        f"recall {config.recall}, dense tail {config.dense_tail}"
    )
    if config.wide_layers:
        names = ", ".join(map(str, config.wide_layers))
        facts["settings"] += f"; L and H {config.wide_factor} times that in layers {names}"
    if patterns.measures is not None:
        summary = patterns.measures.to_dict()["summary"]
        facts["relative L1 error"] = _mean_and_worst(summary, "l1_error")
        facts["dense softmax mass seen"] = _mean_and_worst(summary, "mass_recall")
    facts["software"] = f"h2o_prefill {where['h2o_prefill']}, torch {where['torch']}"
    facts["commit"] = str(where["commit"])
    facts["machine"] = str(where["gpu"] or where["cpu"])
    return facts


def _mean_and_worst(summary: dict[str, Any], name: str) -> str:
    worst = summary[f"{name}_worst"]
    return (
        f"{100 * summary[f'{name}_mean']:.2f} % (mean of all heads), worst "
        f"{100 * worst['value']:.2f} % (layer {worst['layer']}, head {worst['head']})"
    )


def _error_captions(measures: AttentionMeasures) -> dict[str, str]:
    summary = measures.to_dict()["summary"]
    return {
        "errors": (
            "Sparse against dense attention on the same queries, keys and values, each layer fed "
            "by a dense run: what the layer alone does wrong. Left: sum |sparse - dense| / sum "
            f"|dense| over the outputs of a head, {_mean_and_worst(summary, 'l1_error')}. Right: "
            "the share of the dense softmax that falls on keys which the sparse rows see, "
            f"{_mean_and_worst(summary, 'mass_recall')}. Dark is bad in both. Rows of the first "
            "chunk are exact and count. Grey: the layer has fewer heads."
        ),
        "chunks": (
            "The same by chunk: solid the mean over all heads of all layers, shaded all but the "
            "best and the worst tenth of them. Right: the Jaccard index of the set that a chunk "
            "attends to and that of the chunk before, local windows included, over KV heads."
        ),
    }


def _recall_caption(recalled: RecalledKeys) -> str:
    blocks = recalled.offsets.numel() - 1
    return (
        "Positions that lexical recall brings back, for all layers and heads alike. To the right "
        "the position recalled, upwards the rows that recall it, a block at a time; diagonals are "
        "passages that repeat. Keys that the head holds anyway are included. Mean of "
        f"{blocks} blocks: {recalled.positions.numel() / max(1, blocks):.0f} keys; blocks of the "
        "first chunk recall none, because they see all before them."
    )
