"""Programs that prefill one model, each in several modes: this library's, and what all are asked.

Imports transformers only when the library's are made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import h2o_prefill
from h2o_prefill.config import PrefillConfig
from h2o_prefill.eval.forward import PromptForward, PromptLogits
from h2o_prefill.eval.inputs.packages import write_package
from h2o_prefill.eval.perplexity.scoring import token_nll
from h2o_prefill.package import PrefillPackage

# The program of the backends of this library.
OURS = "h2o_prefill"


@dataclass(frozen=True)
class Backend:
    """A program and a mode of it; the model is loaded when it is first needed."""

    # Its name, or that of its package.
    program: str
    version: str
    # The name of the backend that its loss is measured against: itself, if it is dense.
    dense: str
    # Takes a prompt, int64 [T]: prefill and the first token.
    prefill: Callable[[Tensor], object]
    # Takes prompts, int64 [windows, T], and a range of rows; returns -log p(next token) of
    # those rows in nats, [windows, rows]. None where the program does not tell it.
    nll: Callable[[Tensor, range], Tensor] | None = None
    # Takes a prompt and a number of tokens; prefills, and returns a callable that decodes so
    # many greedily.
    decoder: Callable[[Tensor, int], Callable[[], object]] | None = None
    # In which of several forms the program has the model; its backends of one form decode alike.
    form: str = ""


def transformers_backends(
    model: Any, dtype: str, configs: Mapping[str, PrefillConfig], shortest: int
) -> Iterator[tuple[str, Backend]]:
    """Go through a model of transformers as it is, and enabled with each of the settings."""
    import transformers

    from common.variants import enabled_twin

    dense = f"transformers {dtype}"
    yield dense, _eager("transformers", transformers.__version__, dense, model)
    for name, config in configs.items():
        sparse = enabled_twin(model, config, shortest)
        yield f"{OURS} {name}", _eager(OURS, h2o_prefill.__version__, dense, sparse)


def _eager(program: str, version: str, dense: str, model: Any) -> Backend:
    from common.variants import decoder, prefill

    @torch.inference_mode()
    def nll(prompts: Tensor, rows: range) -> Tensor:
        forward = PromptForward(model)
        return torch.stack([token_nll(forward(ids[None])[0], ids, rows) for ids in prompts])

    return Backend(
        program,
        version,
        dense,
        prefill=lambda prompt: prefill(model, [prompt[None]]),
        nll=nll,
        decoder=lambda prompt, steps: decoder(model, prompt[None], steps),
    )


def packaged_backends(
    model: Any,
    tokenizer: Any,
    dense: str,
    configs: Mapping[str, PrefillConfig],
    capacity: int,
    folder: Path,
) -> Iterator[tuple[str, Backend]]:
    """Export a model with each of the settings, and go through the packages."""
    for number, (name, config) in enumerate(configs.items()):
        path = folder / f"{number}.pt2"
        write_package(model, tokenizer, config, capacity, path)
        yield f"{OURS} {name}, package", _packaged(PrefillPackage(path), dense)


def _packaged(package: PrefillPackage, dense: str) -> Backend:
    def nll(prompts: Tensor, rows: range) -> Tensor:
        scores = []
        for ids in prompts:
            package.reset()
            logits = package.forward(ids[None], torch.arange(rows.start, rows.stop))
            scored = ids[rows.start : rows.stop + 1]
            scores.append(token_nll(PromptLogits(logits, None), scored, range(len(rows))))
        return torch.stack(scores)

    return Backend(
        OURS,
        h2o_prefill.__version__,
        dense,
        form="package",
        prefill=lambda prompt: prefill_package(package, prompt[None]),
        nll=nll,
        decoder=lambda prompt, steps: package_decoder(package, prompt[None], steps),
    )


def prefill_package(package: PrefillPackage, input_ids: Tensor) -> Tensor:
    """Return the logits of the last token of a prompt, int64 [1, T]."""
    package.reset()
    return package.forward(input_ids)


def package_decoder(
    package: PrefillPackage, input_ids: Tensor, steps: int
) -> Callable[[], list[int]]:
    """Prefill a prompt; return what decodes so many tokens after it, greedily."""
    first = prefill_package(package, input_ids).argmax(dim=-1, keepdim=True)
    after_prompt = package.position.clone()

    def decode() -> list[int]:
        package.position.copy_(after_prompt)
        token, tokens = first, []
        for _ in range(steps):
            token = package.forward(token).argmax(dim=-1, keepdim=True)
            tokens.append(int(token))
        return tokens

    return decode
