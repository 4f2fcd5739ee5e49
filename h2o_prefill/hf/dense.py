"""Dense attention: the attention function that the model had before, with the mask that it takes.

On CPU, plain causal calls that would go to transformers' sdpa function go to `ops.dense_attention`
instead. It gives the same but for rounding, and is faster for one row of grouped heads, which
PyTorch copies, in 16-bit, where it has no fast path for one row or for float16, and with many rows.
Layers with a sliding window, whatever their function, go to an operator that visits no key outside
of it.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import causal_mask_function, sdpa_mask
from transformers.masking_utils import sliding_window_causal_mask_function as sliding_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from h2o_prefill import ops
from h2o_prefill.hf.call import Attended, Call
from h2o_prefill.hf.kinds import NAME, LeftOutMask, enabled_of
from h2o_prefill.hf.layer import StaticPrefillLayer
from h2o_prefill.hf.rules import INDEX_ARGUMENTS, needs_gradients, wants_weights

# What transformers' sdpa function drops, or refuses; the model's own eager function honours it.
EAGER_ONLY = ("s_aux", "softcap")


def attend_densely(call: Call) -> Attended:
    """Attend to every key that the mask shows, as the model would without this library."""
    if call.graph is not None:
        return _attend_in_graph(call)
    left_out = call.left_out
    if left_out is not None and not left_out.is_plain and suits_our_operators(call):
        return _attend_as(left_out, call), None
    name = _implementation(call)
    function = eager_function(call.module) if name == "eager" else ALL_ATTENTION_FUNCTIONS[name]
    plain = function is sdpa_attention_forward and _sdpa_reads_as_causal(call)
    if plain and suits_our_operators(call):
        query, key, value = in_autocast_dtype(call.query, *call.used)
        return ops.dense_attention(query, key, value, call.scaling).transpose(1, 2), None
    mask = _mask(call, name)
    if name in ("eager", "sdpa") and call.has(*INDEX_ARGUMENTS):
        mask = _hide_other_keys(call, mask)
    return call_function(function, call, *call.used, mask)


def call_function(
    function: Callable[..., Any], call: Call, key: Tensor, value: Tensor, mask: Any
) -> Attended:
    options = {"dropout": call.dropout, "scaling": call.scaling, **call.kwargs}
    bias = options.get("position_bias")
    if isinstance(bias, Tensor) and bias.shape[-1] == call.key.shape[2]:
        options["position_bias"] = bias[..., : key.shape[2]]  # without unused slots, as the keys
    return function(call.module, call.query, key, value, mask, **options)


def eager_function(module: nn.Module) -> Callable[..., Any]:
    """Return the `eager_attention_forward` of the file that defines an attention class."""
    for base in type(module).__mro__:
        function = getattr(sys.modules.get(base.__module__), "eager_attention_forward", None)
        if function is not None:
            return function
    raise ValueError(f"{type(module).__name__} has no eager_attention_forward to fall back to")


def _implementation(call: Call) -> str:
    hf_config = call.hf_config
    # Without a context the forward began before the model was enabled, or it is another one's.
    enabled = enabled_of(hf_config) if call.context is None else call.context.enabled
    name = None if enabled is None else enabled.previous_of(hf_config)
    if name is None or name == NAME:
        name = _default_implementation(call.module)
    if name == "sdpa" and call.has("position_bias"):
        parameters = inspect.signature(ALL_ATTENTION_FUNCTIONS[name]).parameters
        name = name if "position_bias" in parameters else "eager"  # Some versions drop it.
    if name not in ("sdpa", "eager") and isinstance(call.mask, Tensor) and call.mask.ndim == 4:
        # A mask made outside of the forward has sdpa's format, which no other implementation takes.
        name = "sdpa"
    return "eager" if name == "sdpa" and call.has(*EAGER_ONLY) else name


def _default_implementation(module: nn.Module) -> str:
    """Return sdpa if the models of a layer's file support it, as transformers chooses."""
    things = vars(sys.modules[type(module).__module__]).values()
    models = (x for x in things if isinstance(x, type) and issubclass(x, PreTrainedModel))
    return "sdpa" if any(model._supports_sdpa for model in models) else "eager"


def _attend_as(mask: LeftOutMask, call: Call) -> Tensor:
    """Attend as a mask that was left out says: of a window, of a padded batch, or of both."""
    query, key, value = in_autocast_dtype(call.query, call.key, call.value)
    if mask.spans is None:
        return _attend_in_window(mask, call, query, key, value).transpose(1, 2)
    out = query.new_zeros(*query.shape[:2], query.shape[2], value.shape[3]).transpose(1, 2)
    # The operators take rows of one length, so those that lie in the same place go together.
    for first, end in dict.fromkeys(mask.spans):
        rows = [row for row, span in enumerate(mask.spans) if span == (first, end)]
        index: Any = rows
        if rows[-1] - rows[0] == len(rows) - 1:  # neighbours: a slice copies nothing
            index = slice(rows[0], rows[-1] + 1)
        if first < end:
            q, k, v = (x[:, :, first:end][index] for x in (query, key, value))
            out[index, first:end] = _attend_in_window(mask, call, q, k, v).transpose(1, 2)
    return out


