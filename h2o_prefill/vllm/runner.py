"""Where this library enters vLLM: admission of requests, scheduler and steps of the model runner.

vLLM has no hooks for most of what is needed here, so functions of it are wrapped. Of its two model
runners, V2 has a hook for steps: the state of a model. An engine without a layer of ours keeps
vLLM's scheduler, and its requests keep their keys.
"""

from __future__ import annotations

import copy
import functools
import os
from collections.abc import Iterable, Mapping
from typing import Any

from vllm.config import get_layers_from_vllm_config
from vllm.entrypoints.serve.engine.serving import BaseServing
from vllm.exceptions import VLLMValidationError
from vllm.logger import init_logger
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.platforms import current_platform
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.core import EngineCore
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.worker.gpu import model_states
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from h2o_prefill import __version__, vocabulary
from h2o_prefill.config import sparse_cost
from h2o_prefill.vllm.counters import Counters, shared_path
from h2o_prefill.vllm.plan import EXACT, Choice, Planner, Prompt, Row, Rules, is_too_short
from h2o_prefill.vllm.state import Checkpoints

# Below "vllm", whose handlers show it.
logger = init_logger("vllm.h2o_prefill")

# The settings of a request among its extra arguments, and the salt that its client gave.
SETTINGS, SALT = "h2o_prefill", "h2o_prefill_salt"

# Drafts without layers of attention; on CUDA also those whose layers have numbers of their own.
DRAFTS, CUDA_DRAFTS = ("ngram",), ("ngram", "eagle", "eagle3", "mtp")
# KV connectors that hash salts as well: others would give pages to other settings.
CONNECTORS = (
    None,
    "NixlConnector",
    "NixlPullConnector",
    "NixlPushConnector",
    "OffloadingConnector",
)
# With fewer query heads a chunk does not fill a GPU.
LEAST_HEADS = 16


def on_cuda() -> bool:
    """Return whether vLLM's FlashAttention is there, whose dense rows stay its own."""
    return bool(current_platform.is_cuda())


@functools.cache
def rules() -> Rules:
    """Return the rules of this engine, from its environment."""
    try:
        return Rules(os.environ["H2O_PREFILL_SETTINGS"], takes_dense=not on_cuda())
    except ValueError as error:
        raise ValueError(f"H2O_PREFILL_SETTINGS: {error}") from None


def checkpoint_bytes(cache_config: Any = None) -> int:
    """Return how many bytes of states are kept for prefixes: none where none are found again."""
    text = os.environ.get("H2O_PREFILL_CHECKPOINTS") or "512"
    if not text.isdecimal():
        raise ValueError(f"H2O_PREFILL_CHECKPOINTS must be a number of MiB, got {text!r}")
    is_cached = cache_config is None or cache_config.enable_prefix_caching
    return int(text) << 20 if is_cached else 0


def check(settings: object, model_config: Any) -> Choice:
    """Return the choice of a request for these settings; vLLM's error with one line if wrong."""
    try:
        choice = rules().choice(settings)
        if choice.config is not None:
            choice.config.check_fits(model_config.get_total_num_hidden_layers())
    except ValueError as error:
        raise VLLMValidationError(f"h2o_prefill: {error}") from None
    return choice


def choice_of(params: Any) -> Choice:
    """Return the choice of an admitted request by its sampling parameters: pooling has none."""
    extra = getattr(params, "extra_args", None) or {}
    return rules().choice(extra.get(SETTINGS)) if SALT in extra else Choice(None)


def first_of(reasons: Mapping[str, object]) -> str | None:
    """Return the first reason that holds, None if there is none."""
    return next((reason for reason, holds in reasons.items() if holds), None)


def refused(vllm_config: Any) -> str | None:
    """Return why an engine's attention stays vLLM's, None if it does not."""
    parallel, drafts = vllm_config.parallel_config, vllm_config.speculative_config
    model, transfer = vllm_config.model_config, vllm_config.kv_transfer_config
    ranks, heads = parallel.world_size, model.get_num_attention_heads(parallel)
    connector = transfer and transfer.kv_connector
    known = CUDA_DRAFTS if on_cuda() else DRAFTS
    reasons = {
        "a draft model": drafts is not None and drafts.method not in known,
        "recurrent layers, whose cached states end steps elsewhere": (
            vllm_config.cache_config.mamba_cache_mode == "align"
        ),
        f"{ranks} ranks": ranks > 1 and not on_cuda(),
        "pipeline or context parallel": ranks > parallel.tensor_parallel_size
        or parallel.decode_context_parallel_size > 1,
        f"{heads} query heads a rank": ranks > 1 and heads < LEAST_HEADS,
        "micro-batches": parallel.use_ubatching,
        f"the KV connector {connector}": connector not in CONNECTORS,
        "reference sliding windows": model.rswa_window is not None,
    }
    return first_of(reasons)


