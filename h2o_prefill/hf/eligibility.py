"""When an attention call is prefilled sparsely: the decision table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from h2o_prefill.config import LAYER_FIELDS, PrefillConfig
from h2o_prefill.hf.layer import ChunkedPrefillLayer
from h2o_prefill.hf.padding import CONTINUES, Padding
from h2o_prefill.hf.run import Run, is_traced
from h2o_prefill.hf.static import StaticPrefillLayer
from h2o_prefill.hf.token_history import KeepsTokenIds

PACKING_ARGUMENTS = ("cu_seq_lens_q", "cu_seq_lens_k", "cu_seqlens", "seq_idx")
INDEX_ARGUMENTS = ("indices", "block_indices")

# Kinds of layers that attend as full ones do to a prompt that their window holds.
_WINDOWED = ("sliding_attention", "hybrid_sliding", "chunked_attention")

# Kinds of layers that are never sparse, or but for such prompts, as the user reads of them.
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
    def total(self) -> int:
        """Tokens up to the last of this call; behind them are the free places of a static cache."""
        length = self.key.shape[2]
        if self.run is None or self.mask is not None or not is_causal(self.module, self.kwargs):
            return length
        return self.run.filled.get(length, length)

    @property
    def past(self) -> int:
        """Tokens before this call."""
        return self.total - self.new

    @property
    def held(self) -> tuple[Tensor, Tensor]:
        """Key and value without free places."""
        total = self.total
        if total == self.key.shape[2]:
            return self.key, self.value
        return self.key[:, :, :total], self.value[:, :, :total]

    @property
    def candidates(self) -> int:
        """Tokens at the end of this call that assisted decoding verifies: always densely."""
        return 0 if self.run is None else self.run.candidates_in(self.past, self.new)

    @property
    def prompt_rows(self) -> int:
        """Tokens of this call before the candidates."""
        return self.new - self.candidates

    @property
    def layer(self) -> int | None:
        """The number of the layer. None if it has none: Zamba's share a module, numbered -1."""
        index = getattr(self.module, "layer_idx", None)
        return index if isinstance(index, int) and index >= 0 else None

    @property
    def cache_layer(self) -> ChunkedPrefillLayer | StaticPrefillLayer | None:
        """The layer of a cache of ours, if the caller passed one and it holds the keys.

        Multi-head latent attention caches latents, one for each key.
        """
        if self.run is None:
            return None
        layer = self.run.layer_of(self.module)
        if getattr(layer, "keys", None) is not self.key:
            # Recurrent models have several cache layers for one module.
            layers = getattr(self.run.cache, "layers", None) or ()
            holders = (other for other in layers if getattr(other, "keys", None) is self.key)
            layer = next(holders, layer)
        if isinstance(layer, StaticPrefillLayer):
            return layer if layer.keys is self.key else None
        if not isinstance(layer, ChunkedPrefillLayer):
            return None
        return layer if layer.get_seq_length() == self.key.shape[2] else None

    @property
    def padding(self) -> Padding | None:
        """Where the rows lie, if the mask that was asked for is that of a padded batch.

        Other attention of the same forward, such as that to the states of an encoder, may be of the
        same size.
        """
        padding = None if self.run is None else self.run.paddings.get(self.new)
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


def window_of(module: nn.Module) -> int | None:
    """Return how many keys a query of a sliding or chunked layer sees, None for other kinds."""
    kind = layer_type(module)
    if kind not in _WINDOWED:
        return None
    name = "attention_chunk_size" if kind == "chunked_attention" else "sliding_window"
    config = getattr(module, "config", None)
    window = getattr(module, name, None) or getattr(config, name, None)
    return window if isinstance(window, int) else None


def attends_to_tokens_alone(module: nn.Module) -> bool:
    """Return whether a layer is of a kind that adds nothing to the mask that it is given.

    DeepSeek V4 adds what hides compressed keys to that of its window, if there is one.
    """
    return layer_type(module) in ("full_attention", "linear_attention", *_WINDOWED)


def chooses_keys(module: nn.Module) -> bool:
    """Return whether a layer reads its mask to choose keys, as those of DSA and Doge do."""
    return getattr(module, "indexer", None) is not None or hasattr(module, "prepare_dynamic_mask")


def can_be_sparse(module: nn.Module, config: PrefillConfig) -> bool:
    """Return whether some calls of an attention layer are sparse, by what kind it is of."""
    if not is_causal(module, {}):
        return False
    window = window_of(module)
    if window is not None:
        return window > config.chunk_size and config.is_long_call(0, window)
    return layer_type(module) == "full_attention"


def why_none_sparse(
    layers: list[nn.Module], config: PrefillConfig, encoder_decoder: bool = False
) -> str | None:
    """Return why no layer of a model can be sparse; None if one can.

    Parameters
    ----------
    layers : list of nn.Module
        Its attention layers.
    config : PrefillConfig
        How to prefill.
    encoder_decoder : bool
        Whether it has an encoder and a decoder.
    """
    if any(can_be_sparse(layer, config) for layer in layers):
        return None
    # Each once, in the order of the layers.
    return " or ".join(dict.fromkeys(_in_words(layer, encoder_decoder) for layer in layers))


