"""Loss beside time of several programs: windows, rivals, figure; the programs where installed."""

from __future__ import annotations

import importlib.util
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

Run = Callable[..., tuple[Any, dict[str, Any]]]

PEERS = {"openvino_genai": "openvino-genai", "llama_cpp": "llama-cpp-python"}
DENSE = "transformers bfloat16"


@pytest.fixture
def run_alone(
    run: Run, model_folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[Any, dict[str, Any]]]:
    """Run the benchmark where no peer is installed, with a random model."""
    import bench_peers

    from h2o_prefill.eval import load_model
    from h2o_prefill.eval.inputs.text import WIKITEXT2_VARIABLE

    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name in PEERS else found(name, *a)
    )
    # The folder stands for the GGUF file, which only the peers read themselves.
    monkeypatch.setattr(bench_peers, "load_model", lambda _, kind: load_model(model_folder, kind))
    monkeypatch.delenv(WIKITEXT2_VARIABLE, raising=False)
    return lambda *words: run("peers", "--gguf", tmp_path / "model.gguf", *words)


# Packages take a compiler a while.
UNPACKED = ("--preset", "h2o", "--no-package")


def _ways(report: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {row["variant"]: row for row in report["rows"] if "variant" in row}


def test_peers_that_are_missing_are_left_out(run_alone: Run) -> None:
    done, report = run_alone(*UNPACKED, "--windows", "0:2")
    ways = _ways(report)
    assert list(ways) == [DENSE, "h2o_prefill h2o"]
    for row in ways.values():
        assert row["seconds"] > 0 and row["dense_speedup"] > 0 and row["windows"] == [0, 1]
    (rival,) = [row for row in report["rows"] if "rival" in row]
    assert rival["ours"] == "h2o_prefill h2o" and rival["rival"] == DENSE
    assert rival["our_speedup"] == pytest.approx(ways["h2o_prefill h2o"]["dense_speedup"])
    decoding = [row for row in report["rows"] if "decoding" in row]
    assert [row["decoding"] for row in decoding] == [DENSE, "h2o_prefill h2o"]
    assert all(row["milliseconds"] > 0 for row in decoding)
    for package in PEERS.values():
        message = f"{package} is not installed, so it is left out: pip install {package}"
        assert message in done.stderr


def test_losses_are_those_of_evaluate_perplexity(run_alone: Run, model_folder: str) -> None:
    from h2o_prefill.config import PrefillConfig
    from h2o_prefill.eval import evaluate_perplexity, load_model

    _, report = run_alone(*UNPACKED, "--windows", "1:4", "--no-time")
    ways = _ways(report)
    assert len(report["rows"]) == len(ways) == 2 and "seconds" not in ways[DENSE]
    model, tokenizer = load_model(model_folder, torch.bfloat16)
    config = PrefillConfig(chunk_size=64, local_window=8, heavy_budget=8)
    expected = evaluate_perplexity(
        model, "pydoc", config, tokenizer=tokenizer, context=200, windows="1:4"
    )
    assert ways[DENSE]["perplexity"] == pytest.approx(expected.dense.ppl, rel=1e-5)
    assert ways[DENSE]["delta_percent"] == 0
    row = ways["h2o_prefill h2o"]
    assert row["perplexity"] == pytest.approx(expected.sparse.ppl, rel=1e-5)
    assert row["delta_percent"] == pytest.approx(expected.delta_percent, rel=1e-3, abs=1e-4)
    assert row["stderr_percent"] == pytest.approx(expected.stderr_percent, rel=1e-3, abs=1e-4)
    assert row["scored_tokens"] == expected.scored_tokens == 3 * 199


@pytest.mark.slow
def test_a_package_loses_what_the_enabled_model_does(run_alone: Run) -> None:
    _, report = run_alone("--preset", "h2o", "--windows", "0:2", "--dtype", "float32")
    ways = _ways(report)
    eager, packaged = ways["h2o_prefill h2o"], ways["h2o_prefill h2o, package"]
    assert packaged["perplexity"] == pytest.approx(eager["perplexity"], rel=1e-5)
    assert packaged["scored_tokens"] == eager["scored_tokens"] and packaged["seconds"] > 0
    decoding = [row["decoding"] for row in report["rows"] if "decoding" in row]
    assert decoding == ["transformers float32", "h2o_prefill h2o", "h2o_prefill h2o, package"]


def test_losses_of_an_earlier_run_are_taken_over(run_alone: Run, tmp_path: Path) -> None:
    _, report = run_alone(*UNPACKED, "--windows", "0:2", "--no-time")
    report["rows"][1]["perplexity"] = 123.0
    earlier = tmp_path / "earlier.json"
    earlier.write_text(json.dumps(report), encoding="utf-8")
    options = ("--losses", earlier, "--no-time", *UNPACKED, "--windows")
    assert _ways(run_alone(*options, "0:2")[1])["h2o_prefill h2o"]["perplexity"] == 123
    assert _ways(run_alone(*options, "0:3")[1])["h2o_prefill h2o"]["perplexity"] != 123
    report["rows"][1]["version"] = "0.0"
    earlier.write_text(json.dumps(report), encoding="utf-8")
    assert _ways(run_alone(*options, "0:2")[1])["h2o_prefill h2o"]["perplexity"] != 123


def test_losses_of_another_text_or_model_are_refused(tmp_path: Path) -> None:
    from common.losses import read_losses

    facts = {"model": "a.gguf", "text": "pydoc", "dtype": "bfloat16", "protocol": "gptq"}
    file = tmp_path / "earlier.json"
    file.write_text(json.dumps({"options": {**facts, "presets": ["h2o"]}, "rows": []}))
    assert read_losses([file], facts) == {}
    for name in facts:
        with pytest.raises(ValueError, match=f"got {name} '{facts[name]}' in place of 'other'"):
            read_losses([file], {**facts, name: "other"})


def test_windows_are_one_slice_or_one_for_each_length() -> None:
    import bench_peers
    from typer import BadParameter

    assert bench_peers._by_length("0:2", [5, 7]) == {5: "0:2", 7: "0:2"}
    assert bench_peers._by_length("0:2,1:3", [5, 7]) == {5: "0:2", 7: "1:3"}
    with pytest.raises(BadParameter, match="--windows must be one slice or 2"):
        bench_peers._by_length("0:1,0:2,0:3", [5, 7])


def test_a_loss_is_that_against_the_own_dense_mode() -> None:
    from common.losses import Losses
    from common.ways import Way

    tokens = torch.arange(50)
    seen: list[tuple[str, list[int], range]] = []

    def way(name: str, dense: str, nll: float | None) -> Way:
        def score(prompts: Tensor, rows: range) -> Tensor:
            seen.append((name, prompts.tolist(), rows))
            return torch.full((len(prompts), len(rows)), nll)

        return Way("p", "1", dense, lambda prompt: None, None if nll is None else score)

    ways = {
        "a": way("a", "a", 2.0),
        "a sparse": way("a sparse", "a", 2.1),
        "b": way("b", "b", 3.0),
        "b sparse": way("b sparse", "b", 3.2),
        "silent": way("silent", "silent", None),
    }
    losses = Losses(tokens, {10: "1:3"}, {})
    found = dict(losses.measure(ways, 10))
    assert found["a sparse"]["delta_percent"] == pytest.approx(100 * (math.exp(0.1) - 1), rel=1e-5)
    assert found["b sparse"]["delta_percent"] == pytest.approx(100 * (math.exp(0.2) - 1), rel=1e-5)
    assert found["b sparse"]["perplexity"] == pytest.approx(math.exp(3.2))
    assert found["b"]["delta_percent"] == found["silent"]["delta_percent"] == 0
    assert "perplexity" not in found["silent"]
    # Each way once, all over the same tokens.
    windows = [list(range(10, 20)), list(range(20, 30))]
    assert seen == [(name, windows, range(9)) for name in list(ways)[:4]]
    broken = {"a": way("a", "a", math.inf)}
    with pytest.raises(ArithmeticError, match="a gave probabilities that are not finite"):
        dict(Losses(tokens, {10: "0:1"}, {}).measure(broken, 10))


def test_rivals_lose_no_more_than_we_do() -> None:
    from common.rivals import fastest_rivals
    from common.timing import Timings
    from common.ways import OURS, Way

    # Program, loss, seconds.
    modes = {
        "ours exact": (OURS, -0.1, 4.0),
        "ours fast": (OURS, 3.0, 2.0),
        "them dense": ("them", 0.0, 12.0),
        "them good": ("them", 1.0, 8.0),
        "them bad": ("them", 400.0, 1.0),
        "slow": ("slow", 0.0, 30.0),
    }
    ways = {n: Way(program, "1", n, lambda _: None) for n, (program, _, _) in modes.items()}
    rows = [
        {"variant": name, "delta_percent": loss, "seconds": seconds}
        for name, (_, loss, seconds) in modes.items()
    ]
    timings = Timings({name: [seconds] * 2 for name, (_, _, seconds) in modes.items()})
    found = list(fastest_rivals(ways, rows, timings))
    assert [(row["ours"], row["rival"], row["our_speedup"]) for row in found] == [
        ("ours exact", "them dense", 3.0),
        ("ours exact", "slow", 7.5),
        ("ours fast", "them good", 4.0),
        ("ours fast", "slow", 15.0),
    ]
    assert found[2]["our_delta_percent"] == 3 and found[2]["rival_delta_percent"] == 1


def _recorded() -> dict[str, Any]:
    environment = {"cpu": "a CPU", "library": {"cpu_isa_used": "avx2"}, "torch": "2"}
    rows: list[dict[str, Any]] = [
        {"program": "ours", "variant": "ours", "delta_percent": 0.3, "seconds": 2.0},
        {"program": "them", "variant": "them, batch 1", "delta_percent": 0.0, "seconds": 3.0},
        {"program": "them", "variant": "them x, batch 1", "delta_percent": 600.0, "seconds": 1.0},
        {"program": "them", "variant": "them x, batch 2", "delta_percent": 9.0, "seconds": 1.5},
    ]
    times = [
        {**row, "length": length, "threads": threads, "seconds": row["seconds"] * length}
        for length in (10, 20)
        for threads in (1, 2)
        for row in rows
    ]
    others = [{"length": 20, "threads": 2, "decoding": "ours", "milliseconds": 1.0}]
    return {"environment": environment, "quick": False, "rows": times + others}


def test_the_figure_shows_the_recorded_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    from common import plot_peers

    figures = []
    save = plot_peers.save_figure

    def keep(figure: Any, *arguments: Any) -> Path:
        figures.append(figure)
        return save(figure, *arguments)

    monkeypatch.setattr(plot_peers, "save_figure", keep)
    result = _recorded()
    files = [plot_peers.plot_peers(result, tmp_path / f"{n}.png") for n in range(2)]
    assert files[0] is not None and files[1] is not None
    assert files[0].read_bytes() == files[1].read_bytes()
    panels = figures[0].axes
    assert [axes.get_title() for axes in panels] == ["10 tokens, 2 threads", "20 tokens, 2 threads"]
    for axes, length in zip(panels, (10, 20), strict=True):
        points = [point for line in axes.lines for point in line.get_xydata().tolist()]
        assert points == [
            [2.0 * length, 0.3],
            [3.0 * length, 0.0],
            [1.0 * length, 600.0],
            [1.5 * length, 9.0],
        ]
        (left, right), (bottom, top) = axes.get_xlim(), axes.get_ylim()
        assert all(left < x < right and bottom < y < top for x, y in points)
    looks = [
        (line.get_color(), line.get_marker(), line.get_fillstyle()) for line in panels[0].lines
    ]
    assert len(set(looks)) == 4
    # One program has one colour, one mode one marker.
    assert len({look[0] for look in looks}) == 2 and looks[2][:2] == looks[3][:2]
    (legend,) = figures[0].legends
    assert len(legend.get_texts()) == 4


def test_there_is_no_figure_without_times(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from common.plot_peers import plot_peers

    result = _recorded()
    for row in result["rows"]:
        row.pop("seconds", None)
    assert plot_peers(result, tmp_path / "none.png") is None
    assert not (tmp_path / "none.png").exists()


@pytest.mark.slow
@pytest.mark.parametrize("module", PEERS)
def test_a_peer_scores_and_decodes_the_same_model(module: str) -> None:
    pytest.importorskip(module)
    from common import peers
    from common.own_ways import own_ways
    from common.timing import compare

    from h2o_prefill.eval import load_model, load_text
    from h2o_prefill.eval.inputs.models import packaged_gguf
    from h2o_prefill.eval.inputs.text import encode
    from h2o_prefill.eval.perplexity.estimates import perplexity

    model, tokenizer = load_model("smollm2-135m", torch.float32)
    prompt = encode(tokenizer, load_text("pydoc").text)[:600]
    rows = range(599)
    expected = own_ways(model, "float32", {}, 600)["transformers float32"].nll
    assert expected is not None
    dense = expected(prompt[None], rows)[0]
    if module == "openvino_genai":
        ways = peers.openvino_genai(packaged_gguf(), 1, [600])
    else:
        ways = peers.llama_cpp(packaged_gguf(), 1, 620)
    scores = {name: way.nll(prompt[None], rows)[0] for name, way in ways.items() if way.nll}
    for name, nll in scores.items():
        assert nll.shape == dense.shape
        way = ways[name].nll
        assert way is not None and torch.equal(way(prompt[None], range(100, 200))[0], nll[100:200])
        # Weights are rounded in other ways. A shift by one token would show.
        assert perplexity(scores[ways[name].dense]) == pytest.approx(perplexity(dense), rel=0.3)
        assert torch.corrcoef(torch.stack([nll, dense]))[0, 1] > 0.9
    if module == "openvino_genai":
        paged, tri_shape, xattention, _ = scores.values()
        # Tri-shape drops nothing of a prompt so short.
        assert torch.equal(tri_shape, paged) and not torch.equal(xattention, paged)
    else:
        assert list(scores) == ["llama.cpp"]
    for way in ways.values():
        way.prefill(prompt)
    decoder = next(way.decoder for way in ways.values() if way.decoder)
    calls = {"few": decoder(prompt, 2), "many": decoder(prompt, 16)}
    assert compare(calls, 5.0).ratio("many", "few").value > 3
