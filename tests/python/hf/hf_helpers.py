"""Settings and helpers of the tests of `h2o_prefill.hf`."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from h2o_prefill import ChunkedPrefillCache, explain, ops

SPARSE: dict[str, Any] = {
    "chunk_size": 16,
    "local_window": 4,
    "heavy_budget": 4,
    "min_prefill": None,
}
OTHER: dict[str, Any] = {**SPARSE, "chunk_size": 32}
# Holds every prompt of these tests.
EXACT: dict[str, Any] = {**SPARSE, "local_window": 64, "heavy_budget": 64}
RECALL: dict[str, Any] = {**SPARSE, "recall": 2}
H2O: dict[str, Any] = {"config": "h2o", **SPARSE}
RECOMMENDED: dict[str, Any] = {"config": "recommended", **SPARSE}
PRESET_EXACT: dict[str, Any] = {"config": "exact", "chunk_size": 16}
WIDENING = {"error_rows": 4, "error_threshold": 0.05, "max_widen": 2}
EVERYTHING: dict[str, Any] = {**RECOMMENDED, "sink_tokens": 2, "dense_tail": 5, **WIDENING}
GREEDY: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False}


class Letters:
    """A tokenizer of a letter and a number for each token; token 3 is special."""

    all_special_ids = (3,)

    def __len__(self):
        return 61

    def batch_decode(self, ids):
        return [f" {chr(ord('A') + token % 26)}{token}," for (token,) in ids]


LETTERS = Letters()


def assert_close(ours: Any, expected: Any, tolerance: float = 1e-5) -> None:
    """Compare tensors, or sequences of them, relative to the largest magnitude above 1."""
    if isinstance(expected, torch.Tensor):
        scale = max(1.0, expected.abs().amax().item())
        torch.testing.assert_close(ours, expected, atol=tolerance * scale, rtol=tolerance)
        return
    for one, other in zip(ours, expected, strict=True):
        assert_close(one, other, tolerance)


def new_cache(model: Any, checkpoints: bool = False) -> ChunkedPrefillCache:
    """Return an empty cache of a model."""
    return ChunkedPrefillCache(config=model.config, checkpoints=checkpoints)


def in_calls(model: Any, cache: Any, ids: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
    """Return the logits [B, T, V] of a prompt that comes in calls of these lengths."""
    pieces = ids.split(list(lengths), dim=1)
    return torch.cat([model(piece, past_key_values=cache).logits for piece in pieces], dim=1)


def sparse_rows(model: Any) -> list[int]:
    """Return how many query tokens each layer of an enabled model has prefilled sparsely."""
    return [layer.sparse_rows for layer in explain(model)]


def states(cache: Any) -> list[Any]:
    """Return the states of a cache's layers that have been prefilled sparsely."""
    found = [getattr(layer, "state", layer) for layer in cache.layers]
    return [state for state in found if getattr(state, "memory", None) is not None]


def assert_same_states(one: Any, other: Any, tolerance: float = 1e-5) -> None:
    """Compare what two caches keep of a sparse prefill, memory sets exactly."""
    for mine, theirs in zip(states(one), states(other), strict=True):
        assert_close(mine.scores, theirs.scores, tolerance)
        assert torch.equal(mine.memory, theirs.memory)
        for name in ("length", "last_chunk_begin"):
            assert getattr(mine, name, None) == getattr(theirs, name, None)


def stock_copy(cache: Any, config: Any) -> DynamicCache:
    """Return a plain cache with the same keys and values."""
    pairs = [(layer.keys.clone(), layer.values.clone()) for layer in cache.layers]
    return DynamicCache(pairs, config=config)


def watch(monkeypatch: pytest.MonkeyPatch, name: str, note: Callable[..., Any]) -> list[Any]:
    """Return a list that gets what `note` makes of the arguments of each call of an operator."""
    seen: list[Any] = []
    original = getattr(ops, name)

    def watched(*args: Any, **kwargs: Any) -> Any:
        seen.append(note(*args, **kwargs))
        return original(*args, **kwargs)

    monkeypatch.setattr(ops, name, watched)
    return seen


def is_off(model: Any, implementation: str | None = None) -> bool:
    """Return whether a model carries none of our wrappers and its old attention."""
    wrapped = [m for m in model.modules() if {"forward", "generate"} & set(vars(m))]
    names = ("sdpa", "eager") if implementation is None else (implementation,)
    return not wrapped and model.config._attn_implementation in names


@contextlib.contextmanager
def hooked(module: Any, function: Callable[..., Any]) -> Iterator[None]:
    """Call a function after each forward of a module in the block."""
    hook = module.register_forward_hook(function)
    yield
    hook.remove()


@contextlib.contextmanager
def failing(module: Any, error: type[BaseException] = ZeroDivisionError) -> Iterator[None]:
    """Raise an error after each forward of a module in the block, which it must leave."""

    def fail(*_: Any) -> None:
        raise error

    with hooked(module, fail), pytest.raises(error):
        yield
