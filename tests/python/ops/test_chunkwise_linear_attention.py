"""Linear attention against the oracle: forward, gradients, states, and what must be refused."""

import pytest
import torch
import torch._dynamo.testing
from op_testing import (
    DTYPES,
    HEADS_AND_LAYOUTS,
    Shape,
    assert_close_to_reference,
    assert_same_on_threads,
    make_qkv,
    widened,
)
from torch.utils._python_dispatch import TorchDispatchMode

from h2o_prefill import ops
from h2o_prefill.eval.timing import peak_bytes
from h2o_prefill.reference import ops as oracle

CHUNK = 32
NAMES = ("out", "state", "normalizer")
GRADIENTS = ("q", "k", "v", "log_decay", "initial_state", "initial_normalizer")


def make_decay(k, per_token=True, seed=1):
    """Strong and weak ones, [B, Hkv, T] or [Hkv]."""
    generator = torch.Generator().manual_seed(seed)
    shape = k.shape[:3] if per_token else k.shape[1:2]
    dtype = torch.float64 if k.dtype == torch.float64 else torch.float32
    x = torch.rand(shape, generator=generator, dtype=dtype).to(k.device)
    return -3 * x**6


def make_states(k, v, seed=2):
    generator = torch.Generator().manual_seed(seed)
    dtype = torch.float64 if k.dtype == torch.float64 else torch.float32
    shape = (*k.shape[:2], k.shape[3], v.shape[3])
    state = torch.randn(shape, generator=generator, dtype=dtype).to(k.device)
    return state, state.abs().sum(3)


def check(*arguments, **options):
    actual = ops.chunkwise_linear_attention(*arguments, **options)
    expected = oracle.chunkwise_linear_attention(*widened(arguments), **options)
    peer = oracle.chunkwise_linear_attention(*arguments, **options)
    assert actual[0].dtype == arguments[0].dtype
    for name, a, e, p in zip(NAMES, actual, expected, peer, strict=True):
        assert_close_to_reference(a, e, p, name)
    return actual


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize(("heads", "layout"), HEADS_AND_LAYOUTS, ids=str)
def test_agrees_with_the_oracle(device, dtype, heads, layout):
    q, k, v = make_qkv(Shape(2, *heads, 77, 64, 48), dtype, device, layout)
    check(q, k, v, make_decay(k), normalize=True, chunk_size=CHUNK)


@pytest.mark.parametrize(
    "dims", [*((d, 264 - d) for d in range(8, 257, 31)), (1, 1), (700, 3), (3, 700)], ids=str
)
def test_head_dims(device, dims):
    q, k, v = make_qkv(Shape(1, 2, 1, 70, *dims), device=device)
    check(q, k, v, make_decay(k), normalize=True)


@pytest.mark.parametrize("normalize", [False, True])
def test_long_sequences_keep_their_digits(device, normalize):
    """More than one super-chunk, and decays that hardly decay."""
    q, k, v = make_qkv(Shape(1, 2, 1, 2500, 16, 16), device=device)
    for decay in (None, torch.full((1,), -1e-4, device=device), make_decay(k) / 100):
        check(q, k, v, decay, normalize=normalize)


@pytest.mark.parametrize(("heads", "with_states"), [((2, 1), True), ((6, 3), False)])
def test_the_number_of_threads_changes_no_bit(heads, with_states):
    """Over pieces of long sequences, whole heads at a time or each piece by itself."""
    q, k, v = make_qkv(Shape(1, *heads, 3333, 16, 24))
    given = q, k, v, make_decay(k), *(make_states(k, v) if with_states else (None, None))
    options = dict(normalize=with_states)
    assert_same_on_threads(lambda: ops.chunkwise_linear_attention(*given, **options), (1, 2, 7))
    assert_same_on_threads(lambda: gradients(ops.chunkwise_linear_attention, given, options))


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


@pytest.mark.parametrize("backward", [False, True])
def test_cuda_runs_the_composite_without_a_square_of_the_length(backward):
    def largest(length):
        q, k, v = make_qkv(Shape(1, 2, 1, length, 8, 8))
        # The kernel that the dispatcher has for CUDA, which is composite: tensors may be anywhere.
        cuda = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
        given = [q, k, v, make_decay(k), None, None]
        options = ["elu+1", CHUNK, True, False, True, None]
        with LargestOfCalls() as calls:
            if backward:
                torch.ops.h2o_prefill.chunkwise_linear_attention_backward.default.redispatch(
                    cuda, *given, torch.ones_like(q), None, None, *options
                )
            else:
                torch.ops.h2o_prefill.chunkwise_linear_attention.default.redispatch(
                    cuda, *given, *options
                )
        return calls.elements

    elements = largest(1024)
    assert 0 < elements < 1024**2 / 8
    assert largest(2048) == 2 * elements


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


