"""Engines with other options: steps, pages, states, settings, layers that stay vLLM's."""

import functools
import gc
import logging
import random

import pytest
import torch
from engines import CHUNK, SETTINGS, SIZES, save
from transformers import Gemma2Config, Gemma2ForCausalLM, MistralConfig, MistralForCausalLM
from vllm import SamplingParams
from vllm.v1.core.sched.scheduler import Scheduler

from h2o_prefill.vllm import runner
from h2o_prefill.vllm.plan import Prompt
from h2o_prefill.vllm.state import PromptState

LENGTH = 7 * CHUNK + 45


@pytest.fixture(autouse=True)
def logged(monkeypatch):
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)


@pytest.mark.parametrize("settings", [None, "exact"])
def test_steps_give_what_one_step_gives(make_engine, folder, tokens, settings):
    ids = tokens(LENGTH)
    budgets = (LENGTH + 8, 4 * CHUNK + 8, 2 * CHUNK + 77)
    answers = [
        make_engine(folder, max_num_batched_tokens=budget).ask(ids, settings=settings, losses=True)
        for budget in budgets
    ]
    for other in answers[1:]:
        assert other.losses.equal(answers[0].losses)
        assert other.logprobs.equal(answers[0].logprobs)


def test_a_preempted_request_gives_what_it_gives_alone(make_engine, folder, tokens, monkeypatch):
    prompts = [tokens(5 * CHUNK + 20, seed) for seed in (1, 2)]
    # 44 pages of 32 tokens: both prompts, and little of their answers.
    engine = make_engine(folder, num_gpu_blocks_override=45, max_model_len=1024)
    alone = [engine.ask(x, new=60) for x in prompts]
    engine.forget()
    preempted, preempt = [], Scheduler._preempt_request

    def counted(self, request, *args, **kwargs):
        preempted.append(request.request_id)
        return preempt(self, request, *args, **kwargs)

    monkeypatch.setattr(Scheduler, "_preempt_request", counted)
    both, counts = engine.counted(*prompts, new=60)
    assert preempted and "lost_tokens" not in counts
    for one, other in zip(alone, both, strict=True):
        # What had been decoded is prefilled again, in other products.
        same = [x == y for x, y in zip(one.tokens, other.tokens, strict=True)]
        assert sum(same) > 50
        torch.testing.assert_close(one.logprobs[:20], other.logprobs[:20], atol=1e-3, rtol=1e-3)


def test_an_engine_starts_again_with_other_settings(make_engine, folder, tokens, monkeypatch):
    ids, settings = tokens(LENGTH), f"{SETTINGS},sink_tokens=2"
    first = make_engine(folder).ask(ids, settings=settings)
    monkeypatch.setenv("H2O_PREFILL_SETTINGS", settings)
    monkeypatch.setattr(runner, "rules", functools.cache(runner.rules.__wrapped__))
    engine = make_engine(folder)
    again, counted = engine.counted(ids)
    assert again.cached == 0 and counted == {"sparse_tokens": LENGTH}
    assert again.tokens == first.tokens and again.logprobs.equal(first.logprobs)
    assert engine.ask(ids, settings=SETTINGS).cached == 0


def test_aborted_requests_leave_nothing(make_engine, folder, tokens):
    engine = make_engine(folder, num_gpu_blocks_override=160)
    core, drawn = engine.llm.llm_engine, random.Random(0)
    engine.ask(tokens(10))
    checkpoints = engine.planner.checkpoints
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)
    prompts, answers, held = {}, {}, []
    checkpoints.max_bytes = 1 << 20

    def step():
        held.append(len(engine.planner))
        for output in core.step():
            answers[output.request_id] = output.outputs[0].token_ids if output.finished else None

    for i in range(200):
        prompts[str(i)] = ids = tokens(CHUNK + drawn.randrange(2 * CHUNK), 200 + i)
        core.add_request(str(i), {"prompt_token_ids": ids}, params)
        if i % 2:
            step()
        running = [x for x in prompts if not answers.get(x)]
        if drawn.random() < 0.7 and running:
            core.abort_request([gone := drawn.choice(running)])
            prompts.pop(gone)
    while core.has_unfinished_requests():
        step()
    assert max(held) > 1 and 50 < len(prompts) < 100
    engine.ask(tokens(10))
    assert len(engine.planner) == 0 and 0 < checkpoints.nbytes <= checkpoints.max_bytes
    engine.forget()
    # The last request's prompt is left. vLLM's process itself grows, with and without the plugin.
    assert sum(type(x) in (Prompt, PromptState) for x in gc.get_objects()) <= 1
    for request, alone in zip(prompts, engine.ask(*prompts.values(), new=8), strict=True):
        assert answers[request] == alone.tokens


def test_the_scheduler_of_vllm_may_stay(make_engine, folder, tokens):
    engine = make_engine(
        folder, max_num_batched_tokens=200, scheduler_cls="vllm.v1.core.sched.scheduler.Scheduler"
    )
    ids = tokens(LENGTH)
    answer, counted = engine.counted(ids)
    assert counted == {"sparse_tokens": LENGTH} and len(answer.tokens) == 4
    # Hits end at pages, where there is no state.
    again, counted = engine.counted(ids)
    assert counted == {"state_misses": 1, "lost_tokens": LENGTH - again.cached}


def test_other_runners_and_ranks_are_refused(make_engine, folder, monkeypatch):
    config = make_engine(folder).llm.llm_engine.vllm_config
    assert runner.refused(config) is None
    monkeypatch.setattr(config.parallel_config, "world_size", 2)
    assert runner.refused(config) == "2 ranks"
    monkeypatch.setattr(type(config), "use_v2_model_runner", True)
    assert runner.refused(config) == "model runner V2"


def test_steps_without_room_for_a_chunk_are_not_cut(make_engine, folder, tokens, caplog):
    engine = make_engine(folder, max_num_batched_tokens=CHUNK)
    assert "have no room for a chunk of 128" in caplog.text
    _, counted = engine.counted(tokens(LENGTH))
    assert counted == {"sparse_tokens": LENGTH}


@pytest.mark.parametrize("kind", ["windows", "softcap"])
def test_layers_that_are_refused_stay_vllms(make_engine, tmp_path, tokens, kind, caplog):
    if kind == "windows":
        save(tmp_path, MistralConfig(**SIZES, sliding_window=200), MistralForCausalLM)
    else:
        sizes = {**SIZES, "tie_word_embeddings": True}
        save(tmp_path, Gemma2Config(**sizes, query_pre_attn_scalar=32), Gemma2ForCausalLM)
    engine = make_engine(tmp_path)
    assert "attention stays vLLM's" in caplog.text
    answer, counted = engine.counted(tokens(LENGTH))
    assert counted == {}
    dense = engine.ask(tokens(LENGTH), settings="dense")
    assert answer.tokens == dense.tokens
    torch.testing.assert_close(answer.logprobs, dense.logprobs, atol=1e-4, rtol=1e-4)
