"""Perplexity of dense and sparse runs, against the model called directly."""

import json
import math

import pytest
import torch
from torch.nn import functional

import h2o_prefill
from h2o_prefill.config import PrefillConfig
from h2o_prefill.eval import count_attention_flops, evaluate_perplexity
from h2o_prefill.eval.perplexity import perplexity_report
from h2o_prefill.eval.report import format_json

CONTEXT = 64
CONFIG = PrefillConfig(chunk_size=16, local_window=4, heavy_budget=4)
TOKENS = torch.randint(1, 257, (3 * CONTEXT + 5,), generator=torch.Generator().manual_seed(3))


def _evaluate(model, config=CONFIG, dataset=TOKENS, **options):
    given = {"context": CONTEXT, "windows": "0:1", **options}
    return evaluate_perplexity(model, dataset, config, **given)


@torch.no_grad()
def _direct_nll(model, window):
    logits = model(window.unsqueeze(0)).logits[0].double()
    return functional.cross_entropy(logits[:-1], window[1:], reduction="none")


def test_both_runs_equal_the_model_called_directly(tiny_model):
    seen = []
    tiny_model.train()
    note = lambda *step: seen.append(step)  # noqa: E731
    result = _evaluate(tiny_model, windows="1:3", on_progress=note)
    # The runs take turns in going first.
    runs = ("1 dense", "1 sparse", "2 sparse", "2 dense")
    expected = [(i, 4, f"window {run}") for i, run in enumerate(runs)]
    assert seen == [*expected, (4, 4, "done")]
    assert tiny_model.training and tiny_model.config._attn_implementation == "sdpa"
    tiny_model.eval()
    windows = TOKENS[CONTEXT : 3 * CONTEXT].view(2, CONTEXT)
    dense = torch.stack([_direct_nll(tiny_model, window) for window in windows])
    with h2o_prefill.enable(tiny_model, CONFIG):
        sparse = torch.stack([_direct_nll(tiny_model, window) for window in windows])

    assert (sparse - dense).abs().max() > 0.01, "runs that are equal show nothing"
    assert result.dense.ppl == pytest.approx(math.exp(dense.mean(1).mean()), rel=1e-4)
    assert result.sparse.ppl == pytest.approx(math.exp(sparse.mean(1).mean()), rel=1e-4)
    assert float(result) == result.sparse.ppl
    assert result.sparse.ppl_by_window == pytest.approx(sparse.mean(1).exp().tolist(), rel=1e-4)
    ratio = result.sparse.ppl / result.dense.ppl
    assert result.delta_percent == pytest.approx(100 * (ratio - 1), rel=1e-6)
    assert result.scored_tokens == dense.numel()
    assert result.windows == [1, 2] and result.dense.seconds > 0

    report = json.loads(format_json(perplexity_report(result, model="tiny", dtype="float32")))
    expected = {"model": "tiny", "windows": [1, 2], "chunk_size": 16}
    assert report["config"].items() >= expected.items()
    assert report["dense"]["ppl"] == result.dense.ppl


def test_perplexity_by_chunk_is_that_of_the_chunks_rows(tiny_model):
    result = _evaluate(tiny_model)
    nll = _direct_nll(tiny_model, TOKENS[:CONTEXT])
    expected = [math.exp(rows.mean()) for rows in nll.split(CONFIG.chunk_size)]
    assert result.dense.ppl_by_chunk == pytest.approx(expected, rel=1e-4)
    assert result.sparse.ppl_by_chunk[0] == pytest.approx(expected[0], rel=1e-4)


def test_logits_that_are_not_finite_are_no_result(tiny_model):
    tiny_model.model.norm.weight.data[0] = math.nan
    with pytest.raises(ArithmeticError, match="the dense run of window 0"):
        _evaluate(tiny_model)


def test_attention_is_counted_over_the_windows(tiny_model):
    for config in (CONFIG, CONFIG.replace(recall=2, dense_tail=8)):
        result = _evaluate(tiny_model, config, windows="1:3")
        flops = count_attention_flops(TOKENS[CONTEXT : 3 * CONTEXT].view(2, CONTEXT), config, 2)
        assert result.attention_flops_ratio == flops.ratio > 1
        assert result.recalled_keys == flops.recalled_keys


def test_memory_sets_count_as_errors_have_widened_them(tiny_model):
    config = CONFIG.replace(error_rows=4, error_threshold=0.05, max_widen=4)
    result = _evaluate(tiny_model, config, windows="1:2")
    cache = h2o_prefill.ChunkedPrefillCache(config=tiny_model.config)
    window = TOKENS[None, CONTEXT : 2 * CONTEXT]
    h2o_prefill.chunked_prefill(tiny_model, window, config, cache=cache)
    # The first layer measures no errors. The first chunk has none before it.
    (widened,) = (layer.state.errors for layer in cache.layers[1:])
    factors = widened[0, :, 3].double() / (-(-CONTEXT // config.chunk_size) - 1)
    assert result.widening == pytest.approx(factors.mean().item()) and result.widening > 1
    errors = [{1: widened}]
    flops = count_attention_flops(window, config, 2, len(factors), errors=errors)
    assert result.attention_flops_ratio == flops.ratio
    assert flops.ratio < count_attention_flops(window, config, 2, len(factors)).ratio
    assert _evaluate(tiny_model).widening is None
