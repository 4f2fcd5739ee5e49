"""Graphs of whole models, compiled into packages for this CPU or for another one."""

from __future__ import annotations

import json
import platform
import shutil
import subprocess
import tempfile
import zipfile
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from h2o_prefill._atomic_write import replaced_file
from h2o_prefill.package import NAME, VERSION, WEIGHTS, PackageInfo


def check_compiler(machine: str) -> None:
    """Raise ValueError unless there is a compiler for an architecture, "" for this one."""
    compiler = _compiler_for(machine)
    if machine not in ("", platform.machine()) and not shutil.which(compiler):
        raise ValueError(f"machine {machine} needs the compiler {compiler}")


def compile_package(
    program: torch.export.ExportedProgram, info: PackageInfo, folder: Path
) -> PackageInfo:
    """Compile a graph into a package; one that is there is replaced.

    Returns the metadata, with what only the files tell.
    """
    options: dict[str, Any] = {
        "aot_inductor.package_constants_in_so": False,
        # Else the code runs with as many threads as there are here.
        "cpp.dynamic_threads": True,
    }
    is_foreign = info.machine != platform.machine()
    if is_foreign:
        options |= {"aot_inductor.package_cpp_only": True, "cpp.simdlen": 1}
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch, torch.no_grad():
        archive = torch._inductor.aoti_compile_and_package(
            program, package_path=f"{scratch}/code.pt2", inductor_configs=options
        )
        with zipfile.ZipFile(archive) as files:
            files.extractall(scratch)
        if is_foreign:
            library = _cross_compile(Path(scratch), info.machine)
        else:
            (library,) = Path(scratch).rglob("*.so")
        code = {suffix: library.with_suffix(suffix).read_bytes() for suffix in (".so", ".json")}
    # Nothing of libtorch.so is called, which in wheels for CUDA loads CUDA's libraries.
    code[".so"] = code[".so"].replace(b"\0libtorch.so\0", b"\0libc10.so\0\0\0")
    crc = str(zlib.crc32(code[".json"], zlib.crc32(code[".so"])))
    for suffix, content in code.items():
        with replaced_file(folder / f"code-{crc}{suffix}") as path:
            path.write_bytes(content)
    constants: Any = {**program.state_dict, **program.constants}
    weights = {name: tensor.detach() for name, tensor in constants.items()}
    storages = {x.data_ptr(): x.untyped_storage().nbytes() for x in weights.values()}
    info = replace(info, weights_bytes=sum(storages.values()), code=crc)
    with replaced_file(folder / WEIGHTS) as path:
        torch.save((NAME, VERSION, info.to_metadata(), weights), path)
    for path in folder.glob("code-*"):
        if path.stem != f"code-{crc}":
            path.unlink()
    return info


def _compiler_for(machine: str) -> str:
    return f"{machine}-linux-gnu-g++"


def _cross_compile(folder: Path, machine: str) -> Path:
    """Compile the source that Inductor wrote for another machine; return the library."""
    (source,) = folder.rglob("*.wrapper.cpp")
    flags = json.loads(source.with_name(f"{source.stem}_compile_flags.json").read_text())
    # Inductor compiles for this CPU, and leaves vectors to its own code, which has none here.
    native = "march=native", "fno-tree-loop-vectorize", "c"
    options = [f"-{flag}" for flag in flags["cflags"] if flag not in native]
    options += [f"-D{name.strip()}" for name in flags["definitions"]]
    options += [f"-I{path}" for path in flags["include_dirs"]]
    # In the place of PyTorch's library for that machine, which the code names and loads there.
    torch_cpu, compiler = folder / "libtorch_cpu.so", _compiler_for(machine)
    named = "-xc", "/dev/null", "-shared", "-Wl,-soname,libtorch_cpu.so", "-o", torch_cpu
    linked = "-shared", "-Wl,--no-as-needed", torch_cpu
    no_constants = "-Wl,--defsym=_binary_constants_bin_start=0"
    library = source.with_suffix(".so")
    subprocess.run([compiler, *named], check=True)
    subprocess.run([compiler, *options, source, *linked, no_constants, "-o", library], check=True)
    return library
