"""What a session file has of a cache of transformers, and of its model."""

from __future__ import annotations

import hashlib
import json
import operator
import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from transformers.cache_utils import DynamicSlidingWindowLayer

from h2o_prefill.config import PrefillConfig
from h2o_prefill.hf.layer import ChunkedPrefillLayer
from h2o_prefill.hf.profile import plain_value
from h2o_prefill.hf.state import enabled_of
from h2o_prefill.session import Session, SessionLayer, settings_fields

# Fields of a config that change no key, value or logit.
_NO_PART = {
    *("architectures", "bos_token_id", "dtype", "eos_token_id", "id2label", "label2id"),
    *("output_attentions", "output_hidden_states", "pad_token_id", "problem_type", "return_dict"),
    *("torch_dtype", "transformers_version", "use_cache"),
}

# Elements of a weight whose bits are added up together, and those that are converted at once.
_BLOCK, _PIECE = 1 << 12, 1 << 24
_INTS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Origin:
    """The enabled model that a cache was last used by, and all fields of its settings."""

    model: weakref.ref[nn.Module]
    settings: str

    def __deepcopy__(self, memo: Any) -> Origin:
        return self

    def __reduce__(self) -> Any:
        # A reference cannot leave the process: pickled caches know no model.
        return type(None), ()


def model_hash(model: Any) -> str:
    """Return 32 hex digits that tell models apart whose keys and values differ.

    SHA-256 of the text decoder's config, without what changes no result (`_NO_PART` and names that
    begin with "_"), as JSON, then of each parameter and saved buffer in the order of their names:
    name, dtype, shape, and the sum of the bits, as integers, of each 4,096 elements. That reads the
    weights once, at the speed of a sum, where SHA-256 of all bytes takes many times as long. It
    finds every difference but one made to cancel out: it is no protection against forgery.
    """
    config = model.config.get_text_config(decoder=True).to_dict()
    kept = {k: plain_value(v) for k, v in config.items() if k not in _NO_PART and k[0] != "_"}
    found = hashlib.sha256(json.dumps(kept, sort_keys=True).encode())
    for name, weight in sorted(model.state_dict().items()):
        for tensor in _plain_tensors(weight):
            found.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
            found.update(_sums(tensor).cpu().numpy().tobytes())
    return found.hexdigest()[:32]


def _plain_tensors(weight: Any) -> list[Tensor]:
    """Return the tensors that a weight consists of: several, if it is quantized."""
    if not isinstance(weight, Tensor):
        return []
    if not is_traceable_wrapper_subclass(weight):
        return [weight.detach()]
    names, _ = weight.__tensor_flatten__()
    return [tensor for name in names for tensor in _plain_tensors(getattr(weight, name))]


def _sums(tensor: Tensor) -> Tensor:
    """Return the sums of the bits of each block of a tensor, int64."""
    if tensor.is_meta:
        raise ValueError("model must have its weights in memory, got some on the meta device")
    flat = tensor.contiguous().reshape(-1)
    bits = flat.view(_INTS.get(flat.element_size(), torch.uint8))
    whole = bits.shape[0] // _BLOCK * _BLOCK
    pieces = [x.view(-1, _BLOCK).sum(1) for x in bits[:whole].split(_PIECE) if len(x)]
    return torch.cat([*pieces, bits[whole:].sum().reshape(1)])


def session_of(layers: list[Any], token_ids: Tensor | None, origin: Origin | None) -> Session:
    """Return what a session file holds of a cache with such layers; ValueError if none can."""
    model = None if origin is None else origin.model()
    if origin is None or model is None:
        raise ValueError("cache must have been used by an enabled model that still exists")
    kinds = [_rows_of(layer, 1) for layer in layers]
    length = int(layers[0].get_seq_length()) if kinds else 0
    held = []
    for layer in layers:
        rows = _rows_of(layer, length)
        if length == 0 or layer.get_seq_length() != length or layer.keys.shape[2] != rows:
            raise ValueError("cache must hold the same tokens in every layer, and at least one")
        if getattr(layer, "padded", False):
            raise ValueError("cache must not be of a padded batch")
        held.append(SessionLayer(layer.keys, layer.values, getattr(layer, "state", None)))
    return Session(model_hash(model), origin.settings, length, token_ids, held)


def fill(layers: list[Any], session: Session, model: Any) -> Origin:
    """Put a session into the empty layers of a cache of a model; ValueError if it does not fit."""
    enabled = enabled_of(model.config)
    settings = None if enabled is None else settings_fields(enabled.config)
    session.check_origin(model_hash(model), settings)
    wanted = [_rows_of(layer, session.length) for layer in layers]
    found = [held.key.shape[2] for held in session.layers]
    if len(found) != len(wanted) or any(map(operator.lt, found, wanted)):
        raise ValueError(f"it must have {wanted} tokens of the layers, got {found}")
    for layer, held, rows in zip(layers, session.layers, wanted, strict=True):
        key, value = (x[:, :, -rows:].to(model.device) for x in (held.key, held.value))
        layer.lazy_initialization(key, value)
        layer.keys, layer.values = key, value
        if isinstance(layer, ChunkedPrefillLayer):
            layer.state = held.state
        else:
            layer.cumulative_length = session.length
    return Origin(weakref.ref(model), session.settings)


def origin_of(model: Any, config: PrefillConfig) -> Origin:
    """Return the origin of a cache that an enabled model has just used."""
    return Origin(weakref.ref(model), settings_fields(config))


def _rows_of(layer: Any, length: int) -> int:
    """Return how many of the last tokens a layer holds; ValueError for kinds without a session."""
    if type(layer) is ChunkedPrefillLayer:
        return length
    if type(layer) is DynamicSlidingWindowLayer and layer.sliding_window > 1:
        return min(length, layer.sliding_window - 1)
    raise ValueError(
        "cache must have full attention or sliding windows alone, got a layer of "
        f"{type(layer).__name__}"
    )
