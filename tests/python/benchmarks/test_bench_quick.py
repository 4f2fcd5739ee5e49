"""Every benchmark runs in its quick mode, and leaves JSON that says what was run where."""

from __future__ import annotations

import contextlib
import importlib.util
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

Run = Callable[..., tuple[Any, dict[str, Any]]]

# What every row of a benchmark has, and that is a time, a rate or a size above 0.
FIELDS = {
    "cpu_peak": ["rate", "best_rate"],
    "intra_chunk": ["milliseconds", "gflops", "percent", "speedup"],
    "memory": ["milliseconds", "gflops", "percent", "speedup"],
    "colsum": ["milliseconds", "milliseconds_without"],
    "select": ["milliseconds", "pytorch_milliseconds", "speedup"],
    "gather": ["gigabytes", "copy_gigabytes", "percent"],
    "scores": ["microseconds", "pytorch_microseconds", "speedup"],
    "dense": ["milliseconds", "sdpa_milliseconds", "speedup", "context"],
    "linear_decode": ["microseconds", "pytorch_microseconds", "speedup"],
    "prefill": ["dense_milliseconds", "sparse_milliseconds", "speedup", "flop_ratio"],
}
LINEAR = ["milliseconds", "gflops", "percent", "both_milliseconds"]


def _check_report(report: dict[str, Any], fields: list[str]) -> None:
    assert report["quick"] is True
    assert report["environment"]["cpu"] and report["environment"]["torch"]
    assert report["rows"]
    for row in report["rows"]:
        for field in fields:
            assert math.isfinite(row[field]) and row[field] > 0, (field, row)


# These compile the CPU kernels, or programs, again.
COMPILE = ("colsum", "dense", "scores")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow if name in COMPILE else ()) for name in FIELDS],
)
def test_operator_benchmarks(run: Run, name: str) -> None:
    done, report = run(name)
    _check_report(report, FIELDS[name])
    assert report["title"] in done.stdout
    if name not in ("cpu_peak", "select", "scores"):
        assert {(r["head_dim"], r["dtype"]) for r in report["rows"]} == {
            (dim, dtype) for dim in (64, 128) for dtype in ("float32", "bfloat16")
        }


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", ["intra_chunk", "memory", "colsum", "prefill", "linear"])
def test_operator_benchmarks_on_a_gpu(run: Run, name: str) -> None:
    _, report = run(name, "--device", "cuda")
    _check_report(report, [field for field in FIELDS.get(name, LINEAR) if field != "percent"])
    assert report["environment"]["gpu"]
    for row in report["rows"]:
        assert row["device"] == "cuda" and row["dtype"] == "bfloat16"
        assert (
            name in ("colsum", "linear") or row["sdpa_backend"] in row["sdpa_backends_milliseconds"]
        )


@pytest.mark.parametrize(
    ("device", "has_gpu", "built", "message"),
    [
        ("tpu", True, True, "--device must be of cpu, cuda, got 'tpu'"),
        ("cuda", False, True, "PyTorch finds no GPU"),
        ("cuda", True, False, "h2o_prefill was built without CUDA kernels"),
    ],
)
def test_a_device_that_is_not_there(
    monkeypatch: pytest.MonkeyPatch, device: str, has_gpu: bool, built: bool, message: str
) -> None:
    import typer
    from common import plan

    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    monkeypatch.setattr(plan, "has_cuda", lambda: built)
    with pytest.raises(typer.BadParameter, match=message):
        plan.make_plan("prefill", quick=True, device=device)


def test_a_plan_for_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    from common import plan
    from common.timing import gpu_timer

    monkeypatch.setattr(plan, "_check_device", lambda device: None)
    on_gpu = plan.make_plan("prefill", threads=None, device="cuda")
    assert on_gpu.json is not None and on_gpu.json.name == "prefill_cuda.json"
    assert on_gpu.dtypes == (torch.bfloat16,)
    cases = list(on_gpu.cases())
    assert len(cases) == len(on_gpu.shapes)
    assert all(case.timer is gpu_timer and case.fields["device"] == "cuda" for case in cases)
    assert "threads" not in cases[0].fields


def test_options_choose_rows(run: Run) -> None:
    options = ("--shape", "smollm2", "--dtype", "float16", "--threads", "1,2", "--lengths", "5,130")
    _, report = run("prefill", *options)
    assert [(r["dtype"], r["threads"], r["length"]) for r in report["rows"]] == [
        ("float16", threads, length) for threads in (1, 2) for length in (5, 130)
    ]
    # One chunk is dense attention; 64 + 64 + 2 rows, the latter two beside a memory set of 16.
    assert report["rows"][0]["flop_ratio"] == 1
    pairs = 2 * 64 * 65 / 2 + 2 * 3 / 2 + 66 * 16
    assert report["rows"][1]["flop_ratio"] == pytest.approx(130 * 131 / 2 / pairs)


