"""The wrapped `forward` and `generate` of an enabled model.

Instance attributes, `functools.partial` of functions of this module, so that models with them are
copied and pickled, and inspect sees the signatures of what they wrap.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.decorators import skip

from h2o_prefill import ops
from h2o_prefill.functional import NO_RECALL
from h2o_prefill.hf.cache import CACHE_NAMES, KeepsTokenIds, StaticPrefillCache, adopt, cache_among
from h2o_prefill.hf.forward import (
    MASK,
    PADDED,
    ForwardContext,
    StaticCall,
    announce,
    close_context,
    open_context,
)
from h2o_prefill.hf.layer import running
from h2o_prefill.hf.masks import is_unpadded
from h2o_prefill.hf.parallel import StageCache, layers_here, new_cache

OTHER_TEXT = (
    "input_ids must begin with the {} tokens of the cache and go on after them: put them in front "
    "(torch.cat([cache.token_ids, input_ids], dim=1)), crop the cache, or pass another one"
)

# The attribute of a module that has its `Entry`.
_ENTRY = "_h2o_prefill_entry"


class Entry:
    """The way into one module of an enabled model: what its wrapped methods know."""

    def __init__(self, module: nn.Module, handle: Any) -> None:
        self.module = module
        self.handle = handle
        self.names = tuple(inspect.signature(module.forward).parameters)
        names = (name for name in CACHE_NAMES if name in self.names)
        self.cache_name = next(names, None)  # of the argument of a model that makes caches
        # What the instance had of these names before: another library's wrappers.
        self.methods: dict[str, Any] = {}
        self.on = True  # False: code that has wrapped our wrappers goes on to call them

    def makes_cache(self, arguments: dict[str, Any]) -> bool:
        """Return whether the model, which was called without a cache, makes a `DynamicCache`."""
        # Those that generate a text without one have caches of other classes.
        supports = getattr(self.module, "_supports_default_dynamic_cache", None)
        if not self.cache_name or supports is None or not supports():
            return False
        config: Any = self.module.config
        wanted = arguments.get("use_cache")
        if wanted is None:
            wanted = getattr(config.get_text_config(decoder=True), "use_cache", False)
        return bool(wanted) and not config.is_encoder_decoder and not torch.is_grad_enabled()


def wrap(module: nn.Module, handle: Any) -> None:
    """Wrap `forward`, and `generate` of a model that has one."""
    entry = Entry(module, handle)
    setattr(module, _ENTRY, entry)
    for name, function in (("forward", run_forward), ("generate", run_generate)):
        if method := getattr(module, name, None):
            entry.methods[name] = vars(module).get(name)
            wrapper = functools.partial(function, entry, method)
            setattr(module, name, functools.update_wrapper(wrapper, method, ("__doc__",), ()))


def unwrap(module: nn.Module) -> None:
    """Give a module its methods back, if it was wrapped."""
    entry = entry_of(module)
    if entry is None:
        return
    entry.on = False
    delattr(module, _ENTRY)
    for name, method in entry.methods.items():
        wrapper = vars(module).get(name)
        # Else another library has wrapped our wrapper.
        if isinstance(wrapper, functools.partial) and wrapper.args[:1] == (entry,):
            if method is None:
                delattr(module, name)
            else:
                setattr(module, name, method)


def entry_of(module: nn.Module) -> Entry | None:
    return vars(module).get(_ENTRY)


_enter = torch.compiler.disable(open_context)


# Dynamo must not trace what opens and closes a context. At the top it runs this function as it is
# and makes a graph of `forward`; inside of a graph it calls `forward` alone: models that are nested
# are part of the context.
@skip
def run_forward(entry: Entry, forward: Any, *args: Any, **kwargs: Any) -> Any:
    """Call the forward of a model in the context of its call."""
    if not entry.on:
        return forward(*args, **kwargs)
    context, failed = _enter(entry.handle.state, entry.module), True
    try:
        args, kwargs = _prepare(entry, context, args, kwargs)
        output = forward(*args, **kwargs)
        failed = False
    finally:
        _leave(context, failed)
    return output


@torch.compiler.substitute_in_graph(run_forward)
def _in_graph(entry: Entry, forward: Any, *args: Any, **kwargs: Any) -> Any:
    return forward(*args, **kwargs)


@torch.compiler.disable
def _leave(context: ForwardContext, failed: bool) -> None:
    if close_context(context, failed) and not failed and context.call is not None:
        _end_in_static_cache(context, context.call)


@torch.compiler.disable
def _prepare(
    entry: Entry, context: ForwardContext, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Tell a context the arguments of a forward; return those that the forward needs."""
    is_outermost = len(context.modules) == 1
    arguments = {**dict(zip(entry.names, args, strict=False)), **kwargs}
    cache = cache_among(arguments)
    if cache is not None and context.cache is None:
        layers = layers_here(entry.module) if is_outermost else None
        if layers is None:
            adopt(cache)
        else:
            StageCache.of(cache, layers)
    if is_outermost and cache is None and entry.makes_cache(arguments):
        cache = new_cache(entry.module)
        # By name, all of them. A call without a cache verifies no candidates.
        kwargs = {name: x for name, x in arguments.items() if name not in CACHE_NAMES}
        args, kwargs = (), {**kwargs, str(entry.cache_name): cache}
        arguments = {**kwargs, "logits_to_keep": None}
    context.add_arguments(arguments, cache)
    if not is_outermost:
        return args, kwargs
    if isinstance(context.cache, StaticPrefillCache) and context.tokens is not None:
        mask = arguments.get("attention_mask")
        if isinstance(mask, Tensor):
            end = context.begun + context.new
            if mask.ndim == 2 and context.new > 1 and is_unpadded(mask, end):
                # A graph cannot know that it hides nothing.
                args, kwargs = (), {**arguments, "attention_mask": None}
            else:
                context.mask_reason = PADDED if mask.ndim == 2 else MASK
        _begin_in_static_cache(context)
    return args, kwargs


