"""Losses on windows in which a passage comes again, against the scores of the same window."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from torch.nn import functional

import h2o_prefill
from h2o_prefill.config import PrefillConfig
from h2o_prefill.eval import evaluate_perplexity, measure_variations
from h2o_prefill.eval.inputs.text import Corpus
from h2o_prefill.eval.inputs.variations import build_window
from h2o_prefill.eval.report import format_json
from h2o_prefill.eval.variations import variations_report

CORPUS = Corpus("foxes", "A quick brown fox did jump over it, the lazy dog. " * 60, "foxes.txt")
SMALL = PrefillConfig(chunk_size=64, local_window=16, heavy_budget=16)
VARIANTS = {"small": SMALL, "recall": SMALL.replace(recall=2, recall_block=32)}
CONTEXT = 256


def test_losses_are_those_of_the_window_and_of_its_changed_part(
    tiny_model: Any, tiny_tokenizer: Any
) -> None:
    steps: list[tuple[int, int, str]] = []
    result = measure_variations(
        tiny_model,
        CORPUS,
        VARIANTS,
        tokenizer=tiny_tokenizer,
        variations=["capitals", "punctuation"],
        context=CONTEXT,
        on_progress=lambda *step: steps.append(step),
    )
    assert [step[0] for step in steps] == list(range(7)) and {step[1] for step in steps} == {6}
    assert steps[4][2] == "punctuation small"
    assert tiny_model.config._attn_implementation == "sdpa"
    rows = [(row.variation, row.variant) for row in result.rows]
    assert rows == [(name, variant) for name in ("capitals", "punctuation") for variant in VARIANTS]
    for row in result.rows:
        config = VARIANTS[row.variant]
        ids, changed = build_window(row.variation, tiny_tokenizer, CORPUS.text, CONTEXT)
        whole = evaluate_perplexity(tiny_model, ids, config, context=CONTEXT, windows="0:1")
        assert row.window.dense_ppl == pytest.approx(whole.dense.ppl, rel=1e-5)
        assert row.window.delta_percent == pytest.approx(whole.delta_percent, rel=1e-4)
        assert row.window.kl_mean == pytest.approx(whole.kl_mean, rel=1e-4)
        assert row.changed_tokens == CONTEXT - changed
        # The tokens of the changed passage, each scored by the row before it.
        with torch.no_grad():
            dense = tiny_model(ids[None]).logits[0, changed - 1 : -1].log_softmax(-1)
            with h2o_prefill.enable(tiny_model, config):
                sparse = tiny_model(ids[None]).logits[0, changed - 1 : -1].log_softmax(-1)
        before, after = (functional.nll_loss(x, ids[changed:]) for x in (dense, sparse))
        assert row.changed.dense_ppl == pytest.approx(math.exp(before), rel=1e-4)
        loss = 100 * (math.exp(after - before) - 1)
        assert row.changed.delta_percent == pytest.approx(loss, rel=1e-3)
        kl = functional.kl_div(sparse, dense, log_target=True, reduction="batchmean")
        assert row.changed.kl_mean == pytest.approx(float(kl), rel=1e-3)
        assert row.changed.kl_mean > 1e-3, "a run that equals the dense one shows nothing"

    report = json.loads(format_json(variations_report(result, model="tiny")))
    expected = {"model": "tiny", "context": CONTEXT, "text_source": "foxes.txt"}
    assert report["config"].items() >= expected.items()
    assert report["config"]["variants"]["recall"]["recall"] == 2
    assert report["rows"][0]["changed"]["kl_mean"] == result.rows[0].changed.kl_mean
