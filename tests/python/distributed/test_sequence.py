"""Prefill of one prompt by ranges of its tokens: what one process gives, to the bit."""

import copy
import pickle
import time
from functools import partial

import pytest
import torch

pytest.importorskip("transformers", minversion="5.24")

from hf_helpers import RECOMMENDED
from hypothesis import given, settings
from hypothesis import strategies as st
from processes import (
    assert_refused,
    assert_survivors_raise,
    error_of,
    load,
    random_ids,
    run,
    strike,
)
from transformers.cache_utils import DynamicSlidingWindowLayer

from h2o_prefill import (
    ChunkedPrefillCache,
    PrefillConfig,
    chunked_prefill,
    enable,
    gather_cache,
    ops,
)
from h2o_prefill.distributed import CompactPast, ShardPlan
from h2o_prefill.distributed.exact_rows import attend_to_range
from h2o_prefill.functional import NO_RECALL, sparse_attention

WIDE = {"sink_tokens": 2, "wide": ((1, 4), (2, 1, 2))}
MEASURED = {"error_rows": 4, "error_threshold": 0.05, "max_widen": 4}
RECOMMENDED = {**RECOMMENDED, "error_rows": 0}
SETTINGS = {
    "recommended": RECOMMENDED,
    "wide": {**RECOMMENDED, **WIDE},
    "widened": {**RECOMMENDED, **MEASURED},
    # Dense attention adds up keys by blocks, which begin elsewhere.
    "near dense": {**RECOMMENDED, "dense_layers": (0,)},
    "near exact": {"config": "exact", "chunk_size": 16},
}
GREEDY = {"max_new_tokens": 6, "do_sample": False}


def prompt(batch, length, seed=3):
    ids = random_ids(batch, length, seed)
    ids[:, length // 2 :: 3] = ids[:, : len(ids[0, length // 2 :: 3])]
    ids[:, -40:-10] = ids[:, 5:35]  # for recall to find
    return ids


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_a_range_attends_as_in_one_call(data):
    draw = data.draw
    size, chunks = draw(st.sampled_from([16, 24])), draw(st.integers(2, 7))
    tail = draw(st.sampled_from([0, 1, 7]))
    heads, group, batch = draw(st.sampled_from([(1, 3, 1), (2, 1, 2), (3, 2, 1)]))
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float64]))
    config = PrefillConfig(
        chunk_size=size,
        local_window=draw(st.sampled_from([0, 4, 16, 90])),
        heavy_budget=draw(st.sampled_from([4, 16, 60])),
        sink_tokens=draw(st.sampled_from([0, 3])),
        recall=draw(st.sampled_from([0, 4])),
        gqa_reduce=draw(st.sampled_from(["sum", "max"])),
    )
    config = config.replace(wide=((1, 0, 2),) if draw(st.booleans()) else ()).of_layer(1)
    length = size * chunks + tail
    begins = sorted({0, *draw(st.lists(st.integers(1, chunks - 1), max_size=3))})
    torch.manual_seed(draw(st.integers(0, 999)))
    q = torch.randn(batch, heads * group, length, 32).to(dtype)
    k, v = (torch.randn(batch, heads, length, 32).to(dtype) for _ in range(2))
    ids = torch.randint(0, 30, (batch, length))

    def lists(begin, end):
        return ops.lexical_recall(ids[:, :end], begin, config) if config.recall else NO_RECALL

    expected, state = sparse_attention(q, k, v, None, config, lists(0, length))
    bounds = [(a * size, b * size) for a, b in zip(begins, [*begins[1:], chunks], strict=True)]
    bounds[-1] = bounds[-1][0], length
    memory = None
    for begin, end in bounds:
        recall = lists(begin, end)
        named = torch.unique(recall[1]) if config.recall else torch.empty(0)
        needed = named[named < begin].long()
        past = CompactPast(begin, needed, k[:, :, needed], v[:, :, needed], memory)
        keys, values = torch.cat([past.keys, k[:, :, begin:end]], 2), v[:, :, begin:end]
        values = torch.cat([past.values, values], 2)
        out, made = sparse_attention(
            q[:, :, begin:end], keys, values, past.state, config, past.recall_lists(recall)
        )
        assert torch.equal(out, expected[:, :, begin:end])
        memory = past.memory_rows(made, keys, values, config)
    whole = past.whole_state(made)
    assert torch.equal(whole.memory, state.memory)
    assert whole.last_chunk_begin == state.last_chunk_begin
    held, at = whole.memory >= 0, whole.memory.clamp(min=0).long()
    assert torch.equal(whole.scores.gather(2, at)[held], state.scores.gather(2, at)[held])