def _begin_in_static_cache(context: ForwardContext) -> None:
    """Settle what the layers of a static cache, perhaps in a compiled graph, cannot determine."""
    assert context.tokens is not None
    new, config = context.new, context.config
    if new == 1 and context.enabled.config.is_auto:
        config = config.with_min_prefill(config.chunk_size)  # One graph decodes after all prompts.
    position = context.cache.begin(config, new)
    past, recall = int(position[0]), NO_RECALL
    batch, device = len(context.tokens), context.tokens.device
    if new > 1 and config.is_sparse_call(past, new):
        recall = context.recall_lists(batch, past, new, device)
    elif new > 1 and config.recall:
        # No keys, but lists: one graph for short calls and long ones.
        blocks = batch * -(-new // config.recall_block) + 1
        made = [torch.zeros(n, dtype=torch.int32, device=device) for n in (blocks, 0, 0)]
        recall = made[0], made[1], made[2]
    for tensor in recall:
        if tensor is not None:  # Every prompt has lists of another length, which may be 0.
            torch._dynamo.decorators.mark_unbacked(tensor, 0)
    hf_config: Any = context.modules[0].config
    context.call = running.call = StaticCall(
        config=config,
        settings=config.to_string(),
        previous=context.enabled.previous_of(hf_config.get_text_config(decoder=True)),
        left_out=frozenset(mask.window for mask in context.masks),
        recall=recall,
        position=position,
    )


def _end_in_static_cache(context: ForwardContext, call: StaticCall) -> None:
    """Count the calls of a graph, and say where the next call begins."""
    assert context.tokens is not None
    new, past, layers = context.new, context.begun, context.cache.layers
    if any(getattr(layer, "attended", False) for layer in layers):
        ops.advance_position_(call.position, new, call.settings)
    for number, reason in call.outcomes:
        if not call.config.is_sparse(number, past, new):
            reason = ""
        elif reason is None:
            context.enabled.note_errors(number, getattr(layers[number], "errors", None))
        elif reason == MASK:
            reason = context.mask_reason
        context.enabled.count(number, len(context.tokens) * new, reason)


def run_generate(entry: Entry, generate: Any, *args: Any, **kwargs: Any) -> Any:
    """Call the `generate` of a model; say how long its prompt is."""
    named = {**dict(zip(("inputs",), args, strict=False)), **kwargs}
    ids = named.get("input_ids") if named.get("inputs") is None else named["inputs"]
    # With a longer mask, the ids are what follows the cache.
    parts = (ids, named.get("inputs_embeds"), named.get("attention_mask"))
    lengths = [x.shape[1] for x in parts if isinstance(x, Tensor) and x.ndim > 1]
    if not entry.on or not lengths:
        return generate(*args, **kwargs)
    if isinstance(ids, Tensor) and ids.ndim == 2 and ids.shape[1] == max(lengths):
        _check_begins_with(cache_among(named), ids)
    with announce(entry.handle.state, max(lengths)):
        return generate(*args, **kwargs)


def _check_begins_with(cache: Any, ids: Tensor) -> None:
    """Raise ValueError if a prompt is not the text of its cache and more."""
    cached = cache.token_ids if isinstance(cache, KeepsTokenIds) else None
    if cached is None or len(ids) != len(cached):
        return
    past = cached.shape[1]
    if ids.shape[1] <= past or not ids[:, :past].equal(cached.to(ids.device)):
        raise ValueError(OTHER_TEXT.format(past))
