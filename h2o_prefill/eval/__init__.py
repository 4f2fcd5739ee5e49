"""Evaluation of sparse against dense prefill: perplexity, throughput, errors of attention."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from h2o_prefill.eval.ablation import run_ablation
from h2o_prefill.eval.attention import AttentionMeasures, measure_attention
from h2o_prefill.eval.attention_flops import AttentionFlops, count_attention_flops
from h2o_prefill.eval.calibration import HeadCalibration, calibrate_heads
from h2o_prefill.eval.comparison import ComparedRun, Comparison, compare
from h2o_prefill.eval.perplexity import PerplexityResult, check_settings, evaluate_perplexity
from h2o_prefill.eval.retrieval import evaluate_retrieval
from h2o_prefill.eval.timing import benchmark_throughput, profile_memory
from h2o_prefill.eval.windows import PROTOCOLS

if TYPE_CHECKING:
    from h2o_prefill.eval.plots import visualize_attention_patterns


def __getattr__(name: str) -> Any:
    # Only drawing needs matplotlib.
    if name != "visualize_attention_patterns":
        raise AttributeError(f"module 'h2o_prefill.eval' has no attribute {name!r}")
    from h2o_prefill.eval.plots import visualize_attention_patterns

    return visualize_attention_patterns
