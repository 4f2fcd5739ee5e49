"""A build for 64-bit Arm on another machine, and its programs in an emulator."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import tiny_models
import torch
from typer.testing import CliRunner

from h2o_prefill import enable
from h2o_prefill.cli.app import app
from h2o_prefill.generation import load_model

ROOT = Path(__file__).parents[3]
BUILD = ROOT / "build" / "aarch64"
SETTINGS = "h2o,chunk_size=16,local_window=3,heavy_budget=3,recall=1"
PROGRAM = """
#include <ATen/ATen.h>
#include <h2o_prefill/package_session.h>
#include <iostream>
int main(int, char** argv) {
  h2o_prefill::PackageSession session(std::make_shared<const h2o_prefill::Package>(argv[1]));
  h2o_prefill::Sampler greedy;
  const auto ids = at::arange(1, 31).repeat({5}).unsqueeze(0);
  for (int64_t token : session.generate(ids, {.max_new_tokens = 8}, greedy)) {
    std::cout << token << ' ';
  }
}
"""
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (shutil.which("aarch64-linux-gnu-g++") and shutil.which("qemu-aarch64")),
        reason="needs g++-aarch64-linux-gnu and qemu-user",
    ),
]


def build(source, folder, prefixes, *targets):
    """Configure and build a project as docs/cpp.md says."""
    toolchain, prefix = ROOT / "csrc/cmake/aarch64.cmake", ";".join(map(str, prefixes))
    generator = (
        "-G",
        "Ninja",
        "--no-warn-unused-cli",
        "-DH2O_WITH_CUDA=OFF",
        f"-DCMAKE_PREFIX_PATH={prefix}",
    )
    configure = "cmake", "-S", source, "-B", folder, "--toolchain", toolchain, *generator
    for command in (configure, ("cmake", "--build", folder, *targets)):
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


@pytest.fixture(scope="module")
def prefixes():
    """Return where the library and PyTorch for aarch64 are."""
    library, prefix = BUILD / "library", BUILD / "prefix"
    if not (BUILD / "torch").exists():
        text = (ROOT / "docs/cpp.md").read_text()
        (install,) = re.findall(r"^pip install --target \$ARM .*?[^\\]\n", text, re.M | re.S)
        install = install.replace("pip", f"{sys.executable} -m pip --quiet", 1)
        done = subprocess.run(["bash", "-c", install], env={**os.environ, "ARM": str(BUILD)})
        if done.returncode:
            pytest.skip("PyTorch for aarch64 cannot be installed")
    build(ROOT, library, [BUILD / "torch"], "--target", "h2o_prefill")
    install = "cmake", "--install", library, "--prefix", prefix, "--component", "package"
    subprocess.run(install, check=True, stdout=subprocess.DEVNULL)
    return prefix, BUILD / "torch"


@pytest.fixture
def emulated(prefixes, tmp_path):
    """Return what builds the program of the guide from a source, and runs it on a CPU."""
    guide = (ROOT / "docs/cpp.md").read_text()
    project = re.search(r"^```cmake\n(.*?)^```", guide, re.M | re.S)[1]
    (tmp_path / "CMakeLists.txt").write_text(project)

    def run(source, cpu, *arguments, **environment):
        if not (tmp_path / "main.cpp").exists():
            (tmp_path / "main.cpp").write_text(source)
            build(tmp_path, tmp_path / "build", prefixes)
        emulator = "qemu-aarch64", "-cpu", cpu, "-L", "/usr/aarch64-linux-gnu"
        return subprocess.run(
            [*emulator, tmp_path / "build/app", *arguments],
            capture_output=True,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        )

    return run


def test_the_program_of_the_guide(emulated):
    guide = (ROOT / "docs/cpp.md").read_text()
    program = re.search(r"^```cpp\n(.*?)^```", guide, re.M | re.S)[1].replace("6000", "60")
    for cpu in ("max", "neoverse-n1"):  # with and without products of bfloat16
        done = emulated(program, cpu)
        assert done.stdout.endswith("61 tokens, [1, 8, 1, 64]\n"), done.stderr
    refused = emulated(program, "neoverse-n1", H2O_PREFILL_ISA="neon_bf16")
    assert "H2O_PREFILL_ISA=neon_bf16 is not supported by this CPU" in refused.stderr


def test_a_package(emulated, tmp_path):
    model, package = tiny_models.save_model(tmp_path / "model"), tmp_path / "package"
    options = "--capacity", "256", "--dtype", "float32", "--preset", SETTINGS
    folders = "--model", str(model), "--output", str(package)
    result = CliRunner().invoke(app, ["export", "--machine", "aarch64", *options, *folders])
    assert result.exit_code == 0, result.output
    done = emulated(PROGRAM, "max", package)
    network = load_model(str(model))[0]
    ids = torch.arange(1, 31).repeat(5)[None]
    with torch.no_grad(), enable(network, SETTINGS):
        expected = network.generate(ids, max_new_tokens=8, do_sample=False)[0, 150:]
    assert done.stdout.split() == [str(x) for x in expected.tolist()], done.stderr
