"""What only a GPU can show: streams, CUDA graphs, no host synchronization, reused memory."""

import pytest
import torch
from op_testing import (
    DTYPES,
    Shape,
    compare_with_oracle,
    make_indices,
    make_qkv,
    recall_text,
    settings_text,
)

from h2o_prefill import ops
from h2o_prefill.reference import ops as oracle

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

S = 64
RECALL = recall_text(S, 3)
SETTINGS = f"h2o,chunk_size={S},local_window=16,heavy_budget=16,recall=3"


ERRORS = ",error_rows=5,error_threshold=0.01,max_widen=4"


def prefill(q, k, v, recall=(None,) * 3, fields=""):
    return ops.chunked_sparse_attention(q, k, v, None, None, *recall, 0, SETTINGS + fields)


def every_operator(dtype, head_dim=64, value_dim=64):
    """Return a small call of every operator, with arguments on the device."""
    shape = Shape(1, 4, 2, 3 * S + 5, head_dim, value_dim)
    q, k, v = make_qkv(shape, dtype, "cuda")
    long_q, long_k, long_v = make_qkv(shape, dtype, "cuda", past=40)
    indices = make_indices(shape, shape.length + 40, 33, "cuda")
    lse = torch.randn(1, 4, shape.length, device="cuda")
    scores = torch.rand(1, 2, shape.length, device="cuda")
    ids = torch.randint(0, 9, (1, shape.length), generator=torch.Generator().manual_seed(5))
    recall = [x.cuda() for x in ops.lexical_recall(ids, 0, RECALL)]
    colsum = torch.rand(1, 2, 33, device="cuda")
    # Every call writes at the same position.
    position = torch.tensor([40, 0])
    linear = make_qkv(Shape(1, 4, 2, 2 * S + 5, head_dim, value_dim), dtype, "cuda")
    decay = -torch.rand(1, 2, 2 * S + 5, device="cuda")
    cache_key, cache_value = long_k.clone(), long_v.clone()

    def prefill_in_place():
        # New buffers, whose contents after the call are compared too.
        kept = scores.new_zeros(1, 2, cache_key.shape[2])
        memory = torch.full((1, 2, 32), -1, dtype=torch.int32, device="cuda")
        out = ops.prefill_attention_(
            long_q, long_k[:, :, 40:], long_v[:, :, 40:], cache_key, cache_value, kept, memory,
            position, *recall, 0, SETTINGS,
        )  # fmt: skip
        return out, kept, memory

    def accumulate():
        total = scores.new_zeros(1, 2, shape.length + 40)
        ops.accumulate_scores_(total, indices, colsum)
        return total

    def linear_gradients():
        return torch.ops.h2o_prefill.chunkwise_linear_attention_backward(
            *linear, decay, None, None, linear[2].repeat_interleave(2, 1), None, None,
            "elu+1", S, True, False, True,
        )  # fmt: skip

    return {
        "intra_chunk_attention": lambda: ops.intra_chunk_attention(q, k, v, S),
        "memory_attention": lambda: ops.memory_attention(long_q, long_k, long_v, indices),
        "dense_attention": lambda: ops.dense_attention(long_q, long_k, long_v),
        "sliding_window_attention": lambda: ops.sliding_window_attention(
            long_q, long_k, long_v, 33
        ),
        "merge_states": lambda: ops.merge_states(q, lse, q.flip(2), lse.flip(2)),
        "select_memory": lambda: ops.select_memory(scores, indices, 50, 190, 16, 16, 2),
        "gather_rows": lambda: ops.gather_rows(long_k, indices),
        "chunked_sparse_attention": lambda: prefill(q, k, v, fields=",dense_tail=20,sink_tokens=2"),
        "with_recall": lambda: prefill(q, k, v, recall),
        "with_errors": lambda: prefill(q, k, v, fields=ERRORS),
        "prefill_attention": lambda: ops.prefill_attention(
            q, k, v, None, None, *recall, 0, 0, SETTINGS
        ),
        "prefill_attention_": prefill_in_place,
        "accumulate_scores_": accumulate,
        "chunkwise_linear_attention": lambda: ops.chunkwise_linear_attention(
            *linear, decay, normalize=True
        ),
        "chunkwise_linear_attention_backward": linear_gradients,
    }


NAMES = list(every_operator(torch.float32)) if torch.cuda.is_available() else []


def as_tuple(result):
    return result if isinstance(result, tuple) else (result,)


