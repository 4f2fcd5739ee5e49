"""Reports of evaluations: where they go, the JSON files, versions, machine and build."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

import h2o_prefill
from h2o_prefill._atomic_write import replaced_file
from h2o_prefill.config import crossover_text
from h2o_prefill.presets import PRESETS, SPARSE_PRESETS


def output_folder(path: str | os.PathLike[str], argument: str) -> Path:
    """Return a folder to write into, which may be new; raise ValueError for a file."""
    folder = Path(path).expanduser()
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{argument} must be a folder, got the file {str(path)!r}")
    return folder


def build_report(config: dict[str, Any], **parts: Any) -> dict[str, Any]:
    """Return the report of an evaluation: {environment, config, **parts}."""
    return {"environment": environment(), "config": config, **parts}


def write_json(values: dict[str, Any], path: str | os.PathLike[str]) -> None:
    """Write plain values as a JSON file, whole or not at all; see `format_json`."""
    text = format_json(values)
    with replaced_file(path) as scratch:
        scratch.write_text(text, encoding="utf-8")


def format_json(values: dict[str, Any]) -> str:
    """Return plain values as JSON. Numbers that JSON does not know (NaN) become null."""
    known = json.loads(json.dumps(values), parse_constant=lambda _: None)
    return json.dumps(known, indent=2) + "\n"


_PACKAGES = ("transformers", "tokenizers", "safetensors", "gguf", "datasets", "numpy")


def environment() -> dict[str, Any]:
    """Describe software, machine and build, as plain values for JSON."""
    library = {**h2o_prefill.build_info(), "cpu_isa_used": torch.ops.h2o_prefill.cpu_isa()}
    if gpu_name() and torch.ops.h2o_prefill.has_cuda():
        library["cuda_arch_used"] = torch.ops.h2o_prefill.cuda_arch()
    return {
        "h2o_prefill": h2o_prefill.__version__,
        "commit": commit(),
        "library": library,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "packages": {
            x.name: x.version for x in importlib.metadata.distributions() if x.name in _PACKAGES
        },
        "platform": platform.platform(),
        "cpu": cpu_name(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "cuda": torch.version.cuda,
        "gpu": gpu_name(),
    }


def commit() -> str | None:
    """Return the git commit of the checkout that this runs from, "+" for one with changes."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    words = "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty=+"
    try:
        return subprocess.check_output(["git", "-C", root, *words], text=True).strip()
    except (OSError, subprocess.SubprocessError):
        return None


def crossovers() -> dict[str, str]:
    """Return from which length on a preset is faster than dense attention, by dtype."""
    device = "cuda" if gpu_name() else "cpu"
    texts = {}
    for dtype in (torch.float32, torch.bfloat16):
        like = torch.empty(0, device=device, dtype=dtype)
        for name in SPARSE_PRESETS:
            shortest = PRESETS[name].shortest_sparse_prompt(like)
            text = crossover_text(like, shortest)
            texts[f"{name}, {str(dtype).removeprefix('torch.')}"] = text
    return texts


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
