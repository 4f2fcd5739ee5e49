"""Engines with other options: steps, pages, states, settings, layers that stay vLLM's."""

import functools
import gc
import json
import random
from types import SimpleNamespace

import pytest
import torch
from engines import CHUNK, SETTINGS, SIZES, save
from safetensors.torch import save_file
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)
from vllm import SamplingParams
from vllm.lora.request import LoRARequest
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

from h2o_prefill import enable
from h2o_prefill.vllm import cpu, register, runner
from h2o_prefill.vllm.plan import Prompt
from h2o_prefill.vllm.state import PromptState

LENGTH = 7 * CHUNK + 45
# Of tests that depend on the scheduler alone.
on_one_device = pytest.mark.parametrize("device", ["cpu"], indirect=True, scope="module")


@pytest.fixture
def logged(monkeypatch):
    """Return what the plugin logs: vLLM sets up its loggers anew with its first engine."""
    lines = []
    for name in ("info", "warning", "warning_once"):
        monkeypatch.setattr(runner.logger, name, lambda text, *args: lines.append(text % args))
    return lines


@pytest.mark.parametrize("settings", [None, "exact"])
def test_steps_give_what_one_step_gives(make_engine, folder, tokens, device, settings):
    ids = tokens(LENGTH)
    budgets = (LENGTH + 8, 4 * CHUNK + 8, 2 * CHUNK + 77)
    answers = [
        make_engine(folder, max_num_batched_tokens=budget).ask(ids, settings=settings, losses=True)
        for budget in budgets
    ]
    # What stands in for FlashAttention sums other numbers of rows otherwise.
    close = 1e-4 if (device, settings) == ("cuda", "exact") else 0
    for other in answers[1:]:
        for name in ("losses", "logprobs"):
            pair = getattr(other, name), getattr(answers[0], name)
            torch.testing.assert_close(*pair, atol=close, rtol=close)


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


def save_adapter(folder, model, number):
    """Save a random LoRA adapter; return the request for it, and the model with it."""
    torch.manual_seed(number)
    path, weights = folder / str(number), {}
    for i, layer in enumerate(model.model.layers):
        for name in ("q_proj", "k_proj", "v_proj"):
            weight = getattr(layer.self_attn, name).weight
            a, b = 0.1 * torch.randn(8, weight.shape[1]), 0.1 * torch.randn(weight.shape[0], 8)
            weight.data += 2 * b @ a  # lora_alpha / r
            key = f"base_model.model.model.layers.{i}.self_attn.{name}"
            weights |= {f"{key}.lora_A.weight": a, f"{key}.lora_B.weight": b}
    path.mkdir()
    save_file(weights, path / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "bias": "none"}
    config["target_modules"] = ["q_proj", "k_proj", "v_proj"]
    (path / "adapter_config.json").write_text(json.dumps(config))
    return LoRARequest(str(number), number, str(path)), model


def test_each_adapter_has_states_of_its_own(make_engine, folder, tokens, tmp_path):
    options = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 2}
    engine, ids = make_engine(folder, **options), tokens(LENGTH)
    model = functools.partial(LlamaForCausalLM.from_pretrained, folder, dtype=torch.float32)
    adapted = [(None, model()), *(save_adapter(tmp_path, model(), number) for number in (1, 2))]
    hit = {"state_hits": 1, "sparse_tokens": LENGTH % 32}
    for expected in ({"sparse_tokens": LENGTH}, hit):
        for adapter, whole in adapted:
            answer, counted = engine.counted(ids, adapter=adapter)
            with enable(whole, SETTINGS):
                tokens_of = whole.generate(torch.tensor([ids]), max_new_tokens=4, do_sample=False)
            assert answer.tokens == tokens_of[0, LENGTH:].tolist() and counted == expected


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


@on_one_device
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


@on_one_device
def test_async_scheduling_stays_and_ends_steps_at_chunks(make_engine, folder, tokens):
    engine = make_engine(folder)  # Its platform would switch it off.
    took, config = engine.scheduler, engine.llm.llm_engine.vllm_config.scheduler_config
    assert type(took).__mro__[1:3] == (runner.ChunkScheduler, Scheduler)
    config.async_scheduling = True
    kind = type(config).get_scheduler_cls(config)
    same = ("vllm_config", "kv_cache_config", "structured_output_manager", "block_size")
    options = {name: getattr(took, name) for name in (*same, "hash_block_size")}
    scheduler = runner.chunked(kind)(**options)
    params = SamplingParams(max_tokens=4, extra_args={runner.SALT: None})
    hasher = engine.llm.llm_engine.engine_core.engine_core.request_block_hasher
    request = Request("a", tokens(LENGTH), params, None, block_hasher=hasher)
    scheduler.add_request(request)
    steps = [scheduler.schedule().num_scheduled_tokens["a"] for _ in range(3)]
    # The third step begins before the second has given a token.
    assert steps == [4 * CHUNK, LENGTH - 4 * CHUNK, 1] and request.num_output_placeholders == 2


@on_one_device
def test_only_ranks_of_one_model_are_refused(make_engine, folder, monkeypatch):
    config = make_engine(folder).llm.llm_engine.vllm_config
    monkeypatch.setattr(config.parallel_config, "data_parallel_size", 2)
    assert config.parallel_config.world_size_across_dp == 2 and runner.refused(config) is None
    monkeypatch.setattr(config.parallel_config, "world_size", 2)
    assert runner.refused(config) == "2 ranks"


