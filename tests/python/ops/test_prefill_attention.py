"""One graph that prefills and decodes in place: torch.compile, torch.export, static caches."""

import pytest
import torch
from export_model import CALLS, CONFIG, NUM_DECODED, VOCABULARY, Decoder, export, new_buffers, run

from h2o_prefill import ops
from h2o_prefill.eval.timing.peak_memory import peak_bytes
from h2o_prefill.functional import recall_lists

CAPACITY = sum(CALLS) + NUM_DECODED


@pytest.fixture(scope="module")
def decoder():
    torch.manual_seed(0)
    return Decoder().eval()


@pytest.fixture(scope="module")
def prompt():
    words = torch.randint(0, VOCABULARY, (20, 3), generator=torch.Generator().manual_seed(3))
    # A copy: torch.compile guards the shape of what a view is of.
    return words[torch.arange(100) * 7 % 20].reshape(1, -1)[:, : sum(CALLS)].clone()


@pytest.fixture
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def assert_same_answers(model, decoder, prompt):
    """Compare calls of several lengths, sparse and dense, decoding, and the buffers after them."""
    expected_buffers, buffers = new_buffers(decoder, CAPACITY), new_buffers(decoder, CAPACITY)
    expected_ids, expected_logits = run(decoder, prompt, expected_buffers)
    ids, logits = run(model, prompt, buffers)
    assert torch.equal(ids, expected_ids)
    torch.testing.assert_close(logits, expected_logits, rtol=1e-4, atol=1e-4)
    for actual, expected in zip(buffers, expected_buffers, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


def test_the_calls_recall_and_attend_sparsely(decoder, prompt):
    """Else the tests below would compare dense attention with itself."""
    buffers = new_buffers(decoder, CAPACITY)
    with torch.no_grad():
        run(decoder, prompt, buffers)
    for layer in range(2):
        assert (buffers[4 * layer + 3] >= 0).all() and buffers[4 * layer + 2].any()
    assert recall_lists(prompt[:, : CALLS[0]], 0, CONFIG)[0][-1] > 0


@pytest.mark.slow
def test_compiles_into_one_graph_that_clones_no_cache(fresh_dynamo, decoder, prompt):
    compiled = torch.compile(decoder, fullgraph=True, dynamic=True)
    capacity = 50_000
    buffers, position = new_buffers(decoder, capacity), torch.zeros(2, dtype=torch.int64)
    # Not those of the first chunk, which are empty: PyTorch specialises sizes of 0 too.
    recall = recall_lists(prompt[:, :100], 0, CONFIG)

    def call(begin, end):
        return compiled(prompt[0, begin:end].unsqueeze(0), buffers, position, recall)

    with torch.no_grad():
        # One graph for any number of tokens, and PyTorch's own specialisation for a single one.
        call(0, 100)
        call(100, 101)
        with torch._dynamo.config.patch(error_on_recompile=True):
            assert_same_answers(compiled, decoder, prompt)
            position.zero_()
            peak = peak_bytes(lambda: call(0, 100))
    assert position.tolist() == [100, 64]
    assert peak < min(buffer.nbytes for buffer in buffers[:3])


def test_exports_for_any_number_of_tokens(decoder, prompt):
    with torch.no_grad():
        program = export(decoder, CAPACITY)
        assert_same_answers(program.module(), decoder, prompt)


def test_a_static_cache_is_the_buffers(prompt):
    transformers = pytest.importorskip("transformers")
    heads, dim, capacity = 2, 16, 256
    config = transformers.LlamaConfig(
        hidden_size=64, num_attention_heads=4, num_key_value_heads=heads, num_hidden_layers=1
    )
    cache = transformers.StaticCache(config=config, max_cache_len=capacity)
    cache.early_initialization(1, heads, dim, torch.float32, torch.device("cpu"))
    (layer,) = cache.layers
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, h, 200, dim, generator=generator) for h in (4, heads, heads))
    scores = torch.zeros(1, heads, capacity)
    memory = torch.full((1, heads, CONFIG.memory_size), -1, dtype=torch.int32)
    position = torch.zeros(2, dtype=torch.int64)
    settings = CONFIG.replace(recall=0, wide_layers=()).to_string()
    addresses = layer.keys.data_ptr(), layer.values.data_ptr()
    outputs = []
    for new in (slice(0, 128), slice(128, 199), slice(199, 200)):
        outputs.append(
            ops.prefill_attention_(
                q[:, :, new], k[:, :, new], v[:, :, new], layer.keys, layer.values, scores, memory,
                position, None, None, None, 0, settings,
            )
        )  # fmt: skip
        ops.advance_position_(position, new.stop - new.start, settings)
    assert addresses == (layer.keys.data_ptr(), layer.values.data_ptr())
    assert torch.equal(layer.keys[:, :, :200], k) and not layer.keys[:, :, 200:].any()
    whole = ops.prefill_attention(q, k, v, *(None,) * 5, 0, 0, settings)
    # A call that ends with a whole chunk continues as if both had been one.
    assert torch.equal(torch.cat(outputs[:2], dim=2), whole[0][:, :, :199])
    assert torch.equal(outputs[2], ops.dense_attention(q[:, :, 199:], k, v))
