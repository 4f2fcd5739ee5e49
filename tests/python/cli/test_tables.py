"""Tables where stdout is no terminal; `run` checks every table that a command prints."""

from __future__ import annotations

import pytest

pytest.importorskip("typer")


def test_without_a_terminal_a_row_is_a_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from h2o_prefill.cli.tables import new_table, print_result

    monkeypatch.delenv("COLUMNS", raising=False)
    table = new_table()
    for number in range(30):
        table.add_column(f"heading {number}", no_wrap=True)
    table.add_row(*(f"cell {number}" for number in range(30)))
    print_result("title", table)
    (line,) = (line for line in capsys.readouterr().out.splitlines() if "cell 0" in line)
    assert "cell 29" in line
