"""Losses beside times of several programs: their processes, windows, baselines, the programs."""

import pytest
import torch

from h2o_prefill.eval import evaluate_perplexity
from h2o_prefill.generation import load_model
from h2o_prefill.generation.text import WIKITEXT2_VARIABLE

DENSE, SPARSE = "transformers bfloat16", "h2o_prefill h2o"


@pytest.fixture
def run_alone(run, model_folder, tmp_path, monkeypatch):
    """Run the benchmark without peers, with a random model: its modes, its rows."""
    monkeypatch.delenv(WIKITEXT2_VARIABLE, raising=False)
    where = ("--model", model_folder, "--folder", tmp_path, "--preset", "h2o")

    def run_peers(*words):
        rows = run("peers", *where, "--peers", "", *words)[1]["results"]
        return {row["variant"]: row for row in rows if "variant" in row}, rows

    return run_peers


@pytest.mark.slow
def test_losses_equal_evaluate_perplexity_and_all_is_timed(run_alone, model_folder, config):
    modes, rows = run_alone("--no-package", "--windows", "1:3")
    assert list(modes) == [DENSE, SPARSE]
    model, tokenizer = load_model(model_folder, torch.bfloat16)
    expected = evaluate_perplexity(
        model, "pydoc", config, tokenizer=tokenizer, context=200, windows="1:3"
    )
    dense, row = modes[DENSE], modes[SPARSE]
    assert dense["perplexity"] == pytest.approx(expected.dense.ppl, rel=1e-5)
    assert dense["delta_percent"] == dense["kl_estimate"] == 0
    assert row["perplexity"] == pytest.approx(expected.sparse.ppl, rel=1e-5)
    assert row["delta_percent"] == pytest.approx(expected.delta_percent, rel=1e-3, abs=1e-4)
    assert row["stderr_percent"] == pytest.approx(expected.stderr_percent, rel=1e-3, abs=1e-4)
    assert row["scored_tokens"] == expected.scored_tokens == 2 * 199
    for each in modes.values():
        assert min(each[name] for name in ("seconds", "cold_seconds", "dense_speedup")) > 0
        assert each["windows"] == [1, 2] and each["bits"] == 16 and each["peak_megabytes"] > 100
    (pair,) = [row for row in rows if "baseline" in row]
    assert pair["ours"] == SPARSE and pair["baseline"] == DENSE
    assert pair["our_speedup"] == pytest.approx(row["dense_speedup"])
    decoding = {row["decoding"]: row["milliseconds"] for row in rows if "decoding" in row}
    assert list(decoding) == [DENSE, SPARSE] and min(decoding.values()) > 0


def test_baselines_lose_no_more_than_we_do_and_have_as_many_bits():
    from common.compare import Timings
    from common.losses import fastest_baselines
    from common.modes import OURS, Mode

    # Program, loss, seconds.
    made = {
        "ours exact": (OURS, -0.1, 4.0),
        "ours fast": (OURS, 3.0, 2.0),
        "them dense": ("them", 0.0, 12.0),
        "them good": ("them", 1.0, 8.0),
        "them bad": ("them", 400.0, 1.0),
        "them 8 bit": ("them", 0.0, 1.0),
        "slow": ("slow", 0.0, 30.0),
        "coarse 4 bit": ("coarse", 0.0, 1.0),
    }
    bits = {name: int(name.split()[1]) if "bit" in name else 16 for name in made}
    modes = {
        name: Mode(program, bits[name], name, "module:class", {})
        for name, (program, _, _) in made.items()
    }
    rows = [
        {"variant": name, "delta_percent": loss, "seconds": seconds}
        for name, (_, loss, seconds) in made.items()
    ]
    timings = Timings({name: [seconds] * 2 for name, (_, _, seconds) in made.items()})
    found = list(fastest_baselines(modes, rows, timings))
    assert [(row["ours"], row["baseline"], row["our_speedup"]) for row in found] == [
        ("ours exact", "them dense", 3.0),
        ("ours exact", "slow", 7.5),
        ("ours fast", "them good", 4.0),
        ("ours fast", "slow", 15.0),
    ]
    assert found[2]["our_delta_percent"] == 3 and found[2]["baseline_delta_percent"] == 1
