"""Losses beside times of several programs: their processes, windows, baselines, the programs."""

import pytest
import torch

from h2o_prefill.eval import evaluate_perplexity
from h2o_prefill.generation import load_model
from h2o_prefill.generation.text import WIKITEXT2_VARIABLE

DENSE, SPARSE = "transformers bfloat16", "h2o_prefill h2o"


@pytest.mark.slow
def test_losses_equal_evaluate_perplexity_and_all_is_timed(
    run, model_folder, config, tmp_path, monkeypatch
):
    """Without peers, with a random model."""
    monkeypatch.delenv(WIKITEXT2_VARIABLE, raising=False)
    where = ("--model", model_folder, "--folder", tmp_path, "--preset", "h2o")
    words = ("--peers", "", "--no-package", "--windows", "1:3")
    rows = run("peers", *where, *words)[1]["results"]
    modes = {row["variant"]: row for row in rows if "variant" in row}
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


@pytest.mark.slow
def test_random_weights_are_timed_without_losses_or_decoding(run, tmp_path):
    model = ("--model", "qwen2.5-1.5b-layers", "--layers", "1", "--folder", tmp_path)
    words = ("--no-package", "--time", "cold,prefill", "--modes", SPARSE)
    (row,) = run("peers", *model, "--peers", "", "--windows", "", *words)[1]["results"]
    assert row["variant"] == SPARSE and min(row["seconds"], row["cold_seconds"]) > 0
    assert not {"delta_percent", "dense_speedup"} & set(row)


def test_baselines_lose_no_more_than_we_do_and_have_as_many_bits():
    from common.compare import Timings
    from common.losses import fastest_baselines
    from common.modes import OURS, Mode

    # Program, bits, loss, seconds.
    made = {
        "ours exact": (OURS, 16, -0.1, 4.0),
        "ours fast": (OURS, 16, 3.0, 2.0),
        "them dense": ("them", 16, 0.0, 12.0),
        "them good": ("them", 16, 1.0, 8.0),
        "them bad": ("them", 16, 400.0, 1.0),
        "them coarse": ("them", 8, 0.0, 1.0),
        "slow": ("slow", 16, 0.0, 30.0),
        "coarse": ("coarse", 4, 0.0, 1.0),
    }
    modes = {name: Mode(x[0], x[1], name, "module:class", {}) for name, x in made.items()}
    names = ("delta_percent", "seconds")
    rows = [{"variant": n, **dict(zip(names, x[2:], strict=True))} for n, x in made.items()]
    timings = Timings({name: [seconds] * 2 for name, (*_, seconds) in made.items()})
    found = list(fastest_baselines(modes, rows, timings))
    assert [(row["ours"], row["baseline"], row["our_speedup"]) for row in found] == [
        ("ours exact", "them dense", 3.0),
        ("ours exact", "slow", 7.5),
        ("ours fast", "them good", 4.0),
        ("ours fast", "slow", 15.0),
    ]
    assert found[2]["our_delta_percent"] == 3 and found[2]["baseline_delta_percent"] == 1