# More row tiles than a GPU runs at once, and more tiles of keys than the rings have buffers.
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("name", ["chunks", "memory", "dense", "window", "recall"])
def test_long_calls_agree_with_the_oracle(name, head_dim):
    def qkv(length, past=0):
        shape = Shape(1, 16, 4, length, head_dim, head_dim)
        return make_qkv(shape, torch.bfloat16, "cuda", past=past)

    def check(operator, *arguments):
        return compare_with_oracle(getattr(ops, operator), getattr(oracle, operator), *arguments)

    if name == "chunks":
        check("intra_chunk_attention", *qkv(8000), 1024)
    elif name == "memory":
        shape = Shape(1, 16, 4, 3000, head_dim, head_dim)
        indices = make_indices(shape, 8000, 2000, "cuda")
        check("memory_attention", *qkv(3000, 5000), indices)
    elif name == "dense":
        check("dense_attention", *qkv(3000, 5000))
    elif name == "window":
        check("sliding_window_attention", *qkv(4000), 900)
    else:
        # Memory sets are the last keys alone: among heavy hitters two may be as good.
        fields = {"local_window": 700, "heavy_budget": 0}
        ids = torch.randint(0, 500, (1, 8000), generator=torch.Generator().manual_seed(5))
        text = recall_text(1024, 4, **fields)
        lists = [x.cuda() for x in ops.lexical_recall(ids, 0, text)]
        tail = settings_text(chunk_size=1024, dense_tail=300, **fields)
        check("chunked_sparse_attention", *qkv(8000), None, None, *lists, 0, tail)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_200_runs_beside_a_busy_stream_are_equal_to_the_bit(head_dim):
    shape = Shape(1, 16, 4, 6000, head_dim, head_dim)
    q, k, v = make_qkv(shape, torch.bfloat16, "cuda")
    settings = settings_text(chunk_size=1024, local_window=256, heavy_budget=256)
    noise = torch.randn(2048, 2048, device="cuda")
    stream = torch.cuda.Stream()

    def run():
        return ops.chunked_sparse_attention(q, k, v, None, None, None, None, None, 0, settings)

    first = run()
    for _ in range(200):
        with torch.cuda.stream(stream):
            for _ in range(3):
                noise @ noise
        assert all(torch.equal(a, b) for a, b in zip(run(), first, strict=True))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nothing_waits_for_the_device(name, dtype):
    call = every_operator(dtype)[name]
    call()
    torch.cuda.set_sync_debug_mode("error")
    try:
        call()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_cuda_graph_replays_the_same_to_the_bit(name, dtype):
    call = every_operator(dtype)[name]
    expected = as_tuple(call())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = as_tuple(call())
    for _ in range(5):
        for x in captured:
            x.fill_(-5)
        graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(a, b) for a, b in zip(captured, expected, strict=True))


@pytest.mark.parametrize("length", [1, 3 * S])
def test_a_captured_call_in_place_writes_where_it_was_captured(length):
    """The position is on the CPU, so a graph holds its value."""
    q, k, v = make_qkv(Shape(1, 4, 2, length, 64, 64), torch.bfloat16, "cuda")
    cache_key, cache_value = (x.new_zeros(1, 2, 2 * length + 7, 64) for x in (k, v))
    scores = torch.zeros(1, 2, 2 * length + 7, device="cuda")
    memory = torch.full((1, 2, 32), -1, dtype=torch.int32, device="cuda")
    position = torch.tensor([7, 0])

    def call():
        return ops.prefill_attention_(
            q, k, v, cache_key, cache_value, scores, memory, position, None, None, None, 0, SETTINGS
        )  # fmt: skip

    expected = call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    ops.advance_position_(position, length, SETTINGS)
    for x in (out, cache_key[:, :, 7:], cache_value[:, :, 7:], scores):
        x.zero_()
    memory.fill_(-1)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, expected) and torch.equal(cache_key[:, :, 7 : 7 + length], k)
    assert not cache_key[:, :, 7 + length :].any()


# The composite backward pass launches more kernels than the queue of a stream holds.
@pytest.mark.parametrize("name", [name for name in NAMES if not name.endswith("backward")])
def test_work_is_put_on_the_current_stream(name):
    call = every_operator(torch.bfloat16)[name]
    expected = as_tuple(call())
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        # The stream is kept busy: work on another one would be done before it begins.
        torch.cuda._sleep(1_000_000_000)
        actual = as_tuple(call())
        done = torch.cuda.Event()
        done.record()
    assert not done.query()
    stream.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_work_is_done_on_the_device_of_the_tensors():
    q, k, v = make_qkv(Shape(1, 4, 2, 200, 64, 64), torch.bfloat16, "cuda:1")
    out = prefill(q, k, v)[0]
    assert out.device == q.device
    assert torch.equal(out.cpu(), prefill(*(x.to("cuda:0") for x in (q, k, v)))[0].cpu())


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_that_are_not_aligned(dtype):
    q, k, v = make_qkv(Shape(1, 4, 2, 200, 64, 64), dtype, "cuda")

    def shifted(x):
        room = x.new_empty(*x.shape[:3], x.shape[3] + 1)
        room[..., 1:] = x
        return room[..., 1:]

    for actual, expected in zip(prefill(*map(shifted, (q, k, v))), prefill(q, k, v), strict=True):
        assert torch.equal(actual, expected)


@pytest.mark.parametrize(("head_dim", "value_dim"), [(20, 16), (16, 20), (264, 64), (64, 320)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_head_dims_without_a_kernel_agree_with_the_cpu(head_dim, value_dim, dtype):
    q, k, v = make_qkv(Shape(1, 4, 2, 150, head_dim, value_dim), dtype)
    expected = prefill(q, k, v)
    actual = prefill(q.cuda(), k.cuda(), v.cuda())
    tolerance = 1e-4 if dtype == torch.float32 else 3e-2
    for a, e in zip(actual[:2], expected[:2], strict=True):
        torch.testing.assert_close(a.cpu(), e, rtol=tolerance, atol=tolerance)


def test_recall_lists_may_come_from_the_host():
    q, k, v = make_qkv(Shape(2, 4, 2, 200, 64, 64), device="cuda")
    ids = torch.randint(0, 9, (2, 200), generator=torch.Generator().manual_seed(5))
    on_host = ops.lexical_recall(ids, 0, RECALL)
    on_device = ops.lexical_recall(ids.cuda(), 0, RECALL)
    for a, b in zip(on_host, on_device, strict=True):
        assert b.is_cuda and torch.equal(a, b.cpu())
    host, device = (prefill(q, k, v, lists) for lists in (on_host, on_device))
    assert all(torch.equal(a, b) for a, b in zip(host, device, strict=True))
    with pytest.raises(ValueError, match=r"recall_positions must be in \[0, 200\)"):
        prefill(q, k, v, (on_host[0], on_host[1] + 200, on_host[2]))
