"""Which calls go sparse, which dense and why; dense is what the stock model gives."""

from __future__ import annotations

import sys
import warnings

import pytest
import torch
import transformers

from h2o_prefill import ChunkedPrefillCache, PrefillConfig, enable
from h2o_prefill.hf.call import Call
from h2o_prefill.hf.forward import ForwardContext
from h2o_prefill.hf.rules import dense_reason
from h2o_prefill.hf.state import EnabledState

EXACT = {
    "chunk_size": 16,
    "local_window": 64,
    "heavy_budget": 64,
}  # holds every prompt of these tests
SPARSE = {"chunk_size": 16, "local_window": 4, "heavy_budget": 4}

# name, layers that go sparse, reason of the warning for the others
TABLE = [
    ("llama", 2, None),
    ("qwen3", 2, None),
    ("gpt2", 2, None),
    ("mistral", 2, None),
    ("gemma2-uncapped", 1, None),
    ("gemma3", 1, None),
    ("llama4", 1, None),
    ("gemma2", 1, None),
    ("gpt-oss", 1, None),
    ("deepseek-v3", 2, None),
]
WINDOW = 24  # of the zoo's models
ALL_SLIDING = ["mistral-window", "phi3-window"]


@pytest.mark.parametrize(("name", "layers", "reason"), TABLE)
def test_prefill_with_room_for_everything_equals_stock(
    build, ids, sparse_layers, name, layers, reason
):
    # Some versions of transformers run Gemma 2 with sdpa, which drops its soft cap.
    model = build(name, "eager" if name == "gemma2" else None)
    stock = model(ids).logits
    with warnings.catch_warnings(record=True) as caught, enable(model, **EXACT):
        warnings.simplefilter("always")
        ours = model(ids).logits
    torch.testing.assert_close(ours, stock, atol=1e-5, rtol=1e-5)
    assert sparse_layers == [72] * layers
    ours_only = [str(w.message) for w in caught if "h2o_prefill" in str(w.message)]
    assert len(ours_only) == (0 if reason is None else 1)
    assert reason is None or reason in ours_only[0]


@pytest.mark.parametrize(("name", "layers", "reason"), TABLE)
def test_strict_raises_where_the_table_says_dense(build, ids, name, layers, reason):
    model = build(name)
    with enable(model, strict=True, **SPARSE):
        if reason is None:
            assert model(ids).logits.isfinite().all()
        else:
            with pytest.raises(NotImplementedError, match=reason):
                model(ids)


@pytest.mark.parametrize("name", ALL_SLIDING)
def test_a_model_of_sliding_layers_only_is_told_of_when_enabled(build, ids, sparse_layers, name):
    model = build(name)
    stock = model(ids).logits
    settings = {**EXACT, "chunk_size": WINDOW}
    with pytest.warns(UserWarning, match="no layer of .* can be sparse"):
        handle = enable(model, **settings)
    with handle:
        torch.testing.assert_close(model(ids).logits, stock, atol=1e-5, rtol=1e-5)
    assert sparse_layers == []
    with pytest.raises(NotImplementedError, match="no layer of"):
        enable(model, strict=True, **settings)
    assert model.config._attn_implementation == "sdpa"


def test_sparse_differs_from_dense_when_the_memory_is_small(llama, ids, sparse_layers):
    stock = llama(ids).logits
    with enable(llama, **SPARSE):
        ours = llama(ids).logits
    torch.testing.assert_close(ours[:, :16], stock[:, :16], atol=1e-5, rtol=1e-5)
    assert (ours[:, 16:] - stock[:, 16:]).abs().amax() > 1e-2
    assert sparse_layers == [72, 72]


def test_without_a_cache(llama, ids, sparse_layers):
    with enable(llama, **SPARSE):
        torch.testing.assert_close(
            llama(ids, use_cache=False).logits, llama(ids).logits, atol=0, rtol=0
        )
    assert sparse_layers == [72] * 4


