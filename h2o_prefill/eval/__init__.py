"""A model under sparse prefill beside the same model dense: perplexity, throughput, patterns."""

from __future__ import annotations

from .ablation import run_ablation
from .attention_error import measure_attention
from .attention_result import AttentionMeasures
from .models import DEFAULT_MODEL, DTYPES, load_model
from .patterns import AttentionPatterns, visualize_attention_patterns
from .perplexity import PerplexityResult, attention_flops_ratio, check_settings, evaluate_perplexity
from .protocols import PROTOCOLS
from .retrieval import evaluate_retrieval
from .text import DATASETS, Corpus, load_text
from .throughput import benchmark_throughput

__all__ = [
    "DATASETS",
    "DEFAULT_MODEL",
    "DTYPES",
    "PROTOCOLS",
    "AttentionMeasures",
    "AttentionPatterns",
    "Corpus",
    "PerplexityResult",
    "attention_flops_ratio",
    "benchmark_throughput",
    "check_settings",
    "evaluate_perplexity",
    "evaluate_retrieval",
    "load_model",
    "load_text",
    "measure_attention",
    "run_ablation",
    "visualize_attention_patterns",
]
