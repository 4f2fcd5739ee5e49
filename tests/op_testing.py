"""Helpers of operator tests and benchmarks: devices, shapes, inputs and tolerances."""

import io
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Query and KV heads, and a layout of `make_qkv`.
LAYOUTS = ("contiguous", "transposed", "sliced", "column")
HEADS_AND_LAYOUTS = (
    *(((6, 2), layout) for layout in LAYOUTS),
    *((heads, "transposed") for heads in ((4, 4), (7, 1))),
)

# Absolute tolerance of float32 results against the float64 oracle.
FLOAT32_TOLERANCE = 1e-5


def devices() -> list[str]:
    """Return the devices that operators are tested on: the CPU, and CUDA where there is one."""
    return ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


@dataclass(frozen=True)
class Shape:
    """Sizes of one attention problem; see `h2o_prefill.ops` for the symbols."""

    batch: int
    query_heads: int
    kv_heads: int
    length: int
    head_dim: int
    value_dim: int


def make_qkv(
    shape: Shape,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    layout: str = "transposed",
    past: int = 0,
    seed: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Make random q [B, Hq, T, D], k [B, Hkv, past + T, D] and v [B, Hkv, past + T, Dv].

    Layouts: "contiguous"; "transposed", as Hugging Face models pass them, [B, T, H, D] seen as
    [B, H, T, D]; "sliced", a window of a larger buffer; "column", whose last dimension is not
    contiguous.
    """
    generator = torch.Generator().manual_seed(seed)

    def make(heads: int, length: int, dim: int) -> Tensor:
        x = torch.randn(shape.batch, heads, length, dim, generator=generator).to(device, dtype)
        if layout == "transposed":
            return x.transpose(1, 2).contiguous().transpose(1, 2)
        if layout == "sliced":
            room = x.new_full((shape.batch, heads + 1, length + 3, dim + 8), float("nan"))
            room[:, 1:, 2 : 2 + length, :dim] = x
            return room[:, 1:, 2 : 2 + length, :dim]
        if layout == "column":
            return x.transpose(2, 3).contiguous().transpose(2, 3)
        return x

    total = past + shape.length
    return (
        make(shape.query_heads, shape.length, shape.head_dim),
        make(shape.kv_heads, total, shape.head_dim),
        make(shape.kv_heads, total, shape.value_dim),
    )


def make_indices(
    shape: Shape, length: int, size: int, device: str = "cpu", seed: int = 0
) -> Tensor:
    """Make ascending position lists, int32 [B, Hkv, size]: some full, some short, some empty."""
    generator = torch.Generator().manual_seed(seed)
    indices = torch.full((shape.batch * shape.kv_heads, size), -1, dtype=torch.int32)
    for i in range(indices.shape[0]):
        count = min(length, size, [size, size // 2, 0, 1][i % 4])
        chosen = torch.randperm(length, generator=generator)[:count]
        indices[i, :count] = chosen.sort().values.int()
    return indices.view(shape.batch, shape.kv_heads, size).to(device)


def settings_text(**fields: Any) -> str:
    """Return "h2o" with some fields changed, as the operators take settings."""
    return ",".join(["h2o", *(f"{name}={value}" for name, value in fields.items())])


def recall_text(chunk_size: int, matches: int, **fields: Any) -> str:
    """Return settings of lexical recall."""
    return settings_text(chunk_size=chunk_size, recall=matches, **fields)


def widened(arguments: Iterable[Any]) -> list[Any]:
    """Return arguments of an operator with every floating-point tensor in float64."""
    return [x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for x in arguments]


def assert_close_to_reference(
    actual: Tensor, expected: Tensor, same_dtype: Tensor | None = None, what: str = "result"
) -> None:
    """Assert that a result is as close to the oracle's, in float64, as its dtype allows.

    float32 results must be within `FLOAT32_TOLERANCE`, relative to the largest magnitude above 1.
    16-bit results may have twice the error of plain PyTorch in the same dtype (`same_dtype`), plus
    one rounding of the result. Infinities must agree.
    """
    assert actual.shape == expected.shape, (
        f"{what}: shape {actual.shape}, expected {expected.shape}"
    )
    finite = torch.isfinite(expected)
    assert torch.equal(torch.isfinite(actual), finite), f"{what}: infinities or NaNs differ"
    if not finite.any():
        return
    truth = expected[finite].double()
    error = (actual[finite].double() - truth).abs().max().item()
    magnitude = max(1.0, truth.abs().max().item())
    if actual.dtype in (torch.float32, torch.float64):
        limit = FLOAT32_TOLERANCE * magnitude
    else:
        assert same_dtype is not None, (
            f"{what}: 16-bit results need PyTorch's own result to compare with"
        )
        peer_error = (same_dtype[finite].double() - truth).abs().max().item()
        limit = 2 * peer_error + torch.finfo(actual.dtype).eps * magnitude / 2
    assert error <= limit, f"{what}: error {error:.3g} > {limit:.3g}"


def saved_and_loaded(value: Any, through: Any = torch, **options: Any) -> Any:
    """Return what is loaded from what `torch.save`, or `torch.jit.save`, made of a value."""
    buffer = io.BytesIO()
    through.save(value, buffer)
    buffer.seek(0)
    return through.load(buffer, **options)


# Operators whose fourth result is `errors`.
RETURN_ERRORS = ("chunked_sparse_attention", "prefill_attention")


def error_measures(errors: Tensor) -> tuple[Tensor, ...]:
    """Return what to compare of errors [B, Hkv, 4], float64; an error becomes a size.

    An output rounded to 16 bits has a relative error of at most one eps, the size of an error as
    well.
    """
    doublings, total, number, factors = errors.double().unbind(2)
    return doublings, (total / number.clamp(min=1)).sqrt(), number, factors


def compare_with_oracle(
    operator: Callable[..., Any], oracle: Callable[..., Any], *arguments: Any, **options: Any
) -> Any:
    """Assert that an operator agrees with its oracle (in float64), and return its results.

    Integers must be equal, floats as close as `assert_close_to_reference` requires. The first
    result must have the dtype of the first argument.
    """
    results = operator(*arguments, **options)
    expected = oracle(*widened(arguments), **options)
    same_dtype = expected
    if arguments[0].dtype.itemsize == 2:
        same_dtype = oracle(*arguments, **options)
    triples = (x if isinstance(x, tuple) else (x,) for x in (results, expected, same_dtype))
    for index, (result, truth, peer) in enumerate(zip(*triples, strict=True)):
        assert index > 0 or result.dtype == arguments[0].dtype
        if index == 3 and operator.__name__ in RETURN_ERRORS:
            pairs = zip(error_measures(result), error_measures(truth), strict=True)
            tolerance = max(FLOAT32_TOLERANCE, torch.finfo(arguments[0].dtype).eps)
            for measured, wanted in pairs:
                torch.testing.assert_close(measured, wanted, rtol=0, atol=tolerance)
        elif result.is_floating_point():
            assert_close_to_reference(result, truth, peer, f"result {index}")
        else:
            assert torch.equal(result, truth), f"result {index}"
    return results


def assert_same_on_threads(
    run: Callable[[], Iterable[Any]], counts: tuple[int, ...] = (1, 2, 5)
) -> None:
    """Assert that a function returns bitwise equal tensors (or None) on `counts` threads."""
    before = torch.get_num_threads()
    results = []
    try:
        for count in counts:
            torch.set_num_threads(count)
            results.append(list(run()))
    finally:
        torch.set_num_threads(before)
    for count, other in zip(counts[1:], results[1:], strict=True):
        for first, result in zip(results[0], other, strict=True):
            same = result is None if first is None else torch.equal(first, result)
            assert same, f"the result on {count} threads differs from that on {counts[0]}"