@pytest.mark.parametrize("length", [1, 15, 16])
def test_up_to_one_chunk_is_dense(llama, make_ids, sparse_layers, length):
    ids = make_ids(1, length)
    stock = llama(ids).logits
    with enable(llama, **SPARSE):
        for use_cache in (False, True):
            ours = llama(ids, use_cache=use_cache).logits
            torch.testing.assert_close(ours, stock, atol=1e-5, rtol=1e-5)
    # With a cache, which goes on, the scores of a whole chunk are needed.
    assert sparse_layers == ([16, 16] if length == 16 else [])


def test_an_empty_memory_set_is_dense_unless_asked_for(llama, ids, sparse_layers):
    with pytest.warns(UserWarning, match="every call is dense"):
        empty = PrefillConfig(chunk_size=16, local_window=0, heavy_budget=0)
    stock = llama(ids).logits
    with enable(llama, empty), pytest.warns(UserWarning, match="the memory set is empty"):
        torch.testing.assert_close(llama(ids).logits, stock, atol=1e-5, rtol=1e-5)
    with (
        enable(llama, empty, strict=True),
        pytest.raises(NotImplementedError, match=r"memory set is empty.*block_diagonal=True"),
    ):
        llama(ids)
    assert sparse_layers == []
    with enable(llama, empty.replace(block_diagonal=True), strict=True):
        llama(ids)
    assert sparse_layers == [72, 72]


def test_min_prefill_moves_the_border(llama, ids, sparse_layers):
    with enable(llama, min_prefill=73, **SPARSE):
        llama(ids)
        assert sparse_layers == []
    with enable(llama, min_prefill=72, **SPARSE):
        llama(ids)
        assert sparse_layers == [72, 72]


def test_decoding_is_dense_even_if_every_length_may_be_sparse(llama, ids, sparse_layers):
    with enable(llama, min_prefill=1, strict=True, **SPARSE):
        llama.generate(ids, max_new_tokens=4, do_sample=False)
        cache = ChunkedPrefillCache(config=llama.config)
        llama.generate(ids, past_key_values=cache, max_new_tokens=4, do_sample=False)
    assert sparse_layers == [72] * 4


def test_dense_layers(llama, ids, sparse_layers):
    stock = llama(ids).logits
    with enable(llama, dense_layers=(0,), **SPARSE):
        llama(ids)
        assert sparse_layers == [72]
    with enable(llama, dense_layers=(0, 1), **SPARSE):
        torch.testing.assert_close(llama(ids).logits, stock, atol=1e-5, rtol=1e-5)
    assert sparse_layers == [72]


def test_wide_layers_have_their_own_sizes(llama, ids):
    """All layers wide is larger sizes for all; one wide layer has a larger memory set."""
    larger = {name: 3 * SPARSE[name] for name in ("local_window", "heavy_budget")}
    with enable(llama, **{**SPARSE, **larger}):
        expected = llama(ids).logits
    with enable(llama, wide_layers=(0, 1), wide_factor=3, **SPARSE):
        assert torch.equal(llama(ids).logits, expected)
    with enable(llama, wide_layers=(1,), wide_factor=3, **SPARSE) as handle:
        cache = ChunkedPrefillCache(config=llama.config)
        one_call = llama(ids).logits
        first, second = ids.split([32, ids.shape[1] - 32], dim=1)
        llama(first, past_key_values=cache)
        in_calls = llama(second, past_key_values=cache).logits
        size = handle.config.memory_size
    assert not torch.equal(one_call, expected)
    torch.testing.assert_close(in_calls, one_call[:, 32:], atol=1e-5, rtol=1e-5)
    assert [layer.state.memory.shape[-1] for layer in cache.layers] == [size, 3 * size]


