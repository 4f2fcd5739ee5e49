"""Packages of whole models with their descriptions and tokenizers."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from h2o_prefill._atomic_write import replaced_file
from h2o_prefill._warn import warn
from h2o_prefill.config import PrefillConfig
from h2o_prefill.generation.cpp_tokenizer import has_cpp_tokenizers, write_cpp_tokenizer
from h2o_prefill.generation.weights import with_int8_weights
from h2o_prefill.hf.export import compile_package, describe_package, export_model
from h2o_prefill.package import PrefillPackage
from h2o_prefill.vocabulary import text_for


def write_package(
    model: PreTrainedModel,
    tokenizer: Any,
    config: PrefillConfig,
    capacity: int,
    path: Path,
    weights: str = "",
) -> list[Path]:
    """Write a model as a package (.pt2), its description and its tokenizer; return their paths.

    With `weights`, "int8", the package has its weights in that format, and the model stays as it
    is. The tokenizer is written for C++ too if openvino_tokenizers is installed.
    """
    path = path.expanduser()
    folder, description = path.with_suffix(".tokenizer"), path.with_suffix(".json")
    if weights:
        model = with_int8_weights(model)
    text = text_for(tokenizer, config)
    info = describe_package(model, config, capacity, folder.name, weights, text)
    program = export_model(model, info, text)
    with replaced_file(path) as scratch:
        compile_package(program, info, scratch)
    tokenizer.save_pretrained(folder)
    if has_cpp_tokenizers():
        try:
            write_cpp_tokenizer(tokenizer, folder)
        except NotImplementedError as error:
            warn(f"no tokenizer for C++ was written: {error}")
    with replaced_file(description) as scratch:
        scratch.write_text(json.dumps(asdict(info), indent=2) + "\n", encoding="utf-8")
    return [path, description, folder]


def load_package(path: Path) -> tuple[PrefillPackage, Any]:
    """Load a package, and the tokenizer in the same folder."""
    from transformers import AutoTokenizer

    package = PrefillPackage(path)
    folder = package.path.parent / package.info.tokenizer
    if not package.info.tokenizer or not folder.is_dir():
        raise FileNotFoundError(
            f"package: the tokenizer must be in {str(folder)!r}, beside the package"
        )
    return package, AutoTokenizer.from_pretrained(folder)
