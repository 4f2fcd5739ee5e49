"""`h2o-prefill export`: a whole model as a package that runs without Python."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from h2o_prefill.cli import options
from h2o_prefill.cli.console import error_console, quiet_libraries, say_written
from h2o_prefill.cli.options import load_network
from h2o_prefill.cli.outputs import check_output_file


@options.add_size_options
def export(
    output: Annotated[
        Path,
        typer.Option("--output", metavar="FILE.pt2", help="Package to write.", show_default=False),
    ],
    model: options.ModelOption = "smollm2-135m",
    capacity: Annotated[
        int,
        typer.Option(
            "--capacity", min=2, help="Maximum number of tokens of prompt and answer together."
        ),
    ] = 8192,
    dtype: options.DtypeOption = "bfloat16",
    weights: Annotated[
        Literal["int8"] | None,
        typer.Option(
            "--weights", help="Format of the weights in the package.", show_default="--dtype"
        ),
    ] = None,
    preset: options.PresetOption = None,
    threads: options.ThreadsOption = None,
    **sizes: int | None,
) -> None:
    """Write a whole model as an AOTInductor package that runs without Python.

    One graph prefills and decodes. FILE.pt2 holds the weights; FILE.json, which describes the
    package, and the folder FILE.tokenizer are written beside it. `h2o-prefill generate --package`
    runs them, and in C++ the classes Package, PackageSession and Tokenizer (examples/generate.cpp).
    """
    from h2o_prefill.generation.cpp_tokenizer import has_cpp_tokenizers
    from h2o_prefill.generation.packages import write_package

    check_output_file(output, "--output", (".pt2",))
    with quiet_libraries():
        options.check_preset(preset, **sizes)
        network, tokenizer = load_network(model, dtype, threads)
        config = options.find_settings(network, preset, **sizes)
        with error_console().status("compiling, which takes minutes"):
            written = write_package(network, tokenizer, config, capacity, output, weights or "")
    for path in written:
        say_written(path)
    if not has_cpp_tokenizers():
        error_console().print("no tokenizer for C++ was written: pip install openvino-tokenizers")
