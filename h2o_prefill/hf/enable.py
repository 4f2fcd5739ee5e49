"""Switch a model to sparse prefill, and back."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from h2o_prefill import ops
from h2o_prefill.config import PrefillConfig
from h2o_prefill.functional import NO_RECALL
from h2o_prefill.hf.attention import h2o_prefill_attention
from h2o_prefill.hf.cache import (
    CACHE_NAMES,
    StaticPrefillCache,
    adopt,
    cache_argument,
    leave_shared,
    note_use,
)
from h2o_prefill.hf.forward import (
    EnabledState,
    ForwardContext,
    GraphCall,
    check_idle,
    context_of,
    leave_context,
)
from h2o_prefill.hf.kinds import NAME, enabled_of, heads_by_layer, is_unpadded, longest_text
from h2o_prefill.hf.layer import ChunkedPrefillLayer, graph
from h2o_prefill.hf.masks import h2o_prefill_mask
from h2o_prefill.hf.parallel import (
    StageCache,
    check_heads_here,
    layers_here,
    new_cache,
)
from h2o_prefill.hf.report import ModelReport, causal_by_mask, look_at_layers, no_model, report_of
from h2o_prefill.hf.rules import MASKED
from h2o_prefill.presets import chosen_config
from h2o_prefill.vocabulary import text_for


class PrefillHandle:
    """Sparse prefill of one model, on until `disable` is called or its `with` ends."""

    def __init__(self, model: PreTrainedModel, state: EnabledState) -> None:
        self.model = model
        self.state = state
        self.config = state.config
        self._entered = False
        self._hooks: list[Any] = []

    @property
    def active(self) -> bool:
        """Whether the model is enabled through this handle."""
        return self.state.on

    def enable(self) -> PrefillHandle:
        """Enable the model, in place of a handle that was active before.

        A handle that cannot be enabled leaves the one before as it was. Raises what the function
        `enable` raises, and ValueError if the model shares its config object with an enabled one.
        """
        earlier, before = handles_of(self.model), self.state
        for handle in earlier:
            handle.disable()
        try:
            self.state = self._new_state()
            self._switch_on()
        except BaseException:
            self.state = before
            for handle in earlier:
                handle._switch_on()
            raise
        return self

    def _new_state(self) -> EnabledState:
        configs, before = _configs_of(self.model), self.state
        if any(enabled_of(config) for config in configs):
            raise ValueError(
                f"{type(self.model).__name__} shares its config object with a model that is "
                "enabled; give each model its own (copy.deepcopy)"
            )
        return EnabledState(
            before.config,
            before.strict,
            [(config, config._attn_implementation) for config in configs],
            before.reported,
            causal_by_mask(self.model, configs, before.config),
            token_text=before.token_text,
            longest_text=longest_text(self.model.config),
        )

    def _switch_on(self) -> None:
        """Switch the model over with the settings as they are, or leave it as it was."""
        try:
            _switch(self.model)
            look_at_layers(self.model, self.state)
            for module in self.model.modules():
                if module is self.model or isinstance(module, PreTrainedModel):
                    self._hooks += ForwardHook(module, self).attach(module)
            self.state.mark(on=True)
        finally:
            if not self.state.on:
                self._restore()

    def disable(self) -> None:
        """Restore the attention that the model had. Does nothing if it is not enabled.

        Raises RuntimeError during a forward of the model, in this thread or in another.
        """
        if self.state.on:
            check_idle(self.state, type(self.model).__name__)
            self.state.mark(on=False)
            self._restore()

    def report(self) -> ModelReport:
        """Return what each attention layer does, and its calls so far (`explain`)."""
        return explain(self.model)

    def __repr__(self) -> str:
        where = f"{'on' if self.active else 'off'} {type(self.model).__name__}"
        return f"<PrefillHandle {self.config.to_string()!r} {where}>"

    def __enter__(self) -> PrefillHandle:
        if self._entered:
            raise ValueError("the handle is entered already; nested use is not possible")
        if not self.active:
            self.enable()
        self._entered = True
        return self

    def __exit__(self, *error: object) -> None:
        self._entered = False
        self.disable()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Switch a copy of an enabled model over, in another process too."""
        self.__dict__.update(state)
        if self.active:
            register()
            self.state.mark(on=True)

    def _restore(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        for config, name in self.state.previous:
            # Not the public setter: it would spread the choice of a config over its sub-configs.
            config._attn_implementation_internal = name


def enable(
    model: PreTrainedModel,
    config: PrefillConfig | str | None = None,
    *,
    tokenizer: Any = None,
    strict: bool = False,
    **overrides: Any,
) -> PrefillHandle:
    """Make a Hugging Face model prefill sparsely, until `disable` or the end of the `with` block.

    Prompts are sparse from the length on at which that is faster on the model's device
    (`min_prefill`). Decoding and everything that is not supported stay dense, with one warning for
    each reason. On CPUs, plain causal calls
    that PyTorch's attention would compute go through `ops.dense_attention`, and layers whose
    window, or chunk, is shorter than the prompt through operators that visit no key outside of it,
    with the same results up to rounding; other dense calls through the attention that the model had
    before.

    Parameters
    ----------
    model : PreTrainedModel
        A causal decoder. It is enabled when this function returns; a `with` block disables it at
        its end.
    config : PrefillConfig or str, optional
        Settings, or the name of a preset; "h2o" is the algorithm as specified. Default:
        "recommended".
    tokenizer : optional
        The model's tokenizer: with `recall_characters`, lexical recall compares the text of the
        tokens too.
    strict : bool
        Raise NotImplementedError where a long call would fall back to dense attention.
    **overrides
        Fields of `PrefillConfig` to change in it.

    Returns
    -------
    PrefillHandle
        A context manager with `enable()` and `disable()`.

    Raises
    ------
    ValueError
        If an argument is wrong, or the model does not use transformers' attention interface.
    NotImplementedError
        If `strict` and no layer of the model can be sparse.
    RuntimeError
        If the model is enabled already and this is called during one of its forwards.

    Examples
    --------
    >>> with enable(model, chunk_size=1024, local_window=256, heavy_budget=256):
    ...     model.generate(**inputs)
    """
    if not hasattr(model, "config") or not hasattr(model, "set_attn_implementation"):
        raise no_model(model)
    chosen = chosen_config(config, overrides)
    if heads := heads_by_layer(model):
        chosen.check_fits(len(heads))
    layers_here(model)
    check_heads_here(model)
    state = EnabledState(chosen, strict, token_text=text_for(tokenizer, chosen))
    return PrefillHandle(model, state).enable()


def disable(model: PreTrainedModel) -> None:
    """Restore the attention that a model had before `enable`; does nothing if it is not enabled.

    Raises RuntimeError during a forward of the model, in this thread or in another.

    A copy of an enabled model (copy.deepcopy, pickle) is enabled too, and has no other handle.
    """
    for handle in handles_of(model):
        handle.disable()


def explain(model: PreTrainedModel) -> ModelReport:
    """Return what each attention layer of a model does, and its calls so far.

    The model may be enabled or not. `print` the report for a table.
    """
    handles = handles_of(model)
    return report_of(model, handles[0].state if handles else None)


@contextlib.contextmanager
def paused(model: PreTrainedModel) -> Iterator[PrefillHandle | None]:
    """Give a model its own attention for a block; yield the handle that it is enabled through.

    The handle may be enabled and disabled in the block. At its end the model is as before, with
    the calls and errors that were counted before.
    """
    handles = handles_of(model)
    states = [handle.state for handle in handles]
    try:
        for handle in handles:
            handle.disable()
        yield handles[0] if handles else None
    finally:
        disable(model)
        for handle, state in zip(handles, states, strict=True):
            if not state.on:
                handle.state = state
                handle._switch_on()


def register() -> str:
    """Register the attention function and the mask function with transformers.

    `enable` does this. Call it yourself to load a model with `attn_implementation="h2o_prefill"`:
    it is dense until `enable` switches it on.
    """
    AttentionInterface.register(NAME, h2o_prefill_attention)
    # Without a mask function of this name every layer would get no mask at all, padded rows
    # included.
    AttentionMaskInterface.register(NAME, h2o_prefill_mask)
    return NAME


def handles_of(model: PreTrainedModel) -> list[PrefillHandle]:
    """Return the handles that a model, or one inside of it, is enabled through, each once."""
    if not isinstance(model, nn.Module):
        raise no_model(model)
    hooks = (hook for module in model.modules() for hook in module._forward_pre_hooks.values())
    ours = (x for x in hooks if isinstance(x, partial) and x.func is before_forward)
    return list(dict.fromkeys(hook.args[0].handle for hook in ours))


def _configs_of(model: PreTrainedModel) -> list[Any]:
    """Return every Hugging Face config inside a model, each once."""
    found: dict[int, Any] = {}
    waiting: list[Any] = [getattr(module, "config", None) for module in model.modules()]
    while waiting:
        config = waiting.pop(0)
        if id(config) not in found and hasattr(config, "_attn_implementation_internal"):
            found[id(config)] = config
            waiting += [getattr(config, name, None) for name in config.sub_configs]
    return list(found.values())


def _switch(model: PreTrainedModel) -> None:
    """Set our implementation on the text decoder, and only there: a vision tower keeps its own."""
    name: str | dict[str, str] = register()
    config: Any = model.config
    text = config.get_text_config(decoder=True)
    if text is not config:
        keys = [key for key in config.sub_configs if getattr(config, key, None) is text]
        name = {keys[0]: NAME} if keys else NAME
    model.set_attn_implementation(name)
    # Transformers only logs a warning when a model cannot be switched over.
    if config.get_text_config(decoder=True)._attn_implementation != NAME:
        raise ValueError(
            f"{type(model).__name__} does not use transformers' attention interface, so its "
            "attention cannot be replaced"
        )


Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class ForwardHook:
    """Hooks that open a context before a forward and close it after, even if it raises."""

    def __init__(self, model: nn.Module, handle: PrefillHandle) -> None:
        self.handle = handle
        self.names = tuple(inspect.signature(model.forward).parameters)
        self.makes_caches = "cache" in self.names or "past_key_values" in self.names

    def attach(self, model: nn.Module) -> list[Any]:
        # Not bound methods, which dynamo would look into.
        return [
            model.register_forward_pre_hook(note_compilation),
            model.register_forward_pre_hook(partial(before_forward, self), with_kwargs=True),
            model.register_forward_hook(
                partial(after_forward, self), with_kwargs=True, always_call=True
            ),
        ]

    def read(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of a forward by name, the cache always as `cache`."""
        given = {**dict(zip(self.names, args, strict=False)), **kwargs}
        caches = (given[name] for name in CACHE_NAMES if given.get(name) is not None)
        return {**given, "cache": next(caches, None)}

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
        wanted = arguments.get("use_cache")
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
    noted, graph.compiled = getattr(graph, "compiled", False), False
    compiled = noted or hasattr(model.forward, "_torchdynamo_orig_callable")
    context = context_of(hook.handle.state, model)
    arguments = hook.read(args, kwargs)
    context.modules.append(model)
    changed: dict[str, Any] = {}
    if arguments["cache"] is not None and context.cache is None:
        own = layers_here(model) if len(context.modules) == 1 else None
        if own is None:
            adopt(arguments["cache"])
        else:
            StageCache.of(arguments["cache"], own)
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
    context.check_text()
    if compiled:
        leave_shared(context.cache)  # Graphs do not ask which rows they may write.
    bare = all(arguments.get(x) is None for x in ("cache", "attention_mask", "position_ids"))
    if compiled and bare and context.tokens is not None and "attention_mask" in hook.names:
        # Else transformers looks for packed sequences.
        shape, device = context.tokens.shape[:2], context.tokens.device
        changed["attention_mask"] = torch.ones(shape, dtype=torch.int64, device=device)
    _tell_graph(context, {**arguments, **changed}.get("attention_mask"), compiled)
    return hook.replace(args, kwargs, changed)


@torch.compiler.disable
def after_forward(hook: ForwardHook, model: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
    """Leave the context; `output` is None if the forward raised."""
    state = hook.handle.state
    context = leave_context(state, model, failed=output is None)
    if context is None or output is None:
        return
    if context.call is not None:
        _take_from_graph(context, context.call)
    held = context.cache, context.begun, context.was_sparse
    note_use(hook.handle.model, state, context.config, *held)


def _leave_out(*_args: Any, **_kwargs: Any) -> None:
    return None


for _hook in (before_forward, after_forward):
    torch.compiler.substitute_in_graph(_hook)(_leave_out)


def _tell_graph(context: ForwardContext, mask: Any, compiled: bool) -> None:
    """Pass to a compiled graph, and the layers of a static cache, what they cannot determine."""
    static = isinstance(context.cache, StaticPrefillCache)
    graph.call = graph.layer = None
    if context.tokens is None or not (compiled or static):
        return
    new, config = context.new, context.config
    if new == 1 and context.enabled.config.is_auto:
        config = config.with_min_prefill(config.chunk_size)  # One graph decodes after all prompts.
    position = context.cache.position_for(new) if static else None
    past = context.past if position is None else int(position[0]) if new > 1 else 0
    is_2d = isinstance(mask, Tensor) and mask.ndim == 2
    unpadded = is_2d and (new > 1 or not static) and is_unpadded(mask, past + new)
    if is_2d and not unpadded and not static:
        return  # Attention breaks the graph: rows with padding attend one by one.
    if isinstance(mask, Tensor) and not unpadded:
        context.mask_reason = MASKED
    candidates = context.candidates_in(past, new)
    sparse = new > 1 and config.is_sparse_call(past, new - candidates)
    recall: Any = NO_RECALL
    batch, device = context.tokens.shape[0], context.tokens.device
    if sparse:
        recall = context.recall_lists(batch, past, new, device)
    elif static and new > 1 and config.recall:
        # No keys, but lists: one graph for short calls and long ones.
        blocks = batch * -(-(new - candidates) // config.recall_block)
        sizes = blocks + 1, 0, 0
        recall = tuple(torch.zeros(x, dtype=torch.int32, device=device) for x in sizes)
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
        if isinstance(layer, ChunkedPrefillLayer) and layer.traced:
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
