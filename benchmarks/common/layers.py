"""Linear layers with packed weights, and PyTorch's."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from torch import Tensor

from h2o_prefill import ops

# Inputs and outputs, of SmolLM2-135M and Llama-3.2-1B; and tokens.
LAYERS = ((576, 1536), (2048, 8192), (8192, 2048))
LAYER_TOKENS = (1, 6, 1024)
WEIGHT_BYTES = {
    **{"bfloat16": 2, "float16": 2, "int8": 1},
    **{"bfloat16, bfloat16 tokens": 2, "int8, bfloat16 tokens": 1},
    **{"F.linear float32": 4, "F.linear bfloat16": 2, "oneDNN float32": 4, "oneDNN bfloat16": 2},
}


def layer_calls(
    inputs: int, outputs: int, tokens: int, size: int
) -> dict[str, Callable[[], Tensor]]:
    """Return the same layer in each way; its weights, in copies of together `size` bytes."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(outputs, inputs, generator=generator) / inputs**0.5
    x = torch.randn(tokens, inputs, generator=generator)
    rounded = x.bfloat16()
    mkldnn = torch.ops.mkldnn

    def through(copies: list[Tensor], call: Callable[[Tensor], Tensor]) -> Callable[[], Tensor]:
        following = itertools.cycle(copies)
        return lambda: call(next(following))

    def copied(x: Tensor) -> list[Tensor]:
        number = 1 if tokens > 6 else max(1, size // (x.numel() * x.itemsize))
        return [x, *(x.clone() for _ in range(number - 1))]

    def packed(name: str, x: Tensor) -> Callable[[], Tensor]:
        panels, scales = ops.pack_linear(weight, name)
        return through(copied(panels), lambda w: ops.linear(x, w, scales, None, outputs))

    def one_dnn(x: Tensor) -> Callable[[], Tensor]:
        copies = [mkldnn._reorder_linear_weight(w, tokens) for w in copied(weight.to(x.dtype))]
        return through(copies, lambda w: mkldnn._linear_pointwise(x, w, None, "none", [], ""))

    linear = torch.nn.functional.linear
    return {
        **{name: packed(name, x) for name in ("bfloat16", "float16", "int8")},
        **{f"{name}, bfloat16 tokens": packed(name, rounded) for name in ("bfloat16", "int8")},
        "F.linear float32": through(copied(weight), lambda w: linear(x, w)),
        "F.linear bfloat16": through(copied(weight.bfloat16()), lambda w: linear(rounded, w)),
        "oneDNN float32": one_dnn(x),
        "oneDNN bfloat16": one_dnn(rounded),
    }
