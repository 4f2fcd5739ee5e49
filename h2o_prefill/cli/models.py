"""`h2o-prefill models`: which model classes of transformers go sparse, and why not."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from h2o_prefill.cli import options
from h2o_prefill.cli.console import quiet_libraries, say_written, show_progress
from h2o_prefill.cli.outputs import check_output_file, json_output
from h2o_prefill.cli.result_table import print_result


def models(
    classes: Annotated[
        list[str] | None,
        typer.Option(
            "--class",
            metavar="NAME",
            help="Class of transformers, as LlamaForCausalLM; may be given several times.",
            show_default="all that generate text",
        ),
    ] = None,
    markdown: Annotated[
        Path | None,
        typer.Option("--markdown", metavar="FILE", help="Write the table to this Markdown file."),
    ] = None,
    json_file: options.JsonOption = None,
    threads: options.ThreadsOption = None,
) -> None:
    """Compare tiny random models of each class with themselves enabled, and list the results.

    Ends with an error if one differs from its stock model where it must not.
    """
    from h2o_prefill.cli.tables import models_table
    from h2o_prefill.eval.atomic_write import replaced_file
    from h2o_prefill.eval.compatibility.page import models_page
    from h2o_prefill.eval.compatibility.sweep import sweep
    from h2o_prefill.eval.environment import environment

    with quiet_libraries(), json_output(json_file) as save_json:
        if markdown is not None:
            check_output_file(markdown, "--markdown")
        options.use_threads(threads)
        with show_progress("models") as show:
            findings = sweep(classes or None, show)
        print_result("", models_table(findings))
        if markdown is not None:
            with replaced_file(markdown) as scratch:
                scratch.write_text(models_page(findings), encoding="utf-8")
            say_written(markdown)
        save_json(
            lambda: {
                "environment": environment(),
                "models": [finding.to_dict() for finding in findings],
            }
        )
        wrong = [finding.name for finding in findings if finding.wrong]
        if wrong:
            raise RuntimeError(f"enabled and stock models differ: {', '.join(wrong)}")
