"""Loading of the native library: one clear error for each failure."""

import json
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


PACKAGE = {
    **dict.fromkeys(("model", "model_hash", "settings", "dtype", "end_ids"), "h2o"),
    **dict.fromkeys(("capacity", "vocabulary", "layers", "kv_heads", "head_dim"), "1"),
    **{"torch": torch.__version__, "cpu_features": torch.ops.h2o_prefill.cpu_features()},
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({}, "dtype of a package must be"),  # after the machine
        ({"AOTI_CPU_ISA": "INVALID_VEC_ISA"}, "dtype of a package must be"),
        (
            {"AOTI_CPU_ISA": "ASIMD AVX2 SVE8"},
            "code for (SVE8|ASIMD), which this CPU does not have",
        ),
        ({"h2o_prefill.cpu_features": "AVX1024"}, "has code for AVX1024, which this CPU does not"),
        ({"h2o_prefill.cpu_features": None}, "the metadata of the package are incomplete"),
    ],
)
def test_a_package_for_another_cpu_is_refused(tmp_path, change, message):
    fields = {f"h2o_prefill.{name}": text for name, text in PACKAGE.items()} | change
    text = json.dumps({name: x for name, x in fields.items() if x is not None}).encode()
    path = str(tmp_path / "x.pt2")
    writer = torch._C.PyTorchFileWriter(path)
    for name, content in (("_metadata.json", text), (".so", b"")):
        writer.write_record(f"data/aotinductor/model/x.wrapper{name}", content, len(content))
    writer.write_end_of_file()
    with pytest.raises(ValueError, match=message):
        torch.classes.h2o_prefill.PackageSession(path, False)


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
