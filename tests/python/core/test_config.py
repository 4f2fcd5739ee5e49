"""Settings: defaults and rules."""

import dataclasses

import pytest

from h2o_prefill.config import PrefillConfig


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("chunk_size", 0, "chunk_size must be >= 1, got 0"),
        ("local_window", -3, "local_window must be >= 0, got -3"),
        ("heavy_budget", -1, "heavy_budget must be >= 0, got -1"),
        ("sink_tokens", -1, "sink_tokens must be >= 0, got -1"),
        ("dense_tail", -1, "dense_tail must be >= 0, got -1"),
        ("dense_layers", (0, -1), "dense_layers must be >= 0, got -1"),
        ("wide_layers", (-1,), "wide_layers must be >= 0, got -1"),
        ("wide_factor", 0, "wide_factor must be >= 1, got 0"),
        ("min_prefill", 0, "min_prefill must be >= 1, got 0"),
        ("chunk_size", 10.5, "chunk_size must be an int, got 10.5"),
        ("chunk_size", True, "chunk_size must be an int, got True"),
        ("gqa_reduce", "mean", "gqa_reduce must be one of .* got 'mean'"),
        ("recall", -1, "recall must be >= 0, got -1"),
    ],
)
def test_wrong_values_name_the_field_the_rule_and_the_value(field, value, message):
    with pytest.raises(ValueError, match=message):
        PrefillConfig(**{field: value})


def test_recall_blocks_tile_chunks():
    with pytest.raises(
        ValueError, match="chunk_size must be a multiple of recall_block, got 1000 and 128"
    ):
        PrefillConfig(chunk_size=1000, recall=2)


def test_a_memory_set_as_large_as_a_chunk_warns():
    with pytest.warns(
        UserWarning, match=r"memory set \(512 positions\) is not smaller than chunk_size \(512\)"
    ):
        PrefillConfig(chunk_size=512)


@pytest.mark.filterwarnings("error")
def test_wide_layers_have_larger_memory_sets():
    config = PrefillConfig(sink_tokens=2, wide_layers=[3, 5], wide_factor=3, dense_layers=(1,))
    for layer in (None, 0, 4):
        assert config.of_layer(layer) == config
    wide = config.of_layer(5)
    assert (wide.local_window, wide.heavy_budget, wide.memory_size) == (768, 768, 1538)
    assert wide.replace(local_window=256, heavy_budget=256) == config.replace(wide_layers=())
    assert wide.of_layer(5) == wide


def test_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        PrefillConfig().chunk_size = 3
    assert PrefillConfig().replace(sink_tokens=4).memory_size == 516


def test_last_chunk_of_a_call():
    config = PrefillConfig(chunk_size=10, local_window=2, heavy_budget=2)
    assert [config.next_chunk_begin(5, n) for n in (1, 10, 11, 20, 21)] == [5, 5, 15, 15, 25]
