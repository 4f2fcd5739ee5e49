"""PyTorch's attention as a baseline, by the name of what computes it; memory sets for both."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from common.benchmark import Row
from common.compare import Timings

Attention = Callable[[], Tensor]

# The math backend is no baseline: it writes the whole square.
_BACKENDS = {
    "cuDNN": SDPBackend.CUDNN_ATTENTION,
    "FlashAttention-2": SDPBackend.FLASH_ATTENTION,
    "memory-efficient": SDPBackend.EFFICIENT_ATTENTION,
}
_FLASH_ATTENTION_3 = ("flash_attn_interface", "flash_attn_3.flash_attn_interface")


def sdpa(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Attention:
    """Return scaled_dot_product_attention with grouped heads, as PyTorch chooses to compute it."""
    return lambda: F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)


def sdpa_calls(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> dict[str, Attention]:
    """Return SDPA on a CPU, and on a GPU each of its backends that can do it, by name.

    A backend that refuses grouped heads gets keys and values repeated beforehand, which is not
    timed, and says so in its name. FlashAttention-3 is there if its package is.
    """
    if not q.is_cuda:
        return {"sdpa": sdpa(q, k, v, causal)}
    group = q.shape[1] // k.shape[1]
    found = {}
    for name, backend in _BACKENDS.items():
        for suffix, repeats in (("", 1), (", repeated keys", group)):
            keys, values = k, v
            if repeats > 1:
                keys, values = (x.repeat_interleave(repeats, dim=1) for x in (k, v))
            call = _with_backend(backend, sdpa(q, keys, values, causal))
            if _works(call):
                found[name + suffix] = call
                break
    flash_3 = _flash_attention_3(q, k, v, causal)
    if flash_3 is not None and _works(flash_3):
        found["FlashAttention-3"] = flash_3
    if not found:
        raise RuntimeError(f"no backend of PyTorch takes {q.dtype} with head dim {q.shape[3]}")
    return found


def window_calls(
    q: Tensor, k: Tensor, v: Tensor, window: int, most_bytes: int, compiled: bool
) -> dict[str, Attention]:
    """Return attention in a sliding window by PyTorch, by name: SDPA and eager with a mask, flex.

    Masks are made beforehand, as a model makes one for all of its layers. Left out is what needs
    more than `most_bytes` for its mask or its logits, and FlexAttention unless `compiled`.
    """
    heads, length = q.shape[1:3]
    group = heads // k.shape[1]
    found: dict[str, Attention] = {}
    if length**2 <= most_bytes:
        mask = torch.ones(length, length, dtype=torch.bool).tril().triu(1 - window)
        found["sdpa"] = lambda: F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)
    if heads * length**2 * 4 <= most_bytes:
        added = torch.zeros(length, length, dtype=q.dtype).masked_fill(~mask, float("-inf"))

        def eager() -> Tensor:  # as the eager functions of transformers
            keys, values = (x.repeat_interleave(group, dim=1) for x in (k, v))
            logits = q @ keys.transpose(2, 3) * q.shape[3] ** -0.5 + added
            return logits.softmax(-1, dtype=torch.float32).to(q.dtype) @ values

        found["eager"] = eager
    if compiled and 8 * length**2 <= most_bytes:  # what making the mask of blocks takes

        def visible(_b: Tensor, _h: Tensor, row: Tensor, key: Tensor) -> Tensor:
            return (key <= row) & (key > row - window)

        blocks = create_block_mask(visible, None, None, length, length, device="cpu")
        torch.compiler.reset()  # earlier windows count against its limit
        flex = torch.compile(flex_attention, dynamic=False)
        found["flex"] = lambda: flex(q, k, v, block_mask=blocks, enable_gqa=group > 1)
    return found


def beside_sdpa(timings: Timings, ours: str, baselines: Collection[str]) -> tuple[str, Row]:
    """Return the fastest baseline and the fields of our speedup, on a GPU of all backends too."""
    best = min(baselines, key=timings.median)
    row: Row = {"rounds": timings.rounds, **timings.ratio(best, ours).fields("speedup")}
    if best != "sdpa":
        times = {name: 1e3 * timings.median(name) for name in baselines}
        row |= {"sdpa_backend": best, "sdpa_backends_milliseconds": times}
    return best, row


def random_memory(kv_heads: int, size: int, past: int, seed: int = 0) -> Tensor:
    """Make memory sets as `select_memory` does: int32 [1, Hkv, size], ascending.

    The last half are the last positions before `past`, the others lie anywhere before those.
    """
    generator = torch.Generator().manual_seed(seed)
    local = size // 2
    rows = []
    for _ in range(kv_heads):
        heavy = torch.randperm(past - local, generator=generator)[: size - local].sort().values
        rows.append(torch.cat([heavy, torch.arange(past - local, past)]))
    return torch.stack(rows).to(torch.int32).unsqueeze(0)


def _with_backend(backend: SDPBackend, attend: Attention) -> Attention:
    def call() -> Tensor:
        with sdpa_kernel(backend):
            return attend()

    return call


def _works(call: Attention) -> bool:
    try:
        call()
        torch.cuda.synchronize()
    except (RuntimeError, TypeError, AssertionError):
        return False
    return True


def _flash_attention_3(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Attention | None:
    for name in _FLASH_ATTENTION_3:
        try:
            package = importlib.import_module(name)
        except ImportError:
            continue
        # [B, T, H, D], which is how q, k and v lie in memory.
        arguments = [x.transpose(1, 2) for x in (q, k, v)]
        return lambda: package.flash_attn_func(*arguments, causal=causal)
    return None
