"""torch.compile: one graph with a static cache, breaks at attention with others; eager results."""

import contextlib
import functools

import pytest
import torch
from hf_helpers import (
    RECALL,
    RECOMMENDED,
    SPARSE,
    assert_close,
    assert_same_states,
    in_calls,
    new_cache,
    states,
    watch,
)
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import DynamicCache, LlamaForCausalLM, StaticCache

from h2o_prefill import enable
from h2o_prefill.eval.timing import peak_bytes

GREEDY = {"max_new_tokens": 12, "do_sample": False}
# Sparse, sparse after a history, decoded, short, and sparse again.
CALLS = (40, 32, 1, 1, 5, 71)

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
slow = functools.partial(pytest.param, marks=pytest.mark.slow)


def counts(handle):
    return [(x.sparse_calls, x.sparse_rows, x.dense_calls, x.dense_rows) for x in handle.report()]


@pytest.fixture
def shallow(build):
    """One layer, which compiles in half the time."""
    return build("llama", num_hidden_layers=1)


CACHES = {
    "dynamic": lambda model: DynamicCache(config=model.config),
    "ours": new_cache,
    "static": lambda model: StaticCache(config=model.config, max_cache_len=150),
}


def compiled_by(how, model, fullgraph=True):
    options = {"fullgraph": fullgraph, "backend": "eager"}
    if how == "torch.compile":
        return torch.compile(model, **options)
    if how == "model.compile":
        model.compile(**options)
    else:
        model.forward = torch.compile(model.forward, **options)
    return model


@pytest.mark.parametrize(
    ("name", "implementation", "cache", "layers", "how"),
    [
        ("llama", "sdpa", "dynamic", 1, "torch.compile"),
        ("llama", "sdpa", "static", 1, "torch.compile"),
        ("llama", "sdpa", "static", 1, "model.forward"),
        slow("llama", "sdpa", "ours", 2, "model.forward"),
        slow("llama", "eager", "static", 2, "model.compile"),
        slow("gemma3", "sdpa", "static", 2, "torch.compile"),
        slow("qwen3", "sdpa", "static", 2, "torch.compile"),
        slow("gemma2", "eager", "static", 2, "torch.compile"),
        slow("gpt-oss", None, "static", 2, "torch.compile"),
    ],
)
def test_calls_of_one_prompt_equal_eager_ones(
    build, prompt, monkeypatch, cache, name, implementation, layers, how
):
    """Compiled before the model is enabled."""
    model = build(name, implementation, num_hidden_layers=layers)
    caches = [CACHES[cache](model) for _ in range(3)]
    # Not while a graph is made: it would guard what is seen.
    with monkeypatch.context() as patch, enable(model, strict=True, **RECALL) as handle:
        windows = watch(patch, "sliding_window_attention", lambda q, k, v, window, *_: window)
        eager = in_calls(model, caches[0], prompt, CALLS)
        expected = counts(handle)
    graphs = compiled_by(how, model, fullgraph=cache == "static")
    with enable(model, strict=True, **RECALL) as handle:
        ours = in_calls(graphs, caches[1], prompt, CALLS)
        assert counts(handle) == expected and expected[-1][0] == 3
        # A second prompt needs no graph more.
        with torch._dynamo.config.patch(error_on_recompile=True):
            again = in_calls(graphs, caches[2], prompt, CALLS)
    assert_close(ours, eager)
    assert torch.equal(again, ours)
    assert set(windows) == ({24} if name in ("gemma2", "gemma3", "gpt-oss") else set())
    if name == "llama":
        assert_same_states(caches[1], caches[0])
        assert torch.equal(caches[1].token_ids, caches[0].token_ids)


@pytest.mark.parametrize("settings", [RECOMMENDED, {**RECOMMENDED, "exact": True}, None])
@pytest.mark.slow
def test_the_code_of_inductor_prefills_and_decodes(llama, ids, make_ids, settings):
    """With shapes that are dynamic from the start; without settings the model is not enabled."""
    greedy = {"max_new_tokens": 6, "do_sample": False}

    def generate(tokens):
        return llama.generate(tokens, past_key_values=CACHES["static"](llama), **greedy)

    prompts = ids, make_ids(1, 90)
    with enable(llama, **settings) if settings else contextlib.nullcontext():
        eager = [generate(tokens) for tokens in prompts]
        llama.compile(dynamic=True, fullgraph=True)
        for tokens, expected in zip(prompts, eager, strict=True):
            assert torch.equal(generate(tokens), expected)


