"""Full layers with attention sinks (gpt-oss) or soft-capped logits (Gemma 2) are sparse."""

from __future__ import annotations

import pytest
import torch
from hf_helpers import EVERYTHING, H2O, RECOMMENDED, assert_close, in_calls, new_cache
from op_testing import widened

from h2o_prefill import enable, ops
from h2o_prefill.reference import ops as oracle

MODELS = {"gemma2": {"attn_logit_softcapping": 0.5}, "gpt-oss": {}}


@pytest.fixture
def model(build, request):
    """A model whose sinks take their share, or whose cap bites."""
    return build(request.param, "eager", **MODELS[request.param])


@pytest.fixture
def ids(make_ids):
    """A prompt that repeats itself, so that recall finds keys."""
    return make_ids(1, 19).repeat(1, 4)[:, :72]


@pytest.mark.parametrize("options", [H2O, RECOMMENDED, EVERYTHING], ids=["h2o", "recall", "all"])
@pytest.mark.parametrize("model", MODELS, indirect=True)
def test_with_a_smaller_memory_it_is_what_the_oracle_gives(
    model, ids, monkeypatch, sparse_layers, options
):
    def in_float64(*arguments):
        out, *state = oracle.chunked_sparse_attention(*widened(arguments))
        return out.float(), *state

    stock = model(ids).logits
    with enable(model, strict=True, **options):
        ours = model(ids).logits
        if options != EVERYTHING:  # whose widening and dense tail are of a call
            assert_close(in_calls(model, new_cache(model), ids, (32, 16, 24)), ours)
            assert sparse_layers == [72, 32, 16, 24]
        monkeypatch.setattr(ops, "chunked_sparse_attention", in_float64)
        assert_close(ours, model(ids).logits)
    assert not torch.allclose(ours[:, 16:], stock[:, 16:], atol=1e-3)
