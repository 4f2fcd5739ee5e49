"""Loading of the native library: one clear error for each failure."""

import os
import subprocess
import sys
from importlib.machinery import EXTENSION_SUFFIXES

import pytest
import torch

from h2o_prefill import _library


def test_build_facts_agree_with_the_library():
    info = _library.build_info()
    ops = torch.ops.h2o_prefill
    assert info["version"] == ops.version()
    assert info["cuda"] == ops.has_cuda()
    assert bool(info["cuda_archs"]) == info["cuda"]
    # "amx" means the AVX-512 kernels with matrix products by oneDNN.
    assert ops.cpu_isa().replace("amx", "avx512_bf16") in info["cpu_isas"].split(",")
    assert _library._minor_version(torch.__version__) == _library._minor_version(info["torch"])


def test_another_minor_version_of_pytorch(monkeypatch):
    monkeypatch.setattr(_library, "build_info", lambda: {"torch": "2.9.1"})
    with pytest.raises(ImportError, match=r"built with PyTorch 2\.9\.1, but .* is installed"):
        _library.load_library()


def test_a_library_that_is_missing_or_broken(monkeypatch, tmp_path):
    library = tmp_path / "libbroken.so"
    monkeypatch.setattr(_library, "LIBRARY", library)
    with pytest.raises(ImportError, match=r"is missing at .*libbroken.so"):
        _library.load_library()
    library.write_bytes(b"not a shared object")
    with pytest.raises(ImportError, match=r"cannot be loaded .*rebuild it"):
        _library.load_library()


def test_a_library_that_was_never_built(monkeypatch):
    # None is how Python marks a module that cannot be imported.
    monkeypatch.setitem(sys.modules, "h2o_prefill._C", None)
    with pytest.raises(ImportError, match="is not built for this Python"):
        _library.build_info()


def test_a_source_tree_that_hides_the_installed_package(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "h2o_prefill._C", None)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    installed = tmp_path / "h2o_prefill"
    installed.mkdir()
    (installed / f"_C{EXTENSION_SUFFIXES[0]}").touch()
    hides = rf"\S+/h2o_prefill hides the h2o_prefill that is installed in {installed}: run Python"
    with pytest.raises(ImportError, match=hides):
        _library.build_info()


def test_the_instruction_set_can_be_forced_and_transformers_is_not_imported():
    """The test Library.wrong_isa of CTest has the error for a name that is none."""
    code = (
        "import sys, torch, h2o_prefill;"
        "print(torch.ops.h2o_prefill.cpu_isa(), 'transformers' in sys.modules)"
    )
    environment = {**os.environ, "H2O_PREFILL_ISA": "scalar"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "scalar False"
