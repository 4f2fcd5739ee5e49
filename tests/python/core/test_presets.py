"""Presets, and settings as a user passes them."""

from __future__ import annotations

import pytest

from h2o_prefill import PRESETS, PrefillConfig, preset_config
from h2o_prefill.presets import chosen_config


def test_settings_come_whole_by_name_or_by_default():
    config = PrefillConfig(chunk_size=32, local_window=4, heavy_budget=4)
    assert chosen_config(config) is config
    assert chosen_config("h2o") == PRESETS["h2o"]
    assert chosen_config(None) == preset_config() == PRESETS["recommended"]


def test_overrides_win():
    config = chosen_config("h2o,sink_tokens=3", {"heavy_budget": 128, "recall": 2})
    assert config == PrefillConfig(heavy_budget=128, sink_tokens=3, recall=2)


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
