"""Packages of whole models with their tokenizers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from h2o_prefill._warn import warn
from h2o_prefill.config import PrefillConfig
from h2o_prefill.generation.cpp_tokenizer import has_cpp_tokenizers, write_cpp_tokenizer
from h2o_prefill.generation.weights import with_int8_weights
from h2o_prefill.hf.export import compile_package, describe_package, export_model
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
) -> PackageInfo:
    """Write a model and its tokenizer as a package, a folder; return its metadata.

    With `weights`, "int8", the package has its weights in that format, and the model stays as it
    is. `kv` is the dtype of keys and values, by default float16 for a float32 model, else the
    model's. The tokenizer is written for C++ too if openvino_tokenizers is installed.
    """
    path = path.expanduser()
    if weights:
        model = with_int8_weights(model)
    if not kv and model.dtype == torch.float32:
        kv = "float16"
    text = text_for(tokenizer, config)
    info = describe_package(model, config, capacity, weights, kv, text)
    tokenizer.save_pretrained(path / TOKENIZER)
    if has_cpp_tokenizers():
        try:
            write_cpp_tokenizer(tokenizer, path / TOKENIZER)
        except NotImplementedError as error:
            warn(f"no tokenizer for C++ was written: {error}")
    return compile_package(export_model(model, info, text), info, path)


def load_package(path: Path) -> tuple[PrefillPackage, Any]:
    """Load a package and its tokenizer."""
    from transformers import AutoTokenizer

    package = PrefillPackage(path)
    folder = package.path / TOKENIZER
    if not folder.is_dir():
        raise FileNotFoundError(f"package: the tokenizer must be in {str(folder)!r}")
    return package, AutoTokenizer.from_pretrained(folder)
