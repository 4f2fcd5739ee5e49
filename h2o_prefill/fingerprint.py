"""What tells models apart whose keys and values differ: a text that saved states carry."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.weak import WeakIdRef

# Fields of a config that change no key, value or logit.
_NO_PART = {
    *("architectures", "bos_token_id", "dtype", "eos_token_id", "id2label", "label2id"),
    *("output_attentions", "output_hidden_states", "pad_token_id", "problem_type", "return_dict"),
    *("torch_dtype", "transformers_version", "use_cache"),
}

# Of each model the last digests of weights and adapters, and what says that they still hold.
_known: WeakKeyDictionary[nn.Module, tuple[Any, dict[str, str]]] = WeakKeyDictionary()


def fingerprint(model: Any, tokenizer: str = "", dtype: str = "") -> str:
    """Return what tells models apart whose keys and values differ, as words "name=value".

    config: digest of the text decoder's config, without what changes no result (`_NO_PART` and
    names that begin with "_"), as JSON. weights: of the name, dtype, shape and numbers of each
    parameter and saved buffer, in the order of their names, without adapters (PEFT); 16 bits count
    as the same numbers in float32. adapters: names and weights of the active ones that are not
    merged. tokenizer: as given, `digest` of the text of the tokens that recall compares. dtype: of
    keys and values, by default the model's.

    Weights are read once, and again after PyTorch has counted a change: what is written through
    `.data` is not seen. It is no protection against forgery.
    """
    every = model.config.get_text_config(decoder=True).to_dict()
    config = {k: _plain_value(v) for k, v in every.items() if k not in _NO_PART and k[0] != "_"}
    words = {
        "config": digest(json.dumps(config, sort_keys=True)),
        "dtype": dtype or str(model.dtype).removeprefix("torch."),
        **_weight_digests(model),
        "tokenizer": tokenizer,
    }
    return " ".join(f"{name}={value}" for name, value in words.items() if value)


def differing_word(one: str, other: str) -> str | None:
    """Return how the second of two fingerprints differs from the first, None if it does not."""
    ours, theirs = (dict(x.split("=", 1) for x in text.split()) for text in (one, other))
    for name in {**ours, **theirs}:
        if ours.get(name) != theirs.get(name):
            return f"{name} must be {ours.get(name, 'none')}, got {theirs.get(name, 'none')}"
    return None


def digest(*parts: str | Tensor | None) -> str:
    """Return the first 16 hex digits of the SHA-256 of texts and tensors, of any device."""
    sha = hashlib.sha256()
    for part in parts:
        if isinstance(part, Tensor):
            part = part.detach().dequantize() if part.is_quantized else part.detach()
            dtype = torch.float32 if part.dtype in (torch.bfloat16, torch.float16) else part.dtype
            sha.update(f"{dtype} {list(part.shape)} ".encode())
            for piece in part.cpu().reshape(-1).split(1 << 22):
                sha.update(piece.to(dtype).contiguous().view(torch.uint8).numpy().data)
        else:
            sha.update(f"{part} ".encode())
    return sha.hexdigest()[:16]


def _plain_value(value: Any) -> Any:
    """Return a value as JSON has it; the same number is an int in one file, a float in another."""
    if isinstance(value, dict):
        return {str(key): _plain_value(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain_value(item) for item in value]
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    return value if value is None or isinstance(value, bool) else str(value)


def _weight_digests(model: nn.Module) -> dict[str, str]:
    """Return the digests of weights and active adapters; the last ones if nothing changed."""
    adapted = _adapted(model)
    active = {
        (_without_adapters(path), name): repr(_numbers(module, name))
        for path, module in adapted.items()
        for name in _active_of(module)
    }
    merged = [list(getattr(x, "merged_adapters", ())) for x in adapted.values()]
    tensors = list(_tensors_of(model, adapted))
    stamp = active, merged, [(WeakIdRef(x), *_counters(x)) for _, x, _ in tensors]
    if model not in _known or _known[model][0] != stamp:
        parts: dict[bool, list[Any]] = {False: [], True: [repr(active)]}
        for name, tensor, adapter in tensors:
            parts[adapter is not None].append(f"{name} {digest(tensor)}")
        words = {"weights": digest(*parts[False])}
        if names := sorted({name for _, name in active}):
            words["adapters"] = "+".join(names) + ":" + digest(*parts[True])
        _known[model] = stamp, words
    return _known[model][1]


def _counters(tensor: Tensor) -> tuple[int, int]:
    """Return the address of a tensor, and how often PyTorch has counted a change of it."""
    return tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version


def _adapted(model: nn.Module) -> dict[str, Any]:
    """Return the modules that PEFT has put in the place of others, by path."""
    return {
        path: module
        for path, module in model.named_modules()
        if isinstance(getattr(module, "active_adapters", None), list)
        and (hasattr(module, "base_layer") or hasattr(module, "original_module"))
    }


def _active_of(module: Any) -> list[str]:
    """Return the adapters of a module that change its result: those that are merged are weights."""
    if module.disable_adapters:
        return []
    merged = getattr(module, "merged_adapters", ())
    return [name for name in module.active_adapters if name not in merged]


def _without_adapters(path: str) -> str:
    """Return the path that a weight or module has in a model without PEFT."""
    for added in ("base_model.model.", ".base_layer", ".original_module"):
        path = path.replace(added, "")
    return path


def _numbers(module: Any, adapter: str) -> dict[str, Any]:
    """Return the plain values that a module has of an adapter, as its scaling."""
    values = (
        (k, v[adapter]) for k, v in vars(module).items() if isinstance(v, dict) and adapter in v
    )
    return {k: v for k, v in values if isinstance(v, (bool, int, float, str))}


def _tensors_of(
    model: nn.Module, adapted: dict[str, Any]
) -> Iterator[tuple[str, Tensor, str | None]]:
    """Yield the name of each weight without adapters, its tensors, and its active adapter."""
    for name, weight in sorted(model.state_dict(keep_vars=True).items()):
        owner = next((x for x in _parents(name) if x in adapted), None)
        adapter = None
        if owner is not None:
            inside = name[len(owner) + 1 :].split(".")
            if inside[0] not in ("base_layer", "original_module"):
                adapter = next((x for x in _active_of(adapted[owner]) if x in inside), None)
                if adapter is None:
                    continue
        for tensor in _plain_tensors(weight):
            if tensor.is_meta:
                raise ValueError(f"model must have its weights in memory, {name!r} is on meta")
            yield _without_adapters(name), tensor, adapter


def _parents(name: str) -> list[str]:
    """Return the paths of the modules that a tensor's name leads through, the innermost first."""
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(len(parts) - 1, -1, -1)]


def _plain_tensors(weight: Any) -> list[Tensor]:
    """Return the tensors that a weight consists of: several, if it is quantized."""
    if isinstance(weight, tuple):  # Weight and bias of a layer of torch.ao.
        return [tensor for part in weight for tensor in _plain_tensors(part)]
    if not isinstance(weight, Tensor):
        return []
    if not is_traceable_wrapper_subclass(weight):
        return [weight]
    names, _ = weight.__tensor_flatten__()
    return [tensor for name in names for tensor in _plain_tensors(getattr(weight, name))]
