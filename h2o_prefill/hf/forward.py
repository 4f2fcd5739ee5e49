"""An enabled model, and what is known of its running forward."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import CacheLayerMixin

from h2o_prefill import ops
from h2o_prefill._warn import warn
from h2o_prefill.config import PrefillConfig
from h2o_prefill.fingerprint import digest
from h2o_prefill.functional import NO_RECALL, RecallLists
from h2o_prefill.hf.cache import KeepsTokenIds, length_of
from h2o_prefill.hf.kinds import NAME, LayerForm, LeftOutMask, form_of, switched
from h2o_prefill.hf.layer import graph
from h2o_prefill.presets import PRESETS

CHANGED = "the attention implementation was changed after enable(), so nothing is sparse"
NO_IDS = "recall is off: the token ids are unknown (inputs_embeds, or tokens cached elsewhere)"
TOO_LONG = "the model was made for texts of up to {} tokens (max_position_embeddings), got {}"

# `context`: the running forward of this thread. `prompt`: the prompt that a function that calls the
# model, such as `generate`, is working on.
running = threading.local()
# The running forwards of all threads.
_contexts: list[ForwardContext] = []


@dataclass
class LayerCalls:
    """What the calls of one layer were."""

    sparse_calls: int = 0
    sparse_rows: int = 0  # query tokens of these calls, counted once a batch row
    dense_calls: int = 0
    dense_rows: int = 0
    reason: str = ""  # why the last long call was dense; empty if none was


@dataclass
class EnabledState:
    """The state of one enabled model."""

    config: PrefillConfig
    strict: bool = False  # raise where a call would be dense with a warning
    # The attention implementation that each config of the model had before.
    previous: list[tuple[Any, str | None]] = field(default_factory=list)
    reported: set[str] = field(default_factory=set)  # reasons already warned of
    # Configs whose self-attention layers are causal by their masks alone.
    causal_by_mask: list[Any] = field(default_factory=list)
    only_windows: bool = False  # whether every layer that can be sparse has a window
    # Whether layers with a window need no mask where it holds all keys.
    leaves_window_masks: bool = False
    windows: set[int | None] = field(default_factory=set)  # of layers that need no mask at all
    calls: dict[Any, LayerCalls] = field(default_factory=dict)  # by the number of the layer
    errors: dict[int, Tensor] = field(default_factory=dict)  # of the last prompt, [B, Hkv, 4]
    forms: dict[nn.Module, LayerForm] = field(default_factory=dict)  # of its layers
    on: bool = False  # whether the model is enabled
    token_text: Tensor | None = None  # what lexical recall knows of the vocabulary
    longest_text: int | None = None  # tokens that the model was made for, None if it does not say

    def form_of(self, module: nn.Module) -> LayerForm:
        """Return what an attention layer is, looked at once."""
        if module not in self.forms:
            self.forms[module] = form_of(module)
        return self.forms[module]

    def count(self, layer: Any, rows: int, reason: str | None) -> None:
        """Count a call of a layer; `reason` is None if it was sparse."""
        calls = self.calls.setdefault(layer, LayerCalls())
        if reason is None:
            calls.sparse_calls += 1
            calls.sparse_rows += rows
        else:
            calls.dense_calls += 1
            calls.dense_rows += rows
            calls.reason = reason or calls.reason

    def note_errors(self, layer: int | None, errors: Tensor | None) -> None:
        """Keep the errors of a layer, [B, Hkv, 4], for reports."""
        if layer is not None and errors is not None:
            self.errors[layer] = errors

    def like(self, model: Any) -> Tensor:
        """Return an empty tensor of the model's dtype on its device."""
        return torch.empty(0, device=model.device, dtype=model.dtype)

    def shortest_sparse_prompt(self, model: Any) -> int:
        """Return from how many tokens on a prompt is sparse if `min_prefill` is open."""
        return self.config.shortest_sparse_prompt(self.like(model))

    def resolve(self, model: Any, tokens: int) -> PrefillConfig:
        """Return the settings of a prompt of so many tokens, with `min_prefill` resolved."""
        return self.config.resolved(self.shortest_sparse_prompt(model), tokens)

    @functools.cached_property
    def tokenizer(self) -> str:
        """What tells the text of the tokens from others, as fingerprints have it."""
        return "" if self.token_text is None else digest(self.token_text)

    def owns(self, hf_config: Any) -> bool:
        return any(config is hf_config for config, _ in self.previous)

    def previous_of(self, hf_config: Any) -> str | None:
        """Return the attention implementation that a config had before, None if unknown."""
        return next((name for config, name in self.previous if config is hf_config), None)

    def report(self, reason: str) -> None:
        """Warn of a reason once, or raise if strict."""
        if self.strict:
            raise NotImplementedError(f"h2o_prefill: {reason}")
        if reason not in self.reported:
            self.reported.add(reason)
            warn(f"h2o_prefill: {reason}")

    def mark(self, on: bool) -> None:
        """Note that the configs of this model are switched over, or as they were."""
        self.on = on
        for config, _ in self.previous:
            if on:
                switched[id(config)] = self
            else:
                switched.pop(id(config), None)


