"""What tells models apart whose keys and values differ: in session files, and in this process."""

from __future__ import annotations

import hashlib
import json
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from h2o_prefill.config import PrefillConfig
from h2o_prefill.session_file import checksum

# Fields of a config that change no key, value or logit.
_NO_PART = {
    *("architectures", "bos_token_id", "dtype", "eos_token_id", "id2label", "label2id"),
    *("output_attentions", "output_hidden_states", "pad_token_id", "problem_type", "return_dict"),
    *("torch_dtype", "transformers_version", "use_cache"),
}

# What may change between calls, in a user's words.
CHANGED = {
    "model": "owner",
    "weights": "weights",
    "adapters": "active adapters, or their weights,",
    "tokenizer": "tokenizer",
    "autocast": "autocast dtype",
}

# Elements of a weight that are compared between two calls.
_SAMPLED = 16


def plain_value(value: Any) -> Any:
    """Return a value as JSON has it; the same number is an int in one file, a float in another."""
    if isinstance(value, dict):
        return {str(key): plain_value(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_value(item) for item in value]
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    return value if value is None or isinstance(value, bool) else str(value)


class Marks(NamedTuple):
    """What changes keys beside the settings, as far as one process needs to tell it apart."""

    weights: int
    adapters: int
    tokenizer: str  # the text of its tokens that recall compares, empty if there is none
    autocast: torch.dtype | None  # None: off


@dataclass(frozen=True)
class Origin:
    """What a cache was filled by."""

    model: weakref.ref[nn.Module]
    settings: PrefillConfig  # those that built the state
    marks: Marks
    changed: str = ""  # what was not the same in all calls; empty: nothing

    def after(self, now: Origin, was_sparse: bool) -> Origin:
        """Return the origin after one more call, by what `now` says."""
        changed = "model" if self.model() is not now.model() else ""
        changed = self.changed or changed or difference(self.marks, now.marks)
        settings = now.settings if was_sparse else self.settings
        return replace(self, settings=settings, changed=changed)

    def __deepcopy__(self, memo: Any) -> Origin:
        return self

    def __reduce__(self) -> Any:
        # A reference cannot leave the process: pickled caches know no model.
        return type(None), ()


def changed_text(what: str) -> str:
    """Return the error for a cache whose model is not what it was in all calls."""
    now = f"{CHANGED[what]} changed since it was filled"
    return f"cache must be of one state of its model, whose {now}"


def difference(one: Marks, other: Marks) -> str:
    """Return the name of the first mark that differs, empty if none does."""
    pairs = zip(Marks._fields, one, other, strict=True)
    return next((name for name, here, there in pairs if here != there), "")


def marks_of(model: Any, token_text: Tensor | None = None) -> Marks:
    """Return the marks of a model as it is now, with the text of its tokens.

    Of weights: how often PyTorch has changed them in place, and samples of them, since it does not
    count what is written through `.data`.
    """
    counts: dict[bool, list[Any]] = {False: [], True: []}
    samples: dict[tuple[bool, torch.device], list[Tensor]] = {}
    for name, tensor, adapter in _tensors_of(model, keep_meta=True):
        of_adapter = adapter is not None
        changes = 0 if tensor.is_inference() else tensor._version
        counts[of_adapter].append((name, tensor.dtype, changes))
        if not tensor.is_meta and tensor.numel():
            flat = tensor.reshape(-1)[:: -(-tensor.numel() // _SAMPLED)].double()
            samples.setdefault((of_adapter, tensor.device), []).append(flat)
    for (of_adapter, _), found in samples.items():
        counts[of_adapter].append(checksum(torch.cat(found)))
    kind = model.device.type
    casts = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    return Marks(
        hash(tuple(counts[False])),
        hash((*counts[True], *_active_adapters(model).items())),
        "" if token_text is None else f"{checksum(token_text) % 2**64:016x}",
        torch.get_autocast_dtype(kind) if casts else None,
    )


def model_text(model: Any, marks: Marks | None = None) -> str:
    """Return what tells models apart whose keys and values differ, as words "name=value".

    config: SHA-256 of the text decoder's config, without what changes no result (`_NO_PART` and
    names that begin with "_"), as JSON. weights: the same of the name, dtype, shape and checksum
    (docs/cpp.md) of each parameter and saved buffer, in the order of their names, without
    adapters (PEFT). adapters: names and weights of the active ones that are not merged. tokenizer
    comes from the marks. This reads the weights once, at the speed of memory; it is no protection
    against forgery.
    """
    active, every = _active_adapters(model), model.config.get_text_config(decoder=True).to_dict()
    config = {k: plain_value(v) for k, v in every.items() if k not in _NO_PART and k[0] != "_"}
    weights, adapters = hashlib.sha256(), hashlib.sha256(repr(active).encode())
    for name, tensor, adapter in _tensors_of(model):
        part = weights if adapter is None else adapters
        part.update(f"{name} {tensor.dtype} {list(tensor.shape)} {checksum(tensor)}".encode())
    words = {
        "config": hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()[:16],
        "dtype": str(model.dtype).removeprefix("torch."),
        "weights": weights.hexdigest()[:16],
    }
    if names := sorted({name for _, name in active}):
        words["adapters"] = "+".join(names) + ":" + adapters.hexdigest()[:16]
    if marks is not None:
        words["tokenizer"] = marks.tokenizer
    return " ".join(f"{name}={value}" for name, value in words.items() if value)


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


def _active_adapters(model: nn.Module) -> dict[tuple[str, str], str]:
    """Return the numbers of each active adapter, as a text, by the path of its module and name."""
    return {
        (_without_adapters(path), name): repr(_numbers(module, name))
        for path, module in _adapted(model).items()
        for name in _active_of(module)
    }


def _without_adapters(path: str) -> str:
    """Return the path that a weight or module has in a model without PEFT."""
    for added in ("base_model.model.", ".base_layer", ".original_module"):
        path = path.replace(added, "")
    return path


def _numbers(module: Any, adapter: str) -> dict[str, Any]:
    """Return the plain values that a module has of an adapter, as its scaling."""
    held = ((name, value) for name, value in vars(module).items() if isinstance(value, dict))
    found = {name: value[adapter] for name, value in held if adapter in value}
    return {k: v for k, v in found.items() if isinstance(v, (bool, int, float, str))}


def _tensors_of(
    model: nn.Module, keep_meta: bool = False
) -> Iterator[tuple[str, Tensor, str | None]]:
    """Yield the name of each weight without adapters, its tensors, and its active adapter."""
    adapted = _adapted(model)
    for name, weight in sorted(model.state_dict().items()):
        owner = next((x for x in _parents(name) if x in adapted), None)
        adapter = None
        if owner is not None:
            inside = name[len(owner) + 1 :].split(".")
            if inside[0] not in ("base_layer", "original_module"):
                adapter = next((x for x in _active_of(adapted[owner]) if x in inside), None)
                if adapter is None:
                    continue
        for tensor in _plain_tensors(weight):
            absent = tensor.is_meta and not keep_meta
            held = _offloaded(model, name) if absent else tensor
            yield _without_adapters(name), held, adapter


def _parents(name: str) -> list[str]:
    """Return the paths of the modules that a tensor's name leads through, the innermost first."""
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(len(parts) - 1, -1, -1)]


def _offloaded(model: nn.Module, name: str) -> Tensor:
    """Return a weight that accelerate keeps elsewhere; its hooks know where."""
    for path in _parents(name):
        hook: Any = getattr(model.get_submodule(path), "_hf_hook", None)
        for each in getattr(hook, "hooks", [hook]):
            known: Any = getattr(each, "weights_map", None)
            try:
                weight: Tensor = known[name[len(path) + 1 if path else 0 :]]
                return weight.detach()
            except (KeyError, TypeError):
                continue
    raise ValueError(f"model must have its weights in memory or offloaded by accelerate, {name!r}")


def _plain_tensors(weight: Any) -> list[Tensor]:
    """Return the tensors that a weight consists of: several, if it is quantized."""
    if isinstance(weight, tuple):  # Weight and bias of a layer of torch.ao.
        return [tensor for part in weight for tensor in _plain_tensors(part)]
    if not isinstance(weight, Tensor):
        return []
    if weight.is_quantized:
        weight = weight.dequantize()
    if not is_traceable_wrapper_subclass(weight):
        return [weight.detach()]
    names, _ = weight.__tensor_flatten__()
    return [tensor for name in names for tensor in _plain_tensors(getattr(weight, name))]
