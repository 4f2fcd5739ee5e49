"""Make the config of any Hugging Face model tiny: few layers, narrow, with a small vocabulary."""

import inspect
import re
from typing import Any

from transformers import PreTrainedConfig

VOCABULARY = 128
# Ids that no config gives a meaning: special tokens get those below and above.
ORDINARY_IDS = (8, 88)
WIDTH = 64
HEADS = 4
HEAD_DIM = 16
WINDOW = 24
LONGEST = 256
_MOST_LAYERS = 5

# Fields by the whole name, the first rule that fits. Only fields with whole numbers are changed.
_RULES: tuple[tuple[str, int], ...] = (
    (r"pad_token_id", 0),
    (r"(bos|decoder_start)_token_id", 1),
    (r"(eos|sep)_token_id", 2),
    (r"(\w+_)?vocab_size(_\w+)?|\w+_vocab|ngram_vocab_size_base", VOCABULARY),
    (r"qk_(rope|nope)_head_dim|rotary_dim|d_rel", HEAD_DIM // 2),
    (
        r"(\w+_)?head_dim|d_kv|kv_channels|dim_head|attention_head_size|mamba_d_head|"
        r"attention_head_dim|q_head_dim",
        HEAD_DIM,
    ),
    (r"linear_num_value_heads|linear_num_heads", HEADS),
    (r"(\w+_)?(num_key_value_heads|num_kv_heads)|kv_n_heads|linear_num_key_heads", HEADS // 2),
    (
        r"(\w+_)?num_attention_heads|\w*attention_heads|n_head|n_heads|num_heads|index_n_heads|"
        r"resampler_n_heads",
        HEADS,
    ),
    (
        r"(\w+_)?hidden_size(_global)?|(\w+_)?d_model|n_embd|(\w+_)?embed_dim|emb_dim|"
        r"embedding_size|word_embed_proj_dim|attention_hidden_size|lru_width|output_dim|"
        r"(\w+_)?hidden_dim|classifier_proj_size|projection_dim|unified_\w*dim|adapter_out_dim|"
        r"channels_last_dim|vision_output_dim|shared_intermediate_size|mm_embed_dim",
        WIDTH,
    ),
    (
        r"(\w+_)?intermediate_size(_mlp)?|\w*ffn_dim|\w*ffn_hidden_size|d_ff|dff|dim_ff|mlp_dim",
        WIDTH,
    ),
    (r"\w*lora_rank|laurel_rank|gated_norm_rank|hc_lowrank|hidden_size_per_layer_input", 16),
    (r"mamba_d_ssm", HEADS * HEAD_DIM * 2),
    (r"mamba_n_heads|mamba_num_heads", 2 * HEADS),
    (r"(\w+_)?d_state|state_size|ssm_state_size", 16),
    (r"mamba_n_groups|n_groups|(\w+_)?time_step_rank|mamba_dt_rank", 2),
    (r"mamba_chunk_size|chunk_size", 16),
    (r"(moe_)?(num_experts|num_local_experts)|n_routed_experts|moe_num_experts", 4),
    (r"num_experts_per_tok(en)?|moe_topk|moe_top_k|moe_k", 2),
    (r"n_group|topk_group|num_expert_group", 1),
    (r"n_shared_experts|num_shared_experts|moe_num_shared_experts|zero_expert_num", 1),
    (r"first_k_dense_replace|num_dense_layers|num_kv_shared_layers|moe_layer_start_index", 1),
    (r"(\w+_)?sliding_window(_size)?|attention_window_size|local_attention", WINDOW),
    (r"attention_chunk_size|window_size", WINDOW),
    (
        r"(t2u_)?max_position_embeddings|n_positions|n_ctx|max_seq_len|max_sequence_length|"
        r"max_(source|target)_positions|seq_length|num_position_embeddings|model_max_length|"
        r"original_max_position_embeddings|position_bias_max_distance|log_scaling_n_floor",
        LONGEST,
    ),
    (r"index_topk|index_block_size", 16),
    (r"index_topk_blocks", 2),
    (r"image_size|crop_size", 32),
    (r"patch_size", 8),
    (r"num_query_tokens|latent_query_num|resampler_n_latents|num_centroids", 16),
    (r"num_conv_pos_embedding_groups", 2),
    (r"base_channels", 32),
)
# Fields without a default that some models cannot do without.
_WHERE_NONE = {
    "head_dim": HEAD_DIM,
    "num_key_value_heads": HEADS // 2,
    "num_key_value_groups": 2,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "linear_num_value_heads": HEADS,
    "linear_num_key_heads": HEADS // 2,
    "linear_key_head_dim": HEAD_DIM,
    "linear_value_head_dim": HEAD_DIM,
}
_LAYER_COUNTS = re.compile(
    r"num_hidden_layers|n_layers?|(\w+_)?num_layers|depth|layers|num_blocks|(\w+_)?depth|"
    r"(\w+_)?(encoder|decoder)_layers|\w*num_hidden_layers|num_layers_per_stack"
)
_LARGE_WEIGHTS = re.compile(r"initializer_range|init_std|initializer_factor|init_method_std")
_ROTARY_LISTS = ("mrope_section", "xdrope_section")


def tiny_config(kind: type[PreTrainedConfig], **changes: Any) -> PreTrainedConfig:
    """Return a config of a class with every size small and everything else as by default.

    Fields that hold one value a layer keep the values of the layers that are left: one of every
    kind that the default has.
    """
    return _shrink(kind(), changes)


def _shrink(default: PreTrainedConfig, changes: dict[str, Any]) -> PreTrainedConfig:
    accepted = inspect.signature(type(default).__init__).parameters
    layers = _kept_layers(default)
    values: dict[str, Any] = {}
    ids = iter(range(ORDINARY_IDS[1] + 4, VOCABULARY))
    renamed = {stored: name for name, stored in default.attribute_map.items()}
    for stored, value in vars(default).items():
        name = stored if stored in accepted else renamed.get(stored, stored)
        if name.startswith("_") or name not in accepted:
            continue
        small = _small(default, name, value, layers, ids)
        if isinstance(value, PreTrainedConfig):
            inner = {
                key.removeprefix(f"{name}__"): given
                for key, given in changes.items()
                if key.startswith(f"{name}__")
            }
            small = _shrink(value, inner)
        if small is not value:
            values[name] = small
    values.update({key: value for key, value in changes.items() if "__" not in key})
    return type(default)(**values)


def _small(default: PreTrainedConfig, name: str, value: Any, layers: list[int], ids: Any) -> Any:
    """Return the small value of a field, or the very value that it has."""
    if isinstance(value, bool):
        return value
    if "key_value_heads" in name and vars(default).get("kv_lora_rank") is not None:
        return HEADS
    if value is None:
        return _WHERE_NONE.get(name)
    if isinstance(value, (list, tuple)):
        if name == "eos_token_id":
            return 2
        if layers and len(value) == _count(default):
            return type(value)(value[index] for index in layers)
        return value
    if isinstance(value, dict) and name.startswith("rope"):
        return _small_rope(value, _head_dim(default))
    if isinstance(value, float):
        return 0.2 if _LARGE_WEIGHTS.fullmatch(name) else value
    if not isinstance(value, int):
        return value
    if _LAYER_COUNTS.fullmatch(name):
        return len(layers) if layers and value == _count(default) else min(value, 2)
    for pattern, small in _RULES:
        if re.fullmatch(pattern, name):
            return small if value else value
    if re.fullmatch(r"\w*_token_(id|index)|\w*_token_index", name):
        return next(ids, VOCABULARY - 1)
    return value


def _count(config: PreTrainedConfig) -> int:
    """Return the number of layers, 0 if a config does not tell."""
    for name in ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers"):
        count = getattr(config, name, None)
        if isinstance(count, int):
            return count
    return 0


def _kept_layers(config: PreTrainedConfig) -> list[int]:
    """Return the layers that stay: the first of every kind, and at least two."""
    count = _count(config)
    lists = [
        value
        for name, value in vars(config).items()
        if isinstance(value, (list, tuple)) and len(value) == count and not name.startswith("_")
    ]
    first: dict[tuple[str, ...], int] = {}
    for index in range(count):
        first.setdefault(tuple(str(values[index]) for values in lists), index)
    kept = sorted(first.values())[:_MOST_LAYERS]
    others = [index for index in range(count) if index not in kept]
    return sorted(kept + others[: max(0, 2 - len(kept))])


def _head_dim(config: PreTrainedConfig) -> int:
    given = vars(config).get("head_dim")
    if isinstance(given, int):
        return given
    width, heads = (getattr(config, x, None) for x in ("hidden_size", "num_attention_heads"))
    return width // heads if isinstance(width, int) and isinstance(heads, int) else 128


def _small_rope(rope: dict[str, Any], head_dim: int) -> dict[str, Any]:
    """Scale the sections of a rotary embedding with several axes to the small head dimension."""
    scaled: dict[str, Any] = {}
    for key, value in rope.items():
        if isinstance(value, dict):
            scaled[key] = _small_rope(value, head_dim)
        elif key in _ROTARY_LISTS and isinstance(value, (list, tuple)):
            scaled[key] = _scaled_sections(list(value), HEAD_DIM / head_dim)
        elif key == "original_max_position_embeddings":
            scaled[key] = LONGEST
        else:
            scaled[key] = value
    return scaled


def _scaled_sections(sections: list[int], factor: float) -> list[int]:
    total = max(1, round(sum(sections) * factor))
    small = [int(section * factor) for section in sections]
    for index in range(total - sum(small)):
        small[index % len(small)] += 1
    return small
