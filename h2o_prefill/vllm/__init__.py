"""Prefill of long prompts inside of vLLM, on CPUs: `pip install 'h2o_prefill[vllm]'`.

vLLM finds `register` by its entry point. Pages, batches and decoding stay vLLM's.
"""

from __future__ import annotations

import functools
import multiprocessing
import os


@functools.cache
def register() -> None:
    """Register the backend in this process, on CPUs and with a vLLM that has what it uses.

    Without `H2O_PREFILL_SETTINGS` in the environment vLLM stays as it is.
    """
    from vllm import version
    from vllm.logger import init_logger
    from vllm.platforms import current_platform

    from h2o_prefill.vllm import contract

    logger = init_logger("vllm.h2o_prefill")
    # One line for all processes of an engine.
    is_first = multiprocessing.parent_process() is None
    if not os.environ.get("H2O_PREFILL_SETTINGS"):
        if is_first:
            logger.info("h2o_prefill: H2O_PREFILL_SETTINGS is not set: it does nothing")
        return
    warn = logger.warning if is_first else logger.debug
    if not current_platform.is_cpu():
        warn("h2o_prefill: only for vLLM on CPUs: it does nothing here")
        return
    (oldest, newest), minor = contract.TESTED, version.__version_tuple__[:2]
    problem = "it is older than {}.{}".format(*oldest) if minor < oldest else contract.problem()
    if problem is not None:
        warn("h2o_prefill: it does nothing in vLLM %s: %s", version.__version__, problem)
        return
    if minor > newest:
        warn("h2o_prefill: vLLM %s is newer than %d.%d, not tested", version.__version__, *newest)
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    from h2o_prefill.vllm import counters, runner

    runner.rules(), runner.checkpoint_bytes()  # Wrong settings end the process here.
    # The platform ignores a backend that was selected, but resolves its own name by this.
    register_backend(AttentionBackendEnum.CPU_ATTN, "h2o_prefill.vllm.backend.Backend")
    runner.install()
    counters.show()
