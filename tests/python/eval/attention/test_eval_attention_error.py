"""Errors of sparse attention, layer by layer, against softmaxes over all pairs of positions."""

from __future__ import annotations

import copy
import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import h2o_prefill
from h2o_prefill import reference
from h2o_prefill.config import PrefillConfig
from h2o_prefill.eval import AttentionMeasures, measure_attention
from h2o_prefill.eval.attention import layer_error
from h2o_prefill.eval.attention.layer_error import measure_layer
from h2o_prefill.eval.attention.pattern_measures import run_jaccard, stack_layers
from h2o_prefill.eval.attention.patterns import collect_patterns
from h2o_prefill.eval.recalled_keys import find_recalled
from h2o_prefill.functional import recall_settings
from h2o_prefill.reference.recall import lexical_recall

LENGTH = 72  # four chunks of 16 tokens and one of 8
ENDS = (16, 32, 48, 64, 72)
OPTIONS: list[dict[str, Any]] = [
    {},
    {"sink_tokens": 2, "gqa_reduce": "max"},
    {"dense_tail": 12},
    {"dense_tail": 100},
    {"recall": 2, "recall_block": 8},
    {"recall": 1, "recall_block": 16, "dense_tail": 5},
    {"local_window": 0, "heavy_budget": 0, "block_diagonal": True},
    {"local_window": 30, "heavy_budget": 40},
]


@pytest.fixture
def prompt() -> Tensor:
    # Few words, so that there is something to recall.
    return torch.randint(1, 9, (1, LENGTH), generator=torch.Generator().manual_seed(5))


def _layer(query_heads: int = 6, kv_heads: int = 2, dim: int = 8) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [
        torch.randn(1, heads, LENGTH, dim, generator=generator, dtype=torch.float64)
        for heads in (query_heads, kv_heads, kv_heads)
    ]


