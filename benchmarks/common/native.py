"""Builds the C++ parts of the benchmarks on first use, and loads them."""

from __future__ import annotations

import ctypes
import hashlib
import subprocess
import sys
from functools import cache
from pathlib import Path

import torch

import h2o_prefill

SOURCES = Path(__file__).parents[1] / "cpp"
# One folder for each installed PyTorch: the parts are linked to it.
_TORCH = hashlib.sha256(f"{torch.__version__} {torch.__file__}".encode()).hexdigest()[:8]
BUILD = SOURCES.parents[1] / "build" / "benchmarks" / _TORCH


@cache
def load(target: str) -> ctypes.CDLL:
    """Build and load one of the libraries of cpp/CMakeLists.txt."""
    packages = f"{torch.utils.cmake_prefix_path};{Path(h2o_prefill.__file__).parent}"
    _run("cmake", "-S", SOURCES, "-B", BUILD, f"-DCMAKE_PREFIX_PATH={packages}")
    _run("cmake", "--build", BUILD, "--target", target, "--parallel")
    return ctypes.CDLL(str(BUILD / f"lib{target}.so"))


def _run(tool: str, *arguments: object) -> None:
    own = Path(sys.executable).parent / tool
    command = [str(own) if own.exists() else tool, *map(str, arguments)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise RuntimeError(f"{tool} is needed to build {SOURCES}: pip install {tool}") from error
    if done.returncode:
        end = "\n".join((done.stdout + done.stderr).splitlines()[-20:])
        raise RuntimeError(f"cannot build {SOURCES}:\n{end}")
