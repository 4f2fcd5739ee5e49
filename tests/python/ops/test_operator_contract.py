"""PyTorch's requirements for every operator: opcheck, torch.compile, torch.export, gradients."""

import copy
import inspect

import pytest
import torch
import torch._dynamo.testing
from op_testing import Shape, assert_same_on_threads, make_indices, make_qkv, recall_text

from h2o_prefill import PrefillConfig, ops

OPS = torch.ops.h2o_prefill
NO_STATE = (None,) * 5
TOKEN_TEXT = torch.tensor([[97, 98], [99, 0], [98, 99], [0, 0], [97, 99]], dtype=torch.int32)
SETTINGS = "h2o,chunk_size=16,local_window=3,heavy_budget=4,sink_tokens=1,recall=2"


def samples(dtype=torch.float32, layout="transposed", length=40):
    """One call of every operator."""
    shape = Shape(1, 4, 2, length, 16, 24)
    q, k, v = make_qkv(shape, dtype, layout=layout)
    long = long_q, long_k, long_v = make_qkv(shape, dtype, layout=layout, past=9)
    indices = make_indices(shape, length + 9, 6)
    lse = torch.randn(
        1, 4, length, dtype=torch.float64 if dtype == torch.float64 else torch.float32
    )
    scores = torch.rand(1, 2, length, dtype=lse.dtype)
    memory = torch.tensor([[[0, 2, -1], [1, 3, 4]]], dtype=torch.int32)
    ids = torch.randint(0, 5, (1, length + 9))
    recall = ops.lexical_recall(ids, 9, recall_text(16, 2))
    new = long_k[:, :, 9:], long_v[:, :, 9:]
    buffers = (
        torch.empty(1, 2, length + 20, 16, dtype=dtype).copy_(
            torch.nn.functional.pad(long_k, (0, 0, 0, 11))
        ),
        torch.nn.functional.pad(long_v, (0, 0, 0, 11)),
        torch.nn.functional.pad(scores[..., :9], (0, length + 11)),
        torch.nn.functional.pad(memory, (0, 5), value=-1),
    )
    position = torch.tensor([9, 2])
    decay = -torch.rand(1, 2, length, dtype=lse.dtype)
    states = torch.rand(1, 2, 16, 24, dtype=lse.dtype), torch.rand(1, 2, 16, dtype=lse.dtype)
    linear = (q, k, v, decay, *states)
    mode = ("elu+1", 16, True, False, True)
    grad_out = torch.rand(1, 4, length, 24, dtype=dtype)
    return {
        "intra_chunk_attention": (q, k, v, 16),
        "memory_attention": (long_q, long_k, long_v, indices),
        "dense_attention": (long_q, long_k, long_v),
        "sliding_window_attention": (long_q, long_k, long_v, 7),
        "merge_states": (q, lse, q.flip(2), lse.flip(2)),
        "select_memory": (scores, memory, 5, max(length, 5), 3, 4, 1),
        "gather_rows": (long_k, indices),
        "chunked_sparse_attention": (*long, scores[..., :9], memory, *recall, 2, SETTINGS),
        "prefill_attention": (*long, scores[..., :9], memory, *recall, 2, 0, SETTINGS),
        "prefill_attention_": (long_q, *new, *buffers, position, *recall, 0, SETTINGS),
        "advance_position_": (position, length, SETTINGS),
        "accumulate_scores_": (buffers[2], memory, torch.rand(1, 2, 3, dtype=lse.dtype)),
        "lexical_recall": (ids, 9, recall_text(16, 2, recall_characters=3), TOKEN_TEXT),
        "recall_at_position": (ids, torch.tensor([9, 0]), ids.shape[1] - 9, SETTINGS),
        "chunkwise_linear_attention": (*linear, *mode),
        "chunkwise_linear_attention_backward": (*linear, grad_out, *states, *mode),
    }


# The results of these are in the arguments.
IN_PLACE = [name for name in samples() if name.endswith("_")]
WITHOUT_FLOATS = ["select_memory", "lexical_recall", "recall_at_position", "advance_position_"]
DIFFERENTIABLE = ["chunkwise_linear_attention"]
INFERENCE_ONLY = [n for n in samples() if n not in WITHOUT_FLOATS + DIFFERENTIABLE]


SLOW = pytest.mark.slow
FAST = ("test_schema", "test_faketensor")  # without tracing by AOTAutograd


