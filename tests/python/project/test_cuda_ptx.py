"""The kernels as nvcc compiles them, on the emulation: their PTX, translated to C++, in the place
of their sources, under the tests of tests/cpp/kernels/cuda.

Needs nvcc, but no GPU.
"""

import os
import re
import subprocess
from pathlib import Path

import pytest

BUILD = Path(__file__).parents[3] / "build" / "emulation"
FOLDER = BUILD / "tests" / "cpp" / "kernels" / "cuda" / "ptx"


@pytest.fixture(scope="module")
def programs():
    """Build the tests; return their folder."""
    root = BUILD.parents[1]
    subprocess.run(["cmake", "--preset", "emulation"], cwd=root, check=True, capture_output=True)
    if not FOLDER.exists():
        pytest.skip("needs nvcc of PyTorch's CUDA version: set CUDA_HOME to a CUDA toolkit")
    subprocess.run(["cmake", "--build", BUILD, "--target", "ptx_tests"], check=True)
    return FOLDER


@pytest.mark.slow
@pytest.mark.parametrize("program", ["attention", "chunk_end", "gather_pages"])
def test_translated_ptx_passes_the_tests_of_the_kernels(programs, program):
    path = programs / f"ptx_{program}"
    symbols = subprocess.run(["nm", "-C", path], check=True, capture_output=True, text=True).stdout
    # A kernel that was compiled for the host would be a weak symbol, as templates are.
    kernels = re.findall(r" ([TW]) (.*_kernel(?:<.*>)?\([\w:]+\))$", symbols, re.MULTILINE)
    assert kernels
    assert [name for kind, name in kernels if kind == "W"] == []
    subprocess.run([path], env=os.environ | {"ASAN_OPTIONS": "detect_leaks=0"}, check=True)
