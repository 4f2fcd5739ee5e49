"""Every CUDA kernel compiles for every architecture within its registers, without spills where the
library is built for more than one.

Needs nvcc, but no GPU.
"""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import ptxas_report
from ptxas_report import BUDGET


@pytest.mark.slow
@pytest.mark.parametrize("arch", ptxas_report.ARCHS)
def test_kernels_compile_within_their_registers(arch):
    nvcc = ptxas_report.find_nvcc()
    if nvcc is None:
        pytest.skip("needs nvcc: set CUDA_HOME to a CUDA toolkit")
    if arch not in ptxas_report.known_archs(nvcc):
        pytest.skip(f"needs an nvcc that knows {arch}")
    compiled = ptxas_report.compile_all(nvcc, [arch])
    errors = [f"{c.source}:\n{c.error}" for c in compiled if c.error]
    assert not errors, "\n".join(errors)
    kernels = [kernel for each in compiled for kernel in each.kernels]
    assert kernels
    allowed = ptxas_report.SPILLED.get(arch, 0)
    assert not [k for k in kernels if max(k.stack, k.spill_stores) > allowed]
    assert allowed or not [k for k in kernels if k.spill_loads]
    # C7508, C7510, C7512 and C7514 say that wgmma instructions wait for one another.
    assert not [(c.source, c.serialised) for c in compiled if c.serialised]
    table = json.loads(BUDGET.read_text(encoding="utf-8"))
    budget = {family: row[arch] for family, row in table.items() if arch in row}
    assert budget.keys() == {k.family for k in kernels}, f"{BUDGET.name}: run ptxas_report.py"
    above = [k for k in kernels if k.registers > budget[k.family]]
    assert not above, f"more registers than in {BUDGET.name}"


def test_every_source_is_in_the_build():
    listed = (ptxas_report.CSRC / "sources.cmake").read_text(encoding="utf-8")
    folder = ptxas_report.CSRC / "kernels" / "cuda"
    found = [f"kernels/cuda/{file.name}" for file in folder.iterdir()]
    assert [name for name in found if name.endswith((".cu", ".cpp")) and name not in listed] == []
