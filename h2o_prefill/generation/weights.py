"""Linear layers and embeddings with weights in fewer bits, for packages."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from h2o_prefill import ops


class Packed(nn.Module):
    """A matrix [outputs, inputs] as `ops.pack_linear` packs it."""

    packed: Tensor
    scales: Tensor

    def __init__(self, weight: Tensor, bias: Tensor | None, packed: tuple[Tensor, Tensor]) -> None:
        super().__init__()
        self.outputs, self.dtype, self.bias = weight.shape[0], weight.dtype, bias
        for name, tensor in zip(("packed", "scales"), packed, strict=True):
            self.register_buffer(name, tensor)


class PackedLinear(Packed):
    """A linear layer."""

    def forward(self, x: Tensor) -> Tensor:
        """Return what the layer makes of [..., inputs]."""
        return ops.linear(x, self.packed, self.scales, self.bias, self.outputs)


class PackedEmbedding(Packed):
    """An embedding."""

    bias: None

    def forward(self, token_ids: Tensor) -> Tensor:
        """Return the rows of token ids, [..., inputs]."""
        rows = ops.packed_embedding(token_ids, self.packed, self.scales, self.outputs)
        return rows.to(self.dtype)


def keeps_numbers(model: PreTrainedModel, weights: str) -> bool:
    """Return whether the numbers of a model's matrices are numbers of a format."""
    if weights == "int8":
        return False
    dtype = getattr(torch, weights)
    matrices = (x for x in model.parameters() if x.dim() == 2)
    return all(torch.equal(x.to(dtype).to(x.dtype), x) for x in matrices)


def with_packed_weights(model: PreTrainedModel, weights: str) -> PreTrainedModel:
    """Return a model with the linear layers and the embeddings in a format; the rest is shared."""
    shared = [*model.parameters(), *model.buffers()]
    twin = copy.deepcopy(model, {id(tensor): tensor for tensor in shared})
    done: dict[int, Any] = {}  # of tied weights
    for parent in list(twin.modules()):
        for name, layer in parent.named_children():
            # Subclasses may do more than multiply.
            kind = {nn.Linear: PackedLinear, nn.Embedding: PackedEmbedding}.get(type(layer))
            if kind is None:
                continue
            weight: Any = layer.weight
            if id(weight) not in done:
                done[id(weight)] = ops.pack_linear(weight.detach(), weights)
            setattr(parent, name, kind(weight, getattr(layer, "bias", None), done[id(weight)]))
    return twin
