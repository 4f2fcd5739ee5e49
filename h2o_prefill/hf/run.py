"""What one forward of an enabled model knows, carried by a context variable."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from contextvars import ContextVar
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from h2o_prefill.hf.cache import ChunkedPrefillCache
from h2o_prefill.hf.layer import ChunkedPrefillLayer
from h2o_prefill.hf.padding import Padding
from h2o_prefill.hf.rollback import CacheSnapshot, check_usable
from h2o_prefill.hf.settings import Settings

# What we look at of a model's arguments. A few models still have the older name of the cache.
READ_ARGUMENTS = (
    "input_ids",
    "past_key_values",
    "past_key_value",
    "logits_to_keep",
    "attention_mask",
    "position_ids",
)

CHANGED = "the attention implementation was changed after enable(), so nothing is sparse"

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
    candidates : int
        Tokens at the end of this forward that assisted decoding verifies.
    assumed_packed : bool
        Whether the model is compiled and was given neither a cache nor a mask nor positions:
        transformers then reckons with packed sequences.
    plain : set of (int, int)
        Query and key lengths for which our mask function was asked for a plain causal mask; some
        models have several at a time.
    padding : Padding or None
        Where the rows lie, if only their padding kept the mask from being that.
    mask_reason : str or None
        Why it was neither.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.modules: list[nn.Module] = []
        self.frame: FrameType | None = None
        self.outer: Run | None = None
        self.input_ids: Tensor | None = None
        self.cache: Any = None
        self.candidates = 0
        self.assumed_packed = False
        self.plain: set[tuple[int, int]] = set()
        self.padding: Padding | None = None
        self.mask_reason: str | None = None
        self._snapshot: CacheSnapshot | None = None
        self._shared: dict[Any, Any] = {}

    def add_arguments(self, arguments: dict[str, Any]) -> None:
        """Take over what a model was called with; the outermost model that names a thing wins.

        Parameters
        ----------
        arguments : dict
            Those of `READ_ARGUMENTS`, None where the caller gave none; and whether the model is
            "compiled".
        """
        input_ids, kept = arguments["input_ids"], arguments["logits_to_keep"]
        cache = arguments["past_key_values"]
        if cache is None:
            cache = arguments["past_key_value"]
        if len(self.modules) == 1:
            given = (cache, arguments["attention_mask"], arguments["position_ids"])
            self.assumed_packed = arguments["compiled"] and all(x is None for x in given)
        if cache is not None and isinstance(kept, int) and kept > 1:
            # Assisted decoding asks for the logits of the last token and of every candidate.
            self.candidates = kept - 1
        if self.input_ids is None and isinstance(input_ids, Tensor) and input_ids.ndim == 2:
            self.input_ids = input_ids
        if self.cache is None and cache is not None:
            check_usable(cache)
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
        if not failed and not is_traced():
            self._report_short_calls()
        if failed and self._snapshot is not None:
            self._snapshot.restore()
        elif isinstance(self.cache, ChunkedPrefillCache):
            self.cache.append_token_ids(self.input_ids)

    def _report_short_calls(self) -> None:
        """Say it if a prompt came in calls that are all too short to be sparse."""
        least, ids = self.settings.config.sparse_from, self.input_ids
        if self.cache is None or ids is None or ids.shape[1] < 2:
            return
        known = getattr(self.cache, "_h2o_prefill_short_tokens", 0)
        # A call that was long enough ends the count for good.
        tokens = known + ids.shape[1] if ids.shape[1] < least and known >= 0 else -1
        self.cache._h2o_prefill_short_tokens = tokens
        if tokens >= 2 * least:
            self.settings.report(
                f"a prompt came in calls of fewer than {least} tokens, which are dense; make them "
                "longer (prefill_chunk_size), or min_prefill smaller"
            )


class ForwardHook:
    """Hooks that open a run before a forward and close it after, even if it raises.

    Parameters
    ----------
    model : nn.Module
        The model to hook, enabled or nested in an enabled one.
    settings : Settings
        Of the enabled model.
    handle : PrefillHandle
        Through which it was enabled.
    """

    def __init__(self, model: nn.Module, settings: Settings, handle: Any) -> None:
        self.settings = settings
        self.handle = handle
        self._names = tuple(inspect.signature(model.forward).parameters)

    def attach(self, model: nn.Module) -> list[Any]:
        """Register both hooks and return their handles."""
        return [
            model.register_forward_pre_hook(self.before, with_kwargs=True),
            model.register_forward_hook(self.after, with_kwargs=True, always_call=True),
        ]

    def before(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Open a run, or join that of the enclosing model."""
        arguments = {name: self._argument(name, args, kwargs) for name in READ_ARGUMENTS}
        # Asked here, since what dynamo does not trace is not compiled.
        arguments["compiled"] = torch.compiler.is_compiling()
        _enter(self.settings, model, arguments)

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


def is_traced() -> bool:
    """Return whether torch.export or torch.jit.trace runs the model."""
    return torch.jit.is_tracing() or torch.compiler.is_exporting()


def handle_of(module: nn.Module) -> Any:
    """Return the handle whose hooks a module carries, None if it carries none."""
    for hook in module._forward_pre_hooks.values():
        owner = getattr(hook, "__self__", None)
        if isinstance(owner, ForwardHook):
            return owner.handle
    return None


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


def _frame_of_forward() -> FrameType | None:
    """Return the frame in which torch runs the hooks and the forward of a module."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_name != "_call_impl":
        frame = frame.f_back
    return frame


def _is_running(wanted: FrameType | None) -> bool:
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame is not wanted:
        frame = frame.f_back
    return frame is not None


# Dynamo cannot trace context variables, so a compiled model breaks its graph here.
@torch.compiler.disable
def _enter(settings: Settings, model: nn.Module, arguments: dict[str, Any]) -> None:
    run = _current.get()
    again = run is not None and any(module is model for module in run.modules)
    # A hook inside of a model may call the model: that is a forward of its own.
    nested = run is not None and again and _is_running(run.frame)
    if run is not None and again and not nested:
        # Torch skips our closing hook on a KeyboardInterrupt.
        run.finish(failed=True)
        _current.set(run.outer)
        run = run.outer
    if run is None or nested or run.settings is not settings:
        outer, run = run, Run(settings)
        run.outer, run.frame = outer, _frame_of_forward()
        _current.set(run)
        if not settings.is_switched_on():
            settings.report(CHANGED)
    run.modules.append(model)
    run.add_arguments(arguments)


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
