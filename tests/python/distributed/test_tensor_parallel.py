"""Sparse prefill of a model whose heads transformers spreads over processes."""

import pytest
import torch

pytest.importorskip("transformers", minversion="5.24")

from hf_helpers import RECOMMENDED
from processes import error_of, load, random_ids, run

from h2o_prefill import chunked_prefill, enable

HEADS = 6  # KV heads: they can be spread over two processes, and over three
SETTINGS = {**RECOMMENDED, "error_threshold": 0.05}


def answers(rank, folder, count):
    model = load(folder, tp_size=count) if count > 1 else load(folder)
    ids = random_ids(2, 88)
    mask = torch.ones_like(ids)
    mask[0, :30] = 0
    with enable(model, **SETTINGS) as handle:
        output = model(ids)
        padded = model(ids, attention_mask=mask, use_cache=False).logits
        tokens = model.generate(ids, attention_mask=mask, max_new_tokens=6, do_sample=False)
        layers = [x.sparse_calls for x in handle.report()]
    chunked = chunked_prefill(model, ids, **SETTINGS).logits
    memory = [layer.state.memory for layer in output.cache.layers]
    logits = {"one call": output.logits, "padded": padded[mask.bool()], "chunked": chunked}
    return {"logits": logits, "tokens": tokens, "memory": memory, "calls": layers}


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tiny):
    path = tmp_path_factory.mktemp("model")
    heads = {"num_attention_heads": 2 * HEADS, "num_key_value_heads": HEADS}
    tiny.make_model(hidden_size=96, **heads).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def expected(folder):
    found = run(1, answers, folder, 1)[0]
    return found


# Three have a rank in the middle.
@pytest.mark.parametrize("count", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_heads_on_several_ranks(folder, expected, count):
    results = run(count, answers, folder, count)
    for result in results:
        assert torch.equal(result["tokens"], expected["tokens"])
        for name, logits in expected["logits"].items():
            torch.testing.assert_close(result["logits"][name], logits, atol=1e-4, rtol=1e-4)
        assert result["calls"] == expected["calls"]
    # Each rank has the memory sets of its heads.
    for layer, whole in enumerate(expected["memory"]):
        parts = [result["memory"][layer] for result in results]
        size = max(part.shape[2] for part in parts)
        parts = [torch.nn.functional.pad(x, (0, size - x.shape[2]), value=-1) for x in parts]
        assert torch.equal(torch.cat(parts, dim=1), whole)


def test_every_rank_has_as_many_heads(tmp_path, tiny):
    tiny.make_model(num_key_value_heads=1).save_pretrained(tmp_path)
    for error in run(2, refusal, tmp_path):
        assert error[:2] == ("ValueError", "tp_size must divide the number of KV heads, 1, got 2")


def refusal(rank, folder):
    model = load(folder, tp_size=2)
    return error_of(lambda: enable(model))