@pytest.mark.parametrize("name", samples())
@pytest.mark.parametrize(
    ("dtype", "layout"),
    [
        (torch.float32, "transposed"),
        pytest.param(torch.float32, "sliced", marks=SLOW),
        pytest.param(torch.bfloat16, "transposed", marks=SLOW),
        pytest.param(torch.float16, "sliced", marks=SLOW),
    ],
)
def test_opcheck(name, dtype, layout):
    torch.library.opcheck(getattr(OPS, name), samples(dtype, layout)[name])


@pytest.mark.parametrize("name", samples())
def test_opcheck_of_the_composite_versions(name):
    arguments = samples(torch.float64, "contiguous")[name]
    torch.library.opcheck(getattr(OPS, name), arguments, test_utils=FAST)


WITH_SINKS = [n for n in samples() if "sinks" in str(getattr(OPS, n).default._schema)]


@pytest.mark.parametrize("name", WITH_SINKS)
def test_opcheck_with_sinks_and_softcap(name):
    options = {"sinks": torch.tensor([0.5, 2.0, -1.0, 0.0]), "softcap": 2.0}
    torch.library.opcheck(getattr(OPS, name), samples()[name], options, test_utils=FAST)


@pytest.mark.parametrize("name", WITH_SINKS)
def test_sinks_are_checked_as_every_input(name):
    call, arguments = getattr(OPS, name), samples()[name]
    with pytest.raises(RuntimeError, match=f"{name} is for inference and has no gradient"):
        call(*arguments, sinks=torch.zeros(4, requires_grad=True))
    with torch._subclasses.FakeTensorMode() as mode:
        fake = [mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for x in arguments]
        with pytest.raises(ValueError, match="sinks must have one entry a query head"):
            call(*fake, sinks=mode.from_tensor(torch.zeros(2)))


# Attention, whose first result is [B, Hq, T, Dv].
ATTENTION = [n for n in samples() if n.endswith(("attention", "attention_"))]


@pytest.mark.parametrize("name", ATTENTION)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_models_reshape_the_output_without_a_copy(name, dtype):
    result = getattr(OPS, name)(*samples(dtype)[name])
    out = result if isinstance(result, torch.Tensor) else result[0]
    assert out.shape == (1, 4, 40, 24) and out.transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_opcheck_with_gradients(name):
    arguments = [x.requires_grad_() if isinstance(x, torch.Tensor) else x for x in samples()[name]]
    torch.library.opcheck(getattr(OPS, name), arguments)


@pytest.mark.parametrize("name", [x for x in samples() if not x.endswith("_backward")])
def test_documented_function_is_the_operator(name):
    """It has the names and defaults of the schema, and takes settings as an object."""
    function, schema = getattr(ops, name), getattr(OPS, name).default._schema
    parameters = inspect.signature(function).parameters.values()
    defaults = [None if p.default is p.empty else p.default for p in parameters]
    assert [p.name for p in parameters] == [x.name for x in schema.arguments]
    assert defaults == [x.default_value for x in schema.arguments]
    arguments = samples()[name]
    objects = [PrefillConfig.parse(SETTINGS) if x is SETTINGS else x for x in arguments]
    actual = function(*copy.deepcopy(objects))
    torch.testing.assert_close(actual, getattr(OPS, name)(*arguments), rtol=0, atol=0)


@pytest.mark.parametrize("name", IN_PLACE)
def test_what_changes_in_place_has_a_new_version(name):
    arguments = samples()[name]
    schema = getattr(OPS, name).default._schema
    before = [getattr(x, "_version", None) for x in arguments]
    getattr(OPS, name)(*arguments)
    for declared, argument, version in zip(schema.arguments, arguments, before, strict=False):
        if isinstance(argument, torch.Tensor):
            assert (argument._version > version) == declared.is_write, declared.name


@pytest.mark.parametrize("name", INFERENCE_ONLY)
def test_an_input_that_requires_a_gradient_is_refused(name):
    def call():
        first, *others = samples()[name]
        getattr(OPS, name)(first.clone().requires_grad_(), *others)

    with pytest.raises(RuntimeError, match=f"{name} is for inference and has no gradient"):
        call()
    with torch.no_grad():
        call()
    with torch.inference_mode():
        call()


