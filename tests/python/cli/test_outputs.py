"""Output of commands: to files that are checked before the work, or to stdout."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
JSON = ("compare", "ppl", "bench", "retrieve", "visualize", "info")
FOLDER = ("ablate", "visualize")


@pytest.mark.parametrize(
    ("command", "option", "path"),
    [
        *(("ppl", "--json", path) for path in (".", "text.txt/r.json")),
        *((command, "--json", "missing/r.json") for command in JSON),
        *((command, "--output", "text.txt/folder") for command in FOLDER),
        # A folder in the place of a result: its parent is the output.
        *(("ablate", "--output", f"perplexity_ablation.{x}/..") for x in ("csv", "png")),
        ("visualize", "--output", "errors.png/.."),
    ],
)
def test_what_cannot_be_written_is_found_before_the_work(
    run, refused, small_commands, tmp_path, monkeypatch, command, option, path
):
    def work(*_, **__):
        raise AssertionError("the work has begun")

    loaders = ("load_model", "load_text", "models.load_model")
    for name in (*(f"generation.{name}" for name in loaders), "eval.ablation.load_text"):
        monkeypatch.setattr(f"h2o_prefill.{name}", work)
    if path.endswith("/.."):
        (tmp_path / path).parent.mkdir()
    refused(run(*small_commands[command], option, tmp_path / path), "error: --")


def test_json_on_stdout_is_nothing_but_json(run, small_commands):
    done = run(*small_commands["ppl"], "--json", "-")
    assert done.exit_code == 0, done.output
    assert "environment" in json.loads(done.stdout) and "─" in done.stderr
    assert not Path("-").exists()


def test_a_full_disk_is_one_line(run):
    done = run("info", "--json", "/dev/full")
    assert done.exit_code == 1
    assert done.stderr == "error: cannot write '/dev/full': No space left on device\n"


def test_a_reader_that_goes_away_does_not_cost_the_result(tmp_path):
    # The command's stdout is a pipe that nobody reads.
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "h2o_prefill_cli", "info", "--json", "i.json"]
    where = {"cwd": tmp_path, "env": {**os.environ, "PYTHONPATH": str(ROOT)}}
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, **where)
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, "wrote i.json\n")
    assert json.loads((tmp_path / "i.json").read_text())


def test_letters_that_the_terminal_lacks_are_replaced(small_commands):
    testing = pytest.importorskip("typer.testing")
    from h2o_prefill.cli.app import app

    done = testing.CliRunner(charset="ascii").invoke(app, small_commands["ppl"])
    assert done.exit_code == 0, done.output
    assert " % ? " in done.stdout
