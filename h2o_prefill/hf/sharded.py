"""Caches of a prompt whose tokens are spread over several processes (sequence parallelism)."""

from __future__ import annotations

import contextlib
import hashlib
import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor
from transformers.cache_utils import DynamicLayer

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
    recall_lists,
    sparse_attention,
)
from h2o_prefill.hf.cache import ChunkedPrefillCache
from h2o_prefill.hf.call import Call
from h2o_prefill.hf.forward import NO_IDS
from h2o_prefill.hf.layer import ChunkedPrefillLayer
from h2o_prefill.hf.padding import is_unpadded
from h2o_prefill.hf.rules import ANYWHERE, dense_reason
from h2o_prefill.hf.stages import layers_here
from h2o_prefill.state import no_errors

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
        return int(self.total)

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append keys and values where they belong; return those that this process has."""
        new = key_states.shape[2]
        if not self.is_prefilled:
            config = None if self.is_whole else self.config
            self.past = self.sequence.past_of(self.number, key_states, value_states, config)
            self.rows.begin_after(self.past.keys, self.past.values, self.past.state, new)
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
        past = self.past.table.numel()
        assert rows.keys is not None and rows.values is not None
        state = None if rows.state is None else self.past.whole_state(rows.state)
        rows.keys, rows.values = rows.keys[:, :, past:], rows.values[:, :, past:]
        rows.state = state if self.sequence.ranks.is_last else None
        self.past = None
        self._take_rows()

    def crop(self, tokens_to_remove: int) -> None:
        raise NotImplementedError(STAYS)

    def reset(self) -> None:
        raise NotImplementedError(STAYS)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise NotImplementedError(STAYS)

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
        keys, values = self.rows.keys, self.rows.values
        assert keys is not None and values is not None
        self.keys, self.values = keys, values
        return keys, values

    def _attend_and_measure(
        self, query: Tensor, recall: RecallLists, options: LogitOptions
    ) -> Tensor:
        """Attend chunk by chunk, and measure errors against the keys of all processes."""
        keys, values = self._take_rows()
        past, new, config = self.past.table.numel(), query.shape[2], self.config
        exact, own = self.sequence.exact, (keys[:, :, past:], values[:, :, past:])
        wait, before = exact.ask(self.number, query, *own, options), None
        # The operator itself would measure against the keys that are here.
        unmeasured = config.replace(error_rows=1, error_threshold=sys.float_info.max)
        errors = (no_errors(keys) if self.rows.errors is None else self.rows.errors).cpu().clone()
        state, outs = self.rows.state, []
        for begin in range(0, new, config.chunk_size):
            end = min(begin + config.chunk_size, new)
            held = keys[:, :, : past + end]
            held_values = values[:, :, : past + end]
            lists = lists_of_rows(recall, new, begin, end, config.recall_block)
            out, state = sparse_attention(
                query[:, :, begin:end], held, held_values, state, unmeasured, lists, *options
            )
            measured = (exact.own >= begin) & (exact.own < end)
            rows = exact.own[measured].to(query.device)
            if len(rows):
                before = wait() if before is None else before
                parts = [] if before is None else [tuple(x[:, :, measured] for x in before)]
                parts += attend_to_range(query[:, :, rows], *own, rows, begin, options)
                error = _error(out[:, :, rows - begin], parts, keys.shape[1])
                config.native.record_errors(errors, error)
            state.errors = errors.to(query.device, copy=True)
            outs.append(out)
        self.rows.state = state
        return torch.cat(outs, 2)

    def _attend_everywhere(self, query: Tensor, options: LogitOptions) -> Tensor:
        """Attend to the tokens of all processes."""
        keys, values = self._take_rows()
        if self.sequence.ranks.is_last:
            part = ops.sliding_window_attention(query, keys, values, keys.shape[2], *options)
        else:
            part = attend_to_all(query, keys, values, options)
        merged: Tensor = self.sequence.merge(*part, self.number)
        return merged


def attend_to_range(
    query: Tensor, key: Tensor, value: Tensor, rows: Tensor, begin: int, options: LogitOptions
) -> list[tuple[Tensor, ...]]:
    """Return the attention of rows of a chunk to its range, to the keys before `begin` and after.

    query [B, Hq, n, D], and keys and values of the range, of which row i sees rows[i] and before.
    """
    parts, found = [], []
    if begin > 0:
        parts.append(attend_to_all(query, key[:, :, :begin], value[:, :, :begin], options))
    kind = torch.promote_types(query.dtype, torch.float32)
    keys, values = (x[:, :, begin : int(rows[-1]) + 1].to(kind) for x in (key, value))
    for i, row in enumerate(rows.tolist()):
        seen = row + 1 - begin
        held = query[:, :, i : i + 1].to(kind), keys[:, :, :seen], values[:, :, :seen]
        found.append(ops.sliding_window_attention(*held, seen, *options))
    return [*parts, tuple(torch.cat(x, dim=2) for x in zip(*found, strict=True))]


def _error(sparse: Tensor, parts: list[tuple[Tensor, ...]], heads: int) -> Tensor:
    """Return the mean |sparse - exact|^2 / |exact|^2 of each KV head, [B, Hkv] on the CPU."""
    exact, lse = (x.to(parts[0][1].dtype) for x in parts[0])
    for out, other in parts[1:]:
        exact, lse = ops.merge_states(exact, lse, out.to(exact.dtype), other)
    missed, whole = (x.square().sum(-1) for x in (sparse.to(exact.dtype) - exact, exact))
    ratio = torch.where(whole > 0, missed / whole, 0)
    return ratio.unflatten(1, (heads, -1)).mean(dim=(2, 3)).cpu()


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
    if tensor is None:
        return "none"
    content = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return f"{list(tensor.shape)} {hashlib.sha256(content).hexdigest()[:16]}"


def versions() -> tuple[str, str, str]:
    """Return the versions of this library, PyTorch and transformers."""
    return build_info()["version"], torch.__version__, transformers.__version__


def check_shardable(model: Any, config: PrefillConfig) -> None:
    """Raise ValueError for stages, and for settings that need all keys in one process."""
    if layers_here(model) is not None:
        raise ValueError("a model with a process_group must be whole in each process, got a stage")
    if config.dense_tail:
        raise ValueError(f"with a process_group dense_tail must be 0, got {config.dense_tail}")


def is_sharded(cache: ChunkedPrefillCache) -> bool:
    """Return whether the tokens of a cache are spread over processes."""
    return any(isinstance(layer, ShardedLayer) for layer in cache.layers)


@contextlib.contextmanager
def sharded(
    handle: Any, cache: ChunkedPrefillCache, tokens: Tensor, mask: Tensor | None
) -> Iterator[Any]:
    """Spread a prompt over the processes of a handle, in an empty cache.

    Yields a `SequencePrefill`, whose range this process is to pass through the model in one call.
    An error leaves the cache empty. `tokens` [B, T] or [B, T, hidden size] and `mask` [B, T] are
    those of the whole prompt.

    Raises ValueError, in every process, if the arguments, settings or models are not the same in
    all of them, or the prompt does not suit.
    """
    # Not every build of PyTorch has what this needs.
    from h2o_prefill.distributed import ExactRows, Ranks, SequencePrefill, ShardPlan

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
        lists = recall_lists(ids.to("cpu", torch.int64), 0, config, handle.token_text)
    plan = ShardPlan.of(length, ranks.count, config, lists)
    layers_measured = [
        number
        for number in range(len(cache.layers))
        if config.of_layer(number).error_rows and number not in config.dense_layers
    ]
    rows = [_measured(config, *bounds) for bounds in plan.bounds]
    exact = ExactRows(ranks, rows, layers_measured) if layers_measured else None
    begin, end = plan.bounds[ranks.number]
    own = lists_of_rows(lists, length, begin, end, config.recall_block)
    sequence = SequencePrefill(ranks, plan, own, exact)
    before = cache.layers
    layers = [ShardedLayer(number, config, sequence) for number in range(len(before))]
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


def _measured(config: PrefillConfig, begin: int, end: int) -> Tensor:
    """Return the rows of a range in which errors are measured, counted from its first."""
    found = []
    for chunk in range(begin, end, config.chunk_size):
        if chunk > 0:
            rows = min(config.chunk_size, end - chunk)
            found += [chunk - begin + row for row in config.native.measured_rows(chunk, rows)]
    return torch.tensor(found, dtype=torch.int64)


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
        parts = _gather(ranks, rank, layer)
        if whole is None:
            continue
        made = ChunkedPrefillLayer()
        made.update(*(torch.cat([part[name] for part in parts], 2) for name in ("keys", "values")))
        made.state = parts[-1]["state"]
        whole.layers.append(made)
    if whole is not None:
        whole._token_ids, whole._origin = cache._token_ids, cache._origin
    return whole


def _gather(ranks: Any, rank: int, layer: ShardedLayer) -> Any:
    """Return the rows of a layer in every process, in that process alone."""
    keys, values = layer._take_rows()
    mine = {"keys": keys.cpu(), "values": values.cpu(), "state": layer.rows.state}
    parts: Any = [None] * ranks.count if ranks.number == rank else None
    with ranks.waiting(layer=layer.number):
        dist.gather_object(mine, parts, ranks.rank_of(rank), ranks.group)
    return parts
