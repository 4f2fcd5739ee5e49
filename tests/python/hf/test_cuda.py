"""Models on a GPU: what they give on the CPU, by every way in."""

import warnings

import pytest
import torch
from hf_helpers import EVERYTHING, GREEDY, RECOMMENDED, SPARSE, assert_close, new_cache

from h2o_prefill import ChunkedPrefillCache, chunked_prefill, enable

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
SETTINGS = {"sparse": SPARSE, "recommended": RECOMMENDED, "everything": EVERYTHING}


def one_call(model, ids, path):
    return model(ids, past_key_values=new_cache(model)).logits


def chunks_and_a_file(model, ids, path):
    chunked_prefill(model, ids[:1]).past_key_values.save(path, model)
    cache = ChunkedPrefillCache.load(path, model)
    assert cache.token_ids.device.type == ids.device.type
    return model(ids[:1, :9], past_key_values=cache).logits


def padded(model, ids, path):
    mask = torch.ones_like(ids)
    mask[0, :40] = 0
    return model.generate(ids, attention_mask=mask, **GREEDY)


@pytest.mark.parametrize(
    ("family", "settings", "call"),
    [
        *((family, settings, one_call) for family in ("llama", "gemma3") for settings in SETTINGS),
        *((family, "recommended", one_call) for family in ("qwen3", "gpt-oss", "deepseek-v3")),
        ("llama", "recommended", chunks_and_a_file),
        ("llama", "recommended", padded),
    ],
)
def test_a_gpu_gives_what_the_cpu_gives(build, make_ids, tmp_path, family, settings, call):
    warnings.filterwarnings("ignore", message="h2o_prefill: .* hides tokens")
    model, ids = build(family), make_ids(2, 150)
    expected, ours = (
        _run(model.to(device), SETTINGS[settings], call, ids.to(device), tmp_path / device).cpu()
        for device in ("cpu", "cuda")
    )
    assert_close(ours, expected, 1e-4)


def _run(model, settings, call, ids, path):
    with enable(model, **settings):
        return call(model, ids, path)


@pytest.mark.slow
def test_a_compiled_model(build, make_ids, fresh_dynamo):
    model, ids = build("llama"), make_ids(1, 150)
    static = {"cache_implementation": "static", **GREEDY}
    with enable(model, **RECOMMENDED):
        expected = model.generate(ids, **GREEDY)
        model.to("cuda").compile(fullgraph=True, dynamic=True)
        assert torch.equal(model.generate(ids.cuda(), **static).cpu(), expected)