def test_rows_of_equal_length_go_sparse_and_do_not_mix(llama, make_ids, sparse_layers):
    batch = make_ids(3, 72)
    with enable(llama, **SPARSE):
        together = llama(batch, attention_mask=torch.ones_like(batch)).logits
        assert sparse_layers == [72, 72]
        for row, logits in zip(batch, together, strict=True):
            alone = llama(row.unsqueeze(0)).logits[0]
            torch.testing.assert_close(logits, alone, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_a_4d_mask_is_dense(build, ids, sparse_layers, implementation):
    model = build("llama", implementation)
    mask = torch.zeros(1, 1, 72, 72).masked_fill(torch.ones(72, 72).triu(1).bool(), -1e30)
    mask[..., 30:, 3:9] = -1e30
    stock = model(ids, attention_mask=mask).logits
    with enable(model, **SPARSE), pytest.warns(UserWarning, match="custom attention mask"):
        ours = model(ids, attention_mask=mask).logits
    torch.testing.assert_close(ours, stock, atol=1e-5, rtol=1e-5)
    assert sparse_layers == []


def test_packed_positions_are_dense(llama, ids, sparse_layers):
    positions = torch.cat([torch.arange(30), torch.arange(42)]).unsqueeze(0)
    stock = llama(ids, position_ids=positions, use_cache=False).logits
    with enable(llama, **SPARSE), pytest.warns(UserWarning, match="packed"):
        ours = llama(ids, position_ids=positions, use_cache=False).logits
    torch.testing.assert_close(ours, stock, atol=1e-5, rtol=1e-5)
    assert sparse_layers == []


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ["llama", "gemma3", "llama4"])
@pytest.mark.parametrize("first", [20, 1])
def test_a_long_call_after_a_plain_cache_is_dense_and_causal_up_to_its_end(
    build, ids, sparse_layers, implementation, name, first
):
    """The silent mistake to fear: no mask, and sdpa takes the first keys instead of all of them."""
    model = build(name, implementation)
    stock = model(ids).logits
    start = model(ids[:, :first])
    with (
        enable(model, **{**SPARSE, "chunk_size": 24}),
        pytest.warns(UserWarning, match="a cache that was not filled by this model"),
    ):
        rest = model(ids[:, first:], past_key_values=start.past_key_values)
    both = torch.cat([start.logits, rest.logits], dim=1)
    torch.testing.assert_close(both, stock, atol=1e-5, rtol=1e-5)
    assert sparse_layers == []


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt-oss", "deepseek-v3", "mistral-window"])
def test_short_calls_after_a_cache_equal_one_call(build, make_ids, implementation, name):
    if name in ("gemma2", "gpt-oss") and implementation == "sdpa":
        pytest.skip("transformers runs these models eagerly")
    model, ids = build(name, implementation), make_ids(1, 40)
    stock, cache, parts = model(ids).logits, None, []
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="h2o_prefill: no layer")
        handle = enable(model, chunk_size=64, local_window=4, heavy_budget=4)
    with handle:
        for piece in ids.split([13, 1, 9, 9, 8], dim=1):
            out = model(piece, past_key_values=cache)
            cache = out.past_key_values
            parts.append(out.logits)
    torch.testing.assert_close(torch.cat(parts, dim=1), stock, atol=1e-5, rtol=1e-5)


def test_softcap_with_sdpa_runs_the_eager_function(build, ids):
    stock = build("gemma2", "eager")(ids).logits
    model = build("gemma2")
    # Some versions of transformers choose sdpa for it, which drops the soft cap.
    model.config._attn_implementation = "sdpa"
    with enable(model, dense_layers=(1,), **SPARSE):
        ours = model(ids).logits
    torch.testing.assert_close(ours, stock, atol=1e-5, rtol=1e-5)


