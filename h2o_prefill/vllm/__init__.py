"""Prefill of long prompts inside of vLLM: `pip install 'h2o_prefill[vllm]'`.

vLLM finds `register` by its entry point. Pages, batches and decoding stay vLLM's.
"""

from __future__ import annotations

import functools
import multiprocessing
import os


@functools.cache
def register() -> None:
    """Register the backend in this process, with a vLLM that has what it uses.

    Without `H2O_PREFILL_SETTINGS` in the environment vLLM stays as it is, and on CUDA without
    `H2O_PREFILL_CUDA=1`.
    """
    from vllm import version
    from vllm.logger import init_logger
    from vllm.platforms import current_platform

    from h2o_prefill import build_info
    from h2o_prefill.vllm import contract

    logger = init_logger("vllm.h2o_prefill")
    # One line for all processes of an engine.
    is_first = multiprocessing.parent_process() is None
    if not os.environ.get("H2O_PREFILL_SETTINGS"):
        if is_first:
            logger.info("h2o_prefill: H2O_PREFILL_SETTINGS is not set: it does nothing")
        return
    warn = logger.warning if is_first else logger.debug
    device = "cuda" if current_platform.is_cuda() else "cpu"
    (oldest, newest), minor = contract.TESTED, version.__version_tuple__[:2]

    def problem() -> str | None:
        if device == "cpu" and not current_platform.is_cpu():
            return "it is for CPUs and CUDA alone"
        if device == "cuda" and os.environ.get("H2O_PREFILL_CUDA") != "1":
            return "not run on a GPU yet, H2O_PREFILL_CUDA=1 switches it on"
        if device == "cuda" and "cuda_archs" not in build_info():
            return "it was built without CUDA"
        if minor < oldest:
            return "it is older than {}.{}".format(*oldest)
        return contract.problem(device)

    if (reason := problem()) is not None:
        warn("h2o_prefill: it does nothing in vLLM %s: %s", version.__version__, reason)
        return
    if minor > newest:
        warn("h2o_prefill: vLLM %s is newer than %d.%d, not tested", version.__version__, *newest)
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    from h2o_prefill.vllm import counters, runner

    runner.rules(), runner.checkpoint_bytes()  # Wrong settings end the process here.
    # The class of a name of vLLM's: the platform for CPUs ignores a backend that was selected.
    name = {"cpu": "CPU_ATTN", "cuda": "FLASH_ATTN"}[device]
    register_backend(getattr(AttentionBackendEnum, name), f"h2o_prefill.vllm.{device}.Backend")
    runner.install()
    counters.show()