# For a model whose user set attn_implementation="h2o_prefill" and enabled nothing: it is dense.
DEFAULT_STATE = EnabledState(PRESETS["h2o"])


@dataclass
class StaticCall:
    """What the layers of a static cache, perhaps in a compiled graph, cannot determine."""

    config: PrefillConfig
    settings: str
    previous: str | None  # the attention implementation that the model had before
    # Windows whose masks our mask function has left out before the forward; None: plain causal.
    left_out: frozenset[int | None]
    # Of the cache, int64 [2] on the CPU, as `ops.prefill_attention_` takes it.
    position: Tensor
    recall: RecallLists = NO_RECALL  # what `lexical_recall` found for the call
    # Layers of a graph, and why they had to be dense; None if they were as the settings say.
    outcomes: list[tuple[int, str | None]] = field(default_factory=list)


def call_in_graph() -> StaticCall | None:
    """Return the forward that torch.compile is tracing, None if attention must break its graph."""
    return getattr(graph, "call", None) if torch.compiler.is_dynamo_compiling() else None


class ForwardContext:
    """One forward of an enabled model, shared by the models nested in it."""

    def __init__(self, enabled: EnabledState, model: nn.Module) -> None:
        self.enabled = enabled
        self.model = model  # the outermost
        self.modules: list[nn.Module] = []
        self.outer: ForwardContext | None = getattr(running, "context", None)
        self.thread = threading.current_thread()
        self.tokens: Tensor | None = None  # input_ids [B, Tq], else inputs_embeds [B, Tq, hidden]
        self.input_ids: Tensor | None = None
        self.cache: Any = None
        self.candidates = 0  # tokens at the end that assisted decoding verifies
        self.begun = 0  # tokens in the cache before the forward
        self.was_sparse = False  # whether the state of some layer of the cache has changed
        self.call: StaticCall | None = None
        # Masks that our mask function has left out, in this forward or before it.
        self.masks: list[LeftOutMask] = []
        self.mask_reason: str | None = None  # why a mask was not plain causal
        prompt = prompt_of(enabled)
        if prompt is not None:
            self.masks, prompt.masks = prompt.masks, []
        self._shared: dict[Any, Any] = {}

    def add_arguments(self, arguments: dict[str, Any]) -> None:
        """Take over what a model was called with; the outermost model that names a thing wins."""
        input_ids, logits = arguments.get("input_ids"), arguments.get("logits_to_keep")
        cache = arguments["cache"]
        dynamic = cache is not None and not getattr(cache, "is_compileable", False)
        if dynamic and isinstance(logits, int) and logits > 1:
            # Assisted decoding asks for the logits of the last token and of every candidate.
            self.candidates = logits - 1
        if self.input_ids is None and isinstance(input_ids, Tensor) and input_ids.ndim == 2:
            self.input_ids = input_ids
        if self.tokens is None:
            self.tokens = arguments.get("inputs_embeds") if input_ids is None else input_ids
        if self.cache is None and cache is not None:
            if isinstance(cache, KeepsTokenIds):
                cache.check_usable()
            self.cache = cache
            self.begun = self.past

    def check(self) -> None:
        """Warn of another attention implementation, and of a text too long for the model."""
        names = (str(config._attn_implementation) for config, _ in self.enabled.previous)
        if not any(name.startswith(NAME) for name in names):
            self.enabled.report(CHANGED)
        length, longest = self.prompt_length, self.enabled.longest_text
        if longest is not None and length > longest and TOO_LONG not in self.enabled.reported:
            self.enabled.reported.add(TOO_LONG)
            warn("h2o_prefill: " + TOO_LONG.format(longest, length))

    @property
    def prompt_length(self) -> int:
        """Tokens of the prompt with all of its calls, as far as is known."""
        prompt = prompt_of(self.enabled)
        return max(self.begun + self.new, 0 if prompt is None else prompt.length)

    @functools.cached_property
    def config(self) -> PrefillConfig:
        """The settings of the prompt that this forward is of, with `min_prefill` resolved."""
        config = self.enabled.config
        if not config.is_auto:
            return config
        before = getattr(self.cache, "min_prefill", None) if self.begun else None
        if before is not None and (before == config.chunk_size or self.new == 1):
            return config.with_min_prefill(before)
        return self.enabled.resolve(self.model, self.prompt_length)

    @property
    def new(self) -> int:
        """Tokens of this forward; 0 if they are unknown."""
        return 0 if self.tokens is None else self.tokens.shape[1]

    @property
    def past(self) -> int:
        """Tokens in the cache; 0 if it does not count them."""
        return 0 if self.cache is None else length_of(self.cache) or 0

    def left_out(self, window: int | None, query: Tensor, keys: int) -> LeftOutMask | None:
        """Return what no mask means for a call of a layer, None if it was not left out by us."""

        def fits(mask: LeftOutMask) -> bool:
            # Some models let only the last queries through their last layers.
            queries, rows = query.shape[2], len(query)
            same = mask.spans is None or (queries, rows) == (mask.queries, len(mask.spans))
            return mask.keys == keys and mask.queries >= queries and same

        masks = [mask for mask in self.masks if fits(mask)]
        alike = (mask for mask in masks if mask.window == window)
        # Models may give a layer with a window the mask of the others.
        return next(alike, next((mask for mask in masks if not mask.in_window), None))

    def recall_lists(self, batch: int, past: int, new: int, device: torch.device) -> RecallLists:
        """Return what `lexical_recall` finds for a call, made once for all layers of a device."""
        if self.config.recall == 0:
            return NO_RECALL

        def find() -> RecallLists:
            ids, cache = self.input_ids, self.cache
            if isinstance(cache, KeepsTokenIds):
                ids = cache.token_ids_with(ids)
            if ids is None or ids.shape != (batch, past + new):
                self.enabled.report(NO_IDS)
                return NO_RECALL
            end = past + new - self.candidates_in(past, new)
            prompt = ids[:, :end].to("cpu", torch.int64)
            return ops.lexical_recall(prompt, past, self.config, self.enabled.token_text)

        # Some models have sequences of several lengths in a forward, such as bytes and patches.
        key = "recall", past, new
        lists = self.shared(key, find)
        moved = lambda: tuple(None if x is None else x.to(device) for x in lists)  # noqa: E731
        return self.shared((*key, device), moved)

    def candidates_in(self, past: int, new: int) -> int:
        """Return how many tokens at the end of a call assisted decoding verifies."""
        # A first call that asks for all logits verifies no candidates.
        return self.candidates if self.candidates + 1 < new or past > 0 else 0

    def layer_of(self, module: nn.Module) -> Any:
        """Return the cache layer of an attention module, None if the caller passed no cache."""
        layers = getattr(self.cache, "layers", None) or ()
        index = getattr(module, "layer_idx", None)
        return layers[index] if isinstance(index, int) and 0 <= index < len(layers) else None

    def shared(self, key: Any, make: Callable[[], Any]) -> Any:
        """Return what was made for this key, once per forward."""
        if key not in self._shared:
            self._shared[key] = make()
        return self._shared[key]

    def finish(self, failed: bool) -> None:
        """Note the ids of a good forward with its cache, or that it has failed."""
        cache = self.cache
        if not failed and not is_traced():
            self._report_short_calls()
        if not isinstance(cache, KeepsTokenIds):
            return
        if failed:
            layers: list[Any] = [x for x in cache.layers if getattr(x, "is_initialized", True)]
            # Layers of a recurrence do not count tokens.
            lengths = [x.get_seq_length() if isinstance(x, CacheLayerMixin) else -1 for x in layers]
            cache.failed = any(length != self.begun for length in lengths)
            return
        cache.append_token_ids(self.input_ids)
        if self.was_sparse or not self.begun:
            cache.settings = self.config.to_string()
            cache.tokenizer = self.enabled.tokenizer
        if self.enabled.config.is_auto:
            cache.min_prefill = self.config.sparse_from

    def _report_short_calls(self) -> None:
        """Report a prompt whose calls were all too short to be sparse."""
        least, new, cache = self.config.sparse_from, self.new, self.cache
        if not isinstance(cache, KeepsTokenIds) or self.input_ids is None or new < 2:
            return
        # A call that was long enough ends the count for good.
        counts = new < least and cache.short_tokens >= 0
        cache.short_tokens = cache.short_tokens + new if counts else -1
        if cache.short_tokens >= 2 * least:
            self.enabled.report(
                f"a prompt came in calls of fewer than {least} tokens, which are dense; make them "
                "longer (prefill_chunk_size), or min_prefill smaller"
            )


