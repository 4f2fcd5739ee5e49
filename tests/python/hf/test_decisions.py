"""Which calls go sparse, which dense and why; dense is what the stock model gives."""

import sys

import pytest
import torch
import transformers
from hf_helpers import (
    EXACT,
    SPARSE,
    assert_close,
    assert_close_under_autocast,
    assert_dense,
    in_calls,
)
from transformers import StaticCache

from h2o_prefill import PrefillConfig, enable
from h2o_prefill.hf.call import Call
from h2o_prefill.hf.forward import EnabledState, ForwardContext
from h2o_prefill.hf.kinds import LeftOutMask, form_of
from h2o_prefill.hf.rules import dense_reason


@pytest.mark.parametrize("length", [1, 15, 16])
def test_up_to_one_chunk_is_dense(llama, make_ids, sparse_layers, length):
    ids = make_ids(1, length)
    stock = llama(ids).logits
    with enable(llama, **SPARSE):
        for use_cache in (False, True):
            assert_close(llama(ids, use_cache=use_cache).logits, stock)
    # With a cache, which goes on, the scores of a whole chunk are needed.
    assert sparse_layers == ([16, 16] if length == 16 else [])


def test_an_empty_memory_set_is_dense(llama, ids, sparse_layers):
    with pytest.warns(UserWarning, match="every call is dense"):
        empty = PrefillConfig(chunk_size=16, local_window=0, heavy_budget=0)
    stock = llama(ids).logits
    with enable(llama, empty), pytest.warns(UserWarning, match="the memory set is empty"):
        assert_close(llama(ids).logits, stock)
    with (
        enable(llama, empty, strict=True),
        pytest.raises(NotImplementedError, match="memory set is empty"),
    ):
        llama(ids)
    assert sparse_layers == []


@pytest.mark.parametrize(
    ("settings", "layers"),
    [
        ({"min_prefill": 73}, 0),
        ({"min_prefill": 72}, 2),
        ({"dense_layers": (0,)}, 1),
        ({"dense_layers": (0, 1)}, 0),
    ],
)
def test_settings_that_make_calls_and_layers_dense(llama, ids, sparse_layers, settings, layers):
    stock = llama(ids).logits
    with enable(llama, strict=True, **{**SPARSE, **settings}):
        ours = llama(ids).logits
    assert sparse_layers == [72] * layers
    if layers == 0:
        assert_close(ours, stock)


def with_a_4d_mask(model, ids, monkeypatch):
    mask = torch.zeros(1, 1, 72, 72).masked_fill(torch.ones(72, 72).triu(1).bool(), -1e30)
    mask[..., 30:, 3:9] = -1e30
    return {"attention_mask": mask}


PACKED = {"position_ids": torch.cat([torch.arange(30), torch.arange(42)])[None], "use_cache": False}
PACKING, BOUNDS = ("cu_seq_lens_q", "cu_seq_lens_k"), torch.tensor([0, 30, 72], dtype=torch.int32)


def with_the_width_of_an_encoder(model, ids, monkeypatch):
    """As a decoder of T5Gemma: its forward gets the encoder's ids."""
    model.config.cross_attention_hidden_size = 8
    return {}


def with_its_own_masks(model, ids, monkeypatch):
    home = sys.modules[type(model.model).__module__]
    monkeypatch.setattr(home, "create_causal_mask", lambda **_: None)
    return {}


@pytest.mark.parametrize(
    ("implementation", "change", "reason"),
    [
        ("sdpa", with_a_4d_mask, "custom attention mask"),
        ("eager", with_a_4d_mask, "custom attention mask"),
        ("sdpa", lambda *_: PACKED, "packed"),
        ("sdpa", lambda *_: dict.fromkeys(PACKING, BOUNDS), "packed sequences"),
        ("sdpa", with_the_width_of_an_encoder, "encoder-decoder models"),
        ("sdpa", with_its_own_masks, "makes its own masks"),
        ("sdpa", lambda model, *_: model.train() and {}, "training mode"),
    ],
)
def test_calls_that_are_dense_and_said(
    build, ids, sparse_layers, monkeypatch, implementation, change, reason
):
    model = build("llama", implementation)
    assert_dense(model, reason, sparse_layers, input_ids=ids, **change(model, ids, monkeypatch))


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ["llama", "gemma3", "llama4"])
@pytest.mark.parametrize("first", [20, 1])
def test_a_long_call_after_a_plain_cache_is_dense_and_causal_up_to_its_end(
    build, ids, sparse_layers, implementation, name, first
):
    """The silent mistake to fear: no mask, and sdpa takes the first keys instead of all of them."""
    model, settings = build(name, implementation), {**SPARSE, "chunk_size": 24}
    stock, reason = model(ids).logits, "a cache that was not filled by this model"
    start, other = (model(ids[:, :first]) for _ in range(2))
    with (
        enable(model, strict=True, **settings),
        pytest.raises(NotImplementedError, match=reason),
    ):
        model(ids[:, first:], past_key_values=other.past_key_values)
    with enable(model, **settings), pytest.warns(UserWarning, match=reason):
        rest = model(ids[:, first:], past_key_values=start.past_key_values)
    assert_close(torch.cat([start.logits, rest.logits], dim=1), stock)
    assert sparse_layers == []


