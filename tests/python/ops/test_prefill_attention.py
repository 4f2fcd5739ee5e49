"""One compiled graph that prefills and decodes in place."""

import pytest
import torch
from torch import nn

from h2o_prefill import PrefillConfig, ops
from h2o_prefill.eval.timing import peak_bytes

VOCABULARY, HEADS, KV_HEADS, HEAD_DIM, LAYERS = 61, 4, 2, 16, 2
CONFIG = PrefillConfig.parse(
    "recommended,chunk_size=64,local_window=8,heavy_budget=8,sink_tokens=2,max_widen=1"
)
SETTINGS, OPS = CONFIG.to_string(), torch.ops.h2o_prefill
# Tokens of the calls over the prompt; single tokens are decoded after it.
CALLS, NUM_DECODED = (150, 20, 64), 4
CAPACITY = sum(CALLS) + NUM_DECODED


class Decoder(nn.Module):
    """Two layers of attention, whose state lies in buffers that every call changes in place."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, HEADS * HEAD_DIM)
        width = (HEADS + 2 * KV_HEADS) * HEAD_DIM
        self.layers = nn.ModuleList(nn.Linear(HEADS * HEAD_DIM, width) for _ in range(LAYERS))

    def forward(self, token_ids, buffers, position, recall):
        """Return the logits after the last token of a call."""
        length = token_ids.shape[1]
        hidden = self.embed(token_ids) + (position[0] + torch.arange(length)).sin().unsqueeze(1)
        for layer, project in enumerate(self.layers):
            x = project(hidden).view(1, length, -1, HEAD_DIM).transpose(1, 2)
            new = x.split([HEADS, KV_HEADS, KV_HEADS], dim=1)
            state = *buffers[5 * layer : 5 * layer + 5], position
            options = layer, SETTINGS, None, None, 0.0, *recall
            out = OPS.prefill_attention_(*new, *state, *options)
            hidden = hidden + out.transpose(1, 2).flatten(2)
        OPS.advance_position_(position, length, SETTINGS)
        return nn.functional.linear(hidden[:, -1], self.embed.weight)


def new_buffers(capacity):
    """Return keys, values, scores, memory and errors of each layer, before a prompt."""
    rows = (1, KV_HEADS, capacity)
    memory_sizes = [CONFIG.of_layer(layer).memory_size for layer in range(LAYERS)]
    return [
        buffer
        for size in memory_sizes
        for buffer in (
            *(torch.zeros(*rows, HEAD_DIM), torch.zeros(*rows, HEAD_DIM), torch.zeros(rows)),
            torch.full((1, KV_HEADS, size), -1, dtype=torch.int32),
            torch.zeros(1, KV_HEADS, 4),
        )
    ]


def run(model, prompt, buffers):
    """Prefill a prompt in several calls and decode; return all token ids, and logits by call."""
    token_ids, position = prompt, torch.zeros(2, dtype=torch.int64)
    logits = []
    for tokens in (*CALLS, *[1] * NUM_DECODED):
        begin = int(position[0])
        end = begin + tokens
        # A dense call ignores the lists: the last sparse call's will do.
        if CONFIG.is_sparse_call(begin, tokens):
            recall = ops.lexical_recall(token_ids[:, :end], begin, CONFIG)
        # Not [:, begin:end]: torch.compile would make another graph for each stride.
        logits.append(model(token_ids[0, begin:end].unsqueeze(0), buffers, position, recall))
        if end == token_ids.shape[1]:
            token_ids = torch.cat([token_ids, logits[-1].argmax(-1, keepdim=True)], dim=1)
    return token_ids, torch.cat(logits)


@pytest.fixture(scope="module")
def decoder():
    torch.manual_seed(0)
    return Decoder().eval()


@pytest.fixture(scope="module")
def prompt():
    words = torch.randint(0, VOCABULARY, (20, 3), generator=torch.Generator().manual_seed(3))
    # A copy: torch.compile guards the shape of the tensor under a view.
    return words[torch.arange(100) * 7 % 20].reshape(1, -1)[:, : sum(CALLS)].clone()


def assert_same_answers(model, decoder, prompt):
    """Compare calls of several lengths, sparse and dense, decoding, and the buffers after them."""
    expected_buffers, buffers = new_buffers(CAPACITY), new_buffers(CAPACITY)
    expected_ids, expected_logits = run(decoder, prompt, expected_buffers)
    ids, logits = run(model, prompt, buffers)
    assert torch.equal(ids, expected_ids)
    torch.testing.assert_close(logits, expected_logits, rtol=1e-4, atol=1e-4)
    for actual, expected in zip(buffers, expected_buffers, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


def test_the_calls_recall_and_attend_sparsely(decoder, prompt):
    """Else the tests below would compare dense attention with itself."""
    buffers = new_buffers(CAPACITY)
    with torch.no_grad():
        run(decoder, prompt, buffers)
    for layer in range(2):
        assert (buffers[5 * layer + 3] >= 0).all() and buffers[5 * layer + 2].any()
    assert ops.lexical_recall(prompt[:, : CALLS[0]], 0, CONFIG)[0][-1] > 0


@pytest.mark.slow
def test_compiles_into_one_graph_that_clones_no_cache(fresh_dynamo, decoder, prompt):
    compiled = torch.compile(decoder, fullgraph=True, dynamic=True)
    capacity = 50_000
    buffers, position = new_buffers(capacity), torch.zeros(2, dtype=torch.int64)
    # Not the first chunk's, which are empty: PyTorch specialises sizes of 0 too.
    recall = ops.lexical_recall(prompt[:, :100], 0, CONFIG)

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
