"""Every operator against the oracle: at named sizes that are hard, and in calls of any sizes,
dtypes, layouts and settings; what breaks a call; and bits that must be the same.

`make test-fuzz` makes many more, under sanitizers, and programs of the classes. CTest runs this
file over the CUDA kernels on their emulation too.
"""

import os
import random
from itertools import combinations

import pytest
import torch
from op_testing import DTYPES, Shape, assert_same_on_threads, make_qkv, settings_text
from random_calls.broken import breakages
from random_calls.calls import Call, arguments_of, check_call, draw_call, outcome
from random_calls.draw import Draw
from random_calls.examples import LOGITS, SPARSE, S, examples, named_call
from random_calls.judge import Judge
from random_calls.operators import TENSORS

from h2o_prefill import ops

pytestmark = pytest.mark.filterwarnings("ignore:the memory set")
EXAMPLES = examples()
# The emulation takes its time: some of what is short, others for each of its architectures.
EMULATED = "H2O_EMULATED_LIBRARY" in os.environ
CALLS, MOST = (1, 5) if EMULATED else (30, 1000)
FIRST = 1 if EMULATED and os.environ["H2O_PREFILL_CUDA_SM90"] == "1" else 0
LONG = ("several steps", "distant logits", "chunks") if EMULATED else ()
on_cpus = pytest.mark.skipif(EMULATED, reason="of kernels of the CPU, or long")


def example(operator, about, name):
    return named_call(operator, name, EXAMPLES[operator, about][name])


def check(call, device, **options):
    try:
        check_call(call, device=device, **options)
    except AssertionError as error:
        raise AssertionError(repr(call)) from error


def depends_on_threads(operator, given):
    """Return whether PyTorch's own products compute it, or may: float64, few rows of float32."""
    sizes = given["sizes"]
    few = operator in LOGITS and sizes["T"] < 64 and sizes["H"] == sizes["G"]
    return given["dtype"] == "float64" or (given["dtype"] == "float32" and few)


@pytest.mark.parametrize(("operator", "about"), [x for x in EXAMPLES if x[1] not in LONG], ids=str)
def test_named_examples(device, operator, about):
    """On one thread and on several, to the bit."""
    calls = list(EXAMPLES[operator, about].items())
    for name, given in calls[FIRST :: len(calls) // MOST + 1]:
        call, wide = named_call(operator, name, given), given["dtype"] in ("float32", "float64")
        check(call, device, judge=Judge(strict=wide), traces=False)
        if device == "cpu" and not EMULATED and not depends_on_threads(operator, given):
            threads = 40 if about == "several steps" else 3
            assert_same_on_threads(lambda call=call: outcome(call), (1, threads))


@pytest.mark.parametrize("operator", SPARSE)
def test_the_examples_recall_and_widen(operator):
    """Else they would compare nothing of it."""
    for name in ("widening after 45, float32", "all after 0, bfloat16"):
        call = example(operator, "settings", name)
        assert outcome(call)[-1][..., 0].any(), name
    assert call.arguments["recall_positions"].values


@pytest.mark.parametrize("name", TENSORS)
def test_random_calls(device, name):
    """A call with one wrong argument gives a ValueError and changes nothing."""
    for seed in range(CALLS):
        draw = Draw(random.Random(f"{name} {seed}"))
        check(draw_call(draw, name, ("valid", "valid", "broken")), device)


@pytest.mark.parametrize("operator", TENSORS)
def test_whatever_breaks_a_call_is_refused(device, operator):
    names = [("lengths", f"{S + 1} tokens after 45"), ("lengths", f"{S} tokens after 0")]
    names += [("in place", "every tensor")] if operator == "prefill_attention_" else []
    for name in names:
        valid = example(operator, *name)
        for what, changes in breakages(operator, valid.arguments).items():
            arguments = valid.arguments | changes
            check(Call(operator, arguments, "broken", what, tuple(changes)), device)


def written(operator):
    schema = getattr(torch.ops.h2o_prefill, operator).default._schema.arguments
    return {x.name for x in schema if x.is_write}


@pytest.mark.parametrize("operator", ["accumulate_scores_", "prefill_attention_"])
def test_what_a_call_writes_shares_memory_with_nothing_else(device, operator):
    name = ("in place", "every tensor"), ("lengths", f"{S + 1} tokens after 45")
    valid = example(operator, *name[operator not in SPARSE])
    arguments = arguments_of(valid, device)
    names = list(valid.arguments)
    tensors = [i for i, x in enumerate(arguments) if isinstance(x, torch.Tensor) and x.numel()]
    for i, j in combinations(tensors, 2):
        pair = {names[i], names[j]}
        if not pair & written(operator):
            continue
        # Positions that are valid, were they not shared.
        number = 0 if operator in SPARSE else -1
        pool = torch.full((1 << 16,), number, dtype=torch.int32, device=arguments[i].device)
        shared = list(arguments)
        for x in (i, j):
            view = pool.view(arguments[x].dtype)[: arguments[x].numel()]
            shared[x] = view.view(arguments[x].shape)
        before = pool.clone()
        with pytest.raises(ValueError, match="must not share memory with"):
            getattr(torch.ops.h2o_prefill, operator)(*shared)
        assert torch.equal(pool, before)


@pytest.mark.parametrize("dim", range(4))
@pytest.mark.parametrize("by_token", [False, True])
def test_caches_may_be_parts_of_one_tensor(device, dim, by_token):
    call = example("prefill_attention_", "lengths", f"{S + 1} tokens after 45")
    expected = outcome(call, device)
    arguments = arguments_of(call, device)
    caches = [x[..., :16] for x in arguments[3:5]]
    whole = torch.cat(caches, dim)
    whole = whole.transpose(1, 2).contiguous().transpose(1, 2) if by_token else whole
    arguments[3:5] = whole.chunk(2, dim)
    arguments[2] = arguments[2][..., :16]
    out = ops.prefill_attention_(*arguments)
    torch.testing.assert_close(out, expected[0][..., :16])
    for cache, same in zip(arguments[3:5], expected[1:3], strict=True):
        torch.testing.assert_close(cache, same[..., :16], rtol=0, atol=0, equal_nan=True)


@on_cpus
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [16, 128])
def test_a_row_does_not_depend_on_the_rows_after_it(device, dtype, head_dim):
    """To the bit, whatever part of a tile they fill."""
    q, k, v = make_qkv(Shape(1, 2, 1, 200, head_dim, head_dim), dtype, device)
    whole = ops.intra_chunk_attention(q, k, v, 200)[:2]
    for rows in range(160, 200):
        part = ops.intra_chunk_attention(*(x[:, :, :rows] for x in (q, k, v)), 200)
        assert all(torch.equal(x, y[:, :, :rows]) for x, y in zip(part, whole, strict=False))


