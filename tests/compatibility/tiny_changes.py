"""What the tiny configs of single Hugging Face models need beyond the general rules."""

from typing import Any

_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_AXES = {**_ROPE, "mrope_section": [2, 3, 3]}
_TWO_ROPES = {"full_attention": _ROPE, "sliding_attention": _ROPE}
_INDEXER = {
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 32,
    "indexer_compress_ratio": 4,
}
_NARROW_WINDOWS = {
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 4,
    "swa_q_lora_rank": 16,
    "swa_kv_lora_rank": 16,
    "swa_head_dim": 16,
    "swa_qk_nope_head_dim": 8,
    "swa_v_head_dim": 16,
}

# Name of the config class: values for its fields; two underscores lead into a sub-config.
CHANGES: dict[str, dict[str, Any]] = {
    "BambaConfig": {"attn_layer_indices": [1]},
    "ChameleonConfig": {"vocabulary_map": {"<image>": 100}},
    "CohereCompassConfig": {"text_config__rope_parameters": _TWO_ROPES},
    "CohereCompassTextConfig": {"rope_parameters": _TWO_ROPES},
    "DbrxConfig": {"attn_config__rope_theta": 10000.0, "attn_config__clip_qkv": 8.0},
    "DeepseekOcr2Config": {"text_config__mlp_layer_types": ["dense", "sparse"]},
    "Dots3NoteConfig": {
        "vision_config__adapter_in_dim": 64,
        "audio_config__adapter_input_size": 64,
        **{f"text_config__{name}": value for name, value in _NARROW_WINDOWS.items()},
    },
    "Dots3NoteTextConfig": _NARROW_WINDOWS,
    "Emu3Config": {"vocabulary_map": {"<image>": 100}},
    "Ernie4_5_VLMoeConfig": {"text_config__rope_parameters": {**_ROPE, "mrope_section": [3, 3, 2]}},
    "FunAsrNanoConfig": {"adaptor_config__intermediate_size": 16},
    "Gemma3nTextConfig": {"intermediate_size": [64] * 4},
    "Glm4vMoeConfig": {
        "text_config__rope_parameters": _ROPE
        | {"mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5}
    },
    "GPTNeoConfig": {"num_layers": 2, "attention_types": [[["global", "local"], 1]]},
    "GraniteMoeHybridConfig": {"layer_types": ["mamba", "attention"]},
    "HrmTextConfig": {"num_hidden_layers": 2, "num_layers_per_stack": None},
    "HunYuanVLConfig": {"text_config__rope_parameters": {**_ROPE, "xdrope_section": [2, 2, 2, 2]}},
    "JambaConfig": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "Lfm2MoeConfig": {"layer_types": ["conv", "full_attention"]},
    "LongcatFlashConfig": {"head_dim": 8, "qk_rope_head_dim": 8},
    "Mamba2Config": {"num_heads": 8, "head_dim": 16, "n_groups": 2},
    "Molmo2Config": {"adapter_config__vision_feature_layer": [1, 0]},
    "MoonshineConfig": {"encoder_num_key_value_heads": 4, "decoder_num_key_value_heads": 4},
    "MusicgenConfig": {"decoder__num_codebooks": 1},
    "MusicgenDecoderConfig": {"num_codebooks": 1},
    "MusicgenMelodyDecoderConfig": {"num_codebooks": 1},
    "NemotronH_Omni_Reasoning_V3_Config": {"vision_config__video_temporal_patch_size": 2},
    "Qwen2_5OmniConfig": {
        "enable_audio_output": False,
        "thinker_config__text_config__rope_parameters": _AXES,
    },
    "Qwen3OmniMoeConfig": {"enable_audio_output": False},
    "Qwen4ExpConfig": {f"text_config__{name}": value for name, value in _INDEXER.items()},
    "Qwen4ExpTextConfig": _INDEXER,
    "RecurrentGemmaConfig": {"num_hidden_layers": 3},
    "ReformerConfig": {
        "is_decoder": True,
        "axial_pos_shape": [16, 16],
        "axial_pos_embds_dim": [32, 32],
    },
    "Step3p7Config": {"text_config__sliding_window": 24},
    "XmodConfig": {"default_language": "en_XX"},
    "ZambaConfig": {
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "attention_hidden_size": 128,
        "attention_head_dim": 32,
    },
    "ZayaConfig": {"num_experts_per_tok": 1},
    **{
        f"{name}Config": {"text_config__rope_parameters": _AXES}
        for name in (
            *("Glm46V", "Glm4v", "GlmOcr", "PaddleOCRVL", "Qwen2VL", "Qwen2_5_VL"),
            "Qwen2_5OmniThinker",
        )
    },
}