def is_traced() -> bool:
    """Return whether torch.export or torch.jit.trace runs the model."""
    return torch.jit.is_tracing() or torch.compiler.is_exporting()


def current_context(hf_config: Any) -> ForwardContext | None:
    """Return the context of the enabled model that owns a Hugging Face config, None if none is."""
    context: ForwardContext | None = getattr(running, "context", None)
    return context if context is not None and context.enabled.owns(hf_config) else None


def open_context(enabled: EnabledState, model: nn.Module) -> ForwardContext:
    """Return the context that a forward of a model belongs to; open one if there is none."""
    context: ForwardContext | None = getattr(running, "context", None)
    # A hook inside of a model may call the model: that is a forward of its own.
    again = context is not None and any(module is model for module in context.modules)
    if context is None or again or context.enabled is not enabled:
        context = running.context = ForwardContext(enabled, model)
        _contexts.append(context)
        graph.call = graph.layer = None
    context.modules.append(model)
    return context


def close_context(context: ForwardContext, failed: bool) -> bool:
    """Leave the innermost model of a context; return whether that ended the forward."""
    context.modules.pop()
    if context.modules:
        return False
    running.context = context.outer
    _contexts.remove(context)
    graph.call, graph.layer = None if context.outer is None else context.outer.call, None
    context.finish(failed)
    return True