def test_training_and_gradients_are_dense(llama, ids, sparse_layers):
    stock = llama(ids).logits
    with enable(llama, **SPARSE):
        with torch.enable_grad(), pytest.warns(UserWarning, match="gradients are on"):
            loss = llama(ids, labels=ids).loss
            loss.backward()
        assert llama.lm_head.weight.grad.abs().sum() > 0
        llama.train()
        with pytest.warns(UserWarning, match="training mode"):
            torch.testing.assert_close(llama(ids).logits, stock, atol=1e-5, rtol=1e-5)
        llama.eval()
        assert sparse_layers == []
        llama(ids)
        assert sparse_layers == [72, 72]


ARGUMENTS = [
    ({}, None),
    ({"dropout": 0.1}, "dropout"),
    ({"softcap": 30.0}, None),
    ({"s_aux": torch.zeros(4)}, None),
    ({"position_bias": torch.zeros(1, 4, 72, 72)}, "position_bias"),
    ({"cu_seq_lens_q": torch.tensor([0, 72])}, "packed"),
    ({"indices": torch.zeros(1, 72, 8)}, "its own keys"),
    ({"cache": object()}, "paged"),
    ({"sliding_window": 24}, ""),
    ({"is_causal": False}, ""),
]


@pytest.mark.parametrize(("arguments", "reason"), ARGUMENTS)
def test_arguments_that_make_a_call_dense(llama, arguments, reason):
    query, key = torch.randn(1, 4, 72, 32), torch.randn(1, 2, 72, 32)
    config = PrefillConfig(**SPARSE)
    kwargs = {"position_ids": torch.arange(72), "use_cache": True, **arguments}
    dropout = kwargs.pop("dropout", 0.0)
    layer = llama.model.layers[0].self_attn
    run = ForwardContext(EnabledState(config))
    run.plain.add((72, 72))
    given = dense_reason(Call(layer, query, key, key, None, dropout, None, kwargs, config, run))
    assert given == reason if not reason else reason in given


def test_a_decoder_that_knows_the_width_of_its_encoder_is_dense(llama, ids, sparse_layers):
    """As that of T5Gemma: the ids of its forward are those of the encoder."""
    llama.config.cross_attention_hidden_size = 8
    with enable(llama, **SPARSE), pytest.warns(UserWarning, match="encoder-decoder models"):
        llama(ids)
    assert sparse_layers == []


def test_output_attentions_is_dense_and_gives_weights(build, ids, sparse_layers):
    model = build("llama", "eager")
    stock = model(ids, output_attentions=True)
    with enable(model, **SPARSE), pytest.warns(UserWarning, match="output_attentions"):
        ours = model(ids, output_attentions=True)
    torch.testing.assert_close(ours.attentions[1], stock.attentions[1], atol=1e-5, rtol=1e-5)
    assert sparse_layers == []


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_a_static_cache_that_was_filled_before_is_dense(build, ids, sparse_layers, implementation):
    from transformers import StaticCache

    llama = build("llama", implementation)
    stock = llama(ids).logits
    cache = StaticCache(config=llama.config, max_cache_len=96)
    start = llama(ids[:, :20], past_key_values=cache).logits
    with enable(llama, **SPARSE), pytest.warns(UserWarning, match="static caches that were filled"):
        rest = llama(ids[:, 20:], past_key_values=cache).logits
    torch.testing.assert_close(torch.cat([start, rest], dim=1), stock, atol=1e-5, rtol=1e-5)
    assert sparse_layers == []


def test_a_model_that_makes_its_own_masks_is_dense(llama, ids, sparse_layers, monkeypatch):
    stock = llama(ids).logits
    home = sys.modules[type(llama.model).__module__]
    monkeypatch.setattr(home, "create_causal_mask", lambda **_: None)
    with enable(llama, **SPARSE), pytest.warns(UserWarning, match="makes its own masks"):
        ours = llama(ids).logits
    torch.testing.assert_close(ours, stock, atol=1e-5, rtol=1e-5)
    assert sparse_layers == []


def test_packing_arguments_are_dense(llama, ids, sparse_layers):
    bounds = torch.tensor([0, 30, 72], dtype=torch.int32)
    with enable(llama, **SPARSE), pytest.warns(UserWarning, match="packed sequences"):
        llama(ids, cu_seq_lens_q=bounds, cu_seq_lens_k=bounds)
    assert sparse_layers == []


