"""Linear attention: gradients, memory, digits of long sequences, and what is not finite.

tests/random_calls compares both passes with the oracle.
"""

import pytest
import torch
from op_testing import Shape, make_qkv, widened
from random_calls.calls import arguments_of
from random_calls.examples import FIXED, LINEAR, SIZES, named_call
from torch.utils._python_dispatch import TorchDispatchMode

from h2o_prefill import ops
from h2o_prefill.eval.timing import peak_bytes


@pytest.mark.parametrize("threads", [1, 2])
def test_memory_is_one_state_and_linear_with_a_gradient(threads):
    torch.set_num_threads(threads)
    inputs = make_qkv(Shape(1, 2, 1, 32768, 16, 16))
    out_bytes = 2 * 32768 * 16 * 4
    peak = peak_bytes(lambda: ops.chunkwise_linear_attention(*inputs))
    assert out_bytes < peak < out_bytes + 2**19
    given = [x.requires_grad_() for x in inputs]

    def differentiate():
        out, _, _ = ops.chunkwise_linear_attention(*given)
        torch.autograd.grad(out, given, out)

    assert peak_bytes(differentiate) < 16 * out_bytes


class LargestOfCalls(TorchDispatchMode):
    """The most elements of a tensor that any call of ATen returns."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for x in torch.utils._pytree.tree_leaves(result):
            if isinstance(x, torch.Tensor):
                self.elements = max(self.elements, x.numel())
        return result


@pytest.mark.parametrize("operator", LINEAR)
def test_cuda_runs_the_composite_without_a_square_of_the_length(operator):
    def largest(length):
        # The kernel that the dispatcher has for CUDA, which is composite: tensors may be anywhere.
        cuda = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
        sizes = SIZES | {"H": 2, "G": 1, "D": 8, "E": 8, "T": length}
        fixed = FIXED | {"causal": True}
        call = named_call(operator, "long", {"sizes": sizes, "dtype": "float32", "fixed": fixed})
        with LargestOfCalls() as calls:
            getattr(torch.ops.h2o_prefill, operator).default.redispatch(cuda, *arguments_of(call))
        return calls.elements

    elements = largest(2048)
    assert 0 < elements < 2048**2 / 8
    assert largest(4096) < 2.1 * elements


@pytest.mark.parametrize("causal", [True, False])
def test_a_normalizer_of_zero_gives_zero(device, causal):
    q, k, v = make_qkv(Shape(1, 2, 1, 40, 8, 8), device=device)
    q[:, :, 20:30] = -1
    q.requires_grad_()
    out, _, _ = ops.chunkwise_linear_attention(
        q, k, v, feature_map="relu", normalize=True, causal=causal
    )
    assert (out[:, :, 20:30] == 0).all() and out.isfinite().all()
    out.sum().backward()
    assert (q.grad[:, :, 20:30] == 0).all() and q.grad.isfinite().all()


@pytest.mark.parametrize(("causal", "decays"), [(True, True), (False, True), (False, False)])
@pytest.mark.parametrize("normalize", [False, True])
def test_gradcheck(device, causal, decays, normalize):
    """Autograd hands every argument on; random calls of the backward pass have its sizes."""
    q, k, v = make_qkv(Shape(1, 2, 1, 7, 3, 2), torch.float64, device)
    state = k[:, :, :3].mT @ v[:, :, :3]
    arguments = [q, k, v, -v[..., 0].abs() - 0.1 if decays else None]
    arguments += [state, state.abs().sum(3) if normalize else None] if causal else []
    options = {"causal": causal, "normalize": normalize}
    given = [x.requires_grad_() for x in arguments if x is not None]

    def call(*tensors):
        found = iter(tensors)
        filled = [None if x is None else next(found) for x in arguments]
        results = ops.chunkwise_linear_attention(*filled, chunk_size=3, scale=0.5, **options)
        return results[: 2 + normalize]

    assert torch.autograd.gradcheck(call, given)


def test_what_autograd_cannot_do_is_refused(device):
    q, k, v = make_qkv(Shape(1, 2, 1, 7, 4, 4), device=device)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(q, torch.ones_like(q))
        with pytest.raises(RuntimeError, match="jvp is not implemented"):
            ops.chunkwise_linear_attention(dual, k, v)
    out, _, _ = ops.chunkwise_linear_attention(q.requires_grad_(), k, v)
    with pytest.raises(RuntimeError, match="has no second derivative"):
        torch.autograd.grad(out.sum(), q, create_graph=True)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("normalize", [False, True])
def test_what_is_not_finite_reaches_its_head_and_all_later_tokens(device, value, normalize):
    for name in ("k", "v"):
        given = dict(zip("qkv", make_qkv(Shape(2, 4, 2, 40, 8, 6), device=device), strict=True))
        given[name][0, 1, 20, 3] = value
        out, state, _ = ops.chunkwise_linear_attention(**given, normalize=normalize, chunk_size=8)
        # Masked products are products with 0: of the value's own chunk, earlier rows may have it.
        assert not out[0, 2:, 20:, 3].isfinite().any() and out[0, 2:, :16].isfinite().all()
        assert not state[0, 1].isfinite().all()
        assert out[1].isfinite().all() and out[0, :2].isfinite().all() and state[1].isfinite().all()


@pytest.mark.parametrize(
    ("dtype", "value_dim"),
    [(torch.float32, 64), (torch.float32, 72), (torch.bfloat16, 160), (torch.float16, 160)],
)
def test_digits_of_16k_tokens(dtype, value_dim):
    """Outputs are written past the caches, as whole cache lines or not."""
    q, k, v = make_qkv(Shape(1, 2, 1, 16384, 16, value_dim), dtype)
    actual = ops.chunkwise_linear_attention(q, k, v, normalize=True)[0]
    expected = ops.chunkwise_linear_attention(*widened((q, k, v)), normalize=True)[0]
    torch.testing.assert_close(actual, expected.to(dtype))