def room_of(vllm_config: Any) -> int:
    """Return what a step has for a prompt: decoding requests take a token and drafts each."""
    config, drafts = vllm_config.scheduler_config, vllm_config.num_speculative_tokens
    most = config.max_num_scheduled_tokens or config.max_num_batched_tokens
    room = most - config.max_num_seqs * (1 + drafts)
    return max(0, min(room, config.long_prefill_token_threshold or room))


class ChunkScheduler(Scheduler):
    """vLLM's scheduler, whose prefill steps and prefix hits end at multiples of the chunk size."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._splits_mamba = self.need_mamba_block_aligned_split
        chunk, room = rules().chunk_size, room_of(self.vllm_config)
        self._cuts = room >= chunk
        self.need_mamba_block_aligned_split |= self._cuts
        if not self._cuts:
            logger.warning(
                "h2o_prefill: steps of %d tokens have no room for a chunk of %d and are not cut: "
                "results depend on the batch, and prefixes have no states", room, chunk
            )  # fmt: skip
        if self.cache_config.enable_prefix_caching and chunk % self.block_size:
            logger.warning(
                "h2o_prefill: pages of %d tokens do not divide a chunk of %d: cached prefixes of "
                "sparse requests end at multiples of both", self.block_size, chunk
            )  # fmt: skip

    def _mamba_block_aligned_split(
        self, request: Any, num_new_tokens: int, local: int = 0, external: int = 0
    ) -> int:
        """Return how many of the tokens of a step to take: vLLM calls it for all models then."""
        if self._splits_mamba:
            num_new_tokens = super()._mamba_block_aligned_split(
                request, num_new_tokens, local, external
            )
        choice, length = choice_of(request.sampling_params), request.num_prompt_tokens
        if not (self._cuts and rules().takes(choice, length)):
            return num_new_tokens
        past = request.num_computed_tokens + local + external
        cut = rules().end_of_step(past, past + num_new_tokens, length) - past
        # Who comes first does not wait for others, so it would wait for ever.
        is_first = not self.running or self.running[0] is request
        return cut or (num_new_tokens if is_first else 0)

    def _get_local_prefix_cache_hit(self, request: Any, *args: Any, **more: Any) -> Any:
        first = super()._get_local_prefix_cache_hit(request, *args, **more)
        blocks, length, boundary, diverged = first
        manager = self.kv_cache_manager
        choice = choice_of(request.sampling_params)
        while (end := rules().end_of_hit(choice, length, request.num_prompt_tokens)) < length:
            # Groups with windows may have a shorter hit elsewhere, so vLLM looks again.
            hit, length, _ = manager.coordinator.find_longest_cache_hit(request.block_hashes, end)
            blocks = manager.create_kv_cache_blocks(hit)
        return blocks, length, boundary, diverged


def chunked(kind: type) -> type:
    """Return the scheduler above over the class that vLLM takes, as for async scheduling."""
    return type("ChunkScheduler", (ChunkScheduler, kind), {})


class Steps:
    """The steps of a model runner, whose requests are these by name."""

    def __init__(self, vllm_config: Any, requests: Mapping[str, Any]) -> None:
        self._model_config, self._requests = vllm_config.model_config, requests
        self._batch: list[str] = []
        self._lengths: list[int] = []
        self._prompts: dict[str, Prompt] = {}
        self._rows: list[Row] | None = None
        ranks = vllm_config.parallel_config.world_size
        checkpoints = Checkpoints(checkpoint_bytes(vllm_config.cache_config), ranks)
        # The ranks of a model count the same.
        counters = Counters(shared_path() if vllm_config.parallel_config.rank == 0 else None)
        # In CUDA graphs of decoding, drafts included, no other attention is called.
        decoded = 1 + vllm_config.num_speculative_tokens if on_cuda() else 0
        self.planner = Planner(rules(), checkpoints, counters, self._token_text, decoded)

    def begin(self, batch: Iterable[str], lengths: Iterable[int]) -> None:
        """Take note of a step: the requests in the order of its batch, and their new tokens."""
        self._batch, self._lengths, self._rows = list(batch), list(lengths), None

    def forget(self, request: str) -> None:
        """Drop what is held of a request that has ended: another may come under its name."""
        self.planner.forget(request)
        self._prompts.pop(request, None)

    def rows(self, lengths: list[int], totals: list[int]) -> list[Row]:
        """Return our rows of the step; `lengths` are the tokens of each request in the batch.

        There are none in a batch that is not the step's, as those that warm a model up.
        """
        if lengths != self._lengths or self.planner.is_idle(lengths):
            return []
        if self._rows is None:  # One plan for all groups of layers.
            pasts = (total - length for total, length in zip(totals, lengths, strict=True))
            prompts = map(self._prompt, self._batch)
            self._rows = self.planner.plan(zip(prompts, pasts, totals, strict=True))
        return self._rows

    def _prompt(self, request: str) -> Prompt | None:
        held = self._requests.get(request)
        if held is None:
            return None  # It only warms a model up.
        tokens = held.prompt_token_ids
        if tokens is None or held.prompt_is_token_ids is not None:
            return None  # Embeddings.
        known = self._prompts.get(request)
        if known is None or len(known.tokens) != len(tokens):
            choice, lora = choice_of(held.sampling_params), held.lora_request
            salt = held.sampling_params.extra_args[SALT] if choice.text else None
            owner = repr((lora and (lora.lora_name, lora.lora_path), salt))
            images = [(x.mm_position.offset, x.identifier) for x in held.mm_features or ()]
            known = Prompt(request, tokens, choice, owner, images)
            self._prompts[request] = known
        return known

    def _token_text(self) -> Any:
        if self._model_config.skip_tokenizer_init:
            return None
        from vllm.tokenizers import cached_tokenizer_from_config

        return vocabulary.token_text(cached_tokenizer_from_config(self._model_config))


# The steps of the runner that began one last, which all builders of this process are called by;
# None where all of them are vLLM's.
current: Steps | None = None


def with_steps(kind: Any) -> Any:
    """Return a class of model states whose hooks, which model runner V2 calls, note the steps."""

    class State(kind):
        def __init__(self, vllm_config: Any, *args: Any) -> None:
            super().__init__(vllm_config, *args)
            self._requests: dict[str, Any] = {}
            self.h2o_prefill = Steps(vllm_config, self._requests)

        def add_request(self, req_index: int, new_req_data: Any) -> None:
            super().add_request(req_index, new_req_data)
            self._requests[new_req_data.req_id] = new_req_data

        def remove_request(self, req_id: str) -> None:
            super().remove_request(req_id)
            self._requests.pop(req_id, None)
            self.h2o_prefill.forget(req_id)

        def prepare_attn(self, input_batch: Any, *args: Any, **more: Any) -> Any:
            global current
            current = self.h2o_prefill
            current.begin(input_batch.req_ids, input_batch.num_scheduled_tokens.tolist())
            return super().prepare_attn(input_batch, *args, **more)

    return State


def reset(worker: Any) -> None:
    """Drop the states of a worker."""
    runner = worker.model_runner
    steps = getattr(getattr(runner, "model_state", runner), "h2o_prefill", None)
    if steps is not None:
        steps.planner.reset()


def layers_of(worker: Any) -> tuple[int, int, float]:
    """Return how many layers of a worker are ours, how many have a cache, and its sparse cost."""
    layers = get_layers_from_vllm_config(worker.vllm_config, AttentionLayerBase).values()
    kinds = [getattr(layer, "impl", None) for layer in layers]
    for name in {type(x).__name__ for x in kinds if x and not hasattr(x, "is_ours")}:
        logger.warning_once("h2o_prefill: %s: attention stays vLLM's", name)
    cost = sparse_cost(worker.device, worker.vllm_config.model_config.dtype)
    return sum(getattr(x, "is_ours", False) for x in kinds), len(kinds), cost


def install() -> None:
    """Wrap the functions of vLLM, once in each process."""
    process, check_model = InputProcessor.process_inputs, BaseServing._check_model
    initialize, admit = EngineCore._initialize_kv_caches, EngineCore.preprocess_add_request
    reset_cache, update = EngineCore.reset_prefix_cache, GPUModelRunner._update_states
    state_of = model_states.resolve_model_state_cls

    @functools.wraps(process)
    def process_inputs(
        self: Any, request_id: str, prompt: Any, params: Any, *args: Any, **more: Any
    ) -> Any:
        check((getattr(params, "extra_args", None) or {}).get(SETTINGS), self.model_config)
        return process(self, request_id, prompt, params, *args, **more)

    @functools.wraps(check_model)
    async def check_request(self: Any, request: Any) -> Any:
        # Before a stream begins; where vLLM drops what it does not know, settings are refused.
        own = getattr(getattr(request, "sampling_params", None), "extra_args", None)
        asked = (own or getattr(request, "vllm_xargs", None) or {}).get(SETTINGS)
        known = {"vllm_xargs", "sampling_params"} & type(request).model_fields.keys()
        if asked is not None and (not known or getattr(request, "use_beam_search", False)):
            return self.create_error_response(
                "h2o_prefill: requests of this kind, as beam search, have no settings of their own"
            )
        try:
            check(asked, self.model_config)
        except VLLMValidationError as error:
            return self.create_error_response(error)
        return await check_model(self, request)

    @functools.wraps(initialize)
    def initialize_kv_caches(self: Any, vllm_config: Any) -> Any:
        # The layers are made, the scheduler is not.
        result = initialize(self, vllm_config)
        # The ranks of one model have parts of the same layers.
        ours, layers, cost = self.model_executor.collective_rpc(layers_of)[0]
        self.h2o_prefill, self.h2o_prefill_cost = ours > 0, cost
        check(None, vllm_config.model_config)
        scheduler, size = vllm_config.scheduler_config, rules().chunk_size
        cut = "" if scheduler.scheduler_cls is None and room_of(vllm_config) >= size else "not "
        if ours and scheduler.scheduler_cls is None:
            kind = chunked(type(scheduler).get_scheduler_cls(scheduler))
            scheduler.get_scheduler_cls = lambda: kind
        kept = checkpoint_bytes(vllm_config.cache_config) >> 20
        told = f"steps are {cut}cut, up to {kept} MiB of states" if ours else "all is vLLM's"
        logger.info(
            "h2o_prefill %s: settings %s, chunks of %d tokens, %d of %d layers ours, %s",
            __version__, os.environ["H2O_PREFILL_SETTINGS"], size, ours, layers, told
        )  # fmt: skip
        return result

    @functools.wraps(admit)
    def preprocess_add_request(self: Any, request: Any) -> Any:
        if self.h2o_prefill and request.sampling_params is not None:
            # Sparse requests share pages with the same settings. Beams share their parameters.
            request.sampling_params = own = copy.copy(request.sampling_params)
            extra = own.extra_args = {**(own.extra_args or {}), SALT: request.cache_salt}
            choice, ids = rules().choice(extra.get(SETTINGS)), request.prompt_token_ids or ()
            if is_too_short(choice, len(ids), self.h2o_prefill_cost):
                choice, extra[SETTINGS] = rules().choice(EXACT), EXACT
            if choice.text:
                request.cache_salt = f"{request.cache_salt or ''}\n{SETTINGS}:{choice.text}"
        return admit(self, request)

    @functools.wraps(reset_cache)
    def reset_prefix_cache(self: Any, *args: Any, **more: Any) -> bool:
        done: bool = reset_cache(self, *args, **more)
        if done:
            self.model_executor.collective_rpc(reset)
        return done

    @functools.wraps(update)
    def update_states(self: Any, scheduler_output: Any) -> Any:
        global current
        result, out = update(self, scheduler_output), scheduler_output
        if not hasattr(self, "h2o_prefill"):
            is_ours = not refused(self.vllm_config)
            self.h2o_prefill = Steps(self.vllm_config, self.requests) if is_ours else None
        current = self.h2o_prefill
        if current is not None:
            for request in out.finished_req_ids:
                current.forget(request)
            batch = self.input_batch.req_ids
            current.begin(batch, [out.num_scheduled_tokens[x] for x in batch])
        return result

    @functools.wraps(state_of)
    def resolve_model_state_cls(vllm_config: Any, model: Any) -> Any:
        kind = state_of(vllm_config, model)
        return kind if refused(vllm_config) else with_steps(kind)

    InputProcessor.process_inputs = process_inputs
    BaseServing._check_model = check_request
    EngineCore._initialize_kv_caches = initialize_kv_caches
    EngineCore.preprocess_add_request = preprocess_add_request
    EngineCore.reset_prefix_cache = reset_prefix_cache
    GPUModelRunner._update_states = update_states
    model_states.resolve_model_state_cls = resolve_model_state_cls