def check_idle(enabled: EnabledState, name: str) -> None:
    """Raise RuntimeError if a forward of a model runs, in this thread or in another.

    Transformers reads the name of the attention implementation in every layer, so a model is
    switched over between forwards.
    """
    mine = threading.current_thread()
    for context in [x for x in _contexts if x.enabled is enabled]:
        where = "this thread" if context.thread is mine else "another thread"
        raise RuntimeError(
            f"{name} must not be enabled or disabled during its forward, which runs in {where}"
        )


@dataclass
class Prompt:
    """What is known of a prompt before the forwards of its calls."""

    enabled: EnabledState
    length: int  # tokens after all of its calls
    # Those that our mask function has left out: `generate` makes masks of static caches.
    masks: list[LeftOutMask] = field(default_factory=list)


def prompt_of(enabled: Any) -> Prompt | None:
    """Return the prompt of an enabled model that is under way in this thread, if one is."""
    prompt: Prompt | None = getattr(running, "prompt", None)
    return prompt if prompt is not None and prompt.enabled is enabled else None


@contextlib.contextmanager
def announce(enabled: EnabledState, length: int) -> Iterator[None]:
    """Say how long a prompt of an enabled model is after its calls in this block."""
    outer, same = getattr(running, "prompt", None), prompt_of(enabled)
    running.prompt = Prompt(enabled, length if same is None else max(length, same.length))
    try:
        yield
    finally:
        running.prompt = outer
