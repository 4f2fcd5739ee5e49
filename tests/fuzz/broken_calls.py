"""Every breakage that an operator must refuse with a ValueError."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fuzz.arguments import Filled, Floats, Ints
from fuzz.breakages import (
    INT64_MAX,
    Arguments,
    Breakages,
    grown,
    of_attention,
    of_lists,
    of_logits,
    of_number,
    of_recall,
    resized,
)


def _history(a: Arguments) -> int:
    return a["k"].shape[2]


def _past(a: Arguments) -> int:
    return a["k"].shape[2] - a["q"].shape[2]


def _room(a: Arguments) -> int:
    return a["position"].values[0] + a["q"].shape[2]


def _longer_than_history(a: Arguments) -> Arguments:
    return {"q": resized(a["q"], 2, a["k"].shape[2] + 1)}


_BUDGETS = {
    **of_number("local_window", -1, 2**22 + 1, INT64_MAX),
    **of_number("heavy_budget", -1, 2**31 - 1, INT64_MAX),
    **of_number("sink_tokens", -1, -INT64_MAX - 1, INT64_MAX),
}

_SETTINGS = of_number(
    "settings",
    "",
    "unknown",
    "h2o,chunk_size=0",
    "h2o,chunk_size",
    "h2o,local_window=-1",
    "h2o,dense_tail=-1",
    "h2o,recall_block=0",
    "h2o,heavy_budget=99999999999999999999",
    "h2o,gqa_reduce=mean",
    "recommended,recall=2,recall_block=7",
    "h2o,wide_layers=1,wide_factor=2147483647,local_window=4194304",
)


def _scores_of_state(history: Any) -> Breakages:
    def other_dtype(a: Arguments) -> Arguments | None:
        scores = a["scores"]
        dtype = scores and ("float32" if scores.dtype == "float64" else "float64")
        return scores and {"scores": Floats(scores.shape, dtype)}

    return {
        "scores has other heads": grown("scores", 1),
        "scores has another batch": grown("scores", 0),
        "scores has another dtype": other_dtype,
        **history,
    }


_STATE = {
    **_scores_of_state(
        {
            "scores is longer than the history": lambda a: (
                a["scores"] and {"scores": resized(a["scores"], 2, _history(a) + 1)}
            )
        }
    ),
    **of_lists("memory", _past),
    **of_number("last_chunk_begin", -1, INT64_MAX),
    "last_chunk_begin is behind the earlier tokens": lambda a: {"last_chunk_begin": _past(a) + 1},
    "q is longer than the history": _longer_than_history,
}

_BUFFERS = {
    **_scores_of_state({}),
    "memory has another batch": grown("memory", 0),
    "memory has other heads": grown("memory", 1),
    "memory is int64": lambda a: {"memory": replace(a["memory"], dtype="int64")},
    "cache_key has another head dim": grown("cache_key", 3),
    "cache_value has other heads": grown("cache_value", 1),
    "cache_value has another capacity": grown("cache_value", 2),
    "cache_key has three dimensions": lambda a: {"cache_key": Floats((1, 2, 3), a["q"].dtype)},
    "there is no room": lambda a: (
        {x: resized(a[x], 2, _room(a) - 1) for x in ("cache_key", "cache_value")}
        if _room(a)
        else None
    ),
    "position is negative": lambda a: {"position": Ints((-1, 0), (2,), "int64")},
    "position is the largest int64": lambda a: {"position": Ints((INT64_MAX, 0), (2,), "int64")},
    "position has three numbers": lambda a: {"position": Filled((3,), 0, "int64")},
    "position is int32": lambda a: {"position": Filled((2,), 0, "int32")},
    "q is longer than k": lambda a: {"q": resized(a["q"], 2, a["k"].shape[2] + 1)},
}

_LINEAR = {
    **of_attention(),
    **of_number("chunk_size", 0, -1, -INT64_MAX - 1),
    **of_number("feature_map", "", "elu", "softmax"),
    "k is longer": lambda a: {x: resized(a[x], 2, a[x].shape[2] + 1) for x in ("k", "v")},
    "the decay grows": lambda a: (
        {"log_decay": replace(a["log_decay"], fill="positive")}
        if a["log_decay"] and 0 not in a["log_decay"].shape
        else None
    ),
    "the decay has other heads": lambda a: (
        a["log_decay"] and grown("log_decay", len(a["log_decay"].shape) // 2)(a)
    ),
    "the decay is of two dimensions": lambda a: {
        "log_decay": Floats(a["k"].shape[:2], "float32", fill="negative")
    },
    "the decay is 16-bit": lambda a: (
        a["log_decay"] and {"log_decay": replace(a["log_decay"], dtype="float16")}
    ),
    "the state is of another batch": grown("initial_state", 0),
    "the state has another value dim": grown("initial_state", 3),
    "the state is 16-bit": lambda a: (
        a["initial_state"] and {"initial_state": replace(a["initial_state"], dtype="bfloat16")}
    ),
    "the state is missing": lambda a: {"initial_state": None} if a["initial_normalizer"] else None,
    "the normaliser has another dim": grown("initial_normalizer", 2),
    "both directions of a state": lambda a: {"causal": False} if a["initial_state"] else None,
    "one direction with a diagonal": lambda a: {"causal": True, "diagonal_once": True},
}

BROKEN: dict[str, Breakages] = {
    "accumulate_scores_": {
        **of_lists("memory", lambda a: a["scores"].shape[2]),
        "colsum has another width": grown("colsum", 2),
        "colsum has another dtype": lambda a: {"colsum": Floats(a["colsum"].shape, "float16")},
        "scores are 16-bit": lambda a: {
            x: Floats(a[x].shape, "bfloat16") for x in ("scores", "colsum")
        },
    },
    "advance_position_": {
        **of_number("num_tokens", -1, INT64_MAX, -INT64_MAX - 1),
        **_SETTINGS,
        "position is negative": lambda a: {"position": Ints((0, -1), (2,), "int64")},
        "position has no number": lambda a: {"position": Filled((0,), 0, "int64")},
        "position has two dimensions": lambda a: {"position": Filled((2, 1), 0, "int64")},
    },
    "chunked_sparse_attention": {
        **of_attention(),
        **of_logits(),
        **_STATE,
        **of_recall(_history),
        **_SETTINGS,
    },
    "chunkwise_linear_attention": _LINEAR,
    "chunkwise_linear_attention_backward": {
        **_LINEAR,
        "grad_out is longer": grown("grad_out", 2),
        "grad_out has another dtype": lambda a: {
            "grad_out": replace(
                a["grad_out"],
                dtype="float32" if a["grad_out"].dtype == "float16" else "float16",
            )
        },
        "grad_state has other heads": grown("grad_state", 1),
        "grad_normalizer is wider": grown("grad_normalizer", 2),
    },
    "dense_attention": {
        **of_attention(),
        **of_logits(),
        "q is longer than the history": _longer_than_history,
    },
    "gather_rows": {
        **of_lists("indices", lambda a: a["x"].shape[2], ascending=False),
        "x is integers": lambda a: {"x": Filled(a["x"].shape, 1, "int64")},
        "x has three dimensions": lambda a: {"x": Floats(a["x"].shape[1:])},
    },
    "intra_chunk_attention": {
        **of_attention(),
        **of_number("chunk_size", 0, -1, -INT64_MAX - 1),
        "k is longer": lambda a: {x: resized(a[x], 2, a[x].shape[2] + 1) for x in ("k", "v")},
    },
    "lexical_recall": {
        **of_number("begin", -1, INT64_MAX),
        **of_number("chunk_size", 0, -1),
        **of_number("block", 0, -1, INT64_MAX),
        **of_number("max_matches", 0, 1025, INT64_MAX),
        **of_number("max_suffix", 0, 65, INT64_MAX),
        **of_number("span", 0, 1025, INT64_MAX),
        **of_number("max_count", 0, -1),
        "token_ids is int32": lambda a: {"token_ids": Filled(a["token_ids"].shape, 1, "int32")},
        "token_ids has one dimension": lambda a: {"token_ids": Filled((4,), 1, "int64")},
    },
    "memory_attention": {**of_attention(), **of_lists("indices", _history, ascending=False)},
    "recall_at_position": {
        **of_number("num_tokens", -1, INT64_MAX, -INT64_MAX - 1),
        **_SETTINGS,
        "token_ids is int32": lambda a: {"token_ids": Filled(a["token_ids"].shape, 1, "int32")},
        "token_ids has no room": lambda a: {"num_tokens": a["token_ids"].shape[1] + 1},
        "position is negative": lambda a: {"position": Ints((-1, 0), (2,), "int64")},
    },
    "merge_states": {
        "out_b has another shape": grown("out_b", 2),
        "lse_a has another shape": grown("lse_a", 1),
        "lse_b has four dimensions": lambda a: {"lse_b": Floats(a["out_b"].shape)},
        "lse_a is 16-bit": lambda a: {"lse_a": Floats(a["lse_a"].shape, "bfloat16")},
        "out_a has another dtype": lambda a: {
            "out_a": Floats(
                a["out_a"].shape, "float32" if a["out_a"].dtype == "float16" else "float16"
            )
        },
    },
    "prefill_attention": {
        **of_attention(),
        **of_logits(),
        **_STATE,
        **of_recall(_history),
        **of_number("layer", -1, -INT64_MAX - 1),
        **_SETTINGS,
    },
    "prefill_attention_": {
        **of_attention(),
        **of_logits(),
        **_BUFFERS,
        **of_number("layer", -1, -INT64_MAX - 1),
        **_SETTINGS,
    },
    "select_memory": {
        **of_lists("memory", lambda a: a["chunk_end"]),
        **_BUDGETS,
        **of_number("chunk_begin", -1, INT64_MAX),
        **of_number("chunk_end", -1, 2**31, INT64_MAX),
        "scores are 16-bit": lambda a: {"scores": Floats(a["scores"].shape, "float16")},
        "scores has two dimensions": lambda a: {"scores": Floats(a["scores"].shape[1:])},
    },
}
