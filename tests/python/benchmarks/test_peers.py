"""Losses beside times of several programs: windows, baselines, figure, the programs themselves."""

from __future__ import annotations

import functools
import importlib.util
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from h2o_prefill.config import PrefillConfig
from h2o_prefill.eval import evaluate_perplexity, load_model, load_text
from h2o_prefill.eval.inputs.text import WIKITEXT2_VARIABLE, encode
from h2o_prefill.eval.perplexity.estimates import perplexity
from h2o_prefill.eval.timing.compare import Timings, compare

Run = Callable[..., tuple[dict[str, Any], list[dict[str, Any]]]]

PEERS = {"openvino_genai": "openvino-genai", "llama_cpp": "llama-cpp-python"}
DENSE, SPARSE = "transformers bfloat16", "h2o_prefill h2o"
# Packages take a compiler a while.
UNPACKED = ("--preset", "h2o", "--no-package")


@pytest.fixture
def run_alone(
    run: Callable[..., Any], model_folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Run:
    """Run the benchmark where no peer is installed, with a random model: its backends, its rows."""
    import peers

    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name in PEERS else found(name, *a)
    )
    # The folder stands for the GGUF file, which only the peers read themselves.
    monkeypatch.setattr(peers, "load_model", lambda _, kind: load_model(model_folder, kind))
    monkeypatch.delenv(WIKITEXT2_VARIABLE, raising=False)

    def run_peers(*words: object) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        done, report = run("peers", "--gguf", tmp_path / "model.gguf", *words)
        for package in PEERS.values():
            assert f" is left out: pip install {package}\n" in done.stderr
        rows = report["results"]
        return {row["variant"]: row for row in rows if "variant" in row}, rows

    return run_peers


def test_peers_that_are_missing_are_left_out(run_alone: Run) -> None:
    backends, rows = run_alone(*UNPACKED, "--windows", "0:2")
    assert list(backends) == [DENSE, SPARSE]
    for row in backends.values():
        assert row["seconds"] > 0 and row["dense_speedup"] > 0 and row["windows"] == [0, 1]
    (pair,) = [row for row in rows if "baseline" in row]
    assert pair["ours"] == SPARSE and pair["baseline"] == DENSE
    assert pair["our_speedup"] == pytest.approx(backends[SPARSE]["dense_speedup"])
    decoding = {row["decoding"]: row["milliseconds"] for row in rows if "decoding" in row}
    assert list(decoding) == [DENSE, SPARSE] and min(decoding.values()) > 0


def test_losses_are_those_of_evaluate_perplexity(
    run_alone: Run, model_folder: str, config: PrefillConfig
) -> None:
    backends, rows = run_alone(*UNPACKED, "--windows", "1:4", "--no-time")
    assert len(rows) == len(backends) == 2 and "seconds" not in backends[DENSE]
    model, tokenizer = load_model(model_folder, torch.bfloat16)
    expected = evaluate_perplexity(
        model, "pydoc", config, tokenizer=tokenizer, context=200, windows="1:4"
    )
    assert backends[DENSE]["perplexity"] == pytest.approx(expected.dense.ppl, rel=1e-5)
    assert backends[DENSE]["delta_percent"] == 0
    row = backends[SPARSE]
    assert row["perplexity"] == pytest.approx(expected.sparse.ppl, rel=1e-5)
    assert row["delta_percent"] == pytest.approx(expected.delta_percent, rel=1e-3, abs=1e-4)
    assert row["stderr_percent"] == pytest.approx(expected.stderr_percent, rel=1e-3, abs=1e-4)
    assert row["scored_tokens"] == expected.scored_tokens == 3 * 199


@pytest.mark.slow
def test_a_package_loses_what_the_enabled_model_does(run_alone: Run) -> None:
    backends, rows = run_alone("--preset", "h2o", "--windows", "0:2", "--dtype", "float32")
    eager, packaged = backends[SPARSE], backends[f"{SPARSE}, package"]
    assert packaged["perplexity"] == pytest.approx(eager["perplexity"], rel=1e-5)
    assert packaged["scored_tokens"] == eager["scored_tokens"] and packaged["seconds"] > 0
    decoding = [row["decoding"] for row in rows if "decoding" in row]
    assert decoding == ["transformers float32", SPARSE, f"{SPARSE}, package"]


def test_losses_of_an_earlier_run_are_taken_over(run_alone: Run, tmp_path: Path) -> None:
    run_alone(*UNPACKED, "--windows", "0:2", "--no-time")
    report = json.loads((tmp_path / "peers.json").read_text())
    earlier = tmp_path / "earlier.json"
    options = ("--losses", earlier, "--no-time", *UNPACKED, "--windows")
    for changed, windows, taken_over in (
        ({"perplexity": 123.0}, "0:2", True),
        ({}, "0:3", False),
        ({"version": "0.0"}, "0:2", False),
    ):
        report["results"][1] |= changed
        earlier.write_text(json.dumps(report), encoding="utf-8")
        assert (run_alone(*options, windows)[0][SPARSE]["perplexity"] == 123) is taken_over


