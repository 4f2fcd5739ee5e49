"""Models on a GPU: what they give on the CPU, by every way in."""

import warnings

import pytest
import torch
from hf_helpers import EVERYTHING, GREEDY, RECOMMENDED, SPARSE, assert_close, new_cache

from h2o_prefill import ChunkedPrefillCache, chunked_prefill, enable

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

SETTINGS = {"sparse": SPARSE, "recommended": RECOMMENDED, "everything": EVERYTHING}


def on_both(call):
    """Return what a call gives on the CPU, and then on the GPU, brought back."""
    return [call(device).cpu() for device in ("cpu", "cuda")]


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3", "gpt-oss", "deepseek-v3"])
@pytest.mark.parametrize("settings", SETTINGS)
def test_logits_equal_the_cpu(build, make_ids, kind, settings):
    model, ids = build(kind), make_ids(2, 150)

    def logits(device):
        with enable(model.to(device), **SETTINGS[settings]):
            return model(ids.to(device), past_key_values=new_cache(model)).logits

    assert_close(*on_both(logits), 1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_generation_of_a_padded_batch(build, make_ids, dtype):
    warnings.filterwarnings("ignore", message="h2o_prefill: .* hides tokens")
    model, ids = build("llama").to(dtype), make_ids(2, 150)
    mask = torch.ones_like(ids)
    mask[0, :40] = 0

    def tokens(device):
        with enable(model.to(device), **RECOMMENDED):
            inputs = {"input_ids": ids.to(device), "attention_mask": mask.to(device)}
            return model.generate(**inputs, **GREEDY)

    expected, actual = on_both(tokens)
    # Two tokens may be equally likely in bfloat16.
    same = (expected == actual).float().mean()
    assert same == 1 if dtype == torch.float32 else same > 0.9


def test_prefill_by_chunks_and_a_session_file(build, make_ids, tmp_path):
    model, ids, more = build("llama"), make_ids(1, 150), make_ids(1, 9)
    path = tmp_path / "prompt.session"
    handle = enable(model, **RECOMMENDED)

    def logits(device):
        cache = chunked_prefill(model.to(device), ids.to(device)).past_key_values
        cache.save(path, model)
        other = ChunkedPrefillCache.load(path, model)
        assert other.token_ids.device.type == device
        return model(more.to(device), past_key_values=other).logits

    assert_close(*on_both(logits), 1e-4)
    handle.disable()


@pytest.mark.slow
def test_a_compiled_model(build, make_ids, fresh_dynamo):
    model, ids = build("llama"), make_ids(1, 150)
    with enable(model, **RECOMMENDED):
        expected = model(ids, past_key_values=new_cache(model)).logits
        model.to("cuda").compile(fullgraph=True, dynamic=True)
        actual = model(ids.cuda(), past_key_values=new_cache(model)).logits
    assert_close(actual.cpu(), expected, 1e-4)
