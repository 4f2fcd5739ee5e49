"""Compiles the CUDA kernels and reads what ptxas says of each.

As a program it writes the table of registers anew: python tests/python/project/ptxas_report.py
"""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

CSRC = Path(__file__).parents[3] / "csrc"
BUDGET = Path(__file__).parent / "register_budget.json"

# Machine code that the library holds, what its PTX, of 9.0, becomes on a later GPU, and what a
# build for that GPU alone holds.
ARCHS = {
    "sm_80": "compute_80", "sm_90a": "compute_90a", "sm_120": "compute_90",
    "sm_100 alone": "compute_100", "sm_120 alone": "compute_120",
}  # fmt: skip
# Bytes that a kernel may spill.
SPILLED = {"sm_100 alone": 16, "sm_120 alone": 32}
PROCESSES = 2

_SERIALISED = re.compile(r"C75(?:08|10|12|14)\b.*")
_ENTRY = re.compile(r"Compiling entry function '(\w+)'")
_MEMORY = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_REGISTERS = re.compile(r"Used (\d+) registers")


@dataclass(frozen=True)
class Kernel:
    """One kernel as compiled for one architecture."""

    mangled: str
    arch: str
    registers: int
    stack: int
    spill_stores: int
    spill_loads: int

    @property
    def family(self) -> str:
        """The kernel's name and its integer template arguments: all dtypes share a budget."""
        return family(self.mangled)


@dataclass(frozen=True)
class Compiled:
    """What compiling one source for one architecture said."""

    source: str
    arch: str
    error: str | None
    kernels: tuple[Kernel, ...]
    serialised: tuple[str, ...]


def sources() -> list[Path]:
    """Return the files that hold kernels."""
    return sorted((CSRC / "kernels" / "cuda").glob("*.cu"))


def find_nvcc() -> str | None:
    """Return the CUDA compiler that a build would take."""
    homes = [os.environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    path = os.pathsep.join([*(f"{home}/bin" for home in homes), os.environ.get("PATH", "")])
    return shutil.which("nvcc", path=path) or shutil.which("nvcc", path="/usr/local/cuda/bin")


def find_cuobjdump() -> str | None:
    """Return the disassembler, Triton's where no toolkit has one."""
    found = shutil.which("cuobjdump") or shutil.which("cuobjdump", path="/usr/local/cuda/bin")
    triton = importlib.util.find_spec("triton")
    for folder in (triton.submodule_search_locations or ()) if triton else ():
        found = found or shutil.which("cuobjdump", path=f"{folder}/backends/nvidia/bin")
    return found


def disassemble(cuobjdump: str, path: Path) -> dict[str, str]:
    """Return the machine code of each kernel of a compiled file."""
    command = [cuobjdump, "--dump-sass", str(path)]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    _, *functions = re.split(r"\n\s*Function : ", text)
    return {function.split("\n")[0]: function for function in functions}


def known_archs(nvcc: str) -> list[str]:
    """Return the `ARCHS` that a compiler knows."""
    listed = subprocess.run([nvcc, "--list-gpu-code"], capture_output=True, text=True, check=True)
    # The list leaves out what is for one architecture alone, like 90a.
    return [arch for arch in ARCHS if arch.split()[0].rstrip("a") in listed.stdout.split()]


def compile_all(nvcc: str, archs: list[str]) -> list[Compiled]:
    """Compile every source for every architecture, two at a time, the longest sources first."""
    by_size = sorted(sources(), key=lambda source: -source.stat().st_size)
    jobs = [(source, arch) for source in by_size for arch in archs]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(PROCESSES) as pool:
        return list(pool.map(lambda job: _compile(nvcc, *job, Path(folder)), jobs))


def family(mangled: str) -> str:
    """Return "name<1, 2>" of a mangled kernel with the int arguments 1 and 2.

    Other template arguments, of enumerations, types and truth values, are left out.
    """
    rest = mangled.removeprefix("_Z").removeprefix("N")
    name = ""
    while length := re.match(r"\d+", rest):
        end = length.end() + int(length[0])
        name, rest = rest[length.end() : end], rest[end:]
    numbers = re.findall(r"(?<=[IE])Li(\d+)E", rest) if rest.startswith("I") else []
    return f"{name}<{', '.join(numbers)}>" if numbers else name


def parse(output: str, arch: str) -> tuple[Kernel, ...]:
    """Read the kernels from the output of `-Xptxas -v`."""
    kernels = []
    for entry in re.split(r"(?=ptxas info\s*: Compiling entry function)", output)[1:]:
        name, memory, registers = (p.search(entry) for p in (_ENTRY, _MEMORY, _REGISTERS))
        if name is None or memory is None or registers is None:
            raise ValueError(f"the output of ptxas is not understood:\n{entry}")
        counts = (int(registers[1]), *map(int, memory.groups()))
        kernels.append(Kernel(name[1], arch, *counts))
    return tuple(kernels)


def _compile(nvcc: str, source: Path, arch: str, folder: Path) -> Compiled:
    built = folder / f"{source.stem}.{arch}.o"
    command = [
        nvcc, "-std=c++20", "-O3", "-DNDEBUG", f"-I{CSRC}", f"-I{CSRC}/include", "-Xptxas", "-v",
        "-gencode", f"arch={ARCHS[arch]},code={arch.split()[0]}",
        "-c", source, "-o", built,
    ]  # fmt: skip
    done = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, check=False
    )
    output = done.stdout + done.stderr
    if done.returncode:
        return Compiled(source.name, arch, output, (), ())
    return Compiled(
        source.name, arch, None, parse(output, arch), tuple(_SERIALISED.findall(output))
    )


def main() -> None:
    """Write the table from what the kernels take now, rounded up to what the hardware hands out."""
    nvcc = find_nvcc()
    if nvcc is None:
        raise SystemExit("nvcc is needed")
    table: dict[str, dict[str, int]] = {}
    for compiled in compile_all(nvcc, known_archs(nvcc)):
        if compiled.error:
            raise SystemExit(compiled.error)
        for kernel in compiled.kernels:
            row = table.setdefault(kernel.family, {})
            row[kernel.arch] = max(row.get(kernel.arch, 0), -(-kernel.registers // 8) * 8)
    ordered = {name: {a: row[a] for a in ARCHS if a in row} for name, row in sorted(table.items())}
    rows = ",\n".join(f"  {json.dumps(name)}: {json.dumps(row)}" for name, row in ordered.items())
    BUDGET.write_text(f"{{\n{rows}\n}}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
