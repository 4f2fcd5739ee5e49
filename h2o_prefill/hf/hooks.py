"""The hooks that tell a context what a model was called with, and give the model our cache."""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

import torch
from torch import nn

from h2o_prefill.hf.cache import ChunkedPrefillCache
from h2o_prefill.hf.enabled_state import EnabledState
from h2o_prefill.hf.forward import begin_forward, end_forward
from h2o_prefill.hf.forward_context import context_of, leave_context
from h2o_prefill.hf.graph_call import graph

# What we look at of a model's arguments. A few models still have the older name of the cache.
READ_ARGUMENTS = (
    "input_ids",
    "inputs_embeds",
    "past_key_values",
    "past_key_value",
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
        self._names = tuple(inspect.signature(model.forward).parameters)

    def attach(self, model: nn.Module) -> list[Any]:
        """Register both hooks and return their handles."""
        # Not bound methods, which dynamo would look into.
        return [
            model.register_forward_pre_hook(note_compilation),
            model.register_forward_pre_hook(partial(before_forward, self), with_kwargs=True),
            model.register_forward_hook(
                partial(after_forward, self), with_kwargs=True, always_call=True
            ),
        ]

    def read(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return those of `READ_ARGUMENTS`, None where the caller gave none."""
        return {name: self._argument(name, args, kwargs) for name in READ_ARGUMENTS}

    def takes(self, name: str) -> bool:
        """Return whether the forward has an argument of this name."""
        return name in self._names

    def replace(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], name: str, value: Any
    ) -> Arguments:
        """Return the arguments of a forward with another value for one that it takes."""
        index = self._names.index(name)
        if index < len(args):
            return (*args[:index], value, *args[index + 1 :]), kwargs
        return args, {**kwargs, name: value}

    def makes_cache(self, model: nn.Module, arguments: dict[str, Any]) -> bool:
        """Return whether a model that was given no cache makes a `DynamicCache` of its own."""
        if arguments["past_key_values"] is not None or not self.takes("past_key_values"):
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

    def _argument(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if name in kwargs:
            return kwargs[name]
        index = self._names.index(name) if name in self._names else len(args)
        return args[index] if index < len(args) else None


def note_compilation(*_: Any) -> None:
    """Note whether the hooks of a model run under torch.compile.

    The hooks of the model that is called run outside of its graph, but those that dynamo may trace
    become graphs of their own.
    """
    graph.compiled = torch.compiler.is_dynamo_compiling()


# Dynamo cannot trace context variables. Hooks of models that are nested in a compiled one are left
# out of its graph: they are part of its context.
@torch.compiler.disable
def before_forward(
    hook: ForwardHook, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Arguments | None:
    """Open a context, or join the enclosing model's; return other arguments if it needs some."""
    compiled = _is_compiled(model)
    context = context_of(hook.enabled, model)
    if context is None:
        graph.call = graph.layer = None
        return None
    arguments = hook.read(args, kwargs)
    context.modules.append(model)
    if len(context.modules) > 1:
        context.add_arguments(arguments)
        return None
    changed: dict[str, Any] = {}
    if hook.makes_cache(model, arguments):
        changed["past_key_values"] = ChunkedPrefillCache(config=model.config)
        # A call without a cache verifies no candidates.
        arguments.update(changed, logits_to_keep=None)
    context.add_arguments(arguments)
    bare = context.cache is arguments["attention_mask"] is arguments["position_ids"] is None
    if compiled and bare and context.tokens is not None and hook.takes("attention_mask"):
        # Else transformers looks for packed sequences.
        shape, device = context.tokens.shape[:2], context.tokens.device
        changed["attention_mask"] = torch.ones(shape, dtype=torch.int64, device=device)
    begin_forward(context, {**arguments, **changed}["attention_mask"], compiled)
    for name, value in changed.items():
        args, kwargs = hook.replace(args, kwargs, name, value)
    return (args, kwargs) if changed else None


@torch.compiler.disable
def after_forward(
    hook: ForwardHook,
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    output: Any,
) -> None:
    """Leave the context; `output` is None if the forward raised."""
    context = leave_context(hook.enabled, model, failed=output is None)
    if context is not None:
        end_forward(context, failed=output is None)


def _is_compiled(model: nn.Module) -> bool:
    """Return whether a model is compiled, or its forward."""
    noted, graph.compiled = getattr(graph, "compiled", False), False
    return noted or hasattr(model.forward, "_torchdynamo_orig_callable")


@torch.compiler.substitute_in_graph(before_forward)
def _(
    hook: ForwardHook, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Arguments | None:
    return None


@torch.compiler.substitute_in_graph(after_forward)
def _(
    hook: ForwardHook,
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    output: Any,
) -> None:
    return None


def handle_of(module: nn.Module) -> Any:
    """Return the handle whose hooks a module carries, None if it carries none."""
    for hook in module._forward_pre_hooks.values():
        if isinstance(hook, partial) and hook.func is before_forward:
            return hook.args[0].handle
    return None
