"""`h2o-prefill export`: a whole model as a package that runs without Python."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import typer
from rich.console import Console

from h2o_prefill.cli import console, options, outputs
from h2o_prefill.generation.cpp_tokenizer import has_cpp_tokenizers


@options.command
def export(
    model: options.CpuModelOptions,
    preset: options.PresetOption = None,
    output: Path = typer.Option(
        ..., metavar="FILE.pt2", help="Package to write.", show_default=False
    ),
    capacity: int = typer.Option(
        8192, min=2, help="Maximum number of tokens of prompt and answer together."
    ),
    weights: Literal["int8"] | None = typer.Option(
        None, help="Format of the weights in the package.", show_default="--dtype"
    ),
) -> None:
    """Write a whole model as an AOTInductor package that runs without Python.

    One graph prefills and decodes. FILE.pt2 holds the weights; FILE.json, which describes the
    package, and the folder FILE.tokenizer are written beside it. `h2o-prefill generate --package`
    runs them, and in C++ the classes Package, PackageSession and Tokenizer (examples/generate.cpp).
    """
    from h2o_prefill.generation.packages import write_package

    outputs.check_output_file(output, "--output", (".pt2",))
    config = options.find_settings(preset)
    network, tokenizer = model.load()
    with Console(stderr=True).status("compiling, which takes minutes"):
        written = write_package(network, tokenizer, config, capacity, output, weights or "")
    for path in written:
        console.stderr.print(f"wrote {path}")
    if not has_cpp_tokenizers():
        console.stderr.print("no tokenizer for C++ was written: pip install openvino-tokenizers")
