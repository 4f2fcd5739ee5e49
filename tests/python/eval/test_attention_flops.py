"""The count of query-key products, beside one that goes through every row."""

import itertools

import pytest
import torch

from h2o_prefill import ops
from h2o_prefill.config import PrefillConfig
from h2o_prefill.eval import count_attention_flops
from h2o_prefill.eval.attention_flops import sparse_dot_products

LENGTH = 76  # four chunks of 16 tokens and one of 12, part of a block
CONFIG = PrefillConfig(chunk_size=16, local_window=4, heavy_budget=4)
# Few words, so that there is something to recall, and more of it in the second prompt.
GENERATOR = torch.Generator().manual_seed(3)
PROMPTS = torch.cat([torch.randint(n, (1, LENGTH), generator=GENERATOR) for n in (12, 5)])


def _keys_of_rows(prompt, config, factor=1):
    """Count, row by row, all keys that a head of this factor sees, and those recalled."""
    recalled = [0] * LENGTH
    if config.recall:
        block = config.recall_block
        offsets, _, visible = ops.lexical_recall(prompt[None], 0, config)
        for row in range(LENGTH):
            entries = slice(offsets[row // block], offsets[row // block + 1])
            recalled[row] = int((visible[entries] <= row).sum())
    size = config.sink_tokens + factor * (config.local_window + config.heavy_budget)
    keys = []
    for row in range(LENGTH):
        begin = row - row % config.chunk_size
        tail = row + 1 if row >= LENGTH - config.dense_tail else 0
        keys.append(row - begin + 1 + min(size, begin) + recalled[row] + tail)
    return keys, recalled


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"sink_tokens": 12},
        {"dense_tail": 20},
        {"dense_tail": LENGTH + 1},
        {"recall": 2, "chunk_size": 24},  # blocks of eight rows
        {"recall": 3, "dense_tail": 5},
        {"wide": ((1, 3), (9, 3)), "dense_tail": 20},
        {"wide": ((1, 0, 2), (2, 1, 50), (9, 0, 2)), "recall": 2},
    ],
)
@pytest.mark.filterwarnings("ignore:the memory set")
@pytest.mark.parametrize("dense_layers", [(), (0, 2), (0, 0, 7)])
def test_every_key_of_every_row_counts(options, dense_layers):
    """Of two KV heads in each of three layers, each with its own memory set."""
    config = CONFIG.replace(**options, dense_layers=dense_layers)
    factors = {(x[0], head): x[-1] for x in config.wide for head in x[1:-1] or (0, 1)}
    heads, dense = itertools.product(range(3), range(2)), sum(range(1, LENGTH + 1))
    pairs = [
        dense if layer in dense_layers else sum(_keys_of_rows(prompt, config, factor)[0])
        for layer, head in heads
        for factor in [factors.get((layer, head), 1)]
        for prompt in PROMPTS
    ]
    found = count_attention_flops(PROMPTS, config, 3, 2)
    assert found.ratio == pytest.approx(dense * len(pairs) / sum(pairs), rel=1e-4)
    recalled = [count for prompt in PROMPTS for count in _keys_of_rows(prompt, config)[1]]
    assert found.recalled_keys == (
        pytest.approx(sum(recalled) / len(recalled)) if config.recall else None
    )
    assert any(recalled) == (config.recall > 0)


def test_a_prompt_too_short_for_a_sparse_call_is_dense():
    config = CONFIG.replace(recall=2, dense_tail=4)
    short = count_attention_flops(PROMPTS, config.replace(min_prefill=LENGTH + 1))
    assert (short.ratio, short.recalled_keys) == (1, 0)
    just = count_attention_flops(PROMPTS, config.replace(min_prefill=LENGTH))
    assert just == count_attention_flops(PROMPTS, config) and just.ratio != 1


def test_factors_by_errors_and_their_rows_count():
    config = CONFIG.replace(local_window=2, heavy_budget=2, error_rows=3)
    chunks = range(CONFIG.chunk_size, LENGTH, CONFIG.chunk_size)
    rows = [min(CONFIG.chunk_size, LENGTH - begin) for begin in chunks]
    exact = sum(3 * (begin + count // 2) for begin, count in zip(chunks, rows, strict=True))
    plain = sparse_dot_products(LENGTH, config.replace(error_rows=0), kv_heads=2)
    assert sparse_dot_products(LENGTH, config, kv_heads=2) == plain + exact
    # Twice and four times 2 + 2 keys: 8 more on average.
    factors = torch.tensor([2.0, 4.0])
    widened = sparse_dot_products(LENGTH, config, kv_heads=2, widening=factors)
    assert widened == plain + exact + 8 * sum(rows)
