"""Settings: defaults and rules."""

import dataclasses
import random

import numpy as np
import pytest
import torch
from random_calls.draw import Draw, draw_settings

from h2o_prefill import PRESETS, PrefillConfig, preset_config
from h2o_prefill.presets import chosen_config


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("heavy_budget", 2**31, "heavy_budget must be <= 4194304, got 2147483648"),
        ("chunk_size", 10.5, "chunk_size must be an int, got 10.5"),
        ("chunk_size", True, "chunk_size must be an int, got True"),
        ("gqa_reduce", "mean", 'gqa_reduce must be "sum" or "max", got "mean"'),
        ("dense_layers", 0, "dense_layers must be a sequence of ints, got 0"),
        ("chunk_size", 2**63, f"chunk_size must be an int, got {2**63}"),
        ("dense_layers", (1.5,), "dense_layers must be an int, got 1.5"),
        ("error_threshold", 10**400, "error_threshold must be a number, got 1000"),
        ("exact", 1, "exact must be a bool, got 1"),
        ("error_threshold", "0.5", "error_threshold must be a number, got '0.5'"),
        ("error_threshold", -1.0, "error_threshold must be a finite number >= 0, got -1"),
        ("min_prefill", -1, "min_prefill must be >= 1, 'auto' or None, got -1"),
    ],
)
def test_wrong_values_name_the_field_the_rule_and_the_value(field, value, message):
    with pytest.raises(ValueError, match=message):
        PrefillConfig(**{field: value})


def test_budgets_are_bounded_when_they_have_grown():
    with pytest.raises(
        ValueError, match="multiplied by max_widen, must be <= 4194304, got 8388608"
    ):
        PrefillConfig(heavy_budget=2**21, error_rows=4, max_widen=4)


def test_fields_and_defaults_equal_the_native_class():
    native = torch.classes.h2o_prefill.PrefillConfig()
    named = [part.partition("=")[0] for part in native.to_fields().split(",")]
    assert [field.name for field in dataclasses.fields(PrefillConfig)] == named
    assert PrefillConfig.from_native(native) == PrefillConfig()


@pytest.mark.parametrize("seed", range(100))
def test_texts_stand_for_all_settings(seed):
    config = draw_settings(Draw(random.Random(seed)), length=2000, layers=9)
    assert PrefillConfig.parse(config.to_string()) == config
    assert PrefillConfig.parse(config.native.to_fields()) == config


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", 'preset must be one of exact, recommended, h2o, got ""'),
        ("h2o,recall", 'settings must be a preset and fields like .*, got "recall" where'),
        ("h2o,recalls=1", '"recalls" is no setting of PrefillConfig, whose settings are chunk'),
        ("h2o,recall=1.5", 'recall must be an int, got "1.5"'),
        ("h2o,dense_layers=1-3", 'dense_layers must be layers like 7.17, or none, got "1-3"'),
        ("h2o,exact=maybe", 'exact must be true or false, got "maybe"'),
        ("h2o,recall=1,recall=2", 'recall must be given once, got "recall=1,recall=2"'),
        ("h2o,min_prefill=-1", 'min_prefill must be an int, auto or none, got "-1"'),
        ("h2o\n,recall=1", r'preset must be one of exact, recommended, h2o, got "h2o\\n"'),
        ("h2o,\n", r'got "\\n" where a field is expected'),
        ("gqa_reduce=sum\n", r'gqa_reduce must be "sum" or "max", got "sum\\n"'),
    ],
)
def test_wrong_texts(text, message):
    with pytest.raises(ValueError, match=message) as refused:
        PrefillConfig.parse(text)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("yes", ["true", "True", "1"])
def test_values_as_python_prints_them(yes):
    text = f"h2o,exact={yes},min_prefill=None,dense_layers=None"
    assert PrefillConfig.parse(text) == PrefillConfig.parse("h2o,exact=true,min_prefill=none")
    assert PrefillConfig.parse("exact,exact=False") == PrefillConfig()


def test_numpy_integers_are_integers():
    config = PrefillConfig(
        chunk_size=np.int64(512), local_window=np.int32(8), dense_layers=[np.int8(1)]
    )
    assert config == PrefillConfig(chunk_size=512, local_window=8, dense_layers=(1,))
    assert type(config.chunk_size) is int and type(config.dense_layers[0]) is int


def test_budgets_that_do_not_pay_warn():
    empty = {"local_window": 0, "heavy_budget": 0}
    with pytest.warns(UserWarning, match=r"memory set is empty \(K \+ L \+ H = 0\), so every call"):
        config = PrefillConfig(**empty)
    assert not config.is_sparse_call(0, 4096) and config.is_long_call(0, 4096)
    with pytest.warns(
        UserWarning, match=r"\(512 positions\) is not smaller than chunk_size \(512\)"
    ):
        PrefillConfig(chunk_size=512)


def test_the_docstring_describes_every_field():
    for field in dataclasses.fields(PrefillConfig):
        text = field.metadata["help"]
        assert text.endswith(".")
        entry = PrefillConfig.__doc__.partition(f"    {field.name} : ")[2].partition("\n    ")[2]
        assert " ".join(entry.split()).startswith(text)


def test_settings_come_whole_by_name_or_by_default():
    config = PrefillConfig(chunk_size=32, local_window=4, heavy_budget=4)
    assert chosen_config(config) is config
    assert chosen_config("h2o") == PRESETS["h2o"]
    assert chosen_config(None) == preset_config() == PRESETS["recommended"]


def test_overrides_win():
    config = chosen_config("h2o,sink_tokens=3", {"heavy_budget": 128, "recall": 2})
    assert config == PrefillConfig(heavy_budget=128, sink_tokens=3, recall=2, min_prefill="auto")


@pytest.mark.parametrize(("chunk_size", "block"), [(96, 32), (1000, 8), (2048, 64), (17, 1)])
def test_the_recall_block_suits_another_chunk_size(chunk_size, block):
    given = {"chunk_size": chunk_size, "local_window": 4, "heavy_budget": 4}
    assert preset_config("recommended", **given).recall_block == block


def test_wrong_settings():
    unknown = '"chunksize" is no setting of PrefillConfig, whose settings are chunk_size, local'
    with pytest.raises(ValueError, match=unknown):
        preset_config(chunksize=1)
    with pytest.raises(ValueError, match="a PrefillConfig or the name of a preset, got int"):
        chosen_config(3)
