"""What the tests of model classes share."""

from __future__ import annotations

from typing import Any

import pytest
import torch


@pytest.fixture
def sparse_layers(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that gets the number of new tokens of every layer that goes sparse."""
    from h2o_prefill import ops

    seen: list[int] = []
    # Without a cache of ours, and with one.
    for name in ("chunked_sparse_attention", "prefill_attention_"):
        original = getattr(ops, name)

        def watched(q: torch.Tensor, *args: Any, original: Any = original, **kwargs: Any) -> Any:
            seen.append(q.shape[2])
            return original(q, *args, **kwargs)

        monkeypatch.setattr(ops, name, watched)
    return seen
