"""A model under sparse prefill beside the same model dense: perplexity, throughput, patterns."""

from __future__ import annotations

from h2o_prefill.eval.ablation import run_ablation
from h2o_prefill.eval.answers import compare_answers
from h2o_prefill.eval.attention_error import measure_attention
from h2o_prefill.eval.attention_flops import AttentionFlops, count_attention_flops
from h2o_prefill.eval.attention_result import AttentionMeasures
from h2o_prefill.eval.calibration import LayerCalibration, calibrate_layers
from h2o_prefill.eval.memory_profile import profile_memory
from h2o_prefill.eval.models import DEFAULT_MODEL, DTYPES, load_model
from h2o_prefill.eval.patterns import AttentionPatterns
from h2o_prefill.eval.perplexity import PerplexityResult, check_settings, evaluate_perplexity
from h2o_prefill.eval.protocols import PROTOCOLS
from h2o_prefill.eval.retrieval import evaluate_retrieval
from h2o_prefill.eval.text import DATASETS, Corpus, load_text
from h2o_prefill.eval.throughput import benchmark_throughput
from h2o_prefill.eval.visualize import visualize_attention_patterns

__all__ = [
    "DATASETS",
    "DEFAULT_MODEL",
    "DTYPES",
    "PROTOCOLS",
    "AttentionFlops",
    "AttentionMeasures",
    "AttentionPatterns",
    "Corpus",
    "LayerCalibration",
    "PerplexityResult",
    "benchmark_throughput",
    "calibrate_layers",
    "check_settings",
    "compare_answers",
    "count_attention_flops",
    "evaluate_perplexity",
    "evaluate_retrieval",
    "load_model",
    "load_text",
    "measure_attention",
    "profile_memory",
    "run_ablation",
    "visualize_attention_patterns",
]
