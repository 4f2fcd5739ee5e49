"""Packages of whole models with their tokenizers."""

from __future__ import annotations

import tempfile
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from h2o_prefill._atomic_write import replaced_file
from h2o_prefill._warn import warn
from h2o_prefill.config import PrefillConfig
from h2o_prefill.generation.cpp_tokenizer import has_cpp_tokenizers, write_cpp_tokenizer
from h2o_prefill.generation.weights import keeps_numbers, with_packed_weights
from h2o_prefill.hf.export import describe_package, export_model
from h2o_prefill.package import NAME, TOKENIZER, VERSION, WEIGHTS, PackageInfo, PrefillPackage
from h2o_prefill.vocabulary import text_for


def write_package(
    model: PreTrainedModel,
    tokenizer: Any,
    config: PrefillConfig,
    capacity: int,
    path: Path,
    weights: str = "",
    kv: str = "",
    dtype: torch.dtype | None = None,
    on_stage: Callable[[str], None] = lambda stage: None,
) -> PackageInfo:
    """Write a model and its tokenizer as a package, a folder; return its metadata.

    `dtype` is that of arithmetic, by default the model's. `weights` is the format of linear layers
    and embeddings, "float32", "bfloat16", "float16" or "int8". It is by default the model's 16
    bits; for a float32 model bfloat16 if its weights are numbers of it, else float16. `kv` is the
    dtype of keys and values, by default that of arithmetic in 16 bits, else float16. The model
    stays as it is. The tokenizer is written for C++ too if openvino_tokenizers is installed.
    `on_stage` is called with what begins.
    """
    path, dtype = path.expanduser(), dtype or model.dtype
    if not weights:
        formats = [x for x in ("bfloat16", "float16") if keeps_numbers(model, x)]
        weights = (formats or ["float16"])[0] if dtype == torch.float32 else _name(dtype)
    kv = kv or ("float16" if dtype == torch.float32 else _name(dtype))
    text = text_for(tokenizer, config)
    on_stage("packing weights")
    packed = with_packed_weights(model, weights, dtype)
    # Sessions are of the weights that a package computes with.
    named = model if keeps_numbers(model, weights) else packed
    info = describe_package(named, config, capacity, weights, kv, text)
    on_stage("exporting the graph, and comparing its logits with the model's")
    program = export_model(packed, info, text)
    on_stage("compiling, which takes minutes")
    tokenizer.save_pretrained(path / TOKENIZER)
    if has_cpp_tokenizers():
        try:
            write_cpp_tokenizer(tokenizer, path / TOKENIZER)
        except NotImplementedError as error:
            warn(f"no tokenizer for C++ was written: {error}")
    return _compile(program, info, path)


def _compile(program: torch.export.ExportedProgram, info: PackageInfo, folder: Path) -> PackageInfo:
    """Compile what `export_model` returned into a package; one that is there is replaced."""
    options = {
        "aot_inductor.package_constants_in_so": False,
        # Else the code runs with as many threads as there are here.
        "cpp.dynamic_threads": True,
    }
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch, torch.no_grad():
        archive = torch._inductor.aoti_compile_and_package(
            program, package_path=f"{scratch}/code.pt2", inductor_configs=options
        )
        with zipfile.ZipFile(archive) as files:
            (library,) = (name for name in files.namelist() if name.endswith(".so"))
            code = {".so": files.read(library), ".json": files.read(library[:-2] + "json")}
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


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def load_package(path: Path) -> tuple[PrefillPackage, Any]:
    """Load a package and its tokenizer."""
    from transformers import AutoTokenizer

    package = PrefillPackage(path)
    folder = package.path / TOKENIZER
    if not folder.is_dir():
        raise FileNotFoundError(f"package: the tokenizer must be in {str(folder)!r}")
    return package, AutoTokenizer.from_pretrained(folder)
