"""Helpers of operator tests and benchmarks: devices, shapes, inputs and tolerances."""

import io
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils._python_dispatch import TorchDispatchMode

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


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
    [B, H, T, D]; "column", whose last dimension is not contiguous.
    """
    generator = torch.Generator().manual_seed(seed)

    def make(heads: int, length: int, dim: int) -> Tensor:
        x = torch.randn(shape.batch, heads, length, dim, generator=generator).to(device, dtype)
        if layout == "transposed":
            return x.transpose(1, 2).contiguous().transpose(1, 2)
        if layout == "column":
            return x.transpose(2, 3).contiguous().transpose(2, 3)
        return x

    total = past + shape.length
    return (
        make(shape.query_heads, shape.length, shape.head_dim),
        make(shape.kv_heads, total, shape.head_dim),
        make(shape.kv_heads, total, shape.value_dim),
    )


# The order in memory of layers, pages (blocks), rows (N), heads and contents, as engines have them;
# at last one whose rows are not contiguous.
PAGE_LAYOUTS = ("LBNHC", "LBHNC", "BLNHC", "BLHNC", "BNLHC", "BHLNC", "LBHCN")


def in_pages(
    key: Tensor, value: Tensor, size: int, layout: str = "LBHNC"
) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Return pages [pages, Hkv, size, D] of keys and values [1, Hkv, T, D], and their table.

    The cache has two layers, a few pages more, and NaN where there is no token.
    """
    (_, heads, tokens, dim), contents = key.shape, torch.cat([key, value], 3)[0]
    count = -(-tokens // size)
    sizes = {"L": 2, "B": count + 3, "N": size, "H": heads, "C": contents.shape[2]}
    cache = contents.new_full([sizes[x] for x in layout], torch.nan)
    pages = cache.permute([layout.index(x) for x in "LBHNC"])[1]
    table = torch.randperm(count + 3, generator=torch.Generator().manual_seed(size))[:count]
    table = table.to(key.device)
    rows = pad(contents, (0, 0, 0, count * size - tokens), value=torch.nan)
    pages[table] = rows.unflatten(1, (count, size)).transpose(0, 1)
    return (pages[..., :dim], pages[..., dim:]), table


def settings_text(**fields: Any) -> str:
    """Return "h2o" with some fields changed, as the operators take settings."""
    return ",".join(["h2o", *(f"{name}={value}" for name, value in fields.items())])


def recall_text(chunk_size: int, matches: int, **fields: Any) -> str:
    """Return settings of lexical recall."""
    return settings_text(chunk_size=chunk_size, recall=matches, **fields)


def widened(arguments: Iterable[Any]) -> list[Any]:
    """Return arguments of an operator with every floating-point tensor in float64."""
    return [x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for x in arguments]


class NoWaits(TorchDispatchMode):
    """Raises where the host would wait for a device."""

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name, options = function.name(), kwargs or {}
        waits = any(x in name for x in ("_local_scalar_dense", "masked_select", "nonzero"))
        copies = "copy" in name and "cpu" in str(options.get("device"))
        assert not waits and not copies, (name, options)
        return function(*args, **options)


def saved_and_loaded(value: Any, through: Any = torch, **options: Any) -> Any:
    """Return what is loaded from what `torch.save`, or `torch.jit.save`, made of a value."""
    buffer = io.BytesIO()
    through.save(value, buffer)
    buffer.seek(0)
    return through.load(buffer, **options)


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
    exactly = {"rtol": 0, "atol": 0, "equal_nan": True}
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], **exactly)
