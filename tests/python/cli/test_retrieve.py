"""`h2o-prefill retrieve` from its arguments to its table and files, and variants as text."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from h2o_prefill.cli.options import parse_variant, parse_variants
from h2o_prefill.config import PrefillConfig
from h2o_prefill.eval.retrieval.result import PromptOutcome, RetrievalResult, summarize_retrieval

SMALL = "h2o,chunk_size=64,local_window=16,heavy_budget=16"
RECALL = f"{SMALL},recall=2,recall_block=32"


@pytest.fixture
def retrieve(run: Callable[..., Any], small_commands: dict[str, Any]) -> Callable[..., Any]:
    """Run `retrieve` on the small model; later arguments win over these."""
    given = small_commands["retrieve"]
    return lambda *arguments: run(*given[: given.index("--variant")], *arguments)


def test_one_table_and_the_files(retrieve: Callable[..., Any], tmp_path: Path) -> None:
    done = retrieve(
        *("--variant", SMALL, "--variant", RECALL, "--prompts", 2, "--seed", 5),
        *("--json", tmp_path / "r.json", "--plot", tmp_path / "p.png", "--question", "first"),
    )
    assert done.exit_code == 0, done.output
    report = json.loads((tmp_path / "r.json").read_text())
    found = [(row["variant"], row["prompts"], row["kept"]) for row in report["summary"]]
    assert found == [(name, 4, None) for name in ("dense", SMALL, RECALL)]
    assert [prompt["depth"] for prompt in report["prompts"]] == [0, 0, 100, 100]
    expected = {"question": "first", "seed": 5, "dtype": "float32", "prompts_per_cell": 2}
    assert report["config"].items() >= expected.items()
    assert report["config"]["variants"][RECALL]["recall"] == 2
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    assert "needles in long.txt, question first" in done.stdout
    assert len(re.findall(r" 0 \(0-49\)", done.stdout)) == 3
    assert "warning" not in done.output.lower()
    assert "\u2026" not in done.stdout, "rich cut a cell off at 80 columns"


def test_the_table_shows_shares_with_their_intervals() -> None:
    from rich.console import Console

    from h2o_prefill.cli.tables import retrieval_table

    variant = "h2o,recall=4,dense_tail=64"
    outcomes = [
        PromptOutcome(
            "variable_tracking", length, 0, 1, 99, ("1",), {}, {"dense": dense, variant: sparse}
        )
        for length in (4096, 16384)
        for dense, sparse in [(1.0, 1.0), (1.0, 0.0), (0.5, 1.0), (1.0, 1.0)]
    ]
    summary = summarize_retrieval(outcomes, ["dense", variant])
    config = {variant: PrefillConfig()}
    table = retrieval_table(RetrievalResult(outcomes, summary, config, "last", 1, 0, "text"))
    console = Console(width=80)
    with console.capture() as capture:
        console.print(table)
    lines = [line.strip() for line in capture.get().splitlines()]
    assert [line.split() for line in lines if line.startswith("variable_tracking")] == [
        ["variable_tracking", str(length), "dense", "88", "(40-99)", "3/3", "100", "(44-100)"]
        for length in (4096, 16384)
    ]
    below = [line.split() for line in lines if line.startswith("h2o")]
    assert below == [[below[0][0], "75", "(30-95)", "2/3", "67", "(21-94)"]] * 2
    assert variant.startswith(below[0][0]) and "\u2026" not in capture.get()


def test_a_variant_is_a_preset_with_changes() -> None:
    assert parse_variant("h2o") == PrefillConfig()
    parsed = parse_variant(
        "h2o,recall=4,dense_layers=0+1,gqa_reduce=max,min_prefill=2048,wide_layers=2"
    )
    assert parsed == PrefillConfig(
        recall=4, dense_layers=(0, 1), gqa_reduce="max", min_prefill=2048, wide_layers=(2,)
    )
    assert list(parse_variants(["h2o,recall=2", "h2o"])) == ["h2o,recall=2", "h2o"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--variant", "h2o,recal=4"), 'settings .h2o,recal=4.: "recal" is no setting'),
        (("--variant", "h2o"), "at least two chunks of 1024 tokens for variant 'h2o'"),
        (("--lengths", "480,many"), "lengths must be numbers with commas between"),
        (("--lengths", "600"), "lengths must be <= 512"),
        (("--depths", ""), "depths must be numbers with commas between, got ''"),
        (("--prompts", 0), "--prompts"),
        (("--plot", "p.gif"), r"--plot must end in one of .*got 'p.gif'"),
    ],
)
def test_wrong_input_is_one_line_and_exit_code_2(
    retrieve: Callable[..., Any], refused: Any, arguments: tuple[object, ...], message: str
) -> None:
    variant = () if "--variant" in arguments else ("--variant", SMALL)
    refused(retrieve(*variant, *arguments), message)