def _brute_force(
    layer: list[Tensor],
    config: PrefillConfig,
    prompt: Tensor,
    scale: float | None = None,
    sinks: Tensor | None = None,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return |sparse - dense| and |dense| [Hq, T] and the dense mass on visible keys [Hq, T].

    With the unit matrix as values, attention returns its weights: over all pairs at once.
    """
    q, k, v = (x.double() for x in layer)
    lists = (None, None, None)
    if config.recall:
        lists = lexical_recall(prompt, 0, *recall_settings(config))
    attend = partial(
        reference.ops.chunked_sparse_attention,
        settings=config,
        scale=scale,
        sinks=sinks,
        softcap=softcap,
    )
    unit = torch.eye(q.shape[2], dtype=torch.float64).expand(1, k.shape[1], -1, -1)
    sparse = attend(q, k, v, None, None, *lists, 0)[0][0]
    visible = attend(q, k, unit, None, None, *lists, 0)[0][0] > 0
    dense = reference.ops.dense_attention(q, k, v, scale, sinks, softcap)[0]
    weights = reference.ops.dense_attention(q, k, unit, scale, None, softcap)[0]
    return (sparse - dense).abs().sum(-1), dense.abs().sum(-1), (weights * visible).sum(-1)


def _by_chunk(rows: Tensor) -> Tensor:
    """Sum [Hq, T] over the rows of each chunk, [chunks, Hq]."""
    return torch.stack([part.sum(-1) for part in rows.tensor_split(ENDS[:-1], dim=-1)])


@pytest.mark.parametrize("block_numbers", [1 << 22, 1500])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.filterwarnings("ignore:the memory set")
def test_a_layer_against_softmaxes_over_all_pairs(
    prompt: Tensor,
    small_config: PrefillConfig,
    options: dict[str, Any],
    block_numbers: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(layer_error, "_BLOCK_NUMBERS", block_numbers)
    config = small_config.replace(**options)
    layer = _layer()
    found = measure_layer(*layer, config, find_recalled(prompt, config))
    difference, size, mass = _brute_force(layer, config, prompt)
    exact = {"rtol": 1e-6, "atol": 1e-9}
    torch.testing.assert_close(found.difference, _by_chunk(difference), **exact)
    torch.testing.assert_close(found.size, _by_chunk(size), **exact)
    torch.testing.assert_close(found.mass, _by_chunk(mass), **exact)
    lowest = [part.amin(-1) for part in mass.tensor_split(ENDS[:-1], dim=-1)]
    torch.testing.assert_close(found.lowest_mass, torch.stack(lowest), **exact)


@pytest.mark.parametrize("heads", [(4, 4), (4, 1)])
def test_heads_without_and_with_one_group_and_a_scale(
    prompt: Tensor, small_config: PrefillConfig, heads: tuple[int, int]
) -> None:
    layer = _layer(*heads)
    found = measure_layer(*layer, small_config, options=(0.9, None, 0.0))
    difference, _, mass = _brute_force(layer, small_config, prompt, scale=0.9)
    torch.testing.assert_close(found.difference, _by_chunk(difference), rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(found.mass, _by_chunk(mass), rtol=1e-6, atol=1e-9)


def test_sinks_and_softcap(prompt: Tensor, small_config: PrefillConfig) -> None:
    layer, sinks = _layer(), torch.linspace(-1, 3, 6, dtype=torch.float64)
    found = measure_layer(*layer, small_config, options=(None, sinks, 1.5))
    difference, size, mass = _brute_force(layer, small_config, prompt, None, sinks, 1.5)
    torch.testing.assert_close(found.difference, _by_chunk(difference), rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(found.size, _by_chunk(size), rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(found.mass, _by_chunk(mass), rtol=1e-6, atol=1e-9)


def test_16_bit_inputs_are_measured_without_their_rounding(small_config: PrefillConfig) -> None:
    layer = [x.to(torch.bfloat16) for x in _layer()]
    found = measure_layer(*layer, small_config)
    exact = measure_layer(*(x.float() for x in layer), small_config)
    assert torch.equal(found.difference, exact.difference)
    assert found.difference[0].amax() < 1e-5 * found.size[0].amin()


@pytest.fixture
def layers(tiny_model: Any, prompt: Tensor, monkeypatch: pytest.MonkeyPatch) -> list[list[Tensor]]:
    """q, k and v of each layer of a dense run, caught in the model's own attention."""
    from transformers.models.llama import modeling_llama

    caught: list[list[Tensor]] = []
    eager = modeling_llama.eager_attention_forward

    def catch(module: Any, query: Tensor, key: Tensor, value: Tensor, *rest: Any, **more: Any):
        caught.append([query, key, value])
        return eager(module, query, key, value, *rest, **more)

    model = copy.deepcopy(tiny_model)
    model.set_attn_implementation("eager")
    with monkeypatch.context() as patch, torch.no_grad():
        patch.setattr(modeling_llama, "eager_attention_forward", catch)
        model(prompt)
    return caught


@pytest.mark.parametrize("options", [{}, {"dense_tail": 12}, {"recall": 2, "recall_block": 8}])
def test_a_model_against_softmaxes_over_all_pairs(
    tiny_model: Any,
    prompt: Tensor,
    layers: list[list[Tensor]],
    small_config: PrefillConfig,
    options: dict[str, Any],
) -> None:
    config = small_config.replace(**options)
    measures = measure_attention(tiny_model, prompt, config)
    assert measures.layers == (0, 1)
    assert measures.query_heads == (4, 4) and measures.kv_heads == (2, 2)
    assert measures.chunk_ends == ENDS
    assert measures.l1_error.shape == (2, 4) and measures.memory.shape == (5, 2, 2, 8)
    assert measures.l1_error.amin() > 0.001 and measures.mass_recall.amax() < 0.999
    rows = torch.tensor([16, 16, 16, 16, 8]).unsqueeze(1)
    for row, layer in enumerate(layers):
        difference, size, mass = _brute_force(layer, config, prompt)
        expected = {
            "l1_error": difference.sum(-1) / size.sum(-1),
            "mass_recall": mass.mean(-1),
            "mass_recall_lowest": mass.amin(-1),
        }
        for name, value in expected.items():
            found = getattr(measures, name)[row].double()
            torch.testing.assert_close(found, value, rtol=1e-4, atol=1e-6)
        for name, value in {
            "l1_error_by_chunk": _by_chunk(difference) / _by_chunk(size),
            "mass_recall_by_chunk": _by_chunk(mass) / rows,
        }.items():
            found = getattr(measures, name)[:, row].double()
            torch.testing.assert_close(found, value, rtol=1e-4, atol=1e-6)


@pytest.mark.filterwarnings("ignore:the memory set")
def test_one_chunk_is_exact(tiny_model: Any, prompt: Tensor) -> None:
    for size in (LENGTH, 2 * LENGTH):
        config = PrefillConfig(chunk_size=size, local_window=4, heavy_budget=4)
        measures = measure_attention(tiny_model, prompt[0], config)
        assert measures.l1_error.amax() < 1e-5
        ones = torch.ones(2, 4)
        torch.testing.assert_close(measures.mass_recall, ones)
        torch.testing.assert_close(measures.mass_recall_lowest, ones)
        assert measures.chunk_ends == (LENGTH,)
        summary = measures.to_dict()["summary"]
        assert summary["mass_recall_mean"] == pytest.approx(1) and math.isnan(
            summary["jaccard_mean"]
        )


def test_a_memory_of_everything_is_exact(tiny_model: Any, prompt: Tensor) -> None:
    with pytest.warns(UserWarning, match="the memory set"):
        config = PrefillConfig(chunk_size=16, local_window=0, heavy_budget=LENGTH)
    measures = measure_attention(tiny_model, prompt, config)
    assert measures.l1_error.amax() < 1e-5
    torch.testing.assert_close(measures.mass_recall, torch.ones(2, 4))


def test_without_memory_the_mass_is_that_inside_chunks(
    tiny_model: Any, prompt: Tensor, layers: list[list[Tensor]]
) -> None:
    config = PrefillConfig(chunk_size=16, local_window=0, heavy_budget=0, block_diagonal=True)
    measures = measure_attention(tiny_model, prompt, config)
    chunk = torch.arange(LENGTH) // 16
    unit = torch.eye(LENGTH).expand(1, 2, -1, -1)
    for row, (query, key, _) in enumerate(layers):
        weights = reference.ops.dense_attention(query, key, unit)[0]
        inside = (weights * (chunk == chunk.unsqueeze(1))).sum(-1).mean(-1)
        torch.testing.assert_close(measures.mass_recall[row], inside, rtol=1e-4, atol=1e-6)
    assert measures.memory.shape[-1] == 0 and measures.jaccard.isnan().all()


def test_more_is_seen_with_more_memory_and_with_recall(
    tiny_model: Any, prompt: Tensor, small_config: PrefillConfig
) -> None:
    mean = {
        name: measure_attention(tiny_model, prompt, small_config.replace(**options)).mass_recall
        for name, options in {
            "h2o": {},
            "larger": {"heavy_budget": 8},
            "recall": {"recall": 4, "recall_block": 8},
        }.items()
    }
    assert (mean["recall"] > mean["h2o"]).all()
    assert mean["larger"].mean() > mean["h2o"].mean()


def test_jaccard_of_successive_sets_and_of_two_runs(
    tiny_model: Any, prompt: Tensor, small_config: PrefillConfig
) -> None:
    measures = measure_attention(tiny_model, prompt, small_config)
    other = measure_attention(tiny_model, prompt, small_config.replace(local_window=2))
    assert measures.jaccard.shape == (4, 2, 2)

    def sets(result: AttentionMeasures, chunk: int, layer: int, head: int) -> set[int]:
        return {p for p in result.memory[chunk, layer, head].tolist() if p >= 0}

    between = run_jaccard(measures, other)
    assert between.shape == (5, 2, 2)
    for place in torch.cartesian_prod(*(torch.arange(n) for n in (5, 2, 2))).tolist():
        ours, theirs = sets(measures, *place), sets(other, *place)
        expected = len(ours & theirs) / len(ours | theirs)
        assert between[tuple(place)].item() == pytest.approx(expected)
        if place[0] < 4:
            after = sets(measures, place[0] + 1, *place[1:])
            expected = len(ours & after) / len(ours | after)
            assert measures.jaccard[tuple(place)].item() == pytest.approx(expected)
    assert (run_jaccard(measures, measures) == 1).all() and between.amin() < 1


def test_sets_of_a_sparse_run_differ_only_behind_the_first_layer(
    tiny_model: Any, prompt: Tensor, small_config: PrefillConfig
) -> None:
    # The first layer's inputs are those of a dense run; a later one's are not.
    between = run_jaccard(
        measure_attention(tiny_model, prompt, small_config),
        collect_patterns(tiny_model, prompt, small_config),
    )
    assert (between[:, 0] == 1).all()
    assert between[:, 1].amin() < 1


def test_runs_that_cannot_be_compared(
    tiny_model: Any, prompt: Tensor, small_config: PrefillConfig
) -> None:
    measures = measure_attention(tiny_model, prompt, small_config)
    shorter = measure_attention(tiny_model, prompt[:, :64], small_config)
    with pytest.raises(ValueError, match=r"chunk_ends must be the same in both runs, got \(16, 32"):
        run_jaccard(measures, shorter)
    fewer = measure_attention(tiny_model, prompt, small_config.replace(dense_layers=(0,)))
    assert fewer.layers == (1,) and torch.equal(fewer.l1_error, measures.l1_error[1:])
    with pytest.raises(ValueError, match=r"layers must be the same in both runs, got \(0, 1\) and"):
        run_jaccard(measures, fewer)


def test_wide_layers_see_more(tiny_model: Any, prompt: Tensor, small_config: PrefillConfig) -> None:
    narrow = measure_attention(tiny_model, prompt, small_config)
    config = small_config.replace(wide_layers=(1,), wide_factor=2)
    wide = measure_attention(tiny_model, prompt, config)
    assert wide.memory.shape[-1] == 2 * narrow.memory.shape[-1]
    assert torch.equal(wide.l1_error[0], narrow.l1_error[0])
    assert (wide.mass_recall[1] > narrow.mass_recall[1]).all()


def test_layers_with_fewer_heads(tiny: Any, prompt: Tensor, small_config: PrefillConfig) -> None:
    model = tiny.make_uneven_model()
    measures = measure_attention(model, prompt, small_config)
    assert measures.query_heads == (4, 2) and measures.kv_heads == (2, 1)
    assert measures.l1_error[1].isnan().tolist() == [False, False, True, True]
    assert measures.jaccard[:, 1].isnan().tolist() == [[False, True]] * 4
    values = measures.to_dict()
    second = values["by_layer"][1]
    assert len(second["l1_error"]) == 2 and len(second["jaccard"][0]) == 1
    known = measures.l1_error[~measures.l1_error.isnan()]
    assert values["summary"]["l1_error_mean"] == pytest.approx(known.mean().item())
    assert values["summary"]["l1_error_worst"]["value"] == pytest.approx(known.amax().item())


def test_the_worst_heads_and_the_chunks_are_named(
    tiny_model: Any, prompt: Tensor, small_config: PrefillConfig
) -> None:
    measures = measure_attention(tiny_model, prompt, small_config)
    values = measures.to_dict()
    worst = values["summary"]["mass_recall_worst"]
    lowest = measures.mass_recall[worst["layer"], worst["head"]]
    assert lowest == measures.mass_recall.amin() and worst["value"] == lowest.item()
    assert [row["end"] for row in values["by_chunk"]] == list(ENDS)
    assert [row["jaccard_mean"] for row in values["by_chunk"][:2]] == [None, None]
    # Chunk 2 attends to the set after chunk 1, chunk 1 to that after chunk 0.
    third = values["by_chunk"][2]
    assert third["jaccard_mean"] == pytest.approx(measures.jaccard[0].mean().item())
    assert third["l1_error_mean"] == pytest.approx(measures.l1_error_by_chunk[2].mean().item())
    assert values["config"]["chunk_size"] == 16 and values["tokens"] == LENGTH


def test_stacked_layers_are_filled_up() -> None:
    stacked = stack_layers([torch.ones(3, 2, 5), torch.zeros(3, 1, 5)], -1)
    assert stacked.shape == (3, 2, 2, 5)
    assert (stacked[:, 0] == 1).all() and (stacked[:, 1, 0] == 0).all()
    assert (stacked[:, 1, 1] == -1).all()


class _LargestTensor(TorchDispatchMode):
    numbers = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        result = function(*args, **(kwargs or {}))
        for value in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(value, Tensor):
                self.numbers = max(self.numbers, value.numel())
        return result


def test_memory_stays_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_error, "_BLOCK_NUMBERS", 1 << 14)
    generator = torch.Generator().manual_seed(0)
    layer = [torch.randn(1, heads, 512, 8, generator=generator) for heads in (4, 2, 2)]
    config = PrefillConfig(chunk_size=64, local_window=8, heavy_budget=8)
    with _LargestTensor() as largest:
        measure_layer(*layer, config)
    # The layer's queries are the largest: no weights of 512 x 512.
    assert largest.numbers <= max(1 << 14, layer[0].numel())


