"""Ctrl-C: one line on what is kept, at any time."""

import itertools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pd = pytest.importorskip("pandas")
pytest.importorskip("transformers")

from h2o_prefill.eval.forward import PromptForward  # noqa: E402


@pytest.fixture(autouse=True)
def usual_handler():
    """Python's handler of Ctrl-C, which a background job does not have."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


ROOT = Path(__file__).parents[3]


def test_a_command_that_keeps_nothing_says_so(run, small_commands, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("h2o_prefill.generation.load_model", interrupted)
    done = run(*small_commands["ppl"])
    said = "interrupted: partial results are not kept, existing result files are intact\n"
    assert (done.exit_code, done.stderr) == (130, said)


def test_an_ablation_keeps_its_cells_and_goes_on(run, small_commands, monkeypatch, tmp_path):
    out = tmp_path / "out"
    grid = ("--heavy-budget", "0,1,2,3", "--no-plot", "--output", out)
    arguments = (*small_commands["ablate"], *grid)
    attended = PromptForward.__call__
    calls = itertools.count()

    def interrupted(*arguments, **keywords):
        # Two windows densely and two for every cell: in the middle of the third cell.
        if next(calls) == 7:
            signal.raise_signal(signal.SIGINT)
        return attended(*arguments, **keywords)

    with monkeypatch.context() as patch:
        patch.setattr(PromptForward, "__call__", interrupted)
        done = run(*arguments)
    assert done.exit_code == 130
    assert done.stderr.splitlines()[-1] == (
        f"interrupted: finished cells are kept in '{out}', "
        "the same command continues with the others"
    )
    kept = pd.read_csv(out / "perplexity_ablation.csv").set_index("cell")
    assert run(*arguments).exit_code == 0
    whole = pd.read_csv(out / "perplexity_ablation.csv").set_index("cell")
    assert 2 <= len(kept) < len(whole) == 4
    pd.testing.assert_frame_equal(whole.loc[kept.index], kept)


def test_while_pytorch_is_imported():
    process = subprocess.Popen(
        [sys.executable, "-m", "h2o_prefill_cli", "info"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        # A test run may ignore SIGINT, as a background job does, and children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    # The libraries of PyTorch are in memory long before its import has ended.
    maps = Path(f"/proc/{process.pid}/maps")
    while "libtorch" not in maps.read_text():
        time.sleep(0.001)
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=60) == (b"", b"interrupted: nothing was done yet\n")
    assert process.returncode == 130
