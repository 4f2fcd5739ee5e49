"""Switching a model over while forwards of it run: each ends as it began."""

from __future__ import annotations

import threading

import pytest
import torch

from h2o_prefill import ChunkedPrefillCache, disable, enable

SPARSE = {"chunk_size": 16, "local_window": 4, "heavy_budget": 4}
OTHER = {"chunk_size": 32, "local_window": 4, "heavy_budget": 4}
PATIENCE = 20.0  # seconds, far more than any of these takes
MOMENT = 0.2  # seconds in which a thread that need not wait is done


@pytest.fixture
def inputs(make_ids):
    """Return a padded batch: its mask is ours or theirs, and None means another thing to each."""
    batch = make_ids(2, 72)
    mask = torch.ones_like(batch)
    mask[1, :5] = 0
    return {"input_ids": batch, "attention_mask": mask}


@pytest.fixture
def spawn():
    """Return a function that runs another in a thread; errors come out at the end of the test."""
    threads, errors = [], []

    def start(function):
        def work():
            try:
                with torch.no_grad():
                    function()
            except BaseException as error:
                errors.append(error)

        threads.append(threading.Thread(target=work, daemon=True))
        threads[-1].start()
        return threads[-1]

    yield start
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive()
    assert errors == []


def between_layers(model, function):
    """Call a function once, when the first layer of a forward is done."""

    def hook(*_):
        handle.remove()
        function()

    handle = model.model.layers[0].register_forward_hook(hook)


def is_off(model):
    hooks = [m for m in model.modules() if m._forward_pre_hooks or m._forward_hooks]
    return not hooks and model.config._attn_implementation in ("sdpa", "eager")


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_disabled_by_another_thread(build, inputs, spawn, implementation):
    model = build("llama", implementation)
    stock, threads = model(**inputs).logits, []
    enable(model, **SPARSE)
    sparse = model(**inputs).logits

    def toggle():
        threads.append(spawn(lambda: disable(model)))
        threads[0].join(MOMENT)
        assert threads[0].is_alive()

    between_layers(model, toggle)
    assert torch.equal(model(**inputs).logits, sparse)
    threads[0].join(PATIENCE)
    assert is_off(model)
    assert torch.equal(model(**inputs).logits, stock)


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt-oss"])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_enabled_by_another_thread(build, inputs, spawn, name, implementation, monkeypatch):
    from h2o_prefill.hf.state import DEFAULT_STATE

    monkeypatch.setattr(DEFAULT_STATE, "reported", set())
    if name == "gpt-oss" and implementation == "sdpa":
        pytest.skip("transformers runs these models eagerly")
    model = build(name, implementation)
    stock = model(**inputs).logits
    between_layers(model, lambda: spawn(lambda: enable(model, **SPARSE)).join(PATIENCE))
    torch.testing.assert_close(model(**inputs).logits, stock, atol=1e-5, rtol=1e-5)
    assert not is_off(model)
    disable(model)


def test_enabled_with_other_settings_by_another_thread(llama, inputs, spawn):
    with enable(llama, **OTHER):
        other = llama(**inputs).logits
    enable(llama, **SPARSE)
    sparse, threads = llama(**inputs).logits, []
    between_layers(llama, lambda: threads.append(spawn(lambda: enable(llama, **OTHER))))
    assert torch.equal(llama(**inputs).logits, sparse)
    threads[0].join(PATIENCE)
    assert torch.equal(llama(**inputs).logits, other)
    disable(llama)


def test_disabled_inside_of_the_forward(llama, ids):
    stock = llama(ids).logits
    handle = enable(llama, **SPARSE)
    sparse = llama(ids).logits
    cache = ChunkedPrefillCache(config=llama.config)
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

    hook = llama.model.layers[0].register_forward_hook(toggle)
    threads = [spawn(lambda: results.append(llama(**inputs).logits)) for _ in range(2)]
    for thread in threads:
        thread.join(PATIENCE)
    hook.remove()
    assert is_off(llama)
    assert [torch.equal(result, sparse) for result in results] == [True, True]


def test_a_forward_that_begins_meanwhile_waits_and_is_stock(llama, inputs, spawn):
    stock = llama(**inputs).logits
    handle = enable(llama, **SPARSE)
    sparse, results, threads = llama(**inputs).logits, [], []

    def toggle():
        threads.append(spawn(handle.disable))
        threads[0].join(MOMENT)
        threads.append(spawn(lambda: results.append(llama(**inputs).logits)))
        threads[1].join(MOMENT)
        assert results == []

    between_layers(llama, toggle)
    assert torch.equal(llama(**inputs).logits, sparse)
    threads[1].join(PATIENCE)
    assert torch.equal(results[0], stock)


def test_a_forward_that_was_interrupted_elsewhere_is_not_waited_for(llama, ids, spawn):
    """Torch does not call closing hooks after a KeyboardInterrupt."""
    handle, done = enable(llama, **SPARSE), threading.Event()

    def interrupt(*_):
        raise KeyboardInterrupt

    def work():
        with pytest.raises(KeyboardInterrupt):
            llama(ids)
        done.wait(PATIENCE)

    hook = llama.model.layers[0].register_forward_hook(interrupt)
    thread = spawn(work)
    thread.join(MOMENT)
    hook.remove()
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
