"""`h2o-prefill export`: a whole model as a package that runs without Python."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import typer
from rich.console import Console
from rich.progress import Progress

from h2o_prefill.cli import console, options, outputs
from h2o_prefill.generation import DTYPES
from h2o_prefill.generation.cpp_tokenizer import has_cpp_tokenizers
from h2o_prefill.package import WEIGHTS


@options.command
def export(
    model: options.CpuModelOptions,
    preset: options.PresetOption = None,
    output: Path = typer.Option(
        ..., metavar="FOLDER", help="Package to write.", show_default=False
    ),
    capacity: int = typer.Option(
        8192, min=2, help="Maximum number of tokens of prompt and answer together."
    ),
    weights: Literal["float32", "bfloat16", "float16", "int8"] | None = typer.Option(
        None,
        help="Format of the weights. They are multiplied in the data type of --dtype.",
        show_default="the checkpoint's 16 bits, else float16",
    ),
    kv: Literal["float32", "bfloat16", "float16"] | None = typer.Option(
        None, help="Data type of keys and values.", show_default="--dtype in 16 bits"
    ),
    machine: str = typer.Option(
        "",
        help="Architecture of the CPU to export for, as aarch64; another one needs its compiler.",
        show_default="this machine's",
    ),
) -> None:
    """Write a whole model as a package that runs without Python.

    One graph prefills and decodes. FOLDER has its compiled code, its weights, which are mapped, and
    its tokenizer. `h2o-prefill generate --package` runs it, and in C++ the classes Package,
    PackageSession and Tokenizer (examples/generate.cpp).
    """
    from h2o_prefill.generation.packages import write_package

    outputs.check_output_folder(output, (WEIGHTS,))
    config = options.find_settings(preset)
    # For arithmetic in float32, weights in 16 bits are packed as they are.
    network, tokenizer = model.load("auto" if model.dtype == "float32" else model.dtype)
    formats = weights or "", kv or "", DTYPES[model.dtype], machine
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=3, completed=-1)
        info = write_package(
            network,
            tokenizer,
            config,
            capacity,
            output,
            *formats,
            on_stage=lambda stage: progress.update(task, description=stage, advance=1),
        )
    console.stderr.print(
        f"wrote {output}: weights {info.weights_bytes / 1e6:.0f} MB, "
        f"and {info.bytes_per_token / 1e3:.1f} MB for 1,000 tokens"
    )
    if not has_cpp_tokenizers():
        console.stderr.print("no tokenizer for C++ was written: pip install openvino-tokenizers")
