"""A model of transformers as it is and enabled, beside other programs."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Any

import torch
import transformers
from torch import Tensor

import h2o_prefill
from common.variants import decoder, enabled_twin, prefill
from common.ways import OURS, Way
from h2o_prefill.config import PrefillConfig
from h2o_prefill.eval.forward import PromptForward
from h2o_prefill.eval.perplexity.scoring import token_nll


def own_ways(
    model: Any, dtype: str, configs: Mapping[str, PrefillConfig], shortest: int
) -> dict[str, Way]:
    """Return a model of transformers as it is, and enabled with each of the settings."""
    dense = f"transformers {dtype}"
    ways = {dense: _way(transformers, dense, model)}
    for name, config in configs.items():
        sparse = enabled_twin(model, config, shortest)
        ways[f"{OURS} {name}"] = _way(h2o_prefill, dense, sparse)
    return ways


def _way(package: ModuleType, dense: str, model: Any) -> Way:
    @torch.inference_mode()
    def nll(prompts: Tensor, rows: range) -> Tensor:
        forward = PromptForward(model)
        scores = [token_nll(forward(ids.unsqueeze(0))[0], ids, rows) for ids in prompts]
        return torch.stack(scores)

    return Way(
        package.__name__,
        package.__version__,
        dense,
        prefill=lambda prompt: prefill(model, [prompt.unsqueeze(0)]),
        nll=nll,
        decoder=lambda prompt, steps: decoder(model, prompt.unsqueeze(0), steps),
    )
