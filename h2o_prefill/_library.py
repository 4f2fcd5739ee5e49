"""Find and load the native library; each failure is one clear ImportError."""

from __future__ import annotations

import importlib
import sys
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

LIBRARY = Path(__file__).parent / "lib" / "libh2o_prefill.so"
_REBUILD = (
    "rebuild it against this PyTorch in its source tree: "
    "pip install --no-build-isolation --force-reinstall --no-deps ."
)


def build_info() -> dict[str, Any]:
    """Describe this build: version, PyTorch version, compiler, instruction sets, CUDA.

    Raises ImportError if the native library is not built for this Python.
    """
    try:
        module = importlib.import_module("h2o_prefill._C")
    except ImportError as error:
        here = Path(__file__).resolve().parent
        for other in (Path(folder, "h2o_prefill").resolve() for folder in sys.path):
            if other != here and (other / f"_C{EXTENSION_SUFFIXES[0]}").exists():
                raise ImportError(
                    f"{here} hides the h2o_prefill that is installed in {other}: "
                    "run Python in another folder"
                ) from error
        raise ImportError(
            f"the native library of h2o_prefill is not built for this Python ({error}): "
            "run `pip install --no-build-isolation .` in its source tree"
        ) from error
    return dict(module.build_info())


def cmake_prefix_path() -> str:
    """Return the folder to add to CMAKE_PREFIX_PATH, so that `find_package(H2OPrefill)` succeeds.

    Add PyTorch's, `torch.utils.cmake_prefix_path`, as well.
    """
    return str(LIBRARY.parents[1])


def load_library() -> None:
    """Load the operators and classes into `torch.ops.h2o_prefill` and `torch.classes.h2o_prefill`.

    Raises ImportError if PyTorch or the library is missing, or if they are incompatible.
    """
    try:
        import torch
    except ImportError as error:
        raise ImportError("h2o_prefill needs PyTorch: pip install 'torch>=2.11'") from error
    built_with = build_info()["torch"]
    if _minor_version(built_with) != _minor_version(torch.__version__):
        raise ImportError(
            f"h2o_prefill was built with PyTorch {built_with}, but {torch.__version__} is "
            f"installed: pip install torch=={'.'.join(_minor_version(built_with))}.*, or {_REBUILD}"
        )
    if not LIBRARY.exists():
        raise ImportError(f"the native library of h2o_prefill is missing at {LIBRARY}: {_REBUILD}")
    try:
        torch.ops.load_library(LIBRARY)
    except OSError as error:
        raise ImportError(
            f"the native library of h2o_prefill cannot be loaded ({error}): {_REBUILD}"
        ) from error


def _minor_version(version: str) -> tuple[str, ...]:
    return tuple(str(version).split(".")[:2])
