"""The names and signatures of vLLM that the plugin uses.

vLLM's inside has no stable interface, so `problem` looks them up before anything is wrapped.
"""

from __future__ import annotations

import importlib
import inspect
import re
from typing import Any

# The oldest and the newest minor version that the plugin is tested with.
TESTED = (0, 30), (0, 33)

# Names by module or class, of all devices and of one, functions with their parameters: exactly
# these, or more after them, "..." with defaults, where the plugin calls, or "*" any, where its
# wrapper passes them on.
USED = {
    "vllm.config": """get_layers_from_vllm_config(vllm_config, layer_type, layer_names, ...)
        get_current_vllm_config(...)""",
    "vllm.config:VllmConfig": """cache_config model_config parallel_config scheduler_config
        speculative_config num_speculative_tokens kv_transfer_config""",
    "vllm.config:ParallelConfig": """world_size rank tensor_parallel_size use_ubatching
        decode_context_parallel_size""",
    "vllm.config:KVTransferConfig": "kv_connector",
    "vllm.config:SpeculativeConfig": "method",
    "vllm.config:CacheConfig": "enable_prefix_caching mamba_cache_mode",
    "vllm.config:ModelConfig": """dtype skip_tokenizer_init rswa_window
        get_total_num_hidden_layers(self, ...)
        get_num_attention_heads(self, parallel_config, ...)""",
    "vllm.config:SchedulerConfig": """max_num_scheduled_tokens max_num_batched_tokens max_num_seqs
        long_prefill_token_threshold scheduler_cls get_scheduler_cls(self)""",
    "vllm.entrypoints.serve.engine.serving:BaseServing": """_check_model(self, request)
        create_error_response(message, ...)""",
    "vllm.exceptions": "VLLMValidationError(message, ...)",
    "vllm.tokenizers": "cached_tokenizer_from_config(model_config, ...)",
    "vllm.model_executor.layers.attention:Attention": "impl layer_name",
    "vllm.model_executor.layers.attention_layer_base": "AttentionLayerBase",
    "vllm.utils.torch_utils": "async_tensor_h2d(data, device, dtype, ...)",
    "vllm.model_executor.models.utils": "extract_layer_index(layer_name, ...)",
    "vllm.v1.core.sched.scheduler:Scheduler": """vllm_config cache_config block_size running
        kv_cache_manager need_mamba_block_aligned_split
        _get_local_prefix_cache_hit(self, request, *)
        _mamba_block_aligned_split(self, request, num_new_tokens, num_new_local_computed_tokens,
        num_external_computed_tokens)""",
    "vllm.v1.request:Request": """sampling_params num_prompt_tokens num_computed_tokens
        block_hashes""",
    "vllm.v1.core.kv_cache_manager:KVCacheManager": """coordinator
        create_kv_cache_blocks(self, blocks, ...)""",
    "vllm.v1.core.kv_cache_coordinator:KVCacheCoordinator": """
        find_longest_cache_hit(self, block_hashes, max_cache_hit_length, ...)""",
    "vllm.v1.core.sched.output:SchedulerOutput": "finished_req_ids num_scheduled_tokens",
    "vllm.v1.core.sched.output:NewRequestData": """req_id prompt_token_ids prompt_is_token_ids
        sampling_params lora_request mm_features""",
    "vllm.v1.engine:EngineCoreRequest": "prompt_token_ids sampling_params cache_salt",
    "vllm.v1.engine.core:EngineCore": """vllm_config model_executor
        _initialize_kv_caches(self, vllm_config) preprocess_add_request(self, request)
        reset_prefix_cache(self, *)""",
    "vllm.v1.engine.input_processor:InputProcessor": """model_config
        process_inputs(self, request_id, prompt, params, *)""",
    "vllm.v1.worker.gpu.input_batch:InputBatch": "req_ids num_scheduled_tokens",
    "vllm.v1.worker.gpu.model_states": "resolve_model_state_cls(vllm_config, model)",
    "vllm.v1.worker.gpu.model_states.interface:ModelState": """__init__(self, vllm_config, *)
        add_request(self, req_index, new_req_data) remove_request(self, req_id)
        prepare_attn(self, input_batch, *)""",
    "vllm.v1.worker.gpu_input_batch:CachedRequestState": """prompt_token_ids prompt_is_token_ids
        sampling_params lora_request mm_features""",
    "vllm.v1.worker.worker_base:WorkerBase": "device",
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner": """vllm_config requests input_batch
        _update_states(self, scheduler_output)""",
    "vllm.v1.attention.backend:AttentionType": "DECODER",
    "vllm.v1.attention.backend:CommonAttentionMetadata": """query_start_loc query_start_loc_cpu
        seq_lens seq_lens_cpu_upper_bound num_reqs num_actual_tokens max_query_len
        block_table_tensor slot_mapping causal mm_req_doc_ranges replace(self, *)""",
    "vllm.v1.attention.backends.registry": "register_backend(backend, class_path, ...)",
}
CPU = {
    "vllm.v1.attention.backends.cpu_attn:CPUAttentionBackend": "get_impl_cls() get_builder_cls()",
    "vllm.v1.attention.backends.cpu_attn:CPUAttentionMetadataBuilder": """isa dtype kv_cache_spec
        vllm_config layer_names
        build(self, common_prefix_len, common_attn_metadata, fast_build)""",
    "vllm.v1.attention.backends.cpu_attn:CPUAttentionBackendImpl": """scale attn_type sinks
        kv_cache_dtype alibi_slopes sliding_window logits_soft_cap
        forward(self, layer, query, key, value, kv_cache, attn_metadata, output, *)""",
    "vllm.v1.attention.backends.registry:AttentionBackendEnum": "CPU_ATTN",
    "vllm._custom_ops": """cpu_attn_reshape_and_cache(key, value, key_cache, value_cache,
        slot_mapping, isa, k_scale, v_scale, kv_cache_dtype, ...)""",
}
CUDA = {
    "vllm.v1.attention.backend:AttentionCGSupport": "UNIFORM_BATCH",
    "vllm.v1.attention.backends.flash_attn:FlashAttentionBackend": """get_impl_cls()
        get_builder_cls()""",
    "vllm.v1.attention.backends.flash_attn:FlashAttentionMetadataBuilder": """kv_cache_spec
        vllm_config layer_names supports_update_block_table
        get_cudagraph_support(vllm_config, kv_cache_spec)
        build(self, common_prefix_len, common_attn_metadata, fast_build)""",
    "vllm.v1.attention.backends.flash_attn:FlashAttentionImpl": """scale head_size attn_type sinks
        kv_cache_dtype alibi_slopes sliding_window logits_soft_cap
        forward(self, layer, query, key, value, kv_cache, attn_metadata, output, *)""",
    "vllm.v1.attention.backends.registry:AttentionBackendEnum": "FLASH_ATTN",
}
OF_DEVICE = {"cpu": CPU, "cuda": CUDA}

# A name, and in parentheses its parameters.
NAME = re.compile(r"(\w+)(\(([^)]*)\))?")


def problem(device: str) -> str | None:
    """Return which name is missing or which signature has changed; None if all is there."""
    for place, names in (USED | OF_DEVICE[device]).items():
        module, _, kind = place.partition(":")
        shown = place.replace(":", ".")
        try:
            owner: Any = importlib.import_module(module)
            owner = getattr(owner, kind) if kind else owner
        except (ImportError, AttributeError):
            return f"{shown} is missing"
        for name, call, parameters in NAME.findall(names):
            if not _has(owner, name):
                return f"{shown}.{name} is missing"
            if call and (got := _other_signature(getattr(owner, name), parameters)):
                return f"{shown}.{name} takes {got}, expected ({' '.join(parameters.split())})"
    return None


def _has(owner: Any, name: str) -> bool:
    """Return whether a module or a class has a name; fields and attributes of objects count."""
    inits = (vars(kind).get("__init__") for kind in getattr(owner, "__mro__", ()))
    codes = (getattr(inspect.unwrap(init), "__code__", None) for init in inits if init)
    is_set = any(name in code.co_names for code in codes if code)
    return is_set or hasattr(owner, name) or name in getattr(owner, "__dataclass_fields__", ())


def _other_signature(function: Any, expected: str) -> str | None:
    """Return the parameters of a function, None if they are those that are expected."""
    actual = list(inspect.signature(function).parameters.values())
    names = re.findall(r"\w+|\.\.\.|\*", expected)
    more = names.pop() if names[-1:] in (["..."], ["*"]) else ""
    rest = actual[len(names) :]
    variadic = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    optional = all(x.default is not x.empty or x.kind in variadic for x in rest)
    fits = {"": not rest, "...": optional, "*": True}[more]
    if fits and [x.name for x in actual[: len(names)]] == names:
        return None
    return f"({', '.join(x.name for x in actual)})"
