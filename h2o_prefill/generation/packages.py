"""Packages of whole models with their tokenizers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from h2o_prefill._warn import warn
from h2o_prefill.config import PrefillConfig
from h2o_prefill.generation.compilation import check_compiler, compile_package
from h2o_prefill.generation.cpp_tokenizer import has_cpp_tokenizers, write_cpp_tokenizer
from h2o_prefill.generation.weights import keeps_numbers, with_packed_weights
from h2o_prefill.hf.export import describe_package, export_model
from h2o_prefill.package import TOKENIZER, PackageInfo, PrefillPackage
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
    machine: str = "",
    on_stage: Callable[[str], None] = lambda stage: None,
) -> PackageInfo:
    """Write a model and its tokenizer as a package, a folder; return its metadata.

    `dtype` is the dtype of arithmetic, by default the model's. `weights` is the format of linear
    layers and embeddings, "float32", "bfloat16", "float16" or "int8". It is by default the model's
    16 bits; for a float32 model bfloat16 if its weights are numbers of it, else float16. `kv` is
    the dtype of keys and values, by default `dtype` if it has 16 bits, else float16. The model
    stays as it is. `machine` is the architecture of the CPU, by default of this one; another one,
    as "aarch64", needs its compiler, aarch64-linux-gnu-g++. The tokenizer is written for C++ too if
    openvino_tokenizers is installed. `on_stage` is called with what begins.
    """
    check_compiler(machine)
    path, dtype = path.expanduser(), dtype or model.dtype
    if not weights and dtype == torch.float32:
        weights = "bfloat16" if keeps_numbers(model, "bfloat16") else "float16"
    weights = weights or _name(dtype)
    kv = kv or ("float16" if dtype == torch.float32 else _name(dtype))
    text = text_for(tokenizer, config)
    on_stage("packing weights")
    packed = with_packed_weights(model, weights, dtype)
    # Sessions are of the weights that a package computes with.
    named = model if keeps_numbers(model, weights) else packed
    info = describe_package(named, config, capacity, weights, kv, text, machine)
    on_stage("exporting the graph, and comparing its logits with the model's")
    program = export_model(packed, info, text)
    on_stage("compiling, which takes minutes")
    tokenizer.save_pretrained(path / TOKENIZER)
    if has_cpp_tokenizers():
        try:
            write_cpp_tokenizer(tokenizer, path / TOKENIZER)
        except NotImplementedError as error:
            warn(f"no tokenizer for C++ was written: {error}")
    return compile_package(program, info, path)


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
