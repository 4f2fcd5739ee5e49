"""`h2o-prefill info`: versions, hardware and what the library supports."""

from __future__ import annotations

from h2o_prefill.cli import options, outputs, tables
from h2o_prefill.eval.report import crossovers, environment
from h2o_prefill.generation import DATASETS, DEFAULT_MODEL, DTYPES
from h2o_prefill.generation.gguf import cache_dir
from h2o_prefill.presets import PRESETS


@options.command
def info(report: outputs.ReportOptions) -> None:
    """Show versions, hardware, build options, and what the library supports."""
    report.check()
    sections = {
        "environment": environment(),
        "shortest sparse prompt": crossovers(),
        "command line": {
            "default model": DEFAULT_MODEL,
            "presets": list(PRESETS),
            "texts": list(DATASETS),
            "number formats": list(DTYPES),
            "cache": str(cache_dir()),
        },
    }
    report.write(lambda: sections)
    report.show("", tables.info_table(sections))
