"""vLLM's FlashAttention on CUDA, which leaves rows of long prompts to this library.

Decoding, and all other rows, stay vLLM's, also in its CUDA graphs.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends import flash_attn

from h2o_prefill.vllm import backend
from h2o_prefill.vllm.plan import Pages


class Backend(flash_attn.FlashAttentionBackend):
    """vLLM's backend, under its own name, with the builder and the attention below."""

    get_impl_cls = staticmethod(lambda: Attention)
    get_builder_cls = staticmethod(lambda: Builder)


class Attention(backend.Attention, flash_attn.FlashAttentionImpl):
    """Attention of one layer."""

    def reasons(self) -> dict[str, object]:
        # More have no kernel here.
        return super().reasons() | {"heads of more than 256": self.head_size > 256}

    @staticmethod
    def pages_of(kv_cache: Tensor) -> Pages:
        """Return views of keys and values [pages, Hkv, size, D]: a row is a key and its value."""
        keys, values = kv_cache.chunk(2, dim=-1)
        return keys, values


class Builder(backend.Builder, flash_attn.FlashAttentionMetadataBuilder):
    """Adds a plan to vLLM's metadata of a step."""

    @classmethod
    def get_cudagraph_support(cls, *_: Any) -> AttentionCGSupport:
        """Return that steps with prompts run without a graph of all, where `forward` is called."""
        return AttentionCGSupport.UNIFORM_BATCH

    def reads_pages(self) -> bool:
        """Return whether keys and values have one size; FP8 pages are refused before."""
        spec = self.kv_cache_spec
        return getattr(spec, "head_size_v", spec.head_size) == spec.head_size
