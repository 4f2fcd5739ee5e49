"""Other ways to compute what `chunkwise_linear_attention` computes, causal and with elu+1."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable

import torch
from torch import Tensor


class PackageMissing(Exception):
    """flash-linear-attention is not installed; the message says how to install it."""


def masked_square(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attend linearly by all products of queries and keys, those above the diagonal left out."""
    queries, keys, values = _features(q, k, v)
    return ((queries @ keys.transpose(-1, -2)).tril() @ values).flatten(1, 2)


def cumulative_sums(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attend linearly by the sums of k^T v up to every token, all kept at once."""
    queries, keys, values = _features(q, k, v)
    states = (keys.unsqueeze(-1) * values.unsqueeze(-2)).cumsum(3)
    return (queries.unsqueeze(-2) @ states).squeeze(-2).flatten(1, 2)


def flash_linear_attention(q: Tensor, k: Tensor, v: Tensor) -> Callable[[], Tensor] | None:
    """Return the same by flash-linear-attention: its kernels on a GPU, its PyTorch form elsewhere.

    Keys and values, which it takes for every query head, are repeated beforehand, which is not
    timed. None where its PyTorch form does not take the length, which must be of whole chunks.
    """
    name, function = "chunk", "chunk_linear_attn"
    if q.device.type == "cpu":
        name, function = "naive", "naive_chunk_linear_attn"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that there is no GPU
            attend = getattr(importlib.import_module(f"fla.ops.linear_attn.{name}"), function)
    except ImportError as error:
        raise PackageMissing(
            f"flash-linear-attention cannot be imported ({error}), so it is left out: "
            "pip install flash-linear-attention"
        ) from error
    if q.device.type == "cpu" and q.shape[2] % 64:
        return None
    group = q.shape[1] // k.shape[1]
    queries = q.transpose(1, 2)
    keys, values = (x.repeat_interleave(group, 1).transpose(1, 2) for x in (k, v))

    def call() -> Tensor:
        found = attend(_elu_plus_one(queries), _elu_plus_one(keys), values, 1.0, normalize=False)
        return (found[0] if isinstance(found, tuple) else found).transpose(1, 2)

    return call


def _features(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """elu+1 of q [B, Hkv, G, T, D] and k [B, Hkv, 1, T, D], and v beside them."""
    queries = _elu_plus_one(q).unflatten(1, (k.shape[1], -1))
    return queries, _elu_plus_one(k).unsqueeze(2), v.unsqueeze(2)


def _elu_plus_one(x: Tensor) -> Tensor:
    return torch.nn.functional.elu(x) + 1
