"""Tables on narrow and on wide terminals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("typer")

Run = Callable[..., Any]
COMMANDS = ("compare", "ppl", "calibrate", "bench", "ablate", "retrieve", "visualize", "info")


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
    from h2o_prefill.cli import tables

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
        tables.print_result(title, table)
        shown = capsys.readouterr().out
        assert max(map(len, shown.splitlines())) <= width
        assert _words(table) <= set(shown.split())
        assert "\u2026" not in shown


def test_without_a_terminal_a_row_is_a_line(capsys: pytest.CaptureFixture[str], run: Run) -> None:
    from h2o_prefill.cli.tables import new_table, print_result

    table = new_table()
    for number in range(30):
        table.add_column(f"heading {number}", no_wrap=True)
    table.add_row(*(f"cell {number}" for number in range(30)))
    print_result("title", table)
    (line,) = (line for line in capsys.readouterr().out.splitlines() if "cell 0" in line)
    assert "cell 29" in line
