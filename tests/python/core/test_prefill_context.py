"""`PrefillContext`: open min_prefill, windows, prompts without ids, calls that fail halfway.

Random programs compare it with the operators; tests/cpp/core has its threads.
"""

import copy

import pytest
import torch
from op_testing import Shape, make_qkv

from h2o_prefill import PrefillConfig, ops

TOKENS = 90
RECALLING = PrefillConfig.parse(
    "recommended,chunk_size=16,local_window=3,heavy_budget=4,recall=2,error_rows=4,min_prefill=none"
)
IDS = (torch.arange(TOKENS) % 11).expand(2, -1)
QKV = [make_qkv(Shape(2, 4, 2, TOKENS, 8, 16), seed=layer) for layer in (0, 1)]


def new_context(config=RECALLING, checkpoints=True):
    return torch.classes.h2o_prefill.PrefillContext(2, TOKENS, config.native, checkpoints)


def attend(context, layer, begin, end, window=None):
    return context.attend(layer, *(x[:, :, begin:end] for x in QKV[layer]), None, window)


def run(context, begin, end, with_ids=True, total=None, window=None):
    """Return the outputs of both layers for the tokens [begin, end)."""
    if with_ids:
        context.begin(IDS[:, begin:end], total)
    else:
        context.begin_without_ids(end - begin, total)
    return torch.stack([attend(context, layer, begin, end, window) for layer in (0, 1)])


def test_short_prompts_are_dense_where_min_prefill_is_open():
    config = PrefillConfig(chunk_size=16, local_window=3, heavy_budget=4)
    expected = run(new_context(config), 0, 80)
    config = config.replace(min_prefill="auto")
    shortest = config.shortest_sparse_prompt(QKV[0][1])
    assert 16 < shortest < 64

    def is_sparse(context):
        least = context.config().min_prefill
        assert least == (16 if context.tracker().has_scores(1) else shortest)
        return least == 16

    whole, announced, context = (new_context(config) for _ in range(3))
    assert torch.equal(run(whole, 0, 80), expected) and is_sparse(whole)
    parts = run(announced, 0, 16, total=80), run(announced, 16, 80)
    assert torch.equal(torch.cat(parts, 3), expected)
    run(context, 0, 16)
    assert not is_sparse(context)
    run(context, 16, 64)  # the prompt is long enough now, and stays so
    assert is_sparse(context)
    other = copy.deepcopy(context)
    for each in (context, other):
        each.reset()
        run(each, 0, shortest - 1)
        assert not is_sparse(each)
    # The same prompt in pieces that tell its length, which is not added up.
    context.reset()
    run(context, 0, 16, total=shortest - 1)
    run(context, 16, shortest - 1, total=shortest - 1)
    assert not is_sparse(context)


def test_a_layer_with_a_window_is_exact_in_it():
    context = new_context()
    for begin, end in ((0, 70), (70, 90)):
        out = run(context, begin, end, window=20)
        for layer, (q, k, v) in enumerate(QKV):
            call = q[:, :, begin:end], k[:, :, :end], v[:, :, :end]
            assert torch.equal(out[layer], ops.sliding_window_attention(*call, 20)[0])
            assert not context.tracker().has_scores(layer)


@pytest.mark.filterwarnings("ignore:h2o_prefill. recall is off")
def test_without_ids_nothing_is_recalled():
    expected, context = new_context(RECALLING.replace(recall=0)), new_context()
    assert torch.equal(run(context, 0, 20, with_ids=False), run(expected, 0, 20))
    # What stood before is not known.
    assert torch.equal(run(context, 20, 60), run(expected, 20, 60))
    assert context.token_ids() is None
    context.reset()
    run(context, 0, 20)
    assert torch.equal(context.token_ids(), IDS[:, :20])


@pytest.mark.parametrize(
    ("past", "end", "with_ids"), [(0, 8, True), (0, 40, False), (32, 40, False), (32, 72, True)]
)
def test_a_call_that_fails_halfway_is_refused_until_it_is_removed(past, end, with_ids, tmp_path):
    """Dense and sparse calls, at the beginning of a prompt and later."""
    context, straight = new_context(), new_context()
    for each in (context, straight):
        if past:
            run(each, 0, past)
    if with_ids:
        context.begin(IDS[:, past:end], None)
    else:
        context.begin_without_ids(end - past, None)
    attend(context, 0, past, end)
    with pytest.raises(ValueError, match="layer 0 has attended already"):
        attend(context, 0, past, end)
    with pytest.raises(ValueError, match="layer 0 has and others have not in the"):
        context.begin(IDS[:, 40:41], None)
    if past:
        with pytest.raises(ValueError, match="every layer must have attended in the last"):
            context.save(str(tmp_path / "none"), "model")
        assert context.checkpoint_before(past - 1) == 16
    assert context.checkpoint_before(past) == past
    context.truncate(past)
    assert torch.equal(run(context, past, TOKENS), run(straight, past, TOKENS))
    # A call that no layer attended in is replaced.
    context.truncate(60)
    for tokens in (5, 7):
        context.begin(IDS[:, :tokens], None)
    assert torch.equal(context.token_ids(), IDS[:, :60])
