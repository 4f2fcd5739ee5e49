"""Where this library enters vLLM: admission of requests, scheduler and steps of the model runner.

vLLM has no hooks for most of what is needed here, so functions of it are wrapped. Of its two model
runners, V2 has a hook for steps: the state of a model.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from vllm.config import SchedulerConfig
from vllm.exceptions import VLLMValidationError
from vllm.logger import init_logger
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.worker.gpu import model_states
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from h2o_prefill import vocabulary
from h2o_prefill.vllm.counters import Counters, shared_folder
from h2o_prefill.vllm.plan import EXACT, Choice, Planner, Prompt, Row, Rules, is_too_short
from h2o_prefill.vllm.state import Checkpoints

# Below "vllm", whose handlers show it.
logger = init_logger("vllm.h2o_prefill")

# The settings of a request among its extra arguments, and the salt that its client gave.
SETTINGS, SALT = "h2o_prefill", "h2o_prefill_salt"


@functools.cache
def rules() -> Rules:
    """Return the rules of this engine, from its environment."""
    try:
        return Rules(os.environ.get("H2O_PREFILL_SETTINGS") or EXACT)
    except ValueError as error:
        raise ValueError(f"H2O_PREFILL_SETTINGS: {error}") from None


def checkpoint_bytes() -> int:
    """Return how many bytes of states are kept for prefixes."""
    text = os.environ.get("H2O_PREFILL_CHECKPOINTS") or "512"
    if not text.isdecimal():
        raise ValueError(f"H2O_PREFILL_CHECKPOINTS must be a number of MiB, got {text!r}")
    return int(text) << 20


def choice_of(params: Any) -> Choice:
    """Return the choice of an admitted request by its sampling parameters: pooling has none."""
    extra = getattr(params, "extra_args", None) or {}
    return rules().choice(extra.get(SETTINGS)) if SALT in extra else Choice(None)


def refused(vllm_config: Any) -> str | None:
    """Return why an engine's attention stays vLLM's, None if it does not."""
    ranks, drafts = vllm_config.parallel_config.world_size_across_dp, vllm_config.speculative_config
    if drafts is not None and drafts.method != "ngram":
        return "a draft model"  # whose layers have the numbers of others
    return f"{ranks} ranks" if ranks > 1 else None


class ChunkScheduler(Scheduler):
    """vLLM's scheduler, whose prefill steps and prefix hits end at multiples of the chunk size."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._splits_mamba = self.need_mamba_block_aligned_split
        if (default := rules().default.config) is not None:
            default.check_fits(self.vllm_config.model_config.get_total_num_hidden_layers())
        config, chunk = self.scheduler_config, rules().chunk_size
        most = min(
            self.max_num_scheduled_tokens - self.max_num_running_reqs * (1 + self.num_spec_tokens),
            config.long_prefill_token_threshold or self.max_num_scheduled_tokens,
        )
        # Decoding requests take a token and drafts: a step must still have room for a chunk.
        self._cuts = most >= chunk
        self.need_mamba_block_aligned_split |= self._cuts
        if not self._cuts:
            logger.warning(
                "h2o_prefill: steps of %d tokens have no room for a chunk of %d and are not cut: "
                "results depend on the batch, and prefixes have no states", max(most, 0), chunk
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
        return rules().end_of_step(past, past + num_new_tokens, length) - past

    def _get_local_prefix_cache_hit(self, request: Any) -> Any:
        blocks, length, boundary, diverged = super()._get_local_prefix_cache_hit(request)
        manager = self.kv_cache_manager
        choice = choice_of(request.sampling_params)
        while (end := rules().end_of_hit(choice, length, request.num_prompt_tokens)) < length:
            # Groups with windows may have a shorter hit elsewhere, so vLLM looks again.
            hit, length, _ = manager.coordinator.find_longest_cache_hit(request.block_hashes, end)
            blocks = manager.create_kv_cache_blocks(hit)
        return blocks, length, boundary, diverged


class Steps:
    """The steps of a model runner, whose requests are these by name."""

    def __init__(self, model_config: Any, requests: Mapping[str, Any]) -> None:
        self._model_config, self._requests = model_config, requests
        self._batch: list[str] = []
        self._lengths: list[int] = []
        self._prompts: dict[str, Prompt] = {}
        self._rows: list[Row] | None = None
        checkpoints, counters = Checkpoints(checkpoint_bytes()), Counters(shared_folder())
        self.planner = Planner(rules(), checkpoints, counters, self._token_text)

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
        if lengths != self._lengths:
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
            self.h2o_prefill = Steps(vllm_config.model_config, self._requests)

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


def install() -> None:
    """Wrap the functions of vLLM, once in each process."""
    process = InputProcessor.process_inputs
    scheduler_of, update = SchedulerConfig.get_scheduler_cls, GPUModelRunner._update_states
    state_of = model_states.resolve_model_state_cls

    @functools.wraps(process)
    def process_inputs(
        self: Any, request_id: str, prompt: Any, params: Any, *args: Any, **more: Any
    ) -> Any:
        # Unknown settings are refused here. Sparse requests share pages with the same settings.
        try:
            choice = rules().choice((getattr(params, "extra_args", None) or {}).get(SETTINGS))
            if choice.config is not None:
                choice.config.check_fits(self.model_config.get_total_num_hidden_layers())
        except ValueError as error:
            raise VLLMValidationError(f"h2o_prefill: {error}") from None
        request = process(self, request_id, prompt, params, *args, **more)
        if (own := request.sampling_params) is not None:
            own.extra_args = {**(own.extra_args or {}), SALT: request.cache_salt}
            like = torch.empty(0, dtype=self.model_config.dtype)
            if is_too_short(choice, len(request.prompt_token_ids or ()), like):
                choice, own.extra_args[SETTINGS] = rules().choice(EXACT), EXACT
            if choice.text:
                request.cache_salt = f"{request.cache_salt or ''}\n{SETTINGS}:{choice.text}"
        return request

    @functools.wraps(scheduler_of)
    def get_scheduler_cls(self: Any) -> Any:
        return ChunkScheduler if self.scheduler_cls is None else scheduler_of(self)

    @functools.wraps(update)
    def update_states(self: Any, scheduler_output: Any) -> Any:
        global current
        result, out = update(self, scheduler_output), scheduler_output
        if not hasattr(self, "h2o_prefill"):
            is_ours = not refused(self.vllm_config)
            self.h2o_prefill = Steps(self.model_config, self.requests) if is_ours else None
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
    SchedulerConfig.get_scheduler_cls = get_scheduler_cls
    GPUModelRunner._update_states = update_states
    model_states.resolve_model_state_cls = resolve_model_state_cls
