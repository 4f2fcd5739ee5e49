"""Prefill by stages: what one process gives, to the bit, whatever the stages."""

import time
from functools import partial

import pytest
import torch

pytest.importorskip("transformers", minversion="5.24")

from hf_helpers import EVERYTHING, H2O, RECOMMENDED
from processes import (
    assert_refused,
    assert_survivors_raise,
    error_of,
    load,
    random_ids,
    run,
    strike,
)
from transformers import DynamicCache, StaticCache

from h2o_prefill import chunked_prefill, enable

SETTINGS = {
    "recommended": RECOMMENDED,
    "everything": EVERYTHING,
    "h2o": H2O,
    "exact": {"config": "exact", "chunk_size": 16},
}
GREEDY = {"max_new_tokens": 6, "do_sample": False}
LAYERS = 5


def answers(rank, folder, count):
    """Return logits and tokens of prompts, and the text of errors."""
    model = load(folder, pp_size=count) if count > 1 else load(folder)
    one = {"chunks_per_call": 1} if count == 1 else {}
    found = {}
    ids, more = random_ids(1, 200), random_ids(1, 40, seed=4)
    for name, settings in SETTINGS.items():
        output = chunked_prefill(model, ids, **one, **settings)
        cache = output.cache
        found[f"{name} prompt"] = output.logits
        found[f"{name} goes on"] = chunked_prefill(
            model, more, cache=cache, **one, **settings
        ).logits
        whole = torch.cat([ids, more, more[:, :1]], dim=1)
        found[f"{name} tokens"] = model.generate(whole, cache=cache, **GREEDY)
    found["fewer chunks than stages"] = chunked_prefill(model, ids[:, :16], **one, **RECOMMENDED)[0]
    found["batch"] = chunked_prefill(model, random_ids(2, 88), **one, **RECOMMENDED).logits
    embeds = torch.randn(2, 70, 64, generator=torch.Generator().manual_seed(5))
    output = chunked_prefill(model, inputs_embeds=embeds, recall=0, **one, **RECOMMENDED)
    found["embeddings"] = output.logits
    with enable(model, **RECOMMENDED) as handle:
        found["enabled tokens"] = model.generate(ids, **GREEDY)
        cache = DynamicCache(config=model.config)
        found["calls"] = torch.cat([model(x, cache=cache).logits for x in ids.split(48, 1)], dim=1)
        cache.crop(-9)
        found["cut"] = model(more, cache=cache).logits
        layers = [layer.layer for layer in handle.report() if layer.sparse_calls]
    here = [number for number, layer in enumerate(cache.layers) if layer.is_initialized]
    return {"found": found, "layers": layers, "cached layers": here}


def refusals(rank, folder, count):
    model, ids, sparse = load(folder, pp_size=count), random_ids(1, 64), RECOMMENDED
    used = DynamicCache(config=model.config)
    model(ids, cache=used)
    static = StaticCache(config=model.config, max_cache_len=96)
    prefill = partial(chunked_prefill, model)
    other = {**sparse, "local_window": 4 + rank}
    ranks_own = random_ids(1, 64, seed=rank)
    calls = {
        "settings must be the same on every rank, got": lambda: prefill(ids, **other),
        "token ids must be the same on every rank, got": lambda: prefill(ranks_own, **sparse),
        "input_ids must be in": lambda: prefill(ids + 10**6, **sparse),
    }
    errors = [(text, error_of(call)) for text, call in calls.items()]
    with enable(model, **sparse):
        for named, cache in (("DynamicCache with tokens", used), ("StaticCache", static)):
            error = error_of(lambda: model(ids, cache=cache))  # noqa: B023
            errors.append((f"would count positions from 0; got {named}", error))
    steps = []
    # The group is still in order.
    prefill(ids, **sparse, on_progress=lambda *step: steps.append(step))
    model.config.num_hidden_layers = 1
    for call in (lambda: enable(model), lambda: prefill(ids)):
        errors.append(("a model of 1 layers has at most 1 stages, got 2", error_of(call)))
    return errors, steps


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tiny):
    path = tmp_path_factory.mktemp("model")
    tiny.make_model(num_hidden_layers=LAYERS).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def expected(folder):
    found = run(1, answers, folder, 1)[0]["found"]
    return found


# Three have a rank in the middle.
@pytest.mark.parametrize("count", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_stages_give_what_one_process_gives(folder, expected, count):
    results = run(count, answers, folder, count)
    assert [layer for result in results for layer in result["layers"]] == list(range(LAYERS))
    for result in results:
        assert result["cached layers"] == result["layers"]
        assert result["found"].keys() == expected.keys()
        for name, value in expected.items():
            assert torch.equal(result["found"][name], value), name


def test_what_every_rank_refuses_and_tells(folder):
    for errors, steps in run(2, refusals, folder, 2):
        assert_refused(errors)
        whole = [x for x in errors if x[0].startswith("a model")]
        assert len(whole) == 2 and all(error[1] == text for text, error in whole)
        assert steps == [(64, 64)]


def interrupted(rank, folder, victim, name):
    """Prefill twice; the victim gets a signal in the third call of the second prompt."""
    model = load(folder, pp_size=3)
    cache = chunked_prefill(model, random_ids(1, 64), **RECOMMENDED).cache
    if rank == victim:
        calls = []

        def strike_the_third(*_):
            calls.append(1)
            if len(calls) == 3:
                strike(name)

        model.model.layers[cache.span[0]].register_forward_hook(strike_the_third)
    ids, begin = random_ids(1, 320, 4), time.monotonic()
    error = error_of(lambda: chunked_prefill(model, ids, cache=cache, **RECOMMENDED))
    return error, time.monotonic() - begin


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SIGKILL", "SIGSTOP", "error"])
@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_lost_rank_is_an_error_on_every_survivor(folder, victim, name):
    assert_survivors_raise(interrupted, folder, victim, name)
