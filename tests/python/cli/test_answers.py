"""`h2o-prefill answers` from its arguments to its table and file."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

SMALL = "h2o,chunk_size=64,local_window=16,heavy_budget=16"


def test_one_table_and_the_file(
    run: Callable[..., Any], small_commands: dict[str, Any], tmp_path: Path
) -> None:
    file = tmp_path / "a.json"
    given = small_commands["answers"]
    done = run(*given, "--new-tokens", 4, "--question", "Why?", "--json", file)
    assert done.exit_code == 0, done.output
    report = json.loads(file.read_text())
    assert list(report["summary"]) == [SMALL]
    expected = {"question": "Why?", "new_tokens": 4, "prompt_tokens": 300, "dtype": "float32"}
    assert report["config"].items() >= expected.items()
    assert f" {report['summary'][SMALL]['equal']}/2 " in done.stdout
    assert "2 prompts of 300 tokens of long.txt" in done.stdout
    assert "\u2026" not in done.stdout, "rich cut a cell off at 80 columns"

    done = run(*given, "--prompts", 9)
    assert done.exit_code == 2
    assert "the text 'long.txt' must have 9 x 300 tokens" in done.stderr
