"""Switching a model over while forwards of it run: refused, and each ends as it began."""

from __future__ import annotations

import threading

import pytest
import torch
from hf_helpers import OTHER, RECALL, SPARSE, assert_close, failing, is_off

from h2o_prefill import disable, enable

PATIENCE = 20.0  # seconds, far more than any of these takes


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


DURING = "LlamaForCausalLM must not be enabled or disabled during its forward, which runs in {}"


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("switch", [disable, lambda model: enable(model, **OTHER)])
def test_a_forward_of_another_thread_refuses_a_switch(build, inputs, spawn, implementation, switch):
    model = build("llama", implementation)
    stock, errors = model(**inputs).logits, []
    enable(model, **SPARSE)
    sparse = model(**inputs).logits

    def work():
        with pytest.raises(RuntimeError) as caught:
            switch(model)
        errors.append(str(caught.value))

    between_layers(model, lambda: spawn(work).join(PATIENCE))
    assert torch.equal(model(**inputs).logits, sparse)
    assert errors == [DURING.format("another thread")]
    switch(model)
    disable(model)
    assert is_off(model) and torch.equal(model(**inputs).logits, stock)


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt-oss"])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_enabled_by_another_thread(build, inputs, spawn, name, implementation):
    model = build(name, implementation)
    stock = model(**inputs).logits
    between_layers(model, lambda: spawn(lambda: enable(model, **SPARSE)).join(PATIENCE))
    assert_close(model(**inputs).logits, stock)
    assert not is_off(model)
    disable(model)


@pytest.mark.parametrize("switch", [disable, lambda model: enable(model, **OTHER)])
def test_a_forward_refuses_a_switch_inside_of_it(llama, ids, switch):
    stock = llama(ids).logits
    with enable(llama, **SPARSE):
        sparse = llama(ids).logits
        between_layers(llama, lambda: switch(llama))
        with pytest.raises(RuntimeError, match=DURING.format("this thread")):
            llama(ids)
        assert torch.equal(llama(ids).logits, sparse)
    assert is_off(llama) and torch.equal(llama(ids).logits, stock)


def test_an_interrupted_forward_is_over(llama, ids, spawn):
    """Torch does not call closing hooks after a KeyboardInterrupt."""
    handle = enable(llama, **SPARSE)

    def work():
        with failing(llama.model.layers[0], KeyboardInterrupt):
            llama(ids)

    work()
    handle.disable()
    handle.enable()
    spawn(work).join(PATIENCE)  # of a thread that has ended
    handle.disable()
    assert is_off(llama)


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
