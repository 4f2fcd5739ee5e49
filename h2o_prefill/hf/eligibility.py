"""When an attention call is prefilled sparsely: the decision table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from h2o_prefill.config import PrefillConfig
from h2o_prefill.hf.cache import ChunkedPrefillCache
from h2o_prefill.hf.layer import ChunkedPrefillLayer
from h2o_prefill.hf.padding import CONTINUES, Padding
from h2o_prefill.hf.run import Run, is_traced

PACKING_ARGUMENTS = ("cu_seq_lens_q", "cu_seq_lens_k", "cu_seqlens", "seq_idx")
INDEX_ARGUMENTS = ("indices", "block_indices")

# Kinds of layers that are always dense, as the user reads of them.
_IN_WORDS = {
    "sliding_attention": "sliding",
    "hybrid_sliding": "sliding",
    "reference_sliding_attention": "sliding",
    "chunked_attention": "chunked",
    "indexed_attention": "of keys that the model chooses itself",
    "minimax_m3_sparse": "of keys that the model chooses itself",
    "compressed_sparse_attention": "to compressed keys",
    "heavily_compressed_attention": "to compressed keys",
}


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
        if self.run is None:
            return None
        layer = self.run.layer_of(self.module)
        if getattr(layer, "keys", None) is not self.key:
            # Recurrent models have several cache layers for one module.
            layers = getattr(self.run.cache, "layers", None) or ()
            holders = (other for other in layers if getattr(other, "keys", None) is self.key)
            layer = next(holders, layer)
        return layer if isinstance(layer, ChunkedPrefillLayer) else None

    @property
    def padding(self) -> Padding | None:
        """Where the rows lie, if the mask that was asked for is that of a padded batch.

        Other attention of the same forward, such as that to the states of an encoder, may be of the
        same size.
        """
        padding = None if self.run is None else self.run.padding
        sizes = (self.query.shape[0], self.new, self.key.shape[2])
        if padding is None or sizes != (len(padding.spans), padding.length, padding.length):
            return None
        return padding if is_causal(self.module, {}) else None

    @property
    def sinks(self) -> Tensor | None:
        """Attention sinks [Hq], one more logit of each query head's softmax."""
        return self.kwargs.get("s_aux")

    @property
    def softcap(self) -> float:
        """The bound of the logits; 0: none."""
        return self.kwargs.get("softcap") or 0.0

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


def is_attention(module: nn.Module) -> bool:
    """Return whether a module is an attention layer, or a part of one."""
    name = type(module).__name__
    return any(word in name for word in ("Attention", "Attn", "MLA"))


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
    if types is not None and isinstance(index, int) and 0 <= index < len(types):
        kind = str(types[index])
        if kind == "hybrid":  # Attention of the usual kind, beside a recurrence.
            kind = "full_attention"
    elif getattr(config, "sliding_window", None) is not None:
        kind = "sliding_attention"
    elif getattr(config, "attention_chunk_size", None) is not None:
        kind = "chunked_attention"
    else:
        kind = "full_attention"
    # Exaone 4 gives its window to every layer, and a flag.
    windowed = getattr(module, "is_sliding", True) and getattr(module, "sliding_window", None)
    if kind == "full_attention" and windowed:
        return "sliding_attention"
    return kind


def can_be_sparse(module: nn.Module) -> bool:
    """Return whether an attention layer is of the kind that is ever prefilled sparsely."""
    return is_causal(module, {}) and layer_type(module) == "full_attention"


def why_none_sparse(layers: list[nn.Module], encoder_decoder: bool = False) -> str | None:
    """Return why no layer of a model can be sparse; None if one can.

    Parameters
    ----------
    layers : list of nn.Module
        Its attention layers.
    encoder_decoder : bool
        Whether it has an encoder and a decoder.
    """
    if any(can_be_sparse(layer) for layer in layers):
        return None
    # Each once, in the order of the layers.
    return " or ".join(dict.fromkeys(_in_words(layer, encoder_decoder) for layer in layers))


def _in_words(module: nn.Module, encoder_decoder: bool) -> str:
    if not is_causal(module, {}):
        return "that of an encoder-decoder" if encoder_decoder else "not causal"
    return _IN_WORDS.get(layer_type(module), layer_type(module))


