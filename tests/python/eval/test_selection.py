"""Selection rules in evaluations: measured with them, and counted by what they return."""

import torch

from h2o_prefill import ops
from h2o_prefill.config import PrefillConfig
from h2o_prefill.eval import evaluate_perplexity, measure_attention
from h2o_prefill.selection import tri_shape

CONFIG = PrefillConfig(chunk_size=16, local_window=4, heavy_budget=4, dense_tail=5)
TOKENS = torch.randint(1, 257, (128,), generator=torch.Generator().manual_seed(3))


def h2o(given):
    past = given.scores, given.memory, given.begin, given.end
    return ops.select_memory(*past, local_window=4, heavy_budget=4, sink_tokens=0)


def first(given):
    return torch.zeros(*given.keys.shape[:2], 1, dtype=torch.int64)


def test_perplexity_counts_what_a_rule_selects(tiny_model):
    given = {"context": 64, "windows": "0:2"}
    usual = evaluate_perplexity(tiny_model, TOKENS, CONFIG, **given)
    same = evaluate_perplexity(tiny_model, TOKENS, CONFIG, select=h2o, **given)
    assert same.sparse.ppl == usual.sparse.ppl and same.select == "h2o"
    assert same.attention_flops_ratio == usual.attention_flops_ratio
    few = CONFIG.replace(local_window=0, heavy_budget=1)
    one = evaluate_perplexity(tiny_model, TOKENS, CONFIG, select=first, **given)
    expected = evaluate_perplexity(tiny_model, TOKENS, few, **given)
    assert one.attention_flops_ratio == expected.attention_flops_ratio


def test_measures_of_a_rule_are_those_of_its_sets(tiny_model):
    shape = measure_attention(tiny_model, TOKENS[:72], CONFIG, select=tri_shape)
    assert shape.memory[1, 0, 0].tolist() == [0, 1, 2, 3, 28, 29, 30, 31]
