"""Models and prompts that are spread over several processes.

Transformers gives each process a stage, some of the layers (`DistributedConfig(pp_size=...)`), or
some of the heads of every layer (`tp_size`). With a `process_group`, each has the whole model and a
range of the tokens of a prompt (sequence parallelism).
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from transformers.cache_utils import CacheLayerMixin, DynamicCache, DynamicLayer

from h2o_prefill import ops
from h2o_prefill._library import build_info
from h2o_prefill.config import PrefillConfig
from h2o_prefill.functional import (
    NO_RECALL,
    LayerOptions,
    LogitOptions,
    RecallLists,
    attend_to_all,
    lists_of_rows,
    sparse_attention,
)
from h2o_prefill.hf.cache import ChunkedPrefillCache, cache_argument, take_over
from h2o_prefill.hf.call import Call
from h2o_prefill.hf.forward import NO_IDS
from h2o_prefill.hf.kinds import is_unpadded
from h2o_prefill.hf.layer import ChunkedPrefillLayer
from h2o_prefill.hf.rules import ANYWHERE, dense_reason
from h2o_prefill.session_file import checksum
from h2o_prefill.state import no_errors

OTHER_CACHE = (
    "cache must be one that this model has filled as a stage of a pipeline while it was enabled, "
    "or an empty DynamicCache: the layers of another one would count positions from 0; got"
)

# What makes keys in the layers of transformers' models.
_OF_KEYS = ("k_proj", "qkv_proj", "query_key_value", "kv_b_proj")


class StageCache(ChunkedPrefillCache):
    """The cache of a stage: it has the number of tokens from a layer that is here.

    Transformers asks the first layer for it, which is elsewhere for all stages but one: positions
    would begin at 0 in every call.
    """

    own: range  # the layers of this process
    coming: Tensor | None = None  # ids [B, n] of a forward that gets hidden states instead

    @classmethod
    def of(cls, cache: Any, own: range) -> StageCache:
        """Return the cache of a stage in the place of an empty one; ValueError if none can be."""
        ours = getattr(cache, "_h2o_prefill_cache", cache)
        if isinstance(ours, cls) and ours.own == own:
            return ours
        used = any(layer.is_initialized for layer in getattr(cache, "layers", ()))
        if used or type(cache) not in (DynamicCache, ChunkedPrefillCache):
            raise ValueError(f"{OTHER_CACHE} {type(cache).__name__}{' with tokens' * used}")
        made: StageCache = take_over(cache, cls)
        made.own = own
        return made

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return super().get_seq_length(self._here(layer_idx))

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return super().get_mask_sizes(query_length, self._here(layer_idx))

    def token_ids_with(self, new: Tensor | None) -> Tensor | None:
        return super().token_ids_with(self.coming if new is None else new)

    def append_token_ids(self, new: Tensor | None) -> None:
        super().append_token_ids(self.coming if new is None else new)

    def _here(self, number: int) -> int:
        """Return the number of a layer of this process, of the same kind if there is one."""
        if number in self.own or number >= len(self.layers):
            return number
        kind = type(self.layers[number])
        ours = [one for one in self.own if one < len(self.layers)]
        counting = [one for one in ours if isinstance(self.layers[one], CacheLayerMixin)]
        alike = (one for one in counting if type(self.layers[one]) is kind)
        return next(alike, counting[0] if counting else number)


class Stage(nn.Module):
    """The layers of this process as a function of one call of a prompt.

    It takes ids [B, n] or embeddings on the first rank, on the others the hidden states of the one
    before. It returns hidden states, on the last rank logits. `ids` [B, T] are the prompt's tokens,
    None if unknown; `mask` is [B, past + T].
    """

    def __init__(
        self, model: Any, cache: StageCache, ids: Tensor | None, mask: Tensor | None
    ) -> None:
        super().__init__()
        self.model, self.cache, self.ids, self.mask = model, cache, ids, mask
        self.group, self.is_last = model._pp_stage.pp_group, model._pp_stage.pp_is_last_stage
        self.begin = cache.get_seq_length()

    def forward(self, tokens: Tensor) -> Tensor:
        name = "inputs_embeds" if tokens.ndim == 3 else "input_ids"
        past = self.cache.get_seq_length()
        end = past + tokens.shape[1]
        call: dict[str, Any] = {name: tokens, "use_cache": True}
        if self.mask is not None:
            call["attention_mask"] = self.mask[:, :end]
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
    own = range(*parts.layer_range_for_rank(parts.pp_rank, count))
    if count < parts.pp_size:
        raise ValueError(
            f"a model of {count} layers has at most {count} stages, got {parts.pp_size}"
        )
    return own


def new_cache(model: Any) -> ChunkedPrefillCache:
    """Return an empty cache of a model, or of a stage of one."""
    cache, own = ChunkedPrefillCache(config=model.config), layers_here(model)
    return cache if own is None else StageCache.of(cache, own)


def check_heads_here(model: Any) -> None:
    """Raise ValueError if tensor parallelism does not give every process as many KV heads."""
    count = getattr(model, "_tp_size", None) or 1
    if count == 1 or not _spreads_keys(model):
        return
    heads = model.config.get_text_config(decoder=True).num_key_value_heads
    if heads % count:
        raise ValueError(f"tp_size must divide the number of KV heads, {heads}, got {count}")


def _spreads_keys(model: nn.Module) -> bool:
    """Return whether each process has a part of the parameters that make keys."""
    from torch.distributed.tensor import DTensor  # Not every build of PyTorch has it.

    return any(
        isinstance(parameter, DTensor) and any(part.is_shard() for part in parameter.placements)
        for name, parameter in model.named_parameters()
        if any(f".{projection}." in name for projection in _OF_KEYS)
    )


STAYS = (
    "a cache whose tokens are spread over processes cannot be copied, saved or cropped: "
    "gather_cache(cache) makes one of all tokens in one process"
)
GOES_ON = "a call that goes on from a prompt in several processes is dense"


class ShardedLayer(DynamicLayer):
    """Keys and values of one layer, of the tokens that this process has.

    During the prompt's own call they come after the rows of the past that the layer needs. Then
    every process makes the same calls, in which each attends to its own keys, and the results are
    merged; new tokens go to the last process.
    """

    def __init__(self, number: int, config: PrefillConfig, sequence: Any) -> None:
        super().__init__()
        self.number, self.config, self.sequence = number, config.of_layer(number), sequence
        self.is_whole = config.exact or number in config.dense_layers
        self.rows = ChunkedPrefillLayer()
        self.past: Any = None  # a CompactPast, from the prompt's call on
        self.total = sequence.begin
        self.is_prefilled = False

    def get_seq_length(self) -> int:
        """Return the number of tokens of all processes before the next call."""
        return self.total

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append keys and values where they belong; return those that this process has."""
        new = key_states.shape[2]
        if not self.is_prefilled:
            config = None if self.is_whole else self.config
            self.past = self.sequence.past_of(self.number, key_states, value_states, config)
            self.rows.begin_after([(self.past.keys, self.past.values)], self.past.state, new)
        if not self.is_prefilled or self.sequence.ranks.is_last:
            self.rows.update(key_states, value_states)
        self.total += new
        self.is_initialized = True
        return self._take_rows()

    def attend(self, call: Call) -> Tensor:
        """Attend with the tokens of a call, whose keys `update` has just appended."""
        keys, values = self._take_rows()
        query, options, rows = call.query.to(keys.dtype), call.logit_options, self.rows
        if self.is_prefilled:
            return self._attend_everywhere(query, options)
        if self.is_whole:
            return ops.dense_attention(query, keys, values, *options)
        sequence, total = self.sequence, keys.shape[2]
        recall = self.past.recall_lists(sequence.recall)
        if self.config.error_rows:
            out = self._attend_and_measure(query, recall, options)
            call.enabled.note_errors(self.number, rows.errors)
        else:
            told = LayerOptions(recall, self.number, call.config.to_string(), options)
            out = rows.attend(query, total, call.config, told)
        if not sequence.ranks.is_last and self.config.memory_size:
            memory = self.past.memory_rows(rows.state, keys, values, self.config)
            sequence.pass_on(self.number, memory)
        return out

    def end_prompt(self, total: int) -> None:
        """Keep the rows of this process alone; `total` are the tokens of all."""
        self.is_prefilled, self.total, rows = True, total, self.rows
        state = None if rows.state is None else self.past.whole_state(rows.state)
        rows.keys, rows.values = (x[:, :, self.past.table.numel() :] for x in rows.rows())
        rows.state = state if self.sequence.ranks.is_last else None
        self.past = None
        self._take_rows()

    def _refuse(self, *_: Any) -> Any:
        raise NotImplementedError(STAYS)

    crop = reset = __reduce_ex__ = _refuse  # type: ignore[assignment]

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        self.rows.reorder_cache(beam_idx)
        self._take_rows()

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.rows.batch_repeat_interleave(repeats)
        self._take_rows()

    def batch_select_indices(self, indices: Tensor) -> None:
        self.rows.batch_select_indices(indices)
        self._take_rows()

    def _take_rows(self) -> tuple[Tensor, Tensor]:
        keys, values = self.rows.rows()
        self.keys, self.values = keys, values
        return keys, values

    def _attend_and_measure(
        self, query: Tensor, recall: RecallLists, options: LogitOptions
    ) -> Tensor:
        """Attend chunk by chunk, and measure errors against the keys of all processes."""
        keys, values = self._take_rows()
        past, new, config = self.past.table.numel(), query.shape[2], self.config
        exact, own = self.sequence.exact, (query, keys[:, :, past:], values[:, :, past:])
        before = exact.ask(self.number, *own, options)
        # The operator itself would measure against the keys that are here.
        unmeasured = config.replace(error_rows=1, error_threshold=sys.float_info.max)
        errors = (no_errors(keys) if self.rows.errors is None else self.rows.errors).cpu().clone()
        state, outs = self.rows.state, []
        for begin in range(0, new, config.chunk_size):
            end = min(begin + config.chunk_size, new)
            chunk = query[:, :, begin:end]
            key, value = keys[:, :, : past + end], values[:, :, : past + end]
            lists = lists_of_rows(recall, new, begin, end, config.recall_block)
            out, state = sparse_attention(chunk, key, value, state, unmeasured, lists, *options)
            error = exact.error(*own, out, begin, options, before)
            if error is not None:
                config.native.record_errors(errors, error)
            state.errors = errors.to(query.device, copy=True)
            outs.append(out)
        self.rows.state = state
        return torch.cat(outs, 2)

    def _attend_everywhere(self, query: Tensor, options: LogitOptions) -> Tensor:
        keys, values = self._take_rows()
        if self.sequence.ranks.is_last:
            part = ops.sliding_window_attention(query, keys, values, keys.shape[2], *options)
        else:
            part = attend_to_all(query, keys, values, options)
        return self.sequence.merge(*part, self.number)


