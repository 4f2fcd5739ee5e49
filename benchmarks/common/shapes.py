"""Attention shapes of real models, and how much arithmetic a problem is."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from h2o_prefill.testing import Shape, make_qkv


@dataclass(frozen=True)
class Heads:
    """The attention of a model: its layers, and the heads of each."""

    name: str
    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int

    def qkv(
        self, length: int, dtype: torch.dtype, past: int = 0, device: str = "cpu"
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Make random q, k, v as Hugging Face models pass them: [B, T, H, D] seen as [B, H, T, D].

        `past` tokens of the history come before the `length` queries.
        """
        shape = Shape(1, self.query_heads, self.kv_heads, length, self.head_dim, self.head_dim)
        return make_qkv(shape, dtype, device, past=past)

    def attention_flops(self, dot_products: int) -> int:
        """Return the flops of attention over so many query-key pairs a head: Q K^T and P V."""
        return 4 * self.head_dim * self.query_heads * dot_products

    def kv_bytes(self, length: int, dtype: torch.dtype) -> int:
        """Return the bytes of this layer's keys and values."""
        return 2 * self.kv_heads * length * self.head_dim * dtype.itemsize


SHAPES = {
    "smollm2": Heads("SmolLM2-135M", 30, 9, 3, 64),
    "llama3": Heads("Llama-3-8B", 32, 32, 8, 128),
}


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
