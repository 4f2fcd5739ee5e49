"""Where a result came from: versions, machine, build."""

from __future__ import annotations

import importlib.metadata
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

import h2o_prefill

_PACKAGES = ("transformers", "tokenizers", "safetensors", "gguf", "datasets", "numpy")


def environment() -> dict[str, Any]:
    """Describe software, machine and build, as plain values for JSON."""
    return {
        "h2o_prefill": h2o_prefill.__version__,
        "commit": commit(),
        "library": library(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "packages": {name: package_version(name) for name in _PACKAGES},
        "platform": platform.platform(),
        "cpu": cpu_name(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "cuda": torch.version.cuda,
        "gpu": gpu_name(),
    }


def package_version(name: str) -> str | None:
    """Return the installed version of a package, None if it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def commit() -> str | None:
    """Return the git commit of the checkout that this runs from, None for an installed copy.

    A trailing "+" says that the checkout has changes.
    """
    root = Path(__file__).resolve().parents[2]
    # Only the package's own checkout: a virtual environment may lie in the checkout of another
    # project.
    if not (root / ".git").exists():
        return None
    try:
        head = _git(root, "rev-parse", "HEAD")
        return head + ("+" if _git(root, "status", "--porcelain") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def library() -> dict[str, Any]:
    """Describe the compiled library."""
    return {**h2o_prefill.build_info(), "cpu_isa_used": torch.ops.h2o_prefill.cpu_isa()}


def has_cuda() -> bool:
    """Return whether CUDA kernels were compiled in."""
    return bool(torch.ops.h2o_prefill.has_cuda())


def cuda_kernels() -> dict[str, str]:
    """Say for which GPUs and problems there are CUDA kernels, and what serves the rest."""
    if not has_cuda():
        return {"built": "no: the library was built without CUDA, GPUs run the composite versions"}
    return {
        "built": f"for {h2o_prefill.build_info()['cuda_archs']}",
        "dtypes": "float32, bfloat16, float16",
        "head dims": "8 to 256 in steps of 8, padded to 64, 96, 128 or 256",
        "composite versions": "float64; other head dims, since kernels copy 16 bytes at a time",
        "dense attention": "PyTorch's own for one query, or as many queries as keys",
    }


def linear_attention() -> dict[str, str]:
    """Say what computes `chunkwise_linear_attention` and its gradient, and where."""
    on_cuda = "cuda" in operators()["chunkwise_linear_attention"]
    dtypes = "kernels for float32, bfloat16, float16"
    return {
        "CPU": f"{dtypes}; all head dims, one direction and both",
        "CUDA": f"{dtypes}; head dims up to 128" if on_cuda else "composite version",
        "composite version": "float64; larger head dims on CUDA; devices without kernels",
    }


def operators() -> dict[str, list[str]]:
    """Return the operators of `h2o_prefill.ops`, each with its devices.

    "any" stands for the version composed of other operators.
    """
    keys = {
        "CPU": "cpu",
        "CUDA": "cuda",
        "CompositeExplicitAutograd": "any",
        "CompositeImplicitAutograd": "any",
    }
    names = (name.partition("h2o_prefill::")[2] for name in torch._C._dispatch_get_all_op_names())
    return {
        name: [
            device
            for key, device in keys.items()
            if torch._C._dispatch_has_kernel_for_dispatch_key(f"h2o_prefill::{name}", key)
        ]
        for name in sorted(names)
        if name and hasattr(h2o_prefill.ops, name)
    }


def cpu_name() -> str:
    """Return the processor's model name."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def gpu_name() -> str | None:
    """Return the first GPU's name, None without one."""
    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else None


def _git(root: Path, *arguments: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=10, check=True
    )
    return done.stdout.strip()