@on_one_device
def test_steps_without_room_for_a_chunk_are_not_cut(make_engine, folder, tokens, logged):
    engine = make_engine(folder, max_num_batched_tokens=CHUNK)
    assert "have no room for a chunk of 128" in str(logged)
    assert "3 of 3 layers ours, steps are not cut" in str(logged)
    _, counted = engine.counted(tokens(LENGTH))
    assert counted == {"sparse_tokens": LENGTH}


@on_one_device
def test_a_request_that_comes_first_never_waits(make_engine, folder, tokens):
    scheduler = make_engine(folder).scheduler
    params = SimpleNamespace(extra_args={runner.SALT: None})
    request = SimpleNamespace(sampling_params=params, num_prompt_tokens=300, num_computed_tokens=0)
    for running, expected in ([], 92), ([request, None], 92), ([None, request], 0):
        scheduler.running = running
        assert scheduler._mamba_block_aligned_split(request, 92) == expected
    scheduler.running = []


@on_one_device
@pytest.mark.parametrize("kind", ["reset", "pause"])
def test_states_end_with_the_weights_that_made_them(make_engine, folder, tokens, kind):
    engine, shared = make_engine(folder), tokens(4 * CHUNK)
    first, second = (shared + tokens(CHUNK + 9, seed) for seed in (1, 2))
    before = engine.ask(first)
    engine.llm.apply_model(lambda model: [x.data.mul_(1.3) for x in model.parameters()])
    if kind == "reset":
        assert engine.llm.reset_prefix_cache()
    else:  # As before sleep.
        core = engine.llm.llm_engine.engine_core.engine_core
        core.pause_scheduler("abort", clear_cache=True)
        core.resume_scheduler()
    assert engine.planner.checkpoints.nbytes == 0
    assert not engine.ask(first).logprobs.allclose(before.logprobs, atol=0.1)
    found = engine.ask(second)
    engine.forget()
    alone = engine.ask(second)
    assert found.cached == 4 * CHUNK and found.logprobs.equal(alone.logprobs)


@on_one_device
def test_pages_that_do_not_divide_a_chunk_are_told(make_engine, folder, tokens, logged):
    engine = make_engine(folder, block_size=96)
    assert "pages of 96 tokens do not divide a chunk of 128" in str(logged)
    engine.ask(tokens(LENGTH))
    assert engine.ask(tokens(LENGTH - CHUNK) + tokens(2 * CHUNK, 1)).cached == 6 * CHUNK


def test_without_settings_the_plugin_does_nothing(monkeypatch, logged):
    monkeypatch.delenv("H2O_PREFILL_SETTINGS")
    monkeypatch.setattr(runner, "install", None)
    register.__wrapped__()
    assert logged == ["h2o_prefill: H2O_PREFILL_SETTINGS is not set: it does nothing"]


@on_one_device
def test_pages_of_another_layout_stay_vllms(make_engine, folder, tokens, monkeypatch, logged):
    pages_of = cpu.Attention.pages_of
    other = staticmethod(lambda cache: [x.flip(3) for x in pages_of(cache)])
    monkeypatch.setattr(cpu.Attention, "pages_of", other)
    engine = make_engine(folder)
    assert "pages of another layout: attention stays vLLM's" in str(logged)
    answer, counted = engine.counted(tokens(LENGTH))
    assert counted == {} and type(engine.scheduler) is Scheduler
    assert answer.tokens == engine.ask(tokens(LENGTH), settings="dense").tokens


@pytest.mark.parametrize("kind", ["windows", "softcap", "hybrid"])
def test_models_that_are_refused_stay_vllms(make_engine, tmp_path, tokens, kind, logged):
    if kind == "windows":
        save(tmp_path, MistralConfig(**SIZES, sliding_window=200), MistralForCausalLM)
    elif kind == "softcap":
        sizes = {**SIZES, "tie_word_embeddings": True}
        save(tmp_path, Gemma2Config(**sizes, query_pre_attn_scalar=32), Gemma2ForCausalLM)
    else:
        layers = ["conv", "full_attention", "conv"]
        sizes = {**SIZES, "layer_types": layers, "conv_dim": 128, "block_dim": 128}
        save(tmp_path, Lfm2Config(**sizes), Lfm2ForCausalLM)
    engine = make_engine(tmp_path)
    assert "attention stays vLLM's" in str(logged)
    assert "0 of 3 layers ours, all is vLLM's" in str(logged)
    assert type(engine.scheduler) is Scheduler
    shared, core = tokens(704), engine.llm.llm_engine
    params = SamplingParams(temperature=0, max_tokens=1, detokenize=False)
    for number, length in enumerate((200, 300)):
        prompt = {"prompt_token_ids": shared + tokens(length, number)}
        core.add_request(str(number), prompt, params)
        for _ in range(20):
            core.step()
        assert not core.has_unfinished_requests()
    # Settings do not part the pages, and chunks do not shorten what is found of them.
    answer, counted = engine.counted(tokens(LENGTH), settings=SETTINGS)
    dense = engine.ask(tokens(LENGTH), settings="dense")
    assert counted == {} and answer.tokens == dense.tokens
    if kind != "hybrid":
        assert dense.cached == LENGTH // 32 * 32
    torch.testing.assert_close(answer.logprobs, dense.logprobs, atol=1e-4, rtol=1e-4)
