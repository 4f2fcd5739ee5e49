"""Strict causality through a whole model: no logit depends on a later token."""

from __future__ import annotations

import pytest
import torch

from h2o_prefill import enable

BASE = {"chunk_size": 16, "local_window": 4, "heavy_budget": 4}
OPTIONS = {
    "default": {},
    "sinks": {"sink_tokens": 2},
    "dense tail": {"dense_tail": 10},
    "recall": {"recall": 2, "recall_block": 8},
    "recall of rare single tokens": {"recall": 3, "recall_block": 4, "recall_max_count": 2},
    "dense layers": {"dense_layers": (0,)},
    "max over the group": {"gqa_reduce": "max"},
    "no heavy hitters": {"heavy_budget": 0},
}


@pytest.mark.parametrize("name", ["llama", "gemma3"])
@pytest.mark.parametrize("option", list(OPTIONS))
def test_changing_a_token_changes_no_logit_before_it(build, make_ids, option, name):
    # Few different tokens, so that recall finds places.
    model, ids = build(name), make_ids(1, 72) % 9 + 3
    with enable(model, **{**BASE, **OPTIONS[option]}):
        before = model(ids).logits
        for token in (1, 15, 16, 17, 40, 47, 48, 63, 64, 70, 71):
            changed = ids.clone()
            changed[0, token] = (ids[0, token] + 7) % 58 + 3
            after = model(changed).logits
            torch.testing.assert_close(after[:, :token], before[:, :token], atol=1e-6, rtol=0)
            assert (after[:, token] - before[:, token]).abs().amax() > 1e-3


@pytest.mark.parametrize("option", list(OPTIONS))
def test_every_option_changes_what_it_is_for(build, make_ids, option):
    model, ids = build("llama"), make_ids(1, 72) % 9 + 3
    stock = model(ids).logits
    with enable(model, **BASE):
        default = model(ids).logits
    with enable(model, **{**BASE, **OPTIONS[option]}):
        ours = model(ids).logits
    assert ours.isfinite().all() and not torch.allclose(ours[:, 16:], stock[:, 16:], atol=1e-3)
    assert torch.equal(ours, default) == (option == "default")
    torch.testing.assert_close(ours[:, :16], stock[:, :16], atol=1e-5, rtol=1e-5)