def attend_sharded(call: Call, layer: ShardedLayer) -> Tensor:
    """Attend in a layer whose tokens are spread over processes.

    Raises NotImplementedError where that is not possible.
    """
    reason = dense_reason(call, ANYWHERE)
    if reason is None and call.mask is not None:
        reason = "a custom attention mask"
    elif reason is None and (call.key is not layer.keys or call.value is not layer.values):
        reason = "the model attends to other keys or values than it caches"
    if reason is not None:
        raise NotImplementedError(f"not over several processes: {reason or 'no causal attention'}")
    past = layer.get_seq_length() - call.new
    if layer.is_prefilled and call.config.is_long_call(past, call.new):
        call.enabled.report(GOES_ON)
    sparse = not (layer.is_prefilled or layer.is_whole)
    rows = call.query.shape[0] * call.new
    call.enabled.count(layer.number, rows, None if sparse else "")
    return layer.attend(call).transpose(1, 2).contiguous()


def digest(tensor: Tensor | None) -> str:
    """Return what tells one tensor from another."""
    return "none" if tensor is None else f"{list(tensor.shape)} {checksum(tensor) % 2**64:016x}"


def versions() -> tuple[str, str, str]:
    return build_info()["version"], torch.__version__, transformers.__version__


def check_shardable(model: Any, config: PrefillConfig) -> None:
    """Raise ValueError for stages, and for settings that need all keys in one process."""
    if layers_here(model) is not None:
        raise ValueError("a model with a process_group must be whole in each process, got a stage")
    if config.dense_tail:
        raise ValueError(f"with a process_group dense_tail must be 0, got {config.dense_tail}")