def test_progress_and_the_model_is_left_as_it_was(
    tiny_model: Any, prompt: Tensor, small_config: PrefillConfig
) -> None:
    steps: list[tuple[int, int, str]] = []
    tiny_model.train()
    with torch.no_grad():
        tiny_model.eval()
        before = tiny_model(prompt).logits
        tiny_model.train()
    measure_attention(
        tiny_model, prompt, small_config, on_progress=lambda *step: steps.append(step)
    )
    names = [f"attention of layer {layer}" for layer in (0, 1)]
    assert steps == [(0, 2, names[0]), (1, 2, names[1]), (2, 2, "done")]
    assert tiny_model.training
    assert tiny_model.config._attn_implementation == "sdpa"
    with torch.no_grad():
        assert torch.equal(tiny_model.eval()(prompt).logits, before)


def test_an_error_leaves_the_model_as_it_was(
    tiny_model: Any, prompt: Tensor, small_config: PrefillConfig
) -> None:
    def fail(done: int, total: int, what: str) -> None:
        if done == 1:
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        measure_attention(tiny_model, prompt, small_config, on_progress=fail)
    # What was found so far is not kept alive.
    from h2o_prefill.eval.attention import observe

    assert observe._observer.get() is None
    assert tiny_model.config._attn_implementation == "sdpa"
    with h2o_prefill.enable(tiny_model, small_config):
        assert tiny_model.config._attn_implementation == "h2o_prefill"


def test_wrong_arguments(tiny_model: Any, prompt: Tensor, small_config: PrefillConfig) -> None:
    with pytest.raises(ValueError, match="input_ids must hold at least two tokens, got 1"):
        measure_attention(tiny_model, prompt[:, :1], small_config)
    with pytest.raises(ValueError, match=r"dense_layers must leave a layer sparse, got \(0, 1\)"):
        measure_attention(tiny_model, prompt, small_config.replace(dense_layers=(0, 1)))
    with pytest.raises(ValueError, match=r"dense_layers must be < 2, got \(7,\)"):
        measure_attention(tiny_model, prompt, small_config.replace(dense_layers=(7,)))
    with pytest.raises(ValueError, match=r"input_ids must be <= 512, .* got 513"):
        measure_attention(tiny_model, torch.ones(1, 513, dtype=torch.int64), small_config)
    with (
        h2o_prefill.enable(tiny_model, small_config),
        pytest.raises(ValueError, match="model must have dense attention"),
    ):
        measure_attention(tiny_model, prompt, small_config)
