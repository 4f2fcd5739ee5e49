"""Selection rules of a user: the same operator, only what the past holds, and refusals by name."""

from functools import partial

import pytest
import torch
from hf_helpers import EVERYTHING, RECOMMENDED, SPARSE, assert_close, in_calls, new_cache
from transformers import StaticCache

from h2o_prefill import ChunkedPrefillCache, PrefillConfig, chunked_prefill, enable, ops
from h2o_prefill.selection import (
    RULES,
    SelectionContext,
    load_rule,
    sinks_and_window,
    snapkv,
    tri_shape,
)


def h2o(given):
    """The selection of the operators."""
    of = given.config
    sizes = of.local_window, of.heavy_budget, of.sink_tokens
    return ops.select_memory(given.scores, given.memory, given.begin, given.end, *sizes)


def backwards(given):
    """The same as int64, in another order."""
    return h2o(given).long().flip(-1)


def context(length=40, begin=24, **settings):
    """A prompt of random keys whose last chunk begins at `begin`."""
    generator = torch.Generator().manual_seed(1)
    config = PrefillConfig(chunk_size=16, **{"local_window": 5, "heavy_budget": 5, **settings})
    queries, keys = (torch.randn(2, n, length, 8, generator=generator) for n in (6, 2))
    scores, memory = torch.rand(2, 2, length, generator=generator), torch.zeros(2, 2, 0).int()
    given = scores, memory, queries[:, :, begin:], keys, keys
    return SelectionContext(0, config, begin, length, *given, scale=0.3)


def test_the_selection_of_the_operators_as_a_rule_gives_their_results(llama, make_ids):
    settings = {**EVERYTHING, "max_widen": 1}
    inputs = {"input_ids": make_ids(2, 120)}
    found = []
    for options in ({}, {"select": backwards}):
        with enable(llama, **settings, **options) as handle:
            cache = new_cache(llama)
            logits = llama(**inputs, past_key_values=cache).logits
            report = handle.report()
        found.append((logits, [layer.state for layer in cache.layers], report))
    (logits, states, report), (by_rule, others, of_rule) = found
    assert torch.equal(by_rule, logits) and of_rule.layers == report.layers
    assert "keys selected by backwards" in str(of_rule)
    for one, other in zip(states, others, strict=True):
        for name in ("scores", "memory", "errors"):
            assert torch.equal(getattr(one, name), getattr(other, name))


def test_a_rule_sees_the_past_alone_and_the_queries_of_the_last_chunk(llama, ids):
    seen = []

    def rule(given):
        seen.append((given.layer, given.begin, given.end, given.queries.shape[2]))
        assert given.scores.shape[2] == given.keys.shape[2] == given.end
        return given.memory[..., :0]

    with enable(llama, **SPARSE, select=rule):
        cache = new_cache(llama)
        # Two chunks; one token that is decoded; a chunk and a half.
        in_calls(llama, cache, ids[:, :57], [32, 1, 24])
    expected = [(0, 16, 16), (16, 33, 16), (33, 49, 16)]
    assert [x[1:] for x in seen if x[0] == 0] == expected == [x[1:] for x in seen if x[0] == 1]


def test_calls_and_branches_of_a_prompt_equal_one_call(llama, ids):
    with enable(llama, **RECOMMENDED, select=partial(snapkv, observed=3)) as handle:
        whole, cache = llama(ids).logits, new_cache(llama)
        assert handle.state.select.name == "snapkv"
        assert_close(chunked_prefill(llama, ids, chunks_per_call=1).logits, whole[:, -1:])
        llama(ids[:, :40], past_key_values=cache)
        cache.crop(-4)
        branch = cache.copy()
        assert branch.layers[1].state.queries.shape[2] == 4
        ours = llama(ids[:, 36:], past_key_values=branch).logits
        assert torch.equal(ours, llama(ids[:, 36:], past_key_values=cache).logits)


def test_a_session_file_goes_on_with_a_rule_that_needs_no_queries(llama, ids, tmp_path):
    with enable(llama, **RECOMMENDED, select=sinks_and_window):
        cache = new_cache(llama)
        llama(ids[:, :40], past_key_values=cache)
        cache.save(tmp_path / "s")
        loaded = ChunkedPrefillCache.load(tmp_path / "s", llama)
        ours, expected = (llama(ids[:, 40:], past_key_values=x).logits for x in (loaded, cache))
    assert torch.equal(ours, expected)