def _is_short(call: Call) -> bool:
    padding = call.padding
    if padding is not None:
        return not padding.has_long_row(call.config, call.prompt_rows)
    if not call.config.is_long_call(call.past, call.prompt_rows):
        return True
    # One chunk without history is plain causal attention; only a cache that goes on needs its
    # scores.
    one_chunk = call.prompt_rows <= call.config.chunk_size
    return call.past == 0 and one_chunk and call.cache_layer is None


def needs_gradients(call: Call) -> bool:
    """Return whether a gradient of the result may be asked for."""
    tensors = (call.query, call.key, call.value, call.sinks)
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def wants_weights(call: Call) -> bool:
    """Return whether the user asked for the attention weights, `output_attentions`."""
    wanted = call.kwargs.get("output_attentions")
    return bool(getattr(_config(call), "output_attentions", False) if wanted is None else wanted)


def _changes_values(call: Call) -> bool:
    layer = call.cache_layer
    return layer is not None and layer.keys is call.key and layer.values is not call.value


def _is_repeated(call: Call) -> bool:
    state = None if call.cache_layer is None else call.cache_layer.state
    return state is not None and state.length > call.past


def _shares_keys(call: Call) -> bool:
    if getattr(call.module, "is_kv_shared_layer", False):
        return True
    shared = getattr(_config(call), "num_kv_shared_layers", None) or 0
    layers = getattr(_config(call), "num_hidden_layers", None) or 0
    return shared > 0 and getattr(call.module, "layer_idx", 0) >= layers - shared


def _is_encoder_decoder(call: Call) -> bool:
    config = _config(call)
    # A decoder with a config of its own, as that of T5Gemma, names the width of the encoder.
    states = getattr(config, "cross_attention_hidden_size", None)
    return bool(getattr(config, "is_encoder_decoder", False)) or states is not None


def _is_static(call: Call) -> bool:
    layer = None if call.run is None else call.run.layer_of(call.module)
    return bool(getattr(layer, "is_compileable", False))


def _is_plain(call: Call) -> bool:
    run = call.run
    plain = run is None or run.plain == (call.query.shape[2], call.key.shape[2])
    return plain or call.padding is not None


def _goes_on_from_padding(call: Call) -> bool:
    return call.past > 0 and call.cache_layer is not None and call.cache_layer.padded


def _mask_reason(call: Call) -> str:
    made = None if call.run is None else call.run.mask_reason
    return made or "a custom attention mask is not supported"


def _config(call: Call) -> Any:
    return getattr(call.module, "config", None)


def _knows_index(module: nn.Module) -> bool:
    index = getattr(module, "layer_idx", None)
    # Zamba 2 shares one module between layers and numbers it -1.
    return isinstance(index, int) and index >= 0


def _history_reason(call: Call) -> str:
    if isinstance(getattr(call.run, "cache", None), ChunkedPrefillCache):
        return "the cache keeps no state for layers of this kind, such as hybrid ones"
    return "a long call goes on from a plain cache; pass past_key_values=ChunkedPrefillCache(...)"


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
        lambda call: not _knows_index(call.module),
        "the attention layers do not know their index",
    ),
    Rule(
        _is_encoder_decoder,
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
    Rule(
        _changes_values, "the model attends to other values than it caches, such as halves of them"
    ),
    Rule(
        _is_repeated, "layers that attend several times to the same cached keys are not supported"
    ),
    Rule(lambda call: call.given("position_bias"), "position_bias is not supported"),
    Rule(lambda call: call.given(*PACKING_ARGUMENTS), "packed sequences are not supported"),
    Rule(lambda call: call.given(*INDEX_ARGUMENTS), "the model chooses its own keys already"),
    Rule(_is_static, "static caches are not supported"),
    Rule(lambda call: call.mask is not None, _mask_reason),
    Rule(
        lambda call: not _is_plain(call),
        "the model makes its own masks, so that attention is not known to be causal",
    ),
    Rule(lambda call: call.past > 0 and call.cache_layer is None, _history_reason),
    Rule(_goes_on_from_padding, CONTINUES),
    Rule(lambda call: call.run is None, NOT_ENABLED),
)


def dense_reason(call: Call) -> str | None:
    """Return why a call is dense: None if it is sparse, empty if it is dense by design."""
    for rule in RULES:
        if rule.applies(call):
            return rule.reason(call) if callable(rule.reason) else rule.reason
    return None
