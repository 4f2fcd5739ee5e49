"""Dense calls: which of them our operator takes over from transformers' sdpa function."""

import inspect

import pytest
import torch
import transformers
from hf_helpers import SPARSE, assert_close, in_calls, new_cache, watch
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from h2o_prefill import PrefillConfig, enable
from h2o_prefill.hf.call import Call
from h2o_prefill.hf.dense import attend_densely
from h2o_prefill.hf.forward import EnabledState, ForwardContext
from h2o_prefill.hf.kinds import form_of


@pytest.fixture
def dense_calls(monkeypatch):
    """Return a list that gets (queries, keys) of every layer that our operator computes densely."""
    return watch(monkeypatch, "dense_attention", lambda q, k, *_: (q.shape[2], k.shape[2]))


def test_plain_causal_calls_use_the_operator(llama, make_ids, dense_calls):
    """One chunk, a decoded token, a short call: each after the one before."""
    ids = make_ids(1, 25)
    stock = llama(ids).logits
    assert dense_calls == []
    with enable(llama, **SPARSE):
        ours = in_calls(llama, new_cache(llama), ids, (14, 1, 10))
    assert dense_calls == [(14, 14)] * 2 + [(1, 15)] * 2 + [(10, 25)] * 2
    assert_close(ours, stock)


BROADCAST = {"query": (1, 4, 3, 8), "key": (2, 4, 3, 8)}
FEWER_KEYS = {"query": (1, 4, 5, 8), "key": (1, 4, 3, 8)}
SQUARE = {"query": (1, 4, 3, 8), "key": (1, 4, 3, 8)}


@pytest.mark.parametrize(
    ("shapes", "arguments", "ours"),
    [
        (SQUARE, {}, True),
        (BROADCAST, {}, False),
        (FEWER_KEYS, {}, False),
        (SQUARE, {"position_bias": torch.zeros(1, 4, 3, 3)}, False),
        (SQUARE, {"cache": object()}, False),
    ],
    ids=["plain", "a batch of one is broadcast", "fewer keys", "position_bias", "paged cache"],
)
def test_calls_that_only_pytorch_takes(llama, dense_calls, shapes, arguments, ours):
    for name in arguments:
        if name not in inspect.signature(sdpa_attention_forward).parameters:
            pytest.skip(f"sdpa of transformers {transformers.__version__} does not take {name}")
    query, key = torch.randn(shapes["query"]), torch.randn(shapes["key"])
    config = PrefillConfig(**SPARSE)
    layer = llama.model.layers[0].self_attn
    layer.num_key_value_groups = 1
    context = ForwardContext(EnabledState(config), None)
    scale = query.shape[-1] ** -0.5
    given = (layer, query, key, key, None, 0.0, scale, arguments, form_of(layer))
    out, _ = attend_densely(Call(*given, context))
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, key, is_causal=True)
    torch.testing.assert_close(out, expected.transpose(1, 2))
    assert bool(dense_calls) == ours


LOWER = torch.ones(2, 1, 15, 15, dtype=torch.bool).tril()


def with_a_padded_row(model, ids):
    return {"attention_mask": torch.ones_like(ids).index_fill(1, torch.arange(3), 0)}


def both_ways(model, ids):
    # In one layer alone, because all layers being non-causal is what `enable` warns of.
    model.model.layers[0].self_attn.is_causal = False
    return {}


def with_dropout(model, ids):
    model.train()
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 1e-9
    return {}


@pytest.mark.parametrize(
    ("implementation", "change", "layers"),
    [
        ("eager", lambda model, ids: {}, 0),
        ("sdpa", with_a_padded_row, 0),
        ("sdpa", lambda model, ids: {"attention_mask": LOWER}, 0),
        ("sdpa", both_ways, 1),
        ("sdpa", with_dropout, 0),
        ("sdpa", lambda model, ids: {"output_attentions": True}, 0),
    ],
    ids=["eager", "padding", "mask", "one layer not causal", "dropout", "output_attentions"],
)
def test_other_calls_do_not(build, make_ids, dense_calls, implementation, change, layers):
    model, ids = build("llama", implementation), make_ids(2, 15)
    arguments = change(model, ids)
    stock = model(ids, **arguments).logits
    with enable(model, **SPARSE):
        assert_close(model(ids, **arguments).logits, stock)
    assert dense_calls == [(15, 15)] * layers


@pytest.mark.parametrize("name", ["sdpa", "another"])
def test_an_attention_function_of_the_user_is_called(llama, make_ids, dense_calls, name):
    """Also one registered under the name sdpa."""
    seen, stock = [], ALL_ATTENTION_FUNCTIONS["sdpa"]

    def mine(module, query, *args, **kwargs):
        seen.append(query.shape[2])
        return stock(module, query, *args, **kwargs)

    llama.config._attn_implementation_internal = name
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(ALL_ATTENTION_FUNCTIONS._local_mapping, name, mine)
        with enable(llama, **SPARSE):
            llama(make_ids(1, 15))
    assert seen == [15, 15] and dense_calls == []
