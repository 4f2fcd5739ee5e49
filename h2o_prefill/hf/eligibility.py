"""When an attention call is prefilled sparsely: the decision table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from h2o_prefill.config import PrefillConfig
from h2o_prefill.hf.layer import ChunkedPrefillLayer
from h2o_prefill.hf.run import Run, is_traced

PACKING_ARGUMENTS = ("cu_seq_lens_q", "cu_seq_lens_k", "cu_seqlens", "seq_idx")
INDEX_ARGUMENTS = ("indices", "block_indices")


@dataclass(frozen=True)
class Call:
    """One call of the attention function.

    Attributes
    ----------
    module : nn.Module
        The attention layer.
    query, key, value : Tensor
        [B, Hq, Tq, D], [B, Hkv, Tkv, D], [B, Hkv, Tkv, Dv].
    mask : object
        What the mask function, or the user, made.
    dropout : float
        Dropout probability.
    kwargs : dict
        Everything else that the model passed.
    config : PrefillConfig
        Of the enabled model.
    run : Run or None
        The forward that this call belongs to; None if the model was never enabled.
    """

    module: nn.Module
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Any
    dropout: float
    kwargs: dict[str, Any]
    config: PrefillConfig
    run: Run | None

    @property
    def new(self) -> int:
        """Tokens of this call, Tq."""
        return self.query.shape[2]

    @property
    def past(self) -> int:
        """Tokens before this call."""
        return self.key.shape[2] - self.query.shape[2]

    @property
    def candidates(self) -> int:
        """Tokens at the end of this call that assisted decoding verifies: always densely."""
        given = 0 if self.run is None else self.run.candidates
        # Whoever asks for the logits of a whole first call verifies nothing.
        return given if given + 1 < self.new or self.past > 0 else 0

    @property
    def prompt_rows(self) -> int:
        """Tokens of this call before the candidates."""
        return self.new - self.candidates

    @property
    def cache_layer(self) -> ChunkedPrefillLayer | None:
        """The layer of a `ChunkedPrefillCache`, if the caller passed one."""
        layer = None if self.run is None else self.run.layer_of(self.module)
        return layer if isinstance(layer, ChunkedPrefillLayer) else None

    def given(self, *names: str) -> bool:
        """Return whether the model passed one of these arguments."""
        return any(self.kwargs.get(name) is not None for name in names)


@dataclass(frozen=True)
class Rule:
    """A reason for dense attention.

    Attributes
    ----------
    applies : callable
        Tells whether a call is one of these.
    reason : str, or callable that makes it
        What the user reads. Empty for calls that are dense by design: nobody is told of those.
    """

    applies: Callable[[Call], bool]
    reason: str | Callable[[Call], str] = ""


def is_cross_attention(module: nn.Module, path: str = "") -> bool:
    """Return whether a layer attends to the keys of something else, such as an image.

    Parameters
    ----------
    module : nn.Module
        The attention layer.
    path : str
        Its qualified name in the model, which tells where its class serves both kinds.
    """
    parts = [type(module).__name__, *path.split(".")]
    return bool(getattr(module, "is_cross_attention", False)) or any(
        "cross" in part.lower() or part in ("encoder_attn", "EncDecAttention") for part in parts
    )


def is_causal(module: nn.Module, kwargs: dict[str, Any]) -> bool:
    """Return whether a layer is causal: the argument if given, else what module and config say."""
    if is_cross_attention(module):
        return False
    given = kwargs.get("is_causal")
    if given is not None:
        return bool(given)
    config = getattr(module, "config", None)
    return bool(getattr(module, "is_causal", True)) and bool(getattr(config, "is_causal", True))


def layer_type(module: nn.Module) -> str:
    """Return the kind of an attention layer, in the words of a config's `layer_types`.

    Llama 4 marks its chunked layers nowhere else; Mistral and Phi 3 have no `layer_types` and one
    window for all layers.
    """
    config = getattr(module, "config", None)
    types = getattr(config, "layer_types", None)
    index = getattr(module, "layer_idx", None)
    if types is not None and isinstance(index, int) and index < len(types):
        kind = str(types[index])
    elif getattr(config, "sliding_window", None) is not None:
        kind = "sliding_attention"
    elif getattr(config, "attention_chunk_size", None) is not None:
        kind = "chunked_attention"
    else:
        kind = "full_attention"
    if kind == "full_attention" and getattr(module, "sliding_window", None) is not None:
        return "sliding_attention"
    return kind


def can_be_sparse(module: nn.Module) -> bool:
    """Return whether an attention layer is of the kind that is ever prefilled sparsely."""
    return is_causal(module, {}) and layer_type(module) == "full_attention"


def _is_short(call: Call) -> bool:
    if not call.config.is_long_call(call.past, call.prompt_rows):
        return True
    # One chunk without history is plain causal attention; only a cache that goes on needs its
    # scores.
    one_chunk = call.prompt_rows <= call.config.chunk_size
    return call.past == 0 and one_chunk and call.cache_layer is None


def needs_gradients(call: Call) -> bool:
    """Return whether a gradient of the result may be asked for."""
    tensors = (call.query, call.key, call.value)
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)


def wants_weights(call: Call) -> bool:
    """Return whether the user asked for the attention weights, `output_attentions`."""
    wanted = call.kwargs.get("output_attentions")
    return bool(getattr(_config(call), "output_attentions", False) if wanted is None else wanted)


def _shares_keys(call: Call) -> bool:
    if getattr(call.module, "is_kv_shared_layer", False):
        return True
    shared = getattr(_config(call), "num_kv_shared_layers", None) or 0
    layers = getattr(_config(call), "num_hidden_layers", None) or 0
    return shared > 0 and getattr(call.module, "layer_idx", 0) >= layers - shared


def _is_static(call: Call) -> bool:
    layer = None if call.run is None else call.run.layer_of(call.module)
    return bool(getattr(layer, "is_compileable", False))


def _is_plain(call: Call) -> bool:
    run = call.run
    return run is None or run.plain == (call.query.shape[2], call.key.shape[2])


def _mask_reason(call: Call) -> str:
    made = None if call.run is None else call.run.mask_reason
    return made or "a custom attention mask is not supported"


def _config(call: Call) -> Any:
    return getattr(call.module, "config", None)


NOT_ENABLED = "the model is not enabled: h2o_prefill.enable(model) makes its prefill sparse"

TRACED = "the model is being exported or traced, which would keep this call's decisions for all"

RULES = (
    Rule(lambda call: is_traced(), TRACED),
    Rule(_is_short),
    Rule(lambda call: not is_causal(call.module, call.kwargs)),
    Rule(lambda call: layer_type(call.module) != "full_attention"),
    Rule(lambda call: call.given("sliding_window")),
    Rule(lambda call: getattr(call.module, "layer_idx", None) in call.config.dense_layers),
    Rule(
        lambda call: not call.config.is_sparse_call(call.past, call.prompt_rows),
        "the memory set is empty (K + L + H = 0); block_diagonal=True attends inside chunks alone",
    ),
    Rule(
        lambda call: not isinstance(getattr(call.module, "layer_idx", None), int),
        "the attention layers do not know their index",
    ),
    Rule(
        lambda call: bool(getattr(_config(call), "is_encoder_decoder", False)),
        "encoder-decoder models are not supported",
    ),
    Rule(lambda call: call.module.training, "the model is in training mode; call model.eval()"),
    Rule(needs_gradients, "gradients are on; run under torch.no_grad() or torch.inference_mode()"),
    Rule(lambda call: call.dropout > 0, "attention dropout is not supported"),
    Rule(wants_weights, "output_attentions is not supported"),
    Rule(lambda call: call.given("cache"), "paged caches are not supported"),
    Rule(
        lambda call: getattr(_config(call), "kv_lora_rank", None) is not None,
        "multi-head latent attention (MLA) is not supported",
    ),
    Rule(_shares_keys, "layers that share the keys of another layer are not supported"),
    Rule(lambda call: call.given("s_aux"), "attention sinks (s_aux) are not supported"),
    Rule(lambda call: call.given("softcap"), "soft-capped logits (softcap) are not supported"),
    Rule(lambda call: call.given("position_bias"), "position_bias is not supported"),
    Rule(lambda call: call.given(*PACKING_ARGUMENTS), "packed sequences are not supported"),
    Rule(lambda call: call.given(*INDEX_ARGUMENTS), "the model chooses its own keys already"),
    Rule(_is_static, "static caches are not supported"),
    Rule(lambda call: call.mask is not None, _mask_reason),
    Rule(
        lambda call: not _is_plain(call),
        "the model makes its own masks, so that attention is not known to be causal",
    ),
    Rule(
        lambda call: call.past > 0 and call.cache_layer is None,
        "a long call goes on from a plain cache; pass past_key_values=ChunkedPrefillCache(...)",
    ),
    Rule(lambda call: call.run is None, NOT_ENABLED),
)


def dense_reason(call: Call) -> str | None:
    """Return why a call is dense: None if it is sparse, empty if it is dense by design."""
    for rule in RULES:
        if rule.applies(call):
            return rule.reason(call) if callable(rule.reason) else rule.reason
    return None