def gradients(function, arguments, options, seed=3):
    given = [x.detach().requires_grad_() if x is not None else None for x in arguments]
    results = function(*given, **options)
    generator = torch.Generator().manual_seed(seed)
    total = 0
    for x in results:
        weights = torch.randn(x.shape, generator=generator).bfloat16().to(x)
        total = total + (x * weights).double().sum()
    inputs = [x for x in given if x is not None]
    return torch.autograd.grad(total, inputs, allow_unused=True, materialize_grads=True)


def check_gradients(arguments, **options):
    """Compare with the gradients of float64 inputs, rounded to the dtype that each must have."""
    actual = gradients(ops.chunkwise_linear_attention, arguments, options)
    expected = gradients(ops.chunkwise_linear_attention, widened(arguments), options)
    given = [(n, x) for n, x in zip(GRADIENTS, arguments, strict=True) if x is not None]
    for (name, x), a, e in zip(given, actual, expected, strict=True):
        assert a.dtype == x.dtype, name
        assert_close_to_reference(a, e, e.to(x.dtype), name)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("length", "layout", "decay", "normalize"),
    [
        (200, "column", "strong", False),
        (1500, "transposed", "strong", True),
        (1500, "transposed", "head", False),
    ],
)
def test_gradients_of_awkward_calls(device, dtype, length, layout, decay, normalize):
    """Several pieces; decays that erase the state."""
    q, k, v = make_qkv(Shape(2, 6, 2, length, 24, 40), dtype, device, layout)
    decays = make_decay(k, decay != "head") if decay else None
    if decay == "strong":
        decays[:, :, [5, length // 2, length - 2]] = -torch.inf
        decays[:, 1, 70:75] = -20
    state, normalizer = make_states(k, v)
    arguments = [q, k, v, decays, state, normalizer if normalize else None]
    check_gradients(arguments, normalize=normalize, scale=0.3)


@pytest.mark.parametrize(
    ("causal", "diagonal_once"), [(True, False), (False, False), (False, True)]
)
@pytest.mark.parametrize("normalize", [False, True])
def test_gradcheck(device, causal, diagonal_once, normalize):
    """Autograd hands every argument on; random calls of the backward pass have its sizes."""
    q, k, v = make_qkv(Shape(1, 2, 1, 7, 3, 2), torch.float64, device)
    state, normalizer = make_states(k, v)
    arguments = [q, k, v, None if diagonal_once else make_decay(k) - 0.1]
    arguments += [state, normalizer if normalize else None] if causal else []
    options = {"causal": causal, "diagonal_once": diagonal_once, "normalize": normalize}
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


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiles_forward_and_backward_into_one_graph_each(fresh_dynamo, backend):
    def attend(q, k, v, decay):
        return ops.chunkwise_linear_attention(q * 1.0, k, v, decay, normalize=True)

    counter = torch._dynamo.testing.CompileCounterWithBackend(backend)
    compiled = torch.compile(attend, fullgraph=True, dynamic=True, backend=counter)
    for length in (33, 50, 128):
        q, k, v = make_qkv(Shape(1, 4, 2, length, 16, 16))
        inputs = [x.requires_grad_() for x in (q, k, v, make_decay(k))]
        expected, actual = attend(*inputs), compiled(*inputs)
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
        expected = torch.autograd.grad(expected, inputs, expected)
        actual = torch.autograd.grad(actual, inputs, actual)
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
    assert counter.frame_count == 1


ZEROS = torch.zeros


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(log_decay=torch.tensor([-1.0, torch.nan])), "log_decay must be <= 0, got -?nan"),
        (dict(log_decay=ZEROS(2).to_sparse()), "log_decay must be a strided tensor"),
        (dict(initial_normalizer=ZEROS(2, 2, 8)), "initial_normalizer must be none where norm"),
        (dict(initial_state=ZEROS(2, 2, 8, 6, device="meta")), "initial_state must be .*device of"),
        (dict(q=None), "q must be a tensor with 4 dimensions, got none"),
    ],
)
def test_wrong_arguments(changes, message):
    """What generated calls do not break: tests/random_calls/broken.py."""
    good = dict(zip("qkv", make_qkv(Shape(2, 4, 2, 10, 8, 6)), strict=True))
    with pytest.raises(ValueError, match=message):
        ops.chunkwise_linear_attention(**(good | changes))


@pytest.mark.parametrize("name", ["log_decay", "initial_state", "initial_normalizer"])
def test_tracing_refuses_what_running_refuses(name):
    q, k, v = make_qkv(Shape(2, 4, 2, 10, 8, 6))
    names = ("log_decay", "initial_state", "initial_normalizer")
    good = dict(zip(names, (make_decay(k), *make_states(k, v)), strict=True))[name]
    with torch._subclasses.FakeTensorMode() as mode:
        q, k, v, x = map(mode.from_tensor, (q, k, v, good))
        ops.chunkwise_linear_attention(q, k, v, **{name: x})
        for wrong_one in (x[..., 1:], x.half(), x.to("meta")):
            with pytest.raises(ValueError, match=f"{name} must be torch.float32 .* device of q"):
                ops.chunkwise_linear_attention(q, k, v, **{name: wrong_one})


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
