"""The context of one forward of an enabled model, and the register of forwards that run."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from h2o_prefill.functional import NO_RECALL, RecallLists, recall_lists
from h2o_prefill.hf.cache import KeepsTokenIds, adopt, length_of
from h2o_prefill.hf.layer import ChunkedPrefillLayer
from h2o_prefill.hf.padding import Padding, Rows, Span
from h2o_prefill.hf.snapshot import CacheSnapshot, check_usable
from h2o_prefill.hf.state import NAME, EnabledState, GraphCall, graph
from h2o_prefill.hf.windows import Window, windows_ahead

CHANGED = "the attention implementation was changed after enable(), so nothing is sparse"
NO_IDS = "recall is off: the token ids are unknown (inputs_embeds, or tokens cached elsewhere)"
OWN_PADDING = (
    "h2o_prefill: in its compiled graph the model masks padding that the attention_mask it was "
    "called with does not have; pass the mask with this padding as attention_mask"
)

ALL_ROWS = slice(None)

_current: ContextVar[ForwardContext | None] = ContextVar("h2o_prefill_forward", default=None)


class ForwardContext:
    """One forward of an enabled model, shared by the models nested in it."""

    def __init__(self, enabled: EnabledState) -> None:
        self.enabled = enabled
        self.modules: list[nn.Module] = []
        self.frame: FrameType | None = None
        self.outer: ForwardContext | None = None
        self.thread = threading.get_ident()
        self.tokens: Tensor | None = None  # input_ids [B, Tq], else inputs_embeds [B, Tq, hidden]
        self.input_ids: Tensor | None = None
        self.cache: Any = None
        self.candidates = 0  # tokens at the end that assisted decoding verifies
        self.begun = 0  # tokens in the cache before the forward
        self.was_sparse = False  # whether the state of some layer of the cache has changed
        self.call: GraphCall | None = None
        # Query and key lengths for which our mask function was asked for a plain causal mask. Some
        # models have sequences of several lengths in a forward, such as bytes and patches.
        self.plain: set[tuple[int, int]] = set()
        # Spans of the rows, by length, where padding alone kept a mask from being plain causal.
        self.paddings: dict[int, Padding] = {}
        # Windows that hide some keys, by length, whose masks our mask function has left out.
        self.windows: dict[int, Window] = {}
        # Static caches: number of filled slots, by number of slots.
        self.filled: dict[int, int] = {}
        self.mask_reason: str | None = None  # why a mask was not plain causal
        # Whether the windows that masks were asked for hold all keys; None if there were none.
        self.windows_show_all: bool | None = None
        self._snapshot: CacheSnapshot | None = None
        self._shared: dict[Any, Any] = {}

    def add_arguments(self, arguments: dict[str, Any]) -> None:
        """Take over what a model was called with; the outermost model that names a thing wins."""
        input_ids, kept = arguments["input_ids"], arguments["logits_to_keep"]
        cache = arguments["cache"]
        if cache is not None and isinstance(kept, int) and kept > 1:
            # Assisted decoding asks for the logits of the last token and of every candidate.
            self.candidates = kept - 1
        if self.input_ids is None and isinstance(input_ids, Tensor) and input_ids.ndim == 2:
            self.input_ids = input_ids
        if self.tokens is None:
            self.tokens = arguments["inputs_embeds"] if input_ids is None else input_ids
        if self.cache is None and cache is not None:
            check_usable(cache)
            adopt(cache)
            self.cache, masks = cache, arguments["attention_mask"]
            self.begun = self.past
            layers = getattr(cache, "layers", None) or ()
            for layer in layers:
                if isinstance(layer, ChunkedPrefillLayer):
                    layer.leave_inference_mode()
            self._snapshot = CacheSnapshot(cache)
            # Transformers makes the masks of a static cache before the forward. What our mask
            # function said by None is not asked again if there are masks of several kinds.
            if isinstance(masks, Mapping):
                self.windows = dict(windows_ahead.get())
                windows_ahead.set({})
                if masks.get("full_attention", masks) is None:
                    slots = max((getattr(layer, "max_cache_len", 0) for layer in layers), default=0)
                    self.add_plain(self.new, self.past + self.new, slots)

    @property
    def new(self) -> int:
        """Tokens of this forward; 0 if they are unknown."""
        return 0 if self.tokens is None else self.tokens.shape[1]

    @property
    def past(self) -> int:
        """Tokens in the cache; 0 if it does not count them."""
        return 0 if self.cache is None else length_of(self.cache) or 0

    def add_plain(self, queries: int, keys: int, slots: int) -> None:
        """Note that our mask function made no mask, since it would be plain causal."""
        self.plain.add((queries, keys))
        if keys < slots:
            self.filled[slots] = keys

    def add_window(self, shows_all: bool) -> None:
        """Note that the mask of a window was asked for, and whether it holds all keys."""
        self.windows_show_all = shows_all and self.windows_show_all is not False

    def token_ids(self) -> Tensor | None:
        """Return the ids [B, T_total] of the whole prompt up to this forward, None if unknown."""
        if isinstance(self.cache, KeepsTokenIds):
            return self.cache.token_ids_with(self.input_ids)
        return self.input_ids

    def recall_lists(
        self,
        batch: int,
        past: int,
        new: int,
        device: torch.device,
        span: Span | None = None,
        rows: Rows = ALL_ROWS,
    ) -> RecallLists:
        """Return what `lexical_recall` finds for a call, made once for all layers of a device.

        In a padded batch, for the rows whose tokens are those of `span`.
        """
        if self.enabled.config.recall == 0:
            return NO_RECALL
        end = past + new - self.candidates_in(past, new)
        first, stop = span or (0, past + new)

        def find() -> RecallLists:
            ids = self.token_ids()
            if ids is None or ids.shape != (batch, past + new):
                self.enabled.report(NO_IDS)
                return NO_RECALL
            prompt = ids[:, first : min(stop, end)][rows].to("cpu", torch.int64)
            return recall_lists(prompt, past, self.enabled.config, self.enabled.token_text)

        lists: RecallLists = self.shared(("recall", span), find)
        moved: RecallLists = self.shared(
            ("recall", span, device),
            lambda: tuple(None if x is None else x.to(device) for x in lists),
        )
        return moved

    def candidates_in(self, past: int, new: int) -> int:
        """Return how many tokens at the end of a call assisted decoding verifies."""
        # A first call that asks for all logits verifies no candidates.
        return self.candidates if self.candidates + 1 < new or past > 0 else 0

    def layer_of(self, module: nn.Module) -> Any:
        """Return the cache layer of an attention module, None if the caller passed no cache."""
        layers = getattr(self.cache, "layers", None) or ()
        index = getattr(module, "layer_idx", None)
        return layers[index] if isinstance(index, int) and 0 <= index < len(layers) else None

    def keep_state(self, layer: ChunkedPrefillLayer) -> None:
        """Remember a layer's state, which is about to change, in case the forward fails."""
        self.was_sparse = True
        if self._snapshot is not None:
            self._snapshot.keep_state(layer)

    def shared(self, key: Any, make: Callable[[], Any]) -> Any:
        """Return what was made for this key, once per forward."""
        if key not in self._shared:
            self._shared[key] = make()
        return self._shared[key]

    def finish(self, failed: bool) -> None:
        """Undo what a failed forward did to the cache, or keep the ids of a good one."""
        hidden = not failed and self.call is not None and any(self.call.hidden)
        failed = failed or hidden
        if not failed and not is_traced():
            self._report_short_calls()
        if failed and self._snapshot is not None:
            self._snapshot.restore()
        elif isinstance(self.cache, KeepsTokenIds):
            self.cache.append_token_ids(self.input_ids)
        if hidden:
            raise RuntimeError(OWN_PADDING)

    def _report_short_calls(self) -> None:
        """Report a prompt whose calls were all too short to be sparse."""
        least, ids = self.enabled.config.sparse_from, self.input_ids
        if self.cache is None or ids is None or ids.shape[1] < 2:
            return
        known = getattr(self.cache, "_h2o_prefill_short_tokens", 0)
        # A call that was long enough ends the count for good.
        tokens = known + ids.shape[1] if ids.shape[1] < least and known >= 0 else -1
        self.cache._h2o_prefill_short_tokens = tokens
        if tokens >= 2 * least:
            self.enabled.report(
                f"a prompt came in calls of fewer than {least} tokens, which are dense; make them "
                "longer (prefill_chunk_size), or min_prefill smaller"
            )


