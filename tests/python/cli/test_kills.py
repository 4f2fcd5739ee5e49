"""Commands that are killed: result files are whole, old or new, or not there."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from h2o_prefill.eval.ablation.table import read_rows

pytest.importorskip("pandas")
pytest.importorskip("matplotlib")

OUTPUTS = {
    "ppl": ("--json", "result.json", "--plot", "figure.png"),
    "calibrate": ("--json", "result.json"),
    "bench": ("--json", "result.json", "--output", "folder"),
    "ablate": ("--output", "folder"),
    "retrieve": ("--json", "result.json", "--plot", "figure.png"),
    "visualize": ("--json", "result.json", "--output", "folder"),
    "info": ("--json", "result.json"),
}

_IS_WHOLE: dict[str, Callable[[Path], Any]] = {
    ".json": lambda path: json.loads(path.read_text()),
    ".png": lambda path: path.read_bytes().endswith(b"IEND\xaeB`\x82"),
    ".html": lambda path: path.read_text().endswith("</html>\n"),
    ".csv": lambda path: all(float(row["sparse_seconds"]) > 0 for row in read_rows(path)),
}


def _files(folder: Path) -> list[Path]:
    """Return the result files below a folder, without those that are being written."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return [path for path in files if not path.name.startswith(".")]


def _wait_for_writing(child: int, folder: Path, changes: int) -> None:
    """Return when files of a folder have changed so often, or the process has ended."""
    before = None
    while changes >= 0:
        os.kill(child, 0)
        now = [(path, path.stat().st_size) for path in folder.rglob("*") if path.exists()]
        changes -= now != before
        before = now


# One that writes a file and figures, and one that is resumed.
SAMPLE = ("bench", "ablate")


@pytest.mark.parametrize(
    ("command", "kills"),
    [
        *((command, 2) for command in SAMPLE),
        *(pytest.param(command, 20, marks=pytest.mark.slow) for command in OUTPUTS),
    ],
)
def test_result_files_are_whole_whenever_the_command_is_killed(
    command_server: Any, small_commands: dict[str, Any], tmp_path: Path, command: str, kills: int
) -> None:
    rng = random.Random(f"{command} {kills}")
    results, log = tmp_path / "results", tmp_path / "log"
    results.mkdir()
    outputs = [str(results / text) if text[0] != "-" else text for text in OUTPUTS[command]]
    arguments = (*small_commands[command], *outputs)
    begin = time.perf_counter()
    command_server.start(arguments, log)
    assert command_server.wait() == 0, log.read_text()
    duration = time.perf_counter() - begin
    names = {path.name for path in _files(results)}

    for kill in range(kills):
        if kill % 2:
            # A finished ablation has nothing to write any more; the others also begin anew.
            shutil.rmtree(results)
            results.mkdir()
        child = command_server.start(arguments, log)
        # The process may have ended by itself.
        with contextlib.suppress(ProcessLookupError, FileNotFoundError):
            if kill % 2:
                _wait_for_writing(child, results, rng.randint(1, 6))
            else:
                time.sleep(rng.uniform(0, duration))
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        command_server.wait()
        for path in _files(results):
            assert _IS_WHOLE[path.suffix](path), f"{path} is not whole"

    command_server.start(arguments, log)
    assert command_server.wait() == 0, log.read_text()
    assert {path.name for path in _files(results)} == names
