"""Rules of selection beside this library: exact where they keep everything, and causal or not."""

import pytest
import torch

from h2o_prefill.config import PrefillConfig
from h2o_prefill.eval import count_attention_flops
from h2o_prefill.eval.attention_flops import dense_dot_products

LENGTH = 512
IDS = torch.randint(1, 257, (1, LENGTH), generator=torch.Generator().manual_seed(7))
SETTINGS = "h2o,local_window=8,heavy_budget=8"
WIDENED = f"{SETTINGS},error_rows=4,error_threshold=0.0001,max_widen=4"
CAUSAL = ("snapkv=16", "quoka=16", SETTINGS, WIDENED)
SEES_THE_FUTURE = ("snapkv-own=72", "quoka-own=16", "xattention=0.5")


@pytest.fixture
def run_variant(model):
    from common.benchmark import make_plan
    from selections import run_of

    plan = make_plan("selections", quick=True)
    return lambda text: run_of(text, plan, model, None)


@torch.no_grad()
def _logits(run):
    logits, products = run(IDS)
    return logits.slice(0, LENGTH), products


@pytest.mark.parametrize("variant", [*CAUSAL, *SEES_THE_FUTURE])
def test_what_a_rule_sees_of_the_future(run_variant, variant):
    from selections import leak

    run = run_variant(variant)
    assert (_logits(run)[0] - _logits(run_variant("dense"))[0]).abs().max() > 0.01
    with torch.no_grad():
        change = leak(run, IDS, 64)
    assert change == 0 if variant in CAUSAL else change > 0.001


@torch.no_grad()
def test_products_of_settings_are_those_that_are_counted_elsewhere(run_variant):
    config = PrefillConfig.parse(f"{SETTINGS},chunk_size=64,recall=2,dense_tail=8")
    products = run_variant(config.to_string())(IDS)[1]
    dense = dense_dot_products(LENGTH) / LENGTH
    assert products == pytest.approx(dense / count_attention_flops(IDS, config).ratio)
    # Widened sets and the rows that measure errors are counted.
    assert run_variant(SETTINGS)(IDS)[1] < run_variant(WIDENED)(IDS)[1]
