"""Linear layers and embeddings with weights in fewer bits, for packages."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from h2o_prefill import ops


class Packed(nn.Module):
    """A matrix [outputs, inputs] as `ops.pack_linear` packs it, for arithmetic in a dtype."""

    def __init__(self, layer: Any, dtype: torch.dtype, packed: list[nn.Parameter]) -> None:
        super().__init__()
        self.outputs, self.dtype = layer.weight.shape[0], dtype
        self.bias = getattr(layer, "bias", None)
        self.packed, self.scales = packed


class PackedLinear(Packed):
    """A linear layer."""

    def forward(self, x: Tensor) -> Tensor:
        """Return what the layer makes of [..., inputs]."""
        return ops.linear(x, self.packed, self.scales, self.bias, self.outputs)


class PackedEmbedding(Packed):
    """An embedding."""

    def forward(self, token_ids: Tensor) -> Tensor:
        """Return the rows of token ids, [..., inputs]."""
        rows = ops.packed_embedding(token_ids, self.packed, self.scales, self.outputs)
        return rows.to(self.dtype)


def keeps_numbers(model: PreTrainedModel, weights: str) -> bool:
    """Return whether the numbers of a model's matrices are numbers of a format."""
    if weights == "int8":
        return False
    dtype = getattr(torch, weights)
    matrices = (x for x in model.parameters() if x.dim() == 2 and x.dtype != dtype)
    return all(torch.equal(x.to(dtype).to(x.dtype), x) for x in matrices)


def with_packed_weights(model: PreTrainedModel, weights: str, dtype: torch.dtype) -> Any:
    """Return a model for arithmetic in a dtype, with linear layers and embeddings in a format.

    The model stays as it is; what is the same in both is shared.
    """
    shared = [*model.parameters(), *model.buffers()]
    twin = copy.deepcopy(model, {id(tensor): tensor for tensor in shared})
    done: dict[int, Any] = {}  # of tied weights
    for parent in list(twin.modules()):
        for name, layer in parent.named_children():
            # Subclasses may do more than multiply.
            kind = {nn.Linear: PackedLinear, nn.Embedding: PackedEmbedding}.get(type(layer))
            if kind is None or weights == "float32":
                continue
            weight: Any = layer.weight
            if id(weight) not in done:
                # Parameters, for Inductor copies buffers.
                packed = ops.pack_linear(weight.detach(), weights)
                done[id(weight)] = [nn.Parameter(x, requires_grad=False) for x in packed]
            setattr(parent, name, kind(layer, dtype, done[id(weight)]))
    converted: dict[int, Any] = {}  # of tied weights too; a packed one may be here as well
    for layer in twin.modules():
        for name, x in layer.named_parameters(recurse=False):
            if x.is_floating_point() and name not in ("packed", "scales"):
                if id(x) not in converted:
                    converted[id(x)] = nn.Parameter(x.to(dtype), requires_grad=False)
                setattr(layer, name, converted[id(x)])
    return twin
