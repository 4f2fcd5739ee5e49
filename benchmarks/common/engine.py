"""vLLM with the plugin, in its own environment: `benchmarks/engine.py` calls it there."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any


class Engine:
    """One engine, in one process, whose steps have room for two chunks."""

    def __init__(self, folder: str, threads: int, dtype: str) -> None:
        os.environ |= {
            "H2O_PREFILL_SETTINGS": "exact",
            "HF_HUB_OFFLINE": "1",
            "OMP_WAIT_POLICY": "passive",
            "VLLM_CPU_KVCACHE_SPACE": "2",
            "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_NO_USAGE_STATS": "1",
        }
        from vllm import LLM

        from h2o_prefill.vllm import register

        register()  # vLLM goes on without a plugin that it cannot load.
        self._model = LLM(
            folder,
            dtype=dtype,
            max_model_len=8192,
            max_num_batched_tokens=2048 + 16,
            max_num_seqs=16,
            enforce_eager=True,
        )
        self._asked = 0

    def prefill(self, prompt: list[int], settings: str) -> None:
        """Compute the first token after a prompt that is not cached."""
        self.forget()
        self._model.generate({"prompt_token_ids": prompt}, self._params(settings), use_tqdm=False)

    def first_tokens(self, prompts: Sequence[list[int]], settings: str) -> list[float]:
        """Return seconds to the first token of each prompt, all asked at once."""
        engine, seconds = self._model.llm_engine, []
        begin = time.perf_counter()
        for prompt in prompts:
            self._asked += 1
            asked: Any = {"prompt_token_ids": prompt}
            engine.add_request(str(self._asked), asked, self._params(settings))
        while engine.has_unfinished_requests():
            finished = [output for output in engine.step() if output.finished]
            seconds += [time.perf_counter() - begin] * len(finished)
        return seconds

    def forget(self) -> None:
        """Empty the prefix cache."""
        self._model.reset_prefix_cache()

    def _params(self, settings: str) -> Any:
        from vllm import SamplingParams

        extra = {"h2o_prefill": settings}
        return SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, extra_args=extra)