# Files of before the names changed have the old ones.
@pytest.mark.parametrize(("config", "results"), [("config", "results"), ("options", "rows")])
def test_losses_of_another_text_or_model_are_refused(
    tmp_path: Path, config: str, results: str
) -> None:
    from common.losses import read_losses

    facts = {"model": "a.gguf", "text": "pydoc", "dtype": "bfloat16", "protocol": "gptq"}
    row = {"length": 9, "variant": "a", "delta_percent": 1.0, "version": "1", "seconds": 2.0}
    file = tmp_path / "earlier.json"
    file.write_text(json.dumps({config: {**facts, "presets": ["h2o"]}, results: [row]}))
    assert read_losses([file], facts) == {(9, "a"): {"delta_percent": 1.0, "version": "1"}}
    for name in facts:
        with pytest.raises(ValueError, match=f"got {name} '{facts[name]}' in place of 'other'"):
            read_losses([file], {**facts, name: "other"})


def test_a_loss_is_that_against_the_own_dense_mode() -> None:
    from common.backends import Backend
    from common.losses import measure_losses

    seen: list[tuple[str, list[int], range]] = []

    def backend(name: str, nll: float | None) -> Backend:
        def score(prompts: Tensor, rows: range) -> Tensor:
            seen.append((name, prompts.tolist(), rows))
            return torch.full((len(prompts), len(rows)), nll)

        return Backend("p", "1", name[0], lambda prompt: None, None if nll is None else score)

    nlls = {"a": 2.0, "a sparse": 2.1, "b": 3.0, "b sparse": 3.2, "silent": None}
    backends = {name: backend(name, nll) for name, nll in nlls.items()}
    backends["s"] = backends["silent"]
    measure = functools.partial(measure_losses, tokens=torch.arange(50), length=10)
    found = dict(measure(backends, windows="1:3", known={}))
    for name, log_ratio in (("a", 0.0), ("a sparse", 0.1), ("b sparse", 0.2), ("silent", 0.0)):
        percent = 100 * (math.exp(log_ratio) - 1)
        assert found[name]["delta_percent"] == pytest.approx(percent, rel=1e-5)
    assert found["b sparse"]["perplexity"] == pytest.approx(math.exp(3.2))
    assert "perplexity" not in found["silent"]
    # Each once, all over the same tokens.
    windows = [list(range(10, 20)), list(range(20, 30))]
    assert seen == [(name, windows, range(9)) for name in list(backends)[:4]]
    with pytest.raises(ArithmeticError, match="a gave probabilities that are not finite"):
        dict(measure({"a": backend("a", math.inf)}, windows="0:1", known={}))


def test_baselines_lose_no_more_than_we_do() -> None:
    from common.backends import OURS, Backend
    from common.losses import fastest_baselines

    # Program, loss, seconds.
    modes = {
        "ours exact": (OURS, -0.1, 4.0),
        "ours fast": (OURS, 3.0, 2.0),
        "them dense": ("them", 0.0, 12.0),
        "them good": ("them", 1.0, 8.0),
        "them bad": ("them", 400.0, 1.0),
        "slow": ("slow", 0.0, 30.0),
    }
    backends = {n: Backend(program, "1", n, lambda _: None) for n, (program, _, _) in modes.items()}
    rows = [
        {"variant": name, "delta_percent": loss, "seconds": seconds}
        for name, (_, loss, seconds) in modes.items()
    ]
    timings = Timings({name: [seconds] * 2 for name, (_, _, seconds) in modes.items()})
    found = list(fastest_baselines(backends, rows, timings))
    assert [(row["ours"], row["baseline"], row["our_speedup"]) for row in found] == [
        ("ours exact", "them dense", 3.0),
        ("ours exact", "slow", 7.5),
        ("ours fast", "them good", 4.0),
        ("ours fast", "slow", 15.0),
    ]
    assert found[2]["our_delta_percent"] == 3 and found[2]["baseline_delta_percent"] == 1


@pytest.mark.slow
@pytest.mark.parametrize("module", PEERS)
def test_a_peer_scores_and_decodes_the_same_model(module: str) -> None:
    pytest.importorskip(module)
    from common import peers
    from common.backends import transformers_backends

    from h2o_prefill.eval.inputs.models import packaged_gguf

    model, tokenizer = load_model("smollm2-135m", torch.float32)
    prompt = encode(tokenizer, load_text("pydoc").text)[:600]
    ours = dict(transformers_backends(model, "float32", {}, 600))["transformers float32"]
    dense = ours.nll(prompt[None], range(599))[0]
    made = {"openvino_genai": (peers.openvino_genai, [600]), "llama_cpp": (peers.llama_cpp, 620)}
    backends = made[module][0](packaged_gguf(), 1, made[module][1])
    scored = {name: each for name, each in backends.items() if each.nll}
    scores = {name: each.nll(prompt[None], range(599))[0] for name, each in scored.items()}
    for name, nll in scores.items():
        assert nll.shape == dense.shape
        assert torch.equal(scored[name].nll(prompt[None], range(100, 200))[0], nll[100:200])
        # Programs round weights differently. A shift by one token would show.
        assert perplexity(scores[scored[name].dense]) == pytest.approx(perplexity(dense), rel=0.3)
        assert torch.corrcoef(torch.stack([nll, dense]))[0, 1] > 0.9
    if module == "openvino_genai":
        paged, tri_shape, xattention, _ = scores.values()
        # Tri-shape drops nothing of a prompt so short.
        assert torch.equal(tri_shape, paged) and not torch.equal(xattention, paged)
    for each in backends.values():
        each.prefill(prompt)
    decoder = next(each.decoder for each in backends.values() if each.decoder)
    calls = {"few": decoder(prompt, 2), "many": decoder(prompt, 16)}
    assert compare(calls, 5.0).ratio("many", "few").value > 3
