"""Packages, with the methods of `common.peers`.

Imports only what a program that runs packages needs: its start and its memory are measured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from common.machine import keep_freed_memory
from h2o_prefill.package import PrefillPackage

if TYPE_CHECKING:
    import numpy as np

Ids = list[int]


class Package:
    """A model that `h2o-prefill export` wrote."""

    # Decodes in place of what the last call decoded.
    decode: Callable[[], object]

    def __init__(self, path: str, threads: int) -> None:
        """Load a package."""
        torch.set_num_threads(threads)
        keep_freed_memory()
        self._package = PrefillPackage(Path(path))

    def prefill(self, prompt: Ids) -> None:
        """Compute the first token after a prompt, in calls as of any program."""
        self._package.reset()
        self._package.generate(prompt, 1)

    def nll(self, prompts: Sequence[Ids], begin: int, end: int) -> np.ndarray:
        """Score the prompts' own tokens."""
        from h2o_prefill.eval.forward import PromptLogits
        from h2o_prefill.eval.scores import token_nll

        scores = []
        for ids in torch.tensor(prompts):
            self._package.reset()
            logits = self._package.forward(ids[None], torch.arange(begin, end))
            scored = ids[begin : end + 1]
            scores.append(token_nll(PromptLogits(logits, None), scored, range(end - begin)))
        return torch.stack(scores).numpy()

    def start(self, prompt: Ids, steps: int) -> None:
        """Prefill the prompt after which so many tokens are decoded."""
        self.decode = package_decoder(self._package, torch.tensor([prompt]), steps)


def prefill_package(package: PrefillPackage, input_ids: Tensor) -> Tensor:
    """Return the logits of the last token of a prompt, int64 [1, T]."""
    package.reset()
    return package.forward(input_ids)


def package_decoder(
    package: PrefillPackage, input_ids: Tensor, steps: int
) -> Callable[[], list[int]]:
    """Prefill a prompt; return what decodes so many tokens after it, greedily."""
    first = prefill_package(package, input_ids).argmax(dim=-1, keepdim=True)
    length = package.length

    def decode() -> list[int]:
        package.truncate(length)
        token, tokens = first, []
        for _ in range(steps):
            token = package.forward(token).argmax(dim=-1, keepdim=True)
            tokens.append(int(token))
        return tokens

    return decode
