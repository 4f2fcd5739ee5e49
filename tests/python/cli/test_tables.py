"""Tables on narrow and on wide terminals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from h2o_prefill.config import PrefillConfig
from h2o_prefill.eval.retrieval.result import PromptOutcome, RetrievalResult, summarize_retrieval

pytest.importorskip("typer")

Run = Callable[..., Any]
COMMANDS = ("ppl", "calibrate", "bench", "ablate", "retrieve", "answers", "visualize", "info")


def _words(table: Any) -> set[str]:
    """Return the words of all headings and cells that fit into the narrowest column."""
    texts = [text for column in table.columns for text in (column.header, *column.cells)]
    return {word for text in texts for word in str(text).split() if len(word) <= 12}


@pytest.mark.parametrize("command", COMMANDS)
def test_no_table_loses_a_word_or_leaves_the_terminal(
    run: Run,
    small_commands: dict[str, Any],
    tmp_path: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: str,
) -> None:
    from h2o_prefill.cli import result_table

    printed: list[tuple[str, Any]] = []
    monkeypatch.setattr(
        f"h2o_prefill.cli.{command}.print_result", lambda *result: printed.append(result)
    )
    output = ("--output", tmp_path / "out") if command in ("ablate", "visualize") else ()
    done = run(*small_commands[command], *output)
    assert done.exit_code == 0, done.output
    ((title, table),) = printed
    for width in (40, 60, 80, 120):
        monkeypatch.setenv("COLUMNS", str(width))
        result_table.print_result(title, table)
        shown = capsys.readouterr().out
        assert max(map(len, shown.splitlines())) <= width
        assert _words(table) <= set(shown.split())
        assert "\u2026" not in shown


def test_without_a_terminal_a_row_is_a_line(capsys: pytest.CaptureFixture[str], run: Run) -> None:
    from h2o_prefill.cli.result_table import new_table, print_result

    table = new_table()
    for number in range(30):
        table.add_column(f"heading {number}", no_wrap=True)
    table.add_row(*(f"cell {number}" for number in range(30)))
    print_result("title", table)
    (line,) = (line for line in capsys.readouterr().out.splitlines() if "cell 0" in line)
    assert "cell 29" in line


def test_the_table_shows_shares_with_their_intervals() -> None:
    from rich.console import Console

    from h2o_prefill.cli.tables import retrieval_table

    variant = "h2o,recall=4,dense_tail=64"
    outcomes = [
        PromptOutcome(
            "variable_tracking", length, 0, 1, 99, ("1",), {}, {"dense": dense, variant: sparse}
        )
        for length in (4096, 16384)
        for dense, sparse in [(1.0, 1.0), (1.0, 0.0), (0.5, 1.0), (1.0, 1.0)]
    ]
    summary = summarize_retrieval(outcomes, ["dense", variant])
    config = {variant: PrefillConfig()}
    table = retrieval_table(RetrievalResult(outcomes, summary, config, "last", 1, 0, "text"))
    console = Console(width=80)
    with console.capture() as capture:
        console.print(table)
    lines = [line.strip() for line in capture.get().splitlines()]
    assert [line.split() for line in lines if line.startswith("variable_tracking")] == [
        ["variable_tracking", str(length), "dense", "88", "(40-99)", "3/3", "100", "(44-100)"]
        for length in (4096, 16384)
    ]
    below = [line.split() for line in lines if line.startswith("h2o")]
    assert below == [[below[0][0], "75", "(30-95)", "2/3", "67", "(21-94)"]] * 2
    assert variant.startswith(below[0][0]) and "\u2026" not in capture.get()
