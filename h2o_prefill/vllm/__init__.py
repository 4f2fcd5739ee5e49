"""Prefill of long prompts inside of vLLM, on CPUs: `pip install 'h2o_prefill[vllm]'`.

vLLM finds `register` by its entry point. Pages, batches and decoding stay vLLM's.
"""

from __future__ import annotations

import functools
import multiprocessing
import os

# One minor version at a time: vLLM's inside has no stable interface.
SUPPORTED = "0.32"


@functools.cache
def register() -> None:
    """Register the backend in this process, on CPUs and with the version that is supported.

    Without `H2O_PREFILL_SETTINGS` in the environment vLLM stays as it is.
    """
    from vllm import version
    from vllm.logger import init_logger
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    logger = init_logger("vllm.h2o_prefill")
    if not os.environ.get("H2O_PREFILL_SETTINGS"):
        if multiprocessing.parent_process() is None:
            logger.info("h2o_prefill: H2O_PREFILL_SETTINGS is not set: it does nothing")
        return
    if ".".join(map(str, version.__version_tuple__[:2])) != SUPPORTED:
        found = version.__version__
        logger.warning("h2o_prefill: needs vLLM %s.*, got %s: it does nothing", SUPPORTED, found)
        return
    if not current_platform.is_cpu():
        logger.warning("h2o_prefill: only for vLLM on CPUs: it does nothing here")
        return
    from h2o_prefill.vllm import counters, runner

    runner.rules(), runner.checkpoint_bytes()  # Wrong settings end the process here.
    # The platform ignores a backend that was selected, but resolves its own name by this.
    register_backend(AttentionBackendEnum.CPU_ATTN, "h2o_prefill.vllm.backend.Backend")
    runner.install()
    counters.show()
