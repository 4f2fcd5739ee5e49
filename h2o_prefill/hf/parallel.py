"""Models that are spread over several processes.

Transformers gives each process a stage, some of the layers (`DistributedConfig(pp_size=...)`), or
some of the heads of every layer (`tp_size`).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers.cache_utils import CacheLayerMixin, DynamicCache

from h2o_prefill.hf.cache import ChunkedPrefillCache, adopt, cache_argument

OTHER_CACHE = (
    "cache must be one that this model has filled as a stage of a pipeline while it was enabled, "
    "or an empty DynamicCache: the layers of another one would count positions from 0; got"
)


class StageCache(ChunkedPrefillCache):
    """The cache of a stage: a layer that is here counts its tokens, not the first one."""

    span: range  # the layers of this process
    coming: Tensor | None = None  # ids [B, n] of a forward that gets hidden states instead

    @classmethod
    def of(cls, cache: Any, span: range) -> StageCache:
        """Make an empty cache the cache of a stage, in place; ValueError for another one."""
        if isinstance(cache, cls) and cache.span == span:
            return cache
        used = any(layer.is_initialized for layer in getattr(cache, "layers", ()))
        if used or type(cache) not in (DynamicCache, ChunkedPrefillCache):
            raise ValueError(f"{OTHER_CACHE} {type(cache).__name__}{' with tokens' * used}")
        adopt(cache, cls)
        cache.span = span
        return cache

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return super().get_seq_length(self._here(layer_idx))

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return super().get_mask_sizes(query_length, self._here(layer_idx))

    def token_ids_with(self, new: Tensor | None) -> Tensor | None:
        return super().token_ids_with(self.coming if new is None else new)

    def _here(self, number: int) -> int:
        """Return the number of a layer of this process, of the same kind if there is one."""
        if number in self.span or number >= len(self.layers):
            return number
        kind = type(self.layers[number])
        inside = [one for one in self.span if one < len(self.layers)]
        counting = [one for one in inside if isinstance(self.layers[one], CacheLayerMixin)]
        alike = (one for one in counting if type(self.layers[one]) is kind)
        return next(alike, counting[0] if counting else number)


class Stage(nn.Module):
    """The layers of this process as a function of one call of a prompt with ids [B, T], or None.

    It takes ids [B, n] or embeddings on the first rank, on the others the hidden states of the one
    before. It returns hidden states, on the last rank logits.
    """

    def __init__(self, model: Any, cache: StageCache, ids: Tensor | None) -> None:
        super().__init__()
        self.model, self.cache, self.ids = model, cache, ids
        self.group, self.is_last = model._pp_stage.pp_group, model._pp_stage.pp_is_last_stage
        self.begin = cache.get_seq_length()

    def forward(self, tokens: Tensor) -> Tensor:
        name = "inputs_embeds" if tokens.ndim == 3 else "input_ids"
        past = self.cache.get_seq_length()
        end = past + tokens.shape[1]
        call: dict[str, Any] = {name: tokens, "use_cache": True}
        if self.ids is not None:
            self.cache.coming = self.ids[:, past - self.begin : end - self.begin]
        try:
            if not self.is_last:
                base = getattr(self.model, self.model.base_model_prefix)
                return base(**call, **cache_argument(base, self.cache)).last_hidden_state
            # Not the model's own `forward`, which would talk to the other stages.
            options = {"logits_to_keep": 1, **cache_argument(self.model, self.cache)}
            return type(self.model).forward(self.model, **call, **options).logits
        finally:
            self.cache.coming = None


def layers_here(model: nn.Module) -> range | None:
    """Return the layers of a stage, None for a whole model; ValueError for a stage without any."""
    parts: Any = getattr(model, "_pp_stage", None)
    if parts is None:
        return None
    config: Any = model.config
    count = config.get_text_config(decoder=True).num_hidden_layers
    span = range(*parts.layer_range_for_rank(parts.pp_rank, count))
    if count < parts.pp_size:
        raise ValueError(
            f"a model of {count} layers has at most {count} stages, got {parts.pp_size}"
        )
    return span


def new_cache(model: Any) -> ChunkedPrefillCache:
    """Return an empty cache of a model, or of a stage of one."""
    cache, span = ChunkedPrefillCache(config=model.config), layers_here(model)
    return cache if span is None else StageCache.of(cache, span)
