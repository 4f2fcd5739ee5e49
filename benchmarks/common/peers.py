"""Other programs that prefill the same model from the same GGUF file: optional packages.

Each maker returns callables that take a prompt of token ids through prefill and one token.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

Prefill = Callable[[], object]

PACKAGES = ("openvino-genai", "llama-cpp-python")

# Tokens that OpenVINO's scheduler takes at a time, by its own default.
OPENVINO_BATCH = 256


class PeerMissing(Exception):
    """A peer's package is not installed; the message says how to get it."""


def openvino_genai(
    gguf: Path, prompt: list[int], threads: int, batch: int = OPENVINO_BATCH
) -> dict[str, Prefill]:
    """Return OpenVINO GenAI with dense SDPA, with paged attention, and with its sparse modes.

    With paged attention its scheduler takes `batch` tokens at a time.
    """
    _require("openvino_genai", "openvino-genai")
    import numpy
    import openvino
    import openvino_genai as genai

    ids = numpy.array([prompt], dtype=numpy.int64)
    inputs = genai.TokenizedInputs(openvino.Tensor(ids), openvino.Tensor(numpy.ones_like(ids)))
    one_token = genai.GenerationConfig()
    one_token.max_new_tokens = 1
    one_token.ignore_eos = True

    def pipeline(**options: Any) -> Prefill:
        made = genai.LLMPipeline(str(gguf), "CPU", INFERENCE_NUM_THREADS=threads, **options)
        return lambda: made.generate(inputs, one_token)

    def paged(sparse_mode: Any = None) -> Prefill:
        scheduler = genai.SchedulerConfig()
        scheduler.max_num_batched_tokens = batch
        # The same prompt comes again and again: a cached prefix would be no prefill.
        scheduler.enable_prefix_caching = False
        if sparse_mode is not None:
            scheduler.use_sparse_attention = True
            scheduler.sparse_attention_config.mode = sparse_mode
        return pipeline(ATTENTION_BACKEND="PA", scheduler_config=scheduler)

    return {
        "openvino sdpa": pipeline(ATTENTION_BACKEND="SDPA"),
        "openvino paged": paged(),
        "openvino tri-shape": paged(genai.SparseAttentionMode.TRISHAPE),
        "openvino xattention": paged(genai.SparseAttentionMode.XATTENTION),
    }


def llama_cpp(gguf: Path, prompt: list[int], threads: int) -> dict[str, Prefill]:
    """Return llama.cpp, whose prefill is dense."""
    _require("llama_cpp", "llama-cpp-python")
    import llama_cpp as package

    model = package.Llama(
        str(gguf),
        n_ctx=len(prompt) + 1,
        n_batch=2048,
        n_ubatch=512,
        n_threads=threads,
        n_threads_batch=threads,
        verbose=False,
    )

    def prefill() -> None:
        model.reset()
        model.eval(prompt)

    return {"llama.cpp": prefill}


def _require(module: str, package: str) -> None:
    if importlib.util.find_spec(module) is None:
        raise PeerMissing(f"{package} is not installed, so it is left out: pip install {package}")
