"""Quality on real text: perplexity of a model under sparse prefill, beside the same model dense."""

from __future__ import annotations

from .models import DEFAULT_MODEL, DTYPES, load_model
from .perplexity import PerplexityResult, attention_flops_ratio, check_settings, evaluate_perplexity
from .protocols import PROTOCOLS
from .text import DATASETS, Corpus, load_text

__all__ = [
    "DATASETS",
    "DEFAULT_MODEL",
    "DTYPES",
    "PROTOCOLS",
    "Corpus",
    "PerplexityResult",
    "attention_flops_ratio",
    "check_settings",
    "evaluate_perplexity",
    "load_model",
    "load_text",
]
