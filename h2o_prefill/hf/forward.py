"""What is known of the running forward of an enabled model."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import CacheLayerMixin

from h2o_prefill import ops
from h2o_prefill.config import PrefillConfig
from h2o_prefill.functional import NO_RECALL, RecallLists
from h2o_prefill.hf.cache import KeepsTokenIds, length_of
from h2o_prefill.hf.kinds import NAME, EnabledState, LeftOutMask
from h2o_prefill.hf.layer import ChunkedPrefillLayer, StaticPrefillLayer, running

CHANGED = "the attention implementation was changed after enable(), so nothing is sparse"
NO_IDS = "recall is off: the token ids are unknown (inputs_embeds, or tokens cached elsewhere)"
MASK = (
    "the attention mask is not plain causal (packed sequences, or a mask of your own or of the "
    "model)"
)
PADDED = "attention_mask hides tokens (padding); prefill prompts of different lengths one by one"

GRAPH_BREAK = (
    "an enabled model is one graph with a StaticCache alone; compile the model, or its forward "
    "before it is enabled"
)

# The running forwards of all threads.
_contexts: list[ForwardContext] = []


@dataclass
class StaticCall:
    """What the layers of a static cache, perhaps in a compiled graph, cannot determine."""

    config: PrefillConfig
    settings: str
    previous: str  # the attention implementation that the model had before
    # Windows whose masks our mask function has left out before the forward; None: plain causal.
    left_out: frozenset[int | None]
    # Of the cache, int64 [2] on the CPU, as `ops.prefill_attention_` takes it.
    position: Tensor
    recall: RecallLists = NO_RECALL  # what `lexical_recall` returned for the call
    # Layers of a graph, and why they had to be dense; None if they were as the settings say.
    outcomes: list[tuple[int, str | None]] = field(default_factory=list)


@dataclass
class Prompt:
    """What is known of a prompt before the forwards of its calls."""

    enabled: EnabledState
    length: int  # tokens after all of its calls
    # Those that our mask function has left out: `generate` makes masks of static caches.
    masks: list[LeftOutMask] = field(default_factory=list)


class ForwardContext:
    """One forward of an enabled model, shared by the models nested in it."""

    def __init__(self, enabled: EnabledState, model: nn.Module) -> None:
        self.enabled = enabled
        self.model = model  # the outermost
        self.modules: list[nn.Module] = []
        self.outer: ForwardContext | None = getattr(running, "context", None)
        self.is_traced = is_traced()
        self.tokens: Tensor | None = None  # input_ids [B, Tq], else inputs_embeds [B, Tq, hidden]
        self.input_ids: Tensor | None = None
        self.new = 0  # tokens of this forward, if they are known
        self.cache: Any = None
        self.candidates = 0  # tokens at the end that assisted decoding verifies
        self.begun = 0  # tokens in the cache before the forward, if it counts them
        self.was_sparse = False  # whether the state of some layer of the cache has changed
        self.call: StaticCall | None = None
        # Masks that our mask function has left out, in this forward or before it.
        self.masks: list[LeftOutMask] = []
        self.mask_reason = MASK  # why masks that were made are not plain causal
        if (prompt := prompt_of(enabled)) is not None:
            self.masks, prompt.masks = prompt.masks, []
        self._shared: dict[Any, Any] = {}
        names = (str(config._attn_implementation) for config, _ in enabled.previous)
        if not any(name.startswith(NAME) for name in names):
            enabled.report(CHANGED)

    def add_arguments(self, arguments: dict[str, Any], cache: Any) -> None:
        """Take over what a model was called with; the outermost model that names a thing wins."""
        input_ids, logits = arguments.get("input_ids"), arguments.get("logits_to_keep")
        dynamic = cache is not None and not getattr(cache, "is_compileable", False)
        if dynamic and isinstance(logits, int) and logits > 1:
            # Assisted decoding asks for the logits of the last token and of every candidate.
            self.candidates = logits - 1
        if self.input_ids is None and isinstance(input_ids, Tensor) and input_ids.ndim == 2:
            self.input_ids = input_ids
        if self.tokens is None:
            self.tokens = arguments.get("inputs_embeds") if input_ids is None else input_ids
            self.new = 0 if self.tokens is None else self.tokens.shape[1]
        if self.cache is None and cache is not None:
            if isinstance(cache, KeepsTokenIds):
                cache.check_usable()
            self.cache, self.begun = cache, length_of(cache) or 0

    @functools.cached_property
    def config(self) -> PrefillConfig:
        """The settings of the prompt that this forward is of, with `min_prefill` resolved."""
        config = self.enabled.config
        if not config.is_auto:
            return config
        before = getattr(self.cache, "min_prefill", None) if self.begun else None
        if before is not None and (before == config.chunk_size or self.new == 1):
            return config.with_min_prefill(before)
        length, prompt = self.begun + self.new, prompt_of(self.enabled)
        length = length if prompt is None else max(length, prompt.length)
        return self.enabled.resolve(self.model, length)

    def left_out(self, window: int | None, query: Tensor, keys: int) -> LeftOutMask | None:
        """Return what no mask means for a call of a layer, None if it was not left out by us."""
        rows, queries = len(query), query.shape[2]
        other = None
        for mask in self.masks:
            # Some models let only the last queries through their last layers.
            same = mask.spans is None or (queries, rows) == (mask.queries, len(mask.spans))
            if mask.keys == keys and mask.queries >= queries and same:
                if mask.window == window:
                    return mask
                # Models may give a layer with a window the mask of the others.
                if other is None and not mask.in_window:
                    other = mask
        return other

    def recall_lists(self, batch: int, past: int, new: int, device: torch.device) -> RecallLists:
        """Return what `lexical_recall` returns for a call, made once for all layers of a device."""
        if self.config.recall == 0:
            return NO_RECALL

        def make() -> RecallLists:
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
        lists = self.shared(key, make)
        moved = lambda: tuple(None if x is None else x.to(device) for x in lists)  # noqa: E731
        return self.shared((*key, device), moved)

    def candidates_in(self, past: int, new: int) -> int:
        """Return how many tokens at the end of a call assisted decoding verifies."""
        # A first call that asks for all logits verifies no candidates.
        return self.candidates if self.candidates + 1 < new or past > 0 else 0

    def layer_for(self, module: nn.Module, key: Tensor) -> tuple[Any, bool]:
        """Return the cache layer of a call, and whether it is ours, with the keys of the call."""
        layers = getattr(self.cache, "layers", None) or ()
        index = getattr(module, "layer_idx", None)
        layer = layers[index] if isinstance(index, int) and 0 <= index < len(layers) else None
        if getattr(layer, "keys", None) is not key:
            # Recurrent models have several cache layers for one module.
            layer = next((x for x in layers if getattr(x, "keys", None) is key), layer)
        if isinstance(layer, StaticPrefillLayer):
            # A static cache that only a part of the model was called with keeps no state.
            return layer, layer.keys is key and self.call is not None
        # Multi-head latent attention caches latents, one for each key.
        ours = isinstance(layer, ChunkedPrefillLayer) and layer.get_seq_length() == key.shape[2]
        return layer, ours

    def shared(self, key: Any, make: Callable[[], Any]) -> Any:
        """Return what was made for this key, once per forward."""
        if key not in self._shared:
            self._shared[key] = make()
        return self._shared[key]

    def finish(self, failed: bool) -> None:
        """Note the ids of a good forward with its cache, or that it has failed."""
        cache = self.cache
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


def is_traced() -> bool:
    """Return whether torch.export or torch.jit.trace runs the model."""
    return torch.jit.is_tracing() or torch.compiler.is_exporting()


def call_in_graph() -> StaticCall | None:
    """Return the forward that torch.compile is tracing, None if attention must break its graph."""
    return getattr(running, "call", None) if torch.compiler.is_dynamo_compiling() else None


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
        running.call = running.layer = None
    context.modules.append(model)
    return context


def close_context(context: ForwardContext, failed: bool) -> bool:
    """Leave the innermost model of a context; return whether that ended the forward."""
    context.modules.pop()
    if context.modules:
        return False
    running.context = context.outer
    _contexts.remove(context)
    running.call, running.layer = None if context.outer is None else context.outer.call, None
    context.finish(failed)
    return True


def check_idle(enabled: EnabledState, name: str) -> None:
    """Raise RuntimeError if a forward of a model runs, in this thread or in another."""
    # Transformers reads the name of the attention implementation in every layer.
    if any(context.enabled is enabled for context in list(_contexts)):
        raise RuntimeError(f"{name} must not be enabled or disabled during one of its forwards")


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
