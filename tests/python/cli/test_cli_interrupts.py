"""Ctrl-C: one line on what is kept, at any time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pd = pytest.importorskip("pandas")

Run = Callable[..., Any]
ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("command", ["ppl", "calibrate", "bench", "retrieve", "visualize"])
def test_a_command_that_keeps_nothing_says_so(
    run: Run, small_commands: dict[str, Any], monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("h2o_prefill.eval.load_model", interrupted)
    done = run(*small_commands[command])
    assert done.exit_code == 130
    expected = "interrupted: partial results are not kept, existing result files are intact\n"
    assert done.stderr == expected


def test_an_ablation_keeps_its_cells_and_goes_on(
    command_server: Any, small_commands: dict[str, Any], tmp_path: Path
) -> None:
    csv, log = tmp_path / "out" / "perplexity_ablation.csv", tmp_path / "log"
    budgets = ",".join(map(str, range(20)))
    arguments = (*small_commands["ablate"], "--heavy-budget", budgets, "--no-plot")
    arguments = (*arguments, "--output", tmp_path / "out")
    child = command_server.start(arguments, log)
    while not (csv.exists() and len(csv.read_text().splitlines()) > 3):
        time.sleep(0.001)
    os.kill(child, signal.SIGINT)
    assert command_server.wait() == 130
    assert log.read_text().splitlines()[-1] == (
        f"interrupted: finished cells are kept in '{tmp_path / 'out'}', "
        "the same command goes on with the others"
    )
    assert "Traceback" not in log.read_text()
    kept = pd.read_csv(csv).set_index("cell")
    command_server.start(arguments, log)
    assert command_server.wait() == 0, log.read_text()
    whole = pd.read_csv(csv).set_index("cell")
    assert 3 <= len(kept) < len(whole) == 20
    pd.testing.assert_frame_equal(whole.loc[kept.index], kept)


def test_while_pytorch_is_imported() -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "h2o_prefill_cli", "info"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    # The libraries of PyTorch are in memory long before its import has ended.
    maps = Path(f"/proc/{process.pid}/maps")
    while "libtorch" not in maps.read_text():
        time.sleep(0.001)
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=60) == ("", "interrupted: nothing was done yet\n")
    assert process.returncode == 130
