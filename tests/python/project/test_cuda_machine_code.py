"""What the compiler makes of the kernels of sm_90a: waits, exponentials, registers.

Needs nvcc and cuobjdump, of a CUDA toolkit or of Triton, but no GPU.
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import ptxas_report
from machine_code import MachineCode

WAIT = re.compile(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x(\d)")
# What producers keep of their registers, and what consumers get.
REGISTERS = {"USETMAXREG.DEALLOC": 56, "USETMAXREG.TRY_ALLOC": 224}


def instructions(source, folder):
    """Compile a file of kernels for sm_90a; return the instructions of each kernel."""
    nvcc, cuobjdump = ptxas_report.find_nvcc(), ptxas_report.find_cuobjdump()
    if nvcc is None or cuobjdump is None:
        pytest.skip("needs nvcc and cuobjdump: set CUDA_HOME to a CUDA toolkit")
    csrc, cubin = ptxas_report.CSRC, folder / "kernels.cubin"
    options = ["-std=c++20", "-O3", "-cubin", f"-I{csrc}", f"-I{csrc}/include"]
    arch = "-gencode=arch=compute_90a,code=sm_90a"
    kernels = csrc / "kernels" / "cuda" / source
    subprocess.run([nvcc, *options, arch, kernels, "-o", cubin], check=True)
    return ptxas_report.disassemble(cuobjdump, cubin)


@pytest.mark.slow
def test_exponentials_overlap_the_products_and_warps_wait_in_one_place(tmp_path):
    kernels = instructions("attend_forward_sm90.cu", tmp_path)
    assert kernels
    for name, text in kernels.items():
        # The first tile; the loop: products of the keys, exponentials of a tile of 64 rows and
        # 128 keys and of two maxima, products of the values; the last tile. A wait for the
        # values in more places would be one at which the warps of a warpgroup may differ.
        assert WAIT.findall(text) == ["0", "1", "0", "0"], name
        assert MachineCode(text).overlapped("MUFU.EX2") >= 64 * 128 // 128, name


@pytest.mark.slow
@pytest.mark.parametrize("source", ["attend_forward_sm90.cu", "column_sums_sm90.cu"])
def test_registers_of_roles_and_of_products_under_way(source, tmp_path):
    kernels = {n: x for n, x in instructions(source, tmp_path).items() if "sm90_kernel" in n}
    assert kernels
    for name, text in kernels.items():
        code, roles = MachineCode(text), []
        for exchange, registers in REGISTERS.items():
            assert f"{registers:#x}" in code.operands_of(exchange), (name, exchange)
            roles.append(code.reached(exchange))
            assert max(number for i in roles[-1] for number in code.registers(i)) < registers, name
        assert not roles[0] & roles[1], name
        assert list(code.touched_in_flight()) == [], name
        without_waits = MachineCode(text.replace("WARPGROUP.DEPBAR", "NOP"))
        assert list(without_waits.touched_in_flight()), name
