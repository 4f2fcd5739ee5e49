"""Evaluation of sparse against dense prefill: perplexity, throughput, errors of attention."""

from __future__ import annotations

from h2o_prefill.eval.ablation.run import run_ablation
from h2o_prefill.eval.attention.measures import AttentionMeasures, measure_attention
from h2o_prefill.eval.attention_flops import AttentionFlops, count_attention_flops
from h2o_prefill.eval.calibration import HeadCalibration, calibrate_heads
from h2o_prefill.eval.cluster import ModelCluster
from h2o_prefill.eval.comparison import ComparedRun, Comparison, compare
from h2o_prefill.eval.inputs.models import DEFAULT_MODEL, DTYPES, load_model
from h2o_prefill.eval.inputs.text import DATASETS, Corpus, load_text
from h2o_prefill.eval.perplexity.evaluate import (
    PerplexityResult,
    check_settings,
    evaluate_perplexity,
)
from h2o_prefill.eval.perplexity.windows import PROTOCOLS
from h2o_prefill.eval.prompt_files import answer_prompts, read_prompts
from h2o_prefill.eval.retrieval import evaluate_retrieval
from h2o_prefill.eval.timing.memory_profile import profile_memory
from h2o_prefill.eval.timing.throughput import benchmark_throughput
