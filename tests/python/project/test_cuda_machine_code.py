"""What the compiler makes of the kernels of sm_90a: the order of waits and exponentials.

Needs nvcc and cuobjdump, of a CUDA toolkit or of Triton, but no GPU.
"""

import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import ptxas_report

WAIT = re.compile(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x(\d)")
REGISTERS = {"USETMAXREG.DEALLOC": "0x38", "USETMAXREG.TRY_ALLOC": "0xe0"}


def find_cuobjdump() -> str | None:
    """Return the disassembler, that of Triton where no toolkit has one."""
    found = shutil.which("cuobjdump") or shutil.which("cuobjdump", path="/usr/local/cuda/bin")
    triton = importlib.util.find_spec("triton")
    for folder in (triton.submodule_search_locations or ()) if triton else ():
        found = found or shutil.which("cuobjdump", path=f"{folder}/backends/nvidia/bin")
    return found


def instructions(source: str, folder: Path) -> dict[str, list[str]]:
    """Compile a file of kernels for sm_90a; return the instructions of each kernel, in order."""
    nvcc, cuobjdump = ptxas_report.find_nvcc(), find_cuobjdump()
    if nvcc is None or cuobjdump is None:
        pytest.skip("needs nvcc and cuobjdump: set CUDA_HOME to a CUDA toolkit")
    csrc, cubin = ptxas_report.CSRC, folder / "kernels.cubin"
    options = ["-std=c++20", "-O3", "-cubin", f"-I{csrc}", f"-I{csrc}/include"]
    arch = "-gencode=arch=compute_90a,code=sm_90a"
    kernels = csrc / "kernels" / "cuda" / source
    subprocess.run([nvcc, *options, arch, kernels, "-o", cubin], check=True)
    text = subprocess.run(
        [cuobjdump, "--dump-sass", cubin], check=True, capture_output=True, text=True
    ).stdout
    _, *functions = re.split(r"\n\s*Function : ", text)
    line = re.compile(r"/\*[0-9a-f]{4,5}\*/\s+(.*?)\s*;")
    return {function.split("\n")[0]: line.findall(function) for function in functions}


def between_waits(code: list[str]) -> list[tuple[int, int]]:
    """Return, for each wait, how many groups it leaves and the exponentials since the last one."""
    found, exponentials = [], 0
    for instruction in code:
        exponentials += "MUFU.EX2" in instruction
        if wait := WAIT.search(instruction):
            found.append((int(wait[1]), exponentials))
            exponentials = 0
    return found


@pytest.mark.slow
def test_exponentials_overlap_the_products_and_warps_wait_in_one_place(tmp_path: Path) -> None:
    kernels = instructions("attend_forward_sm90.cu", tmp_path)
    assert kernels
    for name, code in kernels.items():
        # The first tile; the loop: products of the keys, then, after the exponentials of a tile of
        # 64 rows and 128 keys and of two maxima, those of the values; the last tile. A wait for the
        # values in more places would be one at which the warps of a warpgroup may differ.
        waits = between_waits(code)
        assert [groups for groups, _ in waits] == [0, 1, 0, 0], name
        assert waits[2][1] >= 64 * 128 // 128, name


@pytest.mark.slow
@pytest.mark.parametrize("source", ["attend_forward_sm90.cu", "column_sums_sm90.cu"])
def test_warpgroups_exchange_their_registers(source: str, tmp_path: Path) -> None:
    kernels = {n: x for n, x in instructions(source, tmp_path).items() if "sm90_kernel" in n}
    assert kernels
    for name, code in kernels.items():
        for instruction, registers in REGISTERS.items():
            assert any(instruction in x and registers in x for x in code), (name, instruction)
        highest = max(int(number) for x in code for number in re.findall(r"\bR(\d+)\b", x))
        assert highest < int(REGISTERS["USETMAXREG.TRY_ALLOC"], 16), name
