"""This library's server, with the methods of `common.engine`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import torch

from common.machine import keep_freed_memory
from h2o_prefill.config import PrefillConfig
from h2o_prefill.generation import load_model
from h2o_prefill.serving import worker as serving

Ids = list[int]


class Server:
    """The worker of this library's server, without HTTP: one prompt after the other."""

    def __init__(self, model: str, threads: int, dtype: str) -> None:
        """Load a model."""
        torch.set_num_threads(threads)
        keep_freed_memory()
        self._worker = serving.Worker(*load_model(model, dtype), config=None)

    def forget(self) -> None:
        """Empty the prefix cache."""
        self._worker.close()
        self._worker = serving.Worker(self._worker.model, self._worker.tokenizer, config=None)

    def first_tokens(self, prompts: Sequence[Ids], settings: str) -> list[float]:
        """Return seconds to the first token of each prompt, all asked at once."""
        config, begin = PrefillConfig.parse(settings), time.perf_counter()

        async def ask(prompt: Ids) -> float:
            job = serving.Job(prompt, 1, None, [], config)
            self._worker.submit(job)
            while not isinstance(event := await job.events.get(), serving.Finish):
                if isinstance(event, Exception):
                    raise event
            return time.perf_counter() - begin

        async def ask_all() -> list[float]:
            return await asyncio.gather(*map(ask, prompts))

        return asyncio.run(ask_all())
