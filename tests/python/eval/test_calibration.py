"""Calibration of layers, against perplexity measured with each of them dense."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import h2o_prefill
from h2o_prefill.config import PrefillConfig
from h2o_prefill.eval import calibrate_layers, count_attention_flops, evaluate_perplexity

CONTEXT = 64
LAYERS = 4


CONFIG = PrefillConfig(chunk_size=16, local_window=4, heavy_budget=4)
TOKENS = torch.randint(1, 257, (2 * CONTEXT,), generator=torch.Generator().manual_seed(3))


@pytest.fixture
def model(tiny: Any) -> Any:
    return tiny.make_model(num_hidden_layers=LAYERS)


def _kl(model: Any, config: PrefillConfig, windows: str) -> float:
    return evaluate_perplexity(model, TOKENS, config, context=CONTEXT, windows=windows).kl_mean


@pytest.mark.parametrize("keep", ["wide", "dense"])
def test_every_layer_is_measured_as_by_perplexity(model: Any, keep: str) -> None:
    done: list[tuple[int, int, str]] = []
    options: dict[str, Any] = {"layers": 2, "keep": keep, "context": CONTEXT, "windows": "0:2"}
    options["on_progress"] = lambda *report: done.append(report)
    result = calibrate_layers(model, TOKENS, CONFIG, **options)
    assert result.kl_before == pytest.approx(_kl(model, CONFIG, "0:2"), rel=1e-4)
    assert list(result.kl_by_layer) == list(range(LAYERS))
    for layer, kl in result.kl_by_layer.items():
        config = CONFIG.replace(dense_layers=(layer,))
        assert kl == pytest.approx(_kl(model, config, "0:2"), rel=1e-4)
    chosen = tuple(sorted(result.ranking[:2]))
    assert result.config == CONFIG.replace(**{f"{keep}_layers": chosen})
    assert result.kl_after == pytest.approx(_kl(model, result.config, "0:2"), rel=1e-4)
    assert (result.context, result.windows) == (CONTEXT, [0, 1])

    passes = 2 * (LAYERS + 3)
    assert [report[0] for report in done] == list(range(passes + 1))
    assert {report[1] for report in done} == {passes}
    assert done[0][2] == "window 0 dense" and done[-1][2] == "done"


def test_the_layer_that_needs_it_is_chosen(model: Any) -> None:
    # The output of the other layers' attention is dropped.
    for index in (0, 1, 3):
        torch.nn.init.zeros_(model.model.layers[index].self_attn.o_proj.weight)
    result = calibrate_layers(model, TOKENS, CONFIG, layers=1, keep="dense", context=CONTEXT)
    assert result.config == CONFIG.replace(dense_layers=(2,))
    assert result.ranking[0] == 2
    assert result.kl_before > 0.01 and result.kl_after == pytest.approx(0, abs=1e-6)
    batches = TOKENS[:CONTEXT].view(1, CONTEXT)
    assert result.flops_before == count_attention_flops(batches, CONFIG, LAYERS)
    assert result.flops_after == count_attention_flops(batches, result.config, LAYERS)
    with torch.no_grad():
        dense = model(batches).logits
        with h2o_prefill.enable(model, result.config):
            torch.testing.assert_close(model(batches).logits, dense, atol=1e-4, rtol=1e-4)


def test_layers_of_the_settings_stay_what_they_are(model: Any) -> None:
    config = CONFIG.replace(dense_layers=(2,), wide_layers=(1,), wide_factor=2)
    wide = calibrate_layers(model, TOKENS, config, layers=1, context=CONTEXT)
    assert list(wide.kl_by_layer) == [0, 3]
    assert wide.config == config.replace(wide_layers=tuple(sorted((1, wide.ranking[0]))))
    dense = calibrate_layers(model, TOKENS, config, layers=2, keep="dense", context=CONTEXT)
    assert list(dense.kl_by_layer) == [0, 1, 3]
    assert dense.config == config.replace(dense_layers=tuple(sorted((2, *dense.ranking[:2]))))