def test_model(run: Run, model_folder: str) -> None:
    _, report = run("model", "--model", model_folder)
    _check_report(report, ["seconds", "tokens_per_second", "speedup"])
    variants = ["dense", "dense_chunked", "sparse", "no_attention"]
    assert [row["variant"] for row in report["rows"]] == variants * 2


def test_the_variants_of_a_model_are_what_they_say(model_folder: str) -> None:
    from common.variants import prefill_variants

    import h2o_prefill
    from h2o_prefill.config import PrefillConfig
    from h2o_prefill.eval import load_model

    model, _ = load_model(model_folder)
    ids = torch.randint(257, (1, 150), generator=torch.Generator().manual_seed(0))
    config = PrefillConfig(chunk_size=64, local_window=8, heavy_budget=8)
    logits = {name: run() for name, run in prefill_variants(model, ids, config).items()}
    with torch.no_grad():
        dense = model(ids).logits[0, -1]
        with h2o_prefill.enable(model, config):
            sparse = model(ids).logits[0, -1]
    torch.testing.assert_close(logits["dense"], dense, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(logits["dense_chunked"], dense, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(logits["sparse"], sparse, rtol=1e-4, atol=1e-4)
    assert (logits["sparse"] - dense).abs().max() > 1e-2
    assert (logits["no_attention"] - dense).abs().max() > 1e-2


def test_padded(run: Run, model_folder: str) -> None:
    _, report = run("padded", "--model", model_folder)
    _check_report(report, ["seconds", "tokens_per_second", "speedup", "rows_speedup"])
    variants = ["dense", "sparse", "dense_rows", "sparse_rows"]
    assert [row["variant"] for row in report["rows"]] == variants * 2


def test_the_variants_of_a_padded_batch_give_what_its_rows_give(model_folder: str) -> None:
    from common.variants import padded_variants

    from h2o_prefill.config import PrefillConfig
    from h2o_prefill.eval import load_model

    model, _ = load_model(model_folder)
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(257, (length,), generator=generator) for length in (150, 60, 200)]
    config = PrefillConfig(chunk_size=64, local_window=8, heavy_budget=8)
    logits = {name: run() for name, run in padded_variants(model, rows, config).items()}
    for name in ("dense", "sparse"):
        torch.testing.assert_close(logits[name], logits[f"{name}_rows"], rtol=1e-4, atol=1e-4)
    differs = (logits["sparse"] - logits["dense"]).abs().amax(1)
    assert differs[0] > 1e-2 and differs[1] < 1e-4 and differs[2] > 1e-2


def test_decode(run: Run, model_folder: str) -> None:
    _, report = run("decode", "--model", model_folder, "--dtype", "float32")
    _check_report(report, ["milliseconds", "tokens_per_second", "speedup"])
    assert [row["variant"] for row in report["rows"]] == ["stock", "enabled"]


@pytest.mark.slow
def test_package(run: Run, model_folder: str) -> None:
    _, report = run("package", "--model", model_folder, "--dtype", "float32")
    _check_report(report, ["seconds", "tokens_per_second", "speedup"])
    prefill = ["package", "compiled", "eager", "dense"]
    decode = ["decode_package", "decode_eager", "decode_stock"]
    assert [row["variant"] for row in report["rows"]] == prefill + decode


def test_int8_needs_torchao(monkeypatch: pytest.MonkeyPatch) -> None:
    import bench_package
    from typer.testing import CliRunner

    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == "torchao" else found(name, *a)
    )
    done = CliRunner().invoke(bench_package.app, ["--quick", "--int8"], env={"COLUMNS": "200"})
    assert done.exit_code == 2
    assert "--int8 needs torchao: pip install torchao" in done.stderr


