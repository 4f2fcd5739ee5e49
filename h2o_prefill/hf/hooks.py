"""The hooks of an enabled model: what happens before and after a forward, outside of its graph."""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from h2o_prefill import ops
from h2o_prefill.functional import NO_RECALL, RecallLists
from h2o_prefill.hf.cache import (
    CACHE_NAMES,
    StaticPrefillCache,
    cache_argument,
    leave_shared,
    note_use,
    take_over,
)
from h2o_prefill.hf.forward import (
    EnabledState,
    ForwardContext,
    GraphCall,
    context_of,
    leave_context,
)
from h2o_prefill.hf.layer import ChunkedPrefillLayer, graph
from h2o_prefill.hf.padding import is_unpadded
from h2o_prefill.hf.rules import MASKED
from h2o_prefill.hf.stages import StageCache, layers_here, new_cache

# Arguments of a model that the hooks read, besides the cache.
READ_ARGUMENTS = (
    "input_ids",
    "inputs_embeds",
    "use_cache",
    "logits_to_keep",
    "attention_mask",
    "position_ids",
)

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class ForwardHook:
    """Hooks that open a context before a forward and close it after, even if it raises."""

    def __init__(self, model: nn.Module, enabled: EnabledState, handle: Any) -> None:
        self.enabled = enabled
        self.handle = handle
        self.names = tuple(inspect.signature(model.forward).parameters)
        self.makes_caches = "cache" in self.names or "past_key_values" in self.names

    def attach(self, model: nn.Module) -> list[Any]:
        """Register the hooks and return their handles."""
        # Not bound methods, which dynamo would look into.
        return [
            model.register_forward_pre_hook(note_compilation),
            model.register_forward_pre_hook(partial(before_forward, self), with_kwargs=True),
            model.register_forward_hook(
                partial(after_forward, self), with_kwargs=True, always_call=True
            ),
        ]

    def read(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return `cache` and those of `READ_ARGUMENTS`, None where the caller gave none."""
        given = {**dict(zip(self.names, args, strict=False)), **kwargs}
        caches = (given[name] for name in CACHE_NAMES if given.get(name) is not None)
        return {"cache": next(caches, None), **{name: given.get(name) for name in READ_ARGUMENTS}}

    def replace(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], changed: dict[str, Any]
    ) -> Arguments:
        """Return the arguments of a forward with other values for some that it takes."""
        for name, value in changed.items():
            index = self.names.index(name)
            if index < len(args):
                args = (*args[:index], value, *args[index + 1 :])
            else:
                kwargs = {**kwargs, name: value}
        return args, kwargs

    def makes_cache(self, model: nn.Module, arguments: dict[str, Any]) -> bool:
        """Return whether a model that was given no cache makes a `DynamicCache` of its own."""
        if arguments["cache"] is not None or not self.makes_caches:
            return False
        # Those that generate a text without one have caches of other classes.
        supports = getattr(model, "_supports_default_dynamic_cache", None)
        if supports is None or not supports():
            return False
        config: Any = model.config
        wanted = arguments["use_cache"]
        if wanted is None:
            wanted = getattr(config.get_text_config(decoder=True), "use_cache", False)
        return bool(wanted) and not config.is_encoder_decoder and not torch.is_grad_enabled()


def note_compilation(*_: Any) -> None:
    """Note whether the hooks of a model run under torch.compile."""
    # The hooks of the model that is called run outside of its graph, but those that dynamo may
    # trace become graphs of their own.
    graph.compiled = torch.compiler.is_dynamo_compiling()


# Dynamo cannot trace context variables. Hooks of models that are nested in a compiled one are left
# out of its graph: they are part of its context.
@torch.compiler.disable
def before_forward(
    hook: ForwardHook, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Arguments:
    """Open a context, or join the enclosing model's; return the arguments that it needs."""
    compiled = _is_compiled(model)
    context = context_of(hook.enabled, model)
    arguments = hook.read(args, kwargs)
    context.modules.append(model)
    changed: dict[str, Any] = {}
    given = arguments["cache"]
    if given is not None and context.cache is None:
        own = layers_here(model) if len(context.modules) == 1 else None
        ours = take_over(given) if own is None else StageCache.of(given, own)
        arguments["cache"] = ours
        args = tuple(ours if x is given else x for x in args)
        kwargs = {name: ours if x is given else x for name, x in kwargs.items()}
    if len(context.modules) > 1:
        context.add_arguments(arguments)
        return args, kwargs
    if hook.makes_cache(model, arguments):
        cache = new_cache(model)
        changed |= cache_argument(model, cache)
        # What the caller gave by the other names is None.
        kwargs = {name: value for name, value in kwargs.items() if name not in CACHE_NAMES}
        # A call without a cache verifies no candidates.
        arguments.update(cache=cache, logits_to_keep=None)
    context.add_arguments(arguments)
    if compiled:
        leave_shared(context.cache)  # Graphs do not ask which rows they may write.
    bare = context.cache is arguments["attention_mask"] is arguments["position_ids"] is None
    if compiled and bare and context.tokens is not None and "attention_mask" in hook.names:
        # Else transformers looks for packed sequences.
        shape, device = context.tokens.shape[:2], context.tokens.device
        changed["attention_mask"] = torch.ones(shape, dtype=torch.int64, device=device)
    _tell_graph(context, {**arguments, **changed}["attention_mask"], compiled)
    return hook.replace(args, kwargs, changed)


@torch.compiler.disable
def after_forward(hook: ForwardHook, model: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
    """Leave the context; `output` is None if the forward raised."""
    context = leave_context(hook.enabled, model, failed=output is None)
    if context is None or output is None:
        return
    if context.call is not None:
        _take_from_graph(context, context.call)
    note_use(context.cache, hook.handle.model, hook.enabled, context.begun, context.was_sparse)


def _leave_out(*_args: Any, **_kwargs: Any) -> None:
    return None


for _hook in (before_forward, after_forward):
    torch.compiler.substitute_in_graph(_hook)(_leave_out)


def handle_of(module: nn.Module) -> Any:
    """Return the handle whose hooks a module carries, None if it carries none."""
    for hook in module._forward_pre_hooks.values():
        if isinstance(hook, partial) and hook.func is before_forward:
            return hook.args[0].handle
    return None


def _is_compiled(model: nn.Module) -> bool:
    """Return whether a model is compiled, or its forward."""
    noted, graph.compiled = getattr(graph, "compiled", False), False
    return noted or hasattr(model.forward, "_torchdynamo_orig_callable")


def _tell_graph(context: ForwardContext, mask: Any, compiled: bool) -> None:
    """Pass to a compiled graph, and the layers of a static cache, what they cannot determine."""
    static = isinstance(context.cache, StaticPrefillCache)
    graph.call = graph.layer = None
    if context.tokens is None or not (compiled or static):
        return
    if context.enabled.select is not None:
        if static:
            raise ValueError("select must not be given with a static cache: its call is a graph")
        return  # Attention breaks the graph.
    new, config = context.new, context.enabled.config
    position = context.cache.position_for(new) if static else None
    past = context.past if position is None else int(position[0]) if new > 1 else 0
    is_2d = isinstance(mask, Tensor) and mask.ndim == 2
    unpadded = is_2d and (new > 1 or not static) and is_unpadded(mask, past + new)
    if is_2d and not unpadded and not static:
        return  # Rows with padding are attended to one by one, by their lengths.
    if isinstance(mask, Tensor) and not unpadded:
        context.mask_reason = MASKED
    candidates = context.candidates_in(past, new)
    sparse = new > 1 and config.is_sparse_call(past, new - candidates)
    recall = NO_RECALL
    batch, device = context.tokens.shape[0], context.tokens.device
    if sparse:
        recall = context.recall_lists(batch, past, new, device)
    elif static and new > 1 and config.recall:
        # One graph for short calls and long ones.
        recall = _empty_lists(batch, new - candidates, config.recall_block, device)
    for tensor in recall:
        if tensor is not None:  # Every prompt has lists of another length, which may be 0.
            torch._dynamo.decorators.mark_unbacked(tensor, 0)
    hf_config: Any = context.modules[0].config
    context.call = graph.call = GraphCall(
        config=config,
        settings=config.to_string(),
        previous=context.enabled.previous_of(hf_config.get_text_config(decoder=True)),
        sparse=sparse,
        cached=context.cache is not None,
        unpadded=unpadded,
        plain=bool(context.plain),
        windows=frozenset(context.windows),
        candidates=candidates,
        recall=recall,
        position=position,
    )
    if static:
        context.cache.begin(config)


def _take_from_graph(context: ForwardContext, call: GraphCall) -> None:
    """Store the states that a graph computed, and update counts and reports."""
    assert context.tokens is not None
    layers = getattr(context.cache, "layers", None) or []
    rows = context.new - call.candidates
    if call.position is not None and any(getattr(layer, "attended", False) for layer in layers):
        ops.advance_position_(call.position, rows, call.settings)
    for layer in layers:
        if isinstance(layer, ChunkedPrefillLayer) and layer.traced is not None:
            context.was_sparse = True
            layer.take_traced(context.past - call.candidates, rows, call.config)
    for number, reason in call.outcomes:
        if reason is None and not call.is_sparse(number):
            reason = ""
        context.enabled.count(number, context.tokens.shape[0] * context.new, reason)
        if reason is None and number < len(layers):
            context.enabled.note_errors(number, getattr(layers[number], "errors", None))
        if reason and call.sparse:
            context.enabled.report(f"dense attention: {reason}")


def _empty_lists(batch: int, rows: int, block: int, device: torch.device) -> RecallLists:
    """Return the lists of recalled keys, in the form of `ops.lexical_recall`, where none are."""
    offsets, positions, visible_from = (
        torch.zeros(size, dtype=torch.int32, device=device)
        for size in (batch * -(-rows // block) + 1, 0, 0)
    )
    return offsets, positions, visible_from