def is_traced() -> bool:
    """Return whether torch.export or torch.jit.trace runs the model."""
    return torch.jit.is_tracing() or torch.compiler.is_exporting()


def current_context(hf_config: Any) -> ForwardContext | None:
    """Return the context of the enabled model that owns a Hugging Face config, None if none is."""
    context = _current.get()
    return context if context is not None and context.enabled.owns(hf_config) else None


def context_of(enabled: EnabledState, model: nn.Module) -> ForwardContext | None:
    """Return the context that a forward of a model belongs to; open one if there is none.

    None if the model is not enabled any more.
    """
    context = _current.get()
    again = context is not None and any(module is model for module in context.modules)
    # A hook inside of a model may call the model: that is a forward of its own.
    nested = context is not None and again and _is_executing(context.frame)
    if context is not None and again and not nested:
        # Torch skips our closing hook on a KeyboardInterrupt.
        _close(context, failed=True)
        context = context.outer
    if context is None or nested or context.enabled is not enabled:
        outer, context = context, ForwardContext(enabled)
        context.outer, context.frame = outer, _frame_of_forward()
        if not _begin(context):
            return None
        _current.set(context)
        names = (str(config._attn_implementation) for config, _ in enabled.previous)
        if not any(name.startswith(NAME) for name in names):
            enabled.report(CHANGED)
    return context


