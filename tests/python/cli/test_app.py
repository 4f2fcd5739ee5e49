"""The command line as a whole, and its smaller commands."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import h2o_prefill
from h2o_prefill.config import PrefillConfig
from h2o_prefill.presets import PRESETS

Run = Callable[..., Any]
Refused = Callable[[Any, str], None]
COMMANDS = (
    "ppl",
    "ablate",
    "calibrate",
    "bench",
    "retrieve",
    "answers",
    "visualize",
    "generate",
    "info",
)
SIZES = ("--chunk-size", 16, "--local-window", 4, "--heavy-budget", 4)


def test_help_lists_the_commands(run: Run) -> None:
    for arguments in ((), ("--help",)):
        done = run(*arguments)
        assert done.exit_code == 0
        assert all(name in done.stdout for name in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(run: Run, command: str) -> None:
    done = run(command, "--help")
    assert done.exit_code == 0
    assert "--" in done.stdout


def test_the_version_is_the_librarys(run: Run) -> None:
    done = run("--version")
    assert done.exit_code == 0
    assert done.stdout == f"h2o-prefill {h2o_prefill.__version__}\n"


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_has_a_text_of_its_own(command: str) -> None:
    typer = pytest.importorskip("typer")
    from h2o_prefill.cli.app import app

    group = typer.main.get_command(app)
    for parameter in group.commands[command].params:
        text = parameter.help or ""
        assert len(text.split()) >= 3 and text[0].isupper() and text[-1] == ".", parameter.name
        assert not text.startswith(("Of ", "See ")), parameter.name


def test_help_names_options_whole_on_a_narrow_terminal() -> None:
    command = [sys.executable, "-m", "h2o_prefill.cli", "ablate", "--help"]
    environment = {**os.environ, "COLUMNS": "40"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    for field in dataclasses.fields(PrefillConfig):
        assert f"--{field.name.replace('_', '-')} " in done.stdout


def test_an_unknown_command_is_one_line(run: Run, refused: Refused) -> None:
    refused(run("perplexity"), "perplexity")


MEASURING = ("ppl", "ablate", "calibrate", "bench", "retrieve", "answers", "visualize")
WRONG_VALUES = {
    ("--model", "./nowhere"): (MEASURING, "model: no such file or folder: './nowhere'"),
    ("--dtype", "int8"): (MEASURING, "dtype must be one of"),
    ("--threads", "0"): (MEASURING, "--threads"),
    ("--threads", "4294967297"): (("ppl",), "Invalid value for '--threads'"),
    ("--preset", "best"): (
        ("ppl", "ablate", "calibrate", "bench", "visualize"),
        "preset must be one of",
    ),
    ("--text-file", "missing.txt"): (
        ("ppl", "ablate", "calibrate", "retrieve", "answers", "visualize"),
        "text_file: no such file: 'missing.txt'",
    ),
    ("--json", "no/such/folder/r.json"): (
        ("ppl", "calibrate", "bench", "retrieve", "answers", "visualize"),
        "--json must be a file in a folder that exists",
    ),
}


@pytest.mark.parametrize(
    ("command", "option"),
    [(command, option) for option, (commands, _) in WRONG_VALUES.items() for command in commands],
)
def test_shared_options_refuse_wrong_values(
    run: Run,
    refused: Refused,
    small_commands: dict[str, Any],
    command: str,
    option: tuple[str, str],
) -> None:
    refused(run(*small_commands[command], *option), WRONG_VALUES[option][1])


def test_it_runs_as_a_module() -> None:
    pytest.importorskip("typer")
    command = [sys.executable, "-m", "h2o_prefill.cli", "ppl", "--windows", "x"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert done.stderr == "error: windows must be a slice like 0:6, got 'x'\n"


def test_without_its_packages_it_says_what_to_install() -> None:
    code = "import sys; sys.modules['typer'] = None; from h2o_prefill.cli import main; main()"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    expected = "error: the command line needs the package typer: pip install 'h2o_prefill[eval]'\n"
    assert done.stderr == expected


def test_mistakes_of_ours_keep_their_traceback(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise TypeError("ours")

    monkeypatch.setattr("h2o_prefill.eval.load_text", broken)
    done = run("ppl")
    assert isinstance(done.exception, TypeError)
    assert done.exit_code == 1


def test_debug_shows_the_traceback_of_any_error(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("H2O_PREFILL_DEBUG", "1")
    assert isinstance(run("ppl", "--windows", "x").exception, ValueError)


def test_info_names_the_build_and_writes_json(run: Run, tmp_path: Path) -> None:
    done = run("info", "--json", tmp_path / "i.json")
    assert done.exit_code == 0, done.output
    facts = json.loads((tmp_path / "i.json").read_text())
    assert facts["environment"]["library"]["version"] in done.stdout
    assert "chunked_sparse_attention" in done.stdout
    assert facts["linear attention"]["CPU"] in " ".join(done.stdout.split())
    assert facts["command line"]["presets"] == list(PRESETS)


@pytest.fixture
def generate(run: Run, model_folder: str) -> Run:
    return lambda *arguments: run(
        "generate", "--model", model_folder, "--max-new-tokens", 5, *SIZES, *arguments
    )


@pytest.mark.parametrize(
    ("sentences", "way"), [(1, "sparse"), (0, "dense, since shorter than 16 tokens")]
)
def test_generate_adds_text_and_says_how_it_prefilled(
    generate: Run, tiny: Any, tmp_path: Path, sentences: int, way: str
) -> None:
    prompt = tiny.SENTENCE * sentences or "Sphinx"
    (tmp_path / "prompt.txt").write_text(prompt)
    spoken = generate(prompt)
    read = generate("--prompt-file", tmp_path / "prompt.txt")
    assert spoken.exit_code == 0, spoken.output
    assert spoken.stdout == read.stdout
    assert f"prefill {len(prompt)} tokens in" in spoken.stderr.replace("\n", " ")
    assert f"({way}), then 5 tokens" in spoken.stderr.replace("\n", " ")


def test_generate_prints_what_the_sparse_model_says(
    generate: Run, tiny: Any, model_folder: str
) -> None:
    import h2o_prefill
    from h2o_prefill.eval import load_model

    model, tokenizer = load_model(model_folder)
    ids = tokenizer(tiny.SENTENCE, return_tensors="pt", verbose=False)["input_ids"]
    with h2o_prefill.enable(model, chunk_size=16, local_window=4, heavy_budget=4):
        out = model.generate(ids, max_new_tokens=5, do_sample=False)
    new = tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
    assert generate(tiny.SENTENCE).stdout == new + "\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "give a prompt or --prompt-file, one of the two"),
        (("words", "--prompt-file", "p.txt"), "give a prompt or --prompt-file, one of the two"),
        (("  ",), "prompt must not be empty"),
        (("--prompt-file", "missing.txt"), "--prompt-file: no such file"),
        (("words", "--max-new-tokens", 0), "--max-new-tokens"),
        (("words", "--max-new-tokens", 600), "prompt and new tokens must be <= 512"),
    ],
)
def test_generate_refuses_wrong_input(
    generate: Run, refused: Refused, arguments: tuple[object, ...], message: str
) -> None:
    refused(generate(*arguments), re.escape(message))
