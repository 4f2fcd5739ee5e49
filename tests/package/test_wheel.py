"""The wheel in dist/, as pip installs it beside PyTorch where there is no compiler.

`make test-package` makes the wheel and runs this.
"""

import email
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
TORCH = Path(torch.__file__).parent
CONSUMER = ROOT / "tests" / "cpp" / "consumer"
MINOR = ".".join(torch.__version__.split(".")[:2])
TOOLS = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"

ATTENTION = """
import torch, h2o_prefill
q = torch.randn(1, 4, 100, 64)
k = q[:, :2]
attend = torch.nn.functional.scaled_dot_product_attention
expected = attend(q, k, k, is_causal=True, enable_gqa=True)
torch.testing.assert_close(h2o_prefill.ops.dense_attention(q, k, k), expected)
"""


@pytest.fixture(scope="module")
def wheel():
    found = sorted((ROOT / "dist").glob("h2o_prefill-*.whl"))
    if not found:
        pytest.skip("there is no wheel in dist: make wheel")
    assert len(found) == 1, f"make wheel leaves one wheel in dist, found {found}"
    return found[0]


@pytest.fixture(scope="module")
def contents(wheel):
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist() if name[-1] != "/"}


@pytest.fixture(scope="module")
def venv(wheel, tmp_path_factory):
    """An environment in which PyTorch, whose files are linked, and the wheel are installed."""
    folder = tmp_path_factory.mktemp("installed") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    packages = Path(_run(folder, "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    for entry in TORCH.parent.iterdir():
        if "h2o_prefill" not in entry.name and entry.suffix != ".pth":
            (packages / entry.name).symlink_to(entry)
    pip = [sys.executable, "-m", "pip", "--python", folder / "bin" / "python", "install"]
    subprocess.run(
        [*pip, "--quiet", "--no-index", wheel], check=True, env={"PATH": str(folder / "bin")}
    )
    return folder


def _tool(name):
    return shutil.which(name, path=TOOLS) or pytest.skip(f"{name} is not installed")


def _run(venv, code, check=True):
    """Run Python without a compiler in PATH; return its output, with stderr."""
    done = subprocess.run(
        [venv / "bin" / "python", "-W", "ignore", "-c", code],
        cwd=venv,
        env={"PATH": str(venv / "bin")},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert not check or done.returncode == 0, done.stdout
    return done.stdout


def test_it_holds_the_package_and_nothing_else(contents):
    names = {re.sub(r"^h2o_prefill-[^/]*\.dist-info/", "META/", name) for name in contents}
    sources = {file.relative_to(ROOT).as_posix() for file in ROOT.glob("h2o_prefill/**/*.py")}
    headers = {file.name for file in (ROOT / "csrc/include/h2o_prefill").glob("*.h")}
    cmake = {"Config", "ConfigVersion", "Targets", "Targets-release"}
    (module,) = (name for name in names if re.fullmatch(r"h2o_prefill/_C\.[^/]*\.so", name))
    assert names == {
        *sources,
        "h2o_prefill_cli.py",
        "h2o_prefill/py.typed",
        "h2o_prefill/lib/libh2o_prefill.so",
        "h2o_prefill/lib/pkgconfig/h2o_prefill.pc",
        "h2o_prefill/lib/cmake/H2OPrefill/torch.cmake",
        module,
        *(f"h2o_prefill/include/h2o_prefill/{name}" for name in headers | {"version.h"}),
        *(f"h2o_prefill/lib/cmake/H2OPrefill/H2OPrefill{name}.cmake" for name in cmake),
        *(f"META/{name}" for name in ("METADATA", "RECORD", "WHEEL", "entry_points.txt")),
        "META/top_level.txt",
        "META/licenses/LICENSE",
        *(name for name in names if re.fullmatch(r"META/sboms/auditwheel\.cdx\.json", name)),
    }


def test_it_names_no_path_of_the_machine_that_built_it(contents):
    paths = [str(path).encode() + b"/" for path in (ROOT, TORCH, sys.prefix, tempfile.gettempdir())]
    found = [(name, path) for name, data in contents.items() for path in paths if path in data]
    assert not found


def test_its_libraries_are_found_by_relative_paths(contents, tmp_path):
    """By one name, and PyTorch alone brings an OpenMP runtime, CUDA's and its own libraries."""
    for name, data in contents.items():
        if not name.endswith(".so"):
            continue
        library = tmp_path / Path(name).name
        library.write_bytes(data)
        ask = [_tool("patchelf"), library]
        found = subprocess.run([*ask, "--print-rpath"], capture_output=True, text=True, check=True)
        expected = "$ORIGIN/../../torch/lib" if "lib/" in name else ""
        assert found.stdout.strip() == expected
        needed = subprocess.run([*ask, "--print-needed"], capture_output=True, text=True)
        assert not re.findall(r".*(?:gomp|iomp|omp5|cudart).*", needed.stdout)
        soname = subprocess.run([*ask, "--print-soname"], capture_output=True, text=True)
        assert soname.stdout.strip() == (library.name if "lib/" in name else "")


def test_it_requires_the_minor_version_of_pytorch(contents, wheel):
    (text,) = (data for name, data in contents.items() if name.endswith("/METADATA"))
    metadata = email.message_from_bytes(text)
    torches = [r for r in metadata.get_all("Requires-Dist", []) if r.startswith("torch")]
    major, minor = map(int, MINOR.split("."))
    assert torches == [f"torch<{major}.{minor + 1},>={MINOR}"]
    assert re.search(rf"\+torch{re.escape(MINOR)}\.(cpu|cu\d+)$", metadata["Version"])
    assert "-manylinux_" in wheel.name


def test_it_works_without_a_compiler(venv):
    """With one OpenMP runtime in the process, and with or without CUDA kernels, as named."""
    code = """
import importlib.metadata
loaded = {line.split()[-1] for line in open("/proc/self/maps") if "omp" in line.split("/")[-1]}
assert len(loaded) == 1, loaded
print(h2o_prefill.__file__)
version = importlib.metadata.version("h2o_prefill")
assert h2o_prefill.build_info()["cuda"] == (not version.endswith(".cpu")), version
assert version.startswith(h2o_prefill.__version__ + "+torch"), version
"""
    assert str(venv) in _run(venv, ATTENTION + code)


def test_cmake_builds_a_program_with_it(venv, tmp_path):
    code = "import {0}; print({0}.cmake_prefix_path{1})"
    asked = [code.format("h2o_prefill", "()"), code.format("torch.utils", "")]
    prefixes = [_run(venv, each).strip() for each in asked]
    assert prefixes[0].startswith(str(venv))
    cmake = _tool("cmake")
    configure = [cmake, "-S", CONSUMER, "-B", tmp_path, f"-DCMAKE_PREFIX_PATH={';'.join(prefixes)}"]
    subprocess.run(configure, check=True, stdout=subprocess.DEVNULL)
    subprocess.run([cmake, "--build", tmp_path], check=True, stdout=subprocess.DEVNULL)
    assert "right" in subprocess.check_output([tmp_path / "consumer"], text=True)
