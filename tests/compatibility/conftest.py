"""What the tests of model classes share."""

from __future__ import annotations

import pytest
from hf_helpers import watch


@pytest.fixture
def sparse_layers(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that gets the number of new tokens of every layer that goes sparse."""
    seen: list[int] = []
    # Without a cache of ours, and with one.
    for name in ("chunked_sparse_attention", "prefill_attention_"):
        watch(monkeypatch, name, lambda q, *_args, **_kwargs: seen.append(q.shape[2]))
    return seen
