"""The benchmark of lexical recall: its two kinds of rows, and the flops it counts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


def test_what_the_rows_say(run: Callable[..., tuple[Any, dict[str, Any]]]) -> None:
    _, report = run("recall", "--lengths", "200")
    searches = [row for row in report["rows"] if "search_milliseconds" in row]
    layers = [row for row in report["rows"] if "time_ratio" in row]
    variants = report["options"]["variants"]
    assert [row["recall"] for row in searches] == list(variants)
    assert [row["recall"] for row in layers] == 2 * list(variants)
    for row in [*searches, *layers]:
        assert row["keys_a_block"] > 0
    for row in layers:
        # Chunks of 64, 64, 64 and 8 rows, all but the first beside a memory set of 16; blocks of
        # 16 rows, the last one of 8.
        without = 3 * 64 * 65 / 2 + 8 * 9 / 2 + 136 * 16
        assert 0 < (row["flop_ratio"] - 1) * without < 16 * 13 * row["keys_a_block"]
        assert row["flops_by_h2o"] == pytest.approx(row["flop_ratio"])
        assert row["time_by_h2o"] > 0
        excess = row["time_ratio"] / row["flop_ratio"] - 1
        assert row["excess_percent"] == pytest.approx(100 * excess)
