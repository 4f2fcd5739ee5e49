"""Hugging Face caches that let several calls of one prompt continue sparsely."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import (
    Cache,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    StaticCache,
    StaticLayer,
)

from h2o_prefill.config import PrefillConfig
from h2o_prefill.fingerprint import differing_word, fingerprint
from h2o_prefill.hf.kinds import enabled_of
from h2o_prefill.hf.layer import ChunkedPrefillLayer, StaticPrefillLayer, prefill_layer_for
from h2o_prefill.session import Session
from h2o_prefill.state import LayerState

# What models call their cache: from transformers 5.24 on, and before.
CACHE_NAMES = ("cache", "past_key_values")


def cache_among(arguments: dict[str, Any]) -> Any:
    """Return the cache among the arguments of a model by name, None if there is none."""
    return next((arguments[x] for x in CACHE_NAMES if arguments.get(x) is not None), None)


def argument_names(model: nn.Module) -> list[str]:
    """Return what a model can be called with; a `PeftModel` passes on what the one inside takes."""
    models = (model, *(x for x in model.modules() if isinstance(x, PreTrainedModel)))
    names = [list(inspect.signature(x.forward).parameters) for x in models]
    return next((x for x in names if not set(CACHE_NAMES).isdisjoint(x)), names[0])


def cache_argument(model: nn.Module, cache: Any) -> dict[str, Any]:
    """Return a cache as the keyword argument that a model takes it by."""
    names = argument_names(model)
    return {next(name for name in CACHE_NAMES if name in names): cache}


def last_logits_only(model: nn.Module) -> dict[str, int]:
    """Return the argument that makes a model compute the logits of the last token only, if any."""
    return {"logits_to_keep": 1} if "logits_to_keep" in argument_names(model) else {}


class KeepsTokenIds(Cache):
    """The token ids that caches of this library hold beside the layers, for lexical recall."""

    token_ids: Tensor | None = None  # int64 [B, T]; None if there are none, or some are unknown
    # The settings that built the state, as a text; None for a new cache.
    settings: str | None = None
    tokenizer: str = ""  # what tells the text of its tokens from others (`digest`)
    # What an open `min_prefill` was resolved to: once the prompt is sparse, the chunk size.
    min_prefill: int | None = None
    # Whether a forward raised half way and left layers of different lengths or states.
    failed: bool = False

    def check_usable(self) -> None:
        """Refuse a cache that a failed forward has left half updated."""
        if self.failed:
            raise RuntimeError(
                "h2o_prefill: a forward has failed and left the cache half updated; reset() it, "
                "crop it to a length that checkpoint_before() gives, or pass another one"
            )

    def token_ids_with(self, new: Tensor | None) -> Tensor | None:
        """Return the ids that are known of the cached tokens and of `new` [B, Tq]."""
        pieces = [x for x in (self.token_ids, new) if x is not None]
        return torch.cat(pieces, dim=1) if pieces else None

    def append_token_ids(self, new: Tensor | None) -> None:
        """Keep the ids of the tokens that a forward has just added."""
        ids = self.token_ids_with(new)
        known = ids is not None and ids.shape[1] == length_of(self)
        self.token_ids = ids.long() if ids is not None and known else None

    def reset(self) -> None:
        super().reset()
        self.token_ids, self.settings, self.failed = None, None, False

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last tokens, from keys, values, states and ids."""
        super().crop(tokens_to_remove)
        length = self.get_seq_length()
        self._map_ids(lambda ids: ids[:, :length] if length else None)

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        super().reorder_cache(beam_idx)
        self._map_ids(lambda ids: ids.index_select(0, beam_idx.to(ids.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        self._map_ids(lambda ids: ids.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)
        self._map_ids(lambda ids: ids[indices.to(ids.device), ...])

    def _map_ids(self, change: Callable[[Tensor], Tensor | None]) -> None:
        if self.token_ids is not None:
            self.token_ids = change(self.token_ids)


def length_of(cache: Cache) -> int | None:
    """Return the number of cached tokens, None if no layer counts them: all are recurrent."""
    try:
        return int(cache.get_seq_length())
    except ValueError:
        return None


class ChunkedPrefillCache(KeepsTokenIds, DynamicCache):
    """A `DynamicCache` whose full-attention layers keep the state of sparse prefill.

    With it, calls of one prompt in multiples of the chunk size give what one call gives, if the
    first is long enough to be sparse or the length of the prompt is known (`min_prefill`). So
    `generate(prefill_chunk_size=...)`, a shared prefix (`copy.deepcopy`) and chat turns stay
    sparse. It holds the token ids as well, which lexical recall searches.

    An enabled model uses it by default: if the caller passes no cache, and instead of an empty
    `DynamicCache`.

    Parameters
    ----------
    config : PretrainedConfig, optional
        The model's; without it every layer counts as full attention.
    checkpoints : bool
        Keep what `crop` needs to be exact at every multiple of the chunk size S: memory sets and
        their scores, 2 to 5 % of the keys and values in bfloat16.
    **kwargs
        Passed on to `DynamicCache`, as `offloading=True`.
    """

    def __init__(self, config: Any = None, checkpoints: bool = False, **kwargs: Any) -> None:
        super().__init__(config=config, **kwargs)
        self._replace_layers(checkpoints)

    def save(self, path: str | os.PathLike[str], model: Any) -> None:
        """Write everything that the prompt needs to go on into a session file.

        It has keys, values, states and token ids, the settings that built the states, and what
        tells the model from others. While it is written, keys and values are in memory twice.

        Parameters
        ----------
        path : path
            The file, written whole or not at all; one that exists is replaced.
        model : PreTrainedModel
            The model that filled the cache, with the weights and active adapters of then.

        Raises
        ------
        ValueError
            If the cache is empty, was not filled by an enabled model, or has layers other than full
            attention and sliding windows.
        OSError
            If the file cannot be written.
        """
        self.check_usable()
        if self.settings is None:
            raise ValueError("cache must have been filled by an enabled model")
        states = [_session_state(layer) for layer in self.layers]
        lengths = {layer.get_seq_length() for layer in list[Any](self.layers)}
        if len(lengths) != 1 or 0 in lengths:
            raise ValueError("cache must hold the same tokens in every layer, and at least one")
        settings = PrefillConfig.parse(self.settings).native.to_fields()
        words = fingerprint(model, self.tokenizer)
        Session(settings, words, self.token_ids, states).save(path)

    @classmethod
    def load(cls, path: str | os.PathLike[str], model: Any) -> ChunkedPrefillCache:
        """Read a session file: the prompt goes on as if it had never been saved.

        Parameters
        ----------
        path : path
            What `save` wrote. Nothing in it is executed.
        model : PreTrainedModel
            The model that the prompt was prefilled with: its weights and active adapters. If it is
            enabled, then with the settings and tokenizer of the file.

        Raises
        ------
        FileNotFoundError
            If there is no such file.
        ValueError
            If it is no session file, is damaged, or is of another model or other settings, in one
            line that names what differs.
        """
        session, cache = Session.load(path), cls(config=model.config)
        try:
            config = cache._check_fits(session, model)
            ids = session.token_ids
            length = max(state.length for state in session.layers) if ids is None else ids.shape[1]
            for layer, state in zip(list[Any](cache.layers), session.layers, strict=True):
                _fill(layer, state, length, model.device)
        except ValueError as error:
            raise ValueError(f"session {str(path)!r} cannot be used: {error}") from error
        cache.settings, cache.min_prefill = config.to_string(), config.sparse_from
        cache.token_ids = None if ids is None else ids.to(model.device)
        return cache

    def _check_fits(self, session: Session, model: Any) -> PrefillConfig:
        """Return the settings of a session; ValueError if it is of another model or settings."""
        enabled, config = enabled_of(model.config), PrefillConfig.parse(session.settings)
        words = dict(word.split("=", 1) for word in session.fingerprint.split())
        # Without an enabled model any tokenizer fits.
        self.tokenizer = words.get("tokenizer", "") if enabled is None else enabled.tokenizer
        if other := differing_word(fingerprint(model, self.tokenizer), session.fingerprint):
            raise ValueError(f"session must be of this model: {other}")
        if enabled is not None:
            wanted = enabled.config
            auto = wanted.is_auto or config.is_auto
            if (config.with_min_prefill(wanted.min_prefill) if auto else config) != wanted:
                raise ValueError(
                    f"session must have the settings {wanted.to_string()}, got {config.to_string()}"
                )
        return config

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last tokens, from keys, values, states and ids.

        After a forward that failed half way, layers hold different numbers of tokens: all are cut
        to the length that the first one comes to.
        """
        if not self.failed:
            super().crop(tokens_to_remove)
            return
        length = self.get_seq_length() - abs(tokens_to_remove)
        if length <= 0:
            self.reset()
            return
        self.failed = self.checkpoint_before(length) != length
        for layer in list[Any](self.layers):
            layer.crop(min(0, length - layer.get_seq_length()))
        self._map_ids(lambda ids: ids[:, :length])

    def checkpoint_before(self, length: int) -> int:
        """Return the last length, up to this one, to which `crop` is exact, 0 if there is none.

        Cropped to it (`cache.crop(checkpoint - cache.get_seq_length())` from transformers 5.24 on),
        the cache goes on, to the bit, as one that was never longer. Without `checkpoints`, or with
        layers of other kinds than full attention, it is the end of the prefill alone.
        """
        total = length_of(self) or 0
        exact, before, layers = min(length, total), -1, list[Any](self.layers)
        if not all(type(layer) is ChunkedPrefillLayer for layer in layers):
            return exact if exact == total else 0
        while exact != before:
            before = exact
            for layer in layers:
                exact = min(exact, layer.get_seq_length())
                exact = layer.synchronized().checkpoint_before(exact)
        return exact

    def _replace_layers(self, checkpoints: bool = False) -> None:
        self.layers[:] = [prefill_layer_for(layer, checkpoints) for layer in self.layers]
        if self.layer_class_to_replicate is DynamicLayer:
            made: Any = functools.partial(ChunkedPrefillLayer, checkpoints)
            self.layer_class_to_replicate = made


def _session_state(layer: Any) -> Any:
    """Return the state of a layer as session files have it; ValueError for kinds without one."""
    if type(layer) is ChunkedPrefillLayer:
        return layer.synchronized()
    if type(layer) is not DynamicSlidingWindowLayer or layer.sliding_window < 2:
        raise ValueError(
            "cache must have full attention or sliding windows alone, got a layer of "
            f"{type(layer).__name__}"
        )
    state = LayerState()
    if layer.get_seq_length():
        rows, pair = layer.sliding_window - 1, (layer.keys, layer.values)
        state.set_keys(*(x[:, :, -rows:] for x in pair if x is not None))
    return state


def _fill(layer: Any, state: Any, length: int, device: torch.device) -> None:
    """Put the state of a session of so many tokens into an empty layer."""
    is_full = type(layer) is ChunkedPrefillLayer
    rows = length if is_full else min(length, layer.sliding_window - 1)
    if state.key is None or state.length < rows or (is_full and state.length != rows):
        raise ValueError(f"session must have {rows} tokens of a layer, got {state.length}")
    state.to(device)
    if is_full:
        layer.set_state(state)
        return
    layer.lazy_initialization(state.key, state.value)
    layer.keys, layer.values = state.key[:, :, -rows:], state.value[:, :, -rows:]
    layer.cumulative_length = length


class StaticPrefillCache(KeepsTokenIds, StaticCache):
    """What an enabled model makes of each empty `StaticCache`, to keep the state of its prefill."""

    def _replace_layers(self) -> None:
        for number, layer in enumerate(self.layers):
            if type(layer) is StaticLayer:
                self.layers[number] = StaticPrefillLayer(layer.max_cache_len)
                vars(self.layers[number]).update(vars(layer))
        self._position = torch.zeros(2, dtype=torch.int64)

    def begin(self, config: PrefillConfig, new: int) -> Tensor:
        """Make room for a call of `new` tokens; return its position, int64 [2] on the CPU."""
        # A decoding call has no use for it, and asking a device for its length would wait for it.
        if new > 1:
            self._position[0] = int(self.get_seq_length())
        is_first = new > 1 and int(self._position[0]) == 0
        if is_first:
            self._position.zero_()
        for layer in self.layers:
            if isinstance(layer, StaticPrefillLayer):
                layer.prepare(config.memory_size, is_first)
        return self._position


def adopt(cache: Any, kind: type[Any] | None = None) -> None:
    """Turn an empty cache of transformers into one of ours, in place; leave others as they are."""
    kinds: Any = {DynamicCache: ChunkedPrefillCache, StaticCache: StaticPrefillCache}
    kind = kind or kinds.get(type(cache))
    offloaded = kind is StaticPrefillCache and cache.offloading
    if kind is not None and not offloaded and length_of(cache) == 0:
        cache.__class__ = kind
        cache._replace_layers()