def _in_words(module: nn.Module, encoder_decoder: bool) -> str:
    if not is_causal(module, {}):
        return "that of an encoder-decoder" if encoder_decoder else "not causal"
    return _IN_WORDS.get(layer_type(module), layer_type(module))


def _is_windowed(call: Call) -> bool:
    """Return whether a layer is of another kind than full attention, and attends otherwise."""
    kind = layer_type(call.module)
    if kind == "full_attention" and not call.given("sliding_window"):
        return False
    if kind not in ("full_attention", *_WINDOWED) or call.run is None:
        return True
    given = call.kwargs.get("sliding_window")
    return not call.run.windows_show_all or (given is not None and given < call.key.shape[2])


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
    layer = call.cache_layer
    if isinstance(layer, StaticPrefillLayer):
        return layer.added is None
    return layer is not None and layer.state is not None and layer.state.length > call.past


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


def _is_static_elsewhere(call: Call) -> bool:
    layer = None if call.run is None else call.run.layer_of(call.module)
    if isinstance(layer, StaticPrefillLayer):
        # A cache that only a part of the model was given.
        return call.run is None or call.run.call is None
    return bool(getattr(layer, "is_compileable", False))


def _is_plain(call: Call) -> bool:
    run = call.run
    plain = run is None or (call.new, call.total) in run.plain
    return plain or call.padding is not None


def _goes_on_from_padding(call: Call) -> bool:
    return call.past > 0 and call.cache_layer is not None and call.cache_layer.padded


def _mask_reason(call: Call) -> str:
    made = None if call.run is None else call.run.mask_reason
    return made or "a custom attention mask is not supported"


def _window_reason(call: Call) -> str:
    """Return why a windowed layer is dense: by design, unless no layer of the model is sparse."""
    run = call.run
    if run is None or not run.settings.only_windows:
        return ""
    if getattr(run.layer_of(call.module), "is_compileable", False):
        return "sliding or chunked layers of static caches are not supported"
    if run.windows_show_all is None:
        return OWN_MASKS if call.mask is None else _mask_reason(call)
    return "every layer has a sliding window, or chunks, that the prompt does not fit into"


def _config(call: Call) -> Any:
    return getattr(call.module, "config", None)


def _history_reason(call: Call) -> str:
    if window_of(call.module) is not None:
        return "a long call goes on in sliding or chunked layers, which keep no state between calls"
    if isinstance(getattr(call.run, "cache", None), KeepsTokenIds):
        return "the cache keeps no state for layers of this kind"
    return "a long call goes on from a cache that was not filled by this model while it was enabled"


STATIC = (
    "static caches that were filled while the model was not enabled, and those of other classes "
    "than StaticCache, are not supported"
)

OWN_MASKS = "the model makes its own masks, so that attention is not known to be causal"

NOT_ENABLED = "the model is not enabled: h2o_prefill.enable(model) makes its prefill sparse"

OTHER_VALUES = "the model attends to other values than it caches, such as halves of them"

TRACED = "the model is being exported or traced, which would keep this call's decisions for all"

# These look only at the layer and at what the model passed: they hold in a compiled graph too.
LAYER_RULES = (
    Rule(lambda call: not is_causal(call.module, call.kwargs)),
    Rule(_is_windowed, _window_reason),
    Rule(
        lambda call: not isinstance(getattr(call.module, "layer_idx", None), int),
        "the attention layers do not know their index",
    ),
    Rule(
        lambda call: call.layer is None and any(getattr(call.config, x) for x in LAYER_FIELDS),
        "layers share a module, and settings by layer cannot tell them apart",
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
    Rule(_shares_keys, "layers that share the keys of another layer are not supported"),
    Rule(lambda call: call.given("position_bias"), "position_bias is not supported"),
    Rule(lambda call: call.given(*PACKING_ARGUMENTS), "packed sequences are not supported"),
    Rule(lambda call: call.given(*INDEX_ARGUMENTS), "the model chooses its own keys already"),
)

RULES = (
    Rule(lambda call: is_traced(), TRACED),
    Rule(_is_short),
    Rule(lambda call: call.layer in call.config.dense_layers),
    Rule(
        lambda call: not call.config.is_sparse_call(call.past, call.prompt_rows),
        "the memory set is empty (K + L + H = 0); block_diagonal=True attends inside chunks alone",
    ),
    *LAYER_RULES,
    Rule(_changes_values, OTHER_VALUES),
    Rule(
        _is_repeated, "layers that attend several times to the same cached keys are not supported"
    ),
    Rule(_is_static_elsewhere, STATIC),
    Rule(lambda call: call.mask is not None, _mask_reason),
    Rule(lambda call: not _is_plain(call), OWN_MASKS),
    Rule(lambda call: call.past > 0 and call.cache_layer is None, _history_reason),
    Rule(_goes_on_from_padding, CONTINUES),
    Rule(lambda call: call.run is None, NOT_ENABLED),
)


def dense_reason(call: Call, rules: tuple[Rule, ...] = RULES) -> str | None:
    """Return why a call is dense: None if it is sparse, empty if it is dense by design."""
    for rule in rules:
        if rule.applies(call):
            return rule.reason(call) if callable(rule.reason) else rule.reason
    return None
