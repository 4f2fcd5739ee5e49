"""A model that was exported as a package, beside other programs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import h2o_prefill
from common.ways import OURS, Way
from h2o_prefill.config import PrefillConfig
from h2o_prefill.eval.forward import PromptLogits
from h2o_prefill.eval.inputs.packages import write_package
from h2o_prefill.eval.perplexity.scoring import token_nll
from h2o_prefill.package import PrefillPackage

FORM = "package"


def packaged_ways(
    model: Any,
    tokenizer: Any,
    dense: str,
    configs: Mapping[str, PrefillConfig],
    capacity: int,
    folder: Path,
) -> dict[str, Way]:
    """Export a model with each of the settings, and return the packages."""
    ways = {}
    for number, (name, config) in enumerate(configs.items()):
        path = folder / f"{number}.pt2"
        write_package(model, tokenizer, config, capacity, path)
        ways[f"{OURS} {name}, {FORM}"] = _way(PrefillPackage(path), dense)
    return ways


def _way(package: PrefillPackage, dense: str) -> Way:
    def nll(prompts: Tensor, rows: range) -> Tensor:
        scores = []
        for ids in prompts:
            package.reset()
            logits = package.forward(ids.unsqueeze(0), torch.arange(rows.start, rows.stop))
            scored = ids[rows.start : rows.stop + 1]
            scores.append(token_nll(PromptLogits(logits, None), scored, range(len(rows))))
        return torch.stack(scores)

    return Way(
        h2o_prefill.__name__,
        h2o_prefill.__version__,
        dense,
        form=FORM,
        prefill=lambda prompt: prefill_package(package, prompt.unsqueeze(0)),
        nll=nll,
        decoder=lambda prompt, steps: package_decoder(package, prompt.unsqueeze(0), steps),
    )


def prefill_package(package: PrefillPackage, input_ids: Tensor) -> Tensor:
    """Return the logits of the last token of a prompt, int64 [1, T]."""
    package.reset()
    return package.forward(input_ids)


def package_decoder(
    package: PrefillPackage, input_ids: Tensor, steps: int
) -> Callable[[], list[int]]:
    """Prefill a prompt; return what decodes so many tokens behind it, greedily."""
    first = prefill_package(package, input_ids).argmax(dim=-1, keepdim=True)
    behind_prompt = package.position.clone()

    def decode() -> list[int]:
        package.position.copy_(behind_prompt)
        token, tokens = first, []
        for _ in range(steps):
            token = package.forward(token).argmax(dim=-1, keepdim=True)
            tokens.append(int(token))
        return tokens

    return decode
