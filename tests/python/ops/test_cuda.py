"""What only a GPU can show: streams, CUDA graphs, no host synchronization, reused memory."""

import pytest
import torch
from op_testing import Shape, make_qkv, recall_text, settings_text
from random_calls.calls import arguments_of, check_call
from random_calls.descriptions import Ints
from random_calls.examples import FIXED, LINEAR, SETTINGS, SIZES, named_call
from random_calls.judge import Judge
from random_calls.operators import TENSORS

from h2o_prefill import ops

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

S = 64
OPS = torch.ops.h2o_prefill
SIZED = SETTINGS | {"chunk_size": S, "local_window": 16, "heavy_budget": 16}
# Operators whose results have sizes that are read on the CPU, or that have no work for a device.
ON_THE_HOST = ("advance_position_", "lexical_recall", "recall_at_position")
# Names, and the operator and settings where they are others.
NAMES = {
    **{name: (name, {}) for name in TENSORS if name not in ON_THE_HOST},
    "with recall": ("chunked_sparse_attention", {"recall": 3}),
    "with a tail": ("chunked_sparse_attention", {"dense_tail": 20}),
    "with errors": (
        "chunked_sparse_attention",
        {"error_rows": 5, "error_threshold": 0.01, "max_widen": 4},
    ),
}


def call_of(name, dtype, **sizes):
    """Return what calls an operator with the same arguments, and returns all that it writes."""
    operator, settings = NAMES[name]
    fixed = FIXED | {"chunk_size": S, "causal": True, "normalize": True}
    if operator == "prefill_attention_":
        fixed |= {"window": None}
    problem = {"sizes": SIZES | {"D": 64, "E": 64, "T": 3 * S + 5, "P": 40} | sizes}
    problem |= {"dtype": dtype, "layout": "transposed", "settings": SIZED | settings}
    arguments = arguments_of(named_call(operator, name, problem | {"fixed": fixed}), "cuda")
    schema = getattr(OPS, operator).default._schema.arguments
    written = [i for i, x in enumerate(schema) if x.is_write and arguments[i] is not None]

    def call():
        given = [x.clone() if i in written else x for i, x in enumerate(arguments)]
        result = getattr(OPS, operator)(*given)
        return (*(result if isinstance(result, tuple) else (result,)), *(given[i] for i in written))

    return lambda: tuple(x.nan_to_num() for x in call() if x is not None)


def prefill(q, k, v, recall=(None,) * 3):
    settings = settings_text(chunk_size=S, local_window=16, heavy_budget=16, recall=3)
    return ops.chunked_sparse_attention(q, k, v, None, None, *recall, 0, settings)


QUARTERS = Ints(tuple(tuple(range(head, 8000, 4)) for head in range(4)), (1, 4, 2000))
LONG = {
    "intra_chunk_attention": ({"T": 8000, "P": 0}, {"chunk_size": 1024}),
    "memory_attention": ({"T": 3000, "P": 5000}, {"indices": QUARTERS}),
    "dense_attention": ({"T": 3000, "P": 5000}, {}),
    "sliding_window_attention": ({"T": 4000, "P": 0}, {"window": 900}),
    "chunked_sparse_attention": ({"T": 8000, "P": 0}, {}),
}


# More row tiles than a GPU runs at once, and more tiles of keys than the rings have buffers.
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("name", LONG)
def test_long_calls_agree_with_the_oracle(name, head_dim):
    sizes, fixed = LONG[name]
    sizes = SIZES | {"H": 16, "G": 4, "D": head_dim, "E": head_dim} | sizes
    # Memory sets are the last keys alone: among heavy hitters two may be as good.
    last = {"chunk_size": 1024, "local_window": 700, "heavy_budget": 0, "sink_tokens": 0}
    settings = SETTINGS | last | {"recall": 4, "dense_tail": 300}
    problem = {"sizes": sizes, "dtype": "bfloat16", "layout": "transposed", "settings": settings}
    call = named_call(name, "long", problem | {"fixed": FIXED | fixed})
    check_call(call, Judge(strict=True), traces=False, device="cuda")


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
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_nothing_waits_for_the_device(name, dtype):
    call = call_of(name, dtype)
    call()
    torch.cuda.set_sync_debug_mode("error")
    try:
        call()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_cuda_graph_replays_the_same_to_the_bit(name, dtype):
    call = call_of(name, dtype)
    expected = call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call()
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
    position, settings = torch.tensor([7, 0]), settings_text(chunk_size=S, local_window=16)

    def call():
        return ops.prefill_attention_(
            q, k, v, cache_key, cache_value, scores, memory, None, position, 0, settings
        )

    expected = call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    ops.advance_position_(position, length, settings)
    for x in (out, cache_key[:, :, 7:], cache_value[:, :, 7:], scores):
        x.zero_()
    memory.fill_(-1)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, expected) and torch.equal(cache_key[:, :, 7 : 7 + length], k)
    assert not cache_key[:, :, 7 + length :].any()


# The composite backward pass launches more kernels than the queue of a stream holds.
@pytest.mark.parametrize("name", [name for name in NAMES if name != LINEAR[1]])
def test_work_is_put_on_the_current_stream(name):
    call = call_of(name, "bfloat16")
    expected = call()
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        # The stream is kept busy: work on another one would be done before it begins.
        torch.cuda._sleep(1_000_000_000)
        actual = call()
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


def test_recall_lists_may_come_from_the_host():
    q, k, v = make_qkv(Shape(2, 4, 2, 200, 64, 64), device="cuda")
    ids = torch.randint(0, 9, (2, 200), generator=torch.Generator().manual_seed(5))
    text = recall_text(S, 3)
    on_host, on_device = (ops.lexical_recall(x, 0, text) for x in (ids, ids.cuda()))
    for a, b in zip(on_host, on_device, strict=True):
        assert b.is_cuda and torch.equal(a, b.cpu())
    host, device = (prefill(q, k, v, lists) for lists in (on_host, on_device))
    assert all(torch.equal(a, b) for a, b in zip(host, device, strict=True))
    with pytest.raises(ValueError, match=r"recall_positions must be in \[0, 200\)"):
        prefill(q, k, v, (on_host[0], on_host[1] + 200, on_host[2]))
