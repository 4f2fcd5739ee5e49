"""Oracles of the operators: the definition of the method, and its invariants."""

import pytest
import torch
from op_testing import Shape, make_qkv, recall_text, settings_text

from h2o_prefill.reference import ops

S, L, H, BLOCK = 12, 4, 4, 4
NO_RECALL = (None, None, None)
GROUPS = pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1)], ids=["mha", "gqa", "mqa"])


def random_qkv(tokens, heads=(4, 2), past=0, dtype=torch.float64):
    q, k, v = make_qkv(Shape(2, *heads, tokens, 8, 6), dtype, past=past)
    return 2 * q, 2 * k, v


def text(**fields):
    sizes = {"chunk_size": S, "local_window": L, "heavy_budget": H}
    return settings_text(**(sizes | fields))


def prefill(q, k, v, calls=None, recall=NO_RECALL, **fields):
    """Run calls of the given lengths one after another; return all outputs, scores and memory."""
    scores, memory, last, past, outputs = None, None, 0, 0, []
    for new in calls or [q.shape[2]]:
        end = past + new
        history = (q[:, :, past:end], k[:, :, :end], v[:, :, :end])
        out, scores, memory, _ = ops.chunked_sparse_attention(
            *history, scores, memory, *recall, last, text(**fields)
        )
        outputs.append(out)
        last, past = past + (new - 1) // S * S, end
    return torch.cat(outputs, dim=2), scores, memory


def sdpa(q, k, v, **options):
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True, **options)


def assert_equal(got, expected, atol=1e-12):
    torch.testing.assert_close(got, expected, rtol=0, atol=atol)


def by_definition(q, k, v, recall, sink_tokens=0, dense_tail=0, gqa_reduce="sum"):
    """Return output, scores and memory: one softmax over the mask of all that a row sees."""
    (batch, heads, total), group = k.shape[:3], q.shape[1] // k.shape[1]
    logits = q @ k.repeat_interleave(group, 1).transpose(-1, -2) * q.shape[3] ** -0.5
    position = torch.arange(total)
    causal = position <= position.unsqueeze(1)

    def votes(mask):
        masked = logits.masked_fill(~mask.repeat_interleave(group, 1), -torch.inf)
        sums = masked.softmax(-1).nan_to_num(0).sum(2).unflatten(1, (heads, group))
        return sums.amax(2) if gqa_reduce == "max" else sums.sum(2)

    inside = causal & (position // S == position.unsqueeze(1) // S)
    visible = inside.repeat(batch, heads, 1, 1)
    scores, memory = votes(visible), torch.empty(batch, heads, 0, dtype=torch.int32)
    for begin in range(S, total, S):
        memory = ops.select_memory(scores, memory, begin - S, begin, L, H, sink_tokens)
        looks_back = torch.zeros_like(visible)
        for b in range(batch):
            for h in range(heads):
                looks_back[b, h, begin : begin + S, memory[b, h].long()] = True
        scores = scores + votes(looks_back)
        visible |= looks_back
    if recall[0] is not None:
        offsets, positions, visible_from = (x.tolist() for x in recall)
        for block in range(len(offsets) - 1):
            b, first = divmod(block, -(-total // BLOCK))
            for i in range(offsets[block], offsets[block + 1]):
                for row in range(first * BLOCK, min(first * BLOCK + BLOCK, total)):
                    if row >= visible_from[i] and positions[i] < row // S * S:
                        visible[b, :, row, positions[i]] = True
    if dense_tail:
        visible[:, :, -dense_tail:] = causal[-dense_tail:]
    return sdpa(q, k, v, attn_mask=visible.repeat_interleave(group, 1)), scores, memory


@GROUPS
@pytest.mark.parametrize("tokens", [1, S - 1, S, S + 1, 2 * S - 1, 3 * S + 5])
@pytest.mark.parametrize("recalls", [False, True])
@pytest.mark.parametrize(
    "options", [{}, {"sink_tokens": 2, "dense_tail": S + 9}, {"gqa_reduce": "max"}], ids=str
)
def test_a_prefill_is_what_the_definition_says(heads, tokens, recalls, options):
    q, k, v = random_qkv(tokens, heads)
    ids = torch.randint(0, 6, (2, tokens), generator=torch.Generator().manual_seed(0))
    recall = ops.lexical_recall(ids, 0, recall_text(S, 2)) if recalls else NO_RECALL
    out, scores, memory = prefill(q, k, v, recall=recall, **options)
    expected = by_definition(q, k, v, recall, **options)
    assert_equal(out, expected[0])
    assert_equal(scores, expected[1])
    assert torch.equal(memory, expected[2]) if tokens > S else (memory == -1).all()
