"""Faster prefill for long prompts: chunked sparse attention with an H2O memory set.

`enable(model)` makes a Hugging Face model prefill sparsely; `ops` are the operators, `reference` is
the method in readable PyTorch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from h2o_prefill._library import build_info, cmake_prefix_path, load_library

load_library()

from h2o_prefill import _meta as _meta  # noqa: E402
from h2o_prefill import ops  # noqa: E402
from h2o_prefill.attention import ChunkedSparseAttention  # noqa: E402
from h2o_prefill.config import PrefillConfig  # noqa: E402
from h2o_prefill.linear import (  # noqa: E402
    ChunkwiseLinearAttention,
    LinearAttentionState,
    linear_attention,
)
from h2o_prefill.presets import PRESETS, preset_config  # noqa: E402
from h2o_prefill.state import PrefillState  # noqa: E402

if TYPE_CHECKING:
    from h2o_prefill import reference
    from h2o_prefill.eval.ablation.run import run_ablation
    from h2o_prefill.eval.attention.error import measure_attention
    from h2o_prefill.eval.attention.visualize import visualize_attention_patterns
    from h2o_prefill.eval.calibration.calibrate import calibrate_layers
    from h2o_prefill.eval.needles.evaluate import evaluate_retrieval
    from h2o_prefill.eval.perplexity.evaluate import evaluate_perplexity
    from h2o_prefill.eval.speed.throughput import benchmark_throughput
    from h2o_prefill.hf.cache import ChunkedPrefillCache
    from h2o_prefill.hf.enable import disable, enable
    from h2o_prefill.hf.explain import explain
    from h2o_prefill.hf.prefill import chunked_prefill
    from h2o_prefill.package import PrefillPackage

__version__: str = build_info()["version"]

# Loaded on first use, so that importing this package imports neither transformers nor what
# evaluation needs.
_LAZY = {
    "ChunkedPrefillCache": "h2o_prefill.hf",
    "PrefillPackage": "h2o_prefill.package",
    "benchmark_throughput": "h2o_prefill.eval",
    "calibrate_layers": "h2o_prefill.eval",
    "chunked_prefill": "h2o_prefill.hf",
    "disable": "h2o_prefill.hf",
    "enable": "h2o_prefill.hf",
    "explain": "h2o_prefill.hf",
    "evaluate_perplexity": "h2o_prefill.eval",
    "evaluate_retrieval": "h2o_prefill.eval",
    "measure_attention": "h2o_prefill.eval",
    "reference": "h2o_prefill.reference",
    "run_ablation": "h2o_prefill.eval",
    "visualize_attention_patterns": "h2o_prefill.eval",
}

__all__ = [
    "PRESETS",
    "ChunkedPrefillCache",
    "ChunkedSparseAttention",
    "ChunkwiseLinearAttention",
    "LinearAttentionState",
    "PrefillConfig",
    "PrefillPackage",
    "PrefillState",
    "benchmark_throughput",
    "build_info",
    "calibrate_layers",
    "chunked_prefill",
    "cmake_prefix_path",
    "disable",
    "enable",
    "evaluate_perplexity",
    "evaluate_retrieval",
    "explain",
    "linear_attention",
    "measure_attention",
    "ops",
    "preset_config",
    "reference",
    "run_ablation",
    "visualize_attention_patterns",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'h2o_prefill' has no attribute {name!r}")
    module = importlib.import_module(_LAZY[name])
    return module if _LAZY[name] == f"h2o_prefill.{name}" else getattr(module, name)


def __dir__() -> list[str]:
    return sorted(__all__)
