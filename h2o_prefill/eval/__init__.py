"""Evaluation of sparse against dense prefill: perplexity, throughput, errors of attention.

Arguments that several evaluations share:

- `model` is a transformers causal decoder with dense attention; where a name is taken, as
  `load_model` knows it.
- `tokenizer` is the model's, needed where there is a text; a model given by name brings its own.
- A text is a `Corpus`, or the name of one that `load_text` knows.
- `config` and `chunk_config` are the settings of the sparse runs, a `PrefillConfig` or a settings
  text. Default: what `enable` takes.
- `context` is the number of tokens of a window, at least two chunks, and `windows` a slice
  "begin:end" of the windows of a text, which do not overlap.
- `on_progress` is called with (steps done, steps in all, what runs next); a cluster counts pieces.

An evaluation raises ValueError for an argument out of its range and for a model that already runs
sparsely, NotImplementedError for one that never can, and ArithmeticError if logits are not finite.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from h2o_prefill.eval.ablation import run_ablation
from h2o_prefill.eval.attention import AttentionMeasures, measure_attention
from h2o_prefill.eval.attention_flops import AttentionFlops, count_attention_flops
from h2o_prefill.eval.cluster import ModelCluster
from h2o_prefill.eval.comparison import ComparedRun, Comparison, compare
from h2o_prefill.eval.perplexity import PerplexityResult, evaluate_perplexity
from h2o_prefill.eval.retrieval import evaluate_retrieval
from h2o_prefill.eval.timing import benchmark_throughput

if TYPE_CHECKING:
    from h2o_prefill.eval.plots import visualize_attention_patterns


def __getattr__(name: str) -> Any:
    # Only drawing needs matplotlib.
    if name != "visualize_attention_patterns":
        raise AttributeError(f"module 'h2o_prefill.eval' has no attribute {name!r}")
    from h2o_prefill.eval.plots import visualize_attention_patterns

    return visualize_attention_patterns
