"""`h2o-prefill calibrate` from its arguments to its table and file."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Run = Callable[..., Any]
Refused = Callable[[Any, str], None]
PRESET = "h2o,chunk_size=16,local_window=4,heavy_budget=4"


@pytest.fixture
def calibrate(run: Run, model_folder: str, text_file: str) -> Run:
    """Run `calibrate` on the small model, of two layers; later arguments win over these."""
    return lambda *arguments: run(
        *("calibrate", "--model", model_folder, "--text-file", text_file, "--context", 64),
        *("--layers", 1, "--dtype", "float32", "--preset", PRESET, *arguments),
    )


@pytest.mark.parametrize("keep", ["wide", "dense"])
def test_the_table_ends_with_settings_that_other_commands_take(
    calibrate: Run, run: Run, model_folder: str, text_file: str, tmp_path: Path, keep: str
) -> None:
    done = calibrate("--json", tmp_path / "r.json", "--keep", keep)
    assert done.exit_code == 0, done.output
    report = json.loads((tmp_path / "r.json").read_text())
    kl = {int(layer): value for layer, value in report["kl_by_layer"].items()}
    (chosen,) = report["config"][f"{keep}_layers"]
    assert kl[chosen] == min(kl.values()) and set(kl) == {0, 1}
    layers = re.findall(r"layer (\d) dense\s+(\d\.\d+) nats", done.stdout)
    assert [int(layer) for layer, _ in layers] == sorted(kl, key=lambda layer: kl[layer])
    assert [float(value) for _, value in layers] == pytest.approx(sorted(kl.values()), abs=5e-5)

    variant = f"{PRESET},{keep}_layers={chosen}"
    assert done.stdout.splitlines()[-1] == f"--preset {variant}"
    assert report["variant"] == variant
    assert report["text_source"].startswith("text.txt sha256:")
    again = run(
        *("ppl", "--model", model_folder, "--text-file", text_file, "--context", 64),
        *("--windows", "0:1", "--preset", variant, "--json", tmp_path / "p.json"),
    )
    assert again.exit_code == 0, again.output
    after = json.loads((tmp_path / "p.json").read_text())
    assert after["kl_mean"] == pytest.approx(report["kl_after"], rel=1e-4)
    assert after["attention_flops_ratio"] == pytest.approx(report["flops_after"]["ratio"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--layers", 2), "layers must be at least 1 and fewer than the 2"),
        (("--context", 16), "at least two chunks"),
    ],
)
def test_wrong_arguments_take_one_line(
    calibrate: Run, refused: Refused, arguments: tuple[Any, ...], message: str
) -> None:
    refused(calibrate(*arguments), message)