@pytest.mark.parametrize(
    ("chosen", "match"),
    [
        (torch.tensor([0, 5, 0]).expand(1, 2, -1), "a position once a head, got 0 twice"),
        (torch.tensor([3, 32]).expand(1, 2, -1), r"in \[0, 32\), those before .* -1, got 32"),
        (torch.full((1, 2, 1), -2), "or -1, got -2"),
        (torch.zeros(1, 2, 1), r"int32 or int64 \[1, 2, 'any'\], got torch.float32 \[1, 2, 1\]"),
        (torch.zeros(1, 1, 2, dtype=torch.int64), r"got torch.int64 \[1, 1, 2\]"),
        (torch.zeros(1, 2, 1, dtype=torch.int64, device="meta"), "torch.strided on meta"),
        (torch.nested.nested_tensor([torch.ones(2, 1).long()]), "got torch.int64 nested"),
        (None, "got NoneType"),
    ],
)
def test_wrong_positions_are_refused_and_the_prompt_is_as_before(llama, ids, chosen, match):
    def wrong(given):
        return chosen

    cache, named = new_cache(llama), "selection rule .*wrong' in layer 0 must return .*"
    with enable(llama, **SPARSE, select=h2o):
        llama(ids[:, :32], past_key_values=cache)
        expected = llama(ids[:, 32:], past_key_values=cache.copy()).logits
    with enable(llama, **SPARSE, select=wrong), pytest.raises(ValueError, match=named + match):
        llama(ids[:, 32:], past_key_values=cache)
    with enable(llama, **SPARSE, select=h2o):
        assert torch.equal(llama(ids[:, 32:], past_key_values=cache).logits, expected)


def test_where_no_rule_can_be(llama, ids):
    with pytest.raises(ValueError, match="select must not be given with exact=True"):
        enable(llama, "exact", select=h2o)
    with pytest.raises(ValueError, match="select must be a selection rule, a callable, got 'h2o'"):
        enable(llama, select="h2o")
    static = StaticCache(llama.config, max_cache_len=96)
    with enable(llama, **SPARSE, select=h2o), pytest.raises(ValueError, match="a static cache"):
        llama(ids, past_key_values=static)


def test_sinks_and_window_have_the_budget():
    expected = [*range(4), *range(34, 40)]
    assert sinks_and_window(context()).tolist() == [[expected] * 2] * 2
    assert sinks_and_window(context(heavy_budget=99))[0, 0].tolist() == list(range(40))
    assert torch.equal(tri_shape(context(dense_tail=9)), sinks_and_window(context()))
    with pytest.raises(ValueError, match="dense_tail must be > 0"):
        tri_shape(context())


@pytest.mark.parametrize("begin", [24, 40])
def test_snapkv_keeps_what_the_last_queries_attend_to(begin):
    given = context(begin=begin)
    queries, keys = given.queries.double(), given.keys.repeat_interleave(3, 1).double()
    logits = queries @ keys.transpose(-1, -2) * 0.3
    later = torch.arange(40) > torch.arange(begin, 40)[:, None]
    weights = logits.masked_fill(later, -torch.inf).softmax(-1)[:, :, -4:]
    sums = weights.unflatten(1, (2, 3)).sum((2, 3)) if begin < 40 else given.scores.double()
    pooled = torch.stack([sums[..., max(0, i - 1) : i + 2].amax(-1) for i in range(36)], -1)
    chosen = snapkv(given, observed=4, pooled=3).sort(-1).values
    assert torch.equal(chosen[..., -4:], torch.arange(36, 40).expand(2, 2, -1))
    best = pooled.topk(6).values.sort(-1).values
    assert_close(pooled.gather(-1, chosen[..., :6]).sort(-1).values, best)


def test_rules_are_loaded_by_name(tmp_path):
    (tmp_path / "mine.py").write_text("def rule(given):\n    return given.memory\n")
    assert all(load_rule(name) is rule for name, rule in RULES.items())
    assert load_rule("h2o_prefill.selection:snapkv") is snapkv
    assert load_rule(f"{tmp_path / 'mine.py'}:rule").__name__ == "rule"
    for text in ("h2o", "no.such:rule", "h2o_prefill:no_rule", f"{tmp_path}/none.py:rule"):
        with pytest.raises(ValueError, match=r"select must be sinks_and_window, .* got"):
            load_rule(text)