@pytest.mark.parametrize("name", INFERENCE_ONLY)
def test_an_input_with_a_tangent_is_refused(name):
    first, *others = samples()[name]
    with torch.no_grad(), torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(first, torch.ones_like(first))
        with pytest.raises(RuntimeError, match=f"{name} is for inference and has no forward-mode"):
            getattr(OPS, name)(dual, *others)
        getattr(OPS, name)(torch.autograd.forward_ad.unpack_dual(dual).primal, *others)


# Without float64 and few rows of float32: PyTorch's attention, which may depend on threads.
@pytest.mark.parametrize("name", samples())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_number_of_threads_changes_no_bit(name, dtype):
    given = samples(dtype, length=300)[name]

    def run():
        arguments = copy.deepcopy(given)
        result = getattr(OPS, name)(*arguments)
        changed = [x for x in arguments if isinstance(x, torch.Tensor)]
        return [*(result if isinstance(result, tuple) else (result,)), *changed]

    assert_same_on_threads(run)


WITH_SCALE = [n for n in samples() if "scale" in str(getattr(OPS, n).default._schema)]


MISMATCHES = {
    "batch": lambda q, k, v: (q, k[[0, 0]], v),
    "dimensions": lambda q, k, v: (q[0], k, v),
    "head dim": lambda q, k, v: (q, k[..., 1:], v),
    "heads of v": lambda q, k, v: (q, k, v[:, :1]),
    "heads of q": lambda q, k, v: (q[:, :3], k, v),
    "no heads": lambda q, k, v: (q, k[:, :0], v[:, :0]),
    "length of v": lambda q, k, v: (q, k, v[:, :, 1:]),
    "dtype": lambda q, k, v: (q, k.double(), v),
}


@pytest.mark.parametrize("name", WITH_SCALE)
@pytest.mark.parametrize("mismatch", MISMATCHES)
def test_tracing_refuses_the_shapes_that_running_refuses(name, mismatch):
    q, k, v, *others = samples()[name]
    arguments = (*MISMATCHES[mismatch](q, k, v), *others)
    with pytest.raises(ValueError):
        getattr(OPS, name)(*arguments)
    with torch._subclasses.FakeTensorMode() as mode:
        fake = [mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for x in arguments]
        with pytest.raises(ValueError):
            getattr(OPS, name)(*fake)


WRONG_SIZES = {
    "memory_attention": [3],
    "merge_states": [0, 1, 2, 3],
    "select_memory": [0, 1],
    "gather_rows": [0, 1],
    "chunked_sparse_attention": [3, 4],
    "prefill_attention": [3, 4],
    "accumulate_scores_": [0, 1, 2],
}


@pytest.mark.parametrize(("name", "index"), [(n, i) for n, x in WRONG_SIZES.items() for i in x])
def test_the_meta_device_refuses_the_sizes_that_others_refuse(name, index):
    arguments = list(samples()[name])
    arguments[index] = arguments[index].repeat(1, 2, *[1] * (arguments[index].dim() - 2))
    on_meta = [x.to("meta") if isinstance(x, torch.Tensor) else x for x in arguments]
    for given in (arguments, on_meta):
        with pytest.raises(ValueError, match=" must have "):
            getattr(OPS, name)(*given)


def prefill(q, k, v):
    out, scores, *_ = OPS.chunked_sparse_attention(q * 1.0, k, v, *NO_STATE, 0, SETTINGS)
    return out.transpose(1, 2).reshape(q.shape[0], q.shape[2], -1) + 1.0, scores


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiles_into_one_graph_without_recompiling(fresh_dynamo, backend):
    counter = torch._dynamo.testing.CompileCounterWithBackend(backend)
    compiled = torch.compile(prefill, fullgraph=True, dynamic=True, backend=counter)
    for length in (33, 50, 128, 97, 200):
        q, k, v = make_qkv(Shape(1, 4, 2, length, 16, 16))
        torch.testing.assert_close(compiled(q, k, v), prefill(q, k, v), rtol=1e-6, atol=1e-6)
    assert counter.frame_count == 1


def test_bfloat16_while_onednn_is_disabled():
    """AMX products are computed by oneDNN; without it other kernels are used."""
    q, k, v = make_qkv(Shape(1, 4, 2, 200, 64, 64), torch.bfloat16)
    expected = ops.intra_chunk_attention(q, k, v, 128)[0]
    with torch.backends.mkldnn.flags(enabled=False):
        assert torch.ops.h2o_prefill.cpu_isa() != "amx"
        found = ops.intra_chunk_attention(q, k, v, 128)[0]
    torch.testing.assert_close(found, expected, atol=0.02, rtol=0.02)