def is_sharded(cache: ChunkedPrefillCache) -> bool:
    return any(isinstance(layer, ShardedLayer) for layer in cache.layers)


@contextlib.contextmanager
def sharded(
    handle: Any, cache: ChunkedPrefillCache, tokens: Tensor, mask: Tensor | None
) -> Iterator[Any]:
    """Spread a prompt over the processes of a handle, in an empty cache, which an error leaves so.

    Yields a `SequencePrefill`, whose range this process is to pass through the model in one call.
    Raises ValueError, in every process, if the arguments, settings or models are not the same in
    all of them, or the prompt does not suit.
    """
    # Not every build of PyTorch has what this needs.
    from h2o_prefill.distributed import ExactRows, Ranks, SequencePrefill, ShardPlan, measured_rows

    config: PrefillConfig = handle.config
    length, ids = tokens.shape[1], tokens if tokens.ndim == 2 else None
    ranks = Ranks(handle.process_group, range(len(cache.layers)))
    ranks.check_same(
        {
            "settings": config.to_string(),
            "versions": versions(),
            "model": handle.model_text(),
            "token ids": digest(tokens),
            "attention_mask": digest(mask),
            "number of cached tokens": cache.get_seq_length(),
        }
    )
    if cache.get_seq_length() > 0:
        raise ValueError("a prompt in several processes must begin with an empty cache")
    if mask is not None and not is_unpadded(mask, length):
        raise ValueError("a prompt in several processes must have no padding")
    kinds = {type(layer).__name__ for layer in cache.layers} - {ChunkedPrefillLayer.__name__}
    if kinds:
        raise ValueError(f"every layer must have full attention, got {sorted(kinds)}")
    lists = NO_RECALL
    if ids is None and config.recall:
        handle.state.report(NO_IDS)
    elif ids is not None and config.recall:
        lists = ops.lexical_recall(ids.to("cpu", torch.int64), 0, config, handle.state.token_text)
    plan = ShardPlan.of(length, ranks.count, config, lists)
    numbers = range(len(cache.layers))
    sparse = [number for number in numbers if number not in config.dense_layers]
    measured = [number for number in sparse if config.of_layer(number).error_rows]
    rows = [measured_rows(config, *bounds) for bounds in plan.bounds]
    exact = ExactRows(ranks, rows, measured) if measured else None
    own = lists_of_rows(lists, length, *plan.bounds[ranks.number], config.recall_block)
    sequence = SequencePrefill(ranks, plan, own, exact)
    before = cache.layers
    layers = [ShardedLayer(number, config, sequence) for number in numbers]
    cache.layers = [*layers]
    cache._token_ids = None if ids is None else [ids[:, : sequence.begin]]
    try:
        yield sequence
        sequence.finish()
        for layer in layers:
            layer.end_prompt(length)
    except BaseException:
        cache.layers, cache._token_ids = before, []
        raise
    finally:
        if exact is not None:
            exact.stop()
    cache._token_ids = None if ids is None else [ids]


