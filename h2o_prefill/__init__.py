"""Faster prefill for long prompts: chunked sparse attention with an H2O memory set.

`enable(model)` makes a Hugging Face model prefill sparsely; `ops` contains the operators,
`reference` the method in readable PyTorch, `eval` measurements, `generation` what runs prompts.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from h2o_prefill._library import build_info, cmake_prefix_path, load_library

load_library()

from h2o_prefill import _meta as _meta  # noqa: E402
from h2o_prefill import ops  # noqa: E402
from h2o_prefill.attention import ChunkedSparseAttention  # noqa: E402
from h2o_prefill.config import PrefillConfig  # noqa: E402
from h2o_prefill.linear import ChunkwiseLinearAttention, linear_attention  # noqa: E402
from h2o_prefill.presets import PRESETS, preset_config  # noqa: E402
from h2o_prefill.state import estimated_kl  # noqa: E402

if TYPE_CHECKING:
    from h2o_prefill import distributed as distributed
    from h2o_prefill import reference as reference
    from h2o_prefill.eval import compare as compare
    from h2o_prefill.generation.prefix_cache import PrefixCache as PrefixCache
    from h2o_prefill.hf.cache import ChunkedPrefillCache as ChunkedPrefillCache
    from h2o_prefill.hf.enable import disable as disable
    from h2o_prefill.hf.enable import enable as enable
    from h2o_prefill.hf.enable import explain as explain
    from h2o_prefill.hf.prefill import chunked_prefill as chunked_prefill
    from h2o_prefill.package import PrefillPackage as PrefillPackage

__version__: str = build_info()["version"]

# Names that are loaded on first use, and their modules: importing this package imports neither
# transformers nor the dependencies of evaluation.
_LAZY = {
    "ChunkedPrefillCache": "h2o_prefill.hf",
    "PrefillPackage": "h2o_prefill.package",
    "PrefixCache": "h2o_prefill.generation.prefix_cache",
    "chunked_prefill": "h2o_prefill.hf",
    "compare": "h2o_prefill.eval",
    "disable": "h2o_prefill.hf",
    "enable": "h2o_prefill.hf",
    "explain": "h2o_prefill.hf",
}
# Modules that are loaded on first use. `import *` takes two of them: `eval` is also a builtin.
_MODULES = ("distributed", "eval", "generation", "reference", "vocabulary")

__all__ = [
    "PRESETS",
    "ChunkedSparseAttention",
    "ChunkwiseLinearAttention",
    "PrefillConfig",
    "build_info",
    "cmake_prefix_path",
    "distributed",
    "estimated_kl",
    "linear_attention",
    "ops",
    "preset_config",
    "reference",
    *_LAZY,
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"h2o_prefill.{name}")
    if name not in _LAZY:
        raise AttributeError(f"module 'h2o_prefill' has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
