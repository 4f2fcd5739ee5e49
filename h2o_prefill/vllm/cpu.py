"""vLLM's attention on CPUs, which leaves rows of long prompts to this library."""

from __future__ import annotations

import torch
from torch import Tensor
from vllm import _custom_ops
from vllm.v1.attention.backends import cpu_attn

from h2o_prefill.vllm import backend
from h2o_prefill.vllm.plan import Pages


class Backend(cpu_attn.CPUAttentionBackend):
    """vLLM's backend, under its own name, with the builder and the attention below."""

    get_impl_cls = staticmethod(lambda: Attention)
    get_builder_cls = staticmethod(lambda: Builder)


class Attention(backend.Attention, cpu_attn.CPUAttentionBackendImpl):
    """Attention of one layer."""

    @staticmethod
    def pages_of(kv_cache: Tensor) -> Pages:
        """Return views of keys and values [pages, Hkv, size, D].

        Of a page [Hkv, size, 2 D], the first half is keys [D, size], the second values [size, D].
        """
        count, heads, size, both = kv_cache.shape
        halves = kv_cache.view(count, heads, 2, both // 2, size)
        return halves[:, :, 0].transpose(2, 3), halves[:, :, 1].view(count, heads, size, both // 2)


class Builder(backend.Builder, cpu_attn.CPUAttentionMetadataBuilder):
    """Adds a plan to vLLM's metadata of a step."""

    def reads_pages(self) -> bool:
        """Return whether `pages_of` reads back what vLLM writes: its layout depends on the CPU."""
        spec = self.kv_cache_spec
        heads, size, dim = spec.num_kv_heads, spec.block_size, spec.head_size
        if getattr(spec, "head_size_v", dim) != dim or spec.dtype != self.dtype:
            return False
        pages = torch.zeros(3, heads, size, 2 * dim, dtype=spec.dtype)
        caches = pages.view(3, heads, 2 * size, dim).chunk(2, dim=2)
        drawn = torch.Generator().manual_seed(0)
        rows = [torch.randn(2 * size, heads, dim, generator=drawn).to(spec.dtype) for _ in range(2)]
        slots = torch.arange(size, 3 * size)
        _custom_ops.cpu_attn_reshape_and_cache(
            *rows, *caches, slots, self.isa, k_scale=1.0, v_scale=1.0, kv_cache_dtype="auto"
        )
        written = (x[1:].transpose(1, 2).flatten(0, 1) for x in Attention.pages_of(pages))
        return all(x.equal(row) for x, row in zip(written, rows, strict=True))
