"""Switching a model over while forwards of it run: each ends as it began."""

from __future__ import annotations

import threading

import pytest
import torch
from hf_helpers import OTHER, RECALL, SPARSE, assert_close, failing, hooked, is_off, new_cache

from h2o_prefill import disable, enable

PATIENCE = 20.0  # seconds, far more than any of these takes
MOMENT = 0.2  # seconds in which a thread that need not wait is done


@pytest.fixture
def inputs(make_ids):
    """Return a padded batch: its mask is ours or theirs, and None means another thing to each."""
    batch = make_ids(2, 72)
    mask = torch.ones_like(batch)
    mask[1, :5] = 0
    return {"input_ids": batch, "attention_mask": mask}


def between_layers(model, function):
    """Call a function once, when the first layer of a forward is done."""

    def hook(*_):
        handle.remove()
        function()

    handle = model.model.layers[0].register_forward_hook(hook)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_disabled_by_another_thread(build, inputs, spawn, implementation):
    """A forward that begins meanwhile waits, and is as stock."""
    model = build("llama", implementation)
    stock, threads, results = model(**inputs).logits, [], []
    enable(model, **SPARSE)
    sparse = model(**inputs).logits

    def toggle():
        threads.append(spawn(lambda: disable(model)))
        threads[0].join(MOMENT)
        threads.append(spawn(lambda: results.append(model(**inputs).logits)))
        threads[1].join(MOMENT)
        assert threads[0].is_alive() and results == []

    between_layers(model, toggle)
    assert torch.equal(model(**inputs).logits, sparse)
    for thread in threads:
        thread.join(PATIENCE)
    assert is_off(model)
    assert torch.equal(results[0], stock) and torch.equal(model(**inputs).logits, stock)


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt-oss"])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_enabled_by_another_thread(build, inputs, spawn, name, implementation):
    model = build(name, implementation)
    stock = model(**inputs).logits
    between_layers(model, lambda: spawn(lambda: enable(model, **SPARSE)).join(PATIENCE))
    assert_close(model(**inputs).logits, stock)
    assert not is_off(model)
    disable(model)


def test_disabled_inside_of_the_forward(llama, ids):
    stock = llama(ids).logits
    handle = enable(llama, **SPARSE)
    sparse = llama(ids).logits
    cache = new_cache(llama)
    between_layers(llama, handle.disable)
    assert torch.equal(llama(ids, past_key_values=cache).logits, sparse)
    assert is_off(llama) and not handle.active and cache.get_seq_length() == 72
    assert torch.equal(llama(ids).logits, stock)


def test_enabled_again_inside_of_the_forward(llama, ids):
    with enable(llama, **SPARSE):
        between_layers(llama, lambda: enable(llama, **OTHER))
        with pytest.raises(RuntimeError, match="inside of a forward"):
            llama(ids)
    assert is_off(llama)


def test_two_forwards_that_disable_do_not_wait_for_each_other(llama, inputs, spawn):
    handle = enable(llama, **SPARSE)
    sparse, barrier, results = llama(**inputs).logits, threading.Barrier(2, timeout=PATIENCE), []

    def toggle(*_):
        barrier.wait()
        handle.disable()
        barrier.wait()

    with hooked(llama.model.layers[0], toggle):
        for thread in [spawn(lambda: results.append(llama(**inputs).logits)) for _ in range(2)]:
            thread.join(PATIENCE)
    assert is_off(llama)
    assert [torch.equal(result, sparse) for result in results] == [True, True]


def test_a_forward_that_was_interrupted_elsewhere_is_not_waited_for(llama, ids, spawn):
    """Torch does not call closing hooks after a KeyboardInterrupt."""
    handle, done = enable(llama, **SPARSE), threading.Event()

    def work():
        with failing(llama.model.layers[0], KeyboardInterrupt):
            llama(ids)
        done.wait(PATIENCE)

    spawn(work).join(MOMENT)
    handle.disable()
    assert is_off(llama)
    done.set()


def test_many_switches(llama, inputs, spawn):
    stock = llama(**inputs).logits
    with enable(llama, **SPARSE):
        sparse = llama(**inputs).logits
    stop, results = threading.Event(), []

    def work():
        while not stop.is_set():
            results.append(llama(**inputs).logits)

    threads = [spawn(work) for _ in range(2)]
    for _ in range(30):
        handle = enable(llama, **SPARSE)
        seen = len(results)
        while len(results) < seen + 2:
            threads[0].join(0.001)
            assert threads[0].is_alive() and threads[1].is_alive()
        handle.disable()
    stop.set()
    for thread in threads:
        thread.join(PATIENCE)
    assert is_off(llama)
    assert len(results) > 60
    for result in results:
        distances = [(result - x).abs().amax() for x in (stock, sparse)]
        assert min(distances) < 1e-5


@pytest.mark.parametrize("names", [("llama", "qwen3"), ("llama", "llama")])
def test_two_threads_with_prompts_of_their_own(build, make_ids, spawn, names):
    """With two models, each with its settings, or with one."""
    models = [build(names[0])] * 2 if names[0] == names[1] else [build(name) for name in names]
    prompts = [[make_ids(1, 72 + i, seed=10 * i + j) for j in range(4)] for i in range(2)]
    start, results = threading.Barrier(2), [[], []]
    handles = [enable(models[1], **RECALL, sink_tokens=1), enable(models[0], **RECALL)]
    expected = [[m(p).logits for p in ps] for m, ps in zip(models, prompts, strict=True)]

    def work(index):
        start.wait()
        results[index] += [models[index](prompt).logits for prompt in prompts[index]]

    for thread in [spawn(lambda i=i: work(i)) for i in range(2)]:
        thread.join(PATIENCE)
    for got, want in zip(results, expected, strict=True):
        assert len(got) == 4 and all(map(torch.equal, got, want))
    for handle in handles:
        handle.disable()
