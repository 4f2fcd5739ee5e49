"""A model under sparse prefill beside the same model dense: perplexity, throughput, patterns."""

from __future__ import annotations

from .ablation import run_ablation
from .answers import compare_answers
from .attention_error import measure_attention
from .attention_flops import AttentionFlops, count_attention_flops
from .attention_result import AttentionMeasures
from .calibration import LayerCalibration, calibrate_layers
from .memory_profile import profile_memory
from .models import DEFAULT_MODEL, DTYPES, load_model
from .patterns import AttentionPatterns
from .perplexity import PerplexityResult, check_settings, evaluate_perplexity
from .protocols import PROTOCOLS
from .retrieval import evaluate_retrieval
from .text import DATASETS, Corpus, load_text
from .throughput import benchmark_throughput
from .visualize import visualize_attention_patterns

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
