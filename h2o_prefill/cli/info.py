"""`h2o-prefill info`: what is installed, and what it can do."""

from __future__ import annotations

from typing import Any

from ..presets import PRESETS
from . import options
from .console import output_console, quiet_libraries, say_written


def info(json_file: options.JsonOption = None) -> None:
    """Show versions, machine, build, and what the library supports."""
    from ..eval import DATASETS, DEFAULT_MODEL, DTYPES, PROTOCOLS
    from ..eval.cache_dir import cache_dir
    from ..eval.environment import cuda_kernels, environment, operators
    from ..eval.report import write_json
    from .tables import info_table

    with quiet_libraries():
        options.check_output_file(json_file, "--json")
        facts = environment()
        sections: dict[str, dict[str, Any]] = {
            "environment": facts,
            "operators (devices)": operators(),
            "CUDA kernels": cuda_kernels(),
            "command line": {
                "default model": DEFAULT_MODEL,
                "presets": list(PRESETS),
                "texts": list(DATASETS),
                "protocols": list(PROTOCOLS),
                "number formats": list(DTYPES),
                "cache": str(cache_dir()),
            },
        }
        output_console().print(info_table(sections))
        if json_file is not None:
            write_json(sections, json_file)
            say_written(json_file)
