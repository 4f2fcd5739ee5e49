"""Options that more than one command has."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from ..config import PrefillConfig
from ..eval import DATASETS, DTYPES
from ..presets import PRESETS

_SIZES = "Sparse prefill"


def choices(names: Iterable[str]) -> str:
    """Return names as a help text lists them."""
    return ", ".join(names)


ModelOption = Annotated[
    str,
    typer.Option(
        "--model",
        help="smollm2-135m, a folder, a .gguf file, or a model id of the Hugging Face hub.",
    ),
]
DatasetOption = Annotated[
    str,
    typer.Option(
        "--dataset",
        help=f"{choices(DATASETS)}. The first is the file that H2O_PREFILL_WIKITEXT2 names, else "
        "from the hub; the second Python's own help texts.",
    ),
]
TextFileOption = Annotated[
    Path | None,
    typer.Option("--text-file", metavar="FILE", help="Take this UTF-8 text in place of a dataset."),
]
DtypeOption = Annotated[str, typer.Option("--dtype", help=f"Of the weights: {choices(DTYPES)}.")]
ThreadsOption = Annotated[
    int | None, typer.Option("--threads", min=1, help="CPU threads. Default: PyTorch's choice.")
]
JsonOption = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", help="Write the result as JSON.")
]
PresetOption = Annotated[
    str,
    typer.Option(
        "--preset",
        help=f"Settings to start from: {choices(PRESETS)}; with more of them behind commas, as in "
        "h2o,recall=4,dense_tail=64.",
        rich_help_panel=_SIZES,
    ),
]
ChunkSizeOption = Annotated[
    int | None,
    typer.Option(
        "--chunk-size", help="S, tokens of a chunk.", rich_help_panel=_SIZES, show_default="preset"
    ),
]
LocalWindowOption = Annotated[
    int | None,
    typer.Option(
        "--local-window",
        help="L, last positions always kept.",
        rich_help_panel=_SIZES,
        show_default="preset",
    ),
]
HeavyBudgetOption = Annotated[
    int | None,
    typer.Option(
        "--heavy-budget",
        help="H, most attended positions kept.",
        rich_help_panel=_SIZES,
        show_default="preset",
    ),
]
SinkTokensOption = Annotated[
    int | None,
    typer.Option(
        "--sink-tokens",
        help="K, first positions always kept.",
        rich_help_panel=_SIZES,
        show_default="preset",
    ),
]


def describe_sizes(config: PrefillConfig) -> str:
    """Return sizes, and options that add keys, as titles name them."""
    more = {
        "recall": config.recall,
        "tail": config.dense_tail,
        "dense": "+".join(map(str, config.dense_layers)),
        f"{config.wide_factor}-fold": "+".join(map(str, config.wide_layers)),
    }
    return (
        f"S={config.chunk_size} L={config.local_window} H={config.heavy_budget} "
        f"K={config.sink_tokens}" + "".join(f" {name}={n}" for name, n in more.items() if n)
    )


def use_threads(threads: int | None) -> None:
    """Set the number of CPU threads, if one is given."""
    if threads is not None:
        import torch

        torch.set_num_threads(threads)


def check_output_file(path: Path | None, option: str, suffixes: tuple[str, ...] = ()) -> None:
    """Refuse a file that could not be written, before the work and not after it.

    Raises
    ------
    ValueError
        If the folder is not there, the path is a folder, or the suffix is not one of `suffixes`.
    """
    if path is None:
        return
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise ValueError(f"{option} must be a file in a folder that exists, got {str(path)!r}")
    if suffixes and path.suffix.lower() not in suffixes:
        raise ValueError(f"{option} must end in one of {suffixes}, got {str(path)!r}")


def check_output_folder(path: Path | None) -> None:
    """Refuse a folder for figures that is a file, and figures without matplotlib.

    Raises
    ------
    ValueError
        If the path is a file.
    ImportError
        If matplotlib is missing.
    """
    if path is None:
        return
    if path.exists() and not path.is_dir():
        raise ValueError(f"--output must be a folder, got the file {str(path)!r}")
    if importlib.util.find_spec("matplotlib") is None:
        raise ImportError("figures need matplotlib: pip install 'h2o_prefill[eval]'")