def leave_context(enabled: EnabledState, model: nn.Module, failed: bool) -> ForwardContext | None:
    """Leave the context that a forward of a model belongs to; return it if that ended it."""
    context = _current.get()
    # A pre-hook that raised before ours ran leaves us nothing to close.
    if context is None or context.enabled is not enabled or context.modules[-1] is not model:
        return None
    context.modules.pop()
    if context.modules:
        return None
    _close(context, failed)
    return context


def discard_contexts(enabled: EnabledState) -> None:
    """End the contexts of a model that an interrupt left open, as failed."""
    context = _current.get()
    if context is not None and context.enabled is enabled and not _is_executing(context.frame):
        _close(context, failed=True)


def _close(context: ForwardContext, failed: bool) -> None:
    _current.set(context.outer)
    graph.call, graph.layer = None if context.outer is None else context.outer.call, None
    try:
        context.finish(failed)
    finally:
        with switching:
            if context in _open:
                _open.remove(context)
            _switch_off_idle()


# Transformers reads the name of the attention implementation in every layer. So a model is switched
# back only when no forward of it runs in any thread; until then, no other one begins. A thread that
# switches a model over holds the lock.
switching = threading.Condition()
_open: list[ForwardContext] = []
_closing: list[tuple[EnabledState, Callable[[], None]]] = []


def switch_off_after_forwards(enabled: EnabledState, switch_off: Callable[[], None]) -> None:
    """Switch a model back once no forward of it runs.

    Waits for those of other threads; but not inside of one, which would wait for itself.
    """
    with switching:
        if enabled.on and not _is_closing(enabled):
            _closing.append((enabled, switch_off))
        _switch_off_idle()
        mine = threading.get_ident()
        inside = any(x.enabled is enabled and x.thread == mine for x in _open)
        while not inside and _is_closing(enabled):
            _wait()


def _begin(context: ForwardContext) -> bool:
    """Note that a forward begins; return whether its model is enabled."""
    with switching:
        while context.outer is None and _is_closing(context.enabled):
            _wait()
        if context.enabled.on:
            _open.append(context)
        return context.enabled.on


def _is_closing(enabled: EnabledState) -> bool:
    return any(closing is enabled for closing, _ in _closing)


def _wait() -> None:
    switching.wait(0.1)  # No hook reports a forward that an interrupt has ended.
    _switch_off_idle()


def _switch_off_idle() -> None:
    """Switch back the models that are to be disabled and have no forward left."""
    if not _closing:
        return
    _open[:] = [x for x in _open if _is_executing(x.frame)]
    for closing in list(_closing):
        enabled, switch_off = closing
        if not any(x.enabled is enabled for x in _open):
            _closing.remove(closing)
            switch_off()
            switching.notify_all()


def _frame_of_forward() -> FrameType | None:
    """Return the frame in which torch runs the hooks and the forward of a module."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_name != "_call_impl":
        frame = frame.f_back
    return frame


def _is_executing(frame: FrameType | None) -> bool:
    """Return whether any thread executes a frame, and clear the local variables of one that ended.

    Walking the stacks of other threads would tell too, but CPython 3.11 crashes now and then where
    such a thread continues meanwhile.
    """
    if frame is None:
        return False
    try:
        frame.clear()
    except RuntimeError:  # What clear() is documented to raise for a frame that is executing.
        return True
    return False
