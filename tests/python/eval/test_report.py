"""The JSON report, the figure and the environment."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from h2o_prefill import ops
from h2o_prefill.config import PrefillConfig
from h2o_prefill.eval import PerplexityResult, environment, evaluate_perplexity
from h2o_prefill.eval.perplexity.result import perplexity_report
from h2o_prefill.eval.report import write_json
from h2o_prefill.testing import Shape, make_qkv


@pytest.fixture(params=["gptq", "llamacpp"])
def result(
    request: pytest.FixtureRequest, tiny_model: Any, small_config: PrefillConfig
) -> PerplexityResult:
    tokens = torch.randint(1, 257, (128,), generator=torch.Generator().manual_seed(0))
    return evaluate_perplexity(
        tiny_model, tokens, small_config, context=64, windows="0:1", protocol=request.param
    )


def test_the_report_has_what_readers_expect(result: PerplexityResult, tmp_path: Path) -> None:
    write_json(perplexity_report(result, model="tiny", dtype="float32"), tmp_path / "r.json")
    report = json.loads((tmp_path / "r.json").read_text())
    assert {"environment", "config", "dense", "sparse", "delta_percent", "stderr_percent"} <= set(
        report
    )
    for name in ("dense", "sparse"):
        assert {"ppl", "ppl_by_chunk", "seconds"} <= set(report[name])
        assert len(report[name]["ppl_by_chunk"]) == 4
    assert report["config"]["model"] == "tiny"
    assert report["config"]["windows"] == [0]
    assert report["config"]["chunk_size"] == 16
    assert report["config"]["protocol"] == result.protocol
    assert report["dense"]["ppl"] == result.dense.ppl
    assert report["environment"]["torch"] == torch.__version__


def test_numbers_that_json_lacks_become_null(tmp_path: Path) -> None:
    values = {"a": float("nan"), "b": [float("inf"), 1.5, None], "c": (1, 2)}
    write_json(values, tmp_path / "v.json")
    read = json.loads((tmp_path / "v.json").read_text(), parse_constant=pytest.fail)
    assert read == {"a": None, "b": [None, 1.5, None], "c": [1, 2]}


@pytest.mark.parametrize(
    ("suffix", "begin"), [("png", b"\x89PNG"), ("pdf", b"%PDF"), ("svg", b"<?xml")]
)
def test_the_figure_shows_both_runs(
    result: PerplexityResult, tmp_path: Path, suffix: str, begin: bytes
) -> None:
    pytest.importorskip("matplotlib")
    from h2o_prefill.eval.perplexity.plot import plot_perplexity

    figure = plot_perplexity(result, tmp_path / f"p.{suffix}", "a title")
    assert (tmp_path / f"p.{suffix}").read_bytes().startswith(begin)
    window, chunk, window_change, chunk_change = figure.axes
    drawn = {patch.get_label(): patch.get_data().values for patch in window.patches}
    for name in ("dense", "sparse"):
        curve = getattr(result.by_position, name)
        expected = [math.nan if value is None else value for value in curve]
        assert list(drawn[name]) == pytest.approx(expected, nan_ok=True)
    assert [text.get_text() for text in chunk.get_legend().get_texts()] == ["dense", "sparse"]
    assert window.get_ylabel() == "perplexity"
    assert "chunk" in chunk_change.get_xlabel() and "window" in window_change.get_xlabel()


def test_environment_names_versions_machine_and_build() -> None:
    facts = environment.environment()
    assert facts["threads"] == torch.get_num_threads()
    assert facts["library"]["torch"] in facts["torch"]
    assert facts["cpu"]
    assert json.loads(json.dumps(facts)) == facts


def test_operators_have_cpu_kernels() -> None:
    operators = environment.operators()
    assert "cpu" in operators["chunked_sparse_attention"]
    assert all(devices for devices in operators.values())
    # These are some of PyTorch's own operators on every device but the CPU.
    composed = {
        "accumulate_scores_",
        "advance_position_",
        "recall_at_position",
    }
    with_cuda = {name for name, devices in operators.items() if "cuda" in devices}
    assert with_cuda == (set(operators) - composed if environment.has_cuda() else set())


@pytest.mark.parametrize("head_dim", [1, 64, 700])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16", "float64"])
def test_linear_attention_is_computed_as_said(name: str, causal: bool, head_dim: int) -> None:
    q, k, v = make_qkv(Shape(1, 2, 1, 20, head_dim, 8), getattr(torch, name))
    q.requires_grad_()
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=cpu, acc_events=True) as run:
        out, _, _ = ops.chunkwise_linear_attention(q, k, v, causal=causal)
        out.sum().backward()
    # Kernels multiply without PyTorch's products.
    composed = any(event.key == "aten::matmul" for event in run.key_averages())
    said = environment.linear_attention()
    assert composed == (name in said["composite version"]) == (name not in said["CPU"])


def test_commit_is_only_that_of_the_packages_own_checkout(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    root = tmp_path / "venv"
    root.mkdir()
    copy = root / "h2o_prefill" / "eval" / "environment.py"
    monkeypatch.setattr(environment, "__file__", str(copy))
    (tmp_path / ".git").mkdir()
    assert environment.commit() is None
    (root / ".git").mkdir()
    monkeypatch.setattr(
        environment, "_git", lambda root, *what: {"rev-parse": "abc"}.get(what[0], "")
    )
    assert environment.commit() == "abc"
    monkeypatch.setattr(environment, "_git", lambda root, *what: "abc")
    assert environment.commit() == "abc+"
