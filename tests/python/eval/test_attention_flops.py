"""The count of query-key products, beside one that goes through every row."""

import warnings

import pytest
import torch

from h2o_prefill import ops
from h2o_prefill.config import PrefillConfig
from h2o_prefill.eval import count_attention_flops
from h2o_prefill.eval.attention_flops import dense_dot_products, sparse_dot_products

LENGTH = 76  # four chunks of 16 tokens and one of 12: a block and half of one
CONFIG = PrefillConfig(chunk_size=16, local_window=4, heavy_budget=4)
# Few words, so that there is something to recall, and more of it in the second prompt.
GENERATOR = torch.Generator().manual_seed(3)
PROMPTS = torch.cat([torch.randint(n, (1, LENGTH), generator=GENERATOR) for n in (12, 5)])


def _keys_of_rows(prompt, config):
    """Count, row by row, all keys that it sees, and those recalled."""
    recalled = [0] * LENGTH
    if config.recall:
        block = config.recall_block
        offsets, _, visible = ops.lexical_recall(prompt[None], 0, config)
        for row in range(LENGTH):
            entries = slice(offsets[row // block], offsets[row // block + 1])
            recalled[row] = int((visible[entries] <= row).sum())
    keys = []
    for row in range(LENGTH):
        begin = row - row % config.chunk_size
        tail = row + 1 if row >= LENGTH - config.dense_tail else 0
        memory = min(config.memory_size, begin)
        keys.append(row - begin + 1 + memory + recalled[row] + tail)
    return keys, recalled


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"sink_tokens": 12},
        {"dense_tail": 20},
        {"dense_tail": LENGTH + 1},
        {"recall": 2, "recall_block": 8},
        {"recall": 3, "recall_block": 16, "dense_tail": 5},
    ],
)
@pytest.mark.filterwarnings("ignore:the memory set")
@pytest.mark.parametrize("dense_layers", [(), (0, 2), (0, 0, 7)])
def test_every_key_of_every_row_counts(options, dense_layers):
    config = CONFIG.replace(**options, dense_layers=dense_layers)
    rows = [_keys_of_rows(prompt, config) for prompt in PROMPTS]
    sparse = sum(sum(keys) for keys, _ in rows)
    dense = len(PROMPTS) * sum(range(1, LENGTH + 1))
    stay_dense = len({0, 1, 2} & set(dense_layers))
    found = count_attention_flops(PROMPTS, config, 3)
    assert found.ratio == pytest.approx(
        3 * dense / (stay_dense * dense + (3 - stay_dense) * sparse)
    )
    recalled = [count for _, counts in rows for count in counts]
    if config.recall:
        assert found.recalled_keys == pytest.approx(sum(recalled) / len(recalled)) and any(recalled)
    else:
        assert found.recalled_keys is None


def test_a_prompt_too_short_for_a_sparse_call_is_dense():
    config = CONFIG.replace(recall=2, recall_block=8, dense_tail=4)
    short = count_attention_flops(PROMPTS, config.replace(min_prefill=LENGTH + 1))
    assert (short.ratio, short.recalled_keys) == (1, 0)
    just = count_attention_flops(PROMPTS, config.replace(min_prefill=LENGTH))
    assert just == count_attention_flops(PROMPTS, config) and just.ratio != 1


@pytest.mark.parametrize(
    ("tokens", "sparse", "dense"), [(4096, 3_672_064, 8_390_656), (1024, 524_800, 524_800)]
)
def test_dot_products_are_those_of_the_specification(tokens, sparse, dense):
    assert sparse_dot_products(tokens, PrefillConfig()) == sparse
    assert dense_dot_products(tokens) == dense


@pytest.mark.parametrize("options", [{}, {"recall": 2, "recall_block": 8}, {"dense_tail": 20}])
@pytest.mark.filterwarnings("ignore:the memory set")
def test_wide_layers_count_with_their_own_sizes(options):
    config = CONFIG.replace(**options)
    wide = config.replace(
        local_window=3 * config.local_window, heavy_budget=3 * config.heavy_budget
    )
    ratios = [count_attention_flops(PROMPTS, each).ratio for each in (config, wide)]
    mixed = count_attention_flops(PROMPTS, config.replace(wide=((1, 3), (9, 3))), 3)
    assert ratios[0] > ratios[1]
    assert 1 / mixed.ratio == pytest.approx((2 / ratios[0] + 1 / ratios[1]) / 3)


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


@pytest.mark.parametrize("factor", [2, 50])
def test_wide_heads_count_with_their_own_sets(factor):
    # With the larger factor the set holds everything before a chunk, and no more.
    sizes = {"local_window": 4 * factor, "heavy_budget": 4 * factor}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is as large as a chunk
        wide = sparse_dot_products(LENGTH, CONFIG.replace(**sizes))
    mixed = CONFIG.replace(wide=((0, 2, factor),))
    given = sparse_dot_products(LENGTH, CONFIG)
    assert sparse_dot_products(LENGTH, mixed, kv_heads=4) == round((3 * given + wide) / 4)