@pytest.mark.slow
def test_the_code_of_inductor_clones_no_cache(shallow, make_ids):
    cache, ids = StaticCache(config=shallow.config, max_cache_len=50_000), make_ids(1, 140)
    with enable(shallow, strict=True, **RECALL) as handle:
        shallow.compile(dynamic=True, fullgraph=True)
        shallow(ids[:, :100], past_key_values=cache)
        peak = peak_bytes(lambda: shallow(ids[:, 100:], past_key_values=cache))
        assert counts(handle) == [(2, 140, 0, 0)]
    assert peak < states(cache)[0].scores.nbytes


@pytest.mark.parametrize("name", ["llama", slow("qwen2"), slow("qwen3"), slow("mistral")])
def test_prompts_of_any_length_share_a_graph(build, make_ids, name):
    """Long, of one chunk, with nothing to recall, and short; one more graph decodes."""
    model = build(name)
    prompts = [make_ids(1, length, seed=length) for length in (72, 16, 5, 101)]
    static = {"cache_implementation": "static", **GREEDY}
    counter = CompileCounterWithBackend("eager")
    with enable(model, strict=True, **RECALL) as handle:
        eager = [model.generate(prompt, **GREEDY) for prompt in prompts]
        before = counts(handle)[0]
        model.compile(fullgraph=True, dynamic=True, backend=counter)
        for prompt, expected in zip(prompts, eager, strict=True):
            assert torch.equal(model.generate(prompt, **static), expected)
        assert counts(handle)[0] == tuple(2 * number for number in before)
        assert before[0] == 3 and before[1] == 72 + 16 + 101
    assert counter.frame_count == 2


def test_a_mask_of_ones_and_padding_in_a_static_cache(shallow, make_ids):
    ids = make_ids(2, 72)
    ones, padded = torch.ones_like(ids), torch.ones_like(ids)
    padded[0, :20] = 0

    def call(model, mask):
        return model(ids, attention_mask=mask, past_key_values=CACHES["static"](shallow)).logits

    stock = call(shallow, padded)
    with enable(shallow, **SPARSE) as handle:
        model = compiled_by("torch.compile", shallow)
        assert_close(call(model, ones), shallow(ids).logits)
        assert counts(handle)[0] == (2, 288, 0, 0)
        with pytest.warns(UserWarning, match="hides tokens"):
            ours = call(model, padded)
    assert_close(ours[1], stock[1])
    assert_close(ours[0, 20:], stock[0, 20:])


class MasksItself(LlamaForCausalLM):
    """Takes the padding from the ids, whatever mask the caller passes."""

    def forward(self, input_ids, attention_mask=None, **kwargs):
        mask = (input_ids != self.config.pad_token_id).long()
        return super().forward(input_ids, attention_mask=mask, **kwargs)


@pytest.mark.parametrize("ones", [False, True])
def test_a_mask_that_the_model_makes_in_its_graph_is_kept(shallow, make_ids, ones):
    """Whatever mask the caller passes."""
    model, ids = MasksItself(shallow.config).eval(), make_ids(2, 72)
    ids[0, :20] = model.config.pad_token_id

    def call(graph):
        mask = {"attention_mask": torch.ones_like(ids)} if ones else {}
        return graph(ids, past_key_values=CACHES["static"](model), **mask).logits

    stock = call(model)
    with enable(model, **SPARSE), pytest.warns(UserWarning, match="not plain causal"):
        ours = call(compiled_by("torch.compile", model))
    assert_close(ours[1], stock[1])
    assert_close(ours[0, 20:], stock[0, 20:])


def test_two_threads_with_prompts_of_their_own(llama, make_ids, spawn):
    """What a graph is told is told to its thread: the lists of recalled keys above all."""
    prompts, found = [make_ids(1, 24, seed).repeat(1, 4) for seed in (5, 6)], [[], []]
    with enable(llama, strict=True, **RECALL):
        graph = compiled_by("torch.compile", llama)

        def logits(index, model):
            return model(prompts[index], past_key_values=CACHES["static"](llama)).logits

        eager = [logits(index, llama) for index in range(2)]
        for index in range(2):
            logits(index, graph)

        def work(index):
            for _ in range(10):
                found[index].append(logits(index, graph))

        for thread in [spawn(lambda i=i: work(i)) for i in range(2)]:
            thread.join()
    for expected, logits in zip(eager, found, strict=True):
        assert_close(logits, [expected] * 10)