def test_a_call_of_the_decoding_variants_leaves_its_cache_as_it_was(model_folder: str) -> None:
    from common.variants import decode_variants

    from h2o_prefill.config import PrefillConfig
    from h2o_prefill.eval import load_model

    model, _ = load_model(model_folder)
    ids = torch.randint(257, (1, 150), generator=torch.Generator().manual_seed(0))
    config = PrefillConfig(chunk_size=64, local_window=8, heavy_budget=8)
    variants = decode_variants(model, ids, config, steps=6)
    expected = model.generate(ids, max_new_tokens=7, do_sample=False)[0, 151:]
    assert torch.equal(variants["stock"](), expected)
    for decode in variants.values():
        assert torch.equal(decode(), decode())


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_column_sum_benchmark_runs_what_the_operators_run(dtype: torch.dtype) -> None:
    from common.colsum import attend_chunk
    from common.shapes import SHAPES, random_memory

    from h2o_prefill import ops

    # Each library chooses its bfloat16 products by a timing of its own, and they round differently.
    atol = 4e-3 if dtype == torch.bfloat16 else 1e-3
    heads = SHAPES["smollm2"]
    q, k, v = heads.qkv(70, dtype)
    found = attend_chunk(q, k, v, colsum=True)
    for ours, theirs in zip(found, ops.intra_chunk_attention(q, k, v, 70), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=atol)
    q, k, v = heads.qkv(70, dtype, past=100)
    indices = random_memory(heads.kv_heads, 32, 100)
    found = attend_chunk(q, k, v, True, indices)
    for ours, theirs in zip(found, ops.memory_attention(q, k, v, indices), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=atol)
    out, lse, sums = attend_chunk(q, k, v, False, indices)
    assert torch.equal(out, found[0]) and torch.equal(lse, found[1]) and sums is None


def test_linear(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    from common import linear_forms

    def missing(*qkv: torch.Tensor) -> None:
        raise linear_forms.PackageMissing("flash-linear-attention is left out")

    monkeypatch.setattr("bench_linear.flash_linear_attention", missing)
    done, report = run("linear", "--dtype", "float32", "--shape", "smollm2")
    assert done.stderr.count("flash-linear-attention is left out") == 1
    sweep = [row for row in report["rows"] if "swept" in row]
    beside = [row for row in report["rows"] if "swept" not in row]
    assert [(row["length"], row["chunk_size"]) for row in beside] == [(1, 64), (192, 64)]
    assert [(row["length"], row["chunk_size"]) for row in sweep] == [(192, n) for n in (16, 32, 64)]
    _check_report(report, LINEAR)
    forms = ("sdpa", "square", "cumsum")
    times = [f"{name}_milliseconds" for name in ("sdpa_both", *forms)]
    ratios = ["speedup", "both_speedup", "square_speedup", "cumsum_speedup"]
    _check_report({**report, "rows": beside}, times + ratios)
    for row in beside:
        # All outer products and their sums, beside the output.
        assert row["cumsum_megabytes"] * 1e6 >= 2 * 4 * 3 * row["length"] * row["head_dim"] ** 2


def test_other_forms_of_linear_attention_give_the_same() -> None:
    from common.linear_forms import (
        PackageMissing,
        cumulative_sums,
        flash_linear_attention,
        masked_square,
    )
    from common.shapes import SHAPES

    from h2o_prefill import ops

    q, k, v = SHAPES["smollm2"].qkv(128, torch.float32)
    expected, _, _ = ops.chunkwise_linear_attention(q, k, v)
    found = [masked_square(q, k, v), cumulative_sums(q, k, v)]
    with contextlib.suppress(PackageMissing):
        found.append(flash_linear_attention(q, k, v)())
    for out in found:
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-3)


def test_temporary_memory_is_what_a_call_holds_beside_its_results() -> None:
    from common.memory import temporary_megabytes

    def call() -> tuple[torch.Tensor, torch.Tensor]:
        held = torch.empty(1000, dtype=torch.float32)
        return held + 1, held[:10].clone()

    assert temporary_megabytes(call, on_gpu=False) * 1e6 == pytest.approx(4000, abs=200)


def test_decoding_token_by_token_gives_the_same() -> None:
    from bench_linear_decode import decode
    from common.shapes import Heads

    from h2o_prefill import ops

    q, k, v = Heads("tiny", 1, 4, 2, 16).qkv(5, torch.float32)
    state = torch.randn(1, 2, 16, 16)
    expected = ops.chunkwise_linear_attention(q, k, v, None, state)[:2]
    torch.testing.assert_close(decode(q, k, v, state), tuple(expected))


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 40, 70])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_context_and_dense_attention_do_the_same(dtype: torch.dtype, rows: int) -> None:
    from common.context import dense_call
    from common.shapes import SHAPES

    with dense_call(*SHAPES["smollm2"].qkv(rows, dtype, past=70 - rows)) as pair:
        pair.ours()
        pair.baseline()
        assert pair.same()


