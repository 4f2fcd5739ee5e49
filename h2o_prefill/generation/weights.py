"""Models with int8 weights, for packages."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

# Activations are 8 bits of their rounded quotient by a scale of the token, and 8 bits of the rest.
_LARGEST, _REST, _ZERO = 127, 254, 128

# Where all numbers are 0, their scale is not.
_SMALLEST = 1e-30


@torch.library.register_fake("onednn::qlinear_prepack", allow_override=True)
def _(weight: Tensor, x_shape: list[int] | None) -> Tensor:
    return weight.new_empty(weight.shape[::-1])


class Int8Rows(nn.Module):
    """A matrix in int8 with a scale of each row."""

    weight: Tensor
    scale: Tensor

    def __init__(self, matrix: Tensor) -> None:
        super().__init__()
        rows = matrix.detach().float()
        scale = rows.abs().amax(1).clamp(min=_SMALLEST) / _LARGEST
        self.register_buffer("weight", (rows / scale[:, None]).round().to(torch.int8))
        self.register_buffer("scale", scale)


class Int8Linear(Int8Rows):
    """A linear layer with int8 weights, and activations of 16 bits: two products of oneDNN.

    Both products are rows of one, so that the weights are read once. A token's activations need
    more than 8 bits: of the outliers of a few channels all others are a small part.
    """

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__(layer.weight)
        self.bias = layer.bias

    def forward(self, x: Tensor) -> Tensor:
        """Return what the layer makes of [..., inputs]."""
        rows = x.reshape(-1, x.shape[-1])
        tokens = rows.shape[0]
        scale = rows.abs().amax(-1, keepdim=True).float().clamp(min=_SMALLEST) / _LARGEST
        quotient = rows.float() / scale
        first = quotient.round()
        parts = first, ((quotient - first) * _REST).round()
        products = torch.ops.onednn.qlinear_pointwise(
            torch.cat([(part + _ZERO).to(torch.uint8) for part in parts]),
            1.0,
            _ZERO,
            # Compiling with frozen weights leaves the result alone.
            torch.ops.onednn.qlinear_prepack(self.weight, None),
            self.scale,
            None,
            None,
            1.0,
            0,
            torch.bfloat16 if x.dtype == torch.bfloat16 else torch.float32,
            "none",
            [],
            "",
        )
        out = (products[:tokens] + products[tokens:] / _REST) * scale
        if self.bias is not None:
            out = out + self.bias
        return out.to(x.dtype).reshape(*x.shape[:-1], -1)


class Int8Embedding(Int8Rows):
    """An embedding with int8 weights."""

    def __init__(self, layer: nn.Embedding) -> None:
        super().__init__(layer.weight)
        self.dtype = layer.weight.dtype

    def forward(self, token_ids: Tensor) -> Tensor:
        """Return the rows of token ids, [..., features]."""
        return (self.weight[token_ids] * self.scale[token_ids][..., None]).to(self.dtype)


def with_int8_weights(model: PreTrainedModel) -> PreTrainedModel:
    """Return a model with the linear layers and the embedding in int8; the rest is shared.

    Raises ValueError where this CPU has no instructions for it.
    """
    if not torch.cpu._is_vnni_supported():
        raise ValueError("weights in int8 need a CPU with AVX-512 VNNI")
    shared = [*model.parameters(), *model.buffers()]
    twin = copy.deepcopy(model, {id(tensor): tensor for tensor in shared})
    for parent in list(twin.modules()):
        for name, layer in parent.named_children():
            # Subclasses may do more than multiply.
            if type(layer) is nn.Linear:
                setattr(parent, name, Int8Linear(layer))
            elif type(layer) is nn.Embedding:
                setattr(parent, name, Int8Embedding(layer))
    return twin
