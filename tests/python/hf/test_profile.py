"""Profiles: where they are found, what is said of them, and which are refused."""

import json
import logging
from pathlib import Path
from types import SimpleNamespace

import pytest
from hf_helpers import RECOMMENDED, SPARSE
from transformers import LlamaConfig

from h2o_prefill import chunked_prefill, enable, explain, preset_config, profile
from h2o_prefill.profile import (
    architecture_hash,
    build_profile,
    find_profile,
    profile_path,
    settings_name,
    settings_of,
)

CONFIG = preset_config("recommended", **SPARSE, wide=((1, 0, 2),))


@pytest.fixture(autouse=True)
def places(tmp_path, monkeypatch):
    """Empty folders in which profiles are looked for."""
    folders = {name: tmp_path / name for name in ("model", "cache", "shipped")}
    for folder in folders.values():
        folder.mkdir()
    monkeypatch.setenv("H2O_PREFILL_CACHE", str(folders["cache"]))
    monkeypatch.setattr(profile, "_SHIPPED", folders["shipped"])
    profile._say_once.cache_clear()
    return folders


def _write(path, model, config=CONFIG):
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(build_profile(model, config, "a text", {})))
    return str(path)


def test_a_profile_beside_the_model_comes_before_others(llama, places):
    assert find_profile(llama) is None
    found = [_write(places["shipped"] / "any_name.json", llama)]
    assert find_profile(llama).source == found[-1]
    found.append(_write(profile_path(llama), llama))
    assert Path(found[-1]).is_relative_to(places["cache"])
    assert find_profile(llama).source == found[-1]
    llama.config._name_or_path = str(places["model"])
    assert find_profile(llama).source == found[-1]
    found.append(_write(profile_path(llama), llama))
    assert found[-1] == str(places["model"] / "h2o_prefill.json")
    assert find_profile(llama).source == found[-1]


def test_enable_takes_a_profile_where_no_settings_are_given(llama, ids, sparse_layers):
    source = _write(profile_path(llama), llama)
    with enable(llama) as handle:
        assert handle.config == CONFIG
        report = explain(llama)
    assert report.profile == source and f"(profile {source})" in str(report).splitlines()[0]
    with enable(llama, heavy_budget=2) as handle:
        assert handle.config == CONFIG.replace(heavy_budget=2)
    with enable(llama, **RECOMMENDED) as handle:
        assert handle.config == CONFIG.replace(wide=())
        assert explain(llama).profile == "" and "profile" not in str(explain(llama))
    chunked_prefill(llama, ids)
    assert sparse_layers, "the chunks of the profile are shorter than the prompt"


def test_a_text_that_begins_with_profile_is_of_the_profile(llama):
    with pytest.raises(ValueError, match='the preset "profile" must be of a model with a profile'):
        enable(llama, "profile,sink_tokens=2")
    _write(profile_path(llama), llama)
    assert settings_of(llama, "profile")[0] == CONFIG
    for text, overrides in (("profile,sink_tokens=2", {}), ("profile", {"sink_tokens": 2})):
        with enable(llama, text, **overrides) as handle:
            assert handle.config == CONFIG.replace(sink_tokens=2) and explain(llama).profile
    wrong = {"profile,": "where a field is expected", "profile,sinks=2": '"sinks" is no setting'}
    for text, message in (wrong | {"profiles": "preset must be one of"}).items():
        with pytest.raises(ValueError, match=message):
            settings_of(llama, text)


def test_settings_have_the_name_of_a_profile(llama, places):
    assert settings_name(llama, preset_config("recommended")) == "recommended"
    _write(places["shipped"] / "small.json", llama)
    llama.config._name_or_path = "makers/other"
    assert settings_name(llama, CONFIG) == "profile small"
    assert settings_name(llama, CONFIG.replace(sink_tokens=2)) == "profile small,sink_tokens=2"
    assert settings_name(llama, preset_config("h2o")) == "h2o"
    _write(profile_path(llama), llama)
    assert settings_name(llama, CONFIG) == "profile other"
    profile_path(llama).write_text("{")
    assert settings_name(llama, CONFIG) == CONFIG.to_string()


@pytest.mark.parametrize(
    ("config", "said"), [(CONFIG, "1 of 4 KV heads keep more keys"), (preset_config("h2o"), "h2o")]
)
def test_it_is_said_once(llama, places, caplog, config, said):
    _write(places["shipped"] / "small.json", llama, config)
    with caplog.at_level(logging.INFO, "h2o_prefill"):
        find_profile(llama)
        for _ in range(2):
            with enable(llama):
                pass
    (record,) = caplog.records
    assert record.getMessage() == f"h2o_prefill: profile small: {said}"


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("{", "Expecting property name"),
        ("[]", "indices must be integers"),
        ('{"architecture": "0"}', "it has no 'settings'"),
        ('{"settings": "best", "architecture": "0"}', "preset must be one of"),
        (
            '{"settings": "h2o", "architecture": "0"}',
            "must be of the model's architecture.*got .*0",
        ),
    ],
)
def test_a_profile_that_does_not_fit_is_refused(llama, places, content, reason):
    llama.config._name_or_path = str(places["model"])
    profile_path(llama).write_text(content)
    with pytest.raises(ValueError, match=f"(?s)model/h2o_prefill.json.*{reason}"):
        enable(llama)
    with enable(llama, "h2o"):
        pass


def _hash(**changes):
    # Those of SmolLM2-135M.
    sizes = {"hidden_size": 576, "intermediate_size": 1536, "vocab_size": 49152}
    heads = {"num_attention_heads": 9, "num_key_value_heads": 3, "num_hidden_layers": 30}
    rope = {"rope_parameters": {"rope_theta": 100000, "rope_type": "default"}}
    config = LlamaConfig(**{**sizes, **heads, **rope, **changes})
    return architecture_hash(SimpleNamespace(config=config))


def test_fine_tuned_models_share_a_hash():
    theta = {"rope_type": "default", "rope_theta": 100000.0}
    for same in ({"dtype": "bfloat16"}, {"name_or_path": "a/b"}, {"rope_parameters": theta}):
        assert _hash(**same) == _hash()
    others = [{"num_key_value_heads": 9}, {"hidden_size": 1152}, {"vocab_size": 50000}]
    others.append({"rope_parameters": {**theta, "rope_type": "yarn", "factor": 2.0}})
    assert len({_hash(), *(_hash(**other) for other in others)}) == 1 + len(others)


def test_the_package_has_a_profile_of_smollm2(monkeypatch):
    monkeypatch.undo()  # look into the package's own folder
    (path,) = profile._shipped(_hash())
    heads = profile._read(path, _hash()).wide
    assert heads and all(0 < layer < 30 and head < 3 for layer, head, _ in heads)