def gather_cache(cache: ChunkedPrefillCache, rank: int = 0) -> ChunkedPrefillCache | None:
    """Bring a prompt that was prefilled by several processes together in one of them.

    All processes call this with the same arguments. The prompt goes on in that process as if it had
    been prefilled there: `generate` and long calls continue, to the bit, as after one process.

    Parameters
    ----------
    cache : ChunkedPrefillCache
        What `chunked_prefill` returned; it is not changed.
    rank : int
        The process, numbered in the group.

    Returns
    -------
    ChunkedPrefillCache or None
        A cache with the keys and values of all tokens; None in the other processes.

    Raises
    ------
    ValueError
        If the tokens are not spread over processes, or there is no process of this number.
    DistributedPrefillError
        If another process is gone, or silent for longer than the timeout of the group.
    """
    layers: list[Any] = cache.layers
    if type(cache) is not ChunkedPrefillCache or not is_sharded(cache):
        raise ValueError("cache must be one of a prompt that several processes have prefilled")
    ranks = layers[0].sequence.ranks
    if not 0 <= rank < ranks.count:
        raise ValueError(f"rank must be in [0, {ranks.count}), got {rank}")
    whole = ChunkedPrefillCache() if ranks.number == rank else None
    for layer in layers:
        mine = [*(x.cpu() for x in layer._take_rows()), layer.rows.state]
        parts: Any = None if whole is None else [None] * ranks.count
        with ranks.waiting(layer=layer.number):
            dist.gather_object(mine, parts, ranks.rank_of(rank), ranks.group)
        if whole is not None:
            keys, values, states = zip(*parts, strict=True)
            made = ChunkedPrefillLayer()
            made.update(torch.cat(keys, 2), torch.cat(values, 2))
            made.state = states[-1]
            whole.layers.append(made)
    if whole is not None:
        whole._token_ids, whole._origin = cache._token_ids, cache._origin
    return whole
