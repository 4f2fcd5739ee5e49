"""Calibration of heads, against errors that are computed head by head."""

import pytest
import torch

from h2o_prefill import ops
from h2o_prefill.config import PrefillConfig
from h2o_prefill.eval import calibrate_heads, count_attention_flops, evaluate_perplexity
from h2o_prefill.eval.calibration import FACTORS
from h2o_prefill.eval.observe import observe_attention

CONTEXT = 64
LAYERS = 3
KV_HEADS = 2

CONFIG = PrefillConfig(chunk_size=16, local_window=4, heavy_budget=4)
# Errors would widen the sets of every head.
WIDENING = CONFIG.replace(error_rows=4, error_threshold=0.0, max_widen=8)
TOKENS = torch.randint(1, 257, (2 * CONTEXT,), generator=torch.Generator().manual_seed(3))


@pytest.fixture
def model(tiny):
    return tiny.make_model(num_hidden_layers=LAYERS)


def _sparse(call, config, factor):
    local, heavy = factor * config.local_window, factor * config.heavy_budget
    sizes = PrefillConfig(chunk_size=16, local_window=local, heavy_budget=heavy)
    qkv = call.query, call.key, call.value
    return ops.chunked_sparse_attention(*qkv, *[None] * 5, 0, sizes)[0]


def _expected(model, prompt, factor):
    """Return error and size by layer and KV head, each head's through the layer's projection."""
    found = {}
    hidden = model(prompt, output_hidden_states=True).hidden_states

    def observe(call, dense):
        layer = call.module.layer_idx
        difference = (_sparse(call, CONFIG, factor).transpose(1, 2) - dense).detach()
        group = dense.shape[2] // KV_HEADS
        for head in range(KV_HEADS):
            alone = torch.zeros_like(dense)
            mine = slice(head * group, (head + 1) * group)
            alone[:, :, mine] = difference[:, :, mine]
            if hasattr(call.module, "o_proj"):
                through, size = call.module.o_proj(alone.flatten(2)), hidden[layer]
            else:
                through, size = alone, dense[:, :, mine]
            pair = through.square().sum(), size.square().sum()
            found.setdefault(layer, []).append(pair)

    with observe_attention(model, observe):
        model(prompt)
    return found


@pytest.mark.filterwarnings("ignore:the memory set")
@pytest.mark.parametrize("kind", ["projection", "none"])
def test_errors_are_those_of_each_head(model, kind, monkeypatch):
    if kind == "none":
        from transformers import GPT2Config, GPT2LMHeadModel

        # Its projection is no linear layer of PyTorch.
        sizes = {"n_embd": 64, "n_layer": LAYERS, "n_head": KV_HEADS, "n_positions": 128}
        rates = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
        config = GPT2Config(vocab_size=257, initializer_range=0.3, **sizes, **rates)
        model = GPT2LMHeadModel(config).eval()
    done = []
    note = lambda *report: done.append(report)  # noqa: E731
    options = {"context": CONTEXT, "windows": "0:2", "on_progress": note}
    with torch.no_grad():
        result = calibrate_heads(model, TOKENS, WIDENING, **options)
        for index, factor in enumerate(FACTORS):
            windows = [_expected(model, prompt[None], factor) for prompt in TOKENS.view(2, -1)]
            for layer in range(1, LAYERS):
                for head in range(KV_HEADS):
                    pairs = [window[layer][head] for window in windows]
                    error, size = (sum(column) for column in zip(*pairs, strict=True))
                    found = result.errors[layer][head][index]
                    assert found == pytest.approx(float(error / size), rel=1e-4, abs=1e-9)
    assert list(result.errors) == list(range(1, LAYERS)), "the first layer is left out"
    assert (result.context, result.windows, result.text) == (CONTEXT, [0, 1], "tokens")
    assert [report[0] for report in done] == list(range(2 * LAYERS + 1))
    assert {report[1] for report in done} == {2 * LAYERS} and done[-1][2] == "done"


@pytest.mark.filterwarnings("ignore:the memory set")
@pytest.mark.parametrize("given", [(), ((2, 1, 2),)])
def test_the_head_that_needs_far_keys_is_found(model, given):
    # Of the query heads of each layer two share a KV head; the outputs of the others are dropped.
    for index, layer in enumerate(model.model.layers):
        kept = slice(32, 64) if index == 2 else slice(0)
        weight = torch.zeros_like(layer.self_attn.o_proj.weight)
        weight[:, kept] = layer.self_attn.o_proj.weight[:, kept]
        layer.self_attn.o_proj.weight = torch.nn.Parameter(weight)
    config = CONFIG.replace(wide=given)
    result = calibrate_heads(model, TOKENS, config, budget=1.2, context=CONTEXT)
    assert [head[:2] for head in result.chosen] == [(2, 1)]
    factor = result.chosen[0][2]
    assert result.config == config.replace(wide=((2, 1, factor * (2 if given else 1)),))
    assert result.error_before == pytest.approx(result.error(2, 1, 1), abs=1e-12)
    assert result.error_after == pytest.approx(result.error(2, 1, factor), abs=1e-12)
    if not given:
        before, after = (
            evaluate_perplexity(model, TOKENS, each, context=CONTEXT, windows="0:1").kl_mean
            for each in (config, result.config)
        )
        assert after < before


@pytest.mark.parametrize("budget", [1.02, 1.1, 1.4, 9.0])
def test_the_budget_is_spent_and_kept(model, budget):
    result = calibrate_heads(model, TOKENS, CONFIG, budget=budget, context=CONTEXT)
    batch = TOKENS[None, :CONTEXT]
    for flops, config in ((result.flops_before, CONFIG), (result.flops_after, result.config)):
        assert flops == count_attention_flops(batch, config, LAYERS, KV_HEADS)
    spent = result.flops_before.ratio / result.flops_after.ratio
    assert spent <= budget
    for layer in result.errors:
        for head in range(KV_HEADS):
            wide = {(a, b): factor for a, b, factor in result.config.wide}
            factor = wide.get((layer, head), 1)
            if factor < FACTORS[-1]:
                wide[layer, head] = 2 * factor
                wider = CONFIG.replace(wide=tuple((*key, x) for key, x in wide.items()))
                more = count_attention_flops(batch, wider, LAYERS, KV_HEADS)
                assert result.flops_before.ratio / more.ratio > budget