def _attend_in_window(
    mask: LeftOutMask, call: Call, query: Tensor, key: Tensor, value: Tensor
) -> Tensor:
    size, options = mask.window, call.logit_options
    if size is None:
        return ops.dense_attention(query, key, value, *options)
    if query.shape[2] == 1 or size >= key.shape[2]:
        # All rows see the same first key: plain causal attention, which may be PyTorch's.
        return ops.dense_attention(query, key[:, :, -size:], value[:, :, -size:], *options)
    return ops.sliding_window_attention(query, key, value, size, *options)[0]


def _sdpa_reads_as_causal(call: Call) -> bool:
    """Return whether sdpa's function would take the call for plain causal."""
    # Without a mask that function lets one query see every key, and is causal from the first key on
    # for more; after a history that means something else, unless we have left out the mask.
    left_out = call.left_out
    if left_out is not None:
        return left_out.is_plain
    return call.mask is None and (call.new == 1 or call.past == 0)


def suits_our_operators(call: Call) -> bool:
    """Return whether our operators do what a causal call asks for, on CPU, without gradients."""
    return (
        call.query.device.type == "cpu"
        and call.is_causal
        and call.dropout == 0
        and not call.has("position_bias", "cache", *INDEX_ARGUMENTS)
        and not wants_weights(call)  # the function warns of that
        and not needs_gradients(call)
        # PyTorch broadcasts a batch of one.
        and call.query.shape[0] == call.key.shape[0]
    )


def _mask(call: Call, name: str) -> Any:
    """Return the mask that an implementation takes, made if it was left out."""
    mask, left_out, device = call.mask, call.left_out, call.query.device

    def make() -> Any:
        assert left_out is not None
        made = left_out.make(
            q_length=call.new,
            q_offset=left_out.end - call.new,
            kv_length=left_out.tokens,
            allow_is_causal_skip=name != "eager",  # That takes none for no mask at all.
        )
        return made.to(device) if hasattr(made, "to") else made

    if left_out is not None:
        mask = call.shared((left_out, call.new, name, device), make)
    if name == "eager" and isinstance(mask, Tensor):
        dtype = call.query.dtype
        # The mask itself is in the value, so that its id cannot be taken by another.
        return call.shared((id(mask), dtype), lambda: (mask, as_additive(mask, dtype)))[1]
    return mask


def as_additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a mask that is added to the logits; one that is already added stays as it is."""
    if mask.dtype != torch.bool:
        return mask
    zero = torch.zeros((), dtype=dtype, device=mask.device)
    return torch.where(mask, zero, torch.finfo(dtype).min)


def _hide_other_keys(call: Call, mask: Any) -> Any:
    """Return a mask of eager or sdpa attention that shows the keys alone that the model chose."""
    # Models that choose their own keys hide the others themselves, but only for those two names.
    # For every other they pass the choice to the attention function and leave the mask alone.
    blocks = call.kwargs.get("block_indices")
    if blocks is not None:
        positions = call.kwargs.get("position_ids")
        if positions is None:
            positions = torch.arange(call.past, call.key.shape[2], device=call.query.device)
        positions = positions.expand(call.query.shape[0], -1)
        indexer: Any = call.module.indexer
        sizes = (call.key.shape[2], call.query.dtype, call.query.device)
        return indexer.build_block_mask(blocks, mask, *sizes, positions)
    chosen = call.kwargs["indices"].long()
    shape = (*chosen.shape[:2], call.key.shape[2])
    hidden = torch.ones(shape, dtype=torch.bool, device=chosen.device).scatter(-1, chosen, False)
    if mask is None:
        mask = torch.ones(shape[1:], dtype=torch.bool, device=chosen.device).tril(call.past)
    if mask.dtype == torch.bool:
        return mask & ~hidden[:, None]
    return mask.masked_fill(hidden[:, None], torch.finfo(call.query.dtype).min)


def _attend_in_graph(call: Call) -> Attended:
    """Attend as the model did before; an implementation that has its own masks becomes sdpa."""
    # A window is known only of a mask that could be left out.
    window = None if call.left_out is None else call.left_out.window
    # One row sees every key of its window: PyTorch's attention needs no packed ones.
    if window is not None and call.new > 1 and suits_our_operators(call):
        out, _ = ops.sliding_window_attention(
            call.query, call.key, call.value, window, *call.logit_options
        )
        return out.transpose(1, 2), None
    mask = mask_in_graph(call, window)
    assert call.graph is not None
    if call.graph.previous == "eager" or call.has(*EAGER_ONLY):
        function, mask = eager_function(call.module), as_additive(mask, call.query.dtype)
    else:
        function = ALL_ATTENTION_FUNCTIONS["sdpa"]
    return call_function(function, call, call.key, call.value, mask)


def mask_in_graph(call: Call, window: int | None = None) -> Tensor:
    """Return the mask of a call, made if it was left out: plain causal, or of a window."""
    if call.mask is not None:
        return call.mask
    past: Any = call.key.shape[2] - call.new
    if isinstance(call.updated, StaticPrefillLayer):
        past = call.updated.cumulative_length - call.new
    mask = sdpa_mask(
        call.query.shape[0],
        call.new,
        call.key.shape[2],
        past,
        mask_function=causal_mask_function if window is None else sliding_mask(window),
        allow_is_causal_skip=False,
        device=call.query.device,
    )
    assert mask is not None
    return mask


def in_autocast_dtype(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Cast as autocast does for attention: RoPE leaves queries in fp32 and values in 16 bits."""
    kind = tensors[0].device.type
    if not torch.is_autocast_enabled(kind):
        return tensors
    return tuple(x.to(torch.get_autocast_dtype(kind)) for x in tensors)
