"""What one forward of an enabled model knows, carried by a context variable."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

from h2o_prefill.hf.cache import ChunkedPrefillCache
from h2o_prefill.hf.layer import ChunkedPrefillLayer
from h2o_prefill.hf.rollback import CacheSnapshot
from h2o_prefill.hf.settings import Settings

_current: ContextVar[Run | None] = ContextVar("h2o_prefill_run", default=None)


class Run:
    """One forward of an enabled model, shared by the models nested in it.

    Parameters
    ----------
    settings : Settings
        Of the enabled model.

    Attributes
    ----------
    input_ids : Tensor or None
        int64 [B, Tq] of this forward.
    cache : Cache or None
        The cache that the caller passed.
    masks_made : bool
        Whether our mask function was asked for a mask: if not, the model makes its own.
    plain : (int, int) or None
        Query and key length for which it was plain causal.
    mask_reason : str or None
        Why it was not.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.modules: list[nn.Module] = []
        self.outer: Run | None = None
        self.input_ids: Tensor | None = None
        self.cache: Any = None
        self.masks_made = False
        self.plain: tuple[int, int] | None = None
        self.mask_reason: str | None = None
        self._snapshot: CacheSnapshot | None = None
        self._shared: dict[Any, Any] = {}

    def add_arguments(self, input_ids: Tensor | None, cache: Any) -> None:
        """Take over what a model was called with; the outermost model that names a thing wins."""
        if self.input_ids is None and isinstance(input_ids, Tensor) and input_ids.ndim == 2:
            self.input_ids = input_ids
        if self.cache is None and cache is not None:
            self.cache = cache
            self._snapshot = CacheSnapshot(cache)

    def token_ids(self) -> Tensor | None:
        """Return the ids [B, T_total] of the whole prompt up to this forward, None if unknown."""
        if isinstance(self.cache, ChunkedPrefillCache):
            return self.cache.token_ids_with(self.input_ids)
        return self.input_ids

    def layer_of(self, module: nn.Module) -> Any:
        """Return the cache layer of an attention module, None if the caller passed no cache."""
        layers = getattr(self.cache, "layers", None)
        index = getattr(module, "layer_idx", None)
        if layers is None or not isinstance(index, int) or index >= len(layers):
            return None
        return layers[index]

    def keep_state(self, layer: ChunkedPrefillLayer) -> None:
        """Remember a layer's state, which is about to change, in case the forward fails."""
        if self._snapshot is not None:
            self._snapshot.keep_state(layer)

    def shared(self, key: Any, make: Callable[[], Any]) -> Any:
        """Return what was made for this key, once per forward."""
        if key not in self._shared:
            self._shared[key] = make()
        return self._shared[key]

    def finish(self, failed: bool) -> None:
        """Undo what a failed forward did to the cache, or keep the ids of a good one."""
        if failed and self._snapshot is not None:
            self._snapshot.restore()
        elif isinstance(self.cache, ChunkedPrefillCache):
            self.cache.append_token_ids(self.input_ids)


class ForwardHook:
    """Hooks that open a run before a forward and close it after, even if it raises.

    Parameters
    ----------
    model : nn.Module
        The model to hook, enabled or nested in an enabled one.
    settings : Settings
        Of the enabled model.
    """

    def __init__(self, model: nn.Module, settings: Settings) -> None:
        self.settings = settings
        self._names = tuple(inspect.signature(model.forward).parameters)

    def attach(self, model: nn.Module) -> list[Any]:
        """Register both hooks and return their handles."""
        return [
            model.register_forward_pre_hook(self.before, with_kwargs=True),
            model.register_forward_hook(self.after, with_kwargs=True, always_call=True),
        ]

    def before(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Open a run, or join that of the enclosing model."""
        cache = self._argument("past_key_values", args, kwargs)
        if cache is None:
            cache = self._argument("past_key_value", args, kwargs)
        _enter(self.settings, model, self._argument("input_ids", args, kwargs), cache)

    def after(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        """Leave the run; `output` is None if the forward raised."""
        _leave(self.settings, model, failed=output is None)

    def _argument(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if name in kwargs:
            return kwargs[name]
        index = self._names.index(name) if name in self._names else len(args)
        return args[index] if index < len(args) else None


def is_hooked(model: nn.Module) -> bool:
    """Return whether a model carries our hooks."""
    hooks = model._forward_pre_hooks.values()
    return any(isinstance(getattr(hook, "__self__", None), ForwardHook) for hook in hooks)


def current_run(hf_config: Any) -> Run | None:
    """Return the run of the enabled model that owns a Hugging Face config, None outside of one."""
    run = _current.get()
    return run if run is not None and run.settings.owns(hf_config) else None


def discard_runs(settings: Settings) -> None:
    """End the runs of a model that an interrupt left open, as failed."""
    run = _current.get()
    if run is not None and run.settings is settings:
        run.finish(failed=True)
        _current.set(run.outer)


# Dynamo cannot trace context variables, so a compiled model breaks its graph here.
@torch.compiler.disable
def _enter(settings: Settings, model: nn.Module, input_ids: Tensor | None, cache: Any) -> None:
    run = _current.get()
    if run is not None and any(module is model for module in run.modules):
        # A module is never inside itself: torch skips our closing hook on a KeyboardInterrupt.
        run.finish(failed=True)
        _current.set(run.outer)
        run = run.outer
    if run is None or run.settings is not settings:
        outer, run = run, Run(settings)
        run.outer = outer
        _current.set(run)
    run.modules.append(model)
    run.add_arguments(input_ids, cache)


@torch.compiler.disable
def _leave(settings: Settings, model: nn.Module, failed: bool) -> None:
    run = _current.get()
    # A pre-hook that raised before ours ran leaves us nothing to close.
    if run is None or run.settings is not settings or run.modules[-1] is not model:
        return
    run.modules.pop()
    if not run.modules:
        _current.set(run.outer)
        run.finish(failed)