@pytest.mark.slow
def test_both_score_updates_do_the_same() -> None:
    from common.context import score_update

    with score_update(3, 100, 40) as pair:
        for _ in range(3):
            pair.ours()
        assert not pair.same()
        for _ in range(3):
            pair.baseline()
        assert pair.same()


def test_selection_with_pytorch_chooses_the_same() -> None:
    from bench_select import select_with_pytorch
    from common.shapes import random_memory

    from h2o_prefill import ops

    memory = random_memory(3, 64, 300)
    scores = torch.rand(1, 3, 400, generator=torch.Generator().manual_seed(1))
    where = (scores, memory, 300, 400, 24, 40)
    assert torch.equal(select_with_pytorch(*where), ops.select_memory(*where, 0))


def test_allocations(run: Run) -> None:
    _, report = run("allocations", "--shape", "smollm2", "--dtype", "bfloat16")
    sizes = [row for row in report["rows"] if "length" in row]
    for row in sizes:
        # A bf16 key and value a head, beside an fp32 score a position and 16 positions.
        assert row["kv_megabytes"] * 1e6 == 2 * 3 * row["length"] * 64 * 2
        assert row["state_megabytes"] * 1e6 == pytest.approx(3 * 4 * (row["length"] + 16))
        assert row["workspace_megabytes"] > 0
    (many,) = [row for row in report["rows"] if "prompts" in row]
    assert many["prompts"] == len(many["resident_bytes"]) == 10


def test_peak_bytes_counts_what_is_held_at_a_time() -> None:
    from h2o_prefill.eval.speed.peak_memory import peak_bytes

    def call() -> torch.Tensor:
        first = torch.empty(1000, dtype=torch.float32)
        second = torch.empty(500, dtype=torch.float32)
        del first
        return second + 1

    assert peak_bytes(call) == pytest.approx(6000, abs=200)


def test_wrong_options_are_refused_before_any_work(tmp_path: Path) -> None:
    import bench_prefill
    from typer.testing import CliRunner

    for words, message in (
        (["--dtype", "int8"], "--dtype must be of"),
        (["--shape", "gpt"], "--shape must be of"),
        (["--threads", "0"], "--threads must be numbers"),
        (["--lengths", "many"], "--lengths must be numbers"),
        (["--json", str(tmp_path / "no" / "r.json")], "--json must be a file in a folder"),
    ):
        done = CliRunner().invoke(bench_prefill.app, ["--quick", *words], env={"COLUMNS": "200"})
        assert done.exit_code == 2
        assert message in done.stderr


def test_an_expected_error_is_one_line(tmp_path: Path) -> None:
    from common import options
    from typer.testing import CliRunner

    @options.benchmark("some", preset="h2o")
    def main(plan: Any) -> None:
        plan.config()

    words = ["--json", str(tmp_path / "r.json"), "--preset", "other"]
    done = CliRunner().invoke(options.command(main), words)
    assert done.exit_code == 1
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1


def test_a_benchmark_has_shared_options_and_its_own(tmp_path: Path) -> None:
    from common import options
    from common.plan import Lengths
    from typer.testing import CliRunner

    given: list[tuple[Any, str, int]] = []

    @options.benchmark("some", "device", dtype="float16", lengths=Lengths((7, 8), (3,)))
    def main(plan: Any, device: str = "cpu", wanted: int = 1) -> None:
        given.append((plan, device, wanted))

    runner, app = CliRunner(), options.command(main)
    for words in (["--quick"], ["--lengths", "5,6", "--dtype", "float32", "--wanted", "2"]):
        words += ["--json", str(tmp_path / "r.json")]
        done = runner.invoke(app, words, catch_exceptions=False)
        assert done.exit_code == 0, done.output
    (quick, *own), (full, *_) = given
    assert (quick.lengths, quick.dtypes, own) == ((3,), (torch.float16,), ["cpu", 1])
    assert (full.lengths, full.dtypes, given[1][2]) == ((5, 6), (torch.float32,), 2)
    assert runner.invoke(app, ["--shape", "smollm2"]).exit_code == 2


def test_plots(run: Run, model_folder: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    import plot
    from typer.testing import CliRunner

    done = CliRunner().invoke(plot.app, ["--results", str(tmp_path)])
    assert done.exit_code == 2
    run("prefill", "--shape", "smollm2")
    run("model", "--model", model_folder)
    run("allocations", "--shape", "smollm2")
    run("linear", "--dtype", "float32", "--shape", "smollm2")
    done = CliRunner().invoke(plot.app, ["--results", str(tmp_path)], catch_exceptions=False)
    assert done.exit_code == 0
    for name in ("throughput_comparison.png", "memory_profile.png", "linear.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