def test_non_causal_attention_is_dense(llama, ids, sparse_layers):
    stock = llama(ids).logits
    for layer in llama.model.layers:
        layer.self_attn.is_causal = False
    with pytest.warns(UserWarning, match="no layer of"):
        handle = enable(llama, **SPARSE)
    with handle:
        both_ways = llama(ids).logits
    assert sparse_layers == []
    assert (both_ways[:, 0] - stock[:, 0]).abs().amax() > 1e-2


def test_layers_that_share_keys_are_dense(llama, ids, sparse_layers):
    llama.model.layers[1].self_attn.is_kv_shared_layer = True
    with enable(llama, **SPARSE), pytest.warns(UserWarning, match="share the keys"):
        llama(ids)
    assert sparse_layers == [72]


def test_one_warning_for_each_reason(llama, make_ids):
    ids = make_ids(2, 72)
    mask = torch.ones_like(ids)
    mask[0, 9] = 0  # a hole
    with enable(llama, **SPARSE), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            llama(ids, attention_mask=mask)
            llama(ids, output_attentions=True)
    messages = [str(w.message) for w in caught if "h2o_prefill" in str(w.message)]
    assert len(messages) == 2
    assert all(w.category is UserWarning for w in caught if "h2o_prefill" in str(w.message))


def test_strict_lets_short_calls_and_decoding_pass(llama, make_ids, sparse_layers):
    with enable(llama, strict=True, **SPARSE):
        llama.generate(make_ids(1, 72), max_new_tokens=3, do_sample=False)
        llama(make_ids(1, 9))
    assert sparse_layers == [72, 72]


def test_strict_refuses_a_plain_cache_with_history(llama, ids):
    cache = llama(ids[:, :30]).past_key_values
    with enable(llama, strict=True, **SPARSE):
        with pytest.raises(NotImplementedError, match="a cache that was not filled"):
            llama(ids[:, 30:], past_key_values=cache)
        assert cache.get_seq_length() == 30


@pytest.mark.parametrize("use_cache", [True, False])
def test_autocast(llama, ids, sparse_layers, use_cache):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        stock = llama(ids, use_cache=use_cache).logits
        with enable(llama, **EXACT):
            ours = llama(ids, use_cache=use_cache).logits
    assert sparse_layers == [72, 72] and ours.dtype == stock.dtype
    torch.testing.assert_close(ours.float(), stock.float(), atol=0.3, rtol=0.1)


def test_cache_kinds_of_mixed_models(build):
    from transformers.cache_utils import DynamicSlidingWindowLayer

    from h2o_prefill.hf import ChunkedPrefillLayer

    cache = ChunkedPrefillCache(config=build("gemma3").config)
    assert [type(layer) for layer in cache.layers] == [
        DynamicSlidingWindowLayer,
        ChunkedPrefillLayer,
    ]


@pytest.mark.parametrize("how", ["export", "trace"])
def test_an_exported_or_traced_model_is_dense(llama, ids, how):
    class Logits(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = llama

        def forward(self, ids):
            return self.model(ids, use_cache=False).logits

    def make():
        with warnings.catch_warnings():
            for category in (DeprecationWarning, FutureWarning, torch.jit.TracerWarning):
                warnings.filterwarnings("ignore", category=category)
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
    torch.testing.assert_close(program(ids), stock, atol=1e-5, rtol=1e-5)


def test_a_warning_points_at_the_line_of_the_user(llama, ids):
    mask = torch.ones(1, 1, 72, 72, dtype=torch.bool).tril()
    with (
        enable(llama, **SPARSE),
        pytest.warns(UserWarning, match="custom attention mask") as caught,
    ):
        llama(ids, attention_mask=mask)
    assert [warning.filename for warning in caught] == [__file__]
