"""Engines with other options: steps of another size, few pages, layers that stay vLLM's."""

import logging

import pytest
import torch
from engines import CHUNK, SIZES, save
from transformers import Gemma2Config, Gemma2ForCausalLM, MistralConfig, MistralForCausalLM
from vllm.v1.core.sched.scheduler import Scheduler

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