def test_softcap_with_sdpa_runs_the_eager_function(build, ids):
    stock = build("gemma2", "eager")(ids).logits
    model = build("gemma2")
    # Some versions of transformers choose sdpa for it, which drops the soft cap.
    model.config._attn_implementation = "sdpa"
    with enable(model, dense_layers=(1,), **SPARSE):
        assert_close(model(ids).logits, stock)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({}, None),
        ({"dropout": 0.1}, "dropout"),
        ({"position_bias": torch.zeros(1, 4, 72, 72)}, "position_bias"),
        ({"indices": torch.zeros(1, 72, 8)}, "its own keys"),
        ({"cache": object()}, "paged"),
    ],
)
def test_arguments_that_make_a_call_dense(llama, arguments, reason):
    query, key = torch.randn(1, 4, 72, 32), torch.randn(1, 2, 72, 32)
    config = PrefillConfig(**SPARSE)
    kwargs = {"position_ids": torch.arange(72), "use_cache": True, **arguments}
    dropout = kwargs.pop("dropout", 0.0)
    layer = llama.model.layers[0].self_attn
    context = ForwardContext(EnabledState(config), None)
    left_out = LeftOutMask(None, 72, 72, 0, 72, None, lambda: None)
    given = (layer, query, key, key, None, dropout, None, kwargs, form_of(layer))
    found = dense_reason(Call(*given, context, left_out=left_out))
    assert found is None if reason is None else reason in found


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_a_static_cache_that_was_filled_before_is_dense(build, ids, sparse_layers, implementation):
    llama = build("llama", implementation)
    stock = llama(ids).logits
    cache = transformers.StaticCache(config=llama.config, max_cache_len=96)
    start = llama(ids[:, :20], past_key_values=cache).logits
    with enable(llama, **SPARSE), pytest.warns(UserWarning, match="static caches that were filled"):
        rest = llama(ids[:, 20:], past_key_values=cache).logits
    assert_close(torch.cat([start, rest], dim=1), stock)
    assert sparse_layers == []


def test_layers_that_share_keys_are_dense(llama, ids, sparse_layers):
    llama.model.layers[1].self_attn.is_kv_shared_layer = True
    with enable(llama, **SPARSE), pytest.warns(UserWarning, match="share the keys"):
        llama(ids)
    assert sparse_layers == [72]


def test_autocast(llama, ids, sparse_layers):
    assert_close_under_autocast(llama, ids, **EXACT)
    llama.config.use_cache = False
    assert_close_under_autocast(llama, ids, **EXACT)
    assert sparse_layers == [72] * 4


def test_autocast_with_a_static_cache(llama, ids, sparse_layers):
    def logits():
        cache = StaticCache(config=llama.config, max_cache_len=90)
        return in_calls(llama, cache, ids, (64, 1, 7)).float()

    with torch.autocast("cpu", dtype=torch.bfloat16):
        stock = logits()
        with enable(llama, **EXACT):
            torch.testing.assert_close(logits(), stock, atol=0.3, rtol=0.1)
    assert 64 in sparse_layers


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("how", ["export", "trace"])
def test_an_exported_or_traced_model_is_dense(llama, ids, how):
    class Logits(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = llama

        def forward(self, ids):
            return self.model(ids, use_cache=False).logits

    def make():
        if how == "export":
            return torch.export.export(Logits(), (ids,), strict=False).module()
        return torch.jit.trace(Logits(), (ids,), check_trace=False)

    try:
        make()
    except IndexError as error:
        pytest.skip(f"transformers {transformers.__version__} cannot do it: {error}")
    stock = llama(ids).logits
    with enable(llama, **SPARSE), pytest.warns(UserWarning, match="is being exported or traced"):
        program = make()
    assert_close(program(ids), stock)