@pytest.mark.parametrize("begin", [0, 16])
def test_exact_rows_of_a_range_have_sinks_once_and_softcap(begin):
    torch.manual_seed(begin)
    q, k, v = torch.randn(2, 4, 2, 32), torch.randn(2, 2, 48, 32), torch.randn(2, 2, 48, 8)
    rows, options = torch.tensor([begin + 3, begin + 11]), (0.3, torch.randn(4), 2.0)
    (out, lse), *others = attend_to_range(q, k, v, rows, begin, options)
    assert len(others) == (begin > 0)
    for other in others:
        out, lse = ops.merge_states(out, lse, *other)
    for number, row in enumerate(rows):
        seen = k[:, :, : row + 1], v[:, :, : row + 1]
        expected = ops.dense_attention(q[:, :, number : number + 1], *seen, *options)
        torch.testing.assert_close(out[:, :, number : number + 1], expected)


def test_ranges_are_whole_chunks():
    config = PrefillConfig(chunk_size=16)
    plan = ShardPlan.of(16 * 7 + 5, 3, config, NO_RECALL)
    assert plan.bounds == [(0, 32), (32, 64), (64, 117)]
    assert plan.sent(0, 2, whole=True).tolist() == list(range(32))
    with pytest.raises(ValueError, match="16 tokens or more for each of 4 processes"):
        ShardPlan.of(16 * 3 + 15, 4, config, NO_RECALL)


def answers(rank, folder, count):
    """Return logits and tokens of prompts, and the bytes that were sent and planned."""
    model = load(folder)
    found = {}
    sent = {}
    group = {"process_group": torch.distributed.group.WORLD} if count > 1 else {}
    ids = prompt(2, 205)
    for name, chosen in SETTINGS.items():
        with enable(model, **chosen, **group) as handle:
            output = chunked_prefill(model, ids, chunks_per_call=99)
            found[f"{name} prompt"] = output.logits
            cache, errors, none = output.cache, handle.state.errors, torch.zeros(2, 2, 4)
            assert (name == "near exact") != any(one.sparse_rows for one in handle.report())
            if name == "widened":
                found["near errors of the last"] = torch.stack([errors[1], errors[2]])
            more = torch.cat([ids, output.logits.argmax(-1)], dim=1)
            if count > 1:
                sequence = cache.layers[0].sequence
                predicted = 0
                for layer in cache.layers:
                    key = layer.keys
                    row = 2 * key.numel() // key.shape[2] * key.element_size()
                    measured = errors.get(layer.number, none)
                    width = layer.config.native.memory_width(measured)
                    memory = width * (8 + 2 * key.shape[3] * key.element_size()) + 16
                    memory *= key.shape[0] * key.shape[1] * (width > 0)
                    for later in range(rank + 1, count):
                        predicted += row * len(sequence.plan.sent(rank, later, layer.is_whole))
                    if rank + 1 < count and not layer.is_whole:
                        predicted += memory
                sent[name] = sequence.bytes_sent, predicted
                whole = gather_cache(cache, 1)
                for action in copy.deepcopy, pickle.dumps:
                    assert error_of(partial(action, cache))[0] == "NotImplementedError"
            else:
                whole = copy.deepcopy(cache)
            found[f"near {name} tokens"] = model.generate(more, cache=cache, **GREEDY)
            next_call = prompt(2, 40, seed=4)
            found[f"near {name} dense"] = model(next_call[:, :9], cache=cache).logits
        if whole is not None:
            with enable(model, **chosen):
                found[f"{name} goes on"] = model(next_call, cache=whole).logits
    with enable(model, **RECOMMENDED, recall=0, **group):
        embeds = model.get_input_embeddings()(ids)
        output = chunked_prefill(model, inputs_embeds=embeds, chunks_per_call=99)
    found["embeddings"] = output.logits
    return {"found": found, "sent": sent}


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tiny):
    path = tmp_path_factory.mktemp("model")
    tiny.make_model(num_hidden_layers=3).save_pretrained(path)
    return path


