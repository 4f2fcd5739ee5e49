"""The map and the layers of CONTRIBUTING.md: folders, imports of the package, includes of C++."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
CSRC = ROOT / "csrc"

ATEN = ("ATen/", "c10/core/", "c10/util/")
CUDA = ("c10/cuda/", "cuda_runtime_api.h", "cuda_bf16.h", "cuda_fp16.h", "cuda.h")
KERNEL_VOCABULARY = (
    "h2o_prefill/error_fields.h",
    *(
        f"kernels/{name}.h"
        for name in (
            *("feature_map", "host_device", "key_sets", "linear_params", "params"),
            *("softmax_state", "widening"),
        )
    ),
)
LIBRARY = ("common/", "h2o_prefill/")
OPERATOR = (
    *(*ATEN, "common/", "h2o_prefill/ops.h", "kernels/composite/", "torch/library.h"),
    *KERNEL_VOCABULARY,
)
# What a file may include beside the standard library, by the first pattern that its path matches.
ALLOWED = {
    # The component text stands in one header.
    r"include/h2o_prefill/tokenizer\.h": (*ATEN, "openvino/openvino.hpp"),
    r"include/": (
        *("h2o_prefill/", "ATen/core/Generator.h", "ATen/core/Tensor.h", "torch/custom_class.h"),
    ),
    r"bindings/python_module\.cpp": ("pybind11/",),
    # The name of the instruction set, and what else the CPU has.
    r"bindings/library\.cpp": (
        *(*LIBRARY, "kernels/cpu/attend_rows.h", "kernels/cpu/cpu_features.h", "torch/library.h"),
    ),
    r"bindings/": (*LIBRARY, "torch/"),
    r"core/session\.cpp": (*ATEN, *LIBRARY, "core/", "caffe2/serialize/", "torch/csrc/jit/"),
    r"core/": (*ATEN, *LIBRARY, "core/"),
    r"runtime/": (
        *(*ATEN, "common/rules.h", "core/session.h", "h2o_prefill/", "runtime/", "sys/"),
        *("kernels/cpu/cpu_features.h", "torch/version.h", "torch/csrc/inductor/aoti_runner/"),
        *("caffe2/serialize/", "torch/csrc/jit/", "fcntl.h", "unistd.h"),
    ),
    r"ops/": (
        *(*ATEN, "common/linear_attention_request.h", "common/prefill_entries.h", "common/rules.h"),
        *("h2o_prefill/ops.h", "ops/", "torch/csrc/autograd/", "torch/library.h"),
    ),
    r"common/": (*ATEN, *LIBRARY, "sys/mman.h", *KERNEL_VOCABULARY),
    r"kernels/[^/]+$": KERNEL_VOCABULARY,
    r"kernels/cuda/[^/]+\.cuh?$": ("kernels/cuda/", *KERNEL_VOCABULARY, *CUDA),
    r"kernels/composite/": OPERATOR,
    r"kernels/cpu/": (
        *(*OPERATOR, "arm_neon.h", "cpuid.h", "immintrin.h", "kernels/cpu/", "sys/"),
    ),
    r"kernels/cuda/": (*OPERATOR, "kernels/cuda/", *CUDA),
}
PYTORCH = ("ATen/", "c10/", "torch/", "common/", "h2o_prefill/")


def _sources():
    return {
        path.relative_to(CSRC).as_posix(): path.read_text(encoding="utf-8")
        for path in sorted(CSRC.rglob("*"))
        if path.suffix in (".h", ".cpp", ".cu", ".cuh")
    }


def _includes(text):
    """Return what a file includes, as it is written, without the standard library."""
    names = re.findall(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', text, re.MULTILINE)
    return [name for name in names if "." in name or "/" in name]


def _reached(files, path):
    """Return all files and outer headers that a file includes, directly or through others."""
    found = set()
    waiting = [path]
    while waiting:
        for name in _includes(files.get(waiting.pop(), "")):
            # Public headers are included as h2o_prefill/x.h.
            inside = f"include/{name}" if f"include/{name}" in files else name
            if inside not in found:
                found.add(inside)
                waiting.append(inside)
    return found


def _listed_sources(name):
    """Return a list of sources.cmake."""
    text = (CSRC / "sources.cmake").read_text(encoding="utf-8")
    found = re.search(rf"set\({name}\s+([^)]+)\)", text)
    assert found is not None
    return found[1].split()


def test_no_source_includes_what_is_beyond_its_layer():
    for path, text in _sources().items():
        allowed = next((a for pattern, a in ALLOWED.items() if re.match(pattern, path)), ())
        beyond = [name for name in _includes(text) if not name.startswith(allowed)]
        assert not beyond, f"{path} includes {beyond}"


def test_sources_of_every_instruction_set_and_of_cuda_do_not_reach_pytorch():
    files = _sources()
    paths = _listed_sources("H2O_ISA_SOURCES")
    paths += [path for path in _listed_sources("H2O_CUDA_SOURCES") if path.endswith(".cu")]
    assert len(paths) > 8 and set(paths) <= set(files)
    for path in paths:
        beyond = [name for name in _reached(files, path) if name.startswith(PYTORCH)]
        assert not beyond, f"{path} reaches {beyond}"


def test_no_includes_go_in_a_circle():
    files = _sources()
    assert [path for path in files if path in _reached(files, path)] == []


def _map():
    """Return the folders that CONTRIBUTING.md names."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    block = text.partition("## Repository layout\n")[2].split("```")[1]
    path, folders = [], set()
    for indent, name in re.findall(r"^( *)([\w./]+)/(?: |$)", block, re.MULTILINE):
        path[len(indent) // 2 :] = [name]
        folders.add("/".join(path))
    return folders


def test_the_map_names_every_folder_and_no_other():
    folders = _map()
    assert len(folders) > 30
    assert [name for name in folders if not (ROOT / name).is_dir()] == []
    # A folder is named, or lies in one whose folders the map does not go into.
    inside = folders - {str(Path(name).parent) for name in folders}
    kinds = {".py", ".ipynb", ".h", ".cpp", ".cu", ".cuh", ".cmake"}
    tops = {Path(name).parts[0] for name in folders}
    files = (path.relative_to(ROOT) for top in tops for path in (ROOT / top).rglob("*"))
    unnamed = {
        str(path.parent)
        for path in files
        if path.suffix in kinds and not inside & {str(parent) for parent in path.parents}
    }
    built = re.compile(r".*/\.|h2o_prefill/(lib|include)")
    assert [name for name in unnamed - folders if not built.match(name)] == []