def prefill(q, k, v, state=(None, None), last=0, errors=None, **fields):
    settings = settings_text(**{"chunk_size": S, "local_window": 8, "heavy_budget": 8, **fields})
    options = (None, None, 0.0, errors)
    return ops.chunked_sparse_attention(q, k, v, *state, *[None] * 3, last, settings, *options)


OPTIONS = [{}, {"sink_tokens": 3}, {"gqa_reduce": "max"}]
OPTIONS += [{"error_rows": 4, "error_threshold": 0.01, "max_widen": 4}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_calls_in_multiples_of_the_chunk_equal_one_call(device, options):
    """To the bit; a single chunk is attention inside it."""
    q, k, v = make_qkv(Shape(1, 4, 2, 7 * S + 5, 16, 16), device=device)
    whole = prefill(q, k, v, **options)
    state, errors, begin, last, outs = (None, None), None, 0, 0, []
    for end in (S, 2 * S, 3 * S, 6 * S, 7 * S + 5):
        history = q[:, :, begin:end], k[:, :, :end], v[:, :, :end]
        out, *state, errors = prefill(*history, state, last, errors, **options)
        if begin == 0:
            inside = ops.intra_chunk_attention(*history, S)
            assert torch.equal(out, inside[0]) and (state[1] == -1).all()
            assert torch.equal(state[0], inside[2]) or "gqa_reduce" in options
        last = begin + (end - begin - 1) // S * S
        outs.append(out)
        begin = end
    assert torch.equal(torch.cat(outs, 2), whole[0])
    assert all(map(torch.equal, (*state, errors), whole[1:]))


def test_budgets_beyond_the_history_take_no_time(device):
    """Minutes and gigabytes if every step had room for all of them."""
    q, k, v = make_qkv(Shape(1, 1, 1, S + 8, 8, 8), torch.float64, device)
    sizes = dict.fromkeys(("local_window", "heavy_budget", "sink_tokens"), 1 << 22)
    out, _, memory, _ = prefill(q, k, v, **sizes)
    torch.testing.assert_close(out, ops.dense_attention(q, k, v))
    assert memory.shape[2] == 3 << 22
    assert memory[0, 0, :S].tolist() == list(range(S)) and (memory[..., S:] == -1).all()


@on_cpus
@pytest.mark.parametrize("rows", [3, 100])
def test_a_nan_in_a_key_or_a_query_reaches_the_rows_that_see_it(device, rows):
    q, k, v = make_qkv(Shape(1, 2, 1, rows, 16, 16), device=device, past=1500)
    assert ops.dense_attention(q, k, v).isfinite().all()
    q[0, 0, 1, 0] = float("nan")
    is_nan = ops.dense_attention(q, k, v).isnan().all(3)[0]
    assert is_nan.nonzero().tolist() == [[0, 1]]
    k[0, 0, 1501, 3] = float("nan")
    assert ops.dense_attention(q, k, v)[:, :, 1:].isnan().all()


@on_cpus
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_value_that_is_not_finite_reaches_its_tile_alone(device, dtype, value):
    """As far as docs/method.md says."""
    before, after = (127, 127) if device == "cuda" or EMULATED else (31, 63)
    at, window = 777, 40
    q, k, v = make_qkv(Shape(1, 2, 1, 1000, 64, 64), dtype, device)
    v[0, 0, at, 3] = value
    seeing = torch.arange(1000, device=device) >= at
    for out, last in (
        (ops.dense_attention(q, k, v), 999),
        (ops.intra_chunk_attention(q, k, v, 1000)[0], 999),
        (ops.sliding_window_attention(q, k, v, window)[0], at + window - 1),
    ):
        finite = out.isfinite().all(-1).all(1)[0]
        assert finite[: at - before].all() and finite[last + 1 + after :].all()
        assert not finite[seeing][: last + 1 - at].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_end_of_the_history_suffices_for_a_window(device, dtype):
    """As a cache that keeps the window alone holds it; earlier rows are never read."""
    q, k, v = make_qkv(Shape(1, 2, 1, 200, 16, 16), dtype, device, past=1300)
    kept = slice(1300 - 99, None)
    whole = ops.sliding_window_attention(q, k, v, 100)
    ends = ops.sliding_window_attention(q, k[:, :, kept], v[:, :, kept], 100)
    for x, y in zip(ends, whole, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=2e-2 if dtype == torch.bfloat16 else 1e-6)
    k[:, :, : kept.start], v[:, :, : kept.start] = float("nan"), float("nan")
    assert ops.sliding_window_attention(q, k, v, 100)[0].isfinite().all()


def test_memory_attention_reads_its_keys_alone(device):
    """Without any, the output is 0 and lse -inf."""
    q, k, v = make_qkv(Shape(1, 4, 2, 40, 8, 16), device=device)
    indices = torch.tensor([[[2, 30, -1]] * 2], dtype=torch.int32, device=device)
    expected = ops.memory_attention(q, k, v, indices)
    for x in (k, v):
        x[:, :, [i for i in range(40) if i not in (2, 30)]] = float("nan")
    assert all(map(torch.equal, ops.memory_attention(q, k, v, indices), expected))
    for none in (indices[..., :0], torch.full_like(indices, -1)):
        out, lse, colsum = ops.memory_attention(q, k, v, none)
        assert not out.any() and not colsum.any() and (lse == float("-inf")).all()


def test_merging_an_empty_side(device):
    out, poison, _ = make_qkv(Shape(2, 4, 4, 37, 24, 24), device=device)
    lse = torch.randn(2, 4, 37, device=device)
    empty = torch.full_like(poison, float("nan")), torch.full_like(lse, float("-inf"))
    for merged in (ops.merge_states(out, lse, *empty), ops.merge_states(*empty, out, lse)):
        torch.testing.assert_close(merged, (out, lse), rtol=0, atol=1e-6)
    nothing, lse = ops.merge_states(*empty, *empty)
    assert (nothing == 0).all() and (lse == float("-inf")).all()


@on_cpus
def test_bfloat16_while_onednn_is_disabled():
    """AMX products are computed by oneDNN; without it other kernels are used."""
    q, k, v = make_qkv(Shape(1, 4, 2, 200, 64, 64), torch.bfloat16)
    expected = ops.intra_chunk_attention(q, k, v, 128)[0]
    with torch.backends.mkldnn.flags(enabled=False):
        assert torch.ops.h2o_prefill.cpu_isa() != "amx"
        found = ops.intra_chunk_attention(q, k, v, 128)[0]
    torch.testing.assert_close(found, expected, atol=0.02, rtol=0.02)
