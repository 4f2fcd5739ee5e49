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
        *(*ATEN, "common/rules.h", "core/session.h", "h2o_prefill/", "sys/utsname.h"),
        *("kernels/cpu/cpu_features.h", "torch/version.h", "torch/csrc/inductor/aoti_package/"),
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


def _beyond_layer(files):
    """Say which includes go beyond the layer of their file."""
    for path, text in files.items():
        allowed = next((a for pattern, a in ALLOWED.items() if re.match(pattern, path)), ())
        for name in _includes(text):
            if not name.startswith(allowed):
                yield f"{path} includes {name}"


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


def _circles(files):
    return [path for path in files if path in _reached(files, path)]


def _listed_sources(name):
    """Return a list of sources.cmake."""
    text = (CSRC / "sources.cmake").read_text(encoding="utf-8")
    found = re.search(rf"set\({name}\s+([^)]+)\)", text)
    assert found is not None
    return found[1].split()


def _with_pytorch(files, paths):
    """Say which sources reach PyTorch."""
    return [
        f"{path} reaches {name}"
        for path in paths
        for name in sorted(_reached(files, path))
        if name.startswith(PYTORCH)
    ]


def test_no_source_includes_what_is_beyond_its_layer():
    assert list(_beyond_layer(_sources())) == []


def test_sources_of_every_instruction_set_and_of_cuda_do_not_reach_pytorch():
    files = _sources()
    paths = _listed_sources("H2O_ISA_SOURCES")
    paths += [path for path in _listed_sources("H2O_CUDA_SOURCES") if path.endswith(".cu")]
    assert len(paths) > 8 and set(paths) <= set(files)
    assert _with_pytorch(files, paths) == []
    files["kernels/params.h"] += "#include <ATen/core/Tensor.h>\n"
    path = "kernels/cpu/attend_rows.cpp"
    assert _with_pytorch(files, [path]) == [f"{path} reaches ATen/core/Tensor.h"]


def test_no_includes_go_in_a_circle():
    files = _sources()
    assert _circles(files) == []
    files["common/rules.h"] += '#include "common/checks.h"\n'
    files["common/checks.h"] += '#include "common/rules.h"\n'
    assert _circles(files) == ["common/checks.h", "common/rules.h"]


def _map():
    """Return the folders that CONTRIBUTING.md names, and whether it names folders in them."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    block = text.partition("## Repository layout\n")[2].partition("```\n")[2].partition("```")[0]
    folders = {}
    above = []
    for line in block.splitlines():
        names = re.match(r"( *)((?:[\w.]+/ ?)+)(?: |$)", line)
        if names is None:
            continue
        depth = len(names[1])
        above = [(d, folder) for d, folder in above if d < depth]
        inside = above[-1][1] + "/" if above else ""
        if above:
            folders[above[-1][1]] = True
        for name in names[2].split():
            folders[inside + name.rstrip("/")] = False
        above.append((depth, inside + names[2].split()[-1].rstrip("/")))
    return folders


def _folders_with_sources():
    kinds = {".py", ".ipynb", ".h", ".cpp", ".cu", ".cuh", ".cmake"}
    tops = ("csrc", "h2o_prefill", "examples", "benchmarks", "docs", "notebooks", "tests")
    built = {"h2o_prefill/lib", "h2o_prefill/include"}
    folders = {
        path.parent.relative_to(ROOT).as_posix()
        for top in tops
        for path in (ROOT / top).rglob("*")
        if path.suffix in kinds
    }
    return {
        folder
        for folder in folders
        if "/." not in folder and not any(f"{folder}/".startswith(f"{x}/") for x in built)
    }


def test_the_map_names_every_folder_and_no_other():
    folders = _map()
    assert len(folders) > 30
    assert [name for name in folders if not (ROOT / name).is_dir()] == []
    unnamed = []
    for folder in sorted(_folders_with_sources()):
        # A folder is named, or lies in one whose folders the map does not go into.
        parents = [parent.as_posix() for parent in Path(folder).parents]
        if folder not in folders and not any(folders.get(parent) is False for parent in parents):
            unnamed.append(folder)
    assert unnamed == []
