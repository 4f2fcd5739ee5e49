"""Builds the native library with CMake; sources are in csrc/sources.cmake."""

import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent.resolve()


def find_torch() -> str:
    """Return the CMake prefix of the PyTorch that is installed, without importing it."""
    torch = importlib.util.find_spec("torch")
    if torch is None or torch.origin is None:
        raise SystemExit(
            "h2o_prefill is built against the PyTorch that is installed, and none was found. "
            "Install torch >= 2.11 first, then: pip install --no-build-isolation ."
        )
    return str(Path(torch.origin).parent / "share" / "cmake")


def torch_requirement() -> str:
    """Return the versions of PyTorch that a build made here works with: one minor version."""
    try:
        major, minor = map(int, importlib.metadata.version("torch").split(".")[:2])
    except importlib.metadata.PackageNotFoundError:
        return "torch>=2.11"
    return f"torch>={major}.{minor},<{major}.{minor + 1}"


def version() -> str:
    """Return the version, with H2O_LOCAL_VERSION=1 and what a wheel needs: torch2.11.cpu."""
    public = (ROOT / "VERSION").read_text(encoding="utf-8").strip()
    if not os.environ.get("H2O_LOCAL_VERSION"):
        return public
    import torch

    with_cuda = os.environ.get("H2O_WITH_CUDA") == "ON" and torch.version.cuda
    device = "cu" + with_cuda.replace(".", "") if with_cuda else "cpu"
    return f"{public}+torch{'.'.join(torch.__version__.split('.')[:2])}.{device}"


def find_tool(name: str) -> str:
    """Return the path of a build tool, the one of this Python environment first."""
    found = shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)
    if found is None:
        raise SystemExit(f"{name} is needed to build h2o_prefill: pip install cmake ninja")
    return found


class CMakeBuild(build_ext):
    """Runs CMake and installs library, headers and their CMake package into the Python package."""

    def run(self) -> None:
        # What is built in place stays on this machine.
        self.for_wheel = not (self.editable_mode or self.inplace)
        super().run()

    def build_extension(self, ext: Extension) -> None:
        jobs = os.environ.get("MAX_JOBS") or str(os.cpu_count() or 1)
        configure = [
            "-S", str(ROOT), "-B", self.build_dir, "-G", "Ninja",
            f"-DCMAKE_MAKE_PROGRAM={find_tool('ninja')}",
            f"-DCMAKE_BUILD_TYPE={os.environ.get('H2O_BUILD_TYPE', 'Release')}",
            f"-DCMAKE_PREFIX_PATH={find_torch()}",
            "-DCMAKE_INSTALL_LIBDIR=lib",
            "-DCMAKE_INSTALL_MESSAGE=NEVER",
            "-DH2O_BUILD_PYTHON=ON",
            f"-DH2O_WHEEL={'ON' if self.for_wheel else 'OFF'}",
            f"-DH2O_WITH_CUDA={os.environ.get('H2O_WITH_CUDA') or 'AUTO'}",
            f"-DPython_EXECUTABLE={sys.executable}",
        ]  # fmt: skip
        self.cmake(*configure)
        self.cmake("--build", self.build_dir, "--parallel", jobs, "--target", "h2o_prefill", "_C")
        self.install(Path(self.get_ext_fullpath(ext.name)).parent.resolve())

    def copy_extensions_to_source(self) -> None:
        """Serve editable and in-place installs, which run from the source tree."""
        self.install(ROOT / "h2o_prefill")

    @property
    def build_dir(self) -> str:
        """Where CMake builds; H2O_BUILD_DIR keeps it for later runs."""
        return os.path.abspath(os.environ.get("H2O_BUILD_DIR") or f"{self.build_temp}/cmake")

    def install(self, package_dir: Path) -> None:
        self.cmake("--install", self.build_dir, "--prefix", str(package_dir))

    def cmake(self, *arguments: str) -> None:
        subprocess.check_call([find_tool("cmake"), *arguments])


# A source distribution takes every PyTorch that is supported, a build the one it was made with.
setup(
    version=version(),
    install_requires=["torch>=2.11" if "sdist" in sys.argv else torch_requirement()],
    # H2O_SKIP_BUILD: an editable install whose library something else builds in place.
    ext_modules=[]
    if os.environ.get("H2O_SKIP_BUILD")
    else [Extension("h2o_prefill._C", sources=[])],
    cmdclass={"build_ext": CMakeBuild},
)