# Three have a rank in the middle.
@pytest.mark.parametrize("count", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_ranges_give_what_one_process_gives(folder, count):
    expected = run(1, answers, folder, 1)[0]["found"]
    assert expected["near errors of the last"][..., 0].any()  # some heads are widened
    results = run(count, answers, folder, count)
    for rank, result in enumerate(results):
        for sent, predicted in result["sent"].values():
            assert sent == predicted
        for name, value in expected.items():
            if (rank != 1 and name.endswith("goes on")) or (
                rank < count - 1 and name.endswith("of the last")
            ):
                continue
            found = result["found"][name]
            if name.startswith("near"):  # merged softmax over several processes
                torch.testing.assert_close(found, value, rtol=1e-4, atol=1e-4)
            else:
                assert torch.equal(found, value), name


def by_heads_and_tokens(rank, folder, **sizes):
    model = load(folder, **sizes)
    mesh = model._mesh_manager.get_mesh("dp_replicate") if sizes else None
    with enable(model, process_group=mesh, **RECOMMENDED):
        return chunked_prefill(model, prompt(1, 205), chunks_per_call=99).logits


def test_processes_have_heads_and_tokens(folder):
    expected = run(1, by_heads_and_tokens, folder)[0]
    work = partial(by_heads_and_tokens, tp_size=2, dp_replicate_size=2)
    for found in run(4, work, folder):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def refusals(rank, folder):
    model, ids = load(folder), prompt(1, 96)
    group, sparse = torch.distributed.group.WORLD, RECOMMENDED
    errors = {}
    changed = {**sparse, **MEASURED, "dense_tail": 3}
    errors["dense_tail"] = error_of(lambda: enable(model, process_group=group, **changed))
    mask = torch.ones_like(ids)
    mask[0, 0] = 0
    calls = {
        "token ids must be the same on every rank": lambda: prefill(prompt(1, 96, seed=rank)),
        "must have no padding": lambda: prefill(ids, attention_mask=mask),
        "16 tokens or more for each of 2 processes": lambda: prefill(ids[:, :31]),
        "must begin with an empty cache": lambda: prefill(ids, cache=used),
        "every layer must have full attention": lambda: prefill(ids, cache=windows),
        "must be one of a prompt that several": lambda: gather_cache(used),
    }
    windows = ChunkedPrefillCache(config=model.config)
    windows.layers[1] = DynamicSlidingWindowLayer(sliding_window=8)
    used = chunked_prefill(model, ids, **sparse).cache
    prefill = partial(chunked_prefill, model)
    with enable(model, process_group=group, **sparse):
        for text, call in calls.items():
            errors[text] = error_of(call)
        # The group is still in order.
        cache = prefill(ids, attention_mask=torch.ones_like(ids)).cache
        errors["rank must be in [0, 2), got 2"] = error_of(lambda: gather_cache(cache, 2))
    with enable(model, process_group=group, **{**sparse, "local_window": 4 + rank}):
        errors["settings must be the same"] = error_of(lambda: prefill(ids))
    if rank == 1:
        model.model.layers[1].mlp.up_proj.weight[3, 3] += 1
    with enable(model, process_group=group, **sparse):
        errors["model must be the same"] = error_of(lambda: prefill(ids))
    return errors


def test_what_every_rank_refuses(folder):
    for errors in run(2, refusals, folder):
        assert_refused(errors.items())


def interrupted(rank, folder, victim, name):
    """Prefill twice; the victim gets a signal in the second prompt."""
    model = load(folder)
    cache = ChunkedPrefillCache(config=model.config)
    with enable(model, process_group=torch.distributed.group.WORLD, **SETTINGS["widened"]):
        chunked_prefill(model, prompt(1, 96))
        if rank == victim:
            model.model.layers[1].register_forward_hook(lambda *_: strike(name))
        begin = time.monotonic()
        error = error_of(lambda: chunked_prefill(model, prompt(1, 320), cache=cache))
    assert cache.get_seq_length() == 0
    assert cache.token_ids is None
    return error, time.monotonic() - begin


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SIGKILL", "SIGSTOP", "error"])
@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_lost_rank_is_an_error_on_every_survivor(folder, victim, name):
    assert_survivors_raise(interrupted, folder, victim, name)
