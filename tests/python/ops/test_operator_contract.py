"""What PyTorch asks of every operator: opcheck, torch.compile, TorchScript, and no gradient."""

import pytest
import torch
import torch._dynamo.testing

from h2o_prefill import ops
from h2o_prefill.testing import Shape, make_indices, make_qkv

OPS = torch.ops.h2o_prefill
NO_STATE = (None,) * 5


def samples(dtype=torch.float32, layout="transposed", length=40):
    """One call of every operator."""
    shape = Shape(1, 4, 2, length, 16, 24)
    q, k, v = make_qkv(shape, dtype, layout=layout)
    long_q, long_k, long_v = make_qkv(shape, dtype, layout=layout, past=9)
    indices = make_indices(shape, length + 9, 6)
    lse = torch.randn(
        1, 4, length, dtype=torch.float64 if dtype == torch.float64 else torch.float32
    )
    scores = torch.rand(1, 2, length, dtype=lse.dtype)
    memory = torch.tensor([[[0, 2, -1], [1, 3, 4]]], dtype=torch.int32)
    ids = torch.randint(0, 5, (1, length + 9))
    recall = ops.lexical_recall(ids, 9, 16, 8, 2)
    return {
        "intra_chunk_attention": (q, k, v, 16),
        "memory_attention": (long_q, long_k, long_v, indices),
        "dense_attention": (long_q, long_k, long_v),
        "merge_states": (q, lse, q.flip(2), lse.flip(2)),
        "select_memory": (scores, memory, 5, max(length, 5), 3, 4, 1),
        "gather_rows": (long_k, indices),
        "chunked_sparse_attention": (
            long_q,
            long_k,
            long_v,
            scores[..., :9],
            memory,
            *recall,
            2,
            16,
            3,
            4,
            1,
            2,
            "sum",
            8,
        ),
        "lexical_recall": (ids, 9, 16, 8, 2),
    }


@pytest.mark.parametrize("name", samples())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("layout", ["contiguous", "transposed", "sliced"])
def test_opcheck(name, dtype, layout):
    torch.library.opcheck(getattr(OPS, name), samples(dtype, layout)[name])


@pytest.mark.parametrize(
    "name", ["intra_chunk_attention", "dense_attention", "chunked_sparse_attention"]
)
def test_opcheck_without_tokens(name):
    torch.library.opcheck(getattr(OPS, name), samples(length=0)[name])


@pytest.mark.parametrize("name", samples())
def test_documented_function_is_the_operator(name):
    arguments = samples()[name]
    actual, expected = getattr(ops, name)(*arguments), getattr(OPS, name)(*arguments)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    "name", [n for n in samples() if n not in ("select_memory", "lexical_recall")]
)
def test_an_input_that_requires_a_gradient_is_refused(name):
    arguments = list(samples()[name])
    arguments[0] = arguments[0].clone().requires_grad_()
    with pytest.raises(RuntimeError, match=f"{name} is for inference and has no gradient"):
        getattr(OPS, name)(*arguments)
    with torch.no_grad():
        getattr(OPS, name)(*arguments)
    with torch.inference_mode():
        getattr(OPS, name)(*arguments)


def prefill(q, k, v):
    out, scores, _ = OPS.chunked_sparse_attention(q * 1.0, k, v, *NO_STATE, 0, 16, 4, 4)
    return out.transpose(1, 2).reshape(q.shape[0], q.shape[2], -1) + 1.0, scores


@pytest.fixture
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiles_into_one_graph_without_recompiling(fresh_dynamo, backend):
    counter = torch._dynamo.testing.CompileCounterWithBackend(backend)
    compiled = torch.compile(prefill, fullgraph=True, dynamic=True, backend=counter)
    for length in (33, 50, 128, 97, 200):
        q, k, v = make_qkv(Shape(1, 4, 2, length, 16, 16))
        torch.testing.assert_close(compiled(q, k, v), prefill(q, k, v), rtol=1e-6, atol=1e-6)
    assert counter.frame_count == 1


def test_exports():
    class Prefill(torch.nn.Module):
        def forward(self, q, k, v):
            return prefill(q, k, v)

    q, k, v = make_qkv(Shape(1, 4, 2, 50, 16, 16))
    length = torch.export.Dim("length", min=2, max=4096)
    with torch.no_grad():
        program = torch.export.export(Prefill(), (q, k, v), dynamic_shapes=({2: length},) * 3)
    longer = make_qkv(Shape(1, 4, 2, 77, 16, 16))
    torch.testing.assert_close(program.module()(*longer), prefill(*longer))
